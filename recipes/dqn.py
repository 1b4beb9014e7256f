"""Double DQN with uniform, proportional (PER) or reliability-adjusted (ReaPER) replay.

    python -m recipes.dqn env=cartpole sampler=reaper seed=1
    python -m recipes.dqn -m seed=1,2,3 sampler=uniform,per,reaper
    python -m recipes.dqn compile=true num_envs=8
    python -m recipes.dqn resume=runs/dqn/cartpole/reaper/seed1-...

The settings are those of the ReaPER paper's appendix D (conf/dqn/<env>.yaml).

progress.csv has a row per evaluation: env_steps and updates so far; return_mean, the score, and return_0 ..., the
episodes it is the mean of; epsilon of the behaviour policy; loss, the mean over the updates since the row before;
wall_time in seconds, that before a resume included; sampler/..., the scalars of the sampler's stats().
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import flatdim
from omegaconf import MISSING, DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.envs import GymWrapper
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

from recipes.collect import EpsilonRandom, SingleCollector, VectorCollector
from recipes.config import LearningConfig, RunConfig
from recipes.environment import make_discrete_env
from recipes.replay import make_replay
from recipes.run import run_recipe, typed
from recipes.training import Agent, prepare, run
from recipes.update import Learner, target_pairs


@dataclass
class DQNConfig(LearningConfig):
    """Hyperparameters; a step is one step of the environment."""

    group = "dqn"

    learning_rate: float = MISSING
    target_update_interval: int = MISSING
    exploration_fraction: float = MISSING
    initial_epsilon: float = MISSING
    final_epsilon: float = MISSING
    evaluation_epsilon: float = MISSING
    max_grad_norm: float = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("learning_rate target_update_interval max_grad_norm", lambda value: value > 0, "must be > 0")
        shares = "exploration_fraction initial_epsilon final_epsilon evaluation_epsilon"
        self.check(shares, lambda value: 0 <= value <= 1, "must be in [0, 1]")
        self.check("final_epsilon", lambda value: value <= self.initial_epsilon, "must be <= dqn.initial_epsilon")

    def epsilon(self, step: int) -> float:
        """Exploration rate: 1 until learning starts, then linear over the exploration fraction of all steps."""
        if step < self.learning_starts:
            return 1.0
        duration = self.exploration_fraction * self.total_steps
        done = min(step / duration, 1.0) if duration else 1.0
        return self.initial_epsilon + done * (self.final_epsilon - self.initial_epsilon)


@dataclass
class Config(RunConfig):
    """All of conf/dqn.yaml."""

    dqn: DQNConfig = MISSING

    @property
    def learning(self) -> DQNConfig:
        """The hyperparameters."""
        return self.dqn


def train(config: DictConfig, run_dir: Path) -> int:
    """Trains, evaluates, and leaves config.yaml, progress.csv, learning_curve.png and checkpoint.zip in `run_dir`.

    Returns:
        The exit code.
    """
    cfg = typed(config, Config)
    dqn = cfg.dqn
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode; those to learn in are made further down.
    evaluation_envs = [make_discrete_env(cfg.env.id) for _ in range(dqn.evaluation_episodes)]
    action_space = evaluation_envs[0].action_space

    # Networks and loss.
    network = MLP(
        in_features=flatdim(evaluation_envs[0].observation_space),
        out_features=flatdim(action_space),
        num_cells=dqn.hidden_sizes,
        activation_class=nn.ReLU,
        device=device,
    )
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module = DQNLoss(
        actor, loss_function="smooth_l1", delay_value=True, double_dqn=True, action_space="categorical"
    )
    loss_module.make_value_estimator(gamma=dqn.gamma)
    # Makes the target network a copy; when it is due again is up to the learner.
    HardUpdate(loss_module, value_network_update_interval=0)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=dqn.learning_rate, fused=True)

    # The loss writes the SQUARED TD error to "td_error". It applies the sampler's "priority_weight" by itself.
    replay = make_replay(cfg, device, td_error="squared")
    learner = Learner(
        replay,
        loss_module,
        [optimizer],
        gradient_steps=dqn.gradient_steps,
        max_grad_norm=dqn.max_grad_norm,
        targets=target_pairs(loss_module),
        compiled=cfg.compile,
        updates_per_graph=cfg.updates_per_graph,
        cudagraphs=cfg.cudagraphs,
    )

    def learn(data: TensorDictBase, steps: int) -> list[dict[str, torch.Tensor]]:
        interval = dqn.target_update_interval
        return learner(data, copy_targets=steps // interval > (steps - data.numel()) // interval)

    @torch.inference_mode()
    def greedy(observations: np.ndarray) -> np.ndarray:
        return network(torch.as_tensor(observations, device=device)).argmax(-1).cpu().numpy()

    # The environments run on the CPU, and their batches stay there until the buffer takes them.
    if cfg.num_envs > 1:
        behaviour = EpsilonRandom(greedy, action_space, seed=cfg.seed)
        collector = VectorCollector(
            [partial(make_discrete_env, cfg.env.id)] * cfg.num_envs,
            behaviour,
            frames_per_batch=dqn.train_interval,
            seed=cfg.seed,
        )

        def explore(steps: int) -> None:
            behaviour.epsilon = dqn.epsilon(steps)

    else:
        env = GymWrapper(make_discrete_env(cfg.env.id), categorical_action_encoding=True, device=None)
        exploration = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.0, device=device)
        collector = SingleCollector(
            env,
            TensorDictSequential([actor, exploration]),
            frames_per_batch=dqn.train_interval,
            seed=cfg.seed,
            device=device,
        )

        def explore(steps: int) -> None:
            exploration.get_buffer("eps").fill_(dqn.epsilon(steps))

    agent = Agent(
        collector=collector,
        replay=replay,
        explore=explore,
        learn=learn,
        policy=greedy,
        evaluation_epsilon=dqn.evaluation_epsilon,
        losses=("loss",),
        columns=lambda steps: {"epsilon": dqn.epsilon(steps)},
        shown=("return_mean", "epsilon", "loss"),
        state={"loss": loss_module, "optimizer": optimizer},
    )
    return run(agent, evaluation_envs, cfg, config, run_dir, device)


if __name__ == "__main__":
    run_recipe(train, "dqn")
