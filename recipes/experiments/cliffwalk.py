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

``--outliers SHARE`` adds heavy-tailed noise to the rewards of this share of the stored transitions, to learn whether
rank-based PER is more robust: Student's t with two degrees of freedom, which has the mean 0 and no variance. The noise
is stored with the transition. The only success has none, and the oracle replays transitions without noise. With
``--cap``, runs end after that many updates; those that have not learned the Q-values until then are censored (≥).

``python -m recipes.experiments.cliffwalk --out runs/cliffwalk`` (some minutes; half a minute with ``--states 2 4 6 8``)
prints a table and writes ``cliffwalk.csv``, with one row per run, and the figure ``cliffwalk.png`` and ``.svg``. With
``--read CSV`` it draws the figure of an earlier run.
"""

import math
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
from recipes.studies.report import comparison, format_median
from torchrl_replay_ext import ProportionalSampler, RankBasedSampler, ReaPERSampler

# of cliffwalk.csv; censored: 1 if the run ended before its Q-values were learned
COLUMNS = {"num_states": int, "strategy": str, "seed": int, "outliers": float, "updates": int, "censored": int}
LEARNING_RATE = 0.25
THRESHOLD = 1e-3
ALPHA, OMEGA = 0.7, 0.2
INITIAL_STD = 0.1
UNIFORM_BLOCK = 4096
COMPARED = (("rank-based", "uniform"), ("rank-based", "proportional"), ("proportional", "uniform"))


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

    def update(self, transition: int, noise: float = 0.0) -> float:
        """Learn from a transition with noise in its reward; return its TD error before the update."""
        td_error = self.td_error(transition) + noise
        self.q_values[transition] += LEARNING_RATE * td_error
        return td_error

    def mean_squared_error(self) -> float:
        """Mean squared error of all Q-values."""
        errors = (q - truth for q, truth in zip(self.q_values, self.truth, strict=True))
        return sum(error * error for error in errors) / len(self.truth)


def replay_uniform(walk: Cliffwalk, rows: TensorDict) -> Iterator[None]:
    """One update per iteration, with uniformly drawn transitions."""
    buffer = make_buffer(RandomSampler(), rows)
    while True:
        batch = buffer.sample(UNIFORM_BLOCK)
        for row in zip(batch["transition"].tolist(), batch["noise"].tolist(), strict=True):
            walk.update(*row)
            yield


def replay_prioritized(walk: Cliffwalk, rows: TensorDict, sampler: Any) -> Iterator[None]:
    """One update per iteration, with transitions drawn by priority; `sampler`: the class."""
    buffer = make_buffer(sampler(len(rows), alpha=ALPHA, beta=0.0, td_error="absolute"), rows)
    while True:
        batch = buffer.sample(1)
        td_error = walk.update(int(batch["transition"]), float(batch["noise"]))
        batch["td_error"] = torch.tensor([abs(td_error)])
        buffer.update_tensordict_priority(batch)
        yield


def replay_oracle(walk: Cliffwalk, rows: TensorDict) -> Iterator[None]:
    """One update per iteration, with the transition that reduces the error of the Q-values most."""

    def gain(transition: int) -> float:
        before = walk.q_values[transition] - walk.truth[transition]
        return before**2 - (before + LEARNING_RATE * walk.td_error(transition)) ** 2

    while True:
        walk.update(max(range(2 * walk.num_states), key=gain))
        yield


def make_buffer(sampler: object, rows: TensorDict) -> TensorDictReplayBuffer:
    """A buffer that holds `rows`."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(rows)), sampler=sampler)
    buffer.extend(rows)
    return buffer


STRATEGIES: dict[str, Callable[[Cliffwalk, TensorDict], Iterator[None]]] = {
    "uniform": replay_uniform,
    "rank-based": partial(replay_prioritized, sampler=RankBasedSampler),
    "proportional": partial(replay_prioritized, sampler=ProportionalSampler),
    "ReaPER": partial(replay_prioritized, sampler=partial(ReaPERSampler, omega=OMEGA)),
    "oracle": replay_oracle,
}


def count_updates(
    strategy: str, num_states: int, seed: int, share: float = 0.0, cap: float = math.inf
) -> tuple[int, bool]:
    """The updates until the mean squared error is at most `THRESHOLD`, and whether the run ended before.

    Args:
        strategy: a key of STRATEGIES.
        num_states: number of states.
        seed: seed of the run.
        share: share of transitions with heavy-tailed noise in their rewards. Default: 0.
        cap: most updates. Default: no limit.
    """
    generator = torch.Generator().manual_seed(seed)
    walk = Cliffwalk(num_states, generator)
    transitions = walk.transitions(generator)
    rng, count = np.random.default_rng(seed), len(transitions)
    is_outlier = torch.from_numpy(rng.random(count) < share) & (transitions != num_states - 1)
    noise = torch.from_numpy(rng.standard_t(2, count)).where(is_outlier, 0.0)
    done = (transitions >= num_states - 1).unsqueeze(1)
    rows = TensorDict({"transition": transitions, "noise": noise, "next": {"done": done}}, [count])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number, _ in enumerate(STRATEGIES[strategy](walk, rows), start=1):
            learned = walk.mean_squared_error() <= THRESHOLD
            if learned or number >= cap:
                return number, not learned
    raise AssertionError("strategies do not end")


