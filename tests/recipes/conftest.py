"""Fixtures of the recipes' tests."""

import sys

import pytest

from recipes.studies import plot


@pytest.fixture(autouse=True)
def only_schemas_of_recipes(no_schemas_of_torchrl):
    pass


@pytest.fixture
def refused(capsys):
    """Calls a function that must end the process with exit code 2; gives what stderr says."""

    def run(function, *arguments):
        with pytest.raises(SystemExit) as exit:
            function(*arguments)
        assert exit.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Runs the command that draws figures; gives what it prints."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["plot", *map(str, words)])
        plot.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def plot_refuses(drawn, refused):
    """Runs the command that draws figures, which must refuse its words; gives what stderr says."""
    return lambda *words: refused(drawn, *words)
