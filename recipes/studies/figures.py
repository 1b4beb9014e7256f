"""The style of all figures: sizes, colours, labels, legend and files.

A figure is 8 inches wide. A README shows it about 800 pixels wide, so its text then has the size of the page's text.
Each sampler has one colour and one marker in all figures; figures.yaml lists them. The colours remain distinct for
colour-blind readers.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
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


class Look(NamedTuple):
    """How one sampler is drawn."""

    color: str
    marker: str


_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
STYLE: list[Any] = ["default", _TEXTS["style"]]
LOOKS = {name: Look(*look) for name, look in _TEXTS["looks"].items()}
SYMBOLS = {"alpha": "α", "omega": "ω", "eta0": "η₀"}

# Decorates a function that draws a figure or writes it: it uses the project's style, whatever matplotlibrc says.
styled = style.context(STYLE)


def label(name: str) -> str:
    """The text for a sampler, a variant of a study or a column: "sset" is "event tables", "alpha .4" is "α = 0.4"."""
    if name in _TEXTS["labels"]:
        return _TEXTS["labels"][name]
    pattern = rf"\b({'|'.join(SYMBOLS)}) (\d*\.?\d+)"
    text = re.sub(pattern, lambda found: f"{SYMBOLS[found[1]]} = {float(found[2]):g}", name)
    return re.sub(r"(= \S+) (?=[αωη])", r"\1, ", text)


def env_label(name: str) -> str:
    """The name of an environment as a title: "threerooms" is "Three Rooms", "atari/ms_pacman" is "Ms Pacman"."""
    return _TEXTS["labels"].get(name) or " ".join(word.capitalize() for word in name.split("/")[-1].split("_"))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A colour and a marker for each name, samplers first: a sampler always has its own, other names get the rest."""
    samplers = {name: _TEXTS["same"].get(name, name) for name in names}
    found = {name: LOOKS[samplers[name]] for name in samplers if samplers[name] in LOOKS}
    found = dict(sorted(found.items(), key=lambda item: [*LOOKS.values()].index(item[1])))
    others = [name for name in samplers if name not in found]
    used_colors, used_markers = {look.color for look in found.values()}, {look.marker for look in found.values()}
    colors = [color for color in _TEXTS["other_colors"] if color not in used_colors] or _TEXTS["other_colors"]
    markers = [marker for marker in _TEXTS["other_markers"] if marker not in used_markers]
    rest = {name: Look(colors[i % len(colors)], markers[i % len(markers)]) for i, name in enumerate(others)}
    return found | rest


def panel_grid(
    count: int, width: int = 2, height: float = PANEL_HEIGHT, *, sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, `width` side by side. Only for functions that are `styled`.

    `height`: height of a panel in inches. Default: PANEL_HEIGHT. `sharex`, `sharey`: see matplotlib's subplots.
    """
    width = min(width, count)
    rows = -(-count // width)
    figure = Figure(figsize=(WIDTH, rows * height + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [*figure.subplots(rows, width, squeeze=False, sharex=sharex, sharey=sharey).flat]
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def count_steps(axis: Axis, largest: float, text: str = "environment steps") -> str:
    """Mark an axis of steps in thousands or millions if they are many; return its label."""
    units = ((1e6, " (millions)"), (1e3, " (thousands)"), (1.0, ""))
    unit, name = next((pair for pair in units if largest >= 5 * pair[0]), units[-1])
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
        ncols=min(len(entries), max(1, int(WIDTH / (HANDLE + CHARACTER * max(map(len, entries)))))),
        title="\n".join(textwrap.wrap(note, NOTE_WIDTH)),
        columnspacing=1.6,
        borderaxespad=0.2,
    )


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
