"""Double DQN with uniform, prioritized (PER), reliability-adjusted (ReaPER) replay, or event tables (SSET).

    python -m recipes.dqn env=cartpole sampler=reaper seed=1
    python -m recipes.dqn -m seed=1,2,3 sampler=uniform,per,reaper
    python -m recipes.dqn compile=true num_envs=8
    python -m recipes.dqn env=threerooms sampler=sset stop_at_threshold=false
    python -m recipes.dqn env=atari/qbert sampler=reaper
    python -m recipes.dqn resume=runs/dqn/cartpole/reaper/seed1-...

The settings are from the ReaPER paper (appendix D) or, for the grid worlds, from the event-table paper (table 1); see
conf/dqn/<env>.yaml. env=atari/<game> accepts any game of ale-py and uses conf/dqn/atari.yaml. Atari agents train on
single lives with clipped rewards and are evaluated on whole games; see recipes.envs.atari.

progress.csv has one row per evaluation, with the columns

    env_steps, updates     totals so far
    return_mean            mean return of the evaluation's episodes
    return_0, return_1 ... return of each episode
    return_<name>          mean return of a further evaluation (env.evaluations) or of the episodes with this value in
                           their `info` (env.return_by)
    human_normalized       return_mean scaled to 0 for random actions and 1 for humans (Atari games with known scores)
    epsilon                exploration rate
    loss                   mean over the updates since the previous row
    wall_time              seconds, including the time before a resume
    cpu_time               CPU seconds of this process, including the time before a resume
    sampler/...            scalars of the sampler's stats()
    q_mean                 mean value of the evaluation's steps, as the target network gives it (dqn.log_q_mean=true)
    q_sum                  sum of the target network's Q-values over all actions and all states except the goal (rooms)
    q_error                root mean square error of these Q-values (rooms)
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import flatdim
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, HardUpdate, SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater

from recipes.common.cagrad import cagrad_gradients, table_losses
from recipes.common.cli import run_recipe
from recipes.common.collector import EpsilonRandom
from recipes.common.config import EnvConfig, RunConfig
from recipes.common.environment import make_discrete_env
from recipes.common.networks import make_network, on_arrays, to_tensor
from recipes.common.replay import make_sampler, make_storage, make_writer, set_targets
from recipes.common.run import Run
from recipes.common.schemas import DistributedRun, DQNConfig, DQNRun
from recipes.common.update import RMSProp, Update, make_optimizer, make_round, make_step, stack_updates, weight_factor
from recipes.envs.rooms import Rooms
from torchrl_replay_ext import CompilableReplayBuffer, clip_gradients


def make_loss(dqn: DQNConfig, actor: QValueActor) -> tuple[DQNLoss, TargetNetUpdater]:
    """The Double DQN loss and the update of its target network: after each update, or at intervals of env steps."""
    loss_module = DQNLoss(
        actor,
        loss_function=dqn.loss_function,
        delay_value=True,
        double_dqn=True,
        action_space="categorical",
        reduction="mean" if dqn.cagrad is None else "none",
    )
    set_targets(loss_module, dqn)
    if dqn.tau is not None:
        return loss_module, SoftUpdate(loss_module, tau=dqn.tau)
    return loss_module, HardUpdate(loss_module, value_network_update_interval=0)  # each step copies


def make_update(
    config: RunConfig,
    replay: TensorDictReplayBuffer,
    loss_module: DQNLoss,
    target: TargetNetUpdater,
    optimizer: torch.optim.Adam | RMSProp,
) -> Update:
    """Build the function that writes new transitions and makes `updates_per_graph` updates, eager or in a graph.

    Args:
        config: the configuration of the run, whose hyperparameters are a DQNConfig.
        replay: the buffer.
        loss_module: the loss.
        target: updates the target network. If dqn.tau is None, the training loop does it.
        optimizer: optimizer of the loss. If it is restored from a checkpoint, restore it before.
    """
    dqn, num_tables, optimizer_step = config.learning, len(config.env.events) + 1, make_step(optimizer)

    def update(data: TensorDictBase | None) -> dict[str, Tensor]:
        if data is not None:
            replay.extend(data)
        results = []
        for _ in range(config.updates_per_graph):
            batch = replay.sample()
            # The loss applies batch["priority_weight"] and writes the SQUARED TD errors to batch["td_error"].
            loss, factor = loss_module(batch)["loss"], weight_factor(batch, config.weights)
            if dqn.cagrad is None:
                loss = loss * factor
                gradients = torch.autograd.grad(loss, optimizer_step.parameters)
            else:
                loss, by_table, shares = table_losses(loss * factor, batch, num_tables)
                gradients = cagrad_gradients(by_table, shares, optimizer_step.parameters, dqn.cagrad)
            if dqn.max_grad_norm is not None:
                gradients = clip_gradients(gradients, dqn.max_grad_norm)
            optimizer_step(gradients)
            if dqn.tau is not None:
                target.step()
            replay.update_tensordict_priority(batch)
            results.append({"loss": loss})
        return stack_updates(results)

    return update


class TargetValues:
    """The Q-values of the target network of a loss.

    Args:
        loss_module: the loss.
        device: device of its networks.
    """

    def __init__(self, loss_module: DQNLoss, device: torch.device):
        self._loss_module, self._device = loss_module, device

    @torch.no_grad()
    def __call__(self, observations: np.ndarray) -> Tensor:
        """Q-values [n, num_actions] of observations [n, ...]."""
        network = self._loss_module.value_network
        observed = to_tensor(observations, self._device)
        with self._loss_module.target_value_network_params.to_module(network):
            return network(TensorDict(observation=observed))["action_value"]

    def of_steps(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Q-values [n] of observations [n, ...] and integer actions [n]."""
        return np.take_along_axis(self(observations).cpu().numpy(), actions[:, None], 1)[:, 0]


