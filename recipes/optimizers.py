"""Optimizers by name."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.run import ConfigError


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in the DQN paper (Graves 2013, eqs. 38-41, without momentum), or not centered, as in A3C.

    n ← ρ n + (1 − ρ) g²,  m ← ρ m + (1 − ρ) g,  x ← x − lr g / √(n − m² + ε)

    Torch's own adds ε behind the root, where rounding can make it one of a negative number.

    Args:
        parameters: one group.
        lr: learning rate.
        decay: ρ.
        eps: ε. The DQN paper's .01 is for the sum over a batch of 32; for the mean, .01 / 32².
        centered: whether m is subtracted.
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
        """The parameters of its only group."""
        (group,) = self.param_groups
        return list(group["params"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step along the gradients of the parameters."""
        RMSPropStep(self)([parameter.grad for parameter in self.parameters])  # pyright: ignore[reportArgumentType]: each has one


class RMSPropStep:
    """The step of an RMSProp, on its own state, in a form that can be traced."""

    def __init__(self, optimizer: RMSProp):
        (self._group,) = optimizer.param_groups
        self.parameters = optimizer.parameters
        states = [optimizer.state[parameter] for parameter in self.parameters]
        self._squares = [state["square"] for state in states]
        self._means = [state.get("mean") for state in states]

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Step along these gradients of the parameters."""
        decay = self._group["decay"]
        for parameter, gradient, square, mean in zip(
            self.parameters, gradients, self._squares, self._means, strict=True
        ):
            square.mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
            variance = square
            if mean is not None:
                mean.lerp_(gradient, 1 - decay)
                # rounding may leave less than nothing
                variance = (square - mean * mean).clamp_min(0)
            parameter.sub_(self._group["lr"] * gradient / (variance + self._group["eps"]).sqrt())


def make_optimizer(
    config: dict[str, Any], parameters: Iterable[Tensor], learning_rate: float
) -> torch.optim.Adam | RMSProp:
    """Builds the optimizer that `config["name"]` names: adam or rmsprop; the other entries are its keywords.

    Raises:
        ConfigError: unknown name or keyword, or a value that is refused.
    """
    keywords = {key: value for key, value in config.items() if key != "name"}
    try:
        if config.get("name") == "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, fused=True, **keywords)
        if config.get("name") == "rmsprop":
            return RMSProp(parameters, learning_rate, **keywords)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {error}") from error
    raise ConfigError(f"optimizer.name={config.get('name')}: choose adam, rmsprop")
