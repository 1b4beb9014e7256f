"""SAC with event tables (SSET) on Pendulum-v1, from top to bottom in one file.

    python -m recipes.minimal.sac                 # a few minutes on one core
    python -m recipes.minimal.sac --seed 2 --compile
    python recipes/minimal/sac.py --frames 2000

SSET (Kompella et al. 2022) keeps the steps that led to an event in a table of its own, and draws a fixed share of each
batch from it. The event is here that the pendulum stands upright. Within a table, draws are prioritized (PER).
"""

import argparse
import time
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import ActionScaling, EnvBase, ExplorationType, GymEnv, RewardSum, set_exploration_type
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from tqdm import tqdm

from torchrl_replay_ext import (
    AdamStep,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    compile_step,
)

BATCH_SIZE = 64
FRAMES_PER_BATCH = 10  # frames between two rounds of updates, with one update per frame
LEARNING_STARTS = 500  # frames with random actions before the first update
EVALUATION_INTERVAL = 2_000  # frames
EPISODES = 20  # of the last evaluation


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=6_000, help="frames of the environment [%(default)s]")
    text = "the update as one graph, by compile_step (--compile) or by torch.compile (--compile torch)"
    parser.add_argument("--compile", choices=["step", "torch"], nargs="?", const="step", help=text)
    return parser.parse_args(words)


def make_env(seed: int) -> EnvBase:
    """Make the environment, with actions in [-1, 1]; "episode_reward" is the return so far."""
    env = GymEnv("Pendulum-v1").append_transform(ActionScaling()).append_transform(RewardSum())
    env.set_seed(seed)
    return env


def is_upright(data: TensorDictBase) -> torch.Tensor:
    """Whether each step leaves the pendulum upright and slow."""
    cosine, _, speed = data["next", "observation"].unbind(-1)
    return (cosine > 0.95) & (speed.abs() < 1.0)


@torch.no_grad()
def evaluate(env: EnvBase, policy: nn.Module, episodes: int) -> float:
    """Play episodes with the mode of the policy; return the mean return."""
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        ends = [env.rollout(200, policy)["next", "episode_reward"][-1] for _ in range(episodes)]
    return torch.stack(ends).mean().item()


def main(words: Sequence[str] | None = None) -> float:
    """Train; return the mean return of the last evaluation."""
    args, start = parse(words), time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small are fastest on one core
    env, eval_env = make_env(args.seed), make_env(args.seed + 1_000)

    # Networks: the policy, whose samples tanh maps to [-1, 1], and two critics.
    network = nn.Sequential(MLP(3, 2, num_cells=[64, 64], activation_class=nn.ReLU), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critics: list[TensorDictModule] = [
        ValueOperator(MLP(4, 1, num_cells=[64, 64], activation_class=nn.ReLU), in_keys=["observation", "action"])
        for _ in range(2)
    ]
    loss_module = SACLoss(actor, critics, loss_function="l2", target_entropy=-1.0)
    # Before the update is compiled, make what SACLoss makes at its first call.
    loss_module.make_value_estimator(gamma=0.99)
    _ = loss_module.target_entropy
    target = SoftUpdate(loss_module, tau=0.02)
    # The step of an Adam as a function of gradients. Graphs need it; in eager code, it is the step of the Adam itself.
    # One optimizer serves the policy, the critics and alpha: none of the three losses has gradients for another one.
    optimizer = AdamStep(torch.optim.Adam(loss_module.parameters(), lr=1e-3, fused=True))

    # The buffer. An event adds the last 50 steps of its episode to its table. SACLoss gives ABSOLUTE TD errors.
    tables = EventTables([EventSpec("upright", is_upright, history=50)], capacity={"upright": 1_000})
    priority = {"kind": "proportional", "alpha": 0.6, "td_error": "absolute"}
    sampler = EventTableSampler(tables, eta={"default": 0.7, "upright": 0.3}, priority=priority)
    storage, writer = CompilableTensorStorage(args.frames), EventTableWriter(tables)
    replay_buffer = CompilableReplayBuffer(storage=storage, sampler=sampler, writer=writer, batch_size=BATCH_SIZE)

    def update() -> torch.Tensor:
        batch = replay_buffer.sample()
        loss_qvalue, of_critics = loss_module.qvalue_v2_loss(batch)  # applies batch["priority_weight"]
        # Without weights: they correct the expected target of a state and action. The objectives of the actor and of
        # alpha are defined for each state, and valid for any distribution of states.
        loss_actor, of_actor = loss_module.actor_loss(batch.exclude("priority_weight"))
        loss_alpha = loss_module.alpha_loss(of_actor["log_prob"]).mean()
        optimizer(torch.autograd.grad(loss_qvalue + loss_actor + loss_alpha, optimizer.parameters))
        target.step()
        batch["td_error"] = of_critics["td_error"]
        replay_buffer.update_tensordict_priority(batch)
        return loss_qvalue.detach()

    if args.compile == "step":
        update = compile_step(update)
    elif args.compile == "torch":
        torch._dynamo.config.trace_autograd_ops = True  # as compile_step does; graphs with autograd.grad need it
        update = torch.compile(update, fullgraph=True)  # checks at each call that the graph still fits

    collector = Collector(
        env,
        actor,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=args.frames,
        init_random_frames=LEARNING_STARTS,
        auto_register_policy_transforms=False,
    )
    progress = tqdm(total=args.frames, unit="frame")
    for data in collector:
        replay_buffer.extend(data)
        progress.update(data.numel())
        if progress.n < LEARNING_STARTS:
            continue
        for _ in range(FRAMES_PER_BATCH):
            loss = update()
        if progress.n % EVALUATION_INTERVAL == 0:
            progress.set_postfix(loss=f"{loss:.2f}", mean_return=f"{evaluate(eval_env, actor, 5):.1f}")
    collector.shutdown()
    progress.close()

    result, seconds = evaluate(eval_env, actor, EPISODES), time.monotonic() - start
    reached = f"mean return {result:.1f} of {EPISODES} episodes after {progress.n:,} frames, {seconds:.0f} s"
    print(f"Pendulum-v1: {reached}")
    return result


if __name__ == "__main__":
    main()
