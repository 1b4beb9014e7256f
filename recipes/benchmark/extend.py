"""Measures writes of a few rows to a full buffer, eager: `extend` of 1, 8 and 64 rows, and `add`."""

from collections.abc import Sequence

from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmark.buffers import CPU, SAMPLERS, Stream, fill, make_buffer, transitions
from recipes.benchmark.cycle import add_sorts
from recipes.benchmark.results import LeftOutError, Row
from recipes.benchmark.timing import Case, in_shares, measure

MEASUREMENT = "extend"
ROWS = (1, 8, 64)
NAMES = tuple(name for name in SAMPLERS if name not in ("uniform", "TorchRL PER, CUDA trees"))


def measure_extend(names: Sequence[str], capacities: Sequence[int], calls: int) -> tuple[list[Row], list[str]]:
    """Measure the writes.

    Args:
        names: contenders, from NAMES.
        capacities: capacities of the full buffers.
        calls: number of measured calls per contender and kind of write.

    Returns:
        The rows, and a note for each skipped contender.
    """
    rows: list[Row] = []
    notes: dict[str, None] = {}
    for capacity in in_shares(capacities):
        data, cases = transitions(capacity), []
        for name in tqdm([name for name in NAMES if name in names], desc="filling", leave=False):
            try:
                buffer = make_buffer(name, capacity, compilable=False)
            except LeftOutError as error:
                notes[f"{name} is skipped: {error}."] = None
                continue
            fill(buffer, data)
            cases += writes(name, buffer, capacity)
        more, failed = measure(cases, CPU, calls, f"{MEASUREMENT}, capacity {capacity}")
        rows, notes = rows + more, notes | dict.fromkeys(failed)
    return rows, list(notes)


def writes(name: str, buffer: TensorDictReplayBuffer, capacity: int) -> list[Case]:
    """The kinds of writes to one buffer. Together they write one stream of steps."""
    stream = Stream()
    cases = [Case(Row(MEASUREMENT, "add", name, capacity, written=1), buffer.add, inputs=lambda: (stream.take(1)[0],))]
    cases += [
        Case(
            Row(MEASUREMENT, "extend", name, capacity, written=count),
            buffer.extend,
            inputs=lambda count=count: (stream.take(count),),
        )
        for count in ROWS
    ]
    for case in cases:
        add_sorts(case, buffer)
    return cases
