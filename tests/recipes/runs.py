"""Configurations of the recipes as tests need them, and what runs leave."""

import csv
import importlib.util
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from recipes.run import resumed_config, typed

ROOT = Path(__file__).parents[2]


class Composer:
    """Composes configurations of a recipe from overrides.

    Args:
        name: the recipe's.
        schema: its configuration's class.
        tiny: overrides for a run of less than a second.
    """

    def __init__(self, name, schema, tiny):
        self.name, self.schema, self.tiny = name, schema, tiny

    def composed(self, *overrides):
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "recipes" / "conf")):
            return compose(self.name, overrides=list(overrides))

    def configuration(self, *overrides):
        return self.composed(*self.tiny, *overrides)

    def settings(self, *overrides):
        """The recipe's hyperparameters, checked, of the published configuration."""
        return typed(self.composed(*overrides), self.schema).learning

    def resumed(self, run_dir, *overrides):
        overrides = [f"resume={run_dir}", *overrides]
        return resumed_config(self.configuration(*overrides), run_dir, overrides)


def rows(run_dir):
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")
