"""ACER (Wang et al. 2017): actor-critic from replayed trajectories, for discrete and for continuous actions.

    python -m recipes.acer env=cartpole seed=1
    python -m recipes.acer env=pendulum compile=true
    python -m recipes.acer -m seed=1,2,3 acer.trust_region=true,false
    python -m recipes.acer env=pendulum acer.returns=truncated_importance_sampling
    python -m recipes.acer env=cartpole sampler=per
    python -m recipes.acer env=atari/pong num_envs=16
    python -m recipes.acer resume=runs/acer/cartpole/uniform/seed1-...

Algorithm 1 of the paper: each round collects slice_len steps of each environment, makes one update on these steps, and
then a number of updates on replayed slices, drawn from a Poisson distribution with mean replay_ratio.
acer.on_policy=false skips the first update, as the paper does for continuous actions. A prioritized sampler draws the
first step of each slice.

The ablation of the paper: acer.returns=importance_sampling removes Retrace, acer.trust_region=false the trust region,
acer.c=inf truncation with bias correction, and with continuous actions, acer.dueling=false the dueling network.

The baselines of the paper for continuous actions have acer.returns=truncated_importance_sampling, and no Q:

    Trust-TIS    replays slices as ACER does; the product of a slice's importance weights is truncated at acer.c
    Trust-A3C    acer.replay_ratio=0: only updates on the newest steps
    TIS, A3C     acer.trust_region=false: the same two without trust region

env=atari/<game> accepts any game of ale-py. Atari agents train on single lives with clipped rewards and are evaluated
on whole games; see recipes.envs.atari.

progress.csv has one row per evaluation, with the columns

    env_steps, updates     totals so far
    return_mean            mean return of the evaluation's episodes, played with the policy's most probable actions
    return_0, return_1 ... return of each episode
    human_normalized       return_mean scaled to 0 for random actions and 1 for humans (Atari games with known scores)
    training_return        mean return of the last 100 training episodes, played with sampled actions
    loss_...               losses; loss_qvalue and loss_value are the critic's
    entropy                entropy of the policy
    kl                     divergence of the average policy from the current policy, in nats
    rho                    truncated importance weights
    bc_weight              weights of the bias correction
    tr_active              share of steps that the trust region changed
    wall_time              seconds, including the time before a resume
    cpu_time               CPU seconds of this process, including the time before a resume
    sampler/...            scalars of the sampler's stats()

Columns from loss_... to tr_active are means over the updates since the previous row.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete, flatdim
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.modules import MLP, IndependentNormal
from torchrl.objectives import SoftUpdate

from recipes.common.cli import run_recipe
from recipes.common.environment import make_env
from recipes.common.errors import ConfigError
from recipes.common.networks import Normalizer, make_network, to_tensor
from recipes.common.replay import make_sampler, make_storage, make_writer
from recipes.common.run import Run
from recipes.common.schemas import WITH_Q, ACERConfig, ACERRun
from recipes.common.update import RMSProp, compile_update, make_optimizer, make_step, stack_updates
from torchrl_replay_ext import (
    ACERContinuousLoss,
    ACERLoss,
    CompilableReplayBuffer,
    Episodes,
    SeparateValueNetworks,
    StochasticDuelingNetwork,
    TrajectoryRetraceSampler,
    clip_gradients,
)


class FixedScale(nn.Module):
    """A Gaussian policy: the network's output is the mean, `sigma` the standard deviation."""

    def __init__(self, network: nn.Module, sigma: float):
        super().__init__()
        self.network, self.sigma = network, sigma

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation."""
        loc = self.network(observation)
        return loc, torch.full_like(loc, self.sigma)


def _small(layer: nn.Module) -> nn.Linear:
    """Scale down the last layer of a policy, so that the initial policy hardly depends on the state."""
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.bias.zero_()
    return layer


def settings_of(acer: ACERConfig, *more: str) -> dict[str, Any]:
    """The arguments that both losses have, and `more`."""
    names = ["gamma", "lmbda", "c", "delta", "trust_region", "entropy_coeff", "critic_coeff", "returns"]
    return {name: getattr(acer, name) for name in (*names, *more)}


def make_discrete_loss(acer: ACERConfig, observed: tuple[int, ...], num_actions: int, device: torch.device) -> ACERLoss:
    """Networks and loss for discrete actions."""
    *inner, width = acer.hidden_sizes

    def trunk() -> nn.Module:
        return make_network(observed, width, inner, activation=nn.Tanh, activate_last=True, device=device)

    policy_head, q_head = (nn.Linear(width, num_actions, device=device) for _ in range(2))
    features = TensorDictModule(trunk(), in_keys=["observation"], out_keys=["hidden"])
    actor = ProbabilisticTensorDictSequential(
        [
            features,
            TensorDictModule(_small(policy_head), in_keys=["hidden"], out_keys=["logits"]),
            ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical),
        ]
    )
    if acer.shared_layers:
        critic = TensorDictModule(q_head, in_keys=["hidden"], out_keys=["action_value"])
    else:
        q_network = nn.Sequential(trunk(), q_head)
        critic = TensorDictModule(q_network, in_keys=["observation"], out_keys=["action_value"])
    return ACERLoss(actor, critic, **settings_of(acer, "statistics"))


def make_continuous_loss(
    acer: ACERConfig, observed: tuple[int, ...], num_actions: int, device: torch.device
) -> ACERContinuousLoss:
    """Networks and loss for continuous actions. The policy has a fixed standard deviation, as in the paper."""
    (num_observed,) = observed
    *inner, width = acer.hidden_sizes
    mlp = partial(MLP, num_cells=acer.hidden_sizes, activation_class=nn.Tanh, device=device)
    if acer.shared_layers:
        trunk = make_network(observed, width, inner, activation=nn.Tanh, activate_last=True, device=device)
        head, value = nn.Linear(width, num_actions, device=device), nn.Linear(width, 1, device=device)
        mean, num_features = nn.Sequential(trunk, head), width
    else:
        trunk, mean, num_features = None, mlp(num_observed, num_actions), num_observed
        value = mlp(num_observed, 1)
    _small(mean[-1])
    actor = ProbabilisticTensorDictSequential(
        [
            TensorDictModule(FixedScale(mean, acer.sigma), in_keys=["observation"], out_keys=["loc", "scale"]),
            ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=IndependentNormal),
        ]
    )
    kind = StochasticDuelingNetwork if acer.dueling else SeparateValueNetworks
    # truncated importance sampling uses V alone
    only_v = acer.returns == "truncated_importance_sampling"
    critic = kind(value, nn.Identity() if only_v else mlp(num_features + num_actions, 1), trunk)
    return ACERContinuousLoss(actor, critic, **settings_of(acer, "num_samples", "value_coeff", "use_q_opc"))


class CurrentPolicy:
    """The behaviour policy μ: samples from the current policy and returns the statistics of its distribution.

    Args:
        actor: the policy network, which returns the statistics of the distribution.
        normalizer: normalizes the observations.
        device: device of both.
    """

    def __init__(self, actor: nn.Module, normalizer: Normalizer, device: torch.device):
        self._actor, self._normalizer, self._device = actor, normalizer, device

    @torch.inference_mode()
    def _statistics(self, observations: np.ndarray) -> tuple[Tensor, ...]:
        observed = self._normalizer(to_tensor(observations, self._device))
        result = self._actor(observed)
        return result if isinstance(result, tuple) else (result,)

    def __call__(self, observations: np.ndarray) -> dict[str, np.ndarray]:
        """Actions, sampled with torch's global generator, and the statistics of their distribution."""
        first, *rest = self._statistics(observations)
        if rest:
            written = {"action": first + rest[0] * torch.randn_like(first), "loc": first, "scale": rest[0]}
        else:
            written = {"action": first.softmax(-1).multinomial(1).squeeze(-1), "logits": first}
        return {key: value.cpu().numpy() for key, value in written.items()}

    def most_probable(self, observations: np.ndarray) -> np.ndarray:
        """The most probable actions."""
        first, *rest = self._statistics(observations)
        return (first if rest else first.argmax(-1)).cpu().numpy()


