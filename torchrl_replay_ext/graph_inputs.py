"""The properties of its arguments that a compiled graph takes as fixed."""

from __future__ import annotations

from typing import Any

from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase, is_tensorclass
from torch import Tensor

_Constant = bool | int | float | str

# The fixed properties of arguments, by their names. The key () has the names of the arguments, the key
# (name, entry, ...) an argument or an entry of it, containers before their entries.
Forms = dict[tuple[Any, ...], dict[str, Any]]


def forms_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forms:
    """The fixed properties of these arguments."""
    named = {**dict(enumerate(args)), **kwargs}
    forms: Forms = {(): {"names": named.keys()}}
    for name, argument in named.items():
        _add_forms(forms, (name,), argument)
    return forms


def _form(tensor: Tensor) -> dict[str, Any]:
    # the stride of a dimension of size 1 has no effect
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    strides = tuple(stride * (size != 1) for stride, size in strides) if not tensor.is_contiguous() else "of its shape"
    return {"shape": [*tensor.shape], "dtype": tensor.dtype, "device": tensor.device, "strides": strides}


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
        forms[path] = {"shape": [*argument.batch_size]}
        # the entries of a lazy stack would be copies
        is_lazy = isinstance(argument, LazyStackedTensorDict)
        entries = enumerate(argument.tensordicts) if is_lazy else argument.items()
    elif isinstance(argument, list | tuple | dict):
        forms[path] = {"type": type(argument), "length": len(argument)}
        entries = argument.items() if isinstance(argument, dict) else enumerate(argument)
    else:
        # constants as text: 1 equals 1.0, and NaN does not equal itself
        forms[path] = {"value": repr(argument if isinstance(argument, _Constant | None) else type(argument))}
    for key, entry in entries:
        _add_forms(forms, (*path, key), entry)


def changed_argument(step: str, first: Forms, given: Forms) -> ValueError:
    """The error for a call whose arguments do not fit the graph."""
    if first[()] != given[()]:
        return ValueError(
            f"compile_step: {step} was compiled for {len(first[()]['names'])} arguments; call it with the same ones."
        )
    # an entry that differs, or else one that is new
    path = next((path for path in first if path not in given or given[path] != first[path]), None)
    path = next(path for path in given if path not in first) if path is None else path
    if path in first and path in given:
        old, new = first[path], given[path]
        # what differs, or the whole if the kinds of the arguments differ
        names = [name for name in old if old.keys() == new.keys() and old[name] != new[name]][:1]
        before, now = (_text(form, names) for form in (old, new))
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


def _text(form: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {form[name]}" for name in names or form)
