"""Fixtures of the recipes' tests."""

import sys
from importlib import import_module

import pytest
from torch import nn

from recipes.common.networks import Normalizer
from recipes.studies import plot
from tests.recipes.runs import copies, states


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
def watched(monkeypatch):
    """Trains; gives (online, target) and what is learned, before the first and after each call of a module's update.

    Also the loss, or for recipes.r2d2 the network.
    """

    def run(name, names, train):
        module, found, learned, networks = import_module(f"recipes.{name}"), [], [], []

        def note():
            found.append(states(networks, names))
            learned.append(copies(networks[0].parameters()))

        def noting(update):
            def call(*arguments):
                result = update(*arguments)
                note()
                return result

            return call

        def make(first, replay, *given, **options):
            networks.extend(each for each in given if isinstance(each, nn.Module) and not isinstance(each, Normalizer))
            note()
            made = build(first, replay, *given, **options)
            return tuple(map(noting, made)) if isinstance(made, tuple) else noting(made)

        function = "make_updates" if name == "acer" else "make_update"
        build = getattr(module, function)
        monkeypatch.setattr(module, function, make)
        train()
        return found, learned, networks[0]

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
