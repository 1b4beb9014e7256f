"""Studies: the runs that they start, resume and compare, and the tables they leave."""

import os
import re
import signal
import sys
import time
from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recipes.common import files
from recipes.common.cli import DONE, INTERRUPTED
from recipes.common.errors import ConfigError
from recipes.experiments import reliability
from recipes.studies import claims, report, study
from tests.recipes.runs import ROOT, composed
from tests.recipes.test_plot import write_run

RESULTS = ROOT / "recipes" / "results"
# not run yet; atari10 takes years of a CPU
NOT_RUN = ("atari10",)
OF_EARLIER_CODE = ("dper_candidates", "dper_sac")  # their samplers are gone
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
        # a lucky evaluation before the first update
        returns[0] = 480.0 if words["sampler"] == "per" else 0.0
        run_dir = study.Path(words["hydra.run.dir"])
        write_run(run_dir, returns, words["sampler"], env=words["env"], threshold=475.0, every=100)
        text = (run_dir / "progress.csv").read_text().splitlines()
        extra = ["updates,wall_time,cpu_time", "0,1.25,0.75", *["7,1.25,0.75"] * (len(text) - 2)]
        (run_dir / "progress.csv").write_text("".join(f"{a},{b}\n" for a, b in zip(text, extra, strict=True)))

    def wait(self):
        return self.code

    def send_signal(self, number):
        self.code = INTERRUPTED


SHOW = study.show
ONE_SEED = ["study.envs=[cartpole]", "seeds=1"]


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
def test_studies_can_be_run_and_are_the_published_ones(name):
    """If they differed from those in results/, `python -m recipes.study` would refuse to add runs."""
    config = configuration(name=name)
    # of variants that differ only in numbers, one: composing takes 0.2 s
    jobs = study.jobs_of(config.study, 1)
    kinds = {(job.env, *(re.sub(r"(?<![a-z])[-.\de]+\b", "0", word) for word in job.words)): job for job in jobs}
    for job in kinds.values():
        job_config = composed(job.recipe, f"env={job.env}", *(word for word in job.words if "hydra" not in word))
        assert config.study.least or job_config.env.reward_threshold or job_config.env.atari
    if name in NOT_RUN:
        return
    published = files.load_config(RESULTS / name / files.STUDY)
    assert {"also": [], **dict(published), "seeds": None} == {**asdict(config.study), "seeds": None}


def test_a_study_is_gone_on_with(tmp_path, processes, capsys):
    words = ["study.envs=[cartpole]", "workers=2"]
    assert study.run_study(configuration(*words, "seeds=1"), tmp_path) == DONE
    assert len(processes.started) == 4
    # one is there to the end but for its row, one has just begun
    rows = files.read_rows(tmp_path / files.RUNS)
    (tmp_path / "runs/cartpole/per/seed1").mkdir(parents=True)
    half = tmp_path / "runs/cartpole/reaper/seed1"
    processes(
        [sys.executable, "", "", "sampler=reaper", "seed=1", "env=cartpole", f"hydra.run.dir={half}"], stdout=None
    )
    (half / files.CHECKPOINT).touch()
    processes.started.clear()
    assert study.run_study(configuration(*words, "seeds=2"), tmp_path) == study.FAILED
    assert sorted(command[-1].split("/")[-2] for command in processes.started) == ["per", "rank", "reaper", "uniform"]
    assert ["recipes.dqn", f"resume='{half}'"] in processes.started
    errors = capsys.readouterr().err
    assert "failed: python -m recipes.dqn env=cartpole compile=true sampler=rank seed=1 (see" in errors
    assert (tmp_path / "runs/cartpole/rank/seed1.log").read_text() == "no such thing\n"
    assert files.read_rows(tmp_path / files.RUNS)[:4] == rows
    found = {(row["variant"], row["seed"]): row for row in files.read_rows(tmp_path / files.RUNS)}
    assert len(found) == 7
    row = found["reaper", "1"]
    assert (row["env_steps"], row["reached"], row["last"]) == ("200", "200", "480.0")
    assert (row["wall_time"], row["cpu_time"]) == ("1.2", "0.8")
    curve = [row for row in files.read_rows(tmp_path / files.CURVES) if row["seed"] == "1"]
    assert {row["cpu_time"] for row in curve} == {"0.8"}
    assert row["command"] == "python -m recipes.dqn env=cartpole compile=true sampler=reaper seed=1"
    assert found["uniform", "0"]["reached"] == ""
    assert found["per", "0"]["reached"] == "300"
    # the failed one is tried again
    processes.started.clear()
    assert study.run_study(configuration(*words, "seeds=2"), tmp_path) == study.FAILED
    assert len(processes.started) == 1


