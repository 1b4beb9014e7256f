"""ACER on CartPole-v1, from top to bottom in one file.

    python -m recipes.minimal.acer                # a few minutes on one core
    python -m recipes.minimal.acer --seed 2 --compile
    python recipes/minimal/acer.py --frames 20000

ACER (Wang et al. 2017) is an actor-critic that learns on-policy from the newest steps and off-policy from replayed
slices of trajectories, for which it stores the logits of the policy that acted.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, ExplorationType, GymEnv, RewardScaling, RewardSum, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor
from torchrl.objectives import SoftUpdate
from tqdm import tqdm

from torchrl_replay_ext import (
    ACERLoss,
    AdamStep,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    TrajectoryRetraceSampler,
    clip_gradients,
    compile_step,
)

SLICE_LEN = 20  # steps per slice
FRAMES_PER_BATCH = 200  # frames between two rounds of updates: ten slices
BATCH_SIZE = 320  # steps per replayed update: 16 slices
REPLAY_RATIO = 4.0  # mean number of replayed updates per update on the newest steps
EVALUATION_INTERVAL = 5_000  # frames
SOLVED = 475.0  # mean return at which training ends
EPISODES = 20  # of the last evaluation


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=60_000, help="frames of the environment [%(default)s]")
    text = "the update as one graph, by compile_step (--compile) or by torch.compile (--compile torch)"
    parser.add_argument("--compile", choices=["step", "torch"], nargs="?", const="step", help=text)
    return parser.parse_args(words)


def make_env(seed: int) -> EnvBase:
    """Make the environment. Actions are indices; "episode_reward" is the return so far, without the scale."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True).append_transform(RewardSum())
    env = env.append_transform(RewardScaling(loc=0.0, scale=0.1))
    env.set_seed(seed)
    return env


@torch.no_grad()
def evaluate(env: EnvBase, policy: nn.Module, episodes: int) -> float:
    """Play episodes with the most probable actions; return the mean return."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        ends = [env.rollout(500, policy)["next", "episode_reward"][-1] for _ in range(episodes)]
    return torch.stack(ends).mean().item()


def main(words: Sequence[str] | None = None) -> float:
    """Train; return the mean return of the last evaluation."""
    args, start = parse(words), time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small are fastest on one core
    env, eval_env = make_env(args.seed), make_env(args.seed + 1_000)

    # Networks of policy and values. The policy begins nearly uniform.
    policy = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.Tanh)
    with torch.no_grad():
        [*policy.parameters()][-2].mul_(0.01)  # the weights of the last layer
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
    )
    values = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.Tanh)
    critic = TensorDictModule(values, in_keys=["observation"], out_keys=["action_value"])
    loss_module = ACERLoss(actor, critic, gamma=0.99, c=10.0, delta=1.0, entropy_coeff=1e-3)
    average_policy = SoftUpdate(loss_module, eps=0.99)  # the centre of the trust region
    # The step of an Adam as a function of gradients. Graphs need it; in eager code, it is the step of the Adam itself.
    optimizer = AdamStep(torch.optim.Adam(loss_module.parameters(), lr=3e-3, fused=True))

    # The buffer. Slices stay within an episode; each row carries the "logits" of the policy that acted.
    storage = CompilableTensorStorage(50_000)
    sampler = TrajectoryRetraceSampler(slice_len=SLICE_LEN, behaviour_keys=("logits",))
    replay_buffer = CompilableReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH_SIZE)

    def learn(slices: TensorDictBase, *, shifted: bool) -> torch.Tensor:
        losses = loss_module(slices, shifted=shifted)
        loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_entropy"]
        gradients = torch.autograd.grad(loss, optimizer.parameters)
        optimizer(clip_gradients(gradients, 10.0))
        average_policy.step()
        return loss.detach()

    def on_policy_update(data: TensorDictBase) -> torch.Tensor:
        # A row may hold the end of an episode and the start of the next one.
        return learn(data.reshape(-1, SLICE_LEN), shifted=False)

    def replayed_update() -> torch.Tensor:
        # Each row is a slice of one episode, so the next state of a step is the state of the next step. With
        # shifted=True, the networks evaluate it once. Uniform draws have no priorities to update.
        return learn(replay_buffer.sample().reshape(-1, SLICE_LEN), shifted=True)

    if args.compile == "step":
        on_policy_update, replayed_update = compile_step(on_policy_update), compile_step(replayed_update)
    elif args.compile == "torch":
        torch._dynamo.config.trace_autograd_ops = True  # as compile_step does; graphs with autograd.grad need it
        # at each call, torch checks that the graph still fits
        on_policy_update = torch.compile(on_policy_update, fullgraph=True)
        replayed_update = torch.compile(replayed_update, fullgraph=True)

    collector = Collector(
        env,
        actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=args.frames,
        auto_register_policy_transforms=False,
    )
    progress = tqdm(total=args.frames, unit="frame")
    for data in collector:
        replay_buffer.extend(data)
        progress.update(data.numel())
        loss = on_policy_update(data)
        for _ in range(int(torch.poisson(torch.tensor(REPLAY_RATIO)))):
            loss = replayed_update()
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
