"""How many updates until a rare success is learned? The Blind Cliffwalk (Schaul et al. 2016, Fig. 1 and App. B.1).

The environment is a row of n states. In each state, one of two actions leads to the next state and the other ends the
episode. Only the last step has a reward, 1, so random behaviour is rewarded once in 2^n episodes. The buffer holds the
2^(n+1) - 2 transitions of the episodes of all 2^n action sequences, in random order. Tabular Q-learning (learning rate
1/4, discount 1 - 1/n) replays one transition at a time, without importance-sampling weights. The experiment counts the
updates until the mean squared error of the Q-values is at most 10^-3.

- *uniform*: any transition, all equally likely.
- *rank-based* and *proportional*: this package's samplers in TorchRL's buffer, alpha 0.7. Transitions that were never
  replayed have the first rank (rank-based) or the largest priority so far (proportional).
- *ReaPER*: as proportional, with the reliabilities of targets (omega 0.2).
- *oracle*: the transition whose update gives the smallest mean squared error.

Q-values are initialized with normal noise of standard deviation 0.1, the same for all strategies of a seed.

``python -m recipes.experiments.cliffwalk --out runs/cliffwalk`` (some minutes; half a minute with ``--states 2 4 6 8``)
prints a table and writes ``cliffwalk.csv``, with one row per run, and the figure ``cliffwalk.png`` and ``.svg``. With
``--read CSV`` it draws the figure of an earlier run.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler
from tqdm import tqdm

from recipes.common.checked import positive
from recipes.common.files import markdown
from recipes.experiments.command_line import ExperimentParser
from recipes.studies.figures import explain, label, looks, panel_grid, sample_line, styled
from torchrl_replay_ext import ProportionalSampler, RankBasedSampler, ReaPERSampler

COLUMNS = {"num_states": int, "strategy": str, "seed": int, "updates": int}  # of cliffwalk.csv
LEARNING_RATE = 0.25
THRESHOLD = 1e-3
ALPHA, OMEGA = 0.7, 0.2
INITIAL_STD = 0.1
UNIFORM_BLOCK = 4096


class Cliffwalk:
    """The Q-values of the n states, and their error.

    Transition k < n leads from state k to the next state; transition n + k ends the episode in state k.

    Args:
        num_states: n, >= 1.
        generator: generator of the initial noise.
    """

    def __init__(self, num_states: int, generator: torch.Generator):
        self.num_states = num_states
        self.discount = 1 - 1 / num_states
        self.truth = [self.discount ** (num_states - 1 - k) for k in range(num_states)] + [0.0] * num_states
        self.q_values = (INITIAL_STD * torch.randn(2 * num_states, generator=generator, dtype=torch.float64)).tolist()

    def transitions(self, generator: torch.Generator) -> torch.Tensor:
        """The transitions of all 2^n episodes, which are in random order, int64 [2^(n+1) - 2]."""
        n = self.num_states
        # 2^(n-1-k) episodes end in state k without success
        episodes = [[*range(k), n + k] for k in range(n) for _ in range(2 ** (n - 1 - k))] + [[*range(n)]]
        order = torch.randperm(len(episodes), generator=generator).tolist()
        return torch.tensor([transition for number in order for transition in episodes[number]])

    def td_error(self, transition: int) -> float:
        """TD error δ of a transition with the current Q-values."""
        n, target = self.num_states, 0.0
        if transition < n - 1:
            target = self.discount * max(self.q_values[transition + 1], self.q_values[n + transition + 1])
        elif transition == n - 1:
            target = 1.0
        return target - self.q_values[transition]

    def update(self, transition: int) -> float:
        """Learn from a transition; return its TD error before the update."""
        td_error = self.td_error(transition)
        self.q_values[transition] += LEARNING_RATE * td_error
        return td_error

    def mean_squared_error(self) -> float:
        """Mean squared error of all Q-values."""
        errors = (q - truth for q, truth in zip(self.q_values, self.truth, strict=True))
        return sum(error * error for error in errors) / len(self.truth)


def replay_uniform(walk: Cliffwalk, transitions: torch.Tensor) -> Iterator[None]:
    """One update per iteration, with uniformly drawn transitions."""
    buffer = make_buffer(RandomSampler(), walk, transitions)
    while True:
        for transition in buffer.sample(UNIFORM_BLOCK)["transition"].tolist():
            walk.update(transition)
            yield


def replay_prioritized(walk: Cliffwalk, transitions: torch.Tensor, sampler: Any) -> Iterator[None]:
    """One update per iteration, with transitions drawn by priority; `sampler`: the class."""
    buffer = make_buffer(sampler(len(transitions), alpha=ALPHA, beta=0.0, td_error="absolute"), walk, transitions)
    while True:
        batch = buffer.sample(1)
        td_error = walk.update(int(batch["transition"]))
        batch["td_error"] = torch.tensor([abs(td_error)])
        buffer.update_tensordict_priority(batch)
        yield


def replay_oracle(walk: Cliffwalk, transitions: torch.Tensor) -> Iterator[None]:
    """One update per iteration, with the transition that reduces the error of the Q-values most."""

    def gain(transition: int) -> float:
        before = walk.q_values[transition] - walk.truth[transition]
        return before**2 - (before + LEARNING_RATE * walk.td_error(transition)) ** 2

    while True:
        walk.update(max(range(2 * walk.num_states), key=gain))
        yield


def make_buffer(sampler: object, walk: Cliffwalk, transitions: torch.Tensor) -> TensorDictReplayBuffer:
    """A buffer that holds `transitions`."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(transitions)), sampler=sampler)
    done = (transitions >= walk.num_states - 1).unsqueeze(1)
    buffer.extend(TensorDict({"transition": transitions, "next": {"done": done}}, [len(transitions)]))
    return buffer


