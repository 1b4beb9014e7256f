"""Makes the table and the figure of a study (recipes.study) from its runs.csv, curves.csv and study.yaml."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from recipes.common.cli import ConfigError, parse_config
from recipes.plot import (
    FEW,
    LABELS,
    Run,
    Statistic,
    bootstrap_interval,
    draw_curves,
    interquartile_mean,
    median_with_bound,
    panel_width,
)
from recipes.study import CURVES, RUNS, STUDY, StudyConfig, key_of, read_rows

TABLE, FIGURE = "table.md", "figure.png"


@dataclass
class Study:
    """The finished runs of a study.

    Args:
        config: configuration of the study.
        rows: rows of runs.csv by environment, variant and seed.
        runs: evaluations of the runs, by environment, variant and seed.
    """

    config: StudyConfig
    rows: Mapping[str, Mapping[str, Mapping[int, dict[str, str]]]]
    runs: Mapping[str, Mapping[str, Mapping[int, Run]]]

    def values(self, env: str, variant: str, of: Callable[[dict[str, str]], float]) -> np.ndarray:
        """The number that `of` computes from the row of each run, [seeds]."""
        return np.array([of(row) for row in self.rows[env][variant].values()])

    def pairs(self, env: str, variant: str, of: Callable[[dict[str, str]], float]) -> np.ndarray:
        """That number for (baseline, variant), [n, 2], for the n seeds that both have."""
        theirs, ours = self.rows[env][self.config.baseline], self.rows[env][variant]
        seeds = sorted(ours.keys() & theirs.keys())
        return np.array([(of(theirs[seed]), of(ours[seed])) for seed in seeds]).reshape(-1, 2)


def steps_of(row: dict[str, str]) -> float:
    """Env steps to the threshold; all env steps if the run did not reach it."""
    return float(row["reached"] or row["env_steps"])


def censored_of(row: dict[str, str]) -> bool:
    """Whether the run ended before it reached the threshold, so that `steps_of` is a lower bound."""
    return row["reached"] == ""


def final_of(row: dict[str, str]) -> float:
    """The mean of the last tenth of a run's evaluations."""
    return float(row["final"])


