"""Training loops of TorchRL and of stable-baselines3."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import DQNLoss, HardUpdate, SACLoss, SoftUpdate, TD3Loss, group_optimizers

from recipes.benchmark.results import peer


@dataclass(frozen=True)
class Settings:
    """What the loops of an algorithm have in common.

    Args:
        env: Gymnasium id.
        hidden_sizes: units of each hidden layer.
        capacity: capacity of the buffer.
        batch_size: transitions per update.
        learning_rate: Adam's learning rate.
        interval: env steps per update.
    """

    env: str
    hidden_sizes: tuple[int, ...]
    capacity: int
    batch_size: int
    learning_rate: float
    interval: int


SETTINGS = {
    "dqn": Settings("CartPole-v1", (120, 84), 10_000, 128, 2.5e-4, 10),
    "td3": Settings("HalfCheetah-v5", (256, 256), 1_000_000, 256, 3e-4, 1),
    "sac": Settings("HalfCheetah-v5", (256, 256), 1_000_000, 256, 3e-4, 1),
}
GAMMA, EPSILON, TAU, NOISE, POLICY_DELAY, UPDATES_PER_COPY = 0.99, 0.1, 0.005, 0.1, 2, 50

Update = Callable[[TensorDictBase, int], object]


def mlp(settings: Settings, inputs: int, outputs: int) -> MLP:
    """A network of the common sizes."""
    return MLP(inputs, outputs, num_cells=list(settings.hidden_sizes), activation_class=nn.ReLU)


def adam(parameters: Any, settings: Settings) -> torch.optim.Adam:
    """The optimizer of TorchRL's scripts."""
    return torch.optim.Adam(list(parameters), lr=settings.learning_rate)


def torchrl_dqn(env: TransformedEnv, settings: Settings) -> tuple[Any, Update]:
    """Exploring policy and update of TorchRL's DQN script."""
    actor = QValueActor(mlp(settings, 4, 2), in_keys=["observation"], spec=env.action_spec)
    loss_module = DQNLoss(actor, loss_function="l2", delay_value=True)
    loss_module.make_value_estimator(gamma=GAMMA)
    target = HardUpdate(loss_module, value_network_update_interval=UPDATES_PER_COPY)
    optimizer = adam(loss_module.parameters(), settings)

    def update(sample: TensorDictBase, number: int) -> None:
        loss_module(sample)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        target.step()

    exploration = EGreedyModule(env.action_spec, eps_init=EPSILON, eps_end=EPSILON)
    return TensorDictSequential([actor, exploration]), update


def torchrl_td3(env: TransformedEnv, settings: Settings) -> tuple[Any, Update]:
    """Exploring policy and update of TorchRL's TD3 script."""
    observed, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = nn.Sequential(mlp(settings, observed, actions), nn.Tanh())
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    critic = ValueOperator(mlp(settings, observed + actions, 1), in_keys=["observation", "action"])
    loss_module = TD3Loss(actor, critic, action_spec=env.action_spec, num_qvalue_nets=2, loss_function="l2")
    loss_module.make_value_estimator(gamma=GAMMA)
    target = SoftUpdate(loss_module, tau=TAU)
    of_actor = adam(loss_module.actor_network_params.values(True, True), settings)
    of_critic = adam(loss_module.qvalue_network_params.values(True, True), settings)

    def update(sample: TensorDictBase, number: int) -> None:
        loss, _ = loss_module.value_loss(sample)
        loss.backward()
        of_critic.step()
        of_critic.zero_grad(set_to_none=True)
        if number % POLICY_DELAY == 0:
            loss, _ = loss_module.actor_loss(sample)
            loss.backward()
            of_actor.step()
            of_actor.zero_grad(set_to_none=True)
            target.step()

    noise = AdditiveGaussianModule(spec=env.action_spec, sigma_init=NOISE, sigma_end=NOISE, mean=0.0, std=1.0)
    return TensorDictSequential([actor, noise]), update


def torchrl_sac(env: TransformedEnv, settings: Settings) -> tuple[Any, Update]:
    """Exploring policy and update of TorchRL's SAC script."""
    observed, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    network = nn.Sequential(mlp(settings, observed, 2 * actions), NormalParamExtractor())
    bounds: Any = env.action_spec.space
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": bounds.low, "high": bounds.high},
        return_log_prob=False,
    )
    critic = ValueOperator(mlp(settings, observed + actions, 1), in_keys=["observation", "action"])
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2, loss_function="l2", action_spec=env.action_spec)
    loss_module.make_value_estimator(gamma=GAMMA)
    target = SoftUpdate(loss_module, tau=TAU)
    optimizer = group_optimizers(
        adam(loss_module.actor_network_params.values(True, True), settings),
        adam(loss_module.qvalue_network_params.values(True, True), settings),
        adam([loss_module.log_alpha], settings),
    )

    def update(sample: TensorDictBase, number: int) -> None:
        losses = loss_module(sample)
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        target.step()

    return actor, update


TORCHRL = {"dqn": torchrl_dqn, "td3": torchrl_td3, "sac": torchrl_sac}


def torchrl_loop(algorithm: str, frames_per_batch: int) -> Callable[[int], int]:
    """A loop of TorchRL's components with uniform replay, as in its scripts: collect many steps, then learn."""
    settings = SETTINGS[algorithm]
    env = TransformedEnv(GymEnv(settings.env))
    for transform in (StepCounter(), DoubleToFloat(), RewardSum()):
        env.append_transform(transform)
    policy, update = TORCHRL[algorithm](env, settings)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(settings.capacity), batch_size=settings.batch_size)
    collector = Collector(
        env, policy, frames_per_batch=frames_per_batch, total_frames=-1, device="cpu", storing_device="cpu"
    )
    batches = iter(collector)
    updates = 0

    def loop(num_env_steps: int) -> int:
        nonlocal updates
        steps = 0
        while steps < num_env_steps:
            data = next(batches).reshape(-1)
            collector.update_policy_weights_()
            replay.extend(data)
            for _ in range(data.numel() // settings.interval):
                updates += 1
                update(replay.sample(), updates)
            steps += data.numel()
        return steps

    return loop


def stable_baselines3_loop(algorithm: str) -> Callable[[int], int]:
    """The algorithm of stable-baselines3, which has uniform replay only."""
    library = peer("stable_baselines3")
    settings = SETTINGS[algorithm]
    env = gymnasium.make(settings.env)
    special: dict[str, Any] = {
        "dqn": {
            "target_update_interval": UPDATES_PER_COPY * settings.interval,
            "exploration_initial_eps": EPSILON,
            "exploration_final_eps": EPSILON,
        },
        "td3": {"policy_delay": POLICY_DELAY, "tau": TAU},
        "sac": {"tau": TAU},
    }[algorithm]
    if algorithm == "td3":
        size = env.action_space.shape or ()
        special["action_noise"] = peer("stable_baselines3.common.noise").NormalActionNoise(
            np.zeros(size), np.full(size, NOISE)
        )
    model = getattr(library, algorithm.upper())(
        "MlpPolicy",
        env,
        learning_rate=settings.learning_rate,
        buffer_size=settings.capacity,
        learning_starts=0,
        batch_size=settings.batch_size,
        gamma=GAMMA,
        train_freq=settings.interval,
        gradient_steps=1,
        policy_kwargs={"net_arch": list(settings.hidden_sizes)},
        device="cpu",
        **special,
    )

    def loop(num_env_steps: int) -> int:
        model.learn(num_env_steps, log_interval=None, reset_num_timesteps=False)
        return num_env_steps

    return loop
