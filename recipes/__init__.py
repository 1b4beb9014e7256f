"""Recipes: run them by `python -m recipes.<name>`. README.md is their index."""

import sys

# `python -m recipes.dqn` imports this package before dqn.py, whose imports take seconds. While Python looks for the
# module, argv[0] is "-m". The command line is checked here, so that mistakes are reported at once.
if sys.argv[0] == "-m":
    from recipes.common.cli import launch

    launch()
