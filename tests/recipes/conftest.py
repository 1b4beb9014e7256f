"""Fixtures of the recipes' tests."""

import sys

import pytest
from hydra.core.config_store import ConfigStore

from recipes import plot


@pytest.fixture(autouse=True)
def no_schemas_of_torchrl(monkeypatch):
    """Other tests may have imported TorchRL's configurations, whose groups have the names of the recipes' groups."""
    store = ConfigStore.instance()
    own = {name: entries for name, entries in store.repo.items() if name not in ("logger", "sampler")}
    monkeypatch.setattr(store, "repo", own)


@pytest.fixture
def plot_refuses(monkeypatch, capsys):
    """Runs the command that draws figures, which must refuse its words; gives what stderr says."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["plot", *words])
        with pytest.raises(SystemExit) as exit:
            plot.main()
        assert exit.value.code == 2
        return capsys.readouterr().err

    return run
