"""TD3 with decoupled batches (DPER) on Pendulum-v1, from top to bottom in one file.

    python -m recipes.minimal.td3                 # a few minutes on one core
    python -m recipes.minimal.td3 --seed 2 --compile
    python recipes/minimal/td3.py --frames 2000

DPER (arXiv 2512.05320) draws a prioritized batch for the critics, and another one for the actor: of several uniform
batches the one whose actions are nearest to those of the current policy.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import ActionScaling, EnvBase, GymEnv, RewardSum
from torchrl.modules import MLP, AdditiveGaussianModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss
from tqdm import tqdm

from torchrl_replay_ext import (
    AdamStep,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    DecoupledSampler,
    ProportionalSampler,
    compile_step,
)

BATCH_SIZE = 64
FRAMES_PER_BATCH = 10  # frames between two rounds of updates, with one update of the critics per frame
LEARNING_STARTS = 500  # frames with random actions before the first update
POLICY_DELAY = 2  # updates of the critics per update of the actor and of the targets
NOISE = 0.1  # standard deviation of the exploration noise; actions are in [-1, 1]
EVALUATION_INTERVAL = 2_000  # frames
EPISODES = 20  # of the last evaluation


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=7_500, help="frames of the environment [%(default)s]")
    text = "the update as one graph, by compile_step (--compile) or by torch.compile (--compile torch)"
    parser.add_argument("--compile", choices=["step", "torch"], nargs="?", const="step", help=text)
    return parser.parse_args(words)


def make_env(seed: int) -> EnvBase:
    """Make the environment, with actions in [-1, 1]; "episode_reward" is the return so far."""
    env = GymEnv("Pendulum-v1").append_transform(ActionScaling()).append_transform(RewardSum())
    env.set_seed(seed)
    return env


@torch.no_grad()
def evaluate(env: EnvBase, policy: nn.Module, episodes: int) -> float:
    """Play episodes without exploration noise; return the mean return."""
    ends = [env.rollout(200, policy)["next", "episode_reward"][-1] for _ in range(episodes)]
    return torch.stack(ends).mean().item()


def main(words: Sequence[str] | None = None) -> float:
    """Train; return the mean return of the last evaluation."""
    args, start = parse(words), time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small are fastest on one core
    env, eval_env = make_env(args.seed), make_env(args.seed + 1_000)

    # Networks: the policy and two critics.
    network = nn.Sequential(MLP(3, 1, num_cells=[64, 64], activation_class=nn.ReLU), nn.Tanh())
    actor = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    critics: list[TensorDictModule] = [
        ValueOperator(MLP(4, 1, num_cells=[64, 64], activation_class=nn.ReLU), in_keys=["observation", "action"])
        for _ in range(2)
    ]
    exploration = AdditiveGaussianModule(env.action_spec, sigma_init=NOISE, sigma_end=NOISE)
    loss_module = TD3Loss(actor, critics, action_spec=env.action_spec, loss_function="l2")
    loss_module.make_value_estimator(gamma=0.99)  # before the update is compiled
    target = SoftUpdate(loss_module, tau=0.02)
    # The steps of Adams as functions of gradients. Graphs need them; in eager code, they are steps of the Adams.
    actor_step = AdamStep(
        torch.optim.Adam(loss_module.actor_network_params.flatten_keys().values(), lr=1e-3, fused=True)
    )
    critic_step = AdamStep(
        torch.optim.Adam(loss_module.qvalue_network_params.flatten_keys().values(), lr=1e-3, fused=True)
    )

    # The buffer, and a view of it for the actor. TD3Loss gives SQUARED TD errors, which samplers expect by default.
    storage = CompilableTensorStorage(args.frames)
    sampler = DecoupledSampler(ProportionalSampler(td_error="squared"), actor, num_candidates=2, noise_scale=NOISE)
    replay_buffer = CompilableReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH_SIZE)
    actor_buffer = sampler.actor_buffer(replay_buffer)

    def update() -> torch.Tensor:
        for number in range(1, POLICY_DELAY + 1):
            batch = replay_buffer.sample()
            loss_qvalue, of_critics = loss_module.value_loss(batch)  # applies batch["priority_weight"]
            critic_step(torch.autograd.grad(loss_qvalue, critic_step.parameters))
            if number == POLICY_DELAY:
                # The actor's batch has no weights, because its candidates were drawn uniformly, and no index: only the
                # critics' errors become priorities.
                loss_actor, _ = loss_module.actor_loss(actor_buffer.sample())
                actor_step(torch.autograd.grad(loss_actor, actor_step.parameters))
                target.step()
            batch["td_error"] = of_critics["td_error"].amax(0).detach()  # [2, batch]: the larger of both critics counts
            replay_buffer.update_tensordict_priority(batch)
        return loss_qvalue.detach()

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
        init_random_frames=LEARNING_STARTS,
        auto_register_policy_transforms=False,
    )
    progress = tqdm(total=args.frames, unit="frame")
    for data in collector:
        replay_buffer.extend(data)
        progress.update(data.numel())
        if progress.n < LEARNING_STARTS:
            continue
        for _ in range(FRAMES_PER_BATCH // POLICY_DELAY):
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
