import csv

import pytest

from recipes.benchmark import main


@pytest.mark.benchmark
def test_benchmark(tmp_path, capsys):
    main(["--capacity", "1000", "--batch-sizes", "32", "--cycles", "20", "--env-steps", "100", "--out", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{capsys.readouterr().out}")
    rows = list(csv.DictReader((tmp_path / "benchmark.csv").read_text().splitlines()))
    assert {row["measurement"] for row in rows} == {"replay", "training"}
    assert all(float(row["microseconds"]) > 0 for row in rows)
    assert (tmp_path / "benchmark.png").stat().st_size > 0


@pytest.mark.parametrize(
    "options",
    [
        ["--cycles", "0"],
        ["--capacity", "100"],
        ["--env-steps", "5"],
        ["--only", "nobody"],
        ["--only", "torchrl", "nobody"],
        ["--batch-sizes", "many"],
    ],
)
def test_bad_options_exit_with_2(options, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*options, "--out", str(tmp_path), "--skip-training"])
    assert exit.value.code == 2
    assert options[0] in capsys.readouterr().err
