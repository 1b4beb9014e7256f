"""TD3 (Fujimoto et al. 2018) with uniform, PER, rank-based or ReaPER replay, event tables, or DPER.

    python -m recipes.td3 env=pendulum sampler=per seed=1
    python -m recipes.td3 -m seed=1,2,3 sampler=uniform,per
    python -m recipes.td3 env=lunarlander_continuous compile=true num_envs=8
    python -m recipes.td3 env=halfcheetah sampler=sset
    python -m recipes.td3 env=hopper sampler=dper compile=true
    python -m recipes.td3 resume=runs/td3/pendulum/per/seed1-...

The settings are those of the authors' code (conf/td3/<env>.yaml), but for pendulum. Steps and updates take turns in
cycles of policy_delay: so many steps, then as many updates of the critics and one of the actor and all targets.

progress.csv has a row per evaluation: env_steps and updates (of the critics) so far; return_mean, the score of the
policy without noise, and return_0 ..., the episodes it is the mean of; loss_actor (minus the first critic's value of
the policy's actions) and loss_qvalue, means over the updates since the row before; wall_time in seconds, that before a
resume included; sampler/..., the scalars of the sampler's stats().
"""

if __name__ == "__main__":
    # Ahead of the imports below, which take seconds: a mistake on the command line is reported at once.
    from recipes.run import run_recipe

    run_recipe("td3")

from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import flatdim
from omegaconf import DictConfig
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

from recipes.collect import EpsilonRandom, VectorCollector
from recipes.environment import make_continuous_env
from recipes.replay import actor_batches, make_replay, require_memory
from recipes.run import parse_config
from recipes.schemas.td3 import THETA, Config, TD3Config
from recipes.training import Agent, prepare, run
from recipes.update import Delayed, Learner


