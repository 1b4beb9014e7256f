"""Makes the table and the figure of a study (recipes.study) from its runs.csv, curves.csv and study.yaml."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import gmean

from recipes.common.cli import parse_config
from recipes.common.errors import ConfigError, did_you_mean
from recipes.common.files import CONF, CURVES, RUNS, STUDY, load_config, markdown, reaches, read_rows, require_files
from recipes.common.schemas import StudyConfig
from recipes.studies import curves, figures, intervals
from recipes.studies.curves import Curve, curve_entries, curve_note, draw_curves, read_table

TABLE, FIGURE = "table.md", "figure"
RESULTS = Path(__file__).resolve().parents[1] / "results"  # the published ones
LINES = 4  # most variants beside the baseline in a panel of learning curves
NEITHER = "neither reached"
MEDIAN: dict[str, Any] = {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.6}


@dataclass
class Study:
    """The finished runs of a study.

    Args:
        config: configuration of the study.
        rows: rows of runs.csv.
        runs: evaluations of the runs, by environment and variant, for those that have runs.
        source: what `study=` must be to repeat it: its name, or its study.yaml if options replaced settings.
    """

    config: StudyConfig
    rows: Sequence[Mapping[str, str]]
    runs: Mapping[str, Mapping[str, list[Curve]]]
    source: str

    def values(self, env: str, variant: str, of: Callable[[Curve], float]) -> np.ndarray:
        """The number that `of` computes from each run, [seeds]."""
        return np.array([of(run) for run in self.runs[env][variant]])

    def pairs(self, env: str, variant: str, of: Callable[[Curve], float]) -> np.ndarray:
        """That number for (baseline, variant), [n, 2], for the n seeds that both have.

        Several runs of a seed, in pooled studies, count as one: with their mean, of steps the geometric one, and as
        censored if one of them is.
        """
        mean = {steps_of: gmean, censored_of: any}.get(of, np.mean)
        sides = [self.runs[env].get(name, []) for name in (self.config.baseline, variant)]
        theirs, ours = ({run.seed for run in side} for side in sides)
        return np.array(
            [[mean([of(run) for run in side if run.seed == seed]) for side in sides] for seed in sorted(theirs & ours)]
        ).reshape(-1, 2)


def steps_of(run: Curve) -> float:
    """Env steps to the threshold; all env steps if the run did not reach it."""
    return float(run.steps[-1] if run.reached is None else run.reached)


def censored_of(run: Curve) -> bool:
    """Whether the run ended before it reached the threshold, so that `steps_of` is a lower bound."""
    return run.reached is None


def read_study(out: Path) -> Study:
    """Read the directory of a study, without the runs that made no update.

    Raises:
        ConfigError: if the directory holds no finished run of a study.
    """
    require_files(out, (STUDY, RUNS, CURVES), "python -m recipes.study writes it")
    config, rows = parse_config(load_config(out / STUDY), StudyConfig), read_rows(out / RUNS)
    columns = (config.column, *config.also)
    every = {(curve.env, curve.group, curve.seed): curve for curve in read_table(out / CURVES, columns, ["variant"])}
    found: defaultdict[tuple[str, str], list[Curve]] = defaultdict(list)
    for row in rows:
        # earlier versions stopped where the random initial network reached the threshold
        if not int(row["updates"]):
            continue
        threshold, reached = (float(row[key]) if row[key] else None for key in ("threshold", "reached"))
        own = {"threshold": threshold, "reached": reached, "stopped": reaches(float(row["last"]), threshold)}
        curve = every[row["env"], row["variant"], int(row["seed"])]
        found[row["env"], row["variant"]].append(replace(curve, column=config.column, **own))
    runs = {env: {name: found[env, name] for name in config.variants if found[env, name]} for env in config.envs}
    preset, source = preset_of(config), config.name
    if not out.resolve().is_relative_to(RESULTS) and (preset is None or preset != replace(config, seeds=preset.seeds)):
        source = str(out / STUDY)
        config.claims = config.claims if preset is None else {}  # those of the study in recipes/conf hold for it alone
    return Study(config, rows, {env: variants for env, variants in runs.items() if variants}, source)


def pool(studies: Sequence[Study]) -> Study:
    """The runs of several studies as those of one, of the environments and variants that all of them have.

    The configuration is that of the first.
    """
    runs: dict[str, dict[str, list[Curve]]] = defaultdict(dict)
    for env, variants in studies[0].runs.items():
        for name in variants:
            if all(name in each.runs.get(env, {}) for each in studies):
                runs[env][name] = [run for each in studies for run in each.runs[env][name]]
    return replace(studies[0], rows=[row for each in studies for row in each.rows], runs=runs)


def preset_of(config: StudyConfig) -> StudyConfig | None:
    """The study of this name in recipes/conf; None if there is none."""
    path = CONF / "study" / f"{config.name}.yaml"
    return parse_config(load_config(path), StudyConfig) if path.is_file() else None


def study_directory(name: str) -> Path:
    """The directory of a study, given by name or directory; runs/study has priority over recipes/results.

    Raises:
        ConfigError: if there is no such directory.
    """
    own = Path("runs/study")
    for place in (own / name, RESULTS / name, Path(name)):
        if (place / RUNS).is_file() or (place == Path(name) and place.is_dir()):
            return place
    names = sorted({path.parent.name for place in (own, RESULTS) for path in place.glob(f"*/{RUNS}")})
    hint = did_you_mean(name, names)
    raise ConfigError(f"study={name}: no finished runs there, in {own} or in the published results{hint}")


def format_median(steps: np.ndarray, censored: np.ndarray) -> str:
    """The text of the median of steps [n]; "≥" marks a lower bound."""
    median, bounded = curves.median_with_bound(steps, censored)
    return f"{'≥ ' * bounded}{median:,.0f}"


def bound_of(censored: np.ndarray | None) -> str:
    """What a ratio of steps is if runs of (baseline, variant), [n, 2], are censored: "≥", "≤" or, if of both, "~"."""
    if censored is None or not censored.any():
        return ""
    return "~" if censored.any(0).all() else "≤" if censored[:, 0].any() else "≥"


def format_ratio(pairs: np.ndarray, censored: np.ndarray) -> str:
    """The text of the geometric mean of ratios with its interval, marked as a bound if runs are censored.

    Args:
        pairs: steps of (baseline, variant) for each seed, [n, 2].
        censored: whether these runs ended before they reached the threshold, [n, 2].
    """
    if censored.all():
        return NEITHER
    text = f"{bound_of(censored)} {intervals.geometric_mean_ratio(pairs):.2f}".strip()
    # If the variant never reached the threshold, the interval would show the spread of the baseline alone.
    if censored[:, 1].all() or len(pairs) < 2:
        return text
    low, high = intervals.ratio_interval(pairs[:, 1], pairs[:, 0])
    return f"{text} [{low:.2f}, {high:.2f}]"


def p_value_of(pairs: np.ndarray, censored: np.ndarray) -> float:
    """The p value of a comparison, of paired log ratios or of the log-rank test.

    The latter if runs are censored, except where their full lengths could only move the mean ratio further from 1.
    """
    ratios = np.log(pairs[:, 1] / pairs[:, 0])
    is_further = {"": True, "≥": ratios.mean() > 0, "≤": ratios.mean() < 0, "~": False}[bound_of(censored)]
    return intervals.paired_p_value(ratios) if is_further else intervals.censored_p_value(pairs, censored)


def format_p_value(value: float) -> str:
    """The text of a p value; empty if there is none."""
    return "" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def comparison(pairs: np.ndarray, censored: np.ndarray) -> tuple[str, str]:
    """The texts of the ratio and of its p value."""
    return format_ratio(pairs, censored), format_p_value(p_value_of(pairs, censored))


def last_value(run: Curve, column: str) -> float:
    """The mean of a column over the last tenth of the evaluations of a run."""
    return float(np.mean(run.values[column][-math.ceil(len(run.steps) / 10) :]))


def result_of(study: Study, env: str, variant: str) -> list[str]:
    """The cells of a variant's row in the table; `caption` defines them."""
    steps, censored = study.values(env, variant, steps_of), study.values(env, variant, censored_of)
    pairs = study.pairs(env, variant, steps_of), study.pairs(env, variant, censored_of)
    compared = variant != study.config.baseline and len(pairs[0])
    return [
        f"{(~censored).sum()} of {len(steps)}",
        format_median(steps, censored),
        f"{'≥ ' * bool(censored.any())}{steps.mean():,.0f}",
        *(comparison(*pairs) if compared else ("", "")),
        study.config.claims.get(env, {}).get(variant, ""),
        *last_evaluations(study, env, variant, study.config.column),
    ]


