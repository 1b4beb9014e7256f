"""Double DQN with ReaPER on CartPole-v1, from top to bottom in one file.

    python -m recipes.minimal.dqn                 # a few minutes on one core
    python -m recipes.minimal.dqn --seed 2 --compile
    python recipes/minimal/dqn.py --frames 10000

ReaPER (Pleiss et al., arXiv 2506.18482) draws transitions by their TD error and by the reliability of their target.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ExplorationType, GymEnv, RewardSum, set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from tqdm import tqdm

from torchrl_replay_ext import (
    AdamStep,
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    ReaPERSampler,
    clip_gradients,
    compile_step,
)

BATCH_SIZE = 64
FRAMES_PER_BATCH = 250  # frames between two rounds of updates
UPDATES = 125  # updates per round
LEARNING_STARTS = 1_000  # frames before the first update
EVALUATION_INTERVAL = 2_000  # frames
EPISODES = 20  # of the last evaluation
SOLVED = 475.0  # mean return at which training ends: DQN may forget what it has learned


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=50_000, help="frames of the environment [%(default)s]")
    text = "the update as one graph, by compile_step (--compile) or by torch.compile (--compile torch)"
    parser.add_argument("--compile", choices=["step", "torch"], nargs="?", const="step", help=text)
    return parser.parse_args(words)


def make_env(seed: int) -> EnvBase:
    """Make the environment. Actions are indices; "episode_reward" is the return so far."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True).append_transform(RewardSum())
    env.set_seed(seed)
    return env


@torch.no_grad()
def evaluate(env: EnvBase, policy: nn.Module, episodes: int) -> float:
    """Play episodes without exploration; return the mean return."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        ends = [env.rollout(500, policy)["next", "episode_reward"][-1] for _ in range(episodes)]
    return torch.stack(ends).mean().item()


def main(words: Sequence[str] | None = None) -> float:
    """Train; return the mean return of the last evaluation."""
    args, start = parse(words), time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small are fastest on one core
    env, eval_env = make_env(args.seed), make_env(args.seed + 1_000)

    # Networks. The collector acts with probability epsilon at random; evaluations act greedily.
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.ReLU)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    exploration = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.04, annealing_num_steps=5_000)
    loss_module = DQNLoss(
        actor, action_space="categorical", delay_value=True, double_dqn=True, loss_function="smooth_l1"
    )
    loss_module.make_value_estimator(gamma=0.99)  # before the update is compiled
    target = HardUpdate(loss_module, value_network_update_interval=0)  # each step copies
    # The step of an Adam as a function of gradients. Graphs need it; in eager code, it is the step of the Adam itself.
    optimizer = AdamStep(torch.optim.Adam(loss_module.parameters(), lr=1e-3, fused=True))

    # The buffer. DQNLoss writes SQUARED TD errors, which is what samplers expect by default.
    num_updates = max(1, args.frames // FRAMES_PER_BATCH * UPDATES)
    storage = CompilableTensorStorage(100_000)
    sampler = ReaPERSampler(alpha=0.4, omega=0.2, beta=Anneal(0.4, 1.0, num_updates), td_error="squared")
    replay_buffer = CompilableReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH_SIZE)

    def update() -> torch.Tensor:
        batch = replay_buffer.sample()
        loss = loss_module(batch)["loss"]  # applies batch["priority_weight"] and writes batch["td_error"]
        gradients = torch.autograd.grad(loss, optimizer.parameters)
        optimizer(clip_gradients(gradients, 10.0))
        replay_buffer.update_tensordict_priority(batch)
        return loss.detach()

    if args.compile == "step":
        update = compile_step(update)
    elif args.compile == "torch":
        torch._dynamo.config.trace_autograd_ops = True  # as compile_step does; graphs with autograd.grad need it
        update = torch.compile(update, fullgraph=True)  # checks at each call that the graph still fits

    policy = TensorDictSequential([actor, exploration])
    collector = Collector(
        env,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=args.frames,
        auto_register_policy_transforms=False,
    )
    progress = tqdm(total=args.frames, unit="frame")
    for data in collector:
        replay_buffer.extend(data)
        exploration.step(data.numel())
        progress.update(data.numel())
        if progress.n < LEARNING_STARTS:
            continue
        for _ in range(UPDATES):
            loss = update()
        target.step()
        if progress.n % EVALUATION_INTERVAL == 0:
            mean_return = evaluate(eval_env, actor, 5)
            progress.set_postfix(loss=f"{loss:.3f}", mean_return=f"{mean_return:.1f}")
            if mean_return >= SOLVED:
                break
    collector.shutdown()
    progress.close()

    result, seconds = evaluate(eval_env, actor, EPISODES), time.monotonic() - start
    reached = f"mean return {result:.1f} of {EPISODES} episodes after {progress.n:,} frames, {seconds:.0f} s"
    print(f"CartPole-v1: {reached}")
    return result


if __name__ == "__main__":
    main()
