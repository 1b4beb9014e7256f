import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.kernels.tree_layout import UNIT


@dataclass
class Episode:
    """The stored slots of one episode."""

    trajectory: int
    finished: bool = False
    touched: int = 0
    slots: list[int] = field(default_factory=list)


@dataclass
class Row:
    """One transition to be written."""

    lane: int
    ended: bool = False
    finished: bool = False
    initial: bool = False


class IndexWithModel:
    """An EpisodeIndex and a model of plain lists, with the same writes and updates.

    Each lane is an environment. If lanes are assigned, rows of the environments come in any order; otherwise each time
    step has one row per environment.
    """

    def __init__(self, steps: int, lanes: int, assigned: bool):
        self.steps, self.lanes, self.assigned = steps, lanes, assigned
        self.index = EpisodeIndex(steps, lanes, assigned=assigned)
        self.size = steps if assigned else steps * lanes
        self.stamp = torch.zeros(self.size, dtype=torch.int64)
        self.clock = 0
        self.trajectories = 0
        self.clear()

    def clear(self):
        self.cursor = 0
        self.mass: dict[int, int] = {}
        self.episode: dict[int, Episode] = {}
        self.going_on: list[Episode | None] = [None] * self.lanes

    def write(self, rows: list[Row], mass: int) -> None:
        """Write at most ``size`` rows."""
        slots = [(self.cursor + i) % self.size for i in range(len(rows))]
        for slot in slots:
            if slot in self.episode:
                self.episode.pop(slot).slots.remove(slot)
        self.clock += 1
        trajectory = []
        for slot, row in zip(slots, rows, strict=True):
            episode = self.going_on[row.lane]
            if episode is None or (row.initial and not self.assigned):
                episode = Episode(self.trajectories)
                self.trajectories += 1
            trajectory.append(episode.trajectory)
            episode.slots.append(slot)
            self.episode[slot], self.mass[slot] = episode, mass
            self.going_on[row.lane] = None if row.ended else episode
            if row.ended:
                episode.finished, episode.touched = row.finished, self.clock
        self.cursor = (slots[-1] + 1) % self.size
        self.index.write(
            torch.tensor(slots),
            torch.tensor([mass / UNIT], dtype=torch.float64),
            torch.tensor([self.clock - 1]),
            EpisodeMarks(
                ended=torch.tensor([row.ended for row in rows]),
                trajectory=torch.tensor(trajectory) if self.assigned else None,
                initial=None if self.assigned else torch.tensor([row.initial for row in rows]),
            ),
            finished=torch.tensor([row.ended and row.finished for row in rows]),
        )
        self.stamp[torch.tensor(slots)] = self.clock

    def forget(self) -> None:
        """Prepare for a write that replaces the whole content."""
        self.index.before_full_overwrite()
        cursor = self.cursor
        self.clear()
        self.cursor = cursor

    def update(self, slots: list[int], mass: list[int], touch: bool = True) -> None:
        for slot, m in zip(slots, mass, strict=True):
            self.mass[slot] = m
            if touch:
                self.episode[slot].touched = self.clock
        index = torch.tensor(slots)
        clock = torch.tensor([self.clock]) if touch else None
        self.index.update(index, torch.tensor(mass, dtype=torch.float64) / UNIT, clock)

    def episodes(self) -> list[Episode]:
        return list({id(episode): episode for episode in self.episode.values()}.values())

    def reliability(self) -> dict[int, float]:
        """Eq. 16 and 17, by sums over lists."""
        totals = {id(e): sum(self.mass[s] for s in e.slots) for e in self.episodes()}
        reliability = {}
        for episode in self.episodes():
            whole = totals[id(episode)] if episode.finished else max(totals.values())
            upto = 0
            for slot in episode.slots:
                upto += self.mass[slot]
                reliability[slot] = 1.0 if int(self.stamp[slot]) > episode.touched else upto / whole
        return reliability

    def check(self) -> None:
        if self.episode:
            expected = self.reliability()
            slots = torch.tensor(sorted(expected))
            reliability = self.index.reliability(slots, self.stamp)
            assert reliability.dtype == torch.float64
            assert reliability.tolist() == [expected[slot] for slot in slots.tolist()]
            # slots share a record exactly if they belong to the same episode
            records = self.index.episode[slots].tolist()
            record_of = {id(self.episode[s]): r for s, r in zip(slots.tolist(), records, strict=True)}
            assert [record_of[id(self.episode[s])] for s in slots.tolist()] == records
            assert len(set(record_of.values())) == len(record_of)
        self.check_memory()

    def check_memory(self) -> None:
        """Each record belongs to a stored or ongoing episode or is free; each page belongs to a lane or is free."""
        state = self.index.tensors()
        known = {id(e) for e in (*self.episode.values(), *self.going_on) if e is not None}
        free = free_ids(state["records"])
        assert len(set(free)) == len(free) == self.size + self.lanes - len(known)
        assert not set(free) & set(self.index.episode[torch.tensor(sorted(self.episode), dtype=torch.int64)].tolist())
        if self.assigned:
            num_pages = state["pages"].numel() - 1
            free = free_ids(state["pages"])
            stored = [page for page in state["page_table"].tolist() if page != num_pages]
            assert sorted(free + stored) == list(range(num_pages))


def free_ids(stack: torch.Tensor) -> list[int]:
    *ids, count = stack.tolist()
    return ids[:count]


# --- random operations


