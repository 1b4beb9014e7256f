"""Modules that the recipes share: command line, configuration, collection, evaluation, checkpoints, logs."""
