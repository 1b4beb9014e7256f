"""Double DQN, TD3 or SAC with Ray: collectors and replay buffer are Ray actors, and the learner draws from the buffer.

    python -m recipes.distributed env=cartpole sampler=reaper num_collectors=2
    python -m recipes.distributed env=cartpole sampler=per num_collectors=4 num_shards=4
    python -m recipes.distributed algorithm=sac env=pendulum sampler=per
    python -m recipes.distributed address=auto num_collectors=32 num_envs=4 num_shards=8
    python -m recipes.distributed resume=runs/distributed/cartpole/reaper/seed1-...

Settings and updates are those of recipes.dqn, recipes.td3 or recipes.sac (conf/<algorithm>/<env>.yaml), with the same
number of updates per env step. Collectors act with weights that are up to num_collectors batches old. The buffer is
split between num_shards actors; draws follow the distribution of a single buffer. If the process of a shard ends, the
run goes on, and the shard continues from the last checkpoint. Two runs with the same seed differ, because the order in
which collectors finish is not deterministic. Needs Ray (pip install "ray>=2.9").

progress.csv has the columns of the algorithm's recipe, except q_sum and q_error; epsilon is the probability of a random
action, also while TD3 and SAC act at random at the start.
"""

if __name__ == "__main__":
    # Before the imports below, which take seconds: mistakes on the command line are reported at once.
    from recipes.common.cli import run_recipe

    run_recipe("distributed")

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gymnasium.spaces import flatdim
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torchrl.data import Bounded, Categorical
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, QValueActor
from torchrl.objectives import SoftUpdate

from recipes import dqn, sac, td3
from recipes.common.environment import make_continuous_env, make_discrete_env
from recipes.common.evaluation import Policy, Value
from recipes.common.networks import make_network, on_arrays
from recipes.common.q_values import TargetValues
from recipes.common.remote import RemoteCollector, RemoteReplay, noticing_lost_actors, runtime
from recipes.common.run import Run
from recipes.common.schemas import DistributedRun, DQNConfig, SACConfig, TD3Config
from recipes.common.update import Update, make_optimizer


@dataclass
class Learner:
    """The parts of an algorithm.

    Args:
        actor: writes actions; collectors act with its weights.
        noise: modules after the actor, which explore; the last one acts at random with a probability, ``eps``.
        epsilon: that probability after a number of env steps.
        policy: the policy to evaluate.
        losses: names of the numbers that the updates return.
        state: what a checkpoint must hold.
        make_update: makes the update, once a checkpoint was loaded.
        td_error: the kind of TD errors that the loss gives.
        copy_target: called with the env steps after each batch.
        evaluation_epsilon: probability of a random action in evaluations.
        value: see :meth:`Run.attach`.
    """

    actor: TensorDictModuleBase
    noise: list[TensorDictModuleBase]
    epsilon: Callable[[int], float]
    policy: Policy
    losses: tuple[str, ...]
    state: dict[str, Any]
    make_update: Callable[[Any], Update]
    td_error: str = "squared"
    copy_target: Callable[[int], None] = lambda _steps: None
    evaluation_epsilon: float = 0.0
    value: Value | None = None


def dqn_learner(config: DistributedRun, settings: DQNConfig, run: Run) -> Learner:
    """The parts of recipes.dqn."""
    device, space, count = run.device, run.evaluation.observation_space, flatdim(run.evaluation.action_space)
    network = make_network(space.shape or (), count, settings.hidden_sizes, device=device)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module, target = dqn.make_loss(settings, actor)
    optimizer = make_optimizer(settings.optimizer, loss_module.parameters(), settings.learning_rate)

    def copy_target(steps: int) -> None:
        if settings.copies_due(steps, settings.train_interval):
            target.step()

    return Learner(
        actor,
        [EGreedyModule(Categorical(count), eps_init=1.0, eps_end=0.0)],
        settings.epsilon,
        on_arrays(lambda observations: network(observations).argmax(-1), device),
        ("loss",),
        {"loss": loss_module, "optimizer": optimizer},
        lambda replay: dqn.make_update(config, replay, loss_module, target, optimizer),
        copy_target=copy_target,
        evaluation_epsilon=settings.evaluation_epsilon,
        value=TargetValues(loss_module, device).of_steps if settings.log_q_mean else None,
    )


