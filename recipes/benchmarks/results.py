"""The results of recipes.benchmark as a table, a CSV and a figure."""

import csv
import platform
from dataclasses import astuple, dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

REPLAY_BASELINE, TRAINING_BASELINE = "torchrl PrioritizedSampler", "torchrl DQN, uniform replay"
LIBRARIES = ("torch", "torchrl", "tensordict", "torchrl_replay_ext", "gymnasium", "numpy")
PEERS = ("cpprb", "tianshou", "flashbax", "jax", "stable-baselines3")


class LeftOutError(Exception):
    """A contender cannot run on this host; the message says why."""


def peer(module: str) -> Any:
    """Import the module of a peer library.

    Raises:
        LeftOutError: if it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise LeftOutError(f"{module} cannot be imported ({error})") from error


@dataclass
class Row:
    """One row of the table.

    Args:
        measurement: "replay", "training" or "capacity".
        capacity: capacity of the buffer.
        batch_size: batch size of the samples.
        contender: name of the measured buffer or loop.
        microseconds: median time of a cycle or an env step.
        times_faster: time of TorchRL's baseline divided by this time. Default: None, the baseline was not measured.
        written: rows that each cycle writes. Default: 0.
        compile_seconds: duration of the first call of a graph with an empty compiler cache. Default: None, not compiled
            or not measured.
        times_smallest: this time divided by the contender's time at the smallest capacity. Default: None, for
            measurements other than "capacity".
    """

    measurement: str
    capacity: int
    batch_size: int
    contender: str
    microseconds: float
    times_faster: float | None = None
    written: int = 0
    compile_seconds: float | None = None
    times_smallest: float | None = None


def compare(rows: list[Row]) -> None:
    """Set `times_faster` of rows whose baseline was measured, and `times_smallest` of capacity rows."""
    baselines = {
        (row.measurement, row.batch_size): row.microseconds
        for row in rows
        if row.contender in (REPLAY_BASELINE, TRAINING_BASELINE)
    }
    by_capacity = sorted((row for row in rows if row.measurement == "capacity"), key=lambda row: -row.capacity)
    smallest = {(row.contender, row.written): row.microseconds for row in by_capacity}
    peers = {
        (row.capacity, row.written): row.microseconds
        for row in by_capacity
        if row.contender == f"eager {REPLAY_BASELINE}"
    }
    for row in rows:
        if row.measurement == "capacity":
            baseline = peers.get((row.capacity, row.written))
            row.times_smallest = row.microseconds / smallest[row.contender, row.written]
        else:
            baseline = baselines.get((row.measurement, row.batch_size))
        row.times_faster = baseline / row.microseconds if baseline is not None else None


def print_table(rows: list[Row]) -> None:
    """Print one line per row."""
    width = max(len(row.contender) for row in rows)
    print(
        f"{'measured':<8} {'capacity':>9} {'batch':>6} {'written':>8}  {'contender':<{width}} {'µs':>8} "
        f"{'times faster':>13} {'× smallest':>11} {'compile s':>10}"
    )
    for row in rows:
        print(
            f"{row.measurement:<8} {row.capacity:>9} {row.batch_size:>6} {row.written:>8}  {row.contender:<{width}} "
            f"{row.microseconds:>8.1f} {_number(row.times_faster, 2):>13} {_number(row.times_smallest, 2):>11} "
            f"{_number(row.compile_seconds, 1):>10}"
        )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def write_csv(rows: list[Row], path: Path) -> None:
    """Write one line per row to a CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows(astuple(row) for row in rows)


def read_csv(path: Path) -> list[Row]:
    """The rows of a file written by write_csv. Columns that an older file lacks have their defaults.

    Raises:
        ValueError: if the file was not written by write_csv.
    """
    try:
        with path.open(newline="") as file:
            return [_row(line) for line in csv.DictReader(file)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a CSV of recipes.benchmark ({type(error).__name__}: {error})") from error


def _row(line: dict[str, str]) -> Row:
    def number(name: str) -> float | None:
        return float(line[name]) if line.get(name) else None

    return Row(
        line["measurement"],
        int(line["capacity"]),
        int(line["batch_size"]),
        line["contender"],
        float(line["microseconds"]),
        number("times_faster"),
        int(line.get("written") or 0),
        number("compile_seconds"),
        number("times_smallest"),
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw bars, one panel per measurement and batch size; for capacity, lines, one panel per kind of cycle."""
    bars: dict[tuple[str, int], list[Row]] = {}
    lines: dict[int, dict[str, list[Row]]] = {}
    for row in rows:
        if row.measurement == "capacity":
            lines.setdefault(row.written, {}).setdefault(row.contender, []).append(row)
        else:
            bars.setdefault((row.measurement, row.batch_size), []).append(row)
    heights = [len(panel) + 2 for panel in bars.values()] + [13] * len(lines)
    figure = Figure(figsize=(9, 0.32 * sum(heights) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, ((measurement, batch_size), panel) in zip(all_axes, bars.items(), strict=False):
        _draw_bars(axes, measurement, batch_size, panel)
    for axes, (written, contenders) in zip(all_axes[len(bars) :], lines.items(), strict=True):
        _draw_capacities(axes, written, contenders)
    figure.savefig(path, dpi=120)


def _draw_bars(axes: Axes, measurement: str, batch_size: int, panel: list[Row]) -> None:
    colors = ["tab:grey" if row.contender in (REPLAY_BASELINE, TRAINING_BASELINE) else "tab:blue" for row in panel]
    bars = axes.barh([row.contender for row in panel], [row.microseconds for row in panel], color=colors, log=True)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    times = [row.microseconds for row in panel]
    axes.set_xlim(10 ** np.floor(np.log10(min(times) / 1.1)), 2 * max(times))
    axes.xaxis.set_minor_formatter(NullFormatter())
    what = "one cycle" if measurement == "replay" else "CPU time of one environment step"
    axes.set(title=f"{measurement}, batch {batch_size}", xlabel=f"{what} in µs, lower is better")


def _draw_capacities(axes: Axes, written: int, contenders: dict[str, list[Row]]) -> None:
    for contender, rows in contenders.items():
        ratios = [row.times_smallest or 1.0 for row in rows]
        style = "-" if contender.startswith("compiled") else "--"
        label = f"{contender} ({rows[0].microseconds:.0f} µs at {rows[0].capacity:,})"
        axes.plot([row.capacity for row in rows], ratios, style, marker=".", label=label)
    axes.set(xscale="log", xlabel="capacity of the full buffer", ylabel="time / time at smallest (lower is better)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"extend({written}) + sample + update" if written else "sample + update")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def versions() -> str:
    """The versions of the installed libraries, and the CPU."""
    found = []
    for library in LIBRARIES + PEERS:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{', '.join(found)}; {cpu_model()}"


def cpu_model() -> str:
    """The model name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
