"""The results of recipes.benchmark as a table, a CSV and a figure."""

import csv
import math
import platform
from dataclasses import astuple, dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from recipes.study import code_version

REPLAY_BASELINE, TRAINING_BASELINE = "torchrl PrioritizedSampler", "torchrl DQN, uniform replay"
DEVICE_BASELINE = "eager torchrl PrioritizedSampler, CPU trees"
BASELINES = (REPLAY_BASELINE, TRAINING_BASELINE, DEVICE_BASELINE)
LIBRARIES = ("torch", "torchrl", "tensordict", "torchrl_replay_ext", "gymnasium", "numpy")
UNITS = {"replay": "one cycle", "training": "CPU time of one environment step"}
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
        measurement: "replay", "training" or "capacity"; on a device "cycles", "dqn" or "td3".
        capacity: capacity of the buffer.
        batch_size: batch size of the samples.
        contender: name of the measured buffer or loop.
        microseconds: median time of a cycle, an update or an env step. Default: nan, not yet measured.
        times_faster: time of TorchRL's baseline divided by this time. Default: None, the baseline was not measured.
        written: rows that each cycle writes. Default: 0.
        compile_seconds: duration of the first call of a graph with an empty compiler cache. Default: None, not compiled
            or not measured.
        times_smallest: this time divided by the contender's time at the smallest capacity. Default: None, for
            measurements other than "capacity".
        kernels: operations of an eager cycle or update that launch a kernel. Default: None, not counted.
        chip: model name of the GPU or CPU. Default: "", unknown.
        torch: version of torch. Default: "", unknown.
        commit: version of the code. Default: "", unknown.
    """

    measurement: str
    capacity: int
    batch_size: int
    contender: str
    microseconds: float = math.nan
    times_faster: float | None = None
    written: int = 0
    compile_seconds: float | None = None
    times_smallest: float | None = None
    kernels: int | None = None
    chip: str = ""
    torch: str = ""
    commit: str = ""


def compare(rows: list[Row]) -> None:
    """Set `times_faster` of rows whose baseline was measured, and `times_smallest` of capacity rows."""
    baselines = {
        (row.measurement, row.batch_size, row.written): row.microseconds for row in rows if row.contender in BASELINES
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
            baseline = baselines.get((row.measurement, row.batch_size, row.written))
        row.times_faster = baseline / row.microseconds if baseline is not None else None


def print_table(rows: list[Row]) -> None:
    """Print one line per row."""
    width = max(len(row.contender) for row in rows)
    print(
        f"{'measured':<8} {'capacity':>9} {'batch':>6} {'written':>8}  {'contender':<{width}} {'µs':>8} "
        f"{'times faster':>13} {'× smallest':>11} {'compile s':>10} {'kernels':>8}"
    )
    for row in rows:
        print(
            f"{row.measurement:<8} {row.capacity:>9} {row.batch_size:>6} {row.written:>8}  {row.contender:<{width}} "
            f"{row.microseconds:>8.1f} {_number(row.times_faster, 2):>13} {_number(row.times_smallest, 2):>11} "
            f"{_number(row.compile_seconds, 1):>10} {_number(row.kernels, 0):>8}"
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
        int(line["kernels"]) if line.get("kernels") else None,
        *(line.get(name) or "" for name in ("chip", "torch", "commit")),
    )


def plot(rows: list[Row], path: Path) -> None:
    """Draw bars, one panel per measurement and batch size; or lines (see LINES), one panel per kind of cycle."""
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        kind = row.written if row.measurement in LINES else row.batch_size
        panels.setdefault((row.measurement, kind), []).append(row)
    heights = [13 if measurement in LINES else len(panel) + 2 for (measurement, _), panel in panels.items()]
    figure = Figure(figsize=(9, 0.32 * sum(heights) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, ((measurement, kind), panel) in zip(all_axes, panels.items(), strict=True):
        if measurement in LINES:
            axes.set_title(f"extend({kind}) + sample + update" if kind else "sample + update")
            LINES[measurement](axes, panel)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
        else:
            _draw_bars(axes, measurement, kind, panel)
    if rows[0].chip:
        figure.suptitle(f"{rows[0].chip}, torch {rows[0].torch}, commit {rows[0].commit}", fontsize="medium")
    figure.savefig(path, dpi=120)


def _by_contender(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.contender, []).append(row)
    return found


def _draw_bars(axes: Axes, measurement: str, batch_size: int, panel: list[Row]) -> None:
    colors = ["tab:grey" if row.contender in BASELINES else "tab:blue" for row in panel]
    bars = axes.barh([row.contender for row in panel], [row.microseconds for row in panel], color=colors, log=True)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    times = [row.microseconds for row in panel]
    axes.set_xlim(10 ** np.floor(np.log10(min(times) / 1.1)), 2 * max(times))
    axes.xaxis.set_minor_formatter(NullFormatter())
    unit = UNITS.get(measurement, "one update")
    axes.set(title=f"{measurement}, batch {batch_size}", xlabel=f"{unit} in µs, lower is better")


def _draw_capacities(axes: Axes, panel: list[Row]) -> None:
    for contender, rows in _by_contender(panel).items():
        ratios = [row.times_smallest or 1.0 for row in rows]
        style = "-" if contender.startswith("compiled") else "--"
        label = f"{contender} ({rows[0].microseconds:.0f} µs at {rows[0].capacity:,})"
        axes.plot([row.capacity for row in rows], ratios, style, marker=".", label=label)
    axes.set(xscale="log", xlabel="capacity of the full buffer", ylabel="time / time at smallest (lower is better)")
    axes.set_ylim(bottom=0)


def _draw_batch_sizes(axes: Axes, panel: list[Row]) -> None:
    # one line style per mode and one colour per sampler
    styles = {"eager": "--", "compiled": "-", "CUDA graph": "-.", "captured": ":"}
    colors: dict[str, str] = {}
    for contender, rows in _by_contender(panel).items():
        mode = next(mode for mode in styles if contender.startswith(mode))
        sampler = contender.removeprefix(mode)
        color = colors.setdefault(sampler, f"C{len(colors)}")
        times = [row.microseconds for row in rows]
        axes.plot([row.batch_size for row in rows], times, styles[mode], color=color, marker=".", label=contender)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="batch size", ylabel="one cycle in µs (lower is better)")


# measurements that are drawn as lines
LINES = {"capacity": _draw_capacities, "cycles": _draw_batch_sizes}


def label(rows: list[Row], device: torch.device) -> None:
    """Set the chip, the version of torch and the commit of all rows."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    commit = code_version()
    for row in rows:
        row.chip, row.torch, row.commit = chip, torch.__version__, commit


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
