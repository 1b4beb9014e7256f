"""The kernels as operations of torch, which eager code, compiled graphs and CUDA call in the same way.

To add a kernel: write the loop in ``kernels/<module>.py``, the launch of its CUDA version with the same arguments in
``kernels/cuda/<module>.py``, and one line at the end of this file. A kernel without a version for CUDA has
``for_cuda=False``.
"""

from __future__ import annotations

import copy
import itertools
import string
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def _schema(arguments: str) -> str:
    """The arguments of a :class:`Kernel` in the notation of ``torch.library``."""
    schema, letters = [], iter(string.ascii_lowercase)
    for argument in arguments.split():
        name, _, kind = argument.partition(":")
        if name.endswith("!"):
            name, kind = name[:-1], f"Tensor({next(letters)}!)"
        schema.append(f"{kind or 'Tensor'} {name}")
    return ", ".join(schema)


class Kernel:
    """An operation on flat arrays that writes its results to its arguments.

    Eager code calls the loop, or its version for CUDA, directly, which takes a tenth of the time of torch's dispatcher.
    Graphs call the operation ``torch.ops.torchrl_replay_ext.<module>_<function>``. Numba and Triton are imported
    when the first kernel runs.

    Args:
        name: ``"<module>.<function>"`` of the loop.
        arguments: the names of the arguments of the loop, separated by spaces: ``name`` is a tensor, ``name!`` a tensor
            that is changed in place, and ``name:int`` a number (or ``float``, ``bool``). The first one is a tensor.
            Tensors must be contiguous. In eager code on the CPU they may also be NumPy arrays.
        for_cuda: True (default) if there is a version for CUDA. If not, the state lies on the CPU.
    """

    def __init__(self, name: str, arguments: str, *, for_cuda: bool = True):
        self._name, self._loop, self._launch, operation = name, None, None, name.replace(".", "_")
        _library.define(f"{operation}({_schema(arguments)}) -> ()")
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
        # in another thread, which Ctrl-C does not interrupt: half of Numba cannot be imported again
        with ThreadPoolExecutor(1) as thread:
            return getattr(thread.submit(import_module, f"{package}.{module}").result(), function)

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


_TREE = "leaves nodes pages capacity:int "

tree_root = Kernel("tree.root", "nodes value!")
tree_get = Kernel("tree.get", "leaves pages capacity:int index mass!")
tree_draw = Kernel("tree.draw", _TREE + "u leaf! mass!")
tree_find = Kernel("tree.find", _TREE + "target leaf! mass!")
tree_prefix = Kernel("tree.prefix", _TREE + "index total!")
tree_write = Kernel("tree.write", "leaves! nodes! minima! pages capacity:int index mass")
tree_rebuild = Kernel("tree.rebuild", "leaves nodes! minima! pages capacity:int")
tree_refresh_maxima = Kernel("tree.refresh_maxima", "leaves maxima! capacity:int index")
tree_rebuild_maxima = Kernel("tree.rebuild_maxima", "leaves maxima! capacity:int")

# the fields of PowerMasses
_POWER = "leaves! nodes! minima! pages capacity:int alpha "

rows_drawn = Kernel(
    "rows.drawn", "generation slots density min_density beta num_writes drawn_at! draws! weight! stamp!"
)
rows_record = Kernel("rows.record", "generation! num_writes! drawn_at! d! largest " + _POWER + "slots is_write:bool")
rows_update = Kernel(
    "rows.update",
    "generation drawn_at draws d! largest! counts! limit eps:float min_priority:float squared:bool "
    + _POWER
    + "slots error stamp refuses:bool kept! kept_d! result!",
)

# the fields of kernels.episodes.Episodes
_EPISODES = "d_leaves! d_nodes! d_pages! d_capacity:int position_of! num_lanes:int span:int lane_total! episode! "
_EPISODES += "start_of! is_finished! updated_at! totals! maxima! "
_READ_EPISODES = _EPISODES.replace("!", "") + "least_largest:int generation "

reaper_reliability = Kernel("reaper.reliability", "slots result! " + _READ_EPISODES)
reaper_smallest = Kernel("reaper.smallest", "masses d omega result! " + _READ_EPISODES)
reaper_draw = Kernel("reaper.draw", "seed omega " + _TREE + "leaf! density! " + _READ_EPISODES)

# the arguments of lanes.assign, and the fields of kernels.episodes.Memory
_ASSIGNED = "lanes! interrupted! outcome! slots trajectory ended initial is_assigned:bool strictness:int "
_MEMORY = "lane_episode! lane_next! count! free_records! free_pages! "

episodes_write = Kernel(
    "episodes.write", _ASSIGNED + "finished d num_writes changes! " + _MEMORY + _EPISODES, for_cuda=False
)
episodes_remove = Kernel("episodes.remove", "slots stops:bool changes! " + _MEMORY + _EPISODES, for_cuda=False)
episodes_apply = Kernel("episodes.apply", "changes num_removed:int d num_writes " + _EPISODES)
episodes_update = Kernel("episodes.update", "slots d number " + _EPISODES)

slices_write = Kernel(
    "slices.write",
    _ASSIGNED
    + "changes! is_padded:bool newest! following! recent! num_rows! episode_len! firsts! leaves! nodes! pages "
    + "capacity:int",
    for_cuda=False,
)
slices_walk = Kernel("slices.walk", "start following leaves slots! mask!")

_RANK = "bucket! offset! members! start! room! counts! top! "

rank_move = Kernel("rank.move", _RANK + "slots d")
rank_draw = Kernel("rank.draw", "members start counts size:int cumulative alpha u slot! density! smallest!")
rank_rebuild = Kernel("rank.rebuild", _RANK)
rank_find = Kernel("rank.find", "members start counts size:int rank slot!")
rank_rank_of = Kernel("rank.rank_of", "bucket offset members counts slots rank!")
rank_tabulate = Kernel("rank.tabulate", "cumulative! exponent! alpha step:float")

# the fields of kernels.events.Tables
_TABLES = "slot_at! links! position_of! heads! counts! begins number! step_before! free! counters! journal! "
_READ_TABLES = _TABLES.replace("!", "")

events_write = Kernel(
    "events.write",
    "last_steps! cut! slots! stream trajectory is_last is_first occurred table_of history " + _TABLES,
    for_cuda=False,
)
events_remove = Kernel("events.remove", "slots " + _TABLES, for_cuda=False)
events_order = Kernel("events.order", "result! table:int " + _READ_TABLES, for_cuda=False)
events_earlier = Kernel("events.earlier", "slots! slot:int number:int " + _READ_TABLES, for_cuda=False)
events_set_masses = Kernel(
    "events.set_masses",
    "leaves! nodes! pages d alpha slots slot_at position_of counts journal begin:int end:int",
)
events_mixture = Kernel("events.mixture", "slots per_mass leaves position_of probability!")
events_draw = Kernel(
    "events.draw",
    "seed shares min_sizes allocation:int leaves nodes pages is_uniform:bool counts begins slot_at position_of "
    "is_mixed:bool table! eta! slots! density! probability!",
)

frames_write = Kernel(
    "frames.write",
    "slots trajectory before after streams! recent! held! seen! frames! ids! references! free! targets!",
    for_cuda=False,
)
