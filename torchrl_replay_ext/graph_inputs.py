"""The properties that a compiled graph takes as fixed, of its arguments and of other values that the step reads."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase, is_tensorclass
from torch import Tensor

try:
    # torch's names of values are expressions, which may call these functions
    from torch._dynamo.guards import _get_closure_vars as guard_functions
except ImportError:
    # names that call a function are then not checked
    guard_functions = dict

# Words in torch's names of values that say how an object stores them.
_INNER = (
    "__dict__",
    "_modules",
    "_buffers",
    "_parameters",
    "_tensordict",
    "___from_numpy",
    "__closure__",
    "cell_contents",
    "__getattribute__",
)

# torch's name of a setting of a parameter group
_OPTIMIZER_SETTING = re.compile(r"(.*)\['(lr|betas|eps)'\](?:\[\d\])?")


class _TensorForm(NamedTuple):
    """The fixed properties of a tensor, all but its values. ``strides`` is None if the tensor is contiguous."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None


_Constant = bool | int | float | str

# The fixed properties of arguments. The key () has the names of the arguments, the key (name, entry, ...) an argument
# or an entry of it, containers before their entries.
Forms = dict[tuple[Any, ...], Any]


def forms_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forms:
    """The fixed properties of these arguments."""
    named = {**dict(enumerate(args)), **kwargs}
    forms: Forms = {(): named.keys()}
    for name, argument in named.items():
        _add_forms(forms, (name,), argument)
    return forms


def _form(tensor: Tensor) -> _TensorForm:
    # the stride of a dimension of size 1 has no effect
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    strides = None if tensor.is_contiguous() else tuple(stride * (size != 1) for stride, size in strides)
    return _TensorForm(tensor.shape, tensor.dtype, tensor.device, strides)


def _constant(value: Any) -> str:
    """A value that the graph treats as a constant, as text: 1 equals 1.0, and NaN does not equal itself."""
    return repr(value)


def _add_forms(forms: Forms, path: tuple[Any, ...], argument: Any) -> None:
    """Add the form of an argument, and those of its entries, to ``forms``."""
    entries: Any = ()
    if isinstance(argument, NonTensorData):
        argument = argument.data
    elif is_tensorclass(argument):
        argument = argument.to_tensordict()
    if isinstance(argument, Tensor):
        forms[path] = _form(argument)
    elif isinstance(argument, TensorDictBase):
        forms[path] = argument.batch_size
        # the entries of a lazy stack would be copies
        is_lazy = isinstance(argument, LazyStackedTensorDict)
        entries = enumerate(argument.tensordicts) if is_lazy else argument.items()
    elif isinstance(argument, list | tuple | dict):
        forms[path] = type(argument), len(argument)
        entries = argument.items() if isinstance(argument, dict) else enumerate(argument)
    else:
        forms[path] = _constant(argument if isinstance(argument, _Constant | None) else type(argument))
    for key, entry in entries:
        _add_forms(forms, (*path, key), entry)


def changed_argument(step: str, first: Forms, given: Forms) -> ValueError:
    """The error for a call whose arguments do not fit the graph."""
    if first[()] != given[()]:
        return ValueError(
            f"compile_step: {step} was compiled for {len(first[()])} arguments; call it with the same ones."
        )
    # an entry that differs, or else one that is new
    path = next((path for path in first if path not in given or given[path] != first[path]), None)
    path = next(path for path in given if path not in first) if path is None else path
    if path in first and path in given:
        before, now = _text(first[path], given[path]), _text(given[path], first[path])
    else:
        path = path[:-1]
        before, now = (
            f"the entries {[key[-1] for key in forms if key and key[:-1] == path]}" for forms in (first, given)
        )
    name, *inner = path
    place = "".join(f"entry {key!r} of " for key in reversed(inner)) + f"argument {name}"
    return ValueError(
        f"compile_step: {place} of {step} has {now}, but the graph was compiled for {before}. Make another compiled "
        "step for it, pad a batch, call contiguous() on a slice, or pass a number as a tensor."
    )


def _text(form: Any, other: Any) -> str:
    """How ``form`` differs from ``other``."""
    if isinstance(form, torch.Size):
        return f"shape {list(form)}"
    if not isinstance(form, _TensorForm):
        return str(form)
    if not isinstance(other, _TensorForm) or form.shape != other.shape:
        return f"shape {list(form.shape)}"
    if form.dtype != other.dtype:
        return f"dtype {form.dtype}"
    if form.device != other.device:
        return f"device {form.device}"
    return "contiguous memory" if form.strides is None else f"strides {form.strides}"


# Values that the step reads besides its arguments; checked after the first call, settings of optimizers at each call.


class Assumption(NamedTuple):
    """The fixed properties of a value that the step reads.

    Args:
        name: torch's name of the value, an expression with globals as G["name"] and other variables as L["name"].
        form: the properties, see _checked_form.
        same_tensor_as: name of another value that is the same tensor. Default: None.
    """

    name: str
    form: Any
    same_tensor_as: str | None = None


def _checked_form(value: Any) -> Any:
    """The fixed properties of a value; None for objects, which may be created or replaced without effect."""
    if isinstance(value, Tensor):
        return _form(value)
    if isinstance(value, _Constant):
        return _constant(value)
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else None


