"""Configuration classes of the recipes. They do not import torch, so mistakes are reported at once."""
