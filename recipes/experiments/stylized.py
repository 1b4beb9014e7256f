"""Which transition should be learned next? The stylized setting of the ReaPER paper (Appendix C, Figure 4).

One episode has n transitions on the optimal path, with a reward of 1 at the end and 0 before. Tabular Q-learning with
learning rate 1 and discount factor 1 learns transition t by Q_t ← Q_{t+1}, with Q_{n+1} = 1. The experiment counts the
updates until every Q_t = 1.

- *uniform*: any transition, learned or not.
- *PER-g*: the largest |δ_t|, ties broken at random.
- *ReaPER-g*: the largest Ψ_t = R_t |δ_t| (Eq. 4-5), ties broken at random.
- *oracle*: the last transition with δ_t ≠ 0. It never updates a transition twice, which is optimal.

Initially Q_t = 0, the condition of "high" reliability. Reliability is "medium" if every fourth initial Q-value is
replaced by 1, and "low" if every second one is. The paper does not define the first replaced value; here, the values at
t = p, 2p, 3p, ... are replaced, with p = 4 or 2 and t = 1 the first transition. Another offset changes the number of
values to learn in the medium condition and slightly the means of uniform and PER-g, but not the conclusions: ReaPER-g
equals the oracle for every offset.

``python -m recipes.experiments.stylized --out runs/stylized --seeds 100`` (about ten seconds) prints a table and writes
``stylized.csv`` and the figure ``stylized.png`` and ``.svg``. With ``--read CSV`` it draws the figure of an earlier
run.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from recipes.common.checked import positive
from recipes.common.files import markdown
from recipes.experiments.command_line import ExperimentParser
from recipes.studies.curves import BAND, curve_entries
from recipes.studies.figures import explain, looks, panel_grid, styled

# columns of stylized.csv
KINDS = {"condition": str, "length": int, "strategy": str, "updates": float, "extra": float, "extra_std": float}
PERIODS = {"high": None, "medium": 4, "low": 2}
"""Reliability condition -> period p: every p-th initial Q-value is 1. None: all are 0."""


def initial_q_values(length: int, period: int | None, offset: int = 0) -> Tensor:
    """The initial Q_1 ... Q_n, followed by Q_{n+1} = 1, the target of the last transition.

    Args:
        length: n, number of transitions of the episode.
        period: every ``period``-th value is 1 instead of 0; None: all are 0.
        offset: the first such value is at t = ``period`` - ``offset``; in [0, ``period``). Default: 0.

    Returns:
        Float tensor [n + 1].
    """
    q_values = torch.zeros(length + 1)
    q_values[-1] = 1.0
    if period is not None:
        q_values[period - 1 - offset : length : period] = 1.0
    return q_values


def argmax_random_ties(score: Tensor, generator: torch.Generator) -> Tensor:
    """The index of the largest score in each row, [rows, n] -> [rows], with ties broken at random."""
    is_largest = score == score.amax(1, keepdim=True)
    return torch.rand(score.shape, generator=generator).masked_fill(~is_largest, -1.0).argmax(1)


def select_reaper_greedy(td_error: Tensor, generator: torch.Generator) -> Tensor:
    """The transition with the largest reliability-adjusted TD error, Ψ_t = R_t |δ_t| (Eq. 5)."""
    until = td_error.double().cumsum(1)
    total = until[:, -1:]
    reliability = torch.where(total > 0, until / total, 1.0).to(td_error.dtype)
    return argmax_random_ties(reliability * td_error, generator)


# Strategy -> function of |δ| [episodes, n] and a generator that chooses a transition of each episode, [episodes].
STRATEGIES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "uniform": lambda error, generator: torch.randint(error.shape[1], error.shape[:1], generator=generator),
    "PER-g": argmax_random_ties,
    "ReaPER-g": select_reaper_greedy,
    "oracle": lambda error, _: error.shape[1] - 1 - (error != 0).flip(1).int().argmax(1),
}


def count_updates(strategy: str, q_values: Tensor, generator: torch.Generator) -> Tensor:
    """The number of updates until all Q-values are learned, for many independent episodes of the same length.

    Args:
        strategy: a key of :data:`STRATEGIES`.
        q_values: initial values [episodes, n + 1], see :func:`initial_q_values`; left unchanged.
        generator: generator of the random choices.

    Returns:
        Integer tensor [episodes].
    """
    select = STRATEGIES[strategy]
    updates = torch.zeros(len(q_values), dtype=torch.int64)
    episode = torch.arange(len(q_values))
    q_values = q_values.clone()
    while True:
        td_error = q_values.diff(dim=1).abs()
        unlearned = td_error.any(1)
        if not unlearned.all():
            episode, q_values, td_error = episode[unlearned], q_values[unlearned], td_error[unlearned]
            if not len(episode):
                return updates
        chosen = select(td_error, generator)[:, None]
        q_values.scatter_(1, chosen, q_values.gather(1, chosen + 1))
        updates[episode] += 1


def run(lengths: list[int], seeds: int, seed: int = 0) -> list[dict]:
    """Count the updates of every strategy in every condition.

    Args:
        lengths: episode lengths.
        seeds: number of independent episodes per mean.
        seed: seed of the random choices. Default: 0.

    Returns:
        One row per condition, length and strategy, with ``updates`` (mean), ``extra`` (mean number of updates in excess
        of the oracle's) and ``extra_std`` (standard deviation of ``extra`` over the seeds).
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        initial = torch.stack([initial_q_values(length, period) for period in PERIODS.values()])
        initial = initial.repeat_interleave(seeds, 0)
        updates = {s: count_updates(s, initial, generator).double().view(len(PERIODS), seeds) for s in STRATEGIES}
        for index, condition in enumerate(PERIODS):
            for strategy in STRATEGIES:
                extra = updates[strategy][index] - updates["oracle"][index]
                numbers = updates[strategy][index].mean(), extra.mean(), extra.std(correction=0)
                found = (condition, length, strategy, *(number.item() for number in numbers))
                rows.append(dict(zip(KINDS, found, strict=True)))
    return rows


def format_table(rows: list[dict]) -> str:
    """A table of the mean updates in excess of the oracle's, one line per condition and length."""
    compared = [strategy for strategy in STRATEGIES if strategy != "oracle"]
    lines = []
    for condition in PERIODS:
        for length in sorted({row["length"] for row in rows}):
            of = {r["strategy"]: r for r in rows if r["condition"] == condition and r["length"] == length}
            extras = (f"{of[s]['extra']:.1f}" for s in compared)
            lines.append((condition, length, f"{of['oracle']['updates']:.0f}", *extras))
    return markdown(("reliability", "length", "oracle", *(f"+{s}" for s in compared)), lines)


@styled
def plot(rows: list[dict]) -> Figure:
    """Draw Figure 4: updates in excess of the oracle's against the episode length, one panel per condition."""
    figure, panels = panel_grid(len(PERIODS), len(PERIODS), sharex=True, sharey=True)
    compared = [strategy for strategy in STRATEGIES if strategy != "oracle"]
    chosen = looks(compared)
    for panel, condition in zip(panels, PERIODS, strict=True):
        for strategy in compared:
            curve = [row for row in rows if row["condition"] == condition and row["strategy"] == strategy]
            length = [row["length"] for row in curve]
            mean, std = (np.array([row[key] for row in curve]) for key in ("extra", "extra_std"))
            panel.plot(length, mean, color=chosen[strategy].color, marker=chosen[strategy].marker, clip_on=False)
            low, high = np.maximum(mean - std, 0.0), mean + std
            panel.fill_between(length, low, high, color=chosen[strategy].color, **BAND)
        panel.set_yscale("symlog")
        panel.set(title=f"{condition} reliability", ylim=(0, None))
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel("updates more than the oracle's")
    panels[len(panels) // 2].set_xlabel("episode length")
    note = "Line: mean over episodes; band: one standard deviation. The y axis is logarithmic above 1; 0 is the oracle."
    explain(figure, curve_entries(chosen), note)
    return figure


def main(arguments: list[str] | None = None) -> list[dict]:
    """Run the comparison from the command line and return its rows."""
    parser = ExperimentParser("stylized", __doc__)
    parser.add_argument("--seeds", type=positive, default=100, help="episodes per mean (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: %(default)s)")
    text = "episode lengths (default: 10, 20, ..., 100)"
    parser.add_argument("--lengths", type=positive, nargs="+", default=list(range(10, 101, 10)), help=text)
    options = parser.parse_args(arguments)
    measure = partial(run, options.lengths, options.seeds, options.seed)
    return parser.run(options, KINDS, measure, format_table, plot)


if __name__ == "__main__":
    main()
