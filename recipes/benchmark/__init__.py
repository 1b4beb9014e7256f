"""The measurements of recipes.benchmark. This file must not import torch, so that --help is fast."""
