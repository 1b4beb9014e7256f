"""An accelerator without hardware: its tensors hold their values on the CPU, and each wait for it is counted.

    device = EmulatedDevice("torchrl_replay_ext")
    with device:
        x = torch.arange(4, device="emulated")
        x + torch.ones(4)     # DeviceMismatchError, as on a real device
        float(x.sum())        # counted in device.waits, with file and line

Every operation gives the result that it would give on the CPU, gradients included. An emulated device differs from the
CPU in three ways:

* An operation on tensors of two devices is an error. As on CUDA, a 0-dim CPU tensor may stand for a number.
* Whatever makes the host wait for the device is counted, with the line that did it: values that are read (``item``,
  ``bool``, copies to the CPU), results whose shape depends on values (``nonzero``, masks as indices, ``unique``),
  operations that read their arguments (``index_fill`` with a tensor as the value, ``isin``), and blocking copies to the
  device, also those of single numbers (``x[0] = 1.0``). These are the cases that ``torch.cuda.set_sync_debug_mode``
  reports. A copy to the CPU always counts, since its result must be waited for.
* Each operation that would launch a kernel is counted.

Gradients need a process whose first backward pass comes after the device was made, and which ends with ``leave()``.
Streams, CUDA graphs and other processes are not emulated. The device is registered with torch once per process, under
torch's key for additional backends (PrivateUse1), and reports that it is available only inside the ``with`` block.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import tensordict
import torch
import torchrl
from tensordict import MemoryMappedTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

NAME = "emulated"
# Lines of these packages are reported as places, besides those of the packages that the caller names.
LIBRARIES = (torchrl, tensordict)

_aten = torch.ops.aten
_READS = tuple(
    getattr(_aten, name)
    for name in (
        "_local_scalar_dense",
        "nonzero",
        "equal",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "is_nonzero",
        "_linalg_check_errors",
    )
)
# These read a 0-dim tensor that is given as the value.
_FILLS = tuple(getattr(_aten, name) for name in ("index_fill", "index_fill_", "masked_fill", "masked_fill_"))
_GATHERS = (_aten.index, _aten._unsafe_index)
_SCATTERS = (_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put)
# Not pointwise, but they take a 0-dim CPU tensor as a number.
_TAKE_NUMBERS = (
    *_FILLS,
    *(getattr(_aten, name) for name in ("where", "fill_", "scatter_", "clamp", "clamp_", "clamp_max", "clamp_min")),
)
_ALLOCATES = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


class DeviceMismatchError(Exception):
    """The operands of an operation are on different devices. No RuntimeError, since some code catches those."""


class EmulatedTensor(torch.Tensor):
    """A tensor on the emulated device; ``values`` holds its content, on the CPU."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> EmulatedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        tensor.values = values
        return tensor

    def tolist(self) -> Any:
        EmulatedDevice.current.wait("tolist")
        return self.values.tolist()

    def __setitem__(self, index: Any, value: Any) -> None:
        # torch makes a CPU tensor of a number that is assigned on CUDA, but not of one on other devices
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=self.dtype)
        super().__setitem__(index, value)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedTensor:
        copied = memo[id(self)] = EmulatedTensor(self.values.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: int) -> Any:
        return EmulatedTensor, (self.values.detach(), self.requires_grad)

    def __repr__(self, **_: Any) -> str:
        return f"EmulatedTensor({self.values})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return EmulatedDevice.current.run(function, args, kwargs or {})


_Generator = torch.Generator
# The addresses of the generators that were made for the device: an operation is handed a new Python object for them.
_generators: WeakValueDictionary[int, torch.Generator] = WeakValueDictionary()


class EmulatedGenerator(torch.Generator):
    """A random generator that reports the emulated device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return _Generator(device)
        generator = super().__new__(cls)
        _generators[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


class _Module(_DummyBackendModule):
    """The module ``torch.emulated``."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """The CPU's generator draws the numbers."""

    def synchronize(self, device: Any = None) -> None:
        EmulatedDevice.current.wait("synchronize")

    def is_available(self) -> bool:
        return EmulatedDevice.depth > 0


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return EmulatedDevice.depth > 0


