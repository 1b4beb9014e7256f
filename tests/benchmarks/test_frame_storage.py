import statistics
import time
import warnings

import pytest
import torch
from tensordict import TensorDict

from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, FrameStackStorage, compile_step

CAPACITY, BATCH, ROUNDS, EPISODE = 20_000, 32, 300, 250


def filled(storage):
    """Episodes of random frames; the same for each storage."""
    replay_buffer = CompilableReplayBuffer(storage=storage, batch_size=BATCH)
    generator = torch.Generator().manual_seed(0)
    for episode in range(CAPACITY // EPISODE):
        frames = torch.randint(0, 256, (EPISODE + 4, 84, 84), dtype=torch.uint8, generator=generator)
        stacks = frames.unfold(0, 4, 1).movedim(-1, 1)
        ids = torch.full((EPISODE,), episode)
        data = {"observation": stacks[:-1], "next": {"observation": stacks[1:], "reward": torch.zeros(EPISODE, 1)}}
        replay_buffer.extend(TensorDict({**data, "collector": {"traj_ids": ids}}, [EPISODE]))
    return replay_buffer


def drawing(replay_buffer):
    def draw():
        return replay_buffer.sample()

    return draw


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore")
def test_drawing_stacks_takes_no_longer_than_reading_them_whole(capsys):
    """Batches of 32, frames kept once against whole stacks: at most 15 % slower."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draws = {}
        for name, storage in (("once", FrameStackStorage(CAPACITY)), ("whole", CompilableTensorStorage(CAPACITY))):
            replay_buffer = filled(storage)
            draws[name, "eager"] = drawing(replay_buffer)
            draws[name, "compiled"] = compile_step(drawing(replay_buffer))
        times = {key: [] for key in draws}
        for _ in range(ROUNDS + 5):
            for key, draw in draws.items():
                begin = time.perf_counter()
                draw()
                times[key].append(time.perf_counter() - begin)
    with capsys.disabled():
        for mode in ("eager", "compiled"):
            once, whole = (1e6 * statistics.median(times[name, mode][5:]) for name in ("once", "whole"))
            print(f"\n{mode}: frames kept once {once:.0f} us, whole stacks {whole:.0f} us, ratio {once / whole:.2f}")
