"""The update step of a recipe, eager or as one compiled graph."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives import LossModule

from recipes.common.optimizers import RMSProp, RMSPropStep
from torchrl_replay_ext import AdamStep, clip_gradients, compile_step

# Maps a sample to numbers and writes the TD errors into the sample. As in TorchRL's loss modules, numbers whose names
# begin with "loss" are minimised; the others are only logged.
LossFunction = Callable[[TensorDictBase], Mapping[str, Tensor] | TensorDictBase]

# Maps the result of a loss function and a list of parameters to the gradients of these parameters. Each gradient must
# be contiguous, as its parameter is.
Gradients = Callable[[Mapping[str, Tensor], Sequence[Tensor]], Sequence[Tensor]]


@dataclass(kw_only=True)
class Delayed:
    """A second update after every ``interval``-th update, such as the actor's update in TD3.

    Args:
        interval: number of updates per delayed update. Must divide ``gradient_steps`` and ``updates_per_graph`` of the
            :class:`Learner`.
        loss_function: see :data:`LossFunction`. It runs after the step of the first optimizers.
        optimizers: see :class:`Learner`.
        sample: draws the batch of the delayed update. Compiled updates need one that can be traced, such as ``sample``
            of another CompilableReplayBuffer. Default: None, use the batch of the preceding update.
        target_step: see :class:`Learner`. Default: None.
    """

    interval: int
    loss_function: LossFunction
    optimizers: Sequence[torch.optim.Adam | RMSProp]
    sample: Callable[[], TensorDictBase] | None = None
    target_step: Callable[[], None] | None = None


def total(losses: Mapping[str, Tensor]) -> Tensor:
    """The sum of the entries whose names begin with "loss"."""
    return reduce(torch.add, [value for name, value in losses.items() if name.startswith("loss")])


def gradients_of_total(losses: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of the sum of the losses."""
    return torch.autograd.grad(total(losses), parameters)


class Learner:
    """Writes collected data to the buffer and makes updates with samples from it.

    Args:
        replay: the buffer; must be a CompilableReplayBuffer if ``compiled``.
        loss_function: see :data:`LossFunction`.
        optimizers: Adam or RMSProp, each with one group of parameters. No parameter may be in two optimizers. The
            losses are added up, so no parameter may receive a gradient from the loss of another optimizer.
        gradient_steps: updates per call, > 0.
        max_grad_norm: gradients of an optimizer with a larger norm are scaled down to this norm. Default: None, no
            clipping.
        target_step: updates the target networks after each update (``SoftUpdate(...).step``). Default: None.
        gradients: see :data:`Gradients`. Default: None, gradients of the sum of the losses.
        delayed: second update after some of the updates. Default: None.
        targets: pairs (target parameter, source) that calls with ``copy_targets=True`` copy. Default: none.
        compiled: compile the update into one graph. Default: False.
        updates_per_graph: updates in one graph; must divide ``gradient_steps``. Default: 1.
        cudagraphs: replay the graph as a CUDA graph. Default: False.
    """

    def __init__(
        self,
        replay: TensorDictReplayBuffer,
        loss_function: LossFunction,
        optimizers: Sequence[torch.optim.Adam | RMSProp],
        *,
        gradient_steps: int,
        max_grad_norm: float | None = None,
        target_step: Callable[[], None] | None = None,
        gradients: Gradients | None = None,
        delayed: Delayed | None = None,
        targets: Iterable[tuple[Tensor, Tensor]] = (),
        compiled: bool = False,
        updates_per_graph: int = 1,
        cudagraphs: bool = False,
    ):
        self._replay = replay
        self._arguments = (replay, loss_function, optimizers, max_grad_norm, target_step, gradients, delayed)
        self._gradient_steps = gradient_steps
        self._targets = list(targets)
        self._on_cpu = optimizers[0].param_groups[0]["params"][0].device.type == "cpu"
        self._updates_per_graph, self._cudagraphs = updates_per_graph, cudagraphs
        self._eager = eager_update(*self._arguments)
        self._is_compiled = compiled
        self._compiled: CompiledUpdate | None = None
        # If each batch needs one graph call, the graph can also write the batch. Exceptions: on a GPU, because batches
        # come from the CPU; and samplers that sort ranks or evaluate events, which they do outside of graphs.
        self._extends = (
            gradient_steps == updates_per_graph and self._on_cpu and getattr(replay.sampler, "writes_in_graphs", True)
        )

    def __call__(self, data: TensorDictBase, *, copy_targets: bool = False) -> list[dict[str, Tensor]]:
        """Write ``data`` to the buffer and make ``gradient_steps`` updates.

        Args:
            data: the new transitions.
            copy_targets: copy the ``targets`` before the updates. Default: False.

        Returns:
            The results of the loss functions, as dicts of tensors [updates].
        """
        # The first write sets up the buffer and must be eager. The graph is compiled after it, in new and resumed runs.
        if not self._is_compiled or not self._replay.write_count:
            self._replay.extend(data)
            if copy_targets:
                for target, source in self._targets:
                    target.copy_(source)
            return [self._eager(number + 1) for number in range(self._gradient_steps)]
        if self._compiled is None:
            self._compiled = self._compile()
        if not self._extends:
            self._replay.extend(data)
        return [
            self._compiled(data, target_due=copy_targets and first == 0)
            for first in range(0, self._gradient_steps, self._updates_per_graph)
        ]

    def _compile(self) -> "CompiledUpdate":
        return CompiledUpdate(
            *self._arguments,
            targets=self._targets,
            num_updates=self._updates_per_graph,
            extends=self._extends,
            cudagraphs=self._cudagraphs,
        )


