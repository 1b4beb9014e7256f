"""The style of all figures: sizes, colours, labels, legend and files.

A figure is 8 inches wide. A README shows it about 800 pixels wide, so its text then has the size of the page's text.
Each sampler has one colour and one marker in all figures. The colours are those of Okabe and Ito and of Tol, which
remain distinct for colour-blind readers.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from recipes.common.errors import ConfigError

WIDTH = 8.0  # inches
PANEL_HEIGHT = 2.9
FORMATS = (".png", ".svg")
GREY = "#6f6f6f"
NOTE_WIDTH = 118  # characters in a line of the note below a figure
# inches that a legend needs per character, and per column beyond its text
CHARACTER, HANDLE = 0.075, 0.65

STYLE: list[str | dict[str, Any]] = [
    "default",
    {
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.labelsize": 9.5,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.fontsize": 9.5,
        "legend.title_fontsize": 8.5,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "xtick.labelcolor": "black",
        "ytick.labelcolor": "black",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.7,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "errorbar.capsize": 3,
        "path.simplify": True,
        "path.simplify_threshold": 0.5,
        # the same identifiers in every run
        "svg.hashsalt": "torchrl_replay_ext",
        # text as text: half the size of text as outlines
        "svg.fonttype": "none",
    },
]


class Look(NamedTuple):
    """How one sampler is drawn."""

    color: str
    marker: str


LOOKS = {
    "uniform": Look("#555555", "o"),
    "per": Look("#0072b2", "s"),
    "rank": Look("#56b4e9", "v"),
    "reaper": Look("#d55e00", "^"),
    "recency": Look("#999933", "X"),
    "lap": Look("#332288", "<"),
    "sset": Look("#009e73", "D"),
    "sset_per": Look("#e69f00", "P"),
    "dper": Look("#cc79a7", "p"),
    "dper_uniform": Look("#882255", "h"),
    "acer": Look("#000000", "d"),
}
# Names in the experiments that mean a sampler above.
SAME = {
    "rank-based": "rank",
    "proportional": "per",
    "PER-g": "per",
    "ReaPER-g": "reaper",
    "history 60": "sset",
    "history 60 + PER": "sset_per",
    "oracle": "acer",
}
# the colours of the rarer samplers first
OTHER_COLORS = ("#882255", "#56b4e9", "#cc79a7", "#999933", "#0072b2", "#d55e00", "#009e73", "#e69f00")
OTHER_MARKERS = ("s", "^", "D", "P", "v", "p", "X", "h", "<", ">", "*")

LABELS = {
    "uniform": "uniform replay",
    "per": "PER",
    "rank": "rank-based PER",
    "reaper": "ReaPER",
    "recency": "recency",
    "lap": "LAP",
    "sset": "event tables",
    "sset_per": "event tables + PER",
    "reverse sweep": "event tables, goal event only",
    "reverse sweep, history 1": "goal event only, history 1",
    "reverse sweep, history 200": "goal event only, history 200",
    "dper": "DPER",
    "dper_uniform": "DPER, uniform critic",
    "acer": "ACER",
    "per terminal": "PER, time limits terminal",
    "reaper terminal": "ReaPER, time limits terminal",
    "replay ratio 0": "no replay",
    "no Retrace": "importance sampling, no Retrace",
    "no stochastic dueling network": "two networks, not dueling",
    "rank-based": "rank-based PER",
    "proportional": "proportional PER",
    "PER-g": "greedy PER",
    "ReaPER-g": "greedy ReaPER",
    "history 60": "event tables, history 60",
    "history 200": "event tables, history 200",
    "history 1": "event tables, history 1",
    "history 60 + PER": "event tables + PER, history 60",
    # columns of progress.csv
    "return_mean": "return",
    "training_return": "return, last 100 training episodes",
    "q_sum": "sum of all Q-values",
    "q_error": "error of Q (RMS)",
    "q_mean": "mean Q-value",
    "return_shifted": "return from the shifted start",
    "return_lava": "return, lava",
    "return_gap": "return, gap",
    "return_door": "return, door",
    # environments
    "cartpole": "CartPole",
    "lunarlander": "Lunar Lander",
    "lunarlander_continuous": "Lunar Lander, continuous",
    "threerooms": "Three Rooms",
    "tworooms": "Two Rooms",
    "deepsea": "Deep Sea",
    "minatar_space_invaders": "Space Invaders (MinAtar)",
    "minatar_breakout": "Breakout (MinAtar)",
    "obstacles": "Obstacle Course",
    "skills": "Randomized Skills",
    "doorkey": "DoorKey",
    "lavagap": "LavaGap",
    "halfcheetah": "HalfCheetah",
    "bipedalwalker": "Bipedal Walker",
    "invertedpendulum": "Inverted Pendulum",
}
SYMBOLS = {"alpha": "α", "omega": "ω", "eta0": "η₀"}

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def styled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function that draws a figure or writes it: it uses the project's style, whatever matplotlibrc says."""
    return style.context(STYLE)(function)


