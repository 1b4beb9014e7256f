"""Double DQN with Ray: collectors and replay buffer are Ray actors, and the learner samples from the remote buffer.

    python -m recipes.distributed env=cartpole sampler=reaper num_collectors=2
    python -m recipes.distributed address=auto num_collectors=32 num_envs=4
    python -m recipes.distributed resume=runs/distributed/cartpole/reaper/seed1-...

The settings are those of recipes.dqn (conf/dqn/<env>.yaml), with the same number of updates per env step. Collectors
act with weights that are up to num_collectors batches old. Two runs with the same seed differ, because the order in
which collectors finish is not deterministic. Needs Ray (pip install "ray>=2.9").

progress.csv has the columns of recipes.dqn, except q_sum and q_error.
"""

if __name__ == "__main__":
    # Before the imports below, which take seconds: mistakes on the command line are reported at once.
    from recipes.common.cli import run_recipe

    run_recipe("distributed")

from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import flatdim
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import MLP, EGreedyModule, QValueActor

from recipes.common.cli import ConfigError, parse_config
from recipes.common.environment import make_discrete_env
from recipes.common.remote import RemoteCollector, RemoteReplay, runtime
from recipes.common.replay import require_memory, stored_keys
from recipes.common.run import Agent, prepare, run
from recipes.common.schemas.distributed import Config
from recipes.common.update import Learner
from recipes.dqn import make_loss


def train(config: DictConfig, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Returns:
        The exit code.
    """
    cfg = parse_config(config, Config)
    with runtime(cfg.address, cfg.num_collectors + 1):
        return train_with_ray(cfg, config, run_dir)


def train_with_ray(cfg: Config, config: DictConfig, run_dir: Path) -> int:
    """:func:`train` for a host on which Ray is running."""
    dqn = cfg.dqn
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode. The collectors make the training environments.
    evaluation_envs = [make_discrete_env(cfg.env) for _ in range(dqn.evaluation_episodes)]
    if cfg.address is None:
        require_memory(cfg, evaluation_envs[0], torch.device("cpu"))
    observed = evaluation_envs[0].observation_space.shape or ()
    if len(observed) != 1:
        raise ConfigError(f"env.id={cfg.env.id}: observations have shape {observed}, must be vectors; use recipes.dqn")
    num_actions = flatdim(evaluation_envs[0].action_space)

    # Networks and loss.
    network = MLP(
        in_features=observed[0],
        out_features=num_actions,
        num_cells=dqn.hidden_sizes,
        activation_class=nn.ReLU,
        device=device,
    )
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    # The collectors have no GPU: they get a copy on the CPU.
    exploration = EGreedyModule(Categorical(num_actions), eps_init=1.0, eps_end=0.0)
    acting = deepcopy(actor).cpu()
    loss_module, targets, target_step = make_loss(dqn, actor)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=dqn.learning_rate, fused=True)

    # DQNLoss writes the SQUARED TD error to "td_error" and applies the sampler's "priority_weight".
    replay = RemoteReplay(cfg, cfg.num_collectors * cfg.num_envs, device, prefetch=cfg.prefetch, td_error="squared")
    learner = Learner(
        replay,  # pyright: ignore[reportArgumentType]: has all methods that an eager learner calls
        loss_module,
        [optimizer],
        gradient_steps=dqn.gradient_steps,
        max_grad_norm=dqn.max_grad_norm,
        target_step=target_step,
        targets=targets,
    )

    def learn(data: TensorDictBase, steps: int) -> list[dict[str, torch.Tensor]]:
        return learner(data, copy_targets=dqn.copies_due(steps, data.numel()))

    @torch.inference_mode()
    def greedy(observations: np.ndarray) -> np.ndarray:
        return network(torch.as_tensor(observations, device=device)).argmax(-1).cpu().numpy()

    collector = RemoteCollector(
        cfg,
        TensorDictSequential([acting, exploration]),
        replay,
        num_collectors=cfg.num_collectors,
        frames_per_batch=dqn.train_interval,
        keys=stored_keys(cfg.env),
    )

    def explore(steps: int) -> None:
        acting.load_state_dict(actor.state_dict())
        exploration.get_buffer("eps").fill_(dqn.epsilon(steps))

    agent = Agent(
        collector=collector,
        replay=replay,
        explore=explore,
        learn=learn,
        policy=greedy,
        evaluation_epsilon=dqn.evaluation_epsilon,
        losses=("loss",),
        stores=None,
        columns=lambda steps: {
            "epsilon": dqn.epsilon(steps),
            **{f"sampler/{key}": value for key, value in replay.sampler_stats().items()},
        },
        shown=("return_mean", "epsilon", "loss"),
        state={"loss": loss_module, "optimizer": optimizer},
    )
    try:
        return run(agent, evaluation_envs, cfg, config, run_dir, device)
    finally:
        collector.shutdown()
