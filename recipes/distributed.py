"""Double DQN, TD3 or SAC with Ray: collectors and replay buffer are Ray actors, and the learner draws from the buffer.

    python -m recipes.distributed env=cartpole sampler=reaper num_collectors=2
    python -m recipes.distributed env=cartpole sampler=per num_collectors=4 num_shards=4
    python -m recipes.distributed algorithm=sac env=pendulum sampler=per
    python -m recipes.distributed address=auto num_collectors=32 num_envs=4 num_shards=8
    python -m recipes.distributed resume=runs/distributed/cartpole/reaper/seed1-... dqn.total_steps=100000

Settings and updates are those of recipes.dqn, recipes.td3 or recipes.sac (conf/<algorithm>/<env>.yaml), with the same
number of updates per env step. Collectors act with weights that are up to num_collectors batches old. The buffer is
split between num_shards actors; draws follow the distribution of a single buffer. If the process of a shard ends, the
run goes on, and the shard begins again empty. Two runs with the same seed differ, because the order in
which collectors finish is not deterministic. Needs Ray (pip install "ray>=2.9").

progress.csv has the columns of the algorithm's recipe; epsilon is the probability of a random action, also while TD3
and SAC act at random at the start.
"""

from pathlib import Path

from recipes import dqn, sac, td3
from recipes.common.cli import run_recipe
from recipes.common.remote import runtime
from recipes.common.schemas import DistributedRun


def train(config: DistributedRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Returns:
        The exit code.
    """
    with runtime(config.address, config.num_collectors, config.num_shards):
        recipe = {"dqn": dqn, "td3": td3, "sac": sac}[config.algorithm]
        return recipe.train(config, run_dir)  # with a RemoteReplay and a RemoteCollector, see recipes.common.run


if __name__ == "__main__":
    run_recipe("distributed")
