"""The results of recipes.benchmark as a CSV and as tables."""

import math
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from recipes.common.files import code_version, markdown, rewrite

LIBRARIES = ("torch", "torchrl", "tensordict", "numba", "numpy", "gymnasium", "cpprb", "stable_baselines3")
UNIFORM_ONLY, PER_ONLY = "TorchRL uniform, cycle only", "TorchRL PER, cycle only"
# measurement -> title of its table, header of a column
TABLES = {
    "whole": ("whole update, {capacity:,} slots, CPU ms (times {reference})", "{case}, batch {batch_size}"),
    "extend": ("write rows to {capacity:,} slots, µs (times {reference})", "{case} {written}"),
    "cycle": ("sample + update, {capacity:,} slots, µs (times {reference})", "batch {batch_size} {case}"),
    "slices": ("write {written} rows, draw slices, µs (times {reference})", "{capacity:,} slots"),
    # times: what a sampler adds, divided by what TorchRL's PER adds
    "updates": ("update, {capacity:,} slots, µs (beyond uniform; times TorchRL's PER)", "{case}, batch {batch_size}"),
    "compile": ("compile write {written}, cycle {batch_size} of {capacity:,}, s (times {reference})", "{case} cache"),
    "training": ("training, CPU time of one environment step, µs (times {reference})", "{case}"),
}


@dataclass
class Row:
    """One number.

    Args:
        measurement: "whole", "extend", "cycle", "slices", "updates", "compile" or "training".
        case: what is measured: "add" or "extend"; "cold" or "warm"; "DQN", "TD3" or "SAC"; "" for slices and cycles,
            "after a write of 64" for cycles with a write.
        contender: name of the measured buffer or loop.
        reference: name of the contender that this one is compared with.
        capacity: capacity of the buffer.
        batch_size: batch size of the samples. Default: 0, no samples.
        written: rows that each call writes. Default: 0.
        microseconds: median time of a write, cycle, update or environment step, or the compile time. Default: nan, not
            yet measured.
        added: this time minus that of the reference (updates). Default: None.
        ratio: this time divided by that of the reference; for updates, `added` divided by what TorchRL's PER adds to
            its uniform sample. Default: None, the reference was not measured.
    """

    measurement: str
    case: str
    contender: str
    reference: str
    capacity: int
    batch_size: int = 0
    written: int = 0
    microseconds: float = math.nan
    added: float | None = None
    ratio: float | None = None

    def work(self) -> tuple[object, ...]:
        """What was measured. Contenders that did the same work are compared."""
        return self.measurement, self.case, self.capacity, self.batch_size, self.written

    def cell(self) -> str:
        """The number, and in brackets its comparison."""
        scale = {"compile": 1e6, "whole": 1e3}.get(self.measurement)
        value = f"{self.microseconds / scale:.1f}" if scale else f"{self.microseconds:,.0f}"
        notes = [f"{self.added:+,.0f}"] if self.added is not None else []
        notes += [f"{self.ratio:.2f}"] if self.ratio is not None else []
        return f"{value} ({'; '.join(notes)})" if notes else value


def compare(rows: list[Row]) -> None:
    """Set `added` and `ratio` of all rows whose references were measured."""
    times = {(row.work(), row.contender): row.microseconds for row in rows}
    for row in rows:
        reference = times.get((row.work(), row.reference))
        if reference is None:
            continue
        if row.measurement != "updates":
            row.ratio = row.microseconds / reference
        elif row.contender != row.reference:
            row.added = row.microseconds - reference
            uniform, per = (times.get((row.work(), name), 0.0) for name in (UNIFORM_ONLY, PER_ONLY))
            row.ratio = row.added / (per - uniform) if per > uniform > 0 else None


def tables(rows: list[Row]) -> str:
    """The results as Markdown tables with a line per contender."""
    found: dict[str, dict[str, dict[str, str]]] = {}  # title -> contender -> column -> cell
    for row in rows:
        title, column = (text.format(**vars(row)).strip() for text in TABLES[row.measurement])
        found.setdefault(title, {}).setdefault(row.contender, {})[column] = row.cell()
    parts = []
    for title, cells in found.items():
        columns = list(dict.fromkeys(column for line in cells.values() for column in line))
        lines = [(contender, *(line.get(column, "") for column in columns)) for contender, line in cells.items()]
        parts.append(markdown((title, *columns), lines) + "\n")
    return "\n".join(parts)


def save(rows: list[Row], device: torch.device, directory: Path) -> None:
    """Print the tables and write them to benchmark.md, and the numbers to benchmark.csv."""
    compare(rows)
    label = {"chip": chip(device), "torch": torch.__version__, "commit": code_version()}
    path = directory / "benchmark.csv"
    rewrite(path, [asdict(row) | label for row in rows])
    installed = {each.name.replace("-", "_"): each.version for each in metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in LIBRARIES if name in installed]
    text = f"{tables(rows)}\n{'; '.join([', '.join(versions), label['chip'], 'commit ' + label['commit']])}\n"
    path.with_suffix(".md").write_text(text)
    print(text, path, sep="\n")


def chip(device: torch.device) -> str:
    """The model name of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", info.read_text() if info.is_file() else "", re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()