def td3_learner(config: DistributedRun, settings: TD3Config, run: Run) -> Learner:
    """The parts of recipes.td3."""
    spec, sizes = continuous(run)
    policy, loss_module = td3.make_loss(settings, *sizes, run.device)
    target = SoftUpdate(loss_module, tau=settings.tau)
    optimizers = td3.make_optimizers(settings, loss_module)
    sigma = settings.exploration_noise
    return Learner(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]),
        [AdditiveGaussianModule(spec, sigma_init=sigma, sigma_end=sigma), random_actions(spec)],
        lambda steps: float(steps < settings.learning_starts),
        on_arrays(policy, run.device),
        ("loss_actor", "loss_qvalue"),
        {"loss": loss_module, **optimizers},
        lambda replay: td3.make_update(config, replay, loss_module, target, optimizers),
    )


def sac_learner(config: DistributedRun, settings: SACConfig, run: Run) -> Learner:
    """The parts of recipes.sac."""
    spec, sizes = continuous(run)
    policy, loss_module = sac.make_loss(settings, *sizes, run.device)
    target = SoftUpdate(loss_module, tau=settings.tau)
    optimizers = sac.make_optimizers(settings, loss_module)
    return Learner(
        sac.make_actor(policy),
        [random_actions(spec)],
        lambda steps: float(steps < settings.learning_starts),
        on_arrays(lambda observations: torch.tanh(policy(observations)[0]), run.device),
        ("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"),
        {"loss": loss_module, **optimizers},
        lambda replay: sac.make_update(config, replay, loss_module, target, optimizers),
        td_error="absolute",
    )


def continuous(run: Run) -> tuple[Bounded, tuple[int, int]]:
    """The actions of an environment, in [-1, 1], and the numbers of observed values and of actions."""
    observed, actions = flatdim(run.evaluation.observation_space), flatdim(run.evaluation.action_space)
    return Bounded(-1.0, 1.0, torch.Size([actions])), (observed, actions)


def random_actions(spec: Bounded) -> EGreedyModule:
    """Acts at random until learning starts."""
    return EGreedyModule(spec, eps_init=1.0, eps_end=0.0)


def train(config: DistributedRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Returns:
        The exit code.
    """
    with runtime(config.address, config.num_collectors, config.num_shards):
        # One environment per evaluation episode. The collectors make the training environments.
        settings = config.learning
        run = Run(config, run_dir, make_discrete_env if config.dqn else make_continuous_env, remote=True)
        make = {"dqn": dqn_learner, "td3": td3_learner, "sac": sac_learner}[config.algorithm]
        learner = make(config, settings, run)
        # The collectors have no GPU: they get a copy on the CPU.
        acting = deepcopy(learner.actor).cpu()
        replay: Any = RemoteReplay(config, run.device, run_dir, learner.td_error)
        collector = RemoteCollector(config, TensorDictSequential([acting, *learner.noise]), replay)
        run.attach(
            collector,
            replay,
            policy=learner.policy,
            epsilon=learner.evaluation_epsilon,
            value=learner.value,
            losses=learner.losses,
            columns=lambda steps: {
                "epsilon": learner.epsilon(steps),
                **{f"sampler/{key}": value for key, value in replay.stats().items()},
            },
            state=learner.state,
        )
        # the buffer has all methods that an update calls
        update = learner.make_update(replay)

        with run, noticing_lost_actors():
            while run.continues():
                acting.load_state_dict(learner.actor.state_dict())
                learner.noise[-1].get_buffer("eps").fill_(learner.epsilon(run.env_steps))
                # The collectors write to the buffer; the batch has no entries.
                run.collect()
                learner.copy_target(run.env_steps)
                if run.env_steps > settings.learning_starts:
                    for _ in range(settings.gradient_steps // config.updates_per_graph):
                        run.log_losses(update(None))
                run.end_round()
        return run.exit_code
