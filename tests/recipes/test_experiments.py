"""The options that all experiments share."""

from pathlib import Path

import pytest

from recipes.experiments import cliffwalk, sharding, sset_tabular, stylized
from tests.recipes.runs import ROOT

RESULTS = ROOT / "recipes" / "results"


@pytest.mark.parametrize("experiment", [cliffwalk, sharding, sset_tabular, stylized])
def test_a_wrong_file_to_read_is_named_before_anything_is_written(experiment, tmp_path, capsys):
    other = RESULTS / ("cliffwalk.csv" if experiment is stylized else "stylized.csv")
    for path, message in ((tmp_path / "no.csv", "No such file"), (other, "no column")):
        with pytest.raises(SystemExit, match="2"):
            experiment.main(["--out", str(tmp_path / "out"), "--read", str(path)])
        assert f"--read {path}: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    # numbers that are none
    broken = tmp_path / "broken.csv"
    lines = (RESULTS / f"{experiment.__name__.rpartition('.')[2]}.csv").read_text().splitlines()
    broken.write_text("\n".join([lines[0], ",".join(["x"] * lines[0].count(",")) + ",x\n"]))
    with pytest.raises(SystemExit, match="2"):
        experiment.main(["--out", str(tmp_path / "out"), "--read", str(broken)])
    assert f"--read {broken}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broken.csv"]


def test_help_names_the_files(capsys):
    with pytest.raises(SystemExit):
        cliffwalk.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"directory of cliffwalk.csv, .png and .svg (default: {Path('runs') / 'cliffwalk'})" in shown
