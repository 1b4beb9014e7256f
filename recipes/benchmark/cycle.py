"""Measures replay cycles of a full buffer: sample a batch and update its priorities, with and without a write.

The eager samplers are in TorchRL's TensorDictReplayBuffer, the compiled ones in a CompilableReplayBuffer. A compiled
cycle is one graph. The write is part of it, except for rank-based PER and event tables, whose writes are eager.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmark.buffers import (
    OURS,
    SAMPLERS,
    Stream,
    fill,
    has_priorities,
    make_buffer,
    td_errors,
    transitions,
)
from recipes.benchmark.peers import PEERS
from recipes.benchmark.results import LeftOutError, Row
from recipes.benchmark.timing import CAPTURED, EAGER, MODES, Case, contender, in_mode, in_shares, measure, modes_of
from torchrl_replay_ext import RankBasedSampler

MEASUREMENT = "cycle"
WRITTEN = 64  # rows of a write
STALE_SHARE = 0.05  # RankBasedSampler's default: a sort is due when so many of the transitions have changed
OWN_MODES = tuple(contender(mode, name) for name in OURS for mode in MODES if (mode, name) != (EAGER, "uniform"))
NAMES = tuple(name for name in SAMPLERS if name.startswith("TorchRL")) + OWN_MODES
PEER_NAMES = tuple(PEERS)


def make_step(
    buffer: TensorDictReplayBuffer, mode: str, written: int, batch_size: int, arguments: tuple[Any, ...] = ()
) -> Callable[..., object]:
    """The cycle as a function of the rows to write and the TD errors [batch_size].

    Args:
        buffer: the buffer.
        mode: one of MODES.
        written: number of rows to write; 0: none.
        batch_size: batch size of the sample.
        arguments: see in_mode.
    """
    updates = has_priorities(buffer)
    separate = written and mode not in (EAGER, CAPTURED) and not getattr(buffer.sampler, "writes_in_graphs", True)

    def cycle(rows: Any, td_error: torch.Tensor) -> object:
        if written and not separate:
            buffer.extend(rows)
        batch = buffer.sample(batch_size)
        if updates:
            batch.set("td_error", td_error)
            buffer.update_tensordict_priority(batch)
        return batch

    function = in_mode(mode, cycle, arguments)
    if not separate:
        return function

    def write_first(rows: Any, td_error: torch.Tensor) -> object:
        buffer.extend(rows)
        return function(None, td_error)

    return write_first


def measure_cycles(
    names: Sequence[str],
    device: torch.device,
    capacities: Sequence[int],
    batch_sizes: Sequence[int],
    calls: int,
    *,
    all_graphs: bool,
) -> tuple[list[Row], list[str]]:
    """Measure the replay cycles.

    Args:
        names: contenders, from NAMES and PEER_NAMES.
        device: device of the storage.
        capacities: capacities of the full buffers.
        batch_sizes: batch sizes of the samples.
        calls: number of measured cycles per contender, capacity, batch size and kind of cycle.
        all_graphs: whether contenders that are not eager are measured at all capacities and with writes too; if not, at
            the largest capacity without writes, since each graph takes long to compile.

    Returns:
        The rows, and a note for each skipped contender.
    """
    rows: list[Row] = []
    notes: dict[str, None] = {}
    with torch.no_grad():
        for capacity in in_shares(capacities):
            data, cases = transitions(capacity).to(device), []
            for name in tqdm(SAMPLERS, desc="filling", leave=False):
                for mode in modes_of(name, names):
                    few = mode != EAGER and not all_graphs
                    if few and capacity != max(capacities):
                        continue
                    try:
                        buffer = make_buffer(name, capacity, device, compilable=mode != EAGER)
                    except LeftOutError as error:
                        notes[f"{contender(mode, name)} is skipped: {error}."] = None
                        continue
                    fill(buffer, data)
                    cases += cycles(
                        contender(mode, name), mode, buffer, device, (0,) if few else (0, WRITTEN), batch_sizes
                    )
            if device.type == "cpu":
                for name in (name for name in PEER_NAMES if name in names):
                    try:
                        cases += peer_cycles(name, data, batch_sizes)
                    except LeftOutError as error:
                        notes[f"{name} is skipped: {error}."] = None
            more, failed = measure(cases, device, calls, f"{MEASUREMENT}, capacity {capacity}")
            rows, notes = rows + more, notes | dict.fromkeys(failed)
    return rows, list(notes)


def cycles(
    name: str,
    mode: str,
    buffer: TensorDictReplayBuffer,
    device: torch.device,
    writes: Sequence[int],
    batch_sizes: Sequence[int],
) -> list[Case]:
    """The cycles of one buffer: one for each number of rows to write and each batch size."""
    capacity, stream = buffer.storage.max_size, Stream(device)
    cases = []
    for written in writes:
        for size in batch_sizes:

            def inputs(written: int = written, size: int = size) -> tuple[Any, ...]:
                return stream.take(written) if written else None, td_errors(size, device)

            arguments = inputs()
            case = Case(
                Row(MEASUREMENT, "", name, capacity, size, written),
                make_step(buffer, mode, written, size, arguments),
                mode,
                # on a device the arguments are the same at each call: CUDA graphs read them where they are
                inputs if device.type == "cpu" else lambda arguments=arguments: arguments,
            )
            add_sorts(case, buffer)
            cases.append(case)
    return cases


def add_sorts(case: Case, buffer: TensorDictReplayBuffer) -> None:
    """Let a case with rank-based PER include its share of the sorts. The rows of a case are written and updated."""
    sampler, row = buffer.sampler, case.row
    if isinstance(sampler, RankBasedSampler):
        changed = row.written + (row.batch_size if row.measurement == MEASUREMENT else 0)
        case.upkeep, case.upkeep_interval = sampler.sort, max(1.0, STALE_SHARE * row.capacity / changed)


def peer_cycles(name: str, data: Any, batch_sizes: Sequence[int]) -> list[Case]:
    """The cycles of a peer's buffer, without writes.

    Raises:
        LeftOutError: if the library cannot be imported.
    """
    build, convert = PEERS[name]
    cycle_of = build(data)
    return [
        Case(
            Row(MEASUREMENT, "", name, len(data), size),
            cycle_of(size),
            inputs=lambda size=size: (convert(td_errors(size)),),
        )
        for size in batch_sizes
    ]
