"""Compiles a whole learning step to one graph."""

from __future__ import annotations

import ast
import builtins
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast
from unittest.mock import patch

import torch
from torch._dynamo.exc import Unsupported, unimplemented
from torch._dynamo.variables import TensorVariable

from torchrl_replay_ext.graph_inputs import (
    Assumption,
    Forms,
    OptimizerSettings,
    assumptions_of,
    broken_assumptions,
    changed_argument,
    forms_of,
)

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
    the first call, and two states that start as one tensor stay one. At each call, torch would check that all
    assumptions of the graph still hold. That takes as long as a replay cycle and is skipped here. Instead, tensors,
    numbers, strings and lengths of lists are checked once, after the first call, and what that call has changed is an
    error, even if the change has no effect. Later changes are not noticed, such as ``module.eval()`` or another value
    of a global number, and neither are new attributes, entries and objects. Only the settings of
    optimizers (``lr``, ``betas``, ``eps``) are checked at each call: make a learning rate that a scheduler changes a
    tensor, and pass ``cycle_momentum=False`` to ``OneCycleLR`` and ``CyclicLR``.

    So create what eager code creates lazily before the first call: the storage (write to the buffer once) and the value
    estimator of a TorchRL loss (``loss.make_value_estimator(gamma=0.99, device=device)``; without ``device``, its first
    use moves gamma from the CPU to the device of the rewards).

    **Arguments** are checked at each call. Tensors, also in TensorDicts, lists, tuples and dicts, must have the shapes,
    dtypes, devices and strides of the first call (a slice such as ``rollout[:, 0]`` has other strides than the whole:
    pass ``rollout[:, 0].contiguous()``). Numbers and strings, which the graph treats as constants, must have the same
    values. Two things are not checked: whether a tensor requires gradients, and whether arguments share memory with
    each other or with tensors of the step. They must do so in all calls or in none.

    Args:
        step: a function, not a method.
        cudagraphs: record the step as a CUDA graph. Then the next call overwrites the results. All tensors but the
            arguments must stay where they are in memory, or torch records a new graph at each call. If the step writes
            to an argument, torch gives a warning and runs an ordinary graph. Default: False.

    Returns:
        The compiled step. It is compiled at its first call. Each compiled step has its own graph, even if several steps
        share their code.

    Raises:
        TypeError: if ``step`` is not a function.
        ValueError: at a later call, if an argument differs from that of the first call, as above. Entries that the step
            itself adds to a TensorDict may be there from the start.
        RuntimeError: at the first call, if ``step`` calls ``backward()`` or a method of an optimizer of
            ``torch.optim``; at a later call, if the first one has changed a number, string or list that the step reads,
            or more of a tensor than its values, or if a setting of an optimizer is another number now. Other errors of
            torch's compiler, and errors that the step raises, are passed on.

    Examples:
        >>> counter = torch.zeros(1)
        >>> step = compile_step(lambda: counter.add_(1))
        >>> _ = step(), step()
        >>> counter
        tensor([2.])
    """
    if not isinstance(step, FunctionType):
        raise TypeError(f"compile_step: step must be a function, not {type(step).__name__}; wrap it in a function.")
    assumptions: list[Assumption] = []

    def keep_assumptions(guards: Sequence[Any]) -> list[bool]:
        assumptions[:] = assumptions_of(guards)
        return [False] * len(guards)

    compiled = _compile(step, keep_assumptions, cudagraphs)
    first: Forms = {}
    # the same after the first call, in which the step may have added entries to its TensorDicts
    after: Forms = {}
    # what the first call itself has broken
    broken: dict[Assumption, str] = {}
    settings: OptimizerSettings | None = None

    @wraps(step)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal first, after, broken, settings
        # other code may have restored the values since
        if broken and (messages := list(broken_assumptions(step, broken).values())):
            raise RuntimeError(messages[0])
        given = forms_of(args, kwargs)
        if settings is not None:
            settings.require_unchanged(args, kwargs)
            # the step's own entries may be there; all others must be as at the first call
            if given != first and given != {key: form for key, form in after.items() if key in given} | first:
                raise changed_argument(step.__name__, first, given)
            return compiled(*args, **kwargs)
        with _compiling():
            result = compiled(*args, **kwargs)
        first, after = given, forms_of(args, kwargs)
        broken = broken_assumptions(step, assumptions)
        settings = OptimizerSettings(step, assumptions, args, kwargs)
        assumptions.clear()
        return result

    return call


def compile_checked(step: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """:func:`compile_step` for a step without gradients, which is compiled again if the objects that it uses change.

    torch checks at each call the attributes of objects and the shapes of tensors, but not the code of classes and
    modules, which does not change.
    """

    def of_objects(guards: Sequence[Any]) -> list[bool]:
        return [guard.guard_type in _OF_OBJECTS and not guard.name.startswith(("dict(type(", "G[")) for guard in guards]

    return _compile(cast(FunctionType, step), of_objects)


def _compile(
    step: FunctionType, guards: Callable[[Sequence[Any]], Sequence[bool]], cudagraphs: bool = False
) -> Callable[..., Any]:
    """A graph of ``step`` that keeps the order of reads and writes.

    Args:
        step: the function.
        guards: takes the assumptions of the graph; returns for each whether it is checked at each call.
        cudagraphs: replay the graph as a CUDA graph. All tensors but those in arguments stay where they are in memory.
    """
    # torch stores graphs by code object; without checks, it would run the graph of another step with the same code
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__)
    own.__kwdefaults__ = step.__kwdefaults__
    options: dict[str, Any] = {
        "size_asserts": False,
        "alignment_asserts": False,
        # a read that is moved after a write to the same tensor makes the graph copy the whole tensor
        "reorder_for_locality": False,
    }
    if not cudagraphs:
        return torch.compile(own, fullgraph=True, options={**options, "guard_filter_fn": guards})
    options["triton.cudagraphs"] = True

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Inductor. It makes no CUDA graph if the step writes to tensors that are not marked as static."""
        for node in graph.graph.find_nodes(op="placeholder"):
            source = node.meta["grapharg"].source
            while hasattr(source, "base"):
                source = source.base
            # what torch._dynamo.mark_static_address leaves there if it is called before
            marks = node.meta.setdefault("tensor_dict", {})
            if getattr(source, "is_input", False):
                marks.pop("_dynamo_static_input_type", None)
            else:
                marks["_dynamo_static_input_type"] = "unguarded"
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, config_patches=options)

    return torch.compile(own, fullgraph=True, backend=backend, options={"guard_filter_fn": guards})


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