def eager_update(
    replay: TensorDictReplayBuffer,
    loss_function: LossFunction,
    optimizers: Sequence[torch.optim.Adam | RMSProp],
    max_grad_norm: float | None = None,
    target_step: Callable[[], None] | None = None,
    gradients: Gradients | None = None,
    delayed: Delayed | None = None,
) -> Callable[..., dict[str, Tensor]]:
    """Build the eager update: sample, losses, gradients, optimizer steps, targets, priorities.

    The arguments are those of :class:`Learner`.

    Returns:
        A function that makes one update and returns the results of the loss functions as tensors [1, ...]. Its argument
        is the number of the update, counted from 1, which decides whether the delayed update follows.
    """

    def descend(
        losses: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Adam | RMSProp],
        target_step: Callable[[], None] | None,
        gradients: Gradients | None = None,
    ) -> None:
        if gradients is None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            total(losses).backward()
        else:
            parameters = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
            for parameter, gradient in zip(parameters, gradients(losses, parameters), strict=True):
                parameter.grad = gradient
        for optimizer in optimizers:
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters_of(optimizer), max_grad_norm)
            optimizer.step()
        if target_step is not None:
            target_step()

    def update(number: int = 1) -> dict[str, Tensor]:
        sample = replay.sample()
        losses = dict(loss_function(sample).items())
        descend(losses, optimizers, target_step, gradients)
        if delayed is not None and number % delayed.interval == 0:
            batch = sample if delayed.sample is None else delayed.sample()
            delayed_losses = dict(delayed.loss_function(batch).items())
            descend(delayed_losses, delayed.optimizers, delayed.target_step)
            losses |= delayed_losses
        replay.update_tensordict_priority(sample)
        return {name: value.detach().unsqueeze(0) for name, value in losses.items()}

    return update