class ExplorationNoise:
    """Normal noise: x ← (1 − θ) x + σ √(1 − (1 − θ)²) ε with x = 0 at first and ε ~ N(0, 1).

    Its standard deviation is σ, at once if θ = 1, where each step is independent, else in the long run: then it is an
    Ornstein-Uhlenbeck process, which goes on when episodes end. The DDPG paper states the factor of ε instead, which
    is 0.53 σ for its θ = 0.15. Draws are from torch's global generator.
    """

    def __init__(self, sigma: float, theta: float):
        self._keep = 1 - theta
        self._scale = sigma * (1 - self._keep**2) ** 0.5
        self._value = np.float32(0)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next x, float32, of one and the same shape in all calls."""
        self._value = self._keep * self._value + self._scale * torch.randn(shape).numpy()
        return self._value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The last x."""
        return {"value": torch.as_tensor(self._value)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._value = state["value"].cpu().numpy()


def make_loss(
    td3: TD3Config, num_observed: int, num_actions: int, device: torch.device
) -> tuple[nn.Sequential, TD3Loss]:
    """The policy network, which gives actions in [-1, 1], and the loss, which holds two critics besides."""

    def mlp(inputs: int, outputs: int) -> MLP:
        return MLP(inputs, outputs, num_cells=td3.hidden_sizes, activation_class=nn.ReLU, device=device)

    policy = nn.Sequential(mlp(num_observed, num_actions), nn.Tanh())
    actor = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    critics = [ValueOperator(mlp(num_observed + num_actions, 1), in_keys=["observation", "action"]) for _ in range(2)]
    loss_module = TD3Loss(
        actor,
        critics,  # pyright: ignore[reportArgumentType]: annotated as one network, documented as a list too
        bounds=(-1.0, 1.0),  # pyright: ignore[reportArgumentType]: annotated as a tuple of one
        policy_noise=td3.policy_noise,
        noise_clip=td3.noise_clip,
        loss_function="l2",
    )
    loss_module.make_value_estimator(gamma=td3.gamma)
    return policy, loss_module


def critic_loss(loss_module: TD3Loss, sample: TensorDictBase) -> dict[str, torch.Tensor]:
    """The critics' loss, with the sampler's "priority_weight"; writes the TD errors into the sample."""
    loss_qvalue, of_critics = loss_module.value_loss(sample)
    sample["td_error"] = of_critics["td_error"].detach().amax(0)
    return {"loss_qvalue": loss_qvalue}


def actor_loss(loss_module: TD3Loss, batch: TensorDictBase) -> dict[str, torch.Tensor]:
    """The actor's loss, without weights: like that of SAC, it holds in each state by itself (recipes/sac.py).

    That of the loss module, but that it asks the first critic alone; there the second one is computed too.
    """
    actor, critic = loss_module.actor_network, loss_module.qvalue_network
    with loss_module.actor_network_params.to_module(actor, preserve_module_state=False):
        batch = actor(batch.select(*actor.in_keys))
    with loss_module.qvalue_network_params.data[0].to_module(critic, preserve_module_state=False):
        return {"loss_actor": -critic(batch)["state_action_value"].mean()}


def train(config: DictConfig, run_dir: Path) -> int:
    """Trains, evaluates, and leaves config.yaml, progress.csv, learning_curve.png and checkpoint.zip in `run_dir`.

    Returns:
        The exit code.
    """
    cfg = parse_config(config, Config)
    td3 = cfg.td3
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode; those to learn in are made further down.
    evaluation_envs = [make_continuous_env(cfg.env) for _ in range(td3.evaluation_episodes)]
    require_memory(cfg, evaluation_envs[0], device)
    action_space = evaluation_envs[0].action_space
    num_observed, num_actions = flatdim(evaluation_envs[0].observation_space), flatdim(action_space)

    # Networks, loss and optimizers.
    policy, loss_module = make_loss(td3, num_observed, num_actions, device)
    target_update = SoftUpdate(loss_module, tau=td3.tau)
    actor_optimizer = torch.optim.Adam(
        loss_module.actor_network_params.flatten_keys().values(), lr=td3.actor_learning_rate, fused=True
    )
    critic_optimizer = torch.optim.Adam(
        loss_module.qvalue_network_params.flatten_keys().values(), lr=td3.critic_learning_rate, fused=True
    )

    # TD3Loss gives SQUARED TD errors: the larger one of the two critics'.
    replay = make_replay(
        cfg,
        device,
        td_error="squared",
        policy=TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]),
        noise_scale=td3.exploration_noise,
    )
    learner = Learner(
        replay,
        partial(critic_loss, loss_module),
        [critic_optimizer],
        gradient_steps=td3.gradient_steps,
        delayed=Delayed(
            interval=td3.policy_delay,
            loss_function=partial(actor_loss, loss_module),
            optimizers=[actor_optimizer],
            sample=actor_batches(replay),
            target_step=target_update.step,
        ),
        compiled=cfg.compile,
        updates_per_graph=cfg.updates_per_graph,
        cudagraphs=cfg.cudagraphs,
    )

    # The policy as functions of arrays: with noise to learn from, without it for evaluations.
    noise = ExplorationNoise(td3.exploration_noise, THETA[td3.noise])

    @torch.inference_mode()
    def deterministic(observations: np.ndarray) -> np.ndarray:
        return policy(torch.as_tensor(observations, dtype=torch.float32, device=device)).cpu().numpy()

    def noisy(observations: np.ndarray) -> np.ndarray:
        action = deterministic(observations)
        return (action + noise(action.shape)).clip(-1, 1)

    # The environments run on the CPU, and their batches stay there until the buffer takes them.
    behaviour = EpsilonRandom(noisy, action_space, seed=cfg.seed)
    collector = VectorCollector(
        [partial(make_continuous_env, cfg.env)] * cfg.num_envs,
        behaviour,
        frames_per_batch=td3.train_interval,
        seed=cfg.seed,
        flags=cfg.env.flags,
    )

    def explore(steps: int) -> None:
        behaviour.epsilon = float(steps < td3.learning_starts)

    agent = Agent(
        collector=collector,
        replay=replay,
        explore=explore,
        learn=lambda data, _steps: learner(data),
        policy=deterministic,
        losses=("loss_actor", "loss_qvalue"),
        shown=("return_mean", "loss_actor", "loss_qvalue"),
        state={
            "loss": loss_module,
            "actor_optimizer": actor_optimizer,
            "critic_optimizer": critic_optimizer,
            "noise": noise,
        },
    )
    return run(agent, evaluation_envs, cfg, config, run_dir, device)
