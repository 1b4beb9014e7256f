"""Measures whole updates of recipes.dqn, recipes.td3 and recipes.sac.

An update is sample, loss, gradients, optimizer, targets and priorities. Networks, losses and settings are those of the
recipes, the data is random. TD3's number is the time of one update of the critics with its share of the actor's update.
The margin of a sampler is its time minus that of uniform draws in the same mode. For comparison, TorchRL's PER cycle
(sample and update of the priorities, nothing else) and TorchRL's uniform sample are measured in the same run, with the
same transitions; their difference is TorchRL's margin.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from torchrl.modules import QValueActor
from torchrl.objectives import SoftUpdate
from tqdm import tqdm

from recipes import dqn, sac, td3
from recipes.benchmark.buffers import EPISODE_LENGTH, OURS, fill, make_buffer, td_errors
from recipes.benchmark.cycle import make_step
from recipes.benchmark.results import CYCLE_ONLY, LeftOutError, Row
from recipes.benchmark.timing import CAPTURED, EAGER, GRAPH, MODES, Case, contender, in_shares, measure, modes_of
from recipes.common.cli import parse_config
from recipes.common.networks import make_network
from recipes.common.optimizers import make_optimizer
from recipes.common.schemas.dqn import Config as DQNRun
from recipes.common.schemas.sac import Config as SACRun
from recipes.common.schemas.td3 import Config as TD3Run
from recipes.common.update import Update
from torchrl_replay_ext import compile_step

MEASUREMENT = "updates"
CONF = Path(__file__).parents[1] / "conf"
# numbers per observation and per action: CartPole for DQN, HalfCheetah for TD3 and SAC
OBSERVED, ACTIONS = {"dqn": 4, "td3": 17, "sac": 17}, {"dqn": 2, "td3": 6, "sac": 6}
# DQN's batch is that of most papers on larger tasks; the recipe's CartPole has 64
BATCH_SIZES = {"dqn": 128, "td3": 256, "sac": 256}
TD_ERRORS = {"dqn": "squared", "td3": "squared", "sac": "absolute"}
SAMPLERS = ("TorchRL PER", "TorchRL PER, CUDA trees", "uniform", "PER", "ReaPER")
TORCHRL_CYCLES = ("TorchRL uniform", "TorchRL PER")
NAMES = (
    *(f"{name}{CYCLE_ONLY}" for name in TORCHRL_CYCLES),
    *(
        contender(mode, name)
        for name in SAMPLERS
        for mode in (MODES if name in OURS else (EAGER,))
        if mode != CAPTURED  # recipes have no such mode
    ),
)

COMPARED_ON_CPU = tuple(name for name in NAMES if name.endswith(CYCLE_ONLY) or name.startswith("compiled"))

# Builds an update function for a buffer and a number of updates per call; and that number.
Builder = tuple[Callable[[Any, int], Update], int]


def settings(recipe: str, env: str, schema: type) -> Any:
    """The published hyperparameters of a recipe for an environment."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return parse_config(compose(recipe, overrides=[f"env={env}"]), schema).learning


def experience(recipe: str, count: int) -> TensorDict:
    """`count` random transitions, with the entries that the recipe's collector writes."""
    end = ((torch.arange(count) + 1) % EPISODE_LENGTH == 0).unsqueeze(1)
    discrete = recipe == "dqn"
    action = torch.randint(ACTIONS[recipe], (count,)) if discrete else torch.rand(count, ACTIONS[recipe]) * 2 - 1
    return TensorDict(
        {
            "observation": torch.randn(count, OBSERVED[recipe]),
            "action": action,
            "next": {
                "observation": torch.randn(count, OBSERVED[recipe]),
                "reward": torch.randn(count, 1),
                "done": end,
                "terminated": end.clone(),
                "truncated": torch.zeros_like(end),
            },
        },
        [count],
    )


def dqn_update(device: torch.device) -> Builder:
    """The update of recipes.dqn on CartPole, without copies of the target network."""
    config = settings("dqn", "cartpole", DQNRun)
    network = make_network((OBSERVED["dqn"],), ACTIONS["dqn"], config.hidden_sizes, device=device)
    loss_module, target = dqn.make_loss(
        config, QValueActor(network, in_keys=["observation"], action_space="categorical")
    )
    optimizer = make_optimizer(config.optimizer, loss_module.parameters(), config.learning_rate)
    return lambda replay, n: dqn.make_update(config, replay, loss_module, target, optimizer, num_updates=n), 1


