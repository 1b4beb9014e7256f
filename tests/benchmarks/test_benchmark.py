import csv
import math

import pytest
import torch

from recipes.benchmark import main
from recipes.benchmarks.device import count_kernels


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.benchmark
def test_benchmark(tmp_path, capsys):
    main(["--quick", "--measure", "replay", "training", "--capacities", "1000", "--out", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{capsys.readouterr().out}")
    rows = read(tmp_path / "benchmark.csv")
    assert {row["measurement"] for row in rows} == {"replay", "training"}
    assert all(float(row["microseconds"]) > 0 for row in rows)
    assert (tmp_path / "benchmark.png").stat().st_size > 0


def check_capacities(tmp_path, *only):
    main(["--quick", "--measure", "capacity", "--only", *only, "--out", str(tmp_path)])
    rows = read(tmp_path / "benchmark.csv")
    assert {row["written"] for row in rows} == {"0", "8"} and {row["capacity"] for row in rows} == {"200", "400"}
    smallest = {
        (row["contender"], row["written"]): float(row["microseconds"]) for row in rows if row["capacity"] == "200"
    }
    for row in rows:
        ratio = float(row["microseconds"]) / smallest[row["contender"], row["written"]]
        assert math.isclose(float(row["times_smallest"]), ratio)
        assert (row["compile_seconds"] != "") == row["contender"].startswith("compiled")
    assert (tmp_path / "benchmark.png").stat().st_size > 0
    return {row["contender"] for row in rows}


def test_cycles_are_compared_with_the_smallest_capacity(tmp_path):
    found = check_capacities(tmp_path, "eager")
    assert {
        "eager uniform",
        "eager ProportionalSampler",
        "eager ReaPERSampler",
        "eager RankBasedSampler",
        "eager torchrl RandomSampler",
    } <= found


@pytest.mark.slow
def test_compiled_cycles_are_reported_with_their_compile_times(tmp_path):
    assert check_capacities(tmp_path, "compiled ProportionalSampler") == {"compiled ProportionalSampler"}


def check_device(tmp_path, *options):
    """Runs ``device=cpu``, which measures the same contenders as a GPU, but for CUDA graphs."""
    main(["device=cpu", "--quick", "--out", str(tmp_path), *options])
    rows = read(tmp_path / "benchmark.csv")
    for row in rows:
        assert float(row["microseconds"]) > 0
        assert row["chip"] and row["commit"] and row["torch"] == torch.__version__
        assert (row["kernels"] != "") == row["contender"].startswith("eager")
    return {(row["measurement"], row["batch_size"], row["written"], row["contender"]) for row in rows}


def test_cycles_and_updates_are_measured_on_a_device(tmp_path, capsys):
    found = check_device(tmp_path, "--only", "eager")
    for sampler in ("torchrl RandomSampler", "ProportionalSampler", "ReaPERSampler", "RankBasedSampler"):
        assert {("cycles", "32", "0", f"eager {sampler}"), ("cycles", "32", "64", f"eager {sampler}")} <= found
    for sampler in ("uniform", "ProportionalSampler", "ReaPERSampler"):
        assert {("dqn", "64", "0", f"eager {sampler}"), ("td3", "256", "0", f"eager {sampler}")} <= found
    assert "CUDA graphs are skipped: they need device=cuda." in capsys.readouterr().out
    main(["--read", str(tmp_path / "benchmark.csv"), "--out", str(tmp_path)])
    assert "eager RankBasedSampler" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_cycles_and_updates_are_measured_on_a_device(tmp_path):
    name = "compiled ProportionalSampler"
    assert check_device(tmp_path, "--only", name) == {
        ("cycles", "32", "0", name),
        ("cycles", "32", "64", name),
        ("dqn", "64", "0", name),
        ("td3", "256", "0", name),
    }


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
        (["device=cpu", "--measure", "replay"], "leave out device="),
        (["--measure", "cycles"], "add device=cuda"),
        (["device=cpu", "--only", "nobody"], "no contender begins with 'nobody'"),
    ],
)
def test_bad_options_of_a_device_exit_with_2(options, reason, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*options, "--out", str(tmp_path)])
    assert exit.value.code == 2
    assert reason in capsys.readouterr().err


def test_results_of_earlier_runs_can_be_drawn(tmp_path, capsys):
    main(["--read", "recipes/results/benchmark.csv", "--out", str(tmp_path)])
    assert "torchrl PrioritizedSampler" in capsys.readouterr().out
    assert (tmp_path / "benchmark.png").stat().st_size > 0


@pytest.mark.parametrize(
    "options",
    [
        ["--cycles", "0"],
        ["--capacities", "100"],
        ["--env-steps", "5"],
        ["--only", "nobody"],
        ["--only", "torchrl", "nobody"],
        ["--batch-sizes", "many"],
        ["--measure", "sleep"],
        ["--read", "nowhere.csv"],
        ["--read", "pyproject.toml"],
        ["--capacities", "1000000000000000"],
    ],
)
def test_bad_options_exit_with_2(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--measure", "replay", *options, "--out", str(tmp_path)])
    assert exit.value.code == 2
    assert options[0] in capsys.readouterr().err
