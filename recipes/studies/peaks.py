"""Peak scores in Atari games, as the ReaPER paper evaluates Atari-10 (section 5, Figures 3 and 5, Equation 59).

The peak of a run is its highest evaluation. A score ξ of a game is normalized to (ξ − random) / (highest − random):
random is the score of random actions, highest the best evaluation in the game of all runs that are compared. The curve
of a variant is the highest score so far of each run, normalized, averaged over the seeds of a game; then the median
over the games. Only games in which all variants have runs are compared. Where no run is better than random actions,
all normalized scores are 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from recipes.common.atari_presets import GAMES
from recipes.common.errors import ConfigError
from recipes.common.files import markdown
from recipes.studies import figures
from recipes.studies.curves import Curve, curve_entries

# The runs of each game and variant.
Runs = Mapping[str, Mapping[str, Sequence[Curve]]]


def highest_so_far(run: Curve) -> np.ndarray:
    """The highest score up to each evaluation of a run."""
    return np.fmax.accumulate(run.values[run.column])


@dataclass
class Peaks:
    """The peak scores of several games.

    Args:
        runs: the runs of each game and variant.
        variants: names of the variants.
        baseline: the variant that the others are compared with.
    """

    runs: Runs
    variants: Sequence[str]
    baseline: str

    def __post_init__(self) -> None:
        self.games = [env for env in self.runs if all(self.runs[env].get(variant) for variant in self.variants)]
        if not self.games:
            raise ConfigError("study.peaks: there is no game yet in which every variant has a finished run")
        # the score of random actions in each game, and the highest of all runs
        self.ends: dict[str, tuple[float, float]] = {}
        for env in self.games:
            highest = max(highest_so_far(run)[-1] for runs in self.runs[env].values() for run in runs)
            random, _ = GAMES.get(env.removeprefix("atari/"), (None, None))
            if random is None:
                raise ConfigError(f"study.peaks: the score of random actions in {env} is not known; choose other games")
            self.ends[env] = random, float(highest)

    def peak(self, env: str, variant: str) -> float:
        """The mean over seeds of the peaks in a game."""
        return float(np.mean([highest_so_far(run)[-1] for run in self.runs[env][variant]]))

    def increase(self, env: str, variant: str) -> float:
        """The increase of the peak above the score of random actions over that of the baseline, in percent."""
        random, _ = self.ends[env]
        ours, theirs = self.peak(env, variant) - random, self.peak(env, self.baseline) - random
        return 100 * (ours / theirs - 1) if theirs > 0 else np.nan

    def curves(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The env steps [n] at which all runs have evaluations, and the curve of each variant at them, [n]."""
        every = [run for env in self.games for runs in self.runs[env].values() for run in runs]
        steps = np.unique(np.concatenate([run.steps for run in every]))
        first, last = max(run.steps[0] for run in every), min(run.steps[-1] for run in every)
        steps, curves = steps[(first <= steps) & (steps <= last)], {}
        for variant in self.variants:
            of_games = []
            for env in self.games:
                random, highest = self.ends[env]
                scores = [
                    highest_so_far(run)[np.searchsorted(run.steps, steps, side="right") - 1]
                    for run in self.runs[env][variant]
                ]
                above = np.mean(scores, axis=0) - random
                of_games.append(above / (highest - random) if highest > random else np.zeros_like(above))
            curves[variant] = np.median(of_games, axis=0)
        return steps, curves

    def table(self) -> str:
        """A Markdown table with a row per game, and the means and medians over the games, with its caption."""
        others = [variant for variant in self.variants if variant != self.baseline]
        baseline, lines = figures.label(self.baseline), []
        increases = {env: [self.increase(env, variant) for variant in others] for env in self.games}

        def percent(numbers: Iterable[float]) -> list[str]:
            return ["" if np.isnan(number) else f"{number:+.1f} %" for number in numbers]

        for env in self.games:
            peaks = (*self.ends[env], *(self.peak(env, variant) for variant in self.variants))
            lines.append((figures.env_label(env), *(f"{peak:,.1f}" for peak in peaks), *percent(increases[env])))
        # without the games in which the baseline is not better than random actions
        known = [increases[env] for env in self.games if not np.isnan(increases[env]).any()] or [[np.nan] * len(others)]
        empty = [""] * (2 + len(self.variants))
        for name, statistic in (("mean of games", np.mean), ("median of games", np.median)):
            lines.append((name, *empty, *percent(statistic(known, axis=0))))
        _, curves = self.curves()
        ends = [f"{curves[variant][-1]:.3f}" for variant in self.variants]
        lines.append(("median, normalized", "0", "1", *ends, *[""] * len(others)))
        head = ("", "random", "highest", *(f"{figures.label(variant)}: peak" for variant in self.variants))
        caption = (
            "Peak: highest evaluation of a run, mean over seeds. Increase: of the peak above the score of random "
            f"actions, over that of {baseline}. Highest: of all runs. Normalized: random actions have 0, the highest "
            "score 1 (Equation 59 of the ReaPER paper)."
        )
        return f"{caption}\n\n" + markdown((*head, *(f"{figures.label(name)}: increase" for name in others)), lines)

    @figures.styled
    def draw(self) -> Figure:
        """Draw the median of the normalized curves, and the highest score so far of each run in each game."""
        steps, curves = self.curves()
        styles = figures.looks(self.variants)
        figure, (median, *panels) = figures.panel_grid(len(self.games) + 1, 3)
        for variant, values in curves.items():
            median.plot(steps, values, color=styles[variant].color)
        median.set(title=f"median of {len(self.games)} games", ylabel="normalized score")
        for axes, env in zip(panels, self.games, strict=True):
            for variant in self.variants:
                for run in self.runs[env][variant]:
                    axes.plot(run.steps, highest_so_far(run), color=styles[variant].color)
            axes.axhline(self.ends[env][0], color=figures.GREY, linestyle=":")
            axes.set(title=figures.env_label(env), ylabel="highest score so far")
        for axes in (median, *panels):
            axes.set_xlabel(figures.count_steps(axes.xaxis, steps[-1]))
        note = "Highest score so far: a line per run; dotted: random actions. Normalized: see the table."
        figures.explain(figure, curve_entries(styles), note)
        return figure
