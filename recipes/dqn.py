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
    return_<name>          mean return of a further evaluation, see env.evaluations
    human_normalized       return_mean scaled to 0 for random actions and 1 for humans (Atari games with known scores)
    epsilon                exploration rate
    loss                   mean over the updates since the previous row
    wall_time              seconds, including the time before a resume
    sampler/...            scalars of the sampler's stats()
    q_sum                  sum of the target network's Q-values over all actions and all states except the goal (rooms)
    q_error                root mean square error of these Q-values (rooms)
"""

if __name__ == "__main__":
    # Before the imports below, which take seconds: mistakes on the command line are reported at once.
    from recipes.common.cli import run_recipe

    run_recipe("dqn")

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import flatdim
from omegaconf import DictConfig
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, HardUpdate, SoftUpdate

from recipes.common.cagrad import cagrad_gradients, losses_by_table
from recipes.common.cli import parse_config
from recipes.common.collector import EpsilonRandom, VectorCollector
from recipes.common.environment import make_discrete_env
from recipes.common.networks import make_network
from recipes.common.optimizers import make_optimizer
from recipes.common.replay import make_replay, require_frames, require_memory
from recipes.common.run import Agent, prepare, run
from recipes.common.schemas.dqn import Config, DQNConfig
from recipes.common.update import Learner, target_pairs
from recipes.envs.rooms import Rooms


def table_losses(loss_module: DQNLoss, num_tables: int, sample: TensorDictBase) -> dict[str, Tensor]:
    """The loss of the batch, and the loss of each event table's rows.

    Args:
        loss_module: a loss with reduction="none".
        num_tables: K, number of tables including the default table.
        sample: a batch from event tables; the loss writes the TD errors into it.

    Returns:
        "loss" []; "table_loss" [K], the mean loss of each table's rows; "table_weight" [K], the weight of each table in
        the loss of the batch.
    """
    rows = loss_module(sample)["loss"]
    losses, weights = losses_by_table(rows, sample["priority_weight"], sample["table"], num_tables)
    return {"loss": rows.sum() / sample["priority_weight"].sum(), "table_loss": losses, "table_weight": weights}


def conflict_averse(c: float, losses: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """CAGrad gradients of the losses that table_losses returns."""
    return cagrad_gradients(losses["table_loss"], losses["table_weight"], parameters, c)


def q_columns(
    env: gymnasium.Env, loss_module: DQNLoss, gamma: float, device: torch.device
) -> Callable[[], dict[str, float]]:
    """A function that returns q_sum and q_error of the target network; an empty dict if Q* is not available."""
    world = env.unwrapped
    if not isinstance(world, Rooms) or gamma == 1:
        return dict
    # Leave out the goal states: episodes end there, so their Q-values are never learned.
    states = (world.dynamics().next_state != np.arange(world.num_states)[:, None]).any(1)
    observations = torch.as_tensor(world.observations[states], device=device)
    optimal = torch.as_tensor(world.optimal_q(gamma)[states], device=device)

    @torch.no_grad()
    def columns() -> dict[str, float]:
        network = loss_module.value_network
        with loss_module.target_value_network_params.to_module(network):
            q = network(TensorDict(observation=observations))["action_value"]
        return {"q_sum": q.sum().item(), "q_error": (q - optimal).square().mean().sqrt().item()}

    return columns


def make_loss(
    dqn: DQNConfig, actor: QValueActor
) -> tuple[DQNLoss, Sequence[tuple[Tensor, Tensor]], Callable[[], None] | None]:
    """Build the Double DQN loss.

    Returns:
        The loss; pairs (target parameter, source) for copies of the target network, empty if dqn.tau is set; the step
        of the soft update, None if dqn.tau is None.
    """
    loss_module = DQNLoss(
        actor,
        loss_function=dqn.loss_function,
        delay_value=True,
        double_dqn=True,
        action_space="categorical",
        reduction="mean" if dqn.cagrad is None else "none",
    )
    loss_module.make_value_estimator(gamma=dqn.gamma)
    if dqn.tau is None:
        # Initializes the target network as a copy. The learner makes the later copies.
        HardUpdate(loss_module, value_network_update_interval=0)
        return loss_module, target_pairs(loss_module), None
    return loss_module, (), SoftUpdate(loss_module, tau=dqn.tau).step


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
    dqn = cfg.dqn
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode. The collector below makes the training environments.
    evaluation_envs = [make_discrete_env(cfg.env) for _ in range(dqn.evaluation_episodes)]
    require_memory(cfg, evaluation_envs[0], device)
    action_space = evaluation_envs[0].action_space

    # Networks and loss.
    observed = evaluation_envs[0].observation_space.shape or ()
    network = make_network(observed, flatdim(action_space), dqn.hidden_sizes, device=device)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module, targets, target_step = make_loss(dqn, actor)
    columns = q_columns(evaluation_envs[0], loss_module, dqn.gamma, device)
    optimizer = make_optimizer(dqn.optimizer, loss_module.parameters(), dqn.learning_rate)

    # DQNLoss writes the SQUARED TD error to "td_error" and applies the sampler's "priority_weight".
    replay = make_replay(cfg, device, td_error="squared")
    learner = Learner(
        replay,
        loss_module if dqn.cagrad is None else partial(table_losses, loss_module, len(cfg.env.events) + 1),
        [optimizer],
        gradient_steps=dqn.gradient_steps,
        max_grad_norm=dqn.max_grad_norm,
        target_step=target_step,
        gradients=None if dqn.cagrad is None else partial(conflict_averse, dqn.cagrad),
        targets=targets,
        compiled=cfg.compile,
        updates_per_graph=cfg.updates_per_graph,
        cudagraphs=cfg.cudagraphs,
    )

    def learn(data: TensorDictBase, steps: int) -> list[dict[str, torch.Tensor]]:
        return learner(data, copy_targets=dqn.copies_due(steps, data.numel()))

    @torch.inference_mode()
    def greedy(observations: np.ndarray) -> np.ndarray:
        return network(torch.as_tensor(observations, device=device)).argmax(-1).cpu().numpy()

    # The environments run on the CPU. Batches stay on the CPU until they are written to the buffer.
    behaviour = EpsilonRandom(greedy, action_space, seed=cfg.seed)
    collector = VectorCollector(
        [partial(make_discrete_env, cfg.env, training=True)] * cfg.num_envs,
        behaviour,
        frames_per_batch=dqn.train_interval,
        seed=cfg.seed,
        flags=cfg.env.flags,
    )

    def explore(steps: int) -> None:
        behaviour.epsilon = dqn.epsilon(steps)

    def record(steps: int) -> dict[str, float]:
        require_frames(replay)
        return {"epsilon": dqn.epsilon(steps), **columns()}

    agent = Agent(
        collector=collector,
        replay=replay,
        explore=explore,
        learn=learn,
        policy=greedy,
        evaluation_epsilon=dqn.evaluation_epsilon,
        losses=("loss",),
        columns=record,
        shown=("return_mean", "epsilon", "loss"),
        state={"loss": loss_module, "optimizer": optimizer},
    )
    return run(agent, evaluation_envs, cfg, config, run_dir, device)