class CompiledUpdate:
    """``num_updates`` updates as one compiled graph, which optionally starts with a write of new data.

    The graph changes parameters, optimizer state and buffer in place, so checkpoints include the changes. It is
    compiled at the first call. Shapes and objects must not change afterwards
    (:func:`~torchrl_replay_ext.compile_step`); create a new CompiledUpdate after loading a checkpoint.

    Args:
        replay: a CompilableReplayBuffer that holds transitions.
        loss_function: see :data:`LossFunction`.
        optimizers: see :class:`Learner`.
        max_grad_norm: see :class:`Learner`.
        target_step: see :class:`Learner`.
        gradients: see :class:`Learner`.
        delayed: see :class:`Learner`.
        targets: pairs (target parameter, source), copied before the updates of calls with ``target_due=True``.
        num_updates: updates per call. Default: 1.
        extends: each call gets new data, always with the same number of rows, and writes it before the updates.
            Default: False.
        cudagraphs: replay the graph as a CUDA graph. Default: False.
    """

    def __init__(
        self,
        replay: TensorDictReplayBuffer,
        loss_function: LossFunction,
        optimizers: Sequence[torch.optim.Adam | RMSProp],
        max_grad_norm: float | None = None,
        target_step: Callable[[], None] | None = None,
        gradients: Gradients | None = None,
        delayed: Delayed | None = None,
        *,
        targets: Iterable[tuple[Tensor, Tensor]] = (),
        num_updates: int = 1,
        extends: bool = False,
        cudagraphs: bool = False,
    ):
        self._replay, self._loss_function, self._max_grad_norm = replay, loss_function, max_grad_norm
        self._target_step, self._gradients, self._targets = target_step, gradients, list(targets)
        self._delayed = delayed
        self._num_updates, self._extends, self._cudagraphs = num_updates, extends, cudagraphs
        self._steps = [_traceable(optimizer) for optimizer in optimizers]
        self._delayed_steps = [] if delayed is None else [_traceable(optimizer) for optimizer in delayed.optimizers]
        self._target_due = torch.zeros(1, dtype=torch.bool, device=self._steps[0].parameters[0].device)

        def updates(data: TensorDictBase | None) -> dict[str, Tensor]:
            return self._updates(data)

        self._compiled = compile_step(updates, cudagraphs=cudagraphs)

    def __call__(self, data: TensorDictBase | None = None, *, target_due: bool = False) -> dict[str, Tensor]:
        """Make the updates and return the results of the loss functions.

        Returns:
            Tensors [num_updates]; [num_updates / interval] for a delayed update.
        """
        self._target_due.fill_(target_due)
        losses = self._compiled(data)
        # the next replay of a CUDA graph overwrites these tensors
        return {name: value.clone() for name, value in losses.items()} if self._cudagraphs else losses

    def _updates(self, data: TensorDictBase | None) -> dict[str, Tensor]:
        with torch.no_grad():
            if self._extends and data is not None:
                self._replay.extend(data)
            for target, source in self._targets:
                target.copy_(torch.where(self._target_due, source, target))
        results = [self._update(number + 1) for number in range(self._num_updates)]
        # a delayed update, if there is one, follows the last update: results[-1] has all names
        return {name: torch.stack([result[name] for result in results if name in result]) for name in results[-1]}

    def _update(self, number: int) -> dict[str, Tensor]:
        sample = self._replay.sample()
        losses = dict(self._loss_function(sample).items())
        self._descend(losses, self._steps, self._target_step, self._gradients)
        delayed = self._delayed
        if delayed is not None and number % delayed.interval == 0:
            batch = sample if delayed.sample is None else delayed.sample()
            delayed_losses = dict(delayed.loss_function(batch).items())
            self._descend(delayed_losses, self._delayed_steps, delayed.target_step)
            losses |= delayed_losses
        self._replay.update_tensordict_priority(sample)
        return {name: value.detach() for name, value in losses.items()}

    def _descend(
        self,
        losses: Mapping[str, Tensor],
        steps: Sequence["AdamStep | RMSPropStep"],
        target_step: Callable[[], None] | None,
        gradients: Gradients | None = None,
    ) -> None:
        parameters = [parameter for step in steps for parameter in step.parameters]
        rest = list((gradients or gradients_of_total)(losses, parameters))
        with torch.no_grad():
            for step in steps:
                own, rest = rest[: len(step.parameters)], rest[len(step.parameters) :]
                if self._max_grad_norm is not None:
                    own = clip_gradients(own, self._max_grad_norm)
                step(own)
            if target_step is not None:
                target_step()


def _traceable(optimizer: torch.optim.Adam | RMSProp) -> AdamStep | RMSPropStep:
    return RMSPropStep(optimizer) if isinstance(optimizer, RMSProp) else AdamStep(optimizer)


def parameters_of(optimizer: torch.optim.Adam | RMSProp) -> list[Tensor]:
    """The parameters of the optimizer's only group."""
    (group,) = optimizer.param_groups
    return list(group["params"])


def target_pairs(loss_module: LossModule) -> list[tuple[Tensor, Tensor]]:
    """Pairs (target parameter, source) of all target networks of a loss."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, _ in loss_module.named_children():
        if name.startswith("target_"):
            targets = getattr(loss_module, name).flatten_keys()
            sources = getattr(loss_module, name.removeprefix("target_")).flatten_keys()
            pairs += [(targets[key].data, sources[key].data) for key in list(targets.keys())]
    return pairs
