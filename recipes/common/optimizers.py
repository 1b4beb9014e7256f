"""Optimizers that can be chosen by name: Adam and RMSProp."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.common.errors import ConfigError, did_you_mean
from torchrl_replay_ext import AdamStep


class RMSProp(torch.optim.Optimizer):
    """RMSProp, centered as in the DQN paper (Graves 2013, eqs. 38-41, without momentum) or not centered as in A3C.

    n ← ρ n + (1 − ρ) g²,  m ← ρ m + (1 − ρ) g,  x ← x − lr g / √(n − m² + ε)

    torch.optim.RMSprop adds ε outside the root; there, rounding can make the number under the root negative.

    Args:
        parameters: the parameters, one group.
        lr: learning rate.
        decay: ρ, in [0, 1). Default: 0.95.
        eps: ε, > 0. The DQN paper's 0.01 is for a sum over a batch of 32, which is 0.01 / 32² for a mean. Default:
            0.01 / 32².
        centered: whether m² is subtracted; otherwise m = 0. Default: True.

    Raises:
        ValueError: if `decay` or `eps` is out of range.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        *,
        decay: float = 0.95,
        eps: float = 0.01 / 32**2,
        centered: bool = True,
    ):
        if not (0 <= decay < 1 and eps > 0):
            raise ValueError(f"RMSProp(decay={decay}, eps={eps}): decay must be in [0, 1), eps > 0")
        super().__init__(parameters, {"lr": lr, "decay": decay, "eps": eps, "centered": centered})
        for parameter in self.parameters:
            means = {"mean": torch.zeros_like(parameter)} if centered else {}
            self.state[parameter] = {"square": torch.zeros_like(parameter), **means}

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the only group."""
        (group,) = self.param_groups
        return list(group["params"])

    def step(self, closure: None = None) -> None:
        """Make one step with the gradients of the parameters."""
        RMSPropStep(self)([parameter.grad for parameter in self.parameters])  # pyright: ignore[reportArgumentType]: each has one


class RMSPropStep:
    """The step of an RMSProp in a form that torch.compile can trace. Uses and changes the optimizer's state."""

    def __init__(self, optimizer: RMSProp):
        (self._group,) = optimizer.param_groups
        self.parameters = optimizer.parameters
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self._squares = [state["square"] for state in states]
        self._means = [state.get("mean") for state in states]

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Make one step with these gradients of the parameters."""
        decay = self._group["decay"]
        for parameter, gradient, square, mean in zip(
            self.parameters, gradients, self._squares, self._means, strict=True
        ):
            square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
            variance = square
            if mean is not None:
                mean.lerp_(gradient, 1 - decay)
                # rounding can make the difference negative
                variance = (square - mean * mean).clamp_min(0)
            parameter.sub_(self._group["lr"] * gradient / (variance + self._group["eps"]).sqrt())


def make_step(optimizer: torch.optim.Adam | RMSProp) -> AdamStep | RMSPropStep:
    """The step of an optimizer as a function of the gradients, which a graph can contain."""
    return RMSPropStep(optimizer) if isinstance(optimizer, RMSProp) else AdamStep(optimizer)


def make_optimizer(
    config: dict[str, Any], parameters: Iterable[Tensor], learning_rate: float
) -> torch.optim.Adam | RMSProp:
    """Build the optimizer named by `config["name"]`: adam or rmsprop. The other entries are its keyword arguments.

    Raises:
        ConfigError: if the name or a keyword is unknown, or a value is invalid.
    """
    keywords = {key: value for key, value in config.items() if key != "name"}
    try:
        if config.get("name") == "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, fused=True, **keywords)
        if config.get("name") == "rmsprop":
            return RMSProp(parameters, learning_rate, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer: {error}") from error
    hint = did_you_mean(str(config.get("name")), ("adam", "rmsprop"))
    raise ConfigError(f"optimizer.name={config.get('name')}: choose adam, rmsprop{hint}")
