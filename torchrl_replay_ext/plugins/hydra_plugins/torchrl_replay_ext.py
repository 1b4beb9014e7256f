"""Adds our choices to those of TorchRL's trainers; Hydra loads every module of the namespace ``hydra_plugins``."""

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ReplaySearchPath(SearchPathPlugin):
    """Registers :mod:`torchrl_replay_ext.configs` and adds the configurations of :mod:`torchrl_replay_ext.conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before a configuration is composed."""
        # Hydra loads this for every application in the environment: those that do not use TorchRL's configurations
        # get neither our names among theirs nor the time to import torch
        if "torchrl.trainers.algorithms.configs" in sys.modules:
            import torchrl_replay_ext.configs  # noqa: F401

            search_path.append(provider="torchrl_replay_ext", path="pkg://torchrl_replay_ext.conf")
