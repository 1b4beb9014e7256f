"""Compiles a whole learning step to one graph."""

from __future__ import annotations

import ast
import builtins
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import RecompileError, Unsupported, unimplemented
from torch._dynamo.variables import TensorVariable

from torchrl_replay_ext.cuda_graphs import RecordedGraph
from torchrl_replay_ext.graph_inputs import Forms, changed_argument, forms_of
from torchrl_replay_ext.optim import AdamStep

# Checks of the attributes of objects.
_OF_OBJECTS = (
    "CONSTANT_MATCH",
    "EQUALS_MATCH",
    "ID_MATCH",
    "TYPE_MATCH",
    "TENSOR_MATCH",
    "SEQUENCE_LENGTH",
    "DICT_KEYS_MATCH",
)

_OF_VALUES = ("CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH", "SEQUENCE_LENGTH", "DUPLICATE_INPUT")

_SET_BEFORE = (
    "Keep what changes in a tensor, and change it in place. If the step does not depend on the old value, set it "
    "before the first call to what the step leaves there."
)

# What to do about settings of optimizers that schedulers change.
_REMEDIES = {
    "lr": " Make the optimizer with a tensor on the device of the parameters, lr=torch.tensor(...): schedulers change "
    "its value, which the graph reads.",
    "betas": " Schedulers that cycle the momentum need cycle_momentum=False.",
}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Parts of the compiler's messages about gradients and optimizers that it cannot trace.
_MARKS = ("Tensor.backward()", "trace_autograd_ops", "Optimizer.", f"torch{os.sep}optim{os.sep}")


def compile_step(step: Callable[Arguments, Result], *, cudagraphs: bool = False) -> Callable[Arguments, Result]:
    """Compile a step that always uses the same objects and shapes, with ``torch.compile(step, fullgraph=True)``.

        optimizer_step = AdamStep(optimizer)

        @compile_step
        def update():
            batch = replay_buffer.sample()
            loss = loss_module(batch)["loss"]
            optimizer_step(torch.autograd.grad(loss, optimizer_step.parameters))
            replay_buffer.update_tensordict_priority(batch)

    The step may contain a whole update, as here, and the write of new data. Gradients come from ``torch.autograd.grad``
    and go to an :class:`~torchrl_replay_ext.AdamStep`: the compiler cannot trace ``loss.backward()`` and the optimizers
    of ``torch.optim``.

    **Order.** Reads and writes keep their order. ``torch.compile`` alone may move a read after a write to the same
    tensor, and must then copy the tensor: with ``extend`` in the step, tensors as large as the buffer.

    **What the step reads** must not change, except the values of tensors: a number in an attribute keeps the value of
    the first call, and two states that start as one tensor stay one. torch checks at the second call that everything is
    as the first call found it; what the first call itself has changed is an error. At later calls these checks, which
    take as long as a replay cycle, are skipped, and changes are not noticed, such as ``module.eval()``, another value
    of a global number, or a new object. Only the settings of optimizers (``lr``, ``betas``, ``eps``) are checked at
    each call: make a learning rate that a scheduler changes a tensor, and pass ``cycle_momentum=False`` to
    ``OneCycleLR`` and ``CyclicLR``.

    So create what eager code creates lazily before the first call: the storage (write to the buffer once) and the value
    estimator of a TorchRL loss (``loss.make_value_estimator(gamma=0.99, device=device)``; without ``device``, its first
    use moves gamma from the CPU to the device of the rewards).

    **Arguments** are checked at each call. Tensors, also in TensorDicts, lists, tuples and dicts, must have the shapes,
    dtypes, devices and strides of the first call (a slice such as ``rollout[:, 0]`` has other strides than the whole:
    pass ``rollout[:, 0].contiguous()``). Numbers and strings, which the graph treats as constants, must have the same
    values. Two things are not checked: whether a tensor requires gradients, and whether arguments share memory with
    each other or with tensors of the step. They must do so in all calls or in none.

    **CUDA graphs.** With ``cudagraphs=True``, the first three calls run the compiled step. The fourth records it as a
    CUDA graph and replays it, as do all later calls. Each call runs the step once. All tensors must be on one GPU, and
    those that the step reads, other than its arguments, must keep their memory: ``x.copy_(y)``, not ``x = y``.
    Arguments are copied into the graph, and results out of it, so results may be kept; return only what you need.

    Args:
        step: a function, not a method.
        cudagraphs: record the step as a CUDA graph, as above. Default: False.

    Returns:
        The compiled step. It is compiled at its first call. Each compiled step has its own graph, even if several steps
        share their code.

    Raises:
        TypeError: if ``step`` is not a function.
        ValueError: at a later call, if an argument differs from that of the first call, as above. Entries that the step
            itself adds to a TensorDict may be there from the start.
        RuntimeError: at the first call, if ``step`` calls ``backward()`` or a method of an optimizer of
            ``torch.optim``; at the second call, if the first one has changed what the step reads, except the values of
            tensors; at a later call, if a setting of an optimizer is another number now; with ``cudagraphs=True``, if
            a tensor is not on the GPU, was replaced, or the step waits for the GPU. Other errors of torch's compiler,
            and errors that the step raises, are passed on.

    Examples:
        >>> counter = torch.zeros(1)
        >>> step = compile_step(lambda: counter.add_(1))
        >>> _ = step(), step()
        >>> counter
        tensor([2.])
    """
    if not isinstance(step, FunctionType):
        raise TypeError(f"compile_step: step must be a function, not {type(step).__name__}; wrap it in a function.")
    arguments = step.__code__.co_varnames
    # the settings of optimizers that the graph keeps
    settings: dict[AdamStep, dict[str, Any]] = {}

    def of_state(guards: Sequence[Any]) -> list[bool]:
        """Those of tensors, numbers, strings and lengths. Arguments, to which the step may add entries, are not here.

        Objects may be created in the first call, as TorchRL's losses do with lists of keys, but not tensors.
        """
        settings.update({each.value: each.value.settings for each in guards if isinstance(each.value, AdamStep)})
        names = [re.findall(r"\bL\['(\w+)'\]", each.orig_guard.name) for each in guards]
        is_state = [not any(name in arguments for name in each) for each in names]
        missing.extend(
            each.orig_guard for each, own in zip(guards, is_state, strict=True) if own and each.value is None
        )
        return [
            own and each.value is not None and each.guard_type in _OF_VALUES
            for each, own in zip(guards, is_state, strict=True)
        ]

    # torch's names of values that were None
    missing: list[Any] = []
    own, compiled = _compile(step, of_state, cudagraphs)
    first: Forms = {}
    # the same after the first call, in which the step may have added entries to its TensorDicts
    after: Forms = {}
    without_checks: Callable[..., Result] | None = None

    @wraps(step)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal first, after, without_checks
        given = forms_of(args, kwargs)
        if not first:
            with _compiling():
                result = compiled(*args, **kwargs)
            first, after = given, forms_of(args, kwargs)
            return result
        # the step's own entries may be there; all others must be as at the first call
        if given != first and given != {key: form for key, form in after.items() if key in given} | first:
            raise changed_argument(step.__name__, first, given)
        for optimizer, before in settings.items():
            _require_settings(step.__name__, before, optimizer.settings)
        if without_checks is not None:
            return without_checks(*args, **kwargs)
        _require_no_tensors(step, missing)
        with _unchanged(step.__name__):
            result = compiled(*args, **kwargs)
        # the code that torch runs if its checks pass, the last used first
        without_checks = _with_code(own, _debug_get_cache_entry_list(own.__code__)[0].code)
        return result

    return call


