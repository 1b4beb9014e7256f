"""Double DQN with Ray: collectors and replay buffer are Ray actors, and the learner samples from the remote buffer.

    python -m recipes.distributed env=cartpole sampler=reaper num_collectors=2
    python -m recipes.distributed env=cartpole sampler=per num_collectors=4 num_shards=4
    python -m recipes.distributed address=auto num_collectors=32 num_envs=4 num_shards=8
    python -m recipes.distributed resume=runs/distributed/cartpole/reaper/seed1-...

The settings are those of recipes.dqn (conf/dqn/<env>.yaml), with the same number of updates per env step. Collectors
act with weights that are up to num_collectors batches old. The buffer is split between num_shards actors; draws follow
the distribution of a single buffer. If the process of a shard ends, the run goes on, and the shard continues from the
last checkpoint. Two runs with the same seed differ, because the order in which collectors finish is not deterministic.
Needs Ray (pip install "ray>=2.9").

progress.csv has the columns of recipes.dqn, except q_sum and q_error.
"""

if __name__ == "__main__":
    # Before the imports below, which take seconds: mistakes on the command line are reported at once.
    from recipes.common.cli import run_recipe

    run_recipe("distributed")

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import flatdim
from tensordict.nn import TensorDictSequential
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule, QValueActor

from recipes.common.environment import make_discrete_env
from recipes.common.networks import make_network, to_tensor
from recipes.common.q_values import TargetValues
from recipes.common.remote import RemoteCollector, RemoteReplay, noticing_lost_actors, runtime
from recipes.common.run import Run
from recipes.common.schemas import DistributedRun
from recipes.common.update import make_optimizer
from recipes.dqn import make_loss, make_update


def train(config: DistributedRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Returns:
        The exit code.
    """
    with runtime(config.address, config.num_collectors, config.num_shards):
        dqn = config.dqn
        # One environment per evaluation episode. The collectors make the training environments.
        run = Run(config, run_dir, make_discrete_env, remote=True)
        device, evaluation = run.device, run.evaluation
        observed, num_actions = evaluation.observation_space.shape or (), flatdim(evaluation.action_space)

        # Networks and loss.
        network = make_network(observed, num_actions, dqn.hidden_sizes, device=device)
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        # The collectors have no GPU: they get a copy on the CPU.
        exploration = EGreedyModule(Categorical(num_actions), eps_init=1.0, eps_end=0.0)
        acting = deepcopy(actor).cpu()
        loss_module, target = make_loss(dqn, actor)
        optimizer = make_optimizer(dqn.optimizer, loss_module.parameters(), dqn.learning_rate)

        # DQNLoss writes the SQUARED TD error to "td_error" and applies the sampler's "priority_weight".
        replay: Any = RemoteReplay(config, device, run_dir)

        @torch.inference_mode()
        def greedy(observations: np.ndarray) -> np.ndarray:
            return network(to_tensor(observations, device)).argmax(-1).cpu().numpy()

        collector = RemoteCollector(config, TensorDictSequential([acting, exploration]), replay)

        run.attach(
            collector,
            replay,
            policy=greedy,
            epsilon=dqn.evaluation_epsilon,
            value=TargetValues(loss_module, device).of_steps if dqn.log_q_mean else None,
            losses=("loss",),
            columns=lambda steps: {
                "epsilon": dqn.epsilon(steps),
                **{f"sampler/{key}": value for key, value in replay.stats().items()},
            },
            state={"loss": loss_module, "optimizer": optimizer},
        )
        # the buffer has all methods that an update calls
        update = make_update(config, replay, loss_module, target, optimizer)

        with run, noticing_lost_actors():
            while run.continues():
                acting.load_state_dict(actor.state_dict())
                exploration.get_buffer("eps").fill_(dqn.epsilon(run.env_steps))
                # The collectors write to the buffer; the batch has no entries.
                run.collect()
                if dqn.copies_due(run.env_steps, collector.steps_of_batch):
                    target.step()
                if run.env_steps > dqn.learning_starts:
                    for _ in range(dqn.gradient_steps):
                        run.log_losses(update(None))
                run.end_round()
        return run.exit_code