def assumptions_of(guards: Sequence[Any]) -> Iterator[Assumption]:
    """The assumptions of a graph, from the checks that torch would make at each call."""
    for guard in guards:
        # skip what this release of torch describes in another way
        with suppress(Exception):
            if guard.has_value:
                checks = guard.orig_guard
                is_same = guard.guard_type == "DUPLICATE_INPUT"
                same = checks.create_fn.keywords["source_b"].name if is_same else None
                yield Assumption(checks.name, _checked_form(guard.value), same)


def broken_assumptions(step: FunctionType, assumptions: Iterable[Assumption]) -> dict[Assumption, str]:
    """The assumptions that do not hold now, with the messages of the errors. Arguments are compared at each call."""
    scope = guard_functions() | _scope(step)
    broken = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for assumption in assumptions:
            # skip what cannot be evaluated
            with suppress(Exception):
                value = eval(assumption.name, scope)
                if assumption.same_tensor_as is not None and value is not eval(assumption.same_tensor_as, scope):
                    broken[assumption] = _two_tensors(step.__name__, assumption)
                elif _differ(assumption.form, form := _checked_form(value)):
                    broken[assumption] = _changed_value(step.__name__, assumption, form)
    return broken


class OptimizerSettings:
    """The settings of optimizers that a graph has read; a scheduler may change them between any two calls.

    The graph keeps numbers, and reads the value of a tensor at each call.

    Args:
        step: the step.
        assumptions: what its graph assumes.
        args, kwargs: the arguments of the first call.
    """

    def __init__(
        self, step: FunctionType, assumptions: Iterable[Assumption], args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        self._step, self._functions = step, dict(guard_functions())
        # code for a parameter group, its name, and the settings that were read
        self._groups: list[tuple[CodeType, str, dict[str, Any]]] = []
        scope = _scope(step, _arguments(step, args, kwargs))
        keys: dict[str, set[str]] = {}
        for assumption in assumptions:
            if match := _OPTIMIZER_SETTING.fullmatch(assumption.name):
                keys.setdefault(match[1], set()).add(match[2])
        for name in sorted(keys):
            # skip what cannot be evaluated
            with suppress(Exception):
                expression = compile(name, name, "eval")
                group = eval(expression, self._functions, scope)
                if "params" in group:
                    self._groups.append((expression, name, {key: group[key] for key in sorted(keys[name])}))

    def require_unchanged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """RuntimeError if a number is another one than at the first call, or replaces or is replaced by a tensor."""
        if not self._groups:
            return
        scope = _scope(self._step, _arguments(self._step, args, kwargs))
        for expression, name, settings in self._groups:
            try:
                group = eval(expression, self._functions, scope)
            except Exception:
                # a variable that was deleted: the graph still has its object
                continue
            for key, before in settings.items():
                now = group.get(key)
                if now is before or (isinstance(now, Tensor) and isinstance(before, Tensor)):
                    continue
                if isinstance(now, Tensor) or isinstance(before, Tensor) or now != before:
                    raise RuntimeError(_changed_setting(self._step.__name__, f"{_path(name)}.{key}", before, now))


def _scope(step: FunctionType, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """The variables for :func:`eval` of torch's names: globals, the closure of the step, and these arguments."""
    variables = {} if arguments is None else arguments
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            variables[name] = cell.cell_contents
    return {"G": step.__globals__, "L": variables}


def _arguments(step: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with their defaults."""
    code, defaults = step.__code__, step.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    arguments = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return arguments | (step.__kwdefaults__ or {}) | dict(zip(names, args, strict=False)) | kwargs


def _differ(before: Any, now: Any) -> bool:
    """Whether forms differ. A change between two objects, or between None and an object, is ignored."""
    has_tensor = isinstance(before, _TensorForm) or isinstance(now, _TensorForm)
    return before != now and (has_tensor or None not in (before, now))


def _two_tensors(step: str, assumption: Assumption) -> str:
    names = f"{_path(assumption.name)} and {_path(assumption.same_tensor_as or '')}"
    return (
        f"compile_step: {names} were one tensor before the first call of {step} and are two after it, but the graph "
        "reads one for both. Let them start as two tensors, such as zeros and zeros.clone()."
    )


def _changed_value(step: str, assumption: Assumption, now: Any) -> str:
    name, before = _path(assumption.name), assumption.form
    what = (
        f"compile_step: the first call of {step} changed {name} from {_text(before, now)} to {_text(now, before)}, but "
        "the graph keeps what it read before."
    )
    if "_value_estimator" in name:
        return f"{what} Use loss.make_value_estimator(gamma=..., device=...) before the first call."
    return (
        f"{what} Keep what changes in a tensor, and change it in place. If the step does not depend on the old value, "
        "set it before the first call to what the step leaves there."
    )


def _changed_setting(step: str, setting: str, before: Any, now: Any) -> str:
    remedies = {
        "lr": " Make the optimizer with a tensor on the device of the parameters, lr=torch.tensor(...): schedulers "
        "change its value, which the graph reads.",
        "betas": " Schedulers that cycle the momentum need cycle_momentum=False.",
    }
    return (
        f"compile_step: {setting} was {before} when {step} was compiled and is {now} now, but the graph keeps what it "
        f"read before.{remedies.get(setting.rpartition('.')[2], '')}"
    )


def _path(name: str) -> str:
    """A name of torch in short form, such as loss._value_estimator.gamma."""
    # the first L or G tells globals from other variables
    variable = re.split(r"\b[LG]\[", name, maxsplit=1)[-1]
    return ".".join(word for word in re.findall(r"\w+", variable) if word not in _INNER)
