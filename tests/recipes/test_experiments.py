"""The options that all experiments share."""

import pytest

from recipes.common.files import read_csv
from recipes.experiments import cliffwalk, dper_analysis, reliability, sharding, sset_tabular, stylized
from tests.recipes.runs import ROOT

RESULTS = ROOT / "recipes" / "results"


@pytest.mark.parametrize("experiment", [cliffwalk, dper_analysis, reliability, sharding, sset_tabular, stylized])
def test_a_wrong_file_to_read_is_named_before_anything_is_written(experiment, tmp_path, refused):
    other = RESULTS / ("cliffwalk.csv" if experiment is stylized else "stylized.csv")
    for path, message in ((tmp_path / "no.csv", "No such file"), (other, "no column")):
        errors = refused(experiment.main, ["--out", str(tmp_path / "out"), "--read", str(path)])
        assert f"--read {path}: {message}" in errors
    assert not list(tmp_path.iterdir())
    # numbers that are none
    broken = tmp_path / "broken.csv"
    lines = (RESULTS / f"{experiment.__name__.rpartition('.')[2]}.csv").read_text().splitlines()
    broken.write_text("\n".join([lines[0], ",".join(["x"] * lines[0].count(",")) + ",x\n"]))
    assert f"--read {broken}: " in refused(experiment.main, ["--out", str(tmp_path / "out"), "--read", str(broken)])
    assert [path.name for path in tmp_path.iterdir()] == ["broken.csv"]


COMMANDS = {
    cliffwalk: (["--states", "2", "3", "--seeds", "2"], 2 * 2 * 5),
    stylized: (["--lengths", "10", "20", "--seeds", "3"], 2 * 3 * 4),
    sset_tabular: (["--seeds", "1"], 7),
    reliability: (["--datasets", "1", "--seeds", "2"], 2 * 2 * 3 * 2 * reliability.MEASUREMENTS),
}


@pytest.mark.parametrize("experiment", COMMANDS)
def test_figures_are_drawn_again_from_the_csv_of_a_run(experiment, tmp_path, monkeypatch, capsys, refused):
    monkeypatch.setattr(sset_tabular, "STEPS", 5_000)  # a quarter of the experience
    small = {world: (*values[:-2], 400, 40) for world, values in reliability.WORLDS.items()}
    monkeypatch.setattr(reliability, "WORLDS", small)
    name = experiment.__name__.rpartition(".")[2]
    words, count = COMMANDS[experiment]
    out, again = tmp_path / "out", tmp_path / "again"
    rows = experiment.main(["--out", str(out), *words])
    printed = capsys.readouterr().out.splitlines()
    assert len(rows) == len(read_csv(out / f"{name}.csv")) == count
    assert printed[0].split()[1:] == [str(out / f"{name}.{form}") for form in ("png", "svg", "csv")]
    assert len(experiment.main(["--out", str(again), "--read", str(out / f"{name}.csv")])) == count
    assert sorted(path.name for path in again.iterdir()) == [f"{name}.png", f"{name}.svg"]
    for path in again.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes()
    # and the same table
    assert capsys.readouterr().out.splitlines()[1:] == printed[1:]
    assert words[0] in refused(experiment.main, ["--out", str(tmp_path), words[0], "0"])
