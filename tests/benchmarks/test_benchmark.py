import csv
import math
import subprocess
import time

import pytest
import torch

from recipes.benchmark import cycle, extend, results, timing
from recipes.benchmark.__main__ import main
from recipes.benchmark.results import CYCLE_ONLY, Row, compare, print_summary, print_tables
from recipes.benchmark.timing import count_kernels

SAMPLERS = {"PER", "rank-based PER", "ReaPER"}
WITHOUT_PRIORITIES = {"event tables, ring", "event tables, pinned", "slices"}


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def run(out, *options):
    """The rows of a run, by measurement."""
    main(["--quick", "--out", str(out), *options])
    rows = read(out / "benchmark.csv")
    for row in rows:
        assert float(row["microseconds"]) > 0
        assert row["chip"] and row["commit"] and row["torch"] == torch.__version__
    return {name: [row for row in rows if row["measurement"] == name] for name in {row["measurement"] for row in rows}}


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Directory and rows of a run of the measurements of buffers."""
    out = tmp_path_factory.mktemp("benchmark")
    return out, run(out, "--measure", "extend", "cycle")


def test_writes_of_1_8_and_64_rows_and_add_are_compared_with_the_uniform_buffer(replay):
    rows = replay[1]["extend"]
    kinds = {(row["case"], row["written"]) for row in rows}
    assert kinds == {("add", "1"), ("extend", "1"), ("extend", "8"), ("extend", "64")}
    assert {"TorchRL uniform"} | SAMPLERS | WITHOUT_PRIORITIES <= {row["contender"] for row in rows}
    where = ("case", "capacity", "written")
    uniform = {tuple(row[key] for key in where): row for row in rows if row["contender"] == "TorchRL uniform"}
    for row in rows:
        reference = float(uniform[tuple(row[key] for key in where)]["microseconds"])
        assert math.isclose(float(row["ratio"]), float(row["microseconds"]) / reference)


def test_cycles_are_measured_at_each_capacity_with_and_without_writes(replay):
    rows = replay[1]["cycle"]
    measured = {(row["capacity"], row["written"], row["contender"]) for row in rows}
    names = {"TorchRL uniform"} | SAMPLERS | WITHOUT_PRIORITIES
    assert {(size, count, name) for size in ("1000", "2000") for count in ("0", "64") for name in names} <= measured
    assert not any(row["contender"].startswith("compiled") for row in rows)


def test_an_interrupted_run_keeps_the_measurements_that_are_complete(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cycle, "measure_cycles", interrupted)
    for words in (["extend", "cycle", "updates"], ["cycle"]):
        with pytest.raises(SystemExit) as exit:
            main(["--quick", "--out", str(tmp_path), "--only", "PER", "--measure", *words])
        assert exit.value.code == 130
    assert {row["measurement"] for row in read(tmp_path / "benchmark.csv")} == {"extend"}
    assert "cycle was interrupted" in capsys.readouterr().out


def test_a_run_whose_time_is_up_prints_what_it_has(tmp_path, monkeypatch, capsys):
    """The time ends after the first measurement."""
    measured, now, passed = extend.measure_extend, time.monotonic, 0.0

    def last(*arguments):
        nonlocal passed
        found = measured(*arguments)
        passed = 2000.0
        return found

    monkeypatch.setattr(timing.time, "monotonic", lambda: now() + passed)
    monkeypatch.setattr(extend, "measure_extend", last)
    rows = run(tmp_path, "--measure", "extend", "cycle", "--only", "PER", "--max-seconds", "1000")
    printed = capsys.readouterr().out
    assert set(rows) == {"extend"} and rows["extend"]
    assert "| PER |" in printed and "PER is skipped: no time is left (--max-seconds)" in printed


def test_shares_of_the_time_pass_on_what_is_left(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing.time, "monotonic", lambda: now)
    timing.limit(100)
    for item in timing.in_shares("abc"):
        for part in timing.in_shares("xy") if item == "b" else ():
            now += {"x": 10, "y": 20}[part]
            timing.require_time()
        if item == "a":
            now = 10.0
        if item == "b":
            assert now == 40
    now = 100.5
    with pytest.raises(results.LeftOutError, match="no time is left"):
        timing.require_time()
    timing.limit(math.inf)
    timing.require_time(0.5)


def test_results_of_earlier_runs_are_printed_as_markdown(replay, capsys):
    main(["--read", str(replay[0] / "benchmark.csv")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("| add, 1 row | extend, 1 row | extend, 8 rows | extend, 64 rows |")
    assert lines[1] == "|---|---|---|---|---|"
    assert lines[2].startswith("| TorchRL uniform | ") and lines[2].count("(1.00)") == 4


def test_published_results_can_be_printed(capsys):
    main(["--read", "recipes/results/benchmark.csv"])
    assert "| TorchRL PER | " in capsys.readouterr().out


def test_updates_of_dqn_td3_and_sac_are_measured(tmp_path):
    rows = run(tmp_path, "--measure", "updates")["updates"]
    assert {(row["case"], row["batch_size"]) for row in rows} == {("dqn", "128"), ("td3", "256"), ("sac", "256")}
    for case in ("dqn", "td3", "sac"):
        margins = {row["contender"]: row["margin"] for row in rows if row["case"] == case}
        assert margins["uniform"] == "" and margins["PER"] and margins["ReaPER"]


def test_training_loops_are_measured_beside_torchrl(tmp_path):
    rows = run(tmp_path, "--measure", "training", "--only", "TorchRL", "recipe")["training"]
    measured = {(row["case"], row["contender"]) for row in rows}
    peers = {(case, "TorchRL") for case in ("dqn", "td3", "sac")}
    assert measured == peers | {(case, "recipe, uniform") for case in ("dqn", "td3", "sac", "acer")}


def test_peers_that_are_not_installed_are_noted(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(results, "import_module", missing)
    run(tmp_path, "--measure", "cycle", "--only", "TorchRL uniform", "cpprb", "stable")
    assert "cpprb PER is skipped: cpprb cannot be imported" in capsys.readouterr().out


def test_margins_of_updates_are_compared_with_those_of_torchrl():
    where = {"measurement": "updates", "case": "dqn", "capacity": 10, "batch_size": 2}
    times = {
        f"TorchRL uniform{CYCLE_ONLY}": 100.0,
        f"TorchRL PER{CYCLE_ONLY}": 300.0,
        "compiled uniform": 1000.0,
        "compiled PER": 1050.0,
    }
    rows = [Row(contender=name, microseconds=time, **where) for name, time in times.items()]
    compare(rows)
    assert [row.margin for row in rows] == [None, 200.0, None, 50.0]
    assert [row.margin_ratio for row in rows] == [None, 1.0, None, 0.25]


def test_compile_times_are_printed_in_seconds(capsys):
    rows = [
        Row("compile", case, name, 10, 2, 64, microseconds)
        for name, cold, warm in (("uniform", 10e6, 4e6), ("PER", 15e6, 6e6))
        for case, microseconds in (("cold", cold), ("warm", warm))
    ]
    compare(rows)
    print_tables(rows)
    assert "| PER | 15.0 (1.50) | 6.0 (1.50) |" in capsys.readouterr().out


def test_the_summary_has_the_numbers_of_the_largest_capacity_in_one_line_per_sampler(capsys):
    numbers = (
        ("extend", "extend", "PER", 10, 0, 8, 1.0),
        ("extend", "extend", "PER", 20, 0, 8, 2.0),
        ("cycle", "", "PER", 20, 4, 0, 3.0),
        ("cycle", "", "compiled PER", 20, 4, 0, 4.0),
        ("updates", "sac", "compiled uniform", 20, 4, 0, 5.0),
        ("updates", "sac", "compiled PER", 20, 4, 0, 11.0),
    )
    rows = [Row(*number) for number in numbers]
    compare(rows)
    print_summary(rows)
    columns = "write 8 rows | sample 4 + update | sample 4 + update, compiled | added to a SAC update"
    assert capsys.readouterr().out.splitlines() == [
        f"| 20 slots, µs | {columns} |",
        "|---|---|---|---|---|",
        "| PER | 2 | 3 | 4 | 6 |",
        "",
    ]


@pytest.mark.slow
def test_a_warm_cache_saves_compile_time(tmp_path):
    cold, warm = run(tmp_path, "--measure", "compile", "--only", "uniform")["compile"]
    assert (cold["case"], warm["case"]) == ("cold", "warm")
    assert float(warm["microseconds"]) < float(cold["microseconds"])


def test_a_contender_that_cannot_be_compiled_is_noted(tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="RuntimeError: no compiler")
    monkeypatch.setattr(subprocess, "run", lambda *args, **keywords: failed)
    with pytest.raises(SystemExit):
        run(tmp_path, "--measure", "compile", "--only", "PER")
    assert "PER (compile, cold) is skipped: RuntimeError: no compiler" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_cycles_and_updates_are_measured(tmp_path):
    rows = run(tmp_path, "--measure", "cycle", "updates", "--capacities", "1000", "--only", "compiled PER")
    assert {(row["written"], row["contender"]) for row in rows["cycle"]} == {(n, "compiled PER") for n in ("0", "64")}
    assert {row["case"] for row in rows["updates"]} == {"dqn", "td3", "sac"}


@pytest.mark.slow
def test_compiled_training_loops_are_measured(tmp_path):
    rows = run(tmp_path, "--measure", "training", "--only", "compiled recipe, PER")["training"]
    assert {row["case"] for row in rows} == {"dqn", "td3", "sac", "acer"}


@pytest.mark.cuda
def test_cycles_and_updates_are_measured_on_a_gpu(tmp_path):
    rows = run(tmp_path, "device=cuda", "--measure", "cycle", "updates", "--only", "PER", "captured PER")
    contenders = {row["contender"]: row["kernels"] for row in rows["cycle"]}
    assert contenders["PER"] and contenders["captured PER"] == ""
    assert all(row["kernels"] for row in rows["updates"])


def test_views_and_allocations_are_no_kernels():
    x = torch.arange(4.0)
    assert count_kernels(lambda: (x[1:].view(3, 1) + torch.empty(3)).sum(), torch.device("cpu")) == 2
    assert count_kernels(lambda: x + 1, torch.device("cuda")) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of hosts without a GPU")
def test_a_missing_gpu_is_explained(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["device=cuda", "--out", str(tmp_path)])
    assert exit.value.code == 2
    assert "Install torch for CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["device=tpu"], "choose auto, cpu, cuda"),
        (["--calls", "0"], "--calls"),
        (["--capacities", "100"], "must be >= 1000"),
        (["--batch-sizes", "5000", "--capacities", "2000"], "must be >= 5000"),
        (["--env-steps", "5"], "must be >= 8"),
        (["--only", "nobody"], "no contender begins with 'nobody'"),
        (["--only", "TorchRL", "nobody"], "no contender begins with 'nobody'"),
        (["--batch-sizes", "many"], "--batch-sizes"),
        (["--measure", "sleep"], "--measure"),
        (["--read", "nowhere.csv"], "--read"),
        (["--read", "pyproject.toml"], "--read"),
        (["--capacities", "1000000000000000"], "--capacities"),
    ],
)
def test_bad_options_exit_with_2(options, reason, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--measure", "extend", *options, "--out", str(tmp_path)])
    assert exit.value.code == 2
    assert reason in capsys.readouterr().err