def runs_of(rows: list[dict]) -> dict[tuple[int, str], np.ndarray]:
    """The updates of each seed and whether it is censored, [seeds, 2], by number of states and strategy."""
    found = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["seed"]):
        found[row["num_states"], row["strategy"]].append((row["updates"], row["censored"]))
    return {key: np.array(runs) for key, runs in found.items()}


def format_table(rows: list[dict]) -> str:
    """A table of median updates with one line per number of states."""
    found = runs_of(rows)
    sizes = sorted({n for n, _ in found})
    lines = [(n, *(format_median(*found[n, strategy].T) for strategy in STRATEGIES)) for n in sizes]
    return markdown(("states", *STRATEGIES), lines)


def conclusions(rows: list[dict]) -> str:
    """A sentence on each of the pairs in COMPARED, for the largest number of states."""
    n, found, sentences = max(row["num_states"] for row in rows), runs_of(rows), []
    for strategy, other in COMPARED:
        updates, censored = np.stack([found[n, other], found[n, strategy]], 1).transpose(2, 0, 1)
        theirs, ours = map(format_median, updates.T, censored.T)
        ratio, p_value = comparison(updates, censored.astype(bool))
        took = f"{label(strategy)} took {ours} updates, {label(other)} {theirs} (medians)"
        sentences.append(f"Blind Cliffwalk with {n} states: {took}; ratio {ratio}, p {p_value}, {len(updates)} seeds")
    return "\n".join(sentences)


@styled
def plot(rows: list[dict]) -> Figure:
    """Draw Figure 1 (right): median updates against the number of transitions, with the range over seeds."""
    figure, (panel,) = panel_grid(1, height=3.1)
    chosen = looks(STRATEGIES)
    found, states = runs_of(rows), sorted({row["num_states"] for row in rows})
    for place, strategy in enumerate(STRATEGIES):
        # beside each other, so that the ranges do not cover one another
        size = [(2 ** (n + 1) - 2) * 1.05 ** (place - 1.5) for n in states]
        of = np.array([found[n, strategy][:, 0] for n in states])
        middle, (color, marker) = np.median(of, 1), chosen[strategy]
        error = (middle - of.min(1), of.max(1) - middle)
        panel.errorbar(size, middle, yerr=error, color=color, marker=marker, linewidth=1.2, elinewidth=1.2)
    panel.set(xscale="log", yscale="log", xlabel="transitions in the buffer", ylabel="updates until the error is small")
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    share = rows[0]["outliers"]
    figure.suptitle("Blind Cliffwalk" + f", {share:.0%} of the rewards are outliers" * (share > 0))
    seeds = len({row["seed"] for row in rows})
    note = f"Marker: median of {seeds} seeds; bar: range over seeds. Both axes are logarithmic."
    if any(row["censored"] for row in rows):
        note += f" Runs end after {max(row['updates'] for row in rows):,} updates."
    explain(figure, {label(strategy): sample_line(chosen[strategy]) for strategy in STRATEGIES}, note)
    return figure


def main(arguments: list[str] | None = None) -> list[dict]:
    """Run the comparison from the command line and return its rows."""
    parser = ExperimentParser("cliffwalk", __doc__)
    parser.add_argument("--seeds", type=positive, default=10, help="runs of each strategy (default: %(default)s)")
    text = "numbers of states (default: 2, 4, ..., 10)"
    parser.add_argument("--states", type=positive, nargs="+", default=[2, 4, 6, 8, 10], help=text)
    text = "probability of heavy-tailed noise in the reward of a stored transition (default: %(default)s)"
    parser.add_argument("--outliers", type=float, default=0.0, metavar="SHARE", help=text)
    parser.add_argument("--cap", type=positive, default=math.inf, metavar="UPDATES", help="most updates of a run")
    options = parser.parse_args(arguments)
    if not 0 <= options.outliers <= 1:
        parser.error(f"--outliers {options.outliers}: must be in [0, 1]")

    def measure() -> Iterator[dict]:
        runs = [(n, strategy, seed) for n in options.states for seed in range(options.seeds) for strategy in STRATEGIES]
        for num_states, strategy, seed in tqdm(runs, desc="cliffwalk", leave=False):
            updates, censored = count_updates(strategy, num_states, seed, options.outliers, options.cap)
            found = (num_states, strategy, seed, options.outliers, updates, int(censored))
            yield dict(zip(COLUMNS, found, strict=True))

    return parser.run(options, COLUMNS, measure, lambda rows: f"{format_table(rows)}\n\n{conclusions(rows)}", plot)


if __name__ == "__main__":
    main()