def last_evaluations(study: Study, env: str, variant: str, column: str) -> tuple[str, str]:
    """The texts of the mean over seeds, and of the mean difference to the baseline; empty if runs differ in length.

    They are those of the means of each run over the last tenth of its evaluations. Runs of an environment that differ
    in length have stopped at their threshold: their last evaluations say when, not how well they did in the end.
    """
    if len({run.steps[-1] for runs in study.runs[env].values() for run in runs}) > 1:
        return "", ""

    of = partial(last_value, column=column)
    values, pairs = study.values(env, variant, of), study.pairs(env, variant, of)
    largest = max(np.abs(study.values(env, name, of)).max() for name in study.runs[env])
    form = "{:.2f}" if largest < 10 else "{:.1f}"
    mean, difference = form.format(values.mean()), ""
    if len(values) > 1:
        mean = f"{{}} [{form}, {form}]".format(mean, *intervals.mean_interval(values))
    if variant != study.config.baseline and len(pairs):
        difference = form.format((pairs[:, 1] - pairs[:, 0]).mean())
        if len(pairs) > 1:
            ends = intervals.difference_interval(pairs[:, 1], pairs[:, 0])
            difference = f"{{}} [{form}, {form}]".format(difference, *ends)
    return mean, difference


def caption(config: StudyConfig) -> str:
    """Explain the columns of the table."""
    baseline = figures.label(config.baseline)
    return (
        f"Steps: environment steps to the threshold. Ratio: steps of the variant divided by those of {baseline} with "
        "the same seed, geometric mean over the seeds that both have; 0.5 means half as many steps, 2 twice as many. "
        "A run that did not reach the threshold counts with its full length. This makes a number a lower bound (≥) or "
        "an upper bound (≤); ~ marks a ratio that is no bound, because both sides have such runs. A run that stopped "
        "before its first update is left out. p: two-sided, of a t test of the paired log ratios; of a log-rank test "
        "if runs did not reach the threshold, unless their full lengths could only move the ratio further from 1; not "
        "corrected for the number of rows. Last evaluations: the last "
        "tenth of each run, if all have the same length; their mean over seeds, and the mean difference to "
        f"{baseline} over pairs of the same seed. In brackets: 95 % intervals by Student's t over seeds; beside a "
        "bound, the interval of the bound."
    )


