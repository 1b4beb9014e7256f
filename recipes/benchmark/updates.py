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
from recipes.common.update import make_optimizer
from torchrl_replay_ext import compile_step

# the batch is that of most papers on larger tasks; the recipe's CartPole has 64
SETTINGS = {"buffer_size": 10_000, "batch_size": 128, "hidden_sizes": "[120,84]", "train_interval": 10}
SETTINGS |= {"gradient_steps": 1, "target_update_interval": 500, "initial_epsilon": 0.1, "final_epsilon": 0.1}
OBSERVED, ACTIONS = 4, 2  # numbers of CartPole
CONTINUOUS = {"TD3": td3, "SAC": sac}  # with the settings for HalfCheetah, where a graph of TD3 makes two updates
HALFCHEETAH = 17, 6  # numbers observed, and numbers of an action
SAMPLERS = ("uniform", "PER", "ReaPER")


def contenders(device: torch.device) -> list[tuple[str, str, str]]:
    """Names in the tables, samplers and ways to run them. Recipes have buffers of this package only."""
    whole = [
        (buffers.contender(mode, name), name, mode)
        for name in SAMPLERS
        for mode in buffers.modes(name, device)
        if mode != buffers.EAGER
    ]
    return [(UNIFORM_ONLY, "TorchRL uniform", buffers.EAGER), (PER_ONLY, "TorchRL PER", buffers.EAGER), *whole]


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


def make_case(label: str, name: str, mode: str, data: TensorDict) -> Case:
    """The whole update with a sampler; for "cycle only", the cycle of TorchRL's sampler."""
    config, device = configuration(), data["observation"].device
    size = config.dqn.batch_size
    reference = UNIFORM_ONLY if mode == buffers.EAGER else buffers.contender(mode, "uniform")
    row = Row("updates", "DQN", label, reference, len(data), size)
    if mode == buffers.EAGER:
        cycle = make_cycle(buffers.full_buffer(name, mode, data), size, updates=buffers.has_priorities(name))
        return Case(row, cycle, lambda: (buffers.td_errors(size, device),))
    buffer = buffers.full_buffer(name, mode, data, batch_size=size, priority_key="td_error")
    _, loss_module, target = agent(device)
    optimizer = make_optimizer(config.dqn.optimizer, loss_module.parameters(), config.dqn.learning_rate)
    update = dqn.make_update(config, buffer, loss_module, target, optimizer)
    step = update if mode == buffers.OURS else compile_step(update, cudagraphs=mode == buffers.GRAPH)
    return Case(row, lambda: step(None), compiled=mode != buffers.OURS)


def make_continuous_case(algorithm: str, name: str, data: TensorDict) -> Case:
    """The whole updates of recipes.td3 or recipes.sac as a CUDA graph."""
    recipe, key, device = CONTINUOUS[algorithm], algorithm.lower(), data["observation"].device
    config: Any = parse_config(compose_config(key, ["env=halfcheetah"]), SCHEMAS[key])
    settings = getattr(config, key)
    buffer = buffers.full_buffer(name, buffers.GRAPH, data, batch_size=settings.batch_size, priority_key="td_error")
    _, loss_module = recipe.make_loss(settings, *HALFCHEETAH, device)
    optimizers: Any = recipe.make_optimizers(settings, loss_module)
    optimizers = optimizers if isinstance(optimizers, tuple) else (optimizers,)
    target = SoftUpdate(loss_module, tau=settings.tau)
    step = compile_step(recipe.make_update(config, buffer, loss_module, target, *optimizers), cudagraphs=True)
    label, reference = (buffers.contender(buffers.GRAPH, each) for each in (name, "uniform"))
    row = Row("updates", algorithm, label, reference, len(data), settings.batch_size)
    return Case(row, lambda: step(None), compiled=True)


def measure_updates(chosen: list[str], options: Namespace) -> list[Row]:
    """Measure the updates at the largest capacity. `chosen`: labels of contenders."""
    device, count, cases = options.device, max(options.capacities), []
    data = buffers.transitions(count)
    data["action"] = torch.randint(ACTIONS, (count,))
    data["next", "truncated"] = torch.zeros_like(data["next", "done"])
    data = data.exclude("collector").to(device)
    for label, name, mode in tqdm(contenders(device), desc="filling", leave=False):
        if label in chosen:
            with skipping(label):
                cases.append(make_case(label, name, mode, data))
    if device.type == "cuda":
        observed, actions = HALFCHEETAH
        data["observation"], data["next", "observation"] = torch.randn(2, count, observed, device=device)
        data["action"] = torch.rand(count, actions, device=device) * 2 - 1
        for algorithm in CONTINUOUS:
            for label, name, mode in contenders(device):
                if label in chosen and mode == buffers.GRAPH:
                    with skipping(f"{label} ({algorithm})"):
                        cases.append(make_continuous_case(algorithm, name, data))
    return measure(cases, device, options.calls, "updates")
