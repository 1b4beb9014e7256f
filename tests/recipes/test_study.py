"""Studies: the runs that they start, resume and compare, and the tables they leave."""

import importlib
import os
import re
import signal
import sys
import time
from typing import ClassVar

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recipes import plot, study
from recipes.common import intervals, report
from recipes.common.cli import DONE, FAILED, INTERRUPTED
from recipes.common.errors import ConfigError
from recipes.common.files import locked
from tests.recipes.runs import ROOT, composed
from tests.recipes.test_plot import write_run

RESULTS = ROOT / "recipes" / "results"
STUDIES = sorted(path.removesuffix(".yaml") for path in os.listdir(ROOT / "recipes/conf/study"))


def configuration(*words, name="reaper"):
    return composed("study", f"study={name}", *words)


class FakeRun:
    """In place of a process: a run of three evaluations, that of seed 1 of "rank" fails, that of uniform is slow."""

    started: ClassVar[list[list[str]]] = []

    def __init__(self, command, *, stdout, **_):
        self.command = command[2:]
        FakeRun.started.append(self.command)
        # as hydra reads them
        read = OverridesParser.create().parse_overrides([word for word in command if "=" in word])
        words = {override.key_or_group: str(override.value()) for override in read}
        self.code = DONE
        if "resume" in words:
            return
        if words["sampler"] == "rank" and words["seed"] == "1":
            stdout.write("no such thing\n")
            self.code = 2
            return
        reached = 2 if words["sampler"] == "reaper" else 3
        returns = [0.0, 0.0, 0.0] if words["sampler"] == "uniform" else [0.0] * (reached - 1) + [480.0]
        run_dir = study.Path(words["hydra.run.dir"])
        write_run(run_dir, returns, words["sampler"], env=words["env"], threshold=475.0, every=100)
        text = (run_dir / "progress.csv").read_text().splitlines()
        extra = ["updates,wall_time,cpu_time", *["7,1.25,0.75"] * (len(text) - 1)]
        (run_dir / "progress.csv").write_text("".join(f"{a},{b}\n" for a, b in zip(text, extra, strict=True)))

    def wait(self):
        return self.code

    def send_signal(self, number):
        self.code = INTERRUPTED


SHOW = study.show


@pytest.fixture
def processes(monkeypatch):
    """Fake runs, and studies that draw nothing, which takes seconds."""
    FakeRun.started = []
    monkeypatch.setattr(study, "show", lambda out: None)
    popen = study.subprocess.Popen
    monkeypatch.setattr(
        study.subprocess,
        "Popen",
        lambda command, **k: (FakeRun if command[0] == sys.executable else popen)(command, **k),
    )
    return FakeRun


@pytest.mark.parametrize("name", STUDIES)
def test_studies_are_of_what_there_is(name):
    config = study.parse_config(configuration(name=name), study.Config)
    recipe = importlib.import_module(f"recipes.{config.study.recipe}")
    # of variants that differ only in numbers, one: composing takes 0.2 s
    jobs = study.jobs_of(config.study, 1)
    kinds = {(job.env, *(re.sub(r"(?<![a-z])[-.\de]+\b", "0", word) for word in job.words)): job for job in jobs}
    for job in kinds.values():
        words = [f"env={job.env}", *job.words]
        job_config = composed(job.recipe, *(word for word in words if not word.startswith("hydra")))
        assert study.parse_config(job_config, recipe.Config).env.name
        if config.study.least is None:
            assert job_config.env.reward_threshold is not None


def test_seeds_come_first():
    config = study.parse_config(configuration("study.envs=[cartpole,acrobot]"), study.Config)
    jobs = study.jobs_of(config.study, 2)
    assert [job.seed for job in jobs] == [0] * 8 + [1] * 8
    assert jobs[1].command == ["-m", "recipes.dqn", "env=cartpole", "compile=true", "sampler=per", "seed=0"]


def test_any_name_of_a_variant_does(tmp_path, processes):
    name = "one, {two}=$3 it's"
    config = configuration("study.envs=[cartpole]", "seeds=1")
    config.study.variants = {"per": ["sampler=per"], name: ["sampler=reaper"]}
    assert study.run_study(config, tmp_path) == DONE
    assert {row["variant"] for row in study.read_rows(tmp_path / study.RUNS)} == {"per", name}


