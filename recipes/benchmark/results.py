"""The results of recipes.benchmark as a CSV and as tables."""

import csv
import math
import platform
from dataclasses import astuple, dataclass, field, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from recipes.common.files import code_version

LIBRARIES = ("torch", "torchrl", "tensordict", "torchrl_replay_ext", "gymnasium", "numpy")
PEERS = ("cpprb", "tianshou", "flashbax", "jax", "stable-baselines3")
# the contender that the others of a measurement are compared with
REFERENCES = {
    "extend": "TorchRL uniform",
    "cycle": "TorchRL PER",
    "compile": "uniform",
    "training": "TorchRL",
}
CYCLE_ONLY = ", cycle only"  # contenders of updates that are no whole updates
TORCHRL_MARGIN = f"TorchRL PER{CYCLE_ONLY}"


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
    """One number.

    Args:
        measurement: "extend", "cycle", "compile", "updates" or "training".
        case: what is measured: "add" or "extend"; "cold" or "warm"; the algorithm, such as "dqn"; "" for cycles.
        contender: name of the measured buffer or loop.
        capacity: capacity of the buffer.
        batch_size: batch size of the samples. Default: 0, no samples.
        written: rows that each call writes. Default: 0.
        microseconds: median time of a write, cycle, update or environment step, or the compile time. Default: nan, not
            yet measured.
        ratio: this time divided by that of the reference, see `reference`. Default: None, which was not measured.
        margin: this time minus that of the same update with uniform draws (updates). Default: None.
        margin_ratio: margin divided by the margin of TorchRL's PER cycle (updates). Default: None.
        kernels: operations of an eager cycle or update that launch a kernel (on a GPU). Default: None, not counted.
        chip: model name of the GPU or CPU. Default: "", unknown.
        torch: version of torch. Default: "", unknown.
        commit: version of the code. Default: "", unknown.
    """

    measurement: str
    case: str
    contender: str
    capacity: int
    batch_size: int = 0
    written: int = 0
    microseconds: float = math.nan
    ratio: float | None = None
    margin: float | None = None
    margin_ratio: float | None = None
    kernels: int | None = None
    chip: str = ""
    torch: str = ""
    commit: str = ""

    def where(self) -> tuple[Any, ...]:
        """What was measured; rows with the same result are compared with each other."""
        return self.measurement, self.case, self.capacity, self.batch_size, self.written

    def reference(self) -> str:
        """The contender that this one is compared with. Updates: the same update with uniform draws."""
        if self.measurement != "updates":
            return REFERENCES[self.measurement]
        if self.contender.endswith(CYCLE_ONLY):
            return f"TorchRL uniform{CYCLE_ONLY}"
        mode = next((mode for mode in ("compiled ", "CUDA graph ") if self.contender.startswith(mode)), "")
        return f"{mode}uniform"


def compare(rows: list[Row]) -> None:
    """Set the ratios and margins of all rows whose references were measured."""
    times = {(*row.where(), row.contender): row.microseconds for row in rows}
    for row in rows:
        reference = times.get((*row.where(), row.reference()))
        if reference is None:
            continue
        row.ratio = row.microseconds / reference
        if row.measurement == "updates" and row.contender != row.reference():
            row.margin = row.microseconds - reference
    margins = {row.where(): row.margin for row in rows if row.contender == TORCHRL_MARGIN}
    for row in rows:
        torchrl = margins.get(row.where())
        if row.margin is not None and torchrl is not None and torchrl > 0:
            row.margin_ratio = row.margin / torchrl


def write_csv(rows: list[Row], path: Path) -> None:
    """Write one line per row to a CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows(astuple(row) for row in rows)


def read_csv(path: Path) -> list[Row]:
    """The rows of a file written by write_csv.

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
        return float(line[name]) if line[name] else None

    return Row(
        line["measurement"],
        line["case"],
        line["contender"],
        int(line["capacity"]),
        int(line["batch_size"]),
        int(line["written"]),
        float(line["microseconds"]),
        number("ratio"),
        number("margin"),
        number("margin_ratio"),
        int(line["kernels"]) if line["kernels"] else None,
        line["chip"],
        line["torch"],
        line["commit"],
    )