def compile_checked(step: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """:func:`compile_step` for a step without gradients, which is compiled again if the objects that it uses change.

    torch checks at each call the attributes of objects and the shapes of tensors, but not the code of classes and
    modules, which does not change.
    """

    def of_objects(guards: Sequence[Any]) -> list[bool]:
        return [guard.guard_type in _OF_OBJECTS and not guard.name.startswith(("dict(type(", "G[")) for guard in guards]

    return _compile(cast(FunctionType, step), of_objects)[1]


def _with_code(step: FunctionType, code: CodeType) -> FunctionType:
    """The function with other code."""
    other = FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    other.__kwdefaults__ = step.__kwdefaults__
    return other


def _compile(
    step: FunctionType, guards: Callable[[Sequence[Any]], Sequence[bool]], cudagraphs: bool = False
) -> tuple[FunctionType, Callable[..., Any]]:
    """A graph of ``step`` that keeps the order of reads and writes.

    Args:
        step: the function.
        guards: takes torch's checks that the graph still fits; returns for each whether it is made at each call.
        cudagraphs: replay the graph as a CUDA graph.

    Returns:
        A copy of the step with code of its own, by which torch stores the graph, and the compiled copy.
    """
    # torch stores graphs by code object; without checks, it would run the graph of another step with the same code
    own = _with_code(step, step.__code__.replace())
    options: dict[str, Any] = {
        "size_asserts": False,
        "alignment_asserts": False,
        # a read that is moved after a write to the same tensor makes the graph copy the whole tensor
        "reorder_for_locality": False,
    }
    if not cudagraphs:
        return own, torch.compile(own, fullgraph=True, options={**options, "guard_filter_fn": guards})

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> RecordedGraph:
        from torch._inductor.compile_fx import compile_fx

        names, is_argument = [], []
        for node in graph.graph.find_nodes(op="placeholder"):
            source = node.meta["grapharg"].source
            names.append(_readable(source.name))
            while hasattr(source, "base"):
                source = source.base
            is_argument.append(bool(getattr(source, "is_input", False)))
        compiled = cast(Callable[..., Any], compile_fx(graph, inputs, config_patches=options))
        return RecordedGraph(compiled, step.__name__, names, is_argument)

    return own, torch.compile(own, fullgraph=True, backend=backend, options={"guard_filter_fn": guards})


def _readable(name: str) -> str:
    """A name that torch gives to a value, such as L['state'].n, in short: state.n."""
    name = re.sub(r"\b[GL]\['(\w+)'\]", r"\1", name)
    return re.sub(r"\.(?:_modules|_buffers|_parameters)\['(\w+)'\]", r".\1", name)


@contextmanager
def _unchanged(step: str) -> Iterator[None]:
    """RuntimeError if the graph does not fit any more."""
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            yield
    except RecompileError as error:
        found = re.search(r"- \d+/\d+: (.*?)(?:\s+#\s+(.*?))?(?: \(HINT.*)?$", str(error), re.MULTILINE)
        check, line = (found[1], found[2]) if found else (str(error), None)
        hint = (
            "Use loss.make_value_estimator(gamma=..., device=...) before the first call."
            if "_value_estimator" in check
            else "Let two states start as two tensors, such as zeros and zeros.clone(). " + _SET_BEFORE
        )
        raise RuntimeError(
            f"compile_step: a value that the graph keeps has changed since the first call of {step}. The check "
            f"that fails: {_readable(check)}{f', for {line}' if line else ''}. {hint}"
        ) from error


def _require_no_tensors(step: FunctionType, missing: Sequence[Any]) -> None:
    """RuntimeError if a value that was None in the first call is a tensor now."""
    scope = {"G": step.__globals__, "L": dict(inspect.getclosurevars(step).nonlocals)}
    for guard in missing:
        try:
            value = eval(guard.name, scope)
        except Exception:  # what no longer exists, or is named by functions of torch
            continue
        if isinstance(value, Tensor):
            raise RuntimeError(
                f"compile_step: {_readable(guard.name)} was None in the first call of {step.__name__} and is a tensor "
                f"now, but the graph keeps None. {_SET_BEFORE}"
            )


def _require_settings(step: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """RuntimeError if a number of an optimizer is another one than in the graph, or replaces a tensor."""
    for name, value in now.items():
        kept = before[name]
        if value is kept or (isinstance(value, Tensor) and isinstance(kept, Tensor)):
            continue
        if isinstance(value, Tensor) or isinstance(kept, Tensor) or value != kept:
            raise RuntimeError(
                f"compile_step: {name} of the optimizer was {kept} when {step} was compiled and is {value} now, but "
                f"the graph keeps what it read before.{_REMEDIES.get(name, '')}"
            )


def _refuse_backward(self: TensorVariable, *args: Any, **kwargs: Any) -> Any:
    """Reject ``backward()``: replaces the method of the compiler that would trace it together with ``autograd.grad``.

    A graph without checks would overwrite ``.grad``, while eager code adds to it.
    """
    unimplemented(
        gb_type="Unsupported Tensor.backward() call",
        context="compile_step",
        explanation="Steps given to compile_step cannot call Tensor.backward().",
        hints=[],
    )


@contextmanager
def _compiling() -> Iterator[None]:
    """Trace ``torch.autograd.grad``, silence tensordict's warnings, and name the line that the compiler rejected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using lock_\(\) inside a compiled graph")
        warnings.filterwarnings("ignore", message="torch._dynamo.config.inline_inbuilt_nn_modules is deprecated")
        try:
            traced = torch._dynamo.config.patch(trace_autograd_ops=True)
            # create=True: a version of torch without this method must not break every step
            refused = patch.object(TensorVariable, "_collect_backward_inputs", _refuse_backward, create=True)
            with traced, refused:
                yield
        except Unsupported as error:
            if raised := _raised_error(error):
                raise raised from error
            if re.search(r"Dynamo does not know how to enter a `\w*Lock` context", str(error)):
                raise RuntimeError(
                    f"compile_step: {_culprit(error)} takes a lock, which cannot be part of a graph. TorchRL's replay "
                    "buffers do this; use CompilableReplayBuffer with storage=CompilableTensorStorage(capacity)."
                ) from error
            if any(mark in str(error) for mark in _MARKS):
                raise RuntimeError(
                    f"compile_step: {_culprit(error)} cannot be part of a graph: torch cannot trace backward() and the "
                    "optimizers of torch.optim. Compute gradients with torch.autograd.grad(loss, step.parameters) and "
                    "pass them to step = torchrl_replay_ext.AdamStep(optimizer), which updates parameters and "
                    "optimizer in place; or leave both out of the compiled step."
                ) from error
            raise


def _raised_error(error: Unsupported) -> Exception | None:
    """The error that the traced code raised; None if the compiler failed for another reason."""
    found = re.search(r"raised exception (\w+)\((.*)\)$", str(error), re.MULTILINE)
    kind = getattr(builtins, found[1], None) if found else None
    with suppress(Exception):  # arguments that cannot be read
        if found and isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
            return kind(*ast.literal_eval(f"({found[2]},)"))
    return None


def _culprit(error: Unsupported) -> str:
    """The innermost line of the user's code that the compiler has rejected."""
    inside_torch = os.path.dirname(torch.__file__)
    frames = [frame for frame in getattr(error, "real_stack", ()) if not frame.filename.startswith(inside_torch)]
    if not frames:
        return "backward() or an optimizer"
    frame = frames[-1]
    return f"line {frame.lineno} of {os.path.basename(frame.filename)}, `{frame.line}`,"
