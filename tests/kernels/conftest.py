"""Runs tests with each implementation of the kernels."""

import sys
from importlib import import_module

import numpy as np
import pytest
import torch

from tests.emulated_device import EmulatedDevice
from tests.kernels.implementations import KERNELS, WAYS, as_interpreted, as_operation, on_device
from torchrl_replay_ext import kernels
from torchrl_replay_ext.kernels import ops, reaper


@pytest.fixture
def accelerator():
    """A device whose state is decided on the CPU."""
    with EmulatedDevice("torchrl_replay_ext"):
        yield torch.device("emulated")


@pytest.fixture(params=WAYS)
def run(request, monkeypatch):
    """Runs a function with the kernels of another implementation."""

    # before any of them is patched: modules take parts of each other when they are imported
    for kernel in KERNELS:
        import_module(f"torchrl_replay_ext.kernels.{kernel._name.split('.')[0]}")

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            if request.param == "python":
                prefix = f"{kernels.__name__}."
                for loops in [each for name, each in sys.modules.items() if name.startswith(prefix)]:
                    for part, compiled in [*vars(loops).items()]:
                        patch.setattr(loops, part, getattr(compiled, "py_func", compiled))
            for kernel in KERNELS:
                module, name = kernel._name.split(".")
                if request.param == "python":
                    patch.setattr(kernel, "_loop", getattr(sys.modules[f"{kernels.__name__}.{module}"], name))
                else:
                    ways = {"operation": as_operation, "interpreter": as_interpreted, "device": on_device}
                    patch.setattr(ops.Kernel, "__call__", ways[request.param])
                if request.param == "interpreter":
                    # as many proposals as on the CPU, in few thread blocks, of which each takes long to interpret
                    module = import_module("torchrl_replay_ext.kernels.cuda.reaper")
                    patch.setattr(module, "ROUNDS", module.tl.constexpr(reaper.ROUNDS))
                    patch.setattr(module, "_ROWS", 16)
            # random numbers wrap around
            with np.errstate(over="ignore"):
                return function(*arguments)

    run.is_cuda = request.param in ("interpreter", "device")
    return run