@dataclass
class Table:
    """Numbers of one measurement: a line per contender.

    Args:
        title: what the numbers are.
        lines: contender -> column -> row.
    """

    title: str
    lines: dict[str, dict[str, Row]] = field(default_factory=dict)

    def columns(self) -> list[str]:
        """The headers, in the order in which they were measured."""
        return list(dict.fromkeys(column for line in self.lines.values() for column in line))


def tables(rows: list[Row]) -> list[Table]:
    """The tables of a run."""
    found: dict[str, Table] = {}
    for row in rows:
        title, column = _place(row)
        found.setdefault(title, Table(title)).lines.setdefault(row.contender, {})[column] = row
    return list(found.values())


def _place(row: Row) -> tuple[str, str]:
    """Title of the table and header of the column that a row belongs to."""
    slots = f"{row.capacity:,}"
    if row.measurement == "extend":
        return f"write to {slots} slots, µs (times TorchRL's uniform buffer)", f"{row.case}, {_count(row.written)}"
    if row.measurement == "cycle":
        kind = f"write {row.written} + " if row.written else ""
        return (
            f"{kind}sample {row.batch_size} + update, µs (times TorchRL's PER)",
            f"{slots} slots",
        )
    if row.measurement == "compile":
        return (
            f"compile: write {row.written} + sample {row.batch_size} + update, {slots} slots, seconds (times uniform)",
            f"{row.case} cache",
        )
    if row.measurement == "updates":
        return (
            f"update, {slots} slots, µs (more than with uniform draws; divided by TorchRL's margin)",
            f"{row.case.upper()}, batch {row.batch_size}",
        )
    return "training, CPU time of one environment step, µs (times TorchRL)", row.case.upper()


def _count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def _cell(row: Row | None) -> str:
    """The number of a row, and in brackets its comparison."""
    if row is None:
        return ""
    value = f"{row.microseconds / 1e6:.1f}" if row.measurement == "compile" else f"{row.microseconds:,.0f}"
    notes = []
    if row.measurement != "updates":
        notes += [] if row.ratio is None else [f"{row.ratio:.2f}"]
    elif row.margin is not None:
        notes.append(f"{row.margin:+,.0f}" + ("" if row.margin_ratio is None else f"; {row.margin_ratio:.2f}"))
    if row.kernels is not None:
        notes.append(f"{row.kernels} kernels")
    return f"{value} ({'; '.join(notes)})" if notes else value


def print_tables(rows: list[Row]) -> None:
    """Print the tables as Markdown."""
    for table in tables(rows):
        columns = table.columns()
        print(f"| {table.title} | {' | '.join(columns)} |")
        print("|---" * (len(columns) + 1) + "|")
        for contender, line in table.lines.items():
            print(f"| {contender} | {' | '.join(_cell(line.get(column)) for column in columns)} |")
        print()


def print_summary(rows: list[Row]) -> None:
    """Print one table for the main README: at the largest capacity, in µs."""
    largest = max(row.capacity for row in rows)
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        name, mode = row.contender.removesuffix(CYCLE_ONLY), ""
        if name.startswith("compiled "):
            name, mode = name.removeprefix("compiled "), ", compiled"
        if row.measurement == "extend" and row.written == 8:
            column, value = f"write {row.written} rows", row.microseconds
        elif row.measurement == "cycle" and not row.written:
            column, value = f"sample {row.batch_size} + update{mode}", row.microseconds
        elif row.measurement == "updates" and row.case == "sac" and row.contender != name:
            column, value = "added to a SAC update", row.margin
        else:
            continue
        if row.capacity == largest and value is not None:
            lines.setdefault(name, {})[column] = value
    if not lines:
        return
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    print(f"| {largest:,} slots, µs | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, line in lines.items():
        print(f"| {name} | {' | '.join(f'{line[column]:,.0f}' if column in line else '' for column in columns)} |")
    print()


def label(rows: list[Row], device: torch.device) -> None:
    """Set the chip, the version of torch and the commit of all rows."""
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    commit = code_version()
    for row in rows:
        row.chip, row.torch, row.commit = chip, torch.__version__, commit


def versions() -> str:
    """The versions of the installed libraries."""
    found = []
    for library in LIBRARIES + PEERS:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def cpu_model() -> str:
    """The model name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
