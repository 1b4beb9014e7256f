"""Tensor storages for compiled steps and for stacked frames."""
