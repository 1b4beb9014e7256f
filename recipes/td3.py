"""TD3 (Fujimoto et al. 2018) with uniform, PER, rank-based or ReaPER replay, event tables, or DPER.

    python -m recipes.td3 env=pendulum sampler=per seed=1
    python -m recipes.td3 -m seed=1,2,3 sampler=uniform,per
    python -m recipes.td3 env=lunarlander_continuous compile=true num_envs=8
    python -m recipes.td3 env=halfcheetah sampler=sset
    python -m recipes.td3 env=hopper sampler=dper compile=true
    python -m recipes.td3 resume=runs/td3/pendulum/per/seed1-...

The settings are from the authors' code, except for pendulum; see conf/td3/<env>.yaml. With one environment, a cycle is
policy_delay steps, then as many updates of the critics, then one update of the actor and all targets.

progress.csv has one row per evaluation, with the columns

    env_steps, updates     totals so far; updates are those of the critics
    return_mean            mean return of the evaluation's episodes, played without noise
    return_0, return_1 ... return of each episode
    loss_actor             minus the first critic's value of the policy's actions; mean since the previous row
    loss_qvalue            mean over the updates since the previous row
    wall_time              seconds, including the time before a resume
    sampler/...            scalars of the sampler's stats()
"""

if __name__ == "__main__":
    # Before the imports below, which take seconds: mistakes on the command line are reported at once.
    from recipes.common.cli import run_recipe

    run_recipe("td3")

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
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

from recipes.common.cli import parse_config
from recipes.common.collector import EpsilonRandom, VectorCollector
from recipes.common.environment import make_continuous_env
from recipes.common.replay import actor_batches, make_replay, require_memory
from recipes.common.run import Agent, prepare, run
from recipes.common.schemas.td3 import THETA, Config, TD3Config
from recipes.common.update import Delayed, Learner


class ExplorationNoise:
    """Gaussian exploration noise: x ← (1 − θ) x + σ √(1 − (1 − θ)²) ε, starting at x = 0, with ε ~ N(0, 1).

    With θ = 1, steps are independent and x has standard deviation σ. With θ < 1, x is an Ornstein-Uhlenbeck process
    whose standard deviation tends to σ. The process is not reset when an episode ends. The DDPG paper gives the factor
    of ε instead of σ; it is 0.53 σ for the paper's θ = 0.15. Samples are from torch's global generator.

    Args:
        sigma: σ, >= 0, in units of actions in [-1, 1].
        theta: θ, in (0, 1].
    """

    def __init__(self, sigma: float, theta: float):
        self._keep = 1 - theta
        self._scale = sigma * (1 - self._keep**2) ** 0.5
        self._value = np.float32(0)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next x, float32; `shape` must be the same in all calls."""
        self._value = self._keep * self._value + self._scale * torch.randn(shape).numpy()
        return self._value

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The last x."""
        return {"value": torch.as_tensor(self._value)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._value = state["value"].cpu().numpy()


def make_loss(
    td3: TD3Config, num_observed: int, num_actions: int, device: torch.device
) -> tuple[nn.Sequential, TD3Loss]:
    """The policy network, whose actions are in [-1, 1], and the loss, which also holds two critics."""

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
    """The critics' loss, weighted by the sampler's "priority_weight"; writes the TD errors into the sample."""
    loss_qvalue, of_critics = loss_module.value_loss(sample)
    sample["td_error"] = of_critics["td_error"].detach().amax(0)
    return {"loss_qvalue": loss_qvalue}


def actor_loss(loss_module: TD3Loss, batch: TensorDictBase) -> dict[str, torch.Tensor]:
    """The actor's loss, without importance-sampling weights; recipes.sac.losses explains why.

    Equal to loss_module.actor_loss, but computes only the first critic instead of both.
    """
    actor, critic = loss_module.actor_network, loss_module.qvalue_network
    with loss_module.actor_network_params.to_module(actor, preserve_module_state=False):
        batch = actor(batch.select(*actor.in_keys))
    with loss_module.qvalue_network_params.data[0].to_module(critic, preserve_module_state=False):
        return {"loss_actor": -critic(batch)["state_action_value"].mean()}


def train(config: DictConfig, run_dir: Path, run: Callable[..., int] = run) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        config: the configuration as read.
        run_dir: directory of the run.
        run: what to do with the agent. Default: recipes.common.run.run.

    Returns:
        The exit code.
    """
    cfg = parse_config(config, Config)
    td3 = cfg.td3
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode. The collector below makes the training environments.
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

    # TD3Loss gives SQUARED TD errors: the larger one of the two critics' errors.
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

    # The policy as functions of arrays: with noise for training, without noise for evaluations.
    noise = ExplorationNoise(td3.exploration_noise, THETA[td3.noise])

    @torch.inference_mode()
    def deterministic(observations: np.ndarray) -> np.ndarray:
        return policy(torch.as_tensor(observations, dtype=torch.float32, device=device)).cpu().numpy()

    def noisy(observations: np.ndarray) -> np.ndarray:
        action = deterministic(observations)
        return (action + noise(action.shape)).clip(-1, 1)

    # The environments run on the CPU. Batches stay on the CPU until they are written to the buffer.
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
