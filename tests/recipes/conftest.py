"""Fixtures of the recipes' tests."""

import pytest
from hydra.core.config_store import ConfigStore


@pytest.fixture(autouse=True)
def no_schemas_of_torchrl(monkeypatch):
    """Other tests may have imported TorchRL's configurations, whose groups have the names of the recipes' groups."""
    store = ConfigStore.instance()
    own = {name: entries for name, entries in store.repo.items() if name not in ("logger", "sampler")}
    monkeypatch.setattr(store, "repo", own)
