"""Gaussian policies."""

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

# Actions are kept away from the bounds, where tanh has no inverse.
_BOUND = 1 - 1e-6


def is_squashed(policy: nn.Module, name: str) -> bool:
    """Whether a Gaussian policy's actions are those of a tanh; ValueError, on behalf of ``name``, if it is no Gaussian.

    Modules that do not say what their distribution is count as Gaussian.
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
                f"{name}: the policy's distribution is {distribution} with {keywords}; it must be Normal, "
                "IndependentNormal or TanhNormal in its plain form, with actions in [-1, 1]."
            )
        squashed = issubclass(distribution, TanhNormal)
    return squashed


def _not_plain(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a distribution by which it differs from N(loc, scale), or the tanh of that."""
    plain = {"low": -1.0, "high": 1.0, "tanh_loc": False}
    # upscale is of tanh_loc
    without_effect = {"safe_tanh", "event_dims", "upscale"}
    return {
        key: value
        for key, value in keywords.items()
        if key not in without_effect and not (key in plain and bool((torch.as_tensor(value) == plain[key]).all()))
    }


def inside_bounds(action: Tensor, name: str) -> Tensor:
    """Stored actions of a squashed policy, moved so far inside (-1, 1) that atanh is finite.

    Raises:
        ValueError: on behalf of ``name``, if an action is outside of [-1, 1] (not looked at in a graph).
    """
    # what was rescaled may be beyond the bound by rounding
    raise_if(
        lambda: (action.abs() > 2 - _BOUND).any(),
        lambda: ValueError(
            f"{name}: a stored action is {float(action.abs().max()):.6g} in absolute value, but those of a TanhNormal "
            "policy are in [-1, 1]; store actions as the policy wrote them, before the environment rescales them."
        ),
    )
    return action.clamp(-_BOUND, _BOUND)


def require_continuous_actions(policy: nn.Module, action_key: NestedKey, name: str) -> None:
    """ValueError, on behalf of ``name``, if a spec or the distribution of the policy is discrete."""
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
                "only. Use the critic's sampler by itself."
            )