def make_updates(
    acer: ACERConfig,
    replay: TensorDictReplayBuffer,
    loss_module: ACERLoss | ACERContinuousLoss,
    normalizer: Normalizer,
    average_policy: SoftUpdate,
    optimizer: torch.optim.Adam | RMSProp,
    *,
    shifted: bool,
) -> tuple[Callable[[], dict[str, Tensor]], Callable[[], dict[str, Tensor]]]:
    """Build the update on the newest slices and the update on replayed slices, eager or in graphs.

    Args:
        acer: the hyperparameters.
        replay: the buffer, with a TrajectoryRetraceSampler.
        loss_module: the loss. It writes SQUARED TD errors to the slices.
        normalizer: normalizes the observations.
        average_policy: updates the average policy.
        optimizer: optimizer of the loss. If it is restored from a checkpoint, restore it before.
        shifted: whether the loss evaluates states of replayed slices only once. A newest slice may contain several
            episodes, a replayed one is part of one episode.
    """
    optimizer_step = make_step(optimizer)
    sampler = replay.sampler
    assert isinstance(sampler, TrajectoryRetraceSampler)

    def update(sample: TensorDictBase, *, shifted: bool) -> dict[str, Tensor]:
        """An update on a flat sample of slices; writes the TD errors into the sample."""
        batch = sample.reshape(-1, acer.slice_len)
        for key in ("observation", ("next", "observation")):
            batch[key] = normalizer(batch[key])
        batch["next", "reward"] = batch["next", "reward"] * acer.reward_scale
        losses = dict(loss_module(batch, shifted=shifted).items())
        sample["td_error"] = batch["td_error"].reshape(-1)
        # the other numbers are only logged
        loss: Any = sum(value for name, value in losses.items() if name.startswith("loss"))
        gradients = torch.autograd.grad(loss, optimizer_step.parameters)
        optimizer_step(clip_gradients(gradients, acer.max_grad_norm))
        average_policy.step()
        return stack_updates([losses])

    def on_policy_update() -> dict[str, Tensor]:
        return update(sampler.newest(replay), shifted=False)

    def replayed_update() -> dict[str, Tensor]:
        batch = replay.sample()
        losses = update(batch, shifted=shifted)
        replay.update_tensordict_priority(batch)
        return losses

    return on_policy_update, replayed_update