@pytest.mark.parametrize("word", ["study.fixed=[]", "study.envs=[acrobot]", "~study.variants.rank", "study.in_a_row=2"])
def test_another_study_needs_another_directory(tmp_path, processes, word):
    assert study.run_study(configuration(*ONE_SEED), tmp_path) == DONE
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds another study"):
        study.run_study(configuration(*ONE_SEED, word), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_study_grows(tmp_path, processes):
    """Further variants and environments; finished runs are kept."""
    assert study.run_study(configuration(*ONE_SEED), tmp_path) == DONE
    before = files.read_rows(tmp_path / files.RUNS)
    processes.started.clear()
    words = ["study.envs=[acrobot,cartpole]", "seeds=1", "+study.variants.recency=['sampler=recency']"]
    assert study.run_study(configuration(*words, "study.baseline=recency"), tmp_path) == DONE
    assert files.read_rows(tmp_path / files.RUNS)[: len(before)] == before
    assert len(processes.started) == 6
    found = report.read_study(tmp_path).runs
    assert set(found) == {"acrobot", "cartpole"}
    assert set(found["cartpole"]) == {"uniform", "per", "rank", "reaper", "recency"}


def test_the_threshold_must_be_kept_up():
    steps, values = [10, 20, 30, 40, 50], [0, 5, 0, 5, 5]
    assert [files.steps_to_reach(steps, values, 5, count) for count in (1, 2, 3)] == [20, 40, None]
    # the run ended at its threshold
    assert files.steps_to_reach(steps, values, 5, 3, stopped=True) == 40
    assert files.steps_to_reach(steps, [0, 5, 5, 5, 0], 5, 4, stopped=True) is None


# --- reports


@pytest.fixture
def finished(tmp_path, processes, capsys):
    words = ["study.envs=[cartpole,acrobot]", "~study.variants.rank", "seeds=5"]
    assert study.run_study(configuration(*words), tmp_path) == DONE
    capsys.readouterr()
    return tmp_path


def test_a_report(finished, drawn):
    table = drawn(f"study={finished}")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| C")]
    by_variant = {line[1]: line[2:] for line in lines}
    assert by_variant["PER"][:5] == ["5 of 5", "300", "300", "", ""]
    assert by_variant["ReaPER"][:5] == ["5 of 5", "200", "200", "0.67 [0.67, 0.67]", "< 0.001"]
    # no run reached the threshold: all its steps, as a lower bound
    assert by_variant["uniform replay"][:4] == ["0 of 5", "≥ 300", "≥ 300", "≥ 1.00"]
    assert f"study={finished / files.STUDY}; seeds 0 to 4; commit" in table  # it has fewer variants
    assert "steps of the variant divided by those of PER with the same seed" in table
    assert table.startswith((finished / report.TABLE).read_text(encoding="utf-8"))
    assert {path.suffix for path in finished.glob("figure.*")} == {".png", ".svg"}


@pytest.mark.parametrize(
    ("word", "source", "claimed"),
    [
        ("seeds=1", "reaper", ["reaper"]),
        ("study.fixed=['dqn.total_steps=5000']", None, []),
    ],
)
def test_a_varied_study_names_its_file_and_keeps_no_claims(tmp_path, processes, word, source, claimed):
    assert study.run_study(configuration("seeds=1", *[word] * (word != "seeds=1")), tmp_path) == DONE
    found = report.read_study(tmp_path)
    command = report.provenance(found).split(";")[0]
    assert command == f"python -m recipes.study study={source or tmp_path / files.STUDY}"
    assert [*found.config.claims.get("cartpole", {})] == claimed
    again = composed("study", command.split()[-1]).study
    assert (again.fixed, again.variants) == (found.config.fixed, found.config.variants)


def test_the_last_lines_compare_each_variant_with_the_baseline_in_the_numbers_of_the_table(finished):
    sentences = report.report(finished).splitlines()[-4:]
    for env in ("CartPole", "Acrobot"):
        reaper = "ReaPER reached the threshold after 200 steps, PER after 300: 0.67 [0.67, 0.67] times as many"
        uniform = "uniform replay did not reach the threshold in ≥ 300 steps, PER after 300: ≥ 1.00 times as many"
        assert {f"{env}: {each} (5 seeds)" for each in (reaper, uniform)} <= {*sentences}


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
    assert len(files.read_rows(tmp_path / files.RUNS)) == 1
    printed = capsys.readouterr().out
    assert "| CartPole | uniform replay | 0 of 1 |" in printed
    assert "repeat the command to continue" in printed.splitlines()[-1]
    assert {path.suffix for path in tmp_path.glob("figure.*")} == {".png", ".svg"}


def test_a_comparison_with_another_baseline(finished, drawn, plot_refuses):
    table = drawn(f"study={finished}", "--baseline", "reaper")
    assert (
        "steps of the variant divided by those of ReaPER with the same seed" in table and "1.50 [1.50, 1.50]" in table
    )
    assert not list(finished.glob("table.md"))
    assert "the variants of" in plot_refuses(f"study={finished}", "--baseline", "other")
    assert "only" in plot_refuses("x", "--baseline", "y")


def test_runs_of_the_same_seed_in_several_studies_count_as_one(finished):
    one = report.read_study(finished)
    run = one.runs["cartpole"]["per"][0]

    def study_with(**reached):
        """Of each variant, the steps to the threshold by seed; negative: all steps of a run that did not reach it."""
        runs = {
            name: [
                replace(run, seed=seed, steps=np.array([abs(at)]), reached=at if at > 0 else None)
                for seed, at in of.items()
            ]
            for name, of in reached.items()
        }
        return replace(one, config=replace(one.config, baseline="per"), runs={"cartpole": runs})

    first = study_with(per={0: -10, 1: 40}, reaper={0: 30, 1: 8, 7: 99})
    second = study_with(per={0: 30, 2: 5}, reaper={0: 90, 2: -6})
    both = report.pool([first, second])
    expected = [(300**0.5, 2700**0.5), (40, 8), (5, 6)]
    np.testing.assert_allclose(both.pairs("cartpole", "reaper", report.steps_of), expected)
    expected = [(True, False), (False, False), (False, True)]
    np.testing.assert_array_equal(both.pairs("cartpole", "reaper", report.censored_of), expected)


def test_variants_that_all_studies_have_are_pooled(finished, tmp_path, drawn):
    one = report.read_study(finished)
    fewer = replace(one, runs={"cartpole": {name: one.runs["cartpole"][name] for name in ("per", "reaper")}})
    both = report.pool([one, fewer])
    assert {env: [*variants] for env, variants in both.runs.items()} == {"cartpole": ["per", "reaper"]}
    printed = drawn(f"study={finished}", f"study={finished}", "--out", tmp_path / "pooled")
    assert "ReaPER reached the threshold after 200 steps, PER after 300: 0.67 [0.67, 0.67]" in printed
    assert "(5 seeds)" in printed and "mean of 5 seeds" in (tmp_path / "pooled.svg").read_text("utf-8")
    assert not (finished / report.TABLE).exists()


def test_published_tables_are_those_of_the_published_runs():
    paths = sorted(RESULTS.glob(f"*/{files.RUNS}"))
    assert {path.parent.name for path in paths} == {*STUDIES, *OF_EARLIER_CODE} - {*NOT_RUN}
    for path in paths:
        found = report.read_study(path.parent)
        assert OmegaConf.structured(found.config).name == path.parent.name
        assert (path.parent / report.TABLE).read_text(encoding="utf-8") == report.full_table(found)


# study -> the variants that the pages compare others with
OTHER_BASELINES = {
    "sset": ["sset"],
    "sset_obstacles": ["sset", "per", "reverse sweep"],
    "sset_skills": ["sset"],
    "sset_cagrad": ["sset"],
    "sset_events": ["near goal", "goal", "gap and goal", "gap", "near start"],
    "sset_tworooms": ["gap shaping", "gap and goal"],
    "reaper": ["uniform"],
    "deepsea": ["per", "recency"],
    "deepsea12": ["per"],
    "deepsea_20": ["per"],
    "minatar": ["per"],
    "minatar_20": ["per", "recency"],
    "reaper_td3_lunarlander": ["per"],
    "reaper_sac_lunarlander": ["per"],
    "acer_ratios": ["replay ratio 0", "replay ratio 1", "replay ratio 8"],
    "acer_baselines": ["ACER, learning rate .009", "A3C, learning rate .001"],
    "acer_invertedpendulum": ["ACER, learning rate .003", "A3C, learning rate .003"],
}


def test_published_ratios_are_those_of_the_tables():
    texts = [path.read_text("utf-8") for path in RESULTS.glob(f"*/{report.TABLE}")]
    texts += [report.report(RESULTS / name, other) for name, others in OTHER_BASELINES.items() for other in others]
    kinds = reliability.KINDS
    measured = [
        {key: kind(row[key]) for key, kind in kinds.items()} for row in files.read_csv(RESULTS / "reliability.csv")
    ]
    texts += [reliability.format_table(measured), *claims.tables().values()]
    form = r"(?:[≥≤~] )?\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]"
    found = {ratio for text in texts for ratio in re.findall(form, text)}
    for page in (ROOT / "README.md", RESULTS / "README.md"):
        ratios = re.findall(form, " ".join(page.read_text("utf-8").split()))
        assert len(ratios) >= 5
        assert [ratio for ratio in ratios if ratio not in found] == []


def test_verdicts_are_those_of_the_rule():
    page = (RESULTS / "README.md").read_text("utf-8")
    assert claims.inserted(page, claims.tables()) == page
