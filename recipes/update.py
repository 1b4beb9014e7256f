"""The update step of a value-based recipe: as a loop of eager operations, or as one compiled graph."""

from collections.abc import Callable, Iterable

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim.adam import adam
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives import DQNLoss

from torchrl_replay_ext import compile_step


def eager_update(
    replay: TensorDictReplayBuffer,
    loss_function: Callable[[TensorDictBase], Tensor],
    optimizer: torch.optim.Adam,
    max_grad_norm: float,
) -> Callable[[], Tensor]:
    """Sample, loss, gradients, optimizer step, priorities.

    Args:
        replay: the buffer to learn from.
        loss_function: maps a sample to the loss, and writes the TD errors into the sample.
        optimizer: holds the parameters to learn.
        max_grad_norm: gradients of a larger norm are scaled down to it.

    Returns:
        A function that makes one update and returns its loss, [1].
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def update() -> Tensor:
        sample = replay.sample()
        loss = loss_function(sample)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        replay.update_tensordict_priority(sample)
        return loss.detach().reshape(1)

    return update


class CompiledUpdate:
    """The same in one graph: ``num_updates`` updates, ahead of them a copy to the target network if it is due.

    Parameters, optimizer state and buffer are changed in place, so checkpoints see them; make it anew after a
    checkpoint was loaded. It is compiled at the first call and then serves the whole run: shapes and objects must stay
    what they are (:func:`~torchrl_replay_ext.compile_step`).

    Args:
        replay: a CompilableReplayBuffer that was written to.
        loss_function: maps a sample to the loss, and writes the TD errors into the sample.
        optimizer: holds the parameters to learn; Adam with one group of parameters.
        max_grad_norm: gradients of a larger norm are scaled down to it.
        targets: pairs of a target parameter and its source.
        num_updates: updates per call.
        extends: each call brings new data, always of the same number of rows, which is written first.
        cudagraphs: replay the graph as one CUDA graph.
    """

    def __init__(
        self,
        replay: TensorDictReplayBuffer,
        loss_function: Callable[[TensorDictBase], Tensor],
        optimizer: torch.optim.Adam,
        max_grad_norm: float,
        *,
        targets: Iterable[tuple[Tensor, Tensor]] = (),
        num_updates: int = 1,
        extends: bool = False,
        cudagraphs: bool = False,
    ):
        self._replay, self._loss_function, self._max_grad_norm = replay, loss_function, max_grad_norm
        self._targets = list(targets)
        self._num_updates, self._extends = num_updates, extends
        (self._group,) = optimizer.param_groups
        self._parameters = list(self._group["params"])
        self._state = _adam_state(optimizer)
        self._target_due = torch.zeros(1, dtype=torch.bool, device=self._parameters[0].device)

        def updates(data: TensorDictBase | None) -> Tensor:
            return self._updates(data)

        self._compiled = compile_step(updates, cudagraphs=cudagraphs)
        self._first = True

    def __call__(self, data: TensorDictBase | None = None, *, target_due: bool = False) -> Tensor:
        """Make the updates and return their losses, [num_updates]."""
        self._target_due.fill_(target_due)
        if not self._first:
            return self._compiled(data)
        self._first = False
        # gradients inside the graph
        with torch._dynamo.config.patch(trace_autograd_ops=True):  # pyright: ignore
            return self._compiled(data)

    def _updates(self, data: TensorDictBase | None) -> Tensor:
        with torch.no_grad():
            if self._extends and data is not None:
                self._replay.extend(data)
            for target, source in self._targets:
                target.copy_(torch.where(self._target_due, source, target))
        return torch.stack([self._update() for _ in range(self._num_updates)])

    def _update(self) -> Tensor:
        sample = self._replay.sample()
        loss = self._loss_function(sample)
        gradients = torch.autograd.grad(loss, self._parameters)
        with torch.no_grad():
            norm = nn.utils.get_total_norm(gradients)
            scale = (self._max_grad_norm / (norm + 1e-6)).clamp_max(1.0)
            beta1, beta2 = self._group["betas"]
            adam(
                self._parameters,
                [gradient * scale for gradient in gradients],
                *self._state,
                foreach=False,
                capturable=self._target_due.is_cuda,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=self._group["lr"],
                weight_decay=self._group["weight_decay"],
                eps=self._group["eps"],
                maximize=False,
            )
        self._replay.update_tensordict_priority(sample)
        return loss.detach()


def value_targets(loss_module: DQNLoss) -> list[tuple[Tensor, Tensor]]:
    """Each parameter of the target network with its source."""
    targets = loss_module.target_value_network_params.flatten_keys()
    sources = loss_module.value_network_params.flatten_keys()
    return [(targets[key].data, sources[key].data) for key in list(targets.keys())]


def _adam_state(optimizer: torch.optim.Adam) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """First and second moments, their maxima (none) and step counts; made by a step without gradient if need be."""
    parameters = optimizer.param_groups[0]["params"]
    if not optimizer.state:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
            optimizer.state[parameter]["step"].zero_()
    states = [optimizer.state[parameter] for parameter in parameters]
    return [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states]
