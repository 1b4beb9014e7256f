"""Checks of policies and of their stored actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor, nn
from torch.distributions import Normal
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot
from torchrl.modules import IndependentNormal, TanhNormal

from torchrl_replay_ext.compilation import raise_if

# Stored actions may exceed 1 by this, the rounding error of rescaled actions.
_ROUNDING = 1e-6


def is_squashed(policy: nn.Module, name: str, hint: str = "") -> bool:
    """Whether a policy is a TanhNormal. A module without a ``distribution_class`` is assumed to be Gaussian.

    Args:
        policy: the policy.
        name: the class that error messages name.
        hint: another way out, at the end of the message. Default: none.

    Raises:
        ValueError: if the distribution is neither Gaussian nor a TanhNormal on [-1, 1].
    """
    squashed = False
    for module in policy.modules():
        distribution = getattr(module, "distribution_class", None)
        if distribution is None:
            continue
        known = isinstance(distribution, type) and issubclass(distribution, (TanhNormal, Normal, IndependentNormal))
        keywords = _not_plain(getattr(module, "distribution_kwargs", None) or {})
        if not known or keywords:
            raise ValueError(
                f"{name}: the policy's distribution is {distribution}{f' with {keywords}' if keywords else ''}; it "
                "must be Normal, IndependentNormal or TanhNormal, without arguments that change its form, and with "
                f"actions in [-1, 1].{hint}"
            )
        squashed = issubclass(distribution, TanhNormal)
    return squashed


def _not_plain(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that make a distribution differ from N(loc, scale), or from its tanh."""
    plain = {"low": -1.0, "high": 1.0, "tanh_loc": False}
    # upscale has an effect only with tanh_loc
    without_effect = {"safe_tanh", "event_dims", "upscale"}
    return {
        key: value
        for key, value in keywords.items()
        if key not in without_effect and not (key in plain and bool((torch.as_tensor(value) == plain[key]).all()))
    }


def inside_bounds(action: Tensor, name: str) -> Tensor:
    """Clamp stored actions of a TanhNormal policy to an interval inside (-1, 1), where atanh is finite.

    The interval is that of TorchRL's TanhNormal: in float32 up to 1 − 1e-6, in float64 up to 1 − 1e-15.

    Args:
        action: the stored actions, any shape.
        name: the class that error messages name.

    Raises:
        ValueError: if an action is outside of [-1, 1]. Values are not checked in a compiled graph.
    """
    bound = 1 - torch.finfo(action.dtype).resolution
    raise_if(
        lambda: (action.abs() > 1 + _ROUNDING).any(),
        lambda: ValueError(
            f"{name}: a stored action is {float(action.abs().max()):.6g} in absolute value, but the actions of a "
            "TanhNormal policy are in [-1, 1]; store actions as the policy writes them, before the environment "
            "rescales them."
        ),
    )
    return action.clamp(-bound, bound)


def require_continuous_actions(policy: nn.Module, action_key: NestedKey, name: str) -> None:
    """Raise ValueError if the action spec or the distribution of a policy is discrete.

    Args:
        policy: the policy.
        action_key: the entry of the action in a composite spec.
        name: the class that error messages name.
    """
    for module in policy.modules():
        spec = getattr(module, "spec", None)
        if isinstance(spec, Composite):
            spec = spec.get(action_key, None)
        distribution = getattr(module, "distribution_class", None)
        found = None
        if isinstance(spec, (Binary, Categorical, MultiCategorical, MultiOneHot, OneHot)):
            found = f"a spec of class {type(spec).__name__}"
        elif getattr(distribution, "has_enumerate_support", False) is True:
            found = f"the distribution {getattr(distribution, '__name__', distribution)}"
        if found is not None:
            raise ValueError(
                f"{name}: the policy has {found}, so its actions are discrete; {name} compares continuous actions "
                "only. Use the critic's sampler without it."
            )