def test_a_study_is_gone_on_with(tmp_path, processes, capsys):
    words = ["study.envs=[cartpole]", "workers=2"]
    assert study.run_study(configuration(*words, "seeds=1"), tmp_path) == DONE
    assert len(processes.started) == 4
    # one is there to the end but for its row, one has just begun
    rows = study.read_rows(tmp_path / study.RUNS)
    (tmp_path / "runs/cartpole/per/seed1").mkdir(parents=True)
    half = tmp_path / "runs/cartpole/reaper/seed1"
    processes(
        [sys.executable, "", "", "sampler=reaper", "seed=1", "env=cartpole", f"hydra.run.dir={half}"], stdout=None
    )
    (half / study.CHECKPOINT).touch()
    processes.started.clear()
    assert study.run_study(configuration(*words, "seeds=2"), tmp_path) == study.FAILED
    assert sorted(command[-1].split("/")[-2] for command in processes.started) == ["per", "rank", "reaper", "uniform"]
    assert ["recipes.dqn", f"resume='{half}'"] in processes.started
    errors = capsys.readouterr().err
    assert "failed: python -m recipes.dqn env=cartpole compile=true sampler=rank seed=1 (see" in errors
    assert (tmp_path / "runs/cartpole/rank/seed1.log").read_text() == "no such thing\n"
    assert study.read_rows(tmp_path / study.RUNS)[:4] == rows
    found = {(row["variant"], row["seed"]): row for row in study.read_rows(tmp_path / study.RUNS)}
    assert len(found) == 7
    row = found["reaper", "1"]
    assert (row["env_steps"], row["reached"], row["last"]) == ("200", "200", "480.0")
    assert (row["wall_time"], row["cpu_time"]) == ("1.2", "0.8")
    curve = [row for row in study.read_rows(tmp_path / study.CURVES) if row["seed"] == "1"]
    assert {row["cpu_time"] for row in curve} == {"0.8"}
    assert row["command"] == "python -m recipes.dqn env=cartpole compile=true sampler=reaper seed=1"
    assert found["uniform", "0"]["reached"] == ""
    # the failed one is tried again
    processes.started.clear()
    assert study.run_study(configuration(*words, "seeds=2"), tmp_path) == study.FAILED
    assert len(processes.started) == 1


def test_a_study_of_an_earlier_version_is_gone_on_with(tmp_path, processes):
    """It has no CPU times, and no study.also."""
    words = ["study.envs=[cartpole]", "~study.variants.rank"]
    assert study.run_study(configuration(*words, "seeds=1"), tmp_path) == DONE
    before = study.read_rows(tmp_path / study.RUNS)
    for name in (study.RUNS, study.CURVES):
        kept = [{k: v for k, v in row.items() if k != "cpu_time"} for row in study.read_rows(tmp_path / name)]
        study.rewrite(tmp_path / name, kept)
    settings = (tmp_path / study.STUDY).read_text()
    (tmp_path / study.STUDY).write_text(settings.replace("also: []\n", ""))
    assert study.run_study(configuration(*words, "seeds=2"), tmp_path) == DONE
    found = study.read_rows(tmp_path / study.RUNS)
    assert [row["cpu_time"] for row in found] == ["nan"] * 3 + ["0.8"] * 3
    assert [row | {"cpu_time": "0.8"} for row in found[:3]] == before
    assert [row["wall_time"] for row in found] == ["1.2"] * 6
    assert {row["seed"] for row in found[3:]} == {"1"}
    assert report.read_study(tmp_path).finished()


