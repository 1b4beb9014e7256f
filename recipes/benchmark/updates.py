"""Measures whole updates of recipes.dqn, and on a GPU those of recipes.td3 and recipes.sac too.

An update is sample, loss, gradients, optimizer and priorities. Network, loss and settings are those of the recipe, the
data is random. TorchRL's PER cycle and its uniform sample, which are nothing but sample and update of priorities, are
measured in the same run with the same transitions.
"""

from argparse import Namespace
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater
from tqdm import tqdm

from recipes import dqn, sac, td3
from recipes.benchmark import buffers
from recipes.benchmark.replay import make_cycle
from recipes.benchmark.results import PER_ONLY, UNIFORM_ONLY, Row
from recipes.benchmark.timing import Case, measure, skipping
from recipes.common.cli import parse_config
from recipes.common.networks import make_network
from recipes.common.options import compose_config
from recipes.common.schemas import SCHEMAS
from recipes.common.update import Update, make_optimizer
from torchrl_replay_ext import CompilableReplayBuffer, compile_step

# the batch is that of most papers on larger tasks; the recipe's CartPole has 64
SETTINGS = {"buffer_size": 10_000, "batch_size": 128, "hidden_sizes": "[120,84]", "train_interval": 10}
SETTINGS |= {"gradient_steps": 1, "target_update_interval": 500, "initial_epsilon": 0.1, "final_epsilon": 0.1}
OBSERVED, ACTIONS = 4, 2  # numbers of CartPole
CONTINUOUS = {"TD3": td3, "SAC": sac}  # with the settings for HalfCheetah, where a graph of TD3 makes two updates
HALFCHEETAH = 17, 6  # numbers observed, and numbers of an action
SAMPLERS = ("uniform", "PER", "ReaPER")


def contenders(device: torch.device) -> dict[str, tuple[str, str]]:
    """Samplers and ways to run them, by the names in the tables. Recipes have buffers of this package only."""
    whole = {
        label: (name, mode)
        for label, (name, mode) in buffers.contenders(device).items()
        if name in SAMPLERS and mode != buffers.EAGER
    }
    return {UNIFORM_ONLY: ("TorchRL uniform", buffers.EAGER), PER_ONLY: ("TorchRL PER", buffers.EAGER), **whole}


def configuration(*words: str, **settings: object) -> Any:
    """The configuration of recipes.dqn with SETTINGS and these words and settings."""
    own = [f"dqn.{key}={value}" for key, value in (SETTINGS | settings).items()]
    return parse_config(compose_config("dqn", [*own, *words]), SCHEMAS["dqn"])


def agent(device: torch.device) -> tuple[QValueActor, DQNLoss, TargetNetUpdater]:
    """The policy of the recipe, its loss and the update of its target network."""
    settings = configuration().dqn
    network = make_network((OBSERVED,), ACTIONS, settings.hidden_sizes, device=device)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    return actor, *dqn.make_loss(settings, actor)


def make_update(algorithm: str, config: Any, buffer: CompilableReplayBuffer, device: torch.device) -> Update:
    """The update of the recipe, with new networks."""
    settings = config.learning
    if algorithm == "DQN":
        _, loss_module, target = agent(device)
        optimizer = make_optimizer(settings.optimizer, loss_module.parameters(), settings.learning_rate)
        return dqn.make_update(config, buffer, loss_module, target, optimizer)
    recipe: Any = CONTINUOUS[algorithm]
    _, loss_module = recipe.make_loss(settings, *HALFCHEETAH, device)
    optimizers, target = recipe.make_optimizers(settings, loss_module), SoftUpdate(loss_module, tau=settings.tau)
    return recipe.make_update(config, buffer, loss_module, target, optimizers)


def make_case(algorithm: str, label: str, name: str, mode: str, data: TensorDict) -> Case:
    """The whole update with a sampler; for "cycle only", the cycle of TorchRL's sampler."""
    device, key = data["observation"].device, algorithm.lower()
    config: Any = configuration()
    if algorithm in CONTINUOUS:
        config = parse_config(compose_config(key, ["env=halfcheetah"]), SCHEMAS[key])
    size = config.learning.batch_size
    reference = UNIFORM_ONLY if mode == buffers.EAGER else buffers.contender(mode, "uniform")
    row = Row("updates", algorithm, label, reference, len(data), size)
    if mode == buffers.EAGER:
        cycle = make_cycle(buffers.full_buffer(name, mode, data), size, updates=buffers.has_priorities(name))
        return Case(row, cycle, lambda: (buffers.td_errors(size, device),))
    buffer = buffers.full_buffer(name, mode, data, batch_size=size, priority_key="td_error")
    update = make_update(algorithm, config, buffer, device)
    step = update if mode == buffers.OURS else compile_step(update, cudagraphs=mode == buffers.GRAPH)
    return Case(row, lambda: step(None), compiled=mode != buffers.OURS)


def transitions(algorithm: str, count: int) -> TensorDict:
    """`count` random transitions, of CartPole for DQN and of HalfCheetah for TD3 and SAC."""
    data = buffers.transitions(count).exclude("collector")
    data["action"] = torch.randint(ACTIONS, (count,))
    data["next", "truncated"] = torch.zeros_like(data["next", "done"])
    if algorithm in CONTINUOUS:
        observed, actions = HALFCHEETAH
        data["observation"], data["next", "observation"] = torch.randn(2, count, observed)
        data["action"] = torch.rand(count, actions) * 2 - 1
    return data


def measure_updates(chosen: list[str], options: Namespace) -> list[Row]:
    """Measure the updates at the largest capacity. `chosen`: labels of contenders."""
    device, cases = options.device, []
    for algorithm in ("DQN", *(CONTINUOUS if device.type == "cuda" else ())):
        data = transitions(algorithm, max(options.capacities)).to(device)
        for label, (name, mode) in tqdm(contenders(device).items(), desc="filling", leave=False):
            if label in chosen and (algorithm == "DQN" or mode == buffers.GRAPH):
                with skipping(f"{label} ({algorithm})"):
                    cases.append(make_case(algorithm, label, name, mode, data))
    return measure(cases, device, options.calls, "updates")
