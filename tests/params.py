"""Parameters that several tests share, also of tests that take long, and names of modules."""

import pkgutil
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from torchrl.data.replay_buffers.samplers import prioritized

import torchrl_replay_ext

# TorchRL's compiled code loads only with the torch that it was built for; its PER needs it
trees_of_torchrl = pytest.mark.skipif(
    prioritized.SumSegmentTreeFp32 is None, reason="TorchRL's segment trees do not load with this torch"
)
both_buffers = pytest.mark.parametrize("compilable", [False, True], ids=["stock", "compilable"])


def slow_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values, of which only those that are kept belong to the default run; a tuple is of several parameters."""

    def slow(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in kept else slow(value) for value in values]


def module_names() -> list[str]:
    """All modules of the package, but not those that need Triton."""
    found = [module.name for module in pkgutil.walk_packages(torchrl_replay_ext.__path__, "torchrl_replay_ext.")]
    return sorted(name for name in found if not name.startswith("torchrl_replay_ext.kernels.cuda."))