def format_table(study: Study) -> str:
    """A Markdown table with one row per environment and variant; `caption` defines its columns."""
    baseline = figures.label(study.config.baseline)
    steps = ("reached", "steps: median", "mean", f"ratio to {baseline}", "p", "in the source")
    head = (*steps, "last evaluations: mean", f"difference to {baseline}")
    return _table(study, head, partial(result_of, study))


def format_further_columns(study: Study) -> str:
    """A Markdown table of the last evaluations in the columns of study.also, as in the columns of the other table."""
    names, baseline = study.config.also, figures.label(study.config.baseline)
    pairs = ((f"last evaluations of {figures.label(name)}: mean", f"difference to {baseline}") for name in names)

    def cells(env: str, variant: str) -> list[str]:
        return [*chain(*(last_evaluations(study, env, variant, name) for name in names))]

    return _table(study, [*chain(*pairs)], cells)


def _table(study: Study, head: Sequence[str], cells_of: Callable[[str, str], Sequence[str]]) -> str:
    lines = [
        (figures.env_label(env), figures.label(name), *cells_of(env, name))
        for env, variants in study.runs.items()
        for name in variants
    ]
    return "|" + markdown(("", "variant", *head), lines)[2:]  # the first column has no title


def conclusions(study: Study) -> list[str]:
    """A sentence for each environment and variant: its steps beside those of the baseline, as in the table."""
    baseline, sentences = study.config.baseline, []
    for env, variants in study.runs.items():
        for variant in variants:
            seeds = len(study.pairs(env, variant, steps_of))
            if variant == baseline or not seeds:
                continue
            (_, _, ours, ratio, *_), (_, _, theirs, *_) = (result_of(study, env, name) for name in (variant, baseline))
            reached = not study.values(env, variant, censored_of).all()
            found = "reached the threshold after" if reached else "did not reach the threshold in"
            end = "neither reached it" if ratio == NEITHER else f"{ratio} times as many"
            subject, other, place = figures.label(variant), figures.label(baseline), figures.env_label(env)
            count = f"{seeds} seed{'s' * (seeds > 1)}"
            sentences.append(f"{place}: {subject} {found} {ours} steps, {other} after {theirs}: {end} ({count})")
    return sentences


def provenance(study: Study) -> str:
    """Command, seeds, commits and versions of torch that produced the study."""
    seeds = sorted({int(row["seed"]) for row in study.rows})
    commits, versions = (sorted({row[key] for row in study.rows}) for key in ("commit", "torch"))
    command = f"python -m recipes.study study={study.source}"
    return f"{command}; seeds {seeds[0]} to {seeds[-1]}; commit {', '.join(commits)}; torch {', '.join(versions)}"


