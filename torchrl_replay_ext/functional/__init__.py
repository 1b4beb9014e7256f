"""Functions of tensors: allocation, divergences from a policy, and off-policy returns."""

from torchrl_replay_ext.functional.allocation import allocate
from torchrl_replay_ext.functional.gaussian import gaussian_policy_kl, ornstein_uhlenbeck_scale
from torchrl_replay_ext.functional.retrace import (
    acer_value_target,
    importance_ratio,
    importance_sampling_return,
    off_policy_trace_return,
    q_opc,
    retrace,
    trust_region_projection,
)

__all__ = [
    "acer_value_target",
    "allocate",
    "gaussian_policy_kl",
    "importance_ratio",
    "importance_sampling_return",
    "off_policy_trace_return",
    "ornstein_uhlenbeck_scale",
    "q_opc",
    "retrace",
    "trust_region_projection",
]
