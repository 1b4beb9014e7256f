"""Double DQN with uniform, prioritized (PER), reliability-adjusted (ReaPER) replay, or event tables (SSET).

    python -m recipes.dqn env=cartpole sampler=reaper seed=1
    python -m recipes.dqn -m seed=1,2,3 sampler=uniform,per,reaper
    python -m recipes.dqn compile=true num_envs=8
    python -m recipes.dqn env=threerooms sampler=sset stop_at_threshold=false
    python -m recipes.dqn env=atari/qbert sampler=reaper
    python -m recipes.dqn resume=runs/dqn/cartpole/reaper/seed1-...

The settings are those of the ReaPER paper's appendix D, or, in the grid worlds, of the event-table paper's table 1
(conf/dqn/<env>.yaml; conf/dqn/atari.yaml for env=atari/<game>, any game of ale-py). In Atari games, training is on
single lives with clipped rewards, evaluation on whole games; see recipes.atari.

progress.csv has a row per evaluation: env_steps and updates so far; return_mean, the score, and return_0 ..., the
episodes it is the mean of; in Atari games with known scores human_normalized, that mean between random actions (0) and
humans (1); epsilon of the behaviour policy; loss, the mean over the updates since the row before;
wall_time in seconds, that before a resume included; sampler/..., the scalars of the sampler's stats(). In the rooms
also q_sum, the target network's Q-values summed over all actions in all states but the goal, and q_error, the root mean
square of their errors.
"""

if __name__ == "__main__":
    # Ahead of the imports below, which take seconds: a mistake on the command line is reported at once.
    from recipes.run import run_recipe

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

from recipes.cagrad import cagrad_gradients, losses_by_table
from recipes.collect import EpsilonRandom, VectorCollector
from recipes.environment import make_discrete_env
from recipes.envs.rooms import Rooms
from recipes.networks import make_network
from recipes.optimizers import make_optimizer
from recipes.replay import make_replay, require_frames, require_memory
from recipes.run import parse_config
from recipes.schemas.dqn import Config, DQNConfig
from recipes.training import Agent, prepare, run
from recipes.update import Learner, target_pairs


def table_losses(loss_module: DQNLoss, num_tables: int, sample: TensorDictBase) -> dict[str, Tensor]:
    """The loss of the batch, and apart from it the loss of each table's rows, with their weight in that of the batch.

    Args:
        loss_module: with reduction="none".
        num_tables: number of tables, the default one included.
        sample: from event tables; gets the TD errors.
    """
    rows = loss_module(sample)["loss"]
    losses, weights = losses_by_table(rows, sample["priority_weight"], sample["table"], num_tables)
    return {"loss": rows.sum() / sample["priority_weight"].sum(), "table_loss": losses, "table_weight": weights}


def conflict_averse(c: float, losses: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gradients of what table_losses returns."""
    return cagrad_gradients(losses["table_loss"], losses["table_weight"], parameters, c)


def q_columns(
    env: gymnasium.Env, loss_module: DQNLoss, gamma: float, device: torch.device
) -> Callable[[], dict[str, float]]:
    """q_sum and q_error of the target network, if the environment knows its optimal Q-values; else nothing."""
    world = env.unwrapped
    if not isinstance(world, Rooms) or gamma == 1:
        return dict
    # the goal leads to itself: nothing is ever learned there
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
    """The loss of a Double DQN; what a copy of its target network copies, or else the step that moves it."""
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
        # Makes the target network a copy; when it is due again is up to the learner.
        HardUpdate(loss_module, value_network_update_interval=0)
        return loss_module, target_pairs(loss_module), None
    return loss_module, (), SoftUpdate(loss_module, tau=dqn.tau).step


def train(config: DictConfig, run_dir: Path) -> int:
    """Trains, evaluates, and leaves config.yaml, progress.csv, learning_curve.png and checkpoint.zip in `run_dir`.

    Returns:
        The exit code.
    """
    cfg = parse_config(config, Config)
    dqn = cfg.dqn
    device = prepare(cfg, run_dir)

    # One environment per evaluation episode; those to learn in are made further down.
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

    # The loss writes the SQUARED TD error to "td_error". It applies the sampler's "priority_weight" by itself.
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

    # The environments run on the CPU, and their batches stay there until the buffer takes them.
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
