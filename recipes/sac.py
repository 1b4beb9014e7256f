"""Soft actor-critic with automatic entropy tuning and uniform, PER, rank-based or ReaPER replay, or event tables.

    python -m recipes.sac env=pendulum sampler=per seed=1
    python -m recipes.sac -m seed=1,2,3 sampler=uniform,per
    python -m recipes.sac env=lunarlander_continuous compile=true num_envs=8
    python -m recipes.sac env=lunarlander_continuous sampler=sset
    python -m recipes.sac resume=runs/sac/pendulum/per/seed1-...

The settings are those of the event-table paper's table 2 (conf/sac/<env>.yaml), but for pendulum.

progress.csv has a row per evaluation: env_steps and updates so far; return_mean, the score of the deterministic policy,
and return_0 ..., the episodes it is the mean of; loss_actor, loss_qvalue, loss_alpha, alpha (the weight of the entropy)
and entropy (of the policy), means over the updates since the row before; wall_time in seconds, that before a resume
included; sampler/..., the scalars of the sampler's stats().
"""

if __name__ == "__main__":
    # Ahead of the imports below, which take seconds: a mistake on the command line is reported at once.
    from recipes.run import run_recipe

    run_recipe("sac")

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import flatdim
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from recipes.collect import EpsilonRandom, VectorCollector
from recipes.environment import make_continuous_env
from recipes.replay import actor_batches, make_replay, require_memory
from recipes.run import parse_config
from recipes.schemas.sac import Config, SACConfig
from recipes.training import Agent, prepare, run
from recipes.update import Learner


def make_actor(policy: nn.Module) -> ProbabilisticActor:
    """The policy network as a module that writes actions."""
    return ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"safe_tanh": False},  # needed where tanh is inverted: the loss knows what went into it
        return_log_prob=True,
    )


def make_loss(
    sac: SACConfig, num_observed: int, num_actions: int, device: torch.device
) -> tuple[nn.Sequential, SACLoss]:
    """The policy network and the loss, which holds two critics and alpha besides.

    The policy gives location and scale of a normal distribution, and tanh brings its draws into [-1, 1].
    """

    def mlp(inputs: int, outputs: int) -> MLP:
        return MLP(inputs, outputs, num_cells=sac.hidden_sizes, activation_class=nn.ReLU, device=device)

    policy = nn.Sequential(mlp(num_observed, 2 * num_actions), NormalParamExtractor())
    actor = make_actor(policy)
    critics = [ValueOperator(mlp(num_observed + num_actions, 1), in_keys=["observation", "action"]) for _ in range(2)]
    loss_module = SACLoss(
        actor,
        critics,  # pyright: ignore[reportArgumentType]: annotated as one network, documented as a list too
        loss_function="l2",
        alpha_init=sac.initial_alpha,
        target_entropy=sac.target_entropy,
    )
    loss_module.make_value_estimator(gamma=sac.gamma)
    _ = loss_module.target_entropy  # made at its first use, which must not be in a graph
    return policy, loss_module


def losses(
    loss_module: SACLoss, sample: TensorDictBase, actor_batch: Callable[[], TensorDictBase] | None = None
) -> dict[str, torch.Tensor]:
    """The three losses, and what else to record; writes the TD errors into the sample.

    The actor and alpha learn from batches of their own where there are any (DPER), else from the critics'.

    These are the steps of loss_module(sample), but that would apply the sampler's "priority_weight" to all three. The
    weights undo what prioritisation does to the targets a critic expects at a state and action (Schaul et al. 2016,
    section 3.4). The actor's and alpha's objectives hold in each state by itself: any distribution of states will do,
    and they keep that of the sampler.
    """
    loss_qvalue, of_critics = loss_module.qvalue_v2_loss(sample)
    batch = sample.exclude("priority_weight") if actor_batch is None else actor_batch()
    loss_actor, of_actor = loss_module.actor_loss(batch)
    log_prob = of_actor["log_prob"]
    sample["td_error"] = of_critics["td_error"]
    return {
        "loss_actor": loss_actor,
        "loss_qvalue": loss_qvalue,
        "loss_alpha": loss_module.alpha_loss(log_prob).mean(),
        "alpha": loss_module.log_alpha.exp(),  # pyright: ignore[reportCallIssue]: a parameter or a buffer
        "entropy": -log_prob.mean(),
    }


def train(config: DictConfig, run_dir: Path) -> int:
    """Trains, evaluates, and leaves config.yaml, progress.csv, learning_curve.png and checkpoint.zip in `run_dir`.

    Returns:
        The exit code.
    """
    cfg = parse_config(config, Config)
    sac = cfg.sac
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode; those to learn in are made further down.
    evaluation_envs = [make_continuous_env(cfg.env) for _ in range(sac.evaluation_episodes)]
    require_memory(cfg, evaluation_envs[0], device)
    action_space = evaluation_envs[0].action_space
    num_observed, num_actions = flatdim(evaluation_envs[0].observation_space), flatdim(action_space)

    # Networks, loss and optimizers.
    policy, loss_module = make_loss(sac, num_observed, num_actions, device)
    target_update = SoftUpdate(loss_module, tau=sac.tau)
    optimizers = {
        "actor": torch.optim.Adam(
            loss_module.actor_network_params.flatten_keys().values(), lr=sac.actor_learning_rate, fused=True
        ),
        "critic": torch.optim.Adam(
            loss_module.qvalue_network_params.flatten_keys().values(), lr=sac.critic_learning_rate, fused=True
        ),
        "alpha": torch.optim.Adam([loss_module.get_parameter("log_alpha")], lr=sac.alpha_learning_rate, fused=True),
    }

    # Unlike DQNLoss and TD3Loss, SACLoss gives ABSOLUTE TD errors: the larger one of the two critics'.
    replay = make_replay(cfg, device, td_error="absolute", policy=make_actor(policy))
    learner = Learner(
        replay,
        partial(losses, loss_module, actor_batch=actor_batches(replay)),
        list(optimizers.values()),
        gradient_steps=sac.gradient_steps,
        target_step=target_update.step,
        compiled=cfg.compile,
        updates_per_graph=cfg.updates_per_graph,
        cudagraphs=cfg.cudagraphs,
    )

    # The policy as functions of arrays: draws to learn from, the mode for evaluations.
    def location_and_scale(observations: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return policy(torch.as_tensor(observations, dtype=torch.float32, device=device))

    @torch.inference_mode()
    def stochastic(observations: np.ndarray) -> np.ndarray:
        return torch.tanh(torch.normal(*location_and_scale(observations))).cpu().numpy()

    @torch.inference_mode()
    def deterministic(observations: np.ndarray) -> np.ndarray:
        return torch.tanh(location_and_scale(observations)[0]).cpu().numpy()

    # The environments run on the CPU, and their batches stay there until the buffer takes them.
    behaviour = EpsilonRandom(stochastic, action_space, seed=cfg.seed)
    collector = VectorCollector(
        [partial(make_continuous_env, cfg.env)] * cfg.num_envs,
        behaviour,
        frames_per_batch=sac.train_interval,
        seed=cfg.seed,
        flags=cfg.env.flags,
    )

    def explore(steps: int) -> None:
        behaviour.epsilon = float(steps < sac.learning_starts)

    agent = Agent(
        collector=collector,
        replay=replay,
        explore=explore,
        learn=lambda data, _steps: learner(data),
        policy=deterministic,
        losses=("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"),
        shown=("return_mean", "alpha", "loss_qvalue"),
        state={"loss": loss_module, **{f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}},
    )
    return run(agent, evaluation_envs, cfg, config, run_dir, device)