def panels_of(variants: Sequence[str], baseline: str) -> list[list[str]]:
    """The variants in each panel of learning curves: the baseline, if it has runs, and at most LINES others."""
    others = [variant for variant in variants if variant != baseline]
    count = -(-len(others) // LINES) or 1
    size = -(-len(others) // count)
    first = [name for name in variants if name == baseline]
    return [first + others[place * size : (place + 1) * size] for place in range(count)]


def draw_steps(axes: Axes, study: Study, env: str, styles: Mapping[str, figures.Look]) -> dict[str, Artist]:
    """Draw the steps of each run to the threshold, with their median, in a row per variant.

    Returns:
        The entries of the legend for marks that are not those of a variant.
    """
    variants, entries = [*study.runs[env]], {}

    def grey(marker: str) -> Artist:
        return figures.sample_line(figures.Look(figures.GREY, marker), linestyle="")

    for place, variant in enumerate(variants):
        steps, censored = (study.values(env, variant, of) for of in (steps_of, censored_of))
        beside = place + (np.linspace(-0.3, 0.3, len(steps)) if len(steps) > 1 else np.zeros(1))
        color, marker = styles[variant]
        axes.scatter(steps[~censored], beside[~censored], s=13, color=color, alpha=0.5, linewidth=0)
        axes.scatter(steps[censored], beside[censored], s=20, color=color, marker="x", linewidth=1)
        if censored.any():
            entries["run that did not reach the threshold"] = grey("x")
        median, bounded = curves.median_with_bound(steps, censored)
        if bounded:
            marker = ">"
            entries["lower bound of a median"] = grey(marker)
        axes.plot(median, place, color=color, marker=marker, **MEDIAN)
    axes.set_xlim(0, None)
    axes.set_yticks(range(len(variants)), [figures.label(variant) for variant in variants])
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return entries


@figures.styled
def draw(study: Study) -> Figure:
    """Draw the figure: for each environment learning curves, then the steps of each seed, with their median."""
    config = study.config
    panels = [(env, panel) for env, of in study.runs.items() for panel in (*panels_of([*of], config.baseline), None)]
    styles = figures.looks(dict.fromkeys(variant for variants in study.runs.values() for variant in variants))
    runs_of = [runs for variants in study.runs.values() for runs in variants.values()]
    window = 2 * (max(len(run.steps) for runs in runs_of for run in runs) // 40) + 1
    largest = max(run.steps[-1] for runs in runs_of for run in runs)
    entries: dict[str, Artist | tuple[Artist, ...]] = dict(curve_entries(styles))
    figure, axes_of = figures.panel_grid(len(panels))
    for axes, (env, panel) in zip(axes_of, panels, strict=True):
        axes.set_title(figures.env_label(env))
        if panel is None:
            entries |= draw_steps(axes, study, env, styles)
            axes.set_xlabel(figures.count_steps(axes.xaxis, largest, "steps to the threshold"))
            continue
        groups = {variant: study.runs[env][variant] for variant in panel}
        draw_curves(axes, groups, config.column, styles, window)
        axes.set_xlabel(figures.count_steps(axes.xaxis, largest))
        if (threshold := groups[panel[0]][0].threshold) is not None:
            figures.threshold_line(axes, threshold, entries, len(study.runs) > 1)
    note = curve_note(runs_of, window) + " Small dots: runs; large markers: medians."
    figures.explain(figure, entries, note)
    return figure


def full_table(study: Study) -> str:
    """The table with its caption and its provenance."""
    tables = [caption(study.config), format_table(study)]
    tables += [format_further_columns(study)] if study.config.also else []
    return "\n\n".join([*tables, provenance(study)]) + "\n"


def report(out: Path, baseline: str | None = None) -> str:
    """The table and the conclusions of a study.

    Args:
        out: directory of the study. Table and figure are written there.
        baseline: compare with this variant instead of the study's baseline, and write nothing. Default: None.

    Raises:
        ConfigError: if the study has no variant of this name.
    """
    study = read_study(out)
    if baseline is None:
        (out / TABLE).write_text(full_table(study), encoding="utf-8")
        figures.save(draw(study), *figures.files_of(out / FIGURE), description=provenance(study))
    elif baseline not in study.config.variants:
        raise ConfigError(f"--baseline {baseline}: the variants of {out} are {', '.join(study.config.variants)}")
    else:
        study = replace(study, config=replace(study.config, baseline=baseline))
    return "\n".join([full_table(study), *conclusions(study)])


def report_pooled(outs: Sequence[Path], figure: Path) -> str:
    """The conclusions of several studies together, see `pool`. Their figure is written to `figure`."""
    studies = [read_study(out) for out in outs]
    study, origin = pool(studies), "; ".join(map(provenance, studies))
    figures.save(draw(study), *figures.files_of(figure), description=origin)
    return "\n".join([*conclusions(study), origin])