def label(name: str) -> str:
    """The text for a sampler, a variant of a study or a column: "sset" is "event tables", "alpha .4" is "α = 0.4"."""
    if name in LABELS:
        return LABELS[name]
    text = re.sub(
        rf"\b({'|'.join(SYMBOLS)}) (\d*\.?\d+)", lambda found: f"{SYMBOLS[found[1]]} = {float(found[2]):g}", name
    )
    return re.sub(r"(= \S+) (?=[αωη])", r"\1, ", text)


def env_label(name: str) -> str:
    """The name of an environment as a title: "threerooms" is "Three Rooms", "atari/ms_pacman" is "Ms Pacman"."""
    return LABELS.get(name) or " ".join(word.capitalize() for word in name.split("/")[-1].split("_"))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A colour and a marker for each name, samplers first: a sampler always has its own, other names get the rest."""
    order = list(LOOKS)
    names = sorted(names, key=lambda name: order.index(SAME.get(name, name)) if SAME.get(name, name) in LOOKS else 99)
    found = {name: LOOKS[SAME.get(name, name)] for name in names if SAME.get(name, name) in LOOKS}
    used = {look.color for look in found.values()}
    colors = [color for color in OTHER_COLORS if color not in used] or list(OTHER_COLORS)
    markers = [marker for marker in OTHER_MARKERS if marker not in {look.marker for look in found.values()}]
    for place, name in enumerate(name for name in names if name not in found):
        found[name] = Look(colors[place % len(colors)], markers[place % len(markers)])
    return found


def new_figure(height: float) -> Figure:
    """An empty figure of the usual width; its height is in inches. Only for functions that are `styled`."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def count_steps(axis: Axis, largest: float, text: str = "environment steps") -> str:
    """Mark an axis of steps in thousands or millions if they are many; return its label."""
    unit, name = next(
        (pair for pair in ((1e6, " (millions)"), (1e3, " (thousands)")) if largest >= 5 * pair[0]), (1.0, "")
    )
    axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(lambda value, _: f"{value / unit:g}")
    return text + name


def explain(figure: FigureBase, entries: Mapping[str, Artist | tuple[Artist, ...]], note: str) -> None:
    """Put the legend below all panels, under a note that says what lines, bands and dots mean.

    Args:
        figure: the figure.
        entries: an artist for each text of the legend.
        note: sentences on what is drawn.
    """
    figure.legend(
        list(entries.values()),  # pyright: ignore[reportArgumentType]: tuples of artists are allowed
        list(entries),
        loc="outside lower center",
        ncols=next((count for count in range(len(entries), 1, -1) if _width(list(entries), count) < WIDTH), 1),
        title="\n".join(textwrap.wrap(note, NOTE_WIDTH)),
        columnspacing=1.6,
        borderaxespad=0.2,
    )


def _width(texts: Sequence[str], count: int) -> float:
    """About the width in inches of a legend with `count` columns; inf if a column would be empty."""
    rows = -(-len(texts) // count)
    columns = [texts[start : start + rows] for start in range(0, len(texts), rows)]
    if len(columns) < count:
        return math.inf
    return sum(HANDLE + CHARACTER * max(map(len, column)) for column in columns)


def sample_line(look: Look, **keywords: Any) -> Line2D:
    """The line with a marker that stands for a sampler in a legend."""
    return Line2D([], [], color=look.color, marker=look.marker, **keywords)


def threshold_line(axes: Axes, value: float, entries: dict[str, Any], several: bool) -> None:
    """Draw the value to reach as a dashed line and add it to the entries of the legend.

    Args:
        axes: the panel.
        value: the threshold.
        entries: entries of the legend.
        several: whether other panels have other thresholds, so that the entry names none.
    """
    text = "threshold" if several else f"threshold {value:g}".replace("-", "−")
    entries[text] = axes.axhline(value, color=GREY, linestyle=(0, (4, 3)), linewidth=1.1, zorder=1.5)


def files_of(out: Path) -> list[Path]:
    """The PNG and the SVG that a figure named `out` is written to.

    Raises:
        ConfigError: if `out` ends in another format.
    """
    if out.suffix not in ("", *FORMATS):
        raise ConfigError(f"{out}: figures are written as {' and '.join(FORMATS)}; choose one of these endings or none")
    return [out.with_suffix(form) for form in FORMATS]


@styled
def save(figure: Figure, *paths: Path, description: str | None = None) -> None:
    """Write a figure; the endings of `paths` choose the formats. The same figure gives the same bytes.

    Args:
        figure: the figure.
        paths: files, each of one of the FORMATS.
        description: text for the metadata of the files, such as the command of a study. Default: None.
    """
    # without the date and the version of matplotlib
    removed: dict[str, dict[str, str | None]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
    for path in paths:
        metadata = removed[path.suffix] | ({} if description is None else {"Description": description})
        figure.savefig(path, dpi=160, metadata=metadata)
