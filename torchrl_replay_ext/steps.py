"""Compiles a whole learning step to one graph."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import RecompileError, Unsupported

from torchrl_replay_ext.cuda_graphs import RecordedGraph
from torchrl_replay_ext.optim import AdamStep

# Kinds of torch's checks that a graph still fits: those of values.
_OF_VALUES = ("CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH", "SEQUENCE_LENGTH", "DUPLICATE_INPUT")

# What to do about errors of the compiler, by parts of their messages.
_HINTS = {
    r"Optimizer\.|torch[/\\]optim[/\\]": (
        "a graph cannot contain the optimizers of torch.optim. Pass torch.autograd.grad(loss, step.parameters) to "
        "step = torchrl_replay_ext.AdamStep(optimizer), or leave both out of the compiled step."
    ),
    r"Dynamo does not know how to enter a `\w*Lock` context": (
        "a graph cannot take a lock, as TorchRL's replay buffers do. Use CompilableReplayBuffer with "
        "storage=CompilableTensorStorage(capacity)."
    ),
}
_CHANGED = (
    "Create what the first call creates before it, as with loss.make_value_estimator(gamma=..., device=...). Keep what "
    "changes in tensors, change them in place, and let two of them start as two, such as zeros and zeros.clone()."
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# What a graph takes as fixed of its arguments and of their entries, by their paths.
_Forms = dict[tuple[Any, ...], tuple[Any, ...]]


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
    and go to an :class:`~torchrl_replay_ext.AdamStep`: the compiler cannot trace the optimizers of ``torch.optim``.
    ``loss.backward()`` adds to ``.grad`` as in eager code, if each ``.grad`` is a tensor before the first call, or None
    after each call.

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

    **Without the compiler** (``torch.compiler.set_stance("force_eager")``, ``TORCHDYNAMO_DISABLE=1``), the step runs as
    it is, without checks, until a call finds the compiler on.

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
        RuntimeError: at the first call, if ``step`` calls a method of an optimizer of ``torch.optim``; at the second
            call, if the first one has changed what the step reads, except the values of tensors; at a later call, if a
            setting of an optimizer is another number now; with ``cudagraphs=True``, if a tensor is not on the GPU, was
            replaced, or the step waits for the GPU. Other errors of torch's compiler, and errors that the step raises,
            are passed on.

    Examples:
        >>> counter = torch.zeros(1)
        >>> step = compile_step(lambda: counter.add_(1))
        >>> _ = step(), step()
        >>> counter
        tensor([2.])
    """
    if not isinstance(step, FunctionType):
        raise TypeError(f"compile_step: step must be a function, not {type(step).__name__}; wrap it in a function.")
    names = step.__code__.co_varnames
    # the settings of optimizers that the graph keeps, and torch's names of values that were None
    settings: dict[AdamStep, dict[str, Any]] = {}
    missing: list[str] = []

    def of_state(guards: Sequence[Any]) -> list[bool]:
        """Those of the step's own values. The first call may create objects, as TorchRL's losses do, but no tensors."""
        settings.update({each.value: each.value.settings for each in guards if isinstance(each.value, AdamStep)})
        own = [each for each in guards if not {*names} & {*re.findall(r"\bL\['(\w+)'\]", each.orig_guard.name)}]
        missing.extend(each.orig_guard.name for each in own if each.value is None)
        return [each in own and each.value is not None and each.guard_type in _OF_VALUES for each in guards]

    own, compiled = _compile(step, of_state, cudagraphs)
    is_compiled = False
    first: _Forms = {}
    # the same after the first call, in which the step may have added entries to its TensorDicts
    after: _Forms = {}
    without_checks: Callable[..., Result] | None = None

    @wraps(step)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal is_compiled, first, after, without_checks
        given = _forms_of(args, kwargs)
        if not is_compiled:
            with _compiling():
                result = compiled(*args, **kwargs)
            # no code if the compiler is off
            is_compiled = bool(_debug_get_cache_entry_list(own.__code__))
            first, after = given, _forms_of(args, kwargs)
            return result
        if given != first:
            _require_forms(step.__name__, first, after, given)
        for optimizer, before in settings.items():
            if (now := optimizer.settings) != before:
                name = next(name for name in now if now[name] != before[name])
                raise RuntimeError(
                    f"compile_step: {name} of the optimizer was {before[name]} when {step.__name__} was compiled and "
                    f"is {now[name]} now, but the graph keeps what it read before. Make the optimizer with "
                    "lr=torch.tensor(...), on the device of the parameters, and schedulers with cycle_momentum=False."
                )
        if without_checks is not None:
            return without_checks(*args, **kwargs)
        result = _call_unchanged(step, compiled, missing, args, kwargs)
        # the code that torch runs if its checks pass, the last used first
        without_checks = _with_code(own, _debug_get_cache_entry_list(own.__code__)[0].code)
        return result

    return call


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


