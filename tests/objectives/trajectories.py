"""Trajectories for tests of the losses, and helpers for their reference loops."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import LossModule, SoftUpdate

OBSERVATION, HIDDEN = 3, 4


def cut_rows(*, mask: bool = False) -> TensorDict:
    """Four rows [4, T] whose episodes terminate or are truncated inside the row or at its end, or do not end.

    The observation after a termination is NaN. With a mask, masked rewards are NaN, too.
    """
    time = 9
    following = torch.randn(4, time, OBSERVATION, dtype=torch.float64)
    reward = torch.randn(4, time, 1, dtype=torch.float64)
    terminated, truncated, valid = torch.zeros(3, 4, time, dtype=torch.bool)
    terminated[1, 3], truncated[1, 6], terminated[2, -1], truncated[3, 2] = True, True, True, True
    valid |= True
    if mask:
        # a masked step inside a row, and padding after a row that ends and after one that is cut
        valid[0, 4], valid[1, 7:], valid[3, 5:] = False, False, False
        reward[~valid] = torch.nan
    done = terminated | truncated
    first = torch.randn(4, time, OBSERVATION, dtype=torch.float64)
    goes_on = valid[:, :-1] & valid[:, 1:] & ~done[:, :-1]
    first[:, 1:] = torch.where(goes_on.unsqueeze(-1), following[:, :-1], first[:, 1:])
    following[terminated] = torch.nan
    flags = {"done": done.unsqueeze(-1), "terminated": terminated.unsqueeze(-1)}
    rows = TensorDict({"observation": first, "next": {"observation": following, "reward": reward, **flags}}, [4, time])
    if mask:
        rows["collector", "mask"] = valid
    return rows


def episodes(rows: TensorDict) -> Iterator[list[tuple[int, int]]]:
    """Yield the (row, time) of the valid steps of each contiguous part of an episode, in time order."""
    for row in range(rows.shape[0]):
        piece: list[tuple[int, int]] = []
        for step in range(rows.shape[1]):
            valid = rows["collector", "mask"][row, step] if ("collector", "mask") in rows.keys(True) else True
            if valid:
                piece.append((row, step))
            if piece and (not valid or rows["next", "done"][row, step]):
                yield piece
                piece = []
        if piece:
            yield piece


def algorithm_2(
    gamma: Any, coefficient: Any, q: Tensor, v_next: Tensor, reward: Tensor, done: Tensor, terminated: Tensor
) -> Tensor:
    """The inner loop of Algorithms 2 and 3 for one row [T]; ``coefficient`` is ρ̄_i (c_i in Algorithm 3).

    ``gamma`` may be a number or of shape [T].
    """
    discount = torch.as_tensor(gamma, dtype=torch.float64).expand(len(reward))
    result: list[Any] = [None] * len(reward)
    for i in reversed(range(len(reward))):
        if i == len(reward) - 1 or done[i]:
            q_ret = torch.zeros_like(v_next[i]) if terminated[i] else v_next[i]
        q_ret = reward[i] + discount[i] * q_ret
        result[i] = q_ret
        if i > 0:
            # V_i is the value of the state that step i − 1 led to
            q_ret = coefficient[i] * (q_ret - q[i]) + v_next[i - 1]
    return torch.stack(result)


def by_rows(function: Callable[..., Tensor], *columns: Tensor, time_dim: int) -> Tensor:
    """Apply ``function`` to each row [T] separately."""
    rows = [x.movedim(time_dim, -1) for x in columns]
    shape = rows[0].shape
    flat = [x.reshape(-1, shape[-1]) for x in rows]
    result = torch.stack([function(*row) for row in zip(*flat, strict=True)])
    return result.reshape(shape).movedim(-1, time_dim)


def q_ret_of(
    batch: TensorDict, gamma: float, rho: Tensor, q: Tensor, v_next: Tensor, *, lmbda: float = 1.0, c: float = 1.0
) -> Tensor:
    """Q^ret [S, T, 1] of rows [S, T], from the ratios and the values of their actions, and V(x_{t+1}), [S, T, 1]."""
    ends = (batch["next", key] for key in ("reward", "done", "terminated"))
    loop = functools.partial(algorithm_2, gamma)
    return by_rows(loop, lmbda * rho.clamp_max(c), q, v_next, *ends, time_dim=1)


def project(g: Tensor, k: Tensor, delta: float) -> Tensor:
    """Eq. 12 for a single step."""
    excess = float(k @ g) - delta
    return g if excess <= 0 else g - excess / float(k @ k) * k


class Sums:
    """Accumulates numbers and gradients by name."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.values: dict[str, float] = {}
        self.gradients: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        self.values[name] = self.values.get(name, 0.0) + (value.item() if isinstance(value, Tensor) else value)

    def backpropagate(self, name: str, output: Tensor, weight: Tensor | float) -> None:
        """Adds the gradient of ``weight`` times ``output`` with respect to the parameters, if there is one."""
        if not output.requires_grad:
            return
        weight = torch.as_tensor(weight, dtype=output.dtype).expand_as(output)
        found = torch.autograd.grad(output, self.parameters, weight, allow_unused=True, retain_graph=True)
        sums = self.gradients.setdefault(name, [torch.zeros_like(p) for p in self.parameters])
        for total, gradient in zip(sums, found, strict=True):
            if gradient is not None:
                total += gradient

    def means(self, count: int) -> "Sums":
        self.values = {name: value / count for name, value in self.values.items()}
        self.gradients = {name: [g / count for g in gradients] for name, gradients in self.gradients.items()}
        return self


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Gradients with respect to parameters, 0 where there are none."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def assert_same_gradients(first: list[Tensor], second: list[Tensor], tolerance: float = 1e-10) -> None:
    assert any(g.any() for g in first)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def assert_same(result: TensorDict, expected: TensorDict, tolerance: float = 0.0) -> None:
    """Assert that a result has the values of another one."""
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=tolerance, atol=tolerance)


def assert_agrees(result: TensorDict, expected: Sums) -> None:
    """Assert that a result has the values and parameter gradients of the reference."""
    for name, value in expected.values.items():
        assert abs(result[name].item() - value) < 1e-9, (name, result[name].item(), value)
    for name, expected_gradients in expected.gradients.items():
        assert_same_gradients(gradients(result[name], expected.parameters), expected_gradients, 1e-9)


def unlike(network: nn.Module, distance: float = 0.3) -> nn.Module:
    """Change the parameters of a module by random steps."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += distance * torch.randn_like(parameter)
    return network


def averaged(loss_module: Any) -> Any:
    """A loss whose average policy or target network has an updater."""
    SoftUpdate(loss_module, eps=0.75)
    return loss_module


def set_average(loss_module: LossModule, actor: ProbabilisticActor) -> None:
    """Set the parameters of the average policy to those of another actor."""
    source = TensorDict.from_module(actor)
    for key, value in loss_module.target_actor_network_params.items(True, True):
        value.data.copy_(source[key].data)


def refuses(setting: Any, batch: TensorDict, error: type[Exception], match: str) -> None:
    """The loss of a setting raises this error for the batch, and writes nothing to it."""
    with pytest.raises(error, match=match):
        setting.loss(batch)
    assert "td_error" not in set(batch.keys())


def losses(result: TensorDict) -> Tensor:
    return sum(value for key, value in result.items() if key.startswith("loss_"))