def td3_update(device: torch.device) -> Builder:
    """The update of recipes.td3 on HalfCheetah."""
    config = settings("td3", "halfcheetah", TD3Run)
    _, loss_module = td3.make_loss(config, OBSERVED["td3"], ACTIONS["td3"], device)
    target = SoftUpdate(loss_module, tau=config.tau)
    optimizers = td3.make_optimizers(config, loss_module)
    return (
        lambda replay, n: td3.make_update(config, replay, loss_module, target, *optimizers, num_updates=n),
        config.policy_delay,
    )


def sac_update(device: torch.device) -> Builder:
    """The update of recipes.sac on HalfCheetah."""
    config = settings("sac", "halfcheetah", SACRun)
    _, loss_module = sac.make_loss(config, OBSERVED["sac"], ACTIONS["sac"], device)
    target = SoftUpdate(loss_module, tau=config.tau)
    optimizers = sac.make_optimizers(config, loss_module)
    return lambda replay, n: sac.make_update(replay, loss_module, target, optimizers, num_updates=n), 1


RECIPES: dict[str, Callable[[torch.device], Builder]] = {"dqn": dqn_update, "td3": td3_update, "sac": sac_update}


def measure_updates(
    names: Sequence[str], device: torch.device, capacity: int, calls: int
) -> tuple[list[Row], list[str]]:
    """Measure the updates.

    Args:
        names: contenders, from NAMES.
        device: device of networks and storage.
        capacity: capacity of the full buffers.
        calls: number of measured calls per contender and recipe; a call is one update of DQN and SAC, two of TD3.

    Returns:
        The rows, and a note for each skipped contender.
    """
    rows: list[Row] = []
    notes: dict[str, None] = {}
    for recipe in in_shares(RECIPES):
        cases: list[Case] = []
        data = experience(recipe, capacity).to(device)
        for name in tqdm(TORCHRL_CYCLES, desc=f"filling, {recipe}", leave=False):
            if f"{name}{CYCLE_ONLY}" in names:
                try:
                    cases.append(torchrl_cycle(recipe, name, data))
                except LeftOutError as error:
                    notes[f"{name}{CYCLE_ONLY} is skipped: {error}."] = None
        for name in tqdm(SAMPLERS, desc=f"filling, {recipe}", leave=False):
            for mode in modes_of(name, names):
                try:
                    cases.append(whole_update(recipe, mode, name, data))
                except LeftOutError as error:
                    notes[f"{contender(mode, name)} is skipped: {error}."] = None
        more, failed = measure(cases, device, calls, f"{MEASUREMENT}, {recipe}")
        rows, notes = rows + more, notes | dict.fromkeys(failed)
    return rows, list(notes)


def torchrl_cycle(recipe: str, name: str, data: TensorDict) -> Case:
    """The sample of a sampler of TorchRL, and the update of its priorities if it has any."""
    device, size = data["observation"].device, BATCH_SIZES[recipe]
    buffer = make_buffer(name, len(data), device, compilable=False)
    fill(buffer, data)
    row = Row(MEASUREMENT, recipe, f"{name}{CYCLE_ONLY}", len(data), size)
    step = torch.no_grad()(make_step(buffer, EAGER, 0, size))
    return Case(row, step, inputs=lambda: (None, td_errors(size, device)))


def whole_update(recipe: str, mode: str, name: str, data: TensorDict) -> Case:
    """The update of a recipe with a sampler."""
    device, size = data["observation"].device, BATCH_SIZES[recipe]
    make_update, num_updates = RECIPES[recipe](device)
    buffer = make_buffer(
        name,
        len(data),
        device,
        compilable=name in OURS,
        td_error=TD_ERRORS[recipe],
        batch_size=size,
        priority_key="td_error",
    )
    fill(buffer, data)
    update = make_update(buffer, num_updates)
    step = update if mode == EAGER else compile_step(update, cudagraphs=mode == GRAPH)
    row = Row(MEASUREMENT, recipe, contender(mode, name), len(data), size)
    return Case(row, lambda: step(None), mode, units=num_updates)
