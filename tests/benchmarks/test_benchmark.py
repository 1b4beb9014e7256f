import csv
import math

import pytest

from recipes.benchmark import main


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
