"""The kernels as operations of torch, which eager code, compiled graphs and CUDA call in the same way.

To add a kernel: write the loop in ``kernels/<module>.py``, the launch of its CUDA version with the same arguments in
``kernels/cuda/<module>.py``, and one line at the end of this file. A kernel without a version for CUDA has
``for_cuda=False``.
"""

from __future__ import annotations

import copy
import itertools
import re
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

# what loops take as it is; isinstance(each, Tensor) takes several times as long for these
_NOT_TENSORS = frozenset((np.ndarray, int, float, bool))
_NUMPY = {torch.bool: np.bool_, torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
# The arrays of the tensors of states, by the id of the tensor: in graphs, making them took half of the time of a draw.
_ARRAYS: dict[int, np.ndarray] = {}
# torch allows each name once per process: a second import, after the removal from sys.modules, uses others.
_NAMES = itertools.chain(["torchrl_replay_ext"], (f"torchrl_replay_ext_{number}" for number in itertools.count(2)))
_NAMESPACE = next(name for name in _NAMES if not hasattr(getattr(torch.ops, name), "tree_root"))
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


class Kernel:
    """An operation on flat arrays that writes its results to its arguments.

    Eager code calls the loop, or its version for CUDA, directly, which takes a tenth of the time of torch's dispatcher.
    Graphs call the operation ``torch.ops.torchrl_replay_ext.<module>_<function>``. Numba and Triton are imported
    when the first kernel runs.

    Args:
        name: ``"<module>.<function>"`` of the loop.
        arguments: the arguments of the loop in the notation of ``torch.library``; ``Tensor(a!)`` is changed in place.
            The first one is a tensor. Tensors must be contiguous. In eager code on the CPU they may also
            be NumPy arrays.
        for_cuda: True (default) if there is a version for CUDA. If not, the state lies on the CPU.
    """

    def __init__(self, name: str, arguments: str, *, for_cuda: bool = True):
        self._name, self._loop, self._launch, operation = name, None, None, name.replace(".", "_")
        _library.define(f"{operation}({arguments}) -> ()")
        _library.impl(operation, self._on_cpu, "CPU")
        if for_cuda:
            _library.impl(operation, self._on_cuda, "CUDA")
        torch.library.register_fake(f"{_NAMESPACE}::{operation}", lambda *_: None, lib=_library)
        self._operation = getattr(getattr(torch.ops, _NAMESPACE), operation).default

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel."""
        first = arguments[0]
        if type(first) is np.ndarray:
            # as _on_cpu, without another call
            (self._loop or self.loop)(*[each if type(each) in _NOT_TENSORS else each.numpy() for each in arguments])
        elif torch.compiler.is_dynamo_compiling():
            self._operation(*arguments)
        elif first.is_cpu:
            self._on_cpu(*arguments)
        elif first.is_cuda:
            self._on_cuda(*arguments)
        else:
            self._operation(*map(as_tensor, arguments))

    @property
    def loop(self) -> Callable[..., None]:
        """The compiled loop."""
        if self._loop is None:
            self._loop = self._implementation("torchrl_replay_ext.kernels")
        return self._loop

    def _implementation(self, package: str) -> Callable[..., None]:
        module, function = self._name.split(".")
        return getattr(import_module(f"{package}.{module}"), function)

    def _on_cpu(self, *arguments: Any) -> None:
        known, arrays = {} if Views.may_have_moved else _ARRAYS, []
        for each in arguments:
            if type(each) not in _NOT_TENSORS:
                array = known.get(id(each))
                each = each.numpy() if array is None else array
            arrays.append(each)
        (self._loop or self.loop)(*arrays)

    def _on_cuda(self, *arguments: Any) -> None:
        if self._launch is None:
            self._launch = self._implementation("torchrl_replay_ext.kernels.cuda")
        device = arguments[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # Triton launches on the current device
            with torch.cuda.device(device):
                self._launch(*arguments)
        else:
            self._launch(*arguments)


class Views:
    """A state as kernels take it: in eager code on the CPU tensors become NumPy arrays, which are made only once.

    Args:
        *parts: tensors, which stay the same objects, and numbers. The memory of a tensor moves only when it is pickled,
            to be shared with another process. The first part is a tensor.
    """

    # True once a state was pickled in this process
    may_have_moved = False

    def __init__(self, *parts: Tensor | float):
        tensors = [each for each in parts if isinstance(each, Tensor)]
        self._parts, self._is_cpu = [*parts], tensors[0].is_cpu
        # empty tensors have no memory that could move
        self._tensors = [each for each in tensors if each.numel()]
        self._addresses: list[int] = []
        self._arrays: list[Any] | None = None
        for tensor in tensors if self._is_cpu else ():
            if id(tensor) not in _ARRAYS:
                # an array of the tensor itself would keep it alive
                _ARRAYS[id(tensor)] = tensor.detach().numpy()
                weakref.finalize(tensor, _ARRAYS.pop, id(tensor), None)

    def __call__(self) -> list[Any]:
        """The parts, tensors perhaps as arrays."""
        if torch.compiler.is_dynamo_compiling() or not self._is_cpu:
            return self._parts
        if self._arrays is None or Views.may_have_moved:
            addresses = [tensor.data_ptr() for tensor in self._tensors]
            if self._arrays is None or addresses != self._addresses:
                self._arrays = [each.numpy() if isinstance(each, Tensor) else each for each in self._parts]
                self._addresses = addresses
        return self._arrays

    def __deepcopy__(self, memo: dict[int, Any]) -> Views:
        return Views(*copy.deepcopy(self._parts, memo))

    def __getstate__(self) -> dict[str, Any]:
        Views.may_have_moved = True
        return {**vars(self), "_arrays": None}


def empty(like: Any, count: int, dtype: torch.dtype) -> Any:
    """Uninitialized numbers [count], an array if ``like`` is one, else a tensor on the device of ``like``."""
    if type(like) is np.ndarray:
        return np.empty(count, _NUMPY[dtype])
    return torch.empty(count, dtype=dtype, device=like.device)


def cast(numbers: Any, dtype: torch.dtype) -> Any:
    """An array or a tensor in another dtype."""
    return numbers.astype(_NUMPY[dtype], copy=False) if type(numbers) is np.ndarray else numbers.to(dtype)


def as_tensor(numbers: Any) -> Tensor:
    """A tensor with the memory of an array; a tensor itself."""
    return torch.from_numpy(numbers) if type(numbers) is np.ndarray else numbers


_TREE = "Tensor leaves, Tensor nodes, Tensor pages, int capacity, "

tree_root = Kernel("tree.root", "Tensor nodes, Tensor(a!) value")
tree_get = Kernel("tree.get", "Tensor leaves, Tensor pages, int capacity, Tensor index, Tensor(a!) mass")
tree_draw = Kernel("tree.draw", _TREE + "Tensor u, Tensor(a!) leaf, Tensor(b!) mass")
tree_find = Kernel("tree.find", _TREE + "Tensor target, Tensor(a!) leaf, Tensor(b!) mass")
tree_prefix = Kernel("tree.prefix", _TREE + "Tensor index, Tensor(a!) total")
tree_write = Kernel(
    "tree.write",
    "Tensor(a!) leaves, Tensor(b!) nodes, Tensor(c!) minima, Tensor pages, int capacity, Tensor index, Tensor mass",
)
tree_write_power = Kernel(
    "tree.write_power",
    "Tensor(a!) leaves, Tensor(b!) nodes, Tensor(c!) minima, Tensor pages, int capacity, Tensor index, Tensor d, "
    "Tensor alpha",
)
tree_rebuild = Kernel("tree.rebuild", "Tensor leaves, Tensor(a!) nodes, Tensor(b!) minima, Tensor pages, int capacity")
tree_refresh_maxima = Kernel("tree.refresh_maxima", "Tensor leaves, Tensor(a!) maxima, int capacity, Tensor index")
tree_rebuild_maxima = Kernel("tree.rebuild_maxima", "Tensor leaves, Tensor(a!) maxima, int capacity")

rows_drawn = Kernel(
    "rows.drawn",
    "Tensor generation, Tensor slots, Tensor density, Tensor smallest, Tensor beta, Tensor number, "
    "Tensor(a!) drawn_at, Tensor(b!) draws, Tensor(c!) weight, Tensor(d!) stamp",
)
# the fields of PowerMasses
_POWER = "Tensor(h!) leaves, Tensor(i!) nodes, Tensor(j!) minima, Tensor pages, int capacity, Tensor alpha, "
rows_record = Kernel(
    "rows.record",
    "Tensor(a!) generation, Tensor(b!) number, Tensor(c!) drawn_at, Tensor(d!) d, Tensor largest, "
    + _POWER
    + "Tensor slots, bool stays",
)
rows_update = Kernel(
    "rows.update",
    "Tensor generation, Tensor drawn_at, Tensor draws, Tensor(b!) d, Tensor(c!) largest, Tensor(d!) counts, "
    "Tensor limit, float eps, float smallest, bool squared, "
    + _POWER
    + "Tensor slots, Tensor error, Tensor stamp, bool refuses, Tensor(e!) kept, Tensor(f!) kept_d, Tensor(g!) result",
)

# the arrays of an EpisodeIndex
_EPISODES = (
    "Tensor d_leaves, Tensor d_nodes, Tensor d_pages, int d_capacity, Tensor position_of, int num_lanes, int span, "
    "Tensor lane_total, Tensor episode, Tensor start_of, Tensor is_finished, Tensor updated_at, Tensor totals, "
    "Tensor maxima, int least_largest, Tensor generation"
)
reaper_reliability = Kernel("reaper.reliability", "Tensor slots, Tensor(a!) result, " + _EPISODES)
reaper_smallest = Kernel("reaper.smallest", "Tensor masses, Tensor omega, Tensor(a!) result, " + _EPISODES)
reaper_draw = Kernel(
    "reaper.draw",
    "Tensor seed, Tensor omega, " + _TREE + "Tensor(a!) leaf, Tensor(b!) density, " + _EPISODES,
)

_MEMORY = "Tensor(a!) lane_episode, Tensor(b!) lane_next, Tensor(c!) count, Tensor(d!) free_records, "
_MEMORY += "Tensor(e!) free_pages, "
_SUMS = "Tensor(f!) d_leaves, Tensor(g!) d_nodes, Tensor(h!) d_pages, int d_capacity, Tensor(i!) position_of, "
_SUMS += "int num_lanes, int span, Tensor(j!) lane_total, Tensor(k!) episode, Tensor(l!) start_of, "
_SUMS += "Tensor(m!) is_finished, Tensor(n!) updated_at, Tensor(o!) totals, Tensor(p!) maxima"
# the arguments of ``lanes.assign``
_ASSIGNED = (
    "Tensor(s!) lanes, Tensor(t!) interrupted, Tensor(u!) result, Tensor slots, Tensor trajectory, Tensor ended, "
    "Tensor initial, bool is_assigned, int strictness, "
)

episodes_write = Kernel(
    "episodes.write",
    _ASSIGNED + "Tensor finished, Tensor d, Tensor num_writes, Tensor(v!) changes, " + _MEMORY + _SUMS,
    for_cuda=False,
)
episodes_remove = Kernel(
    "episodes.remove", "Tensor slots, bool stops, Tensor(v!) changes, " + _MEMORY + _SUMS, for_cuda=False
)
episodes_apply = Kernel("episodes.apply", "Tensor changes, int num_removed, Tensor d, Tensor num_writes, " + _SUMS)
episodes_update = Kernel("episodes.update", "Tensor slots, Tensor d, Tensor number, " + _SUMS)

slices_write = Kernel(
    "slices.write",
    _ASSIGNED + "Tensor(i!) changes, bool is_padded, Tensor(a!) time, Tensor(b!) following, Tensor(c!) recent, "
    "Tensor(d!) rows, Tensor(e!) run, Tensor(h!) firsts, Tensor(f!) leaves, Tensor(g!) nodes, Tensor pages, "
    "int capacity",
    for_cuda=False,
)
slices_walk = Kernel("slices.walk", "Tensor start, Tensor following, Tensor leaves, Tensor(a!) slots, Tensor(b!) mask")

_RANK = "Tensor(a!) bucket, Tensor(b!) place, Tensor(c!) members, Tensor(d!) start, Tensor(e!) room, "
_RANK += "Tensor(f!) counts, Tensor(g!) top"

rank_move = Kernel("rank.move", _RANK + ", Tensor slots, Tensor d")
rank_draw = Kernel(
    "rank.draw",
    "Tensor members, Tensor start, Tensor counts, int size, Tensor cumulative, Tensor alpha, Tensor u, "
    "Tensor(a!) slot, Tensor(b!) density, Tensor(c!) smallest",
)
rank_rebuild = Kernel("rank.rebuild", _RANK)
rank_find = Kernel("rank.find", "Tensor members, Tensor start, Tensor counts, int size, Tensor rank, Tensor(a!) slot")
rank_rank_of = Kernel(
    "rank.rank_of", "Tensor bucket, Tensor place, Tensor members, Tensor counts, Tensor slots, Tensor(a!) rank"
)
rank_tabulate = Kernel("rank.tabulate", "Tensor(a!) cumulative, Tensor(b!) exponent, Tensor alpha, float step")

# the arrays of EventTables
_EVENTS = (
    "Tensor(g!) slot_at, Tensor(h!) links, Tensor(i!) position_of, Tensor(j!) heads, Tensor(k!) counts, "
    "Tensor begins, Tensor(l!) number, Tensor(m!) step_before, Tensor(n!) free, Tensor(o!) counters, Tensor(p!) journal"
)
_READ_EVENTS = re.sub(r"\(\w!\)", "", _EVENTS)
events_write = Kernel(
    "events.write",
    "Tensor(a!) last_steps, Tensor(c!) cut, Tensor(b!) slots, Tensor stream, Tensor trajectory, Tensor ends, "
    "Tensor starts, Tensor occurred, Tensor table_of, Tensor history, " + _EVENTS,
    for_cuda=False,
)
events_remove = Kernel("events.remove", "Tensor slots, " + _EVENTS, for_cuda=False)
events_order = Kernel("events.order", "Tensor(a!) result, int table, " + _READ_EVENTS, for_cuda=False)
events_earlier = Kernel("events.earlier", "Tensor(a!) slots, int slot, int number, " + _READ_EVENTS, for_cuda=False)
events_set_masses = Kernel(
    "events.set_masses",
    "Tensor(a!) leaves, Tensor(b!) nodes, Tensor pages, Tensor d, Tensor alpha, Tensor slots, Tensor slot_at, "
    "Tensor position_of, Tensor counts, Tensor journal, int begin, int end",
)
events_mixture = Kernel(
    "events.mixture", "Tensor slots, Tensor per_mass, Tensor leaves, Tensor position_of, Tensor(a!) probability"
)
events_draw = Kernel(
    "events.draw",
    "Tensor seed, Tensor shares, Tensor min_sizes, int allocation, Tensor leaves, Tensor nodes, Tensor pages, "
    "bool is_uniform, Tensor counts, Tensor begins, Tensor slot_at, Tensor position_of, bool is_mixed, "
    "Tensor(a!) table, Tensor(b!) eta, Tensor(c!) slots, Tensor(d!) density, Tensor(e!) probability",
)

frames_write = Kernel(
    "frames.write",
    "Tensor slots, Tensor trajectory, Tensor before, Tensor after, Tensor(a!) streams, Tensor(b!) last, "
    "Tensor(c!) held, Tensor(d!) frames, Tensor(e!) ids, Tensor(f!) references, Tensor(g!) free, Tensor(h!) places",
    for_cuda=False,
)
