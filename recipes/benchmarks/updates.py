"""Measures whole updates of recipes.dqn and recipes.td3: sample, loss, gradients, optimizer, targets, priorities.

Networks, losses and settings are those of the recipes, the data is random. TD3's number is the time of one update of
the critics with its share of the actor's update.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import RandomSampler
from torchrl.modules import QValueActor
from torchrl.objectives import SoftUpdate
from tqdm import tqdm

from recipes import dqn, td3
from recipes.benchmarks.device import EAGER, GRAPH, MODES, Case, chosen_modes, make_buffer, measure, torchrl_per
from recipes.benchmarks.replay import ALPHA, BETA, EPISODE_LENGTH, fill
from recipes.benchmarks.results import LeftOutError, Row
from recipes.networks import make_network
from recipes.optimizers import make_optimizer
from recipes.run import parse_config
from recipes.schemas.dqn import Config as DQNRun
from recipes.schemas.td3 import Config as TD3Run
from recipes.update import CompiledUpdate, Delayed, eager_update, target_pairs
from torchrl_replay_ext import ProportionalSampler, ReaPERSampler

CONF = Path(__file__).parents[1] / "conf"
# numbers per observation and per action: CartPole for DQN, HalfCheetah for TD3
OBSERVED, ACTIONS = {"dqn": 4, "td3": 17}, {"dqn": 2, "td3": 6}
MODES_OF_UPDATES = tuple(mode for mode in MODES if mode != "captured")  # recipes have no such mode

# Name, function that makes the sampler from capacity and device, and whether the sampler is of this package.
SAMPLERS: tuple[tuple[str, Callable[[int, torch.device], Any], bool], ...] = (
    ("torchrl PrioritizedSampler, CPU trees", lambda *where: torchrl_per(*where, on_device=False), False),
    ("torchrl PrioritizedSampler, CUDA trees", lambda *where: torchrl_per(*where, on_device=True), False),
    ("uniform", lambda capacity, device: RandomSampler(), True),
    (
        "ProportionalSampler",
        lambda capacity, device: ProportionalSampler(capacity, alpha=ALPHA, beta=BETA, td_error="squared"),
        True,
    ),
    ("ReaPERSampler", lambda capacity, device: ReaPERSampler(capacity, td_error="squared"), True),
)
NAMES = tuple(f"{mode} {name}" for name, _, ours in SAMPLERS for mode in (MODES_OF_UPDATES if ours else (EAGER,)))


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


def dqn_update(device: torch.device) -> tuple[int, dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Batch size, arguments of the update except the buffer, and the targets of recipes.dqn on CartPole."""
    config = settings("dqn", "cartpole", DQNRun)
    network = make_network((OBSERVED["dqn"],), ACTIONS["dqn"], config.hidden_sizes, device=device)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module, _, target_step = dqn.make_loss(config, actor)
    optimizer = make_optimizer(config.optimizer, loss_module.parameters(), config.learning_rate)
    arguments = {
        "loss_function": loss_module,
        "optimizers": [optimizer],
        "max_grad_norm": config.max_grad_norm,
        "target_step": target_step,
    }
    return config.batch_size, arguments, target_pairs(loss_module)


def td3_update(device: torch.device) -> tuple[int, dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Batch size, arguments of the update except the buffer, and the targets of recipes.td3 on HalfCheetah."""
    config = settings("td3", "halfcheetah", TD3Run)
    _, loss_module = td3.make_loss(config, OBSERVED["td3"], ACTIONS["td3"], device)
    actor_optimizer, critic_optimizer = (
        torch.optim.Adam(parameters.flatten_keys().values(), lr=rate, fused=True)
        for parameters, rate in (
            (loss_module.actor_network_params, config.actor_learning_rate),
            (loss_module.qvalue_network_params, config.critic_learning_rate),
        )
    )
    delayed = Delayed(
        interval=config.policy_delay,
        loss_function=partial(td3.actor_loss, loss_module),
        optimizers=[actor_optimizer],
        target_step=SoftUpdate(loss_module, tau=config.tau).step,
    )
    arguments = {
        "loss_function": partial(td3.critic_loss, loss_module),
        "optimizers": [critic_optimizer],
        "delayed": delayed,
    }
    return config.batch_size, arguments, []


RECIPES = {"dqn": dqn_update, "td3": td3_update}


def step_in_mode(
    mode: str, replay: Any, arguments: dict[str, Any], targets: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Callable[[], object], int]:
    """A function that makes updates in this mode, and the number of updates per call."""
    num_updates = arguments["delayed"].interval if "delayed" in arguments else 1
    if mode == EAGER:
        update = eager_update(replay, **arguments)
        return lambda: [update(number + 1) for number in range(num_updates)], num_updates
    compiled = CompiledUpdate(replay, **arguments, targets=targets, num_updates=num_updates, cudagraphs=mode == GRAPH)
    return compiled, num_updates


def measure_updates(
    names: Sequence[str], device: torch.device, capacity: int, calls: int
) -> tuple[list[Row], list[str]]:
    """Measure the updates, with the recipes' batch sizes.

    Args:
        names: contenders, from NAMES.
        device: device of networks and storage.
        capacity: capacity of the full buffers.
        calls: number of measured calls per contender and recipe; a call is one update of DQN, two of TD3.

    Returns:
        The rows, and a note for each skipped contender.
    """
    cases: list[Case] = []
    notes: dict[str, None] = {}
    for recipe, make_update in RECIPES.items():
        data = experience(recipe, capacity).to(device)
        for name, make_sampler, ours in tqdm(SAMPLERS, desc=f"filling, {recipe}", leave=False):
            for mode in chosen_modes([each for each in names if each in NAMES], name, ours, device):
                try:
                    sampler = make_sampler(capacity, device)
                except LeftOutError as error:
                    notes[f"{mode} {name} is skipped: {error}."] = None
                    continue
                batch_size, arguments, targets = make_update(device)
                replay = make_buffer(sampler, ours, capacity, device, batch_size=batch_size, priority_key="td_error")
                fill(replay, data)
                step, num_updates = step_in_mode(mode, replay, arguments, targets)
                cases.append(Case(Row(recipe, capacity, batch_size, f"{mode} {name}"), mode, step, num_updates))
    rows, failed = measure(cases, device, calls)
    return rows, [*notes, *failed]
