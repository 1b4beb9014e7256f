"""What the tests of kernels share: the implementations, and states to compare."""

import os
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.emulated_device import EmulatedTensor
from torchrl_replay_ext import Episodes, SumTree
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.slots import Slots
from torchrl_replay_ext.kernels import ops
from torchrl_replay_ext.samplers.rows import EpisodeReader

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = [kernel for kernel in vars(ops).values() if isinstance(kernel, ops.Kernel)]
ON_DEVICE = pytest.param(
    "device",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
WAYS = ["interpreter"] if INTERPRETED else ["python", "operation", ON_DEVICE]
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="Triton interprets its kernels only")
CAPACITIES = [1, 16, 17, 257]
# capacities of trees, and whether they have pages
TREES = [*[(capacity, False) for capacity in CAPACITIES], (17, True), (257, True), (5000, True)]
# rows of a draw that is compared with its distribution
ROWS = 400 if INTERPRETED else 800


def as_operation(kernel, *arguments):
    kernel._operation(*map(ops.as_tensor, arguments))


def as_interpreted(kernel, *arguments):
    # the tensors of an emulated device hold their values on the CPU
    here = [each.values if isinstance(each, EmulatedTensor) else each for each in map(ops.as_tensor, arguments)]
    (kernel._on_cuda if has_launch(kernel) else kernel._on_cpu)(*here)


def has_launch(kernel):
    """Whether a kernel has a version for CUDA."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(kernel._operation.name(), "CUDA")


def on_device(kernel, *arguments):
    """Run the kernel on the device, with copies of its arguments; on the CPU if it has no version for CUDA."""
    here = [*map(ops.as_tensor, arguments)]
    if not has_launch(kernel):
        return kernel._on_cpu(*here)
    copies = {id(each): (each, each.cuda()) for each in here if isinstance(each, torch.Tensor)}
    kernel._operation(*[copies.get(id(each), (None, each))[1] for each in here])
    for own, copy_of_it in copies.values():
        own.copy_(copy_of_it)


def scramble(*tensors):
    """Fill tensors with any numbers, as damaged states may hold."""
    for tensor in tensors:
        most = 2 ** (30 if tensor.dtype == torch.int32 else 50)
        tensor.copy_(torch.randint(-most, most, tensor.shape))


def a_tree(capacity, paged=False):
    blocks = capacity // SumTree.PAGE + 1
    tree = SumTree(capacity, track_min=not paged, num_pages=blocks if paged else None)
    tree.pages.copy_(torch.randperm(blocks)[: len(tree.pages)])
    tree.write(torch.arange(capacity), torch.randint(0, 2**40, (capacity,)))
    return tree


# of tensors and arrays, also in dicts and sequences
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def tensors_of(part):
    """The tensors of an object by name."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


def plainly(function, *arguments):
    return function(*arguments)


plainly.is_cuda = False


def some_slots(size, lanes, assigned, where="cpu"):
    return Slots(Layout((size,) if assigned else (size // lanes, lanes), torch.device(where)))


def on_cpu(state):
    """A state whose arrays and tensors are tensors on the CPU."""
    return tree_map(lambda each: ops.as_tensor(each).cpu() if hasattr(each, "shape") else each, state)


def a_reader(lanes):
    return EpisodeReader("tests", Episodes(num_streams=lanes))