class EmulatedDevice(TorchDispatchMode):
    """The device, while the ``with`` block lasts.

    Args:
        packages: imported packages whose lines are reported as places of waits.

    Attributes:
        waits: how often the host had to wait for the device, by (kind, place). The place is the innermost line of the
            named packages, torchrl or tensordict.
        operations: how often each operation that launches a kernel was called.
    """

    current: EmulatedDevice
    depth = 0

    def __init__(self, *packages: str):
        super().__init__()
        if not hasattr(torch, NAME):
            _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=_Hook())
        self.waits: Counter[tuple[str, str]] = Counter()
        self.operations: Counter[str] = Counter()
        self._packages = [_directory(sys.modules[name]) for name in packages]
        self._libraries = [_directory(library) for library in LIBRARIES]

    def __enter__(self) -> EmulatedDevice:
        EmulatedDevice.current = self
        EmulatedDevice.depth += 1
        # numbers become CPU tensors first, as with torch's fake tensors
        self._lifts_cpu_tensors = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._patches = ExitStack()
        self._patches.enter_context(patch("torch.Generator", EmulatedGenerator))
        self._patches.enter_context(patch.object(MemoryMappedTensor, "__new__", staticmethod(_new_memory_mapped)))
        # for torch.load(..., weights_only=True)
        self._patches.enter_context(torch.serialization.safe_globals([EmulatedTensor]))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        result = super().__exit__(*error)
        self._patches.close()
        torch._C._set_only_lift_cpu_tensors(self._lifts_cpu_tensors)
        EmulatedDevice.depth -= 1
        return result

    def reset(self) -> None:
        """Start counting anew."""
        self.waits.clear()
        self.operations.clear()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Code in this block takes the path that it takes while CUDA captures a graph."""
        with (
            patch("torch.cuda.is_initialized", return_value=True),
            patch("torch.cuda.is_current_stream_capturing", return_value=True),
        ):
            yield

    def wait(self, kind: str) -> None:
        """Count that the host waits for the device."""
        roots, frame, place = (*self._packages, *self._libraries), sys._getframe(1), "elsewhere"
        while frame is not None and place == "elsewhere":
            file = frame.f_code.co_filename
            if file != __file__ and file.startswith(roots):
                root = next(root for root in roots if file.startswith(root))
                place = f"{Path(file).relative_to(Path(root).parent)}:{frame.f_lineno}"
            frame = frame.f_back
        self.waits[kind, place] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operation on the CPU, and count what it costs on a device."""
        if _is_composite(function):
            # torch takes these apart itself, but not for tensors of inference mode
            TorchDispatchMode.__enter__(self)
            try:
                return function.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        operation = function.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, EmulatedTensor)]
        others = [tensor for tensor in tensors if not isinstance(tensor, EmulatedTensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        is_on_device = bool(ours) if target is None else target.type == NAME
        if is_on_device or ours:
            self._inspect(function, args, kwargs, target, ours, others)
        if is_on_device and operation not in _ALLOCATES and not function.is_view:
            self.operations[str(operation)] += 1
        kwargs = dict(kwargs)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        generator = kwargs.get("generator")
        if generator is not None and is_on_device != (generator._cdata in _generators):
            raise DeviceMismatchError(f"{function}: the generator is on another device")
        result = function(*tree_map(_values, args), **tree_map(_values, kwargs))
        if ours and torch.Tag.inplace_view in function.tags:
            _update_shape(function, args, kwargs)
        # an operation in place returns its operand
        known = {id(tensor.values): tensor for tensor in ours} | {id(tensor): tensor for tensor in others}

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return known.get(id(value)) if id(value) in known else EmulatedTensor(value) if is_on_device else value

        return tree_map(placed, result)

    def _inspect(self, function: Any, args: Any, kwargs: Any, target: Any, ours: list, others: list) -> None:
        """Count waits; DeviceMismatchError for operands that a real device refuses."""
        operation = function.overloadpacket
        if operation is _aten._to_copy:
            if target is not None and (target.type == NAME) != bool(ours):
                self._count_copy(target.type == NAME, args[0], kwargs.get("non_blocking", False))
        elif operation in (_aten.copy_, _aten._foreach_copy_):
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            targets, sources = args[:2] if operation is _aten._foreach_copy_ else ([args[0]], [args[1]])
            for own, source in zip(targets, sources, strict=True):
                if isinstance(own, EmulatedTensor) != isinstance(source, EmulatedTensor):
                    self._count_copy(isinstance(own, EmulatedTensor), source, non_blocking)
        elif operation in _READS:
            self.wait("item" if operation is _aten._local_scalar_dense else operation.__name__)
        elif operation in _GATHERS or operation in _SCATTERS:
            self._inspect_indices(function, args)
        elif ours and others:
            takes_numbers = torch.Tag.pointwise in function.tags or operation in _TAKE_NUMBERS
            if not takes_numbers or any(tensor.ndim for tensor in others):
                raise _mismatch(function, ours + others)
        if _reads_arguments(function, args, kwargs):
            self.wait(operation.__name__)

    def _count_copy(self, to_device: bool, source: torch.Tensor, non_blocking: bool) -> None:
        if not to_device:
            self.wait("copy to the CPU")
        elif not non_blocking:
            self.wait("copy to the device" if source.ndim else "number to the device")

    def _inspect_indices(self, function: Any, args: Any) -> None:
        source, indices = args[0], [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        is_on_device = isinstance(source, EmulatedTensor)
        if not is_on_device and any(isinstance(index, EmulatedTensor) for index in indices):
            raise _mismatch(function, [source, *indices])
        if function.overloadpacket in _SCATTERS:
            values = args[2]
            if isinstance(values, EmulatedTensor) != is_on_device:
                if values.ndim or not is_on_device:
                    raise _mismatch(function, [source, values])
                if len(masks) == len(indices) == 1 and isinstance(masks[0], EmulatedTensor):
                    # torch fills in the number wherever the mask is True, without reading the mask
                    return
                self.wait("number to the device")
        if is_on_device:
            for index in indices:
                is_mask = any(index is mask for mask in masks)
                if isinstance(index, EmulatedTensor) and is_mask:
                    self.wait("mask as index")
                elif not isinstance(index, EmulatedTensor) and not is_mask:
                    # positions of a CPU mask are copied from pinned memory, without waiting
                    self.wait("copy to the device")


_original_new_memory_mapped = MemoryMappedTensor.__new__


def leave() -> None:
    """End this process with exit code 0, without the shutdown of the interpreter.

    A backward pass starts a thread of torch's autograd for the device. If that thread asks for Python's lock while the
    interpreter shuts down, the process aborts ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _new_memory_mapped(*arguments: Any, **named: Any) -> Any:
    # torch refuses to make an object of this subclass while a mode is active
    with _disable_current_modes():
        return _original_new_memory_mapped(*arguments, **named)


def _reads_arguments(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation reads values of its arguments on the device, to check them or to choose an algorithm."""
    operation = function.overloadpacket
    if operation in _FILLS:
        return isinstance(args[-1], EmulatedTensor)
    if operation is _aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if operation is _aten.searchsorted:
        return kwargs.get("sorter") is not None
    if operation is _aten.isin and all(isinstance(arg, torch.Tensor) for arg in args[:2]):
        # torch calls unique if there are many elements to look for
        is_short = args[1].numel() < int(10 * args[0].numel() ** 0.145)
        return args[0].numel() > 0 and not is_short and not kwargs.get("assume_unique")
    return False


def _is_composite(function: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


def _update_shape(function: Any, args: Any, kwargs: Any) -> None:
    """Change the shape of the tensor itself, as an operation in place has changed that of its values."""
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        with torch.utils._mode_utils.no_dispatch():
            function(*args, **kwargs)
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)


def _values(value: Any) -> Any:
    return value.values if isinstance(value, EmulatedTensor) else value


def _mismatch(function: Any, tensors: list[torch.Tensor]) -> DeviceMismatchError:
    where = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
    return DeviceMismatchError(f"{function}: the tensors are on different devices: {where}")


def _directory(package: ModuleType) -> str:
    assert package.__file__ is not None
    return str(Path(package.__file__).resolve().parent) + "/"
