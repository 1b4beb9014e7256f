"""Recurrent double DQN with prioritized replay of sequences: R2D2 (Kapturowski et al. 2019), reduced to one process.

    python -m recipes.r2d2 env=cartpole_positions seed=1
    python -m recipes.r2d2 -m seed=1,2,3 sampler=uniform,per
    python -m recipes.r2d2 compile=true
    python -m recipes.r2d2 resume=runs/r2d2/cartpole_positions/per/seed1-...

Q-values come from an LSTM, so the agent can act on what it saw in earlier steps. Each drawn transition is expanded to a
window of burn_in + sequence_length consecutive steps of one episode. The recurrent state before the window is the one
that the behaviour policy had then. The burn-in steps update it to the current network; the loss is that of the steps
after them.

From the paper: burn-in, stored recurrent states, double Q-learning, priorities that mix the largest and the mean TD
error of a window. Not from the paper: one process with num_envs environments instead of many actors, windows that begin
at any step, no rescaling of values, no duelling network, and a smooth L1 loss.

progress.csv has one row per evaluation, with the columns

    env_steps, updates     totals so far
    return_mean            mean return of the evaluation's episodes
    return_0, return_1 ... return of each episode
    epsilon                exploration rate
    loss                   mean over the updates since the previous row
    wall_time              seconds, including the time before a resume
    cpu_time               CPU seconds of this process, including the time before a resume
    sampler/...            scalars of the sampler's stats()
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import cast

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import flatdim
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import mse_loss, smooth_l1_loss
from torchrl.data import Sequence as Windows
from torchrl.data import TensorDictReplayBuffer
from torchrl.modules import MLP

from recipes.common.cli import run_recipe
from recipes.common.collector import EpsilonRandom
from recipes.common.environment import make_discrete_env
from recipes.common.errors import ConfigError
from recipes.common.networks import to_tensor
from recipes.common.replay import make_sampler
from recipes.common.run import Run
from recipes.common.schemas import R2D2Config, R2D2Run
from recipes.common.update import RMSProp, Update, make_optimizer, make_round, make_step, stack_updates
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, clip_gradients


class RecurrentNetwork(nn.Module):
    """Q-values from an LSTM and fully connected layers. The recurrent state is one tensor [..., 2, units].

    Args:
        num_observed: length of an observation vector.
        num_actions: number of actions.
        units: units of the LSTM.
        hidden_sizes: units of each layer between the LSTM and the Q-values.
        device: device of the parameters.
    """

    def __init__(self, num_observed: int, num_actions: int, units: int, hidden_sizes: list[int], device: torch.device):
        super().__init__()
        self.cell = nn.LSTMCell(num_observed, units, device=device)
        self.head = MLP(units, num_actions, num_cells=hidden_sizes, activation_class=nn.ReLU, device=device)

    def initial(self, count: int) -> Tensor:
        """The recurrent states [count, 2, units] at the beginning of episodes."""
        return self.cell.weight_hh.new_zeros(count, 2, self.cell.hidden_size)

    def begin(self, count: int) -> "RecurrentEpisodes":
        """Begin ``count`` greedy episodes, see recipes.common.evaluation.Policy."""
        return RecurrentEpisodes(self, count)

    def step(self, observation: Tensor, state: Tensor) -> Tensor:
        """The recurrent states [n, 2, units] after one step, from observations [n, size] and the states before."""
        return torch.stack(self.cell(observation, (state[:, 0], state[:, 1])), 1)

    def values(self, state: Tensor) -> Tensor:
        """Q-values [..., actions] of recurrent states [..., 2, units]."""
        return self.head(state[..., 0, :])

    def forward(self, observations: Tensor, state: Tensor) -> Tensor:
        """Q-values [n, steps, actions] of consecutive observations [n, steps, size].

        Args:
            observations: [n, steps, size].
            state: recurrent states before the first observation, [n, 2, units].
        """
        hidden, cell, outputs = state[:, 0], state[:, 1], []
        for observation in observations.unbind(1):
            hidden, cell = self.cell(observation, (hidden, cell))
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))

    @torch.no_grad()
    def burn_in(self, observations: Tensor, valid: Tensor, state: Tensor) -> Tensor:
        """The recurrent states [n, 2, units] after consecutive observations; without gradients.

        Args:
            observations: [n, steps, size].
            valid: False for rows that repeat the first one, before the first valid row of a window; bool [n, steps].
            state: recurrent states before the first valid row, [n, 2, units].
        """
        for observation, is_step in zip(observations.unbind(1), valid.unbind(1), strict=True):
            state = torch.where(is_step[:, None, None], self.step(observation, state), state)
        return state


class RecurrentEpisodes:
    """Greedy actions in episodes that are played side by side, with their recurrent states.

    Args:
        network: the network.
        count: number of episodes.
    """

    def __init__(self, network: RecurrentNetwork, count: int):
        self._network = network
        self.state = network.initial(count)

    @torch.no_grad()
    def __call__(self, observations: np.ndarray, episodes: Sequence[int]) -> np.ndarray:
        """The greedy actions [n] for the next observations [n, size] of these episodes."""
        after = self._network.step(to_tensor(observations, self.state.device), self.state[episodes])
        self.state[episodes] = after
        return self._network.values(after).argmax(-1).cpu().numpy()


class RecurrentBehaviour(EpsilonRandom):
    """An epsilon-greedy behaviour policy that stores the recurrent state before each step as "recurrent_state".

    Args:
        network: the network.
        action_space: action space of one environment.
        num_envs: number of environments.
        seed: seed of the random actions.
    """

    def __init__(self, network: RecurrentNetwork, action_space: gymnasium.Space, num_envs: int, *, seed: int):
        self._episodes, self._all = RecurrentEpisodes(network, num_envs), range(num_envs)
        super().__init__(lambda _: self._greedy, action_space, seed=seed)

    def __call__(self, observations: np.ndarray) -> dict[str, np.ndarray]:
        """The actions for ``observations``, and the recurrent states before this step."""
        before = self._episodes.state.cpu().numpy().copy()
        # random actions, too, need the recurrent state after this observation
        self._greedy = self._episodes(observations, self._all)
        return {"action": super().__call__(observations), "recurrent_state": before}

    def begin(self, envs: Sequence[int] | np.ndarray) -> None:
        """Begin new episodes in these environments."""
        self._episodes.state[envs] = 0


def end_newest_steps(replay: TensorDictReplayBuffer) -> None:
    """Truncate the episodes of the newest stored steps: a resumed run begins new ones, and windows read "done"."""
    if len(replay):
        newest = replay.storage[(replay.write_count - 1) % replay.storage.shape[0]]["next"]
        newest["truncated"] |= ~newest["done"]
        newest["done"].fill_(True)


def values_and_targets(
    r2d2: R2D2Config, network: RecurrentNetwork, target: RecurrentNetwork, batch: TensorDictBase
) -> tuple[Tensor, Tensor]:
    """Q-values of the actions taken and their targets, [windows, sequence_length] each.

    With V(x) = Q'(x, argmax_a Q(x, a)), the target is r_t + γ V(x_{t+1}), or with n = target_steps
    r_t + ... + γ^(n-1) r_{t+n-1} + γ^n V(x_{t+n}). It stops at a termination. At a truncation and at the end of the
    window it bootstraps earlier.

    Args:
        r2d2: the hyperparameters.
        network: the network Q.
        target: the target network Q'.
        batch: windows of consecutive steps, [windows, burn_in + sequence_length]. Only the first state of
            "recurrent_state" is read.
    """
    burn_in, steps = (cast(TensorDictBase, part) for part in (batch[:, : r2d2.burn_in], batch[:, r2d2.burn_in :]))
    start = batch["recurrent_state"][:, 0]
    # The next observation of a step is the observation of the step after it.
    observed = torch.cat([steps["observation"][:, :1], steps["next", "observation"]], 1)

    def values(network: RecurrentNetwork) -> Tensor:
        state = network.burn_in(burn_in["observation"], burn_in["validity_mask"], start)
        return network(observed, state)

    q = values(network)
    with torch.no_grad():
        best = q[:, 1:].argmax(-1, keepdim=True)
        q_next = values(target)[:, 1:].gather(-1, best).squeeze(-1)
        discount = r2d2.gamma * ~steps["next", "terminated"].squeeze(-1)
        reward, has_next = steps["next", "reward"].squeeze(-1), steps["validity_mask"][:, 1:]
        targets = reward + discount * q_next
        for _ in range(r2d2.target_steps - 1):
            later = torch.where(has_next, targets[:, 1:], q_next[:, :-1])
            targets = reward + discount * torch.cat([later, q_next[:, -1:]], 1)
    return q[:, :-1].gather(-1, steps["action"].unsqueeze(-1)).squeeze(-1), targets


def make_update(
    config: R2D2Run,
    replay: TensorDictReplayBuffer,
    network: RecurrentNetwork,
    target: RecurrentNetwork,
    optimizer: torch.optim.Adam | RMSProp,
) -> Update:
    """Build the function that writes new transitions and makes `updates_per_graph` updates, eager or in a graph.

    `weights=mean` divides the weighted losses by the number of learned steps, `normalized` by the sum of their weights.

    Args:
        config: the configuration of the run.
        replay: the buffer, which draws windows.
        network: the network.
        target: the target network.
        optimizer: optimizer of the network. If it is restored from a checkpoint, restore it before.
    """
    r2d2, optimizer_step = config.r2d2, make_step(optimizer)
    error_of = smooth_l1_loss if r2d2.loss_function == "smooth_l1" else mse_loss
    assert r2d2.tau is not None
    tau = r2d2.tau

    def update(data: TensorDictBase | None) -> dict[str, Tensor]:
        if data is not None:
            replay.extend(data)
        results = []
        for _ in range(config.updates_per_graph):
            batch = replay.sample().reshape(-1, r2d2.burn_in + r2d2.sequence_length)
            values, targets = values_and_targets(r2d2, network, target, batch)
            learned = batch["validity_mask"][:, r2d2.burn_in :]  # without the steps that fill up short windows
            losses, total = error_of(values, targets, reduction="none") * learned, learned.sum()
            if (weight := batch.get("priority_weight", None)) is not None:
                weight = weight[:, r2d2.burn_in :] * learned
                losses, total = losses * weight, total if config.weights == "mean" else weight.sum()
            loss = losses.sum() / total
            gradients = torch.autograd.grad(loss, optimizer_step.parameters)
            if r2d2.max_grad_norm is not None:
                gradients = clip_gradients(gradients, r2d2.max_grad_norm)
            optimizer_step(gradients)
            with torch.no_grad():
                for old, new in zip(target.parameters(), network.parameters(), strict=True):
                    old.lerp_(new, tau)
            # The largest value of a window is the priority of its first learned step, so all steps get the same.
            td_error = (targets - values.detach()).abs() * learned
            mean = td_error.sum(1) / learned.sum(1)
            priority = r2d2.eta * td_error.amax(1) + (1 - r2d2.eta) * mean
            batch["td_error"] = priority.unsqueeze(1).expand(batch.shape).contiguous()
            replay.update_tensordict_priority(batch)
            results.append({"loss": loss})
        return stack_updates(results)

    return update


def train(config: R2D2Run, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        config: the configuration.
        run_dir: directory of the run.

    Returns:
        The exit code.
    """
    r2d2 = config.r2d2
    # One environment per evaluation episode. The collector makes the training environments.
    run = Run(config, run_dir, make_discrete_env)
    device, evaluation = run.device, run.evaluation
    if len(evaluation.observation_space.shape or ()) != 1:
        raise ConfigError(f"env.id={config.env.id}: recipes.r2d2 needs vector observations; use recipes.dqn")
    num_observed, num_actions = math.prod(evaluation.observation_space.shape or ()), flatdim(evaluation.action_space)

    # Networks and optimizer.
    network = RecurrentNetwork(num_observed, num_actions, r2d2.units, r2d2.hidden_sizes, device)
    target = deepcopy(network).requires_grad_(False)
    optimizer = make_optimizer(r2d2.optimizer, network.parameters(), r2d2.learning_rate)

    # The buffer, with a column for each environment, so that it needs no trajectory ids. It draws transitions and
    # expands each to a window of steps. The update writes ABSOLUTE TD errors.
    replay = CompilableReplayBuffer(
        storage=CompilableTensorStorage(r2d2.buffer_size, ndim=2, device=device),
        sampler=make_sampler(config, td_error="absolute", num_streams=1),
        batch_size=r2d2.batch_size,
        sample_unit=Windows(length=r2d2.sequence_length, burn_in=r2d2.burn_in),
        dim_extend=0,
    )

    behaviour = RecurrentBehaviour(network, evaluation.action_space, config.num_envs, seed=config.seed)
    run.attach(
        behaviour,
        replay,
        policy=network,
        epsilon=r2d2.evaluation_epsilon,
        losses=("loss",),
        columns=lambda steps: {"epsilon": r2d2.epsilon(steps)},
        state={"network": network, "target": target, "optimizer": optimizer, "behaviour": behaviour},
    )
    if config.resume is not None:
        end_newest_steps(replay)
    learn = make_round(make_update(config, replay, network, target, optimizer), replay, run)

    with run:
        while run.continues():
            behaviour.epsilon = r2d2.epsilon(run.env_steps)
            learn(run.collect().exclude("collector").reshape(-1, config.num_envs))
            run.end_round()
    return run.exit_code


if __name__ == "__main__":
    run_recipe("r2d2")
