"""Networks for observations that are vectors or stacked frames."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrl.modules import MLP, ConvNet


def to_tensor(observations: np.ndarray, device: torch.device) -> Tensor:
    """Observations [n, ...] as networks take them and buffers store them: images of bytes as uint8, others float32."""
    dtype = torch.uint8 if observations.dtype == np.uint8 and observations.ndim > 2 else torch.float32
    return torch.as_tensor(observations, dtype=dtype, device=device)


def on_arrays(policy: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[np.ndarray], np.ndarray]:
    """A policy, which maps observations to actions, as a function of arrays; `device`: that of its network."""

    @torch.inference_mode()
    def act(observations: np.ndarray) -> np.ndarray:
        return policy(to_tensor(observations, device)).cpu().numpy()

    return act


# Normalized observations are clipped to this number of standard deviations.
OBSERVED = 10.0
# filters, kernel sizes and strides of the layers
_ATARI: Any = ([32, 64, 64], [8, 4, 3], [4, 2, 1])
_MINATAR: Any = ([16], [3], [1])
_LEAST_PIXELS = 36  # smallest image for _ATARI


class Convolutions(nn.Module):
    """Convolutions with ReLU: the three layers of Mnih et al. 2015 and of the ACER paper, or the layer of MinAtar.

    Filters, kernel size and stride are 32 of 8x8 / 4, 64 of 4x4 / 2 and 64 of 3x3 / 1. Images with less than 36 pixels
    per side have one layer, 16 of 3x3 / 1 (Young and Tian 2019).

    Args:
        shape: shape of an observation, [channels, height, width], uint8.
        device: device of the parameters. Default: None, torch's default.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device | None = None):
        super().__init__()
        layers = _ATARI if min(shape[1:]) >= _LEAST_PIXELS else _MINATAR
        self.layers = ConvNet(shape[0], None, *layers, activation_class=nn.ReLU, device=device)
        with torch.no_grad():
            self.num_features = self.layers(torch.zeros(1, *shape, device=device)).shape[1]

    def forward(self, observation: Tensor) -> Tensor:
        """Features [..., num_features] of observations [..., channels, height, width]."""
        return self.layers(observation.to(torch.float32) / 255)


def make_network(
    observed: tuple[int, ...],
    outputs: int,
    hidden_sizes: list[int],
    *,
    activation: type[nn.Module] = nn.ReLU,
    activate_last: bool = False,
    device: torch.device | None = None,
) -> nn.Module:
    """Build fully connected layers, after :class:`Convolutions` if observations are images.

    Args:
        observed: shape of an observation, a vector or an image.
        outputs: number of outputs.
        hidden_sizes: units of each hidden fully connected layer.
        activation: activation of the fully connected layers; for images it is always ReLU. Default: ReLU.
        activate_last: whether the activation is also applied to the outputs. Default: False.
        device: device of the parameters. Default: None, torch's default.
    """
    images = len(observed) == 3
    trunk = [Convolutions(observed, device)] if images else []
    layers = MLP(
        trunk[0].num_features if trunk else observed[0],
        outputs,
        num_cells=hidden_sizes,
        activation_class=nn.ReLU if images else activation,
        activate_last_layer=activate_last,
        device=device,
    )
    return nn.Sequential(*trunk, layers) if trunk else layers


class Normalizer(nn.Module):
    """Normalizes observations by their running mean and standard deviation; if not `active`, returns them unchanged.

    Args:
        size: length of an observation vector.
        active: whether observations are normalized.
    """

    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, size: int, *, active: bool):
        super().__init__()
        self.active = active
        for name, length in (("mean", size), ("square", size), ("count", 1)):
            self.register_buffer(name, torch.zeros(length, dtype=torch.float64))

    @torch.no_grad()
    def update(self, observations: Tensor) -> None:
        """Add ``observations`` [n, size] to the running statistics."""
        if self.active:
            observations = observations.to(self.mean)
            self.count.add_(len(observations))
            share = len(observations) / self.count
            self.mean.lerp_(observations.mean(0), share)
            self.square.lerp_(observations.square().mean(0), share)

    def forward(self, observations: Tensor) -> Tensor:
        """Normalized observations, in their own dtype."""
        if not self.active:
            return observations
        deviation = (self.square - self.mean.square()).clamp_min(1e-8).sqrt()
        known = (observations - self.mean) / torch.where(self.count > 1, deviation, torch.ones_like(deviation))
        return known.clamp(-OBSERVED, OBSERVED).to(observations.dtype)
