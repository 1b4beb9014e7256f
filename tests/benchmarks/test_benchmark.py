"""What the benchmark measures, its tables, and the errors of its options."""

import csv
import math
import subprocess

import pytest
import torch

from recipes.benchmark import replay as measured_replay
from recipes.benchmark import timing
from recipes.benchmark.__main__ import main
from recipes.benchmark.results import PER_ONLY, UNIFORM_ONLY, Row, compare, tables
from tests.params import trees_of_torchrl

PRIORITIZED = {"PER", "rank-based PER", "ReaPER"}
OTHERS = {"TorchRL uniform", "event tables, ring", "event tables, pinned", "slices"}
SMALL = ("--capacities", "1000", "2000", "--batch-sizes", "32", "--calls", "2")
EAGER = ("--only", "TorchRL", "uniform", "PER", "rank", "ReaPER", "event", "slices")


def read(out):
    return list(csv.DictReader((out / "benchmark.csv").read_text().splitlines()))


def run(out, *words):
    """The rows of a run, by measurement."""
    main([*words, "--out", str(out)])
    rows = read(out)
    for row in rows:
        assert float(row["microseconds"]) > 0
        assert row["chip"] and row["commit"] and row["torch"] == torch.__version__
    return {name: [row for row in rows if row["measurement"] == name] for name in {row["measurement"] for row in rows}}


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Directory and rows of a run of the measurements of buffers."""
    out = tmp_path_factory.mktemp("benchmark")
    return out, run(out, "extend", "cycle", *SMALL, *EAGER)


def test_writes_of_1_8_and_64_rows_and_add_are_compared_with_the_uniform_buffer(replay):
    rows = replay[1]["extend"]
    kinds = {(row["case"], row["written"]) for row in rows}
    assert kinds == {("add", "1"), ("extend", "1"), ("extend", "8"), ("extend", "64")}
    assert {row["contender"] for row in rows} >= PRIORITIZED | OTHERS
    where = ("case", "capacity", "written")
    uniform = {tuple(row[key] for key in where): row for row in rows if row["contender"] == "TorchRL uniform"}
    for row in rows:
        reference = float(uniform[tuple(row[key] for key in where)]["microseconds"])
        assert math.isclose(float(row["ratio"]), float(row["microseconds"]) / reference)


def test_cycles_are_measured_at_each_capacity_in_both_buffers(replay):
    measured = {(row["capacity"], row["contender"]) for row in replay[1]["cycle"]}
    both = {f"{name}{buffer}" for name in PRIORITIZED for buffer in ("", ", CompilableReplayBuffer")}
    assert {(size, name) for size in ("1000", "2000") for name in both | OTHERS} <= measured
    assert not any(name.startswith("compiled") for _, name in measured)


def test_tables_are_written_as_markdown_with_a_line_per_contender(replay):
    lines = (replay[0] / "benchmark.md").read_text().splitlines()
    assert lines[0].endswith("| add 1 | extend 1 | extend 8 | extend 64 |")
    assert lines[1] == "|---|---|---|---|---|"
    assert lines[2].startswith("| TorchRL uniform | ") and lines[2].count("(1.00)") == 4


def test_an_interrupted_run_keeps_the_measurements_that_are_complete(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_replay, "measure_cycle", interrupted)
    for words in (["extend", "cycle", "updates"], ["cycle"]):
        with pytest.raises(SystemExit) as exit:
            main([*words, *SMALL, "--only", "PER", "--out", str(tmp_path)])
        assert exit.value.code == 130
    assert {row["measurement"] for row in read(tmp_path)} == {"extend"}
    assert "cycle was interrupted" in capsys.readouterr().out


def test_nothing_begins_after_the_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(timing, "limit", lambda _: monkeypatch.setattr(timing, "_end", 0.0))
    with pytest.raises(SystemExit):
        run(tmp_path, "extend", "training", *SMALL, "--only", "PER", "TorchRL", "--max-seconds", "1")
    found = capsys.readouterr().out
    for name in ("PER", "TorchRL (training)"):
        assert f"{name} is skipped: TimeoutError: no time is left (--max-seconds)" in found


def test_updates_are_compared_with_uniform_draws(tmp_path):
    names = [f"{name}, CompilableReplayBuffer" for name in ("uniform", "PER", "ReaPER")]
    rows = run(tmp_path, "updates", *SMALL, "--only", "TorchRL", *names)["updates"]
    assert {(row["case"], row["batch_size"], row["capacity"]) for row in rows} == {("DQN", "128", "2000")}
    added = {row["contender"]: row["added"] for row in rows}
    assert [bool(added[name]) for name in names] == [False, True, True]


@pytest.mark.slow
@trees_of_torchrl
def test_the_whole_update_comes_first_and_is_compared_with_torchrl(tmp_path):
    rows = run(tmp_path, "whole", *SMALL, "--only", "TorchRL", "recipe")["whole"]
    assert [row["contender"] for row in rows][:2] == ["TorchRL", "recipe"] and float(rows[0]["ratio"]) == 1
    assert {(row["batch_size"], row["capacity"], row["case"]) for row in rows} == {("256", "2000", "SAC")}
    first = (tmp_path / "benchmark.md").read_text().splitlines()[0]
    assert first.startswith("| whole update, 2,000 slots, CPU ms") and "SAC, batch 256" in first


def test_draws_of_slices_and_training_loops_are_measured_beside_torchrl(tmp_path):
    words = ("--capacities", "1000", "2000", "--calls", "2", "--only", "TorchRL", "slices", "recipe")
    rows = run(tmp_path, "slices", "training", *words)
    names = {"TorchRL SliceSampler", "TorchRL SliceSampler, cached values", "slices"}
    cases = {(name, size, "1024", "8") for name in names for size in ("1000", "2000")}
    keys = ("contender", "capacity", "batch_size", "written")
    assert {tuple(row[key] for key in keys) for row in rows["slices"]} == cases
    assert {row["contender"] for row in rows["training"]} == {"TorchRL", "recipe, uniform"}


def test_what_samplers_add_to_updates_is_compared_with_torchrl():
    times = {UNIFORM_ONLY: 100.0, PER_ONLY: 300.0, "compiled uniform": 1000.0, "compiled PER": 1050.0}
    references = (UNIFORM_ONLY, UNIFORM_ONLY, "compiled uniform", "compiled uniform")
    rows = [
        Row("updates", "DQN", name, reference, 10, 2, microseconds=time)
        for (name, time), reference in zip(times.items(), references, strict=True)
    ]
    compare(rows)
    assert [row.added for row in rows] == [None, 200.0, None, 50.0]
    assert [row.ratio for row in rows] == [None, 1.0, None, 0.25]
    assert "| compiled PER | 1,050 (+50; 0.25) |" in tables(rows)


def test_a_contender_that_cannot_be_compiled_is_noted(tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="RuntimeError: no compiler")
    monkeypatch.setattr(subprocess, "run", lambda *args, **keywords: failed)
    with pytest.raises(SystemExit):
        run(tmp_path, "compile", *SMALL, "--only", "PER")
    assert "PER (compile) is skipped: RuntimeError: RuntimeError: no compiler" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_cycles_updates_and_training_loops_are_measured(tmp_path):
    names = ("compiled PER", "compiled recipe")
    rows = run(tmp_path, "cycle", "updates", "training", *SMALL, "--only", *names)
    assert {(row["capacity"], row["contender"]) for row in rows["cycle"]} == {("2000", "compiled PER")}
    assert {row["contender"] for row in rows["updates"]} == {"compiled PER"}
    assert {row["contender"] for row in rows["training"]} == {"compiled recipe, PER"}


@pytest.mark.cuda
def test_cycles_and_updates_are_measured_on_a_gpu(tmp_path):
    rows = run(tmp_path, "device=cuda", *SMALL, "--only", "TorchRL uniform", "PER", "CUDA graph PER")
    contenders = {row["contender"] for row in rows["cycle"]}
    assert {"PER", "PER, CompilableReplayBuffer", "CUDA graph PER"} <= contenders
    assert "64" in {row["written"] for row in rows["cycle"] if row["contender"] == "PER"}
    found = {row["case"] for row in rows["updates"] if row["contender"] == "CUDA graph PER"}
    assert found == {"DQN", "TD3", "SAC"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["device=tpu"], "choose whole, extend, cycle, slices, updates, compile, training, device=cuda"),
        (["extend", "device=cuda"], "extend runs on the CPU"),
        (["--calls", "0"], "--calls"),
        (["--capacities", "100"], "must be >= 1000"),
        (["--batch-sizes", "5000", "--capacities", "2000"], "must be >= 5000"),
        (["extend", "--only", "TorchRL", "nobody"], "no contender begins with 'nobody'"),
        pytest.param(
            ["device=cuda"],
            "device=cuda: ",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the error of hosts without a GPU"),
        ),
    ],
)
def test_bad_options_exit_with_2(words, reason, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*words, "--out", str(tmp_path)])
    assert exit.value.code == 2
    assert reason in capsys.readouterr().err