def train(config: ACERRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        config: the configuration.
        run_dir: directory of the run.

    Returns:
        The exit code.
    """
    acer = config.acer
    # One environment per evaluation episode. The collector makes the training environments.
    run = Run(config, run_dir, make_env)
    device, evaluation = run.device, run.evaluation
    observed, num_actions = evaluation.observation_space.shape, flatdim(evaluation.action_space)
    assert observed is not None
    can_be_normalized = len(observed) == 1 or not acer.normalize_observations
    acer.require("normalize_observations", can_be_normalized, "supports vectors only; images are divided by 255")

    # Networks, losses, the average policy and the optimizer.
    discrete = isinstance(evaluation.action_space, Discrete)
    if not discrete and len(observed) != 1:
        raise ConfigError(f"env={config.env.name}: continuous actions need observations that are vectors")
    fitting = not discrete or acer.returns in WITH_Q
    acer.require("returns", fitting, f"actions are discrete; choose {', '.join(WITH_Q)}")
    make_loss: Callable[..., Any] = make_discrete_loss if discrete else make_continuous_loss
    loss_module = make_loss(acer, observed, num_actions, device)
    average_policy = SoftUpdate(loss_module, eps=acer.average)
    optimizer = make_optimizer(acer.optimizer, loss_module.parameters(), acer.learning_rate)
    normalizer = Normalizer(observed[0], active=acer.normalize_observations).to(device)

    # The buffer. The losses give SQUARED TD errors. A prioritized sampler draws the first steps of slices.
    anchors = make_sampler(config, td_error="squared")
    sampler = TrajectoryRetraceSampler(
        acer.buffer_size,
        slice_len=acer.slice_len,
        episodes=Episodes(num_streams=config.num_envs),
        behaviour_keys=("logits",) if discrete else ("loc", "scale"),
        anchors="uniform" if isinstance(anchors, RandomSampler) else anchors,
    )
    replay = CompilableReplayBuffer(
        storage=make_storage(config, device),
        sampler=sampler,
        writer=make_writer(anchors),
        batch_size=acer.batch_size,
    )

    # The policy as functions of arrays: sampled actions for training, the most probable actions for evaluations.
    policy = nn.Sequential(*[module.module for module in loss_module.actor_network[:-1]])
    behaviour = CurrentPolicy(policy, normalizer, device)
    run.attach(
        behaviour,
        replay,
        policy=behaviour.most_probable,
        columns=lambda _: {"training_return": statistics.fmean(run.collector.returns or [math.nan])},
        losses=tuple(loss_module.out_keys),
        state={"loss": loss_module, "optimizer": optimizer, "normalizer": normalizer},
    )
    # In eager code, the values of continuous actions take less time than the operations that select the next states.
    shifted = discrete or config.compile
    on_policy_update, replayed_update = make_updates(
        acer, replay, loss_module, normalizer, average_policy, optimizer, shifted=shifted
    )
    if config.compile:
        on_policy_update = compile_update(on_policy_update, config)
        replayed_update = compile_update(replayed_update, config)

    with run:
        while run.continues():
            data = run.collect()
            replay.extend(data)
            normalizer.update(data["observation"])
            if run.env_steps > acer.learning_starts:
                num_replayed = int(torch.poisson(torch.tensor(acer.replay_ratio)))
                if acer.on_policy:
                    run.log_losses(on_policy_update())
                for _ in range(num_replayed):
                    run.log_losses(replayed_update())
            run.end_round()
    return run.exit_code


if __name__ == "__main__":
    run_recipe("acer")