def read_study(out: Path) -> Study:
    """Read the directory of a study.

    Raises:
        ConfigError: if the directory holds no finished run of a study.
    """
    for name in (STUDY, RUNS, CURVES):
        if not (out / name).is_file():
            raise ConfigError(f"{out}: no {name} there; python -m recipes.study writes it")
    config = parse_config(OmegaConf.load(out / STUDY), StudyConfig)
    rows: defaultdict[str, defaultdict[str, dict[int, dict[str, str]]]] = defaultdict(lambda: defaultdict(dict))
    for row in read_rows(out / RUNS):
        rows[row["env"]][row["variant"]][int(row["seed"])] = row
    # indexed by step, because rows around an interruption may be in the file twice
    curves: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for row in read_rows(out / CURVES):
        curves[key_of(row)][int(row["env_steps"])] = float(row[config.column])
    runs: defaultdict[str, defaultdict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for env, variants in rows.items():
        for variant, seeds in variants.items():
            for seed, row in seeds.items():
                curve = curves[key_of(row)]
                runs[env][variant][seed] = Run(
                    env=env,
                    group=variant,
                    seed=seed,
                    threshold=None if row["threshold"] == "" else float(row["threshold"]),
                    steps=np.array(list(curve)),
                    values={config.column: np.array(list(curve.values()))},
                    column=config.column,
                )
    return Study(config, rows, runs)


def study_directory(name: str) -> Path:
    """The directory of a study, given by name or directory; runs/study has priority over recipes/results."""
    places = [Path(name), Path("runs/study") / name, Path(__file__).parents[1] / "results" / name]
    return next((place for place in places if (place / RUNS).is_file()), places[1])


def with_interval(values: np.ndarray, statistic: Statistic, form: str) -> str:
    """The text of a statistic over seeds [seeds, ...] with its 95 % bootstrap interval."""
    low, high = bootstrap_interval(values, statistic)
    return f"{form} [{form}, {form}]".format(statistic(values), low, high)


def format_median(steps: np.ndarray, censored: np.ndarray) -> str:
    """The text of the median of steps [n] with its interval; "≥" marks numbers that censored runs make lower bounds."""
    median, bounded = median_with_bound(steps, censored)
    if censored.all():
        return f"≥ {median:,.0f}"
    ends = bootstrap_interval(steps, np.median)
    # An end depends on censored runs if it moves when these runs are longer.
    longer = bootstrap_interval(np.where(censored, 2 * steps, steps), np.median)
    low, high = ("≥ " * bool(end != other) + f"{end:,.0f}" for end, other in zip(ends, longer, strict=True))
    return f"{'≥ ' * bounded}{median:,.0f} [{low}, {high}]"


def ratio_of_means(pairs: np.ndarray) -> np.floating:
    """Mean of the second column of `pairs` [n, 2], divided by the mean of the first."""
    return pairs[:, 1].mean() / pairs[:, 0].mean()


def format_ratio(pairs: np.ndarray, censored: np.ndarray) -> str:
    """The text of the ratio of mean steps with its interval, marked as a bound if runs are censored.

    Args:
        pairs: steps of (baseline, variant) for each seed, [n, 2].
        censored: whether these runs ended before they reached the threshold, [n, 2].
    """
    if censored.all():
        return "neither reached"
    baseline, variant = (bool(column.any()) for column in censored.T)
    sign = {(False, False): "", (False, True): "≥ ", (True, False): "≤ ", (True, True): "~ "}[baseline, variant]
    # If the variant never reached the threshold, the interval would show the spread of the baseline alone.
    if censored[:, 1].all():
        return f"{sign}{ratio_of_means(pairs):.2f}"
    return sign + with_interval(pairs, ratio_of_means, "{:.2f}")


def caption(config: StudyConfig) -> str:
    """Explain the columns of the table."""
    baseline = config.baseline
    return (
        f"Steps: environment steps to the threshold. Ratio: mean steps of the variant divided by the mean steps of "
        f"{baseline}, over the seeds that both have; 0.5 means half as many steps, 2 twice as many. A run that did not "
        "reach the threshold counts with its full length. This makes a number a lower bound (≥) or an upper bound (≤); "
        "~ marks a ratio that is no bound, because both sides have such runs. Last evaluations: the last tenth of each "
        f"run; their interquartile mean (IQM) over seeds, and the mean difference to {baseline} over pairs of the same "
        f"seed. In brackets: 95 % bootstrap intervals over seeds, BCa for {FEW} seeds or fewer; beside a bound, the "
        "interval of the bound."
    )


def format_table(study: Study) -> str:
    """A Markdown table with one row per environment and variant; `caption` defines its columns."""
    config = study.config
    lines = [
        f"| | variant | reached | steps: median | mean | ratio to {config.baseline} | in the source | "
        f"last evaluations: IQM | difference to {config.baseline} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for env in config.envs:
        for variant in config.variants:
            seeds = study.rows[env][variant]
            if not seeds:
                continue
            steps, final = study.values(env, variant, steps_of), study.values(env, variant, final_of)
            censored = study.values(env, variant, censored_of)
            pairs, finals = study.pairs(env, variant, steps_of), study.pairs(env, variant, final_of)
            ratio = difference = ""
            if variant != config.baseline and len(pairs):
                ratio = format_ratio(pairs, study.pairs(env, variant, censored_of))
                difference = with_interval(finals, lambda p: (p[:, 1] - p[:, 0]).mean(), "{:.1f}")
            cells = [
                env,
                variant,
                f"{(~censored).sum()} of {len(seeds)}",
                format_median(steps, censored),
                f"{'≥ ' * bool(censored.any())}{steps.mean():,.0f}",
                ratio,
                config.claims.get(env, {}).get(variant, ""),
                with_interval(final, interquartile_mean, "{:.1f}"),
                difference,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def provenance(study: Study) -> str:
    """Command, seeds, commits and versions of torch that produced the study."""
    rows = [row for variants in study.rows.values() for seeds in variants.values() for row in seeds.values()]
    seeds = sorted({int(row["seed"]) for row in rows})
    commits, versions = (sorted({row[key] for row in rows}) for key in ("commit", "torch"))
    return (
        f"python -m recipes.study study={study.config.name}; seeds {seeds[0]} to {seeds[-1]}; commit "
        f"{', '.join(commits)}; torch {', '.join(versions)}"
    )


def draw(study: Study, out: Path) -> None:
    """Draw the figure: learning curves in the upper row; steps of each seed, median and interval in the lower row."""
    config = study.config
    envs = [env for env in config.envs if env in study.runs]
    cycle = colormaps["tab10" if len(config.variants) <= 10 else "tab20"]
    figure = Figure(figsize=(panel_width(len(config.variants), 5.4) * len(envs), 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, len(envs), squeeze=False)
    for axes, dots, env in zip(above, below, envs, strict=True):
        groups = {variant: study.runs[env][variant] for variant in config.variants if study.runs[env][variant]}
        axes.set_prop_cycle(color=[cycle(place) for place in range(cycle.N)])
        draw_curves(axes, {variant: list(runs.values()) for variant, runs in groups.items()}, config.column)
        axes.set(title=env, xlabel="environment steps", ylabel=LABELS.get(config.column, config.column))
        for place, variant in enumerate(groups):
            steps = study.values(env, variant, steps_of)
            censored = study.values(env, variant, censored_of)
            beside = place + np.linspace(-0.25, 0.25, len(steps)) if len(steps) > 1 else np.array([place])
            color = cycle(place)
            dots.scatter(beside[~censored], steps[~censored], s=14, color=color, alpha=0.6)
            dots.scatter(beside[censored], steps[censored], s=18, color=color, marker="x", alpha=0.6)
            low, high = bootstrap_interval(steps, np.median)
            median, bounded = median_with_bound(steps, censored)
            error, mark = [[median - low], [high - median]], {"fmt": "^"} if bounded else {"fmt": "_", "markersize": 30}
            dots.errorbar(place, median, yerr=error, color="black", capsize=5, **mark)
        dots.set(ylabel="steps to the threshold\n(x: not reached; ▲: lower bound of the median)", ylim=(0, None))
        dots.set_xticks(range(len(groups)), groups, rotation=20, ha="right")
    figure.suptitle(provenance(study), fontsize=7, y=-0.01, va="top")
    figure.savefig(out / FIGURE, dpi=110, bbox_inches="tight")


def full_table(study: Study) -> str:
    """The table with its caption and its provenance."""
    return f"{caption(study.config)}\n\n{format_table(study)}\n\n{provenance(study)}\n"


def report(out: Path) -> str:
    """Write figure and table to the directory of the study and return the table."""
    study = read_study(out)
    table = full_table(study)
    (out / TABLE).write_text(table, encoding="utf-8")
    draw(study, out)
    return table
