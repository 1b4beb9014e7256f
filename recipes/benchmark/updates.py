"""Measures whole updates of recipes.dqn, recipes.td3 and recipes.sac.

An update is sample, loss, gradients, optimizer, targets and priorities. Networks, losses and settings are those of the
recipes, the data is random. TD3's number is the time of one update of the critics with its share of the actor's update.
TorchRL's PER cycle and its uniform sample, which are nothing but sample and update of priorities, are measured in the
same run with the same transitions.
"""

from argparse import Namespace
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import QValueActor
from torchrl.objectives import SoftUpdate
from tqdm import tqdm

from recipes import dqn, sac, td3
from recipes.benchmark.buffers import (
    EAGER,
    GRAPH,
    OURS,
    contender,
    full_buffer,
    has_priorities,
    modes,
    td_errors,
    transitions,
)
from recipes.benchmark.replay import make_cycle
from recipes.benchmark.results import PER_ONLY, UNIFORM_ONLY, Row
from recipes.benchmark.timing import Case, in_shares, measure, skipping
from recipes.common.cli import parse_config, schema_of
from recipes.common.hints import compose_config
from recipes.common.networks import make_network
from recipes.common.optimizers import make_optimizer
from recipes.common.update import Update
from torchrl_replay_ext import compile_step

ALGORITHMS = ("dqn", "td3", "sac")
# DQN's batch is that of most papers on larger tasks; the recipe's CartPole has 64
OVERRIDES = {
    "dqn": "env=cartpole dqn.buffer_size=10000 dqn.batch_size=128 dqn.hidden_sizes=[120,84] dqn.train_interval=10 "
    "dqn.gradient_steps=1 dqn.target_update_interval=500 dqn.initial_epsilon=0.1 dqn.final_epsilon=0.1",
    "td3": "env=halfcheetah",
    "sac": "env=halfcheetah",
    "acer": "env=cartpole",
}
# numbers per observation and per action: CartPole for DQN, HalfCheetah for TD3 and SAC
OBSERVED, ACTIONS = {"dqn": 4, "td3": 17, "sac": 17}, {"dqn": 2, "td3": 6, "sac": 6}
SAMPLERS = ("uniform", "PER", "ReaPER")


def contenders(device: torch.device) -> list[tuple[str, str, str]]:
    """Names in the tables, samplers and ways to run them. Recipes have buffers of this package only."""
    whole = [(contender(mode, name), name, mode) for name in SAMPLERS for mode in modes(name, device) if mode != EAGER]
    return [(UNIFORM_ONLY, "TorchRL uniform", EAGER), (PER_ONLY, "TorchRL PER", EAGER), *whole]


def configuration(algorithm: str, *overrides: str) -> Any:
    """The configuration of a recipe."""
    words = [*OVERRIDES[algorithm].split(), *overrides]
    return parse_config(compose_config(algorithm, words), schema_of(algorithm))


def agent(algorithm: str, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """The hyperparameters of a recipe, its policy, its loss and the update of its target networks."""
    settings, observed, actions = configuration(algorithm).learning, OBSERVED[algorithm], ACTIONS[algorithm]
    if algorithm == "dqn":
        network = make_network((observed,), actions, settings.hidden_sizes, device=device)
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        return settings, actor, *dqn.make_loss(settings, actor)
    if algorithm == "td3":
        network, loss_module = td3.make_loss(settings, observed, actions, device)
        actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    else:
        network, loss_module = sac.make_loss(settings, observed, actions, device)
        actor = sac.make_actor(network)
    return settings, actor, loss_module, SoftUpdate(loss_module, tau=settings.tau)


def make_update(algorithm: str, replay: Any, device: torch.device) -> tuple[Update, int]:
    """The update of a recipe, and the number of updates per call. DQN's never copies the target network."""
    settings, _, loss_module, target = agent(algorithm, device)
    if algorithm == "dqn":
        optimizer = make_optimizer(settings.optimizer, loss_module.parameters(), settings.learning_rate)
        return dqn.make_update(settings, replay, loss_module, target, optimizer, num_updates=1), 1
    if algorithm == "td3":
        optimizers, count = td3.make_optimizers(settings, loss_module), settings.policy_delay
        return td3.make_update(settings, replay, loss_module, target, *optimizers, num_updates=count), count
    optimizers = sac.make_optimizers(settings, loss_module)
    return sac.make_update(replay, loss_module, target, optimizers, num_updates=1), 1


def experience(algorithm: str, count: int) -> TensorDict:
    """`count` random transitions, with the entries that the recipe's collector writes."""
    data, (observed, actions) = transitions(count), (OBSERVED[algorithm], ACTIONS[algorithm])
    data["observation"], data["next", "observation"] = torch.randn(2, count, observed)
    data["action"] = torch.randint(2, (count,)) if algorithm == "dqn" else torch.rand(count, actions) * 2 - 1
    data["next", "truncated"] = torch.zeros_like(data["next", "done"])
    return data.exclude("collector")


def make_case(label: str, name: str, mode: str, algorithm: str, data: TensorDict) -> Case:
    """The whole update of a recipe with a sampler; for "cycle only", the cycle of TorchRL's sampler."""
    device, size = data["observation"].device, configuration(algorithm).learning.batch_size
    row = Row(
        "updates",
        algorithm.upper(),
        label,
        UNIFORM_ONLY if mode == EAGER else contender(mode, "uniform"),
        len(data),
        size,
    )
    if mode == EAGER:
        cycle = make_cycle(full_buffer(name, mode, data), size, updates=has_priorities(name))
        return Case(row, cycle, lambda: (td_errors(size, device),))
    kind = "absolute" if algorithm == "sac" else "squared"
    buffer = full_buffer(name, mode, data, kind, batch_size=size, priority_key="td_error")
    update, units = make_update(algorithm, buffer, device)
    step = update if mode == OURS else compile_step(update, cudagraphs=mode == GRAPH)
    return Case(row, lambda: step(None), units=units, compiled=mode != OURS)


def measure_updates(chosen: list[str], options: Namespace) -> list[Row]:
    """Measure the updates at the largest capacity. `chosen`: see names."""
    rows, device = [], options.device
    for algorithm in in_shares(ALGORITHMS):
        cases: list[Case] = []
        with skipping(f"updates, {algorithm}"):
            data = experience(algorithm, max(options.capacities)).to(device)
            for label, name, mode in tqdm(contenders(device), desc="filling", leave=False):
                if label in chosen:
                    with skipping(label):
                        cases.append(make_case(label, name, mode, algorithm, data))
            rows += measure(cases, device, options.calls, f"updates, {algorithm}")
    return rows
