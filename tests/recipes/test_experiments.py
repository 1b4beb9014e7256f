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


def test_help_names_the_files(capsys):
    with pytest.raises(SystemExit):
        cliffwalk.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"directory of cliffwalk.csv, .png and .svg (default: {Path('runs') / 'cliffwalk'})" in shown