STRATEGIES: dict[str, Callable[[Cliffwalk, torch.Tensor], Iterator[None]]] = {
    "uniform": replay_uniform,
    "rank-based": partial(replay_prioritized, sampler=RankBasedSampler),
    "proportional": partial(replay_prioritized, sampler=ProportionalSampler),
    "ReaPER": partial(replay_prioritized, sampler=partial(ReaPERSampler, omega=OMEGA)),
    "oracle": replay_oracle,
}


def count_updates(strategy: str, num_states: int, seed: int) -> int:
    """The number of updates until the mean squared error is at most `THRESHOLD`."""
    generator = torch.Generator().manual_seed(seed)
    walk = Cliffwalk(num_states, generator)
    transitions = walk.transitions(generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number, _ in enumerate(STRATEGIES[strategy](walk, transitions), start=1):
            if walk.mean_squared_error() <= THRESHOLD:
                return number
    raise AssertionError("strategies do not end")


def updates_of(rows: list[dict]) -> dict[tuple[int, str], list[int]]:
    """The updates of each seed, by number of states and strategy."""
    found = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        found[row["num_states"], row["strategy"]].append(row["updates"])
    return found


def format_table(rows: list[dict]) -> str:
    """A table of median updates, and in brackets their share of uniform's, with one line per number of states."""
    found, lines = updates_of(rows), []
    for n in sorted({row["num_states"] for row in rows}):
        medians = [statistics.median(found[n, strategy]) for strategy in STRATEGIES]
        lines.append((n, *(f"{value:,.0f} ({value / medians[0]:.2f})" for value in medians)))
    return markdown(("states", *STRATEGIES), lines)


def conclusion(rows: list[dict]) -> str:
    """One sentence on proportional PER and uniform replay, for the largest number of states."""
    n, found = max(row["num_states"] for row in rows), updates_of(rows)
    pair = found[n, "proportional"], found[n, "uniform"]
    ours, uniform = map(statistics.median, pair)
    ahead = sum(mine < theirs for mine, theirs in zip(*pair, strict=True))
    return (
        f"Blind Cliffwalk with {n} states: proportional PER took {ours:,.0f} updates, uniform replay "
        f"{uniform:,.0f}: {ours / uniform:.2f} times as many (medians; PER was faster with {ahead} of "
        f"{len(pair[0])} seeds)"
    )


@styled
def plot(rows: list[dict]) -> Figure:
    """Draw Figure 1 (right): median updates against the number of transitions, with the range over seeds."""
    figure, (panel,) = panel_grid(1, height=3.1)
    chosen = looks(STRATEGIES)
    found, states = updates_of(rows), sorted({row["num_states"] for row in rows})
    for place, strategy in enumerate(STRATEGIES):
        # beside each other, so that the ranges do not cover one another
        size = [(2 ** (n + 1) - 2) * 1.05 ** (place - 1.5) for n in states]
        of = np.array([found[n, strategy] for n in states])
        middle, (color, marker) = np.median(of, 1), chosen[strategy]
        error = (middle - of.min(1), of.max(1) - middle)
        panel.errorbar(size, middle, yerr=error, color=color, marker=marker, linewidth=1.2, elinewidth=1.2)
    panel.set(xscale="log", yscale="log", xlabel="transitions in the buffer", ylabel="updates until the error is small")
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle("Blind Cliffwalk")
    seeds = len({row["seed"] for row in rows})
    note = f"Marker: median of {seeds} seeds; bar: range over seeds. Both axes are logarithmic."
    explain(figure, {label(strategy): sample_line(chosen[strategy]) for strategy in STRATEGIES}, note)
    return figure


def main(arguments: list[str] | None = None) -> list[dict]:
    """Run the comparison from the command line and return its rows."""
    parser = ExperimentParser("cliffwalk", __doc__)
    parser.add_argument("--seeds", type=positive, default=10, help="runs of each strategy (default: %(default)s)")
    text = "numbers of states (default: 2, 4, ..., 10)"
    parser.add_argument("--states", type=positive, nargs="+", default=[2, 4, 6, 8, 10], help=text)
    options = parser.parse_args(arguments)

    def measure() -> Iterator[dict]:
        runs = [(n, strategy, seed) for n in options.states for seed in range(options.seeds) for strategy in STRATEGIES]
        for run in tqdm(runs, desc="cliffwalk", leave=False):
            num_states, strategy, seed = run
            yield dict(zip(COLUMNS, (*run, count_updates(strategy, num_states, seed)), strict=True))

    return parser.run(options, COLUMNS, measure, lambda rows: f"{format_table(rows)}\n\n{conclusion(rows)}", plot)


if __name__ == "__main__":
    main()
