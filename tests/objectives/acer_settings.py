"""Settings for tests of both losses of ACER; the parameter ``acer`` is the module of one of them."""

from types import ModuleType
from typing import Any

import pytest

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous

TIS = "truncated_importance_sampling"
LAYOUTS = [
    *((discrete, {"trunk": trunk}) for trunk in ("apart", "modules", "hidden")),
    *((continuous, {"shared": shared, "dueling": dueling}) for shared in (False, True) for dueling in (False, True)),
]
both = pytest.mark.parametrize("acer", [discrete, continuous], ids=["discrete", "continuous"])


def of_both(*cases: tuple) -> list[tuple]:
    """Parameters of tests: each case with each of the modules."""
    return [(acer, *case) for acer in (discrete, continuous) for case in cases]


def setting_of(acer: ModuleType, **arguments: Any) -> Any:
    """A loss module with its networks; if it samples actions, they are always the same."""
    setting = acer.Setting(**arguments)
    if acer is continuous:
        continuous.sample_the_same(setting)
    return setting


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value)).rsplit("_", 1)[-1] if not isinstance(value, dict) else str(value)


def has_shared_parameters(arguments: dict[str, Any]) -> bool:
    return arguments.get("shared", False) or arguments.get("trunk", "apart") != "apart"


each_layout = pytest.mark.parametrize(("acer", "arguments"), LAYOUTS, ids=name_of)


def average_of(loss: Any) -> Any:
    return dict(loss.named_children())["target_actor_network_params"]
