"""Random settings of replay buffers, and the sampler and the reference that a setting gives."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any

from tests.data import linear_policy
from tests.reference import NaivePER, NaiveRanking, NaiveReaPER, NaiveRecency, NaiveRewards, NaiveSlices
from tests.test_examples import GUIDES, blocks
from torchrl_replay_ext import (
    DecoupledSampler,
    Episodes,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)

HISTORY = {"a": (3, "a"), "b": (2, "b")}
# the order of the rows of several environments in a write; in "columns", each environment has a column of the storage
FLAT = ("uneven", "time_major", "env_major")
LAYOUTS = (*FLAT, "columns")
OPTIONS = {
    "td_error": ["squared", "absolute"],
    "weight_norm": ["buffer", "batch"],
    "min_priority": [0.0, 0.5, 3.0],
    "max_priority_within_buffer": [False, True],
    "truncated": ["finished", "ongoing"],
    "half_life": [0.5, 3, math.inf],
    "beta": [0.0, 0.5],
}


@dataclass(frozen=True)
class Setting:
    """The random configuration of a buffer.

    Args:
        capacity: capacity of the buffer; with pinned tables, capacity of the default table.
        num_envs: number of environments.
        layout: one of ``LAYOUTS``.
        with_ids: True if the data has trajectory ids.
        with_marks: True if the data marks the first rows of episodes.
        slice_len: length of slices.
        min_size: size from which an event table is drawn from.
        compilable: True for the compilable classes of buffer and storage.
        seed: seed of the arguments and of the buffer.
        choices: arguments of the sampler that are not random.
    """

    capacity: int
    num_envs: int
    layout: str
    with_ids: bool
    with_marks: bool
    slice_len: int
    min_size: int
    compilable: bool
    seed: int
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def ndim(self) -> int:
        return 1 + (self.layout == "columns")

    @property
    def episodes(self) -> Episodes | None:
        """Half of the buffers find out the number of environments by themselves."""
        return Episodes(num_streams=self.num_envs if self.ndim == 1 else 1) if self.seed % 2 else None

    def choose(self, rng: random.Random, *names: str) -> dict[str, Any]:
        return {name: rng.choice(OPTIONS[name]) for name in names} | self.choices


# --- the parts of a buffer, and its reference: a naive sampler with the same arguments


def proportional(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "td_error", "weight_norm", "min_priority", "max_priority_within_buffer")
    sampler = ProportionalSampler(own.capacity, stratified=rng.random() < 0.5, **chosen)
    return {"sampler": sampler, "reference": partial(NaivePER, **chosen)}


@cache
def reward_sampler() -> Any:
    """The class of the guide's page on samplers of one's own."""
    (page,) = (page for page in GUIDES if page.name == "own_sampler.md")
    (block,) = (block for block in blocks(page) if "class RewardSampler(" in block.code)
    # pickle and torch's compiler look its names up in the module
    module = sys.modules["module_of_the_guide"] = ModuleType("module_of_the_guide")
    block.run(vars(module))
    return vars(module)["RewardSampler"]


def rewards(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "td_error", "max_priority_within_buffer", "beta")
    sampler = reward_sampler()(own.capacity, **chosen)
    return {"sampler": sampler, "reference": partial(NaiveRewards, **chosen)}


def rank(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen, is_exact = own.choose(rng, "td_error"), rng.random() < 0.7
    further = {"segments": "exact" if is_exact else "piecewise", "stratified": rng.random() < 0.5}
    sampler = RankBasedSampler(own.capacity, **further, **chosen)
    return {"sampler": sampler, "reference": partial(NaiveRanking, **chosen) if is_exact else None}


def reaper(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "td_error", "weight_norm", "max_priority_within_buffer", "truncated")
    sampler = ReaPERSampler(own.capacity, episodes=own.episodes, **chosen)
    return {"sampler": sampler, "reference": partial(NaiveReaPER, **chosen)}


def recency(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "half_life", "beta")
    sampler = RecencySampler(own.capacity, **chosen)
    return {"sampler": sampler, "reference": partial(NaiveRecency, **chosen)}


def events(kind: str | None, retention: Any, own: Setting, rng: random.Random) -> dict[str, Any]:
    specs = [EventSpec(name, ("next", name), history, table=table) for name, (history, table) in HISTORY.items()]
    sizes = {"a": max(own.capacity // 2, 3), "b": 4}
    if retention == "pinned":
        sizes["default"] = own.capacity
    tables = EventTables(specs, sizes, retention=retention)
    chosen = own.choose(rng, "td_error", "max_priority_within_buffer")
    priority: Any = None if kind is None else {"kind": kind}
    if kind is not None:
        priority |= chosen
    corrections = [None]
    if retention == "ring":
        corrections += ["mixture", *(["conditional", "lemma2", "priority"] if kind is None else [])]
    sampler = EventTableSampler(
        tables,
        eta={"default": 0.5, "a": 0.3, "b": 0.2},
        min_size=own.min_size,
        allocation=rng.choice(["systematic", "multinomial", "largest_remainder"]),
        correction=(correction := rng.choice(corrections)),
        priority=priority,
        pair_keys=("observation",),
    )
    # of the transitions in each table
    uniform = partial(NaiveSlices, pad=True, length=1)
    references = {None: uniform, "proportional": partial(NaivePER, **chosen)}
    is_mixture = retention == "ring" and correction != "priority"
    reference = references.get(kind) if is_mixture else None
    return {"sampler": sampler, "writer": EventTableWriter(tables), "reference": reference}


def decoupled(own: Setting, rng: random.Random) -> dict[str, Any]:
    parts = proportional(own, rng)
    arguments = {"granularity": rng.choice(["batch", "group"]), "group_size": 1}
    return parts | {"sampler": DecoupledSampler(parts["sampler"], linear_policy(), num_candidates=2, **arguments)}


def slices(
    anchors: Callable[..., Any] | None, own: Setting, rng: random.Random, *, pad: bool = True, starts: Any = "any"
) -> dict[str, Any]:
    pad = rng.choice([True, False]) if starts == "episode" else pad
    uniform = {"sampler": "uniform", "reference": partial(NaiveSlices, pad=pad, length=own.slice_len, starts=starts)}
    parts = uniform if anchors is None else anchors(own, rng)
    sampler = TrajectoryRetraceSampler(
        own.capacity,
        slice_len=own.slice_len,
        episodes=own.episodes,
        behaviour_keys=(),
        anchors=parts["sampler"],
        pad=pad,
        starts=starts,
    )
    return {"sampler": sampler, "reference": parts["reference"]}
