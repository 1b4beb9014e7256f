"""Adds the choices of this package to TorchRL's trainers; Hydra loads all modules of ``hydra_plugins``."""

import importlib
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ReplaySearchPath(SearchPathPlugin):
    """Registers :mod:`torchrl_replay_ext.configs` and adds the configurations of :mod:`torchrl_replay_ext.conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Register the configurations if the application uses TorchRL's; Hydra calls it before composing one."""
        # Hydra loads this module in every application of the environment; others get no additional names and need not
        # import torch
        if "torchrl.trainers.algorithms.configs" in sys.modules:
            importlib.import_module("torchrl_replay_ext.configs")
            search_path.append(provider="torchrl_replay_ext", path="pkg://torchrl_replay_ext.conf")
