import sys
import time

import pytest
import torch
from hydra.core.config_store import ConfigStore

from tests.sharding.local_ray import LocalRay
from torchrl_replay_ext import validate_on_accelerators

BEGIN = time.monotonic()
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--max-seconds", type=float, help="skip the tests that have not begun after so many seconds")


def pytest_runtest_setup(item):
    limit = item.config.getoption("--max-seconds")
    if limit is not None and time.monotonic() - BEGIN > limit:
        pytest.skip("--max-seconds have passed")


@pytest.fixture
def from_scratch():
    """Nothing compiled is left from another test, nor for the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def local_ray(monkeypatch):
    """The actors of Ray are in this process."""
    ray = LocalRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.fixture
def no_schemas_of_torchrl(monkeypatch):
    """For recipes: other tests may have imported TorchRL's configurations, whose groups have the names of theirs."""
    store = ConfigStore.instance()
    own = {name: entries for name, entries in store.repo.items() if name not in ("logger", "sampler")}
    monkeypatch.setattr(store, "repo", own)


@pytest.fixture(autouse=True)
def fixed_state():
    torch.manual_seed(0)
    validate_on_accelerators(False)
    # a run of a recipe sets it
    torch.set_flush_denormal(False)