class EpisodesAgainstLists(RuleBasedStateMachine):
    """Random writes and updates, one environment per lane."""

    lanes, assigned = 1, False

    @initialize(steps=st.integers(1, 12), seed=st.integers(0, 2**32), end=st.sampled_from([0.02, 0.2, 0.8]))
    def create(self, steps, seed, end):
        self.rng, self.end = random.Random(seed), end
        if self.assigned:
            # enough steps for more than the 64 positions of a page
            steps *= self.rng.choice([1, 12])
        self.both = IndexWithModel(steps, self.lanes, self.assigned)

    def rows(self, most: int) -> list[Row]:
        """Make at most ``most`` rows."""
        lanes = []
        if self.assigned:
            # some environments step much more often than others
            activity = [4.0**-lane for lane in range(self.lanes)]
            lanes = self.rng.choices(range(self.lanes), activity, k=most)
        else:
            lanes = list(range(self.lanes)) * max(most // self.lanes, 1)
        rows = []
        for lane in lanes:
            ended = self.rng.random() < self.end
            rows.append(Row(lane, ended, ended and self.rng.random() < 0.7, initial=self.rng.random() < 0.05))
        return rows

    @rule(share=st.floats(0.0, 1.0), mass=st.integers(1, 2**30))
    def write(self, share, mass):
        self.both.write(self.rows(max(int(share * self.both.size), 1)), mass)

    @rule(mass=st.integers(1, 2**30))
    def write_little(self, mass):
        self.both.write(self.rows(1), mass)

    @rule(mass=st.integers(1, 2**30))
    def write_everything(self, mass):
        self.both.forget()
        self.both.write(self.rows(self.both.size), mass)

    @precondition(lambda self: self.both.episode)
    @rule(data=st.data(), touch=st.integers(0, 5))
    def update(self, data, touch):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.both.episode)), min_size=1, max_size=8))
        mass = [self.rng.choice([1, self.rng.randrange(1, 2**10), self.rng.randrange(1, 2**40)]) for _ in slots]
        self.both.update(slots, mass, touch=touch > 0)

    @rule()
    def rebuild(self):
        self.both.index.rebuild_()

    @precondition(lambda self: self.rng.random() < 0.2)
    @rule()
    def clear(self):
        self.both.index.clear_()
        self.both.clear()

    @invariant()
    def agrees(self):
        if hasattr(self, "both"):
            self.both.check()


class ThreeLanes(EpisodesAgainstLists):
    lanes = 3


class AssignedLanes(EpisodesAgainstLists):
    lanes, assigned = 3, True


TestOneLane = EpisodesAgainstLists.TestCase
TestThreeLanes = ThreeLanes.TestCase
TestAssignedLanes = AssignedLanes.TestCase
TestOneLane.settings = TestThreeLanes.settings = TestAssignedLanes.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, derandomize=True
)


# --- layouts


def test_reliability_by_hand():
    """Two environments alternate: the episode of 1, 2, 1 is finished, that of 4, 4 is ongoing; F = 8."""
    both = IndexWithModel(8, 2, assigned=True)
    both.write([Row(0), Row(1), Row(0), Row(1), Row(0, ended=True, finished=True)], mass=9)
    assert both.index.reliability(torch.arange(5), both.stamp).tolist() == [1 / 3, 1, 2 / 3, 1, 1]
    both.update([0, 1, 2, 3, 4], [1, 4, 2, 4, 1])
    assert both.index.reliability(torch.arange(5), both.stamp).tolist() == [1 / 4, 4 / 8, 3 / 4, 8 / 8, 4 / 4]
    # the new transition has reliability 16 / 16, and its priority counts in F
    both.write([Row(1)], mass=8)
    assert both.index.reliability(torch.arange(6), both.stamp).tolist() == [1 / 4, 4 / 16, 3 / 4, 8 / 16, 1, 1]


# --- more trajectories than lanes


@pytest.mark.filterwarnings("ignore:A trajectory began before the last one had ended")
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("before", [False, True])
def test_more_trajectories_than_lanes(lanes, before):
    """An error that changes nothing, whether the lanes were assigned in an earlier write or in the same one."""
    index = EpisodeIndex(200, lanes, assigned=True)
    never = torch.zeros(2 * lanes + 2, dtype=torch.bool)

    def write(trajectory, start, clock):
        no = never[: len(trajectory)]
        index.write(
            torch.arange(start, start + len(trajectory)),
            torch.tensor([1 / UNIT], dtype=torch.float64),
            torch.tensor([clock - 1]),
            EpisodeMarks(ended=no, trajectory=torch.tensor(trajectory)),
            finished=no,
        )

    trajectories = list(range(lanes + 1))
    if before:
        write(trajectories, start=0, clock=1)
        assert int(index.lanes.interrupted) == 1
    state = {name: tensor.clone() for name, tensor in index.tensors().items()}
    with pytest.raises(ValueError, match=rf"num_streams={lanes}.*num_streams=<"):
        write(trajectories * (1 if before else 2), start=lanes + 1 if before else 0, clock=2)
    for name, tensor in index.tensors().items():
        assert torch.equal(tensor, state[name]), name
    # a trajectory that has a lane can still continue
    write(trajectories[1:], start=lanes + 1 if before else 0, clock=2)
    assert int(index.lanes.interrupted) == before
    index.check_valid()


def test_a_lane_is_free_again_when_its_trajectory_ends():
    """Within one write, a trajectory can take the lane of another one that ended in this write."""
    both = IndexWithModel(20, 2, assigned=True)
    both.write([Row(0), Row(1), Row(0, True, True), Row(0), Row(1, True), Row(1), Row(0, True, True), Row(0)], mass=2)
    both.update(list(range(8)), list(range(1, 9)))
    both.check()
    assert len(both.episodes()) == 5