def test_curves_keep_further_columns(tmp_path, processes):
    words = ["study.envs=[cartpole]", "seeds=1", "+study.also=[updates,wall_time]"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    curve = study.read_rows(tmp_path / study.CURVES)
    assert {(row["updates"], row["wall_time"]) for row in curve} == {("7", "1.25")}
    runs = plot.read_table(tmp_path / study.CURVES, ["return_mean", "updates"], ["variant"])
    assert {run.group for run in runs} == {"uniform", "per", "rank", "reaper"}
    assert {value for run in runs for value in run.values["updates"]} == {7.0}


@pytest.mark.parametrize("words", ["study.column=return_min", "+study.also=[updates,return_min]"])
def test_a_column_that_no_run_has_ends_the_study(tmp_path, processes, words):
    """With the first run: no other is started."""
    with pytest.raises(ConfigError, match=r"progress.csv has no column return_min, only env_steps, "):
        study.run_study(configuration("study.envs=[cartpole]", "seeds=5", "workers=1", words), tmp_path)
    assert len(processes.started) == 1
    assert not study.read_rows(tmp_path / study.RUNS)
    # the mended command goes on
    assert study.run_study(configuration("study.envs=[cartpole]", "seeds=1"), tmp_path) == DONE
    with pytest.raises(ConfigError, match="holds another study"):
        study.run_study(configuration("study.envs=[cartpole]", "seeds=1", "+study.also=[updates]"), tmp_path)


@pytest.mark.parametrize("lost", [1, 60])
def test_a_study_that_was_killed_as_it_wrote(tmp_path, processes, lost):
    """The row is torn, its curve is there already: the run is made again, and nothing stands twice."""
    words = ["study.envs=[cartpole]", "seeds=1", "workers=1"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    before = [study.read_rows(tmp_path / name) for name in (study.RUNS, study.CURVES)]
    path = tmp_path / study.RUNS
    os.truncate(path, path.stat().st_size - lost)
    processes.started.clear()
    assert study.run_study(configuration(*words), tmp_path) == DONE
    assert len(processes.started) == 1
    assert [study.read_rows(tmp_path / name) for name in (study.RUNS, study.CURVES)] == before


@pytest.mark.parametrize(
    "word",
    [
        "study.fixed=[]",
        "study.envs=[acrobot]",
        "study.first_seed=1",
        "~study.variants.rank",
        "study.variants.per=[]",
        "study.recipe=td3",
        "study.in_a_row=2",
        "+study.also=[updates]",
    ],
)
def test_another_study_needs_another_directory(tmp_path, processes, word):
    words = ["study.envs=[cartpole]", "seeds=1"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds another study"):
        study.run_study(configuration(*words, word), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_two_processes_cannot_run_one_study(tmp_path, processes):
    with locked(tmp_path), pytest.raises(ConfigError, match="another process runs a study there"):
        study.run_study(configuration("study.envs=[cartpole]", "seeds=1"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_a_killed_study_has_left_behind_is_left_alone(tmp_path, processes, capsys):
    run_dir = tmp_path / "runs" / "cartpole" / "per" / "seed0"
    run_dir.mkdir(parents=True)
    words = ["study.envs=[cartpole]", "seeds=1"]
    with locked(run_dir):
        assert study.run_study(configuration(*words), tmp_path) == FAILED
        assert run_dir.is_dir()
    assert "another process trains there" in run_dir.with_suffix(".log").read_text()
    assert study.run_study(configuration(*words), tmp_path) == DONE


@pytest.mark.parametrize("content", ["", "[1, 2]", "[1", "name: reaper", "letters: a\nname: b", "variants: 3"])
def test_a_directory_with_another_study_yaml(tmp_path, processes, content):
    (tmp_path / study.STUDY).write_text(content)
    with pytest.raises(ConfigError, match="study.yaml: damaged: " if "[" in content else "holds another study"):
        study.run_study(configuration("study.envs=[cartpole]", "seeds=1"), tmp_path)
    assert (tmp_path / study.STUDY).read_text() == content


def test_a_study_grows(tmp_path, processes):
    """Further variants and environments; finished runs are kept."""
    assert study.run_study(configuration("study.envs=[cartpole]", "seeds=1"), tmp_path) == DONE
    before = study.read_rows(tmp_path / study.RUNS)
    processes.started.clear()
    words = ["study.envs=[acrobot,cartpole]", "seeds=1", "+study.variants.recency=['sampler=recency']"]
    assert study.run_study(configuration(*words, "study.baseline=recency"), tmp_path) == DONE
    assert study.read_rows(tmp_path / study.RUNS)[: len(before)] == before
    assert len(processes.started) == 6
    found = report.read_study(tmp_path).finished()
    assert set(found) == {"acrobot", "cartpole"}
    assert set(found["cartpole"]) == {"uniform", "per", "rank", "reaper", "recency"}


def test_interrupted(tmp_path, processes, monkeypatch, capsys):
    wait = FakeRun.wait

    def interrupting(run):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return wait(run)

    monkeypatch.setattr(FakeRun, "wait", interrupting)
    assert study.run_study(configuration("study.envs=[cartpole]", "seeds=1", "workers=1"), tmp_path) == INTERRUPTED
    assert "repeat the command to continue" in capsys.readouterr().out


def test_the_threshold_must_be_kept_up():
    steps, values = [10, 20, 30, 40, 50], [0, 5, 0, 5, 5]
    assert study.steps_to_reach(steps, values, 5, 1) == 20
    assert study.steps_to_reach(steps, values, 5, 2) == 40
    assert study.steps_to_reach(steps, values, 5, 3) is None
    # the run ended at its threshold
    assert study.steps_to_reach(steps, values, 5, 3, stopped=True) == 40
    assert study.steps_to_reach(steps, [0, 5, 5, 5, 0], 5, 4, stopped=True) is None


# --- reports


@pytest.fixture
def finished(tmp_path, processes, capsys):
    words = ["study.envs=[cartpole,acrobot]", "~study.variants.rank", "seeds=5"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    capsys.readouterr()
    return tmp_path


def test_a_report(finished, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot", f"study={finished}"])
    plot.main()
    table = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| C")]
    by_variant = {line[1]: line[2:] for line in lines}
    assert by_variant["PER"][:5] == ["5 of 5", "300 [300, 300]", "300", "", ""]
    assert by_variant["ReaPER"][:5] == ["5 of 5", "200 [200, 200]", "200", "0.67 [0.67, 0.67]", "0.77"]
    # no run reached the threshold: all its steps, as a lower bound
    assert by_variant["uniform replay"][:4] == ["0 of 5", "≥ 300", "≥ 300", "≥ 1.00"]
    # the fixture changed the variants
    assert "study=reaper with the settings in study.yaml; seeds 0 to 4; commit" in table
    assert "mean steps of the variant divided by the mean steps of PER, over the seeds that both have" in table
    assert table.startswith((finished / report.TABLE).read_text(encoding="utf-8"))
    assert {path.suffix for path in finished.glob("figure.*")} == {".png", ".svg"}


def test_further_columns_have_a_table_of_their_own(tmp_path, processes):
    """Runs have two or three evaluations, so the last tenth is the last one."""
    words = ["study.envs=[cartpole]", "~study.variants.rank", "seeds=5", "+study.also=[env_steps]"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    table = report.full_table(report.read_study(tmp_path))
    assert "| | variant | last evaluations of env_steps: IQM | difference to PER |\n|---|---|---|---|\n" in table
    assert "| CartPole | ReaPER | 200.0 [200.0, 200.0] | -100.0 [-100.0, -100.0] |\n" in table
    assert "| CartPole | PER | 300.0 [300.0, 300.0] |  |\n" in table


def test_further_columns_do_not_change_the_other_table(finished):
    """Not even if they are columns of runs.csv. Here runs have 20 evaluations, and those of uniform are censored."""
    rows = study.read_rows(finished / study.CURVES)
    first = [row for row in rows if row["env_steps"] == "100"]
    study.rewrite(
        finished / study.CURVES, [row | {"env_steps": str(5 * step)} for row in first for step in range(1, 21)]
    )
    before = report.full_table(report.read_study(finished))
    config = OmegaConf.load(finished / study.STUDY)
    OmegaConf.save({**config, "also": ["env_steps"]}, finished / study.STUDY)
    after = report.full_table(report.read_study(finished))
    assert "| CartPole | uniform replay | 97.5 [97.5, 97.5] | 0.0 [0.0, 0.0] |\n" in after
    assert report.format_table(report.read_study(finished)) in before


def test_the_last_lines_compare_each_variant_with_the_baseline_in_the_numbers_of_the_table(finished):
    lines = report.report(finished).splitlines()
    cells = {}
    for line in lines:
        if line.startswith("| C") or line.startswith("| A"):
            env, variant, _, _, mean, ratio, *_ = (cell.strip() for cell in line.split("|")[1:])
            cells[env, variant] = mean, ratio
    sentences = lines[-4:]
    for env in ("CartPole", "Acrobot"):
        mean, ratio = cells[env, "ReaPER"]
        theirs = cells[env, "PER"][0]
        reaper = f"{env}: ReaPER reached the threshold after {mean} steps, PER after {theirs}: {ratio} times as many"
        assert f"{reaper} (5 seeds)" in sentences
        mean, ratio = cells[env, "uniform replay"]
        uniform = f"uniform replay did not reach the threshold ({mean} steps), PER after {theirs}: {ratio}"
        assert f"{env}: {uniform} times as many (5 seeds)" in sentences
    assert cells["CartPole", "ReaPER"] == ("200", "0.67 [0.67, 0.67]")


def test_the_last_line_says_if_neither_reached_the_threshold_or_if_seeds_are_missing(finished):
    found = report.read_study(finished)
    cells_of(found, ["200+ 300+"] * 5)
    assert (
        "CartPole: ReaPER did not reach the threshold (≥ 300 steps), PER after ≥ 200: neither reached it (5 seeds)"
        in report.conclusions(found)
    )
    cells_of(found, ["200 300"] * 5)
    del found.rows["cartpole"]["reaper"][0]
    last = next(line for line in report.conclusions(found) if line.startswith("CartPole: ReaPER"))
    assert last.endswith(": 1.50 [1.50, 1.50] times as many (4 seeds)")


def test_a_study_ends_with_its_table_its_figure_and_what_it_found(tmp_path, processes, monkeypatch, capsys):
    monkeypatch.setattr(study, "show", SHOW)
    words = ["study.envs=[cartpole]", "~study.variants.rank", "seeds=1"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    printed = capsys.readouterr().out
    assert (tmp_path / report.TABLE).read_text(encoding="utf-8") in printed
    assert printed.splitlines()[-1] == report.conclusions(report.read_study(tmp_path))[-1]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_study_draws_the_runs_that_have_finished(tmp_path, processes, monkeypatch, capsys):
    wait, finished = FakeRun.wait, []

    def interrupting(run):
        if finished:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        finished.append(run)
        return wait(run)

    monkeypatch.setattr(FakeRun, "wait", interrupting)
    monkeypatch.setattr(study, "show", SHOW)
    words = ["study.envs=[cartpole,acrobot]", "seeds=1", "workers=1"]
    assert study.run_study(configuration(*words), tmp_path) == INTERRUPTED
    assert len(study.read_rows(tmp_path / study.RUNS)) == 1
    printed = capsys.readouterr().out
    assert "| CartPole | uniform replay | 0 of 1 |" in printed
    assert "repeat the command to continue" in printed.splitlines()[-1]
    assert {path.suffix for path in tmp_path.glob("figure.*")} == {".png", ".svg"}


def texts(figure):
    legend = figure.legends[0] if figure.legends else figure.subfigs[-1].legends[0]
    return legend.get_title().get_text().replace("\n", " "), [text.get_text() for text in legend.get_texts()]


def test_the_figure_explains_lines_bands_and_marks(finished):
    note, entries = texts(report.draw(report.read_study(finished)))
    assert note == (
        "Line: interquartile mean of 5 seeds; band: 95 % bootstrap interval over seeds. "
        "Small dots: runs; large markers: medians with 95 % intervals."
    )
    assert entries[:3] == ["uniform replay", "PER", "ReaPER"]
    assert entries[3:] == ["threshold", "run that did not reach the threshold", "lower bound of a median"]


def test_many_variants_are_split_into_panels_that_all_show_the_baseline():
    assert report.panels_of(["a", "b", "base"], "base") == [["base", "a", "b"]]
    panels = report.panels_of([*"abcdefghi"], "a")
    assert [len(panel) for panel in panels] == [5, 5] and all(panel[0] == "a" for panel in panels)
    # the runs of the baseline may be missing
    assert report.panels_of(["b"], "a") == [["b"]]


def test_what_was_written_twice_counts_once(finished):
    path = finished / study.CURVES
    before = report.read_study(finished)
    path.write_text(path.read_text() + "\n".join(path.read_text().splitlines()[1:]) + "\n")
    after = report.read_study(finished)
    for env, variant, seed in (("cartpole", "reaper", 0), ("acrobot", "uniform", 4)):
        first, second = (each.runs[env][variant][seed] for each in (before, after))
        np.testing.assert_array_equal(first.steps, second.steps)


def test_pairs_are_of_the_same_seed(finished):
    found = report.read_study(finished)
    rows = found.rows["cartpole"]
    for seed, (theirs, ours) in enumerate([(100, 50), (200, 300), (400, 100), (100, 100)]):
        rows["per"][seed]["reached"], rows["reaper"][seed]["reached"] = str(theirs), str(ours)
        rows["per"][seed]["final"], rows["reaper"][seed]["final"] = str(-theirs), str(10 - theirs)
    del rows["per"][4]
    pairs = found.pairs("cartpole", "reaper", report.steps_of)
    assert pairs.tolist() == [[100, 50], [200, 300], [400, 100], [100, 100]]
    line = next(line for line in report.format_table(found).splitlines() if "| CartPole | ReaPER" in line)
    # the means are 200 and 137.5
    assert "| 0.69 [" in line
    assert line.endswith("| 10.0 [10.0, 10.0] |")


def cells_of(found, steps):
    """The cells "reached", "steps: median", "mean" and "ratio" of a variant, given (baseline, variant) of each seed.

    A number of steps that ends in "+" is of a run that did not reach the threshold.
    """
    rows = found.rows["cartpole"]
    for seed, pair in enumerate(steps):
        for variant, text in zip(("per", "reaper"), pair.split(), strict=True):
            number = text.removesuffix("+")
            rows[variant][seed] |= {"reached": number if number == text else "", "env_steps": number}
    line = next(line for line in report.format_table(found).splitlines() if "| CartPole | ReaPER" in line)
    return [cell.strip() for cell in line.split("|")[3:7]]


def test_a_slower_method_has_a_ratio_above_1(finished):
    ratio = cells_of(report.read_study(finished), ["100 230"] * 5)[-1]
    assert ratio == "2.30 [2.30, 2.30]"


def test_the_interval_of_the_ratio_is_that_of_the_means_over_resampled_pairs(finished):
    steps = np.array([[100, 250], [200, 300], [400, 900], [100, 150], [300, 800]])
    rng = np.random.default_rng(0)
    found = np.array([report.ratio_of_means(steps[rng.integers(5, size=5)]) for _ in range(intervals.RESAMPLES)])
    low, high = intervals.bca_percentiles(found, steps, report.ratio_of_means, [0.025, 0.975])
    ratio = cells_of(report.read_study(finished), [f"{a} {b}" for a, b in steps])[-1]
    assert ratio == f"{2400 / 1100:.2f} [{low:.2f}, {high:.2f}]"


def test_a_comparison_with_another_baseline(finished, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot", f"study={finished}", "--baseline", "reaper"])
    plot.main()
    table = capsys.readouterr().out
    assert "mean steps of the variant divided by the mean steps of ReaPER" in table and "1.50 [1.50, 1.50]" in table
    assert not list(finished.glob("table.md"))
    for words, message in (
        ([f"study={finished}", "--baseline", "other"], "the variants of"),
        (["x", "--baseline", "y"], "only"),
    ):
        monkeypatch.setattr(sys, "argv", ["plot", *words])
        with pytest.raises(SystemExit) as exit_:
            plot.main()
        assert exit_.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "cells"),
    [
        # a run of the variant is censored: its mean and the ratio are lower bounds, its median is not
        (["100 100"] * 4 + ["100 600+"], ["4 of 5", "100 [100, ≥ 600]", "≥ 200", "≥ 2.00 [1.00, 4.00]"]),
        (["100 100"] * 2 + ["100 600+"] * 3, ["2 of 5", "≥ 600 [100, ≥ 600]", "≥ 400", "≥ 4.00 [2.00, 6.00]"]),
        (["100 160+"] * 5, ["0 of 5", "≥ 160", "≥ 160", "≥ 1.60"]),
        # a run of the baseline is censored: the ratio is an upper bound
        (["200 100"] * 4 + ["200+ 100"], ["5 of 5", "100 [100, 100]", "100", "≤ 0.50 [0.50, 0.50]"]),
        # both have censored runs: the ratio is no bound
        (["200 200"] * 4 + ["200+ 200+"], ["4 of 5", "200 [200, ≥ 200]", "≥ 200", "~ 1.00 [1.00, 1.00]"]),
        (["200+ 200+"] * 5, ["0 of 5", "≥ 200", "≥ 200", "neither reached"]),
    ],
)
def test_numbers_from_censored_runs_are_marked(finished, steps, cells):
    assert cells_of(report.read_study(finished), steps) == cells


def test_censored_runs_can_be_drawn(finished):
    found = report.read_study(finished)
    cells_of(found, ["100 100"] * 2 + ["100 600+"] * 3)
    assert "lower bound of a median" in texts(report.draw(found))[1]


def test_no_study_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot", f"study={tmp_path}"])
    with pytest.raises(SystemExit) as exit_:
        plot.main()
    assert exit_.value.code == 2 and "python -m recipes.study writes it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["plot", "study=reapr"])
    with pytest.raises(SystemExit):
        plot.main()
    assert "did you mean reaper?" in capsys.readouterr().err


def test_published_tables_are_those_of_the_published_runs():
    paths = sorted(RESULTS.glob(f"*/{study.RUNS}"))
    assert [path.parent.name for path in paths] == STUDIES
    for path in paths:
        found = report.read_study(path.parent)
        assert OmegaConf.structured(found.config).name == path.parent.name
        assert (path.parent / report.TABLE).read_text(encoding="utf-8") == report.full_table(found)


@pytest.mark.parametrize("name", STUDIES)
def test_published_studies_are_those_of_the_configurations(name):
    """Else, `python -m recipes.study` would refuse to add runs to them."""
    published = OmegaConf.load(RESULTS / name / study.STUDY)
    config = OmegaConf.structured(study.parse_config(configuration(name=name), study.Config).study)
    assert {"also": [], **dict(published), "seeds": None} == {**dict(config), "seeds": None}


# (study, variant) that the pages compare other variants with
OTHER_BASELINES = [
    ("sset", "sset"),
    ("sset_obstacles", "sset"),
    ("sset_obstacles", "per"),
    ("sset_obstacles", "reverse sweep"),
    ("sset_skills", "sset"),
    ("sset_cagrad", "sset"),
    ("sset_events", "near goal"),
    ("sset_events", "goal"),
    ("sset_events", "gap and goal"),
    ("sset_events", "gap"),
    ("sset_events", "near start"),
    ("sset_tworooms", "gap shaping"),
    ("sset_tworooms", "gap and goal"),
    ("deepsea", "per"),
    ("deepsea", "recency"),
    ("deepsea12", "per"),
    ("minatar", "per"),
    ("acer_ratios", "replay ratio 0"),
    ("acer_ratios", "replay ratio 1"),
    ("acer_ratios", "replay ratio 8"),
    ("acer_baselines", "ACER, learning rate .009"),
    ("acer_baselines", "A3C, learning rate .001"),
    ("acer_invertedpendulum", "ACER, learning rate .003"),
    ("acer_invertedpendulum", "A3C, learning rate .003"),
]


@pytest.mark.parametrize("page", ["README.md", "recipes/results/README.md"])
def test_published_ratios_are_those_of_the_tables(page):
    tables = [path.read_text("utf-8") for path in RESULTS.glob(f"*/{report.TABLE}")]
    tables += [report.compare_with(RESULTS / name, baseline) for name, baseline in OTHER_BASELINES]
    found = {cell for table in tables for cell in re.split(r" \|\s", table)}
    ratios = re.findall(r"(?:[≥≤~] )?\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", (ROOT / page).read_text("utf-8"))
    assert len(ratios) >= 5
    assert [ratio for ratio in ratios if ratio not in found] == []
