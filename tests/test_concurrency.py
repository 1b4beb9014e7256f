"""Two threads or processes draw, update and write at the same time. Kernels run without Python's lock."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.data import SAMPLERS as BY_NAME
from tests.data import buffer_with, learn, random_rows
from tests.params import both_buffers
from tests.samplers.experience import assert_draws_as_rebuilt
from tests.test_faults import CAPACITY, SAMPLERS, Killed, filled, make, rows, whole
from torchrl_replay_ext import _torchrl

SECONDS = [0.4, pytest.param(60, marks=pytest.mark.slow)]
SHARED = ["tables, proportional", *(pytest.param(name, marks=pytest.mark.slow) for name in ("proportional", "rank"))]


def use_buffer(buffer, seconds, first):
    """Call the buffer, which locks each call."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(4):
            index = learn(buffer)["index"]
            assert bool(((index >= 0) & (index < CAPACITY)).all())
        first += 5
        buffer.extend(rows(range(first, first + 5), done=[first + 4]))


def use_sampler(buffer, seconds, writes):
    """Call the sampler, which locks nothing; ``writes``: also write to the buffer."""
    end, first, sampler = time.monotonic() + seconds, 0, buffer.sampler
    while time.monotonic() < end:
        for _ in range(4):
            slots, _ = sampler.sample(buffer.storage, 16)
            assert bool(((slots >= 0) & (slots < CAPACITY)).all())
            if sampler.takes_priorities:
                sampler.update_priority(slots, torch.rand(len(slots)), storage=buffer.storage)
        if writes:
            first += 5
            buffer.extend(rows(range(first, first + 5), done=[first + 4]))


def in_threads(*works):
    """Run functions with arguments in threads; raises the errors that they raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for running in [pool.submit(*work) for work in works]:
            running.result()


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_threads_that_call_the_buffer(name, seconds):
    buffer = filled(name)
    in_threads(*((use_buffer, buffer, seconds / 2, first) for first in (1000, 10**6)))
    assert_draws_as_rebuilt(buffer)


@pytest.mark.parametrize("name", ["proportional", "rank", "reaper", "slices", "tables, proportional"])
def test_writes_and_updates_while_batches_are_drawn_ahead(name):
    buffer, number = make(name, prefetch=3), CAPACITY
    buffer.extend(rows(range(CAPACITY), done=[CAPACITY - 1]))
    end = time.monotonic() + 0.5

    def write():
        nonlocal number
        while time.monotonic() < end:
            buffer.extend(rows(range(number, number + 3), done=[number + 2] if random.random() < 0.3 else []))
            number += 3

    def draw_and_update():
        while time.monotonic() < end:
            assert whole(learn(buffer))

    in_threads((write,), (draw_and_update,), (draw_and_update,))
    buffer.synchronize()
    assert_draws_as_rebuilt(buffer)
    stored = buffer.storage[:]["next", "number"].sort().values.tolist()
    assert stored == list(range(number - CAPACITY, number))


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_threads_without_a_lock_stay_in_range(name, seconds):
    """Sums may be wrong afterwards, but slots never are."""
    buffer = filled(name)
    in_threads(*((use_sampler, buffer, seconds / 2, writes) for writes in (False, True)))
    assert bool((buffer.sample(64)["index"] < CAPACITY).all())


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("name", SHARED)
def test_processes_that_share_the_buffer(name, seconds):
    buffer = filled(name)
    buffer.share()
    process = torch.multiprocessing.get_context("spawn").Process(target=use_buffer, args=(buffer, seconds, 1000))
    process.start()
    while process.is_alive():
        use_buffer(buffer, 0.1, 10**6)
    process.join()
    assert process.exitcode == 0
    assert_draws_as_rebuilt(buffer)


@both_buffers
@pytest.mark.parametrize("shared", [False, True])
def test_the_actors_batches_wait_for_writes(compilable, shared):
    """A batch of an actor's buffer contains whole rows while another thread writes; ``share`` changes the locks."""
    sampler = BY_NAME["decoupled"](None)
    buffer = buffer_with(sampler, 64, compilable=compilable, batch_size=32)
    rows_of = [random_rows(64).update({"a": torch.full((64,), k), "z": torch.full((64, 4096), k)}) for k in (0, 1)]
    buffer.extend(rows_of[0])
    actor, end = sampler.actor_buffer(buffer), time.monotonic() + 1.0
    if shared:
        buffer.share()

    def write():
        while time.monotonic() < end:
            for data in rows_of:
                buffer.extend(data)

    def draw():
        while time.monotonic() < end:
            batch = actor.sample()
            assert bool((batch["a"] == batch["z"][:, 0]).all())

    in_threads((write,), (draw,))


def interrupt_at(number):
    """A trace function that raises before a line of the code that takes and releases locks."""
    files, left = (contextlib.__file__, _torchrl.__file__), number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        left -= event == "line"
        if not left:
            raise Killed
        return trace

    return trace


def test_an_interrupt_leaves_no_lock_behind():
    """Ctrl-C where ``stats()`` and setters lock the buffer: other threads must not wait forever."""
    buffer, before = filled("proportional"), sys.gettrace()
    for number in range(1, 1000):
        sys.settrace(interrupt_at(number))
        try:
            with buffer.sampler.exclusive():
                pass
            break
        except Killed:
            pass
        finally:
            sys.settrace(before)
        other = threading.Thread(target=buffer.sample, daemon=True)
        other.start()
        other.join(30)
        assert not other.is_alive(), number
    assert 10 < number < 999