def _forms_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Forms:
    forms: _Forms = {}
    for name, argument in (*enumerate(args), *kwargs.items()):
        _add_forms(forms, (name,), argument)
    return forms


def _add_forms(forms: _Forms, path: tuple[Any, ...], value: Any) -> None:
    """Add the forms of an argument and of its entries."""
    if is_non_tensor(value):
        value = value.data
    entries: Any = ()
    if isinstance(value, Tensor):
        strides = () if value.is_contiguous() else ("with strides", value.stride())
        forms[path] = ("shape", [*value.shape], "of", value.dtype, "on", value.device, *strides)
    elif is_tensor_collection(value):
        forms[path] = ("batch size", [*value.batch_size])
        # the entries of a lazy stack would be copies
        is_lazy = isinstance(value, LazyStackedTensorDict)
        entries = enumerate(value.tensordicts) if is_lazy else value.items()
    elif isinstance(value, list | tuple | dict):
        forms[path] = ("length", len(value))
        entries = value.items() if isinstance(value, dict) else enumerate(value)
    else:
        # as text: 1 is not 1.0, and NaN is NaN
        is_constant = isinstance(value, bool | int | float | str | None)
        forms[path] = ("value", repr(value)) if is_constant else (type(value),)
    for key, entry in entries:
        _add_forms(forms, (*path, key), entry)


def _require_forms(step: str, first: _Forms, after: _Forms, given: _Forms) -> None:
    """ValueError if arguments differ from those of the first call, except by entries that the step itself adds."""
    for path in first | given:
        old, new = first.get(path), given.get(path)
        if old != new and (old or new != after.get(path)):
            before, now = (" ".join(map(str, form or ("nothing",))) for form in (old, new))
            entry = "".join(f"[{key!r}]" for key in path[1:])
            raise ValueError(
                f"compile_step: argument {path[0]}{entry} of {step} has {now}, but the graph was compiled for "
                f"{before}. Make another compiled step for it, pad a batch, call contiguous() on a slice, or pass a "
                "number as a tensor."
            )


def _call_unchanged(step: FunctionType, compiled: Any, missing: Sequence[str], args: Any, kwargs: Any) -> Any:
    """The second call; RuntimeError if the first one has changed what the graph keeps."""
    scope, found = {"G": step.__globals__, "L": dict(inspect.getclosurevars(step).nonlocals)}, ""
    for name in missing:
        with suppress(Exception):  # what no longer exists, or is named by functions of torch
            if isinstance(eval(name, scope), Tensor):
                found = f"{_readable(name)} was None and is a tensor now."
    try:
        if found:
            raise RecompileError(found)
        with torch._dynamo.config.patch(error_on_recompile=True):
            return compiled(*args, **kwargs)
    except RecompileError as error:
        raise RuntimeError(
            f"compile_step: the first call of {step.__name__} has changed what the graph keeps. {_CHANGED}\n{error}"
        ) from error


@contextmanager
def _compiling() -> Iterator[None]:
    """Trace ``torch.autograd.grad``, silence tensordict's warnings, and say what to do about errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using lock_\(\) inside a compiled graph")
        warnings.filterwarnings("ignore", message="torch._dynamo.config.inline_inbuilt_nn_modules is deprecated")
        try:
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                yield
        except Unsupported as error:
            if raised := _raised_error(error):
                raise raised from error
            code = str(error).partition("from user code:\n")[2].split("\n\n")[0]
            for cause, hint in _HINTS.items():
                if re.search(cause, str(error)):
                    raise RuntimeError(f"compile_step: {hint}\n{code}") from error
            raise


def _raised_error(error: Unsupported) -> Exception | None:
    """The error that the traced code raised; None if the compiler failed for another reason."""
    found = re.search(r"raised exception (\w+)\((.*)\)$", str(error), re.MULTILINE)
    kind = getattr(builtins, found[1], None) if found else None
    with suppress(Exception):  # arguments that cannot be read
        if found and isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
            return kind(*ast.literal_eval(f"({found[2]},)"))
    return None
