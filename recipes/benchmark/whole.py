"""Measures the whole update of recipes.sac in four ways: of TorchRL's parts, and the recipe's, eager and in graphs."""

from argparse import Namespace
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives import SoftUpdate

from recipes import sac
from recipes.benchmark import buffers, updates
from recipes.benchmark.results import Row
from recipes.benchmark.timing import Case, measure, skipping
from recipes.common.cli import parse_config
from recipes.common.options import compose_config
from recipes.common.schemas import SCHEMAS, SACConfig
from torchrl_replay_ext import compile_step

TORCHRL, EAGER, COMPILED, STEP = "TorchRL", "recipe", "recipe, torch.compile", "recipe, compile_step"
NAMES = [TORCHRL, EAGER, COMPILED, STEP]


def torchrl_update(settings: SACConfig, buffer: TensorDictReplayBuffer) -> Callable[[], object]:
    """The update of TorchRL's SAC script, with the networks and optimizers of the recipe."""
    _, loss_module = sac.make_loss(settings, *updates.HALFCHEETAH, buffers.CPU)
    optimizers = sac.make_optimizers(settings, loss_module).values()
    target = SoftUpdate(loss_module, tau=settings.tau)

    def update() -> object:
        batch = buffer.sample()
        losses = loss_module(batch)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        target.step()
        buffer.update_tensordict_priority(batch)
        return losses

    return update


def make_step(name: str, data: TensorDict) -> tuple[int, Callable[[], object]]:
    """The batch size and the update of this name."""
    config = parse_config(compose_config("sac", ["env=halfcheetah"]), SCHEMAS["sac"])
    size = config.learning.batch_size
    settings = {"batch_size": size, "priority_key": "td_error"}
    if name == TORCHRL:
        return size, torchrl_update(
            config.learning, buffers.full_buffer("TorchRL PER", buffers.EAGER, data, **settings)
        )
    buffer = buffers.full_buffer("PER", buffers.OURS, data, **settings)
    update = updates.make_update("SAC", config, buffer, buffers.CPU)

    def step() -> object:
        return update(None)

    if name == COMPILED:
        return size, torch.compile(step, fullgraph=True)
    return size, compile_step(step) if name == STEP else step


def measure_whole(chosen: list[str], options: Namespace) -> list[Row]:
    """Measure the updates at the largest capacity. `chosen`: from NAMES."""
    cases, data = [], updates.transitions("SAC", max(options.capacities))
    for name in chosen:
        with skipping(f"{name} (whole)"):
            size, step = make_step(name, data)
            row = Row("whole", "SAC", name, TORCHRL, len(data), size)
            cases.append(Case(row, step, compiled=name in (COMPILED, STEP)))
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # compile_step does this by itself
        return measure(cases, buffers.CPU, options.calls, "whole")
