"""The code that torch generates for a CUDA device if all tensors are there. Torch must be built for CUDA."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.emulated_device import EmulatedDevice, EmulatedTensor
from tests.kernels import (
    implementations,
    test_episode_kernels,
    test_event_kernels,
    test_rank_kernels,
    test_reaper_kernels,
    test_row_kernels,
    test_tree_kernels,
)
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.test_compiled import CASES, step
from tests.test_cuda_graphs import train
from torchrl_replay_ext import SumTree
from torchrl_replay_ext.kernels import ops

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.cuda_code import code_for_cuda

pytestmark = pytest.mark.usefixtures("from_scratch")


def assert_only_kernels(code):
    """All is computed by kernels of the GPU, in one part, without waiting."""
    assert "triton_" in code
    called = code[code.index("async_compile.wait") :]
    modules = "tree|rows|reaper|episodes|slices|rank|events"
    called = re.sub(rf"torch\.ops\.torchrl_replay_ext\.({modules})_", "our_", called)
    # torch's own kernels for norms of gradients, and the CPU's way to draw from strata, which the trace takes
    called = re.sub(r"torch\.ops\.aten\.(_foreach_norm|randperm)\.", "aten_", called)
    for foreign in ("cpp_fused", ".item()", "def partition_1(", "torch.ops."):
        assert foreign not in called
    # Triton rejects a product of an int32 index, x0 or r0_1, and a number that is out of its range
    assert not re.search(r"\d{11,}\)?\*[xr]\d", code)


@pytest.mark.parametrize("name", slow_but(["slices, uniform, two columns, not padded", "events, proportional"], CASES))
def test_steps_of_buffers_are_compiled_to_kernels_of_the_gpu(name):
    case = CASES[name]
    buffer, experience = case.buffer(), case.experience()
    for _ in range(8):
        buffer.extend(experience.take(4))
    step(buffer, experience.take(4))
    # on a GPU the host finds the episodes of a write
    extends = case.extends and not name.startswith(("reaper", "slices"))
    assert_only_kernels(code_for_cuda(lambda data: step(buffer, data, extends), experience.take(4)))


@pytest.mark.parametrize("name", slow_but(["dqn, event tables"], RUNS))
def test_updates_of_recipes_are_compiled_to_kernels_of_the_gpu(name, tmp_path, monkeypatch):
    compiled = set()

    def generated(function, cudagraphs):
        def call(*arguments):
            if function not in compiled:
                compiled.add(function)
                assert_only_kernels(code_for_cuda(function, *arguments))
            return function(*arguments)

        return call

    train(name, tmp_path, monkeypatch, generated)
    assert compiled


# --- our own kernels


def launches(kernel):
    """Whether a kernel has a version for CUDA."""
    module, name = kernel._name.split(".")
    path = f"torchrl_replay_ext.kernels.cuda.{module}"
    return find_spec(path) is not None and hasattr(import_module(path), name)


def test_each_kernel_is_compiled_for_the_gpu_with_the_arguments_of_its_calls(monkeypatch):
    """Beside the loops for the CPU, whose results the functions below check."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    target.get_current_device = target.get_current_stream = lambda *_: 0
    launch, call, called, compiled = JITFunction.run, ops.Kernel.__call__, set(), set()

    def kind_of(argument):
        if isinstance(argument, JITFunction):
            return argument
        is_tuple = isinstance(argument, tuple)
        return tuple(map(kind_of, argument)) if is_tuple else getattr(argument, "dtype", type(argument))

    def compile_only(kernel, *arguments, warmup, grid, **options):
        # not again for other sizes
        types = (kernel, kind_of(arguments), *options.items())
        if types not in compiled:
            compiled.add(types)
            assert launch(kernel, *arguments, warmup=True, grid=grid, **options).asm["cubin"]

    def on_both(kernel, *arguments):
        if launches(kernel):
            called.add(kernel._name)
            here = [each.values if isinstance(each, EmulatedTensor) else each for each in map(ops.as_tensor, arguments)]
            copies = [each.clone() if hasattr(each, "shape") else each for each in here]
            kernel._on_cuda(*copies)
        call(kernel, *arguments)

    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(ops.Kernel, "__call__", on_both)
    monkeypatch.setattr("torchrl_replay_ext.core.streams.is_traced", lambda: True)
    run = implementations.plainly
    for flag in (False, True):
        test_tree_kernels.test_all_implementations_write_the_same(run, 257, flag)
        test_tree_kernels.test_all_implementations_read_the_same(run, 257, flag)
        with EmulatedDevice("torchrl_replay_ext"):
            test_episode_kernels.test_an_accelerator_gets_the_episodes_that_the_cpu_has(
                run, torch.device("emulated"), flag, 3
            )
            test_episode_kernels.test_an_accelerator_gets_the_slices_that_the_cpu_has(
                run, torch.device("emulated"), flag, 3, flag, "any"
            )
        test_reaper_kernels.test_all_implementations_have_the_same_reliability(run, flag, 3)
        test_reaper_kernels.test_all_implementations_find_the_same_smallest_density(run, 0.5, flag, 3)
        test_reaper_kernels.test_all_implementations_draw_the_same_by_reliability(run, 0.5)
    test_tree_kernels.test_all_implementations_track_the_same_maximum(run, 257)
    test_rank_kernels.test_all_implementations_have_the_same_ranks(run)
    test_rank_kernels.some_ranks(40).rebuild(torch.rand(40), torch.ones(40, dtype=torch.bool))
    test_rank_kernels.test_the_table_of_ranks_is_filled_when_alpha_has_changed_enough(run)
    for retention, allocation in (("ring", "systematic"), ("pinned", "multinomial"), ("ring", "largest_remainder")):
        test_event_kernels.test_all_implementations_draw_the_same_from_tables(run, retention, allocation)
    for kind in (torch.int64, torch.float64):
        test_row_kernels.test_all_implementations_of_rows_do_the_same(run, kind)
    assert called == {kernel._name for kernel in implementations.KERNELS if launches(kernel)}


@pytest.mark.parametrize("order", slow_but(["forward", "shuffled"], ["forward", "reversed", "shuffled"]))
def test_kernels_in_the_interpreter_of_triton(order):
    """Also with programs and lanes in another order: a GPU has none."""
    plugin = [] if order == "forward" else ["-p", "tests.kernels.order"]
    tests = [sys.executable, "-m", "pytest", "-x", *plugin, str(Path(__file__).with_name("kernels"))]
    subprocess.run(tests, env={**os.environ, "TRITON_INTERPRET": "1", "ORDER": order}, check=True)


def test_writes_of_other_numbers_of_rows_are_not_compiled_again(monkeypatch):
    """60 writes of 1 to 300 rows, each of a new size: a variant for few rows and one for many, of two kernels."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    target.get_current_device = target.get_current_stream = lambda *_: 0
    launch, compiled = JITFunction.run, Counter()

    def compile_only(kernel, *arguments, warmup, grid, **options):
        result = launch(kernel, *arguments, warmup=True, grid=grid, **options)
        compiled[kernel.fn.__name__, result.hash] += 1

    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    numbers, one = torch.zeros(1000, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    tree = SumTree(1000, track_min=True)
    state = numbers, numbers[:1].clone(), numbers.clone(), numbers.float(), one, *tree.views(), one
    for count in range(1, 301, 5):
        ops.rows_record._on_cuda(*map(ops.as_tensor, state), torch.arange(count), True)
    assert sum(compiled.values()) == 120
    assert len(compiled) <= 4