def room_columns(config: EnvConfig, values: TargetValues, gamma: float) -> Callable[[], dict[str, float]]:
    """A function that returns q_sum and q_error; an empty dict if the optimal Q-values are not available."""
    if not config.id.startswith("recipes.envs:") or gamma == 1:
        return dict
    world = make_discrete_env(config, training=True).unwrapped
    if not isinstance(world, Rooms):
        return dict
    # Leave out the goal states: episodes end there, so their Q-values are never learned.
    states = (world.dynamics.next_state != np.arange(world.num_states)[:, None]).any(1)
    observations, optimal = world.observations[states], torch.as_tensor(world.dynamics.optimal_q(gamma)[states])

    def columns() -> dict[str, float]:
        q = values(observations).cpu()
        return {"q_sum": q.sum().item(), "q_error": (q - optimal).square().mean().sqrt().item()}

    return columns


def train(config: DQNRun | DistributedRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        config: the configuration.
        run_dir: directory of the run.

    Returns:
        The exit code.
    """
    dqn: DQNConfig = config.learning
    # One environment per evaluation episode. The collector makes the training environments.
    run = Run(config, run_dir, make_discrete_env)
    device, evaluation = run.device, run.evaluation
    observed, num_actions = evaluation.observation_space.shape or (), flatdim(evaluation.action_space)

    # Networks, loss and optimizer.
    network = make_network(observed, num_actions, dqn.hidden_sizes, device=device)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module, target = make_loss(dqn, actor)
    optimizer = make_optimizer(dqn.optimizer, loss_module.parameters(), dqn.learning_rate)

    # The buffer. DQNLoss gives SQUARED TD errors.
    if isinstance(config, DistributedRun):
        replay = run.make_remote_replay(td_error="squared")
    else:
        sampler = make_sampler(config, td_error="squared")
        replay = CompilableReplayBuffer(
            storage=make_storage(config, device),
            sampler=sampler,
            writer=make_writer(sampler),
            batch_size=dqn.batch_size,
        )

    greedy = on_arrays(lambda observations: network(observations).argmax(-1), device)
    behaviour = EpsilonRandom(greedy, evaluation.action_space, seed=config.seed)
    values = TargetValues(loss_module, device)
    of_rooms = room_columns(config.env, values, dqn.gamma)
    run.attach(
        behaviour,
        replay,
        actor=actor,
        policy=greedy,
        epsilon=dqn.evaluation_epsilon,
        value=values.of_steps if dqn.log_q_mean else None,
        losses=("loss",),
        columns=lambda steps: {"epsilon": dqn.epsilon(steps), **of_rooms()},
        state={"loss": loss_module, "optimizer": optimizer, "behaviour": behaviour},
    )
    update = make_update(config, replay, loss_module, target, optimizer)
    learn = make_round(update, replay, run)

    with run:
        while run.continues():
            behaviour.epsilon = dqn.epsilon(run.env_steps)
            data = run.collect()
            if dqn.copies_due(run.env_steps, run.collector.steps_of_batch):
                target.step()
            learn(data)  # writes the batch; updates begin after dqn.learning_starts
            run.end_round()
    return run.exit_code


if __name__ == "__main__":
    run_recipe("dqn")
