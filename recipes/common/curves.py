"""Learning curves: the evaluations of runs, and panels that show them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from recipes.common.figures import Look, label, sample_line
from recipes.common.intervals import bootstrap_interval, interquartile_mean

RETURN = "return_mean"
BAND = {"alpha": 0.16, "linewidth": 0}
MARKERS = 8  # about so many on a line


@dataclass
class Run:
    """The evaluations of one run."""

    env: str
    group: str
    seed: int
    threshold: float | None
    steps: np.ndarray
    values: dict[str, np.ndarray]
    column: str = RETURN
    stopped: bool = False  # it ended early because it had reached the threshold

    def at(self, steps: np.ndarray, column: str) -> np.ndarray:
        """The latest value at each of `steps`; NaN before the first evaluation and after the end, unless `stopped`."""
        latest = np.searchsorted(self.steps, steps, side="right") - 1
        values = np.where(latest >= 0, self.values[column][latest], np.nan)
        return values if self.stopped else np.where(steps > self.steps[-1], np.nan, values)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running means over the last axis of [runs, evaluations]; near the ends, over the values that exist."""
    weights = np.ones(min(window, values.shape[-1]))
    count = np.convolve(np.ones(values.shape[-1]), weights, mode="same")
    return np.stack([np.convolve(row, weights, mode="same") / count for row in values])


def draw_curves(
    axes: Axes, groups: Mapping[str, Sequence[Run]], column: str, looks: Mapping[str, Look], window: int = 1
) -> None:
    """Draw a line and a band for each group of runs; the caller labels the x axis, see `figures.count_steps`.

    Args:
        axes: the panel.
        groups: runs by group.
        column: the values to draw.
        looks: colour and marker of each group.
        window: evaluations of a run that are averaged, see :func:`smooth`. Default: 1.
    """
    for place, (group, runs) in enumerate(groups.items()):
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        values = np.stack([run.at(steps, column) for run in runs])
        # Leave out steps at which some runs have no value: the line would jump when the set of runs changes.
        steps, values = steps[~np.isnan(values).any(0)], values[:, ~np.isnan(values).any(0)]
        if not len(steps):
            continue
        values = smooth(values, window)
        every = max(1, len(steps) // MARKERS)
        axes.plot(
            steps,
            interquartile_mean(values),
            color=looks[group].color,
            marker=looks[group].marker,
            markevery=(place * every // len(groups), every),
        )
        if len(runs) > 1:
            axes.fill_between(steps, *bootstrap_interval(values), color=looks[group].color, **BAND)
    axes.set(ylabel=label(column), xmargin=0.02)


def curve_entries(groups: Iterable[str], looks: Mapping[str, Look]) -> dict[str, tuple[Artist, ...]]:
    """The entries of the legend: a line on its band for the label of each group."""
    return {label(group): (Patch(color=looks[group].color, **BAND), sample_line(looks[group])) for group in groups}


def curve_note(groups: Iterable[Sequence[Run]], window: int = 1) -> str:
    """A sentence on what lines and bands are."""
    sizes = sorted({len(runs) for runs in groups})
    each = f"smoothed over {window} evaluations" if window > 1 else ""
    if sizes[-1] == 1:
        return f"Lines: single runs{f', {each}' if each else ''}."
    # of fewer than four values, the interquartile mean is the mean
    mean = "interquartile mean" if sizes[-1] >= 4 else "mean"
    count = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    return f"Line: {mean} of {count} seeds{f', each {each}' if each else ''}; band: 95 % bootstrap interval over seeds."
