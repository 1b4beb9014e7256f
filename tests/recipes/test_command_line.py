"""Messages of commands after mistakes, their exit codes, and Ctrl-C while a graph is compiled."""

import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torchrl.data.replay_buffers.samplers import RandomSampler

from recipes.common import replay, signatures
from recipes.common.cli import BAD_CONFIG, DONE, INTERRUPTED, check_command_line, is_out_of_memory, run_recipe
from recipes.common.hints import RECIPES, compose_config, composed, environments, no_such_option, options
from recipes.experiments import cliffwalk, sset_tabular, stylized
from tests.recipes.runs import ROOT, command, tiny
from torchrl_replay_ext import (
    DecoupledSampler,
    EventTableSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
)


def processes(session):
    """The command lines of the processes of a session."""
    found = subprocess.run(["ps", "-ww", "-o", "args=", "-s", str(session)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "<defunct>" not in line]


FUNCTIONS = {"study": "run_study", "experiments.dper_analysis": "analyse"}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command line that must be refused without leaving files; gives what stderr says."""

    def run(recipe, *words):
        monkeypatch.setattr(sys, "argv", [recipe, *words])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as exit:
            run_recipe(recipe, FUNCTIONS.get(recipe, "train"))
        errors = capsys.readouterr().err
        assert exit.value.code == BAD_CONFIG
        assert errors.startswith("bad configuration: ") and errors.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return errors

    return run


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("dqn sampler.alhpa=.5", "sampler.alhpa=.5: sampler has no key alhpa; did you mean alpha?"),
        ("dqn +sampler.alhpa=.5", "sampler has no key alhpa; did you mean alpha?"),
        ("dqn +sampler.epsilon=1", "did you mean eps?"),
        ("dqn +sampler.beta.strat=.4", "sampler.beta has no key strat; did you mean start?"),
        ("dqn sampler=uniform +sampler.beta=.4", "sampler has no key beta; its keys are none"),
        ("dqn sampler.name=per", "sampler.name=per: write sampler=per, which also sets the options of this sampler"),
        ("dqn sampler=per sampler.name=reaper", "sampler.name=reaper: write sampler=reaper, which also sets"),
        ("td3 sampler=dper sampler.critic.alpha=.5", "add a keyword that the file does not list with +sampler.critic"),
        ("td3 sampler=dper +sampler.critic.alhpa=.5", "sampler.critic has no key alhpa; did you mean alpha?"),
        ("td3 sampler=dper +sampler.critic.omega=.5", "sampler.critic has no key omega; its keys are alpha, beta"),
        ("dqn dqn.gama=.9", "did you mean gamma?"),
        ("dqn +dqn.gama=.9", "dqn has no key gama; did you mean gamma?"),
        ("dqn gamma=.9", "did you mean dqn.gamma?"),
        ("dqn lr=.9", "did you mean dqn.learning_rate?"),
        ("sac sac.lr=.9", "did you mean actor_learning_rate, critic_learning_rate or alpha_learning_rate?"),
        ("sac sac.alpha=.2", "did you mean alpha_learning_rate, initial_alpha or sampler.alpha?"),
        ("td3 td3.learning_rate=.2", "did you mean actor_learning_rate or critic_learning_rate?"),
        ("dqn +dqn.optimizer={name:adam,bteas:1}", "did you mean betas?"),
        ("acer +acer.optimizer={name:rmsprop,decy:1}", "acer.optimizer has no key decy; did you mean decay?"),
        ("dqn sede=3", "did you mean seed?"),
        ("dqn samplr=per", "did you mean sampler?"),
        ("dqn env.nmae=x", "did you mean name?"),
        ("dqn sampler.beta.strat=.4", "sampler.beta has no key strat; did you mean start?"),
        ("dqn seed.x=3", "seed is a value and has no keys"),
        ("dqn sampler.eps=.1", "add a keyword that the file does not list with +sampler.eps=.1"),
        ("dqn +sampler.num_streams=4", "sampler.num_streams: the recipe sets it"),
        ("dqn sampler=per +sampler.td_error=absolute", "sampler.td_error: the recipe sets it"),
        ("td3 sampler=dper +sampler.critic.capacity=5", "sampler.critic.capacity: the recipe sets it"),
        (
            "dqn env=threerooms sampler=sset_per +sampler.priority.num_streams=2",
            "sampler.priority.num_streams: the recipe",
        ),
        ("acer env=halfcheetah sampler=sset", "add sampler.retention=ring"),
        ("dqn env.truncation=terminal", "write +env.truncation=terminal"),
        ("dqn +env.trunctation=terminal", "env has no key trunctation; did you mean truncation?"),
        (
            "dqn env=threerooms +env.events.x={histroy:3,eta:.1}",
            "env.events.x has no key histroy; did you mean history?",
        ),
        ("dqn env=threerooms env.events.at_gop.eta=.1", "env.events has no key at_gop; did you mean at_gap?"),
        ("dqn env=atari/pong env.atari.num_frame=3", "did you mean num_frames?"),
        ("dqn sampler=reapr", "did you mean reaper?"),
        ("dqn sampler=RePER", "did you mean reaper, per or sset_per?"),
        ("dqn logger=tensorbord", "did you mean tensorboard?"),
        ("dqn dqn=cartpol", "did you mean cartpole?"),
        ("dqn env=cartpol", "did you mean cartpole?"),
        ("dqn env=CartPole-v1", "did you mean cartpole?"),
        ("dqn env=atari/pongg", "did you mean atari/pong?"),
        ("dqn env=gridworld", "or atari/<game> (python -m recipes.dqn --help atari lists the games)"),
        ("dqn +env=cartpole", "write env=..., without the +"),
        ("study study=reper", "did you mean reaper or dper?"),
        ("study study.colum=x", "did you mean column?"),
        (
            "study study.variants.per=['sampler=pre']",
            "study.variants.per, env=cartpole: sampler=pre: there is no such choice; did you mean per?",
        ),
        ("dqn env=pendulum", "use recipes.sac or recipes.td3"),
        ("distributed env=pendulum", "use recipes.sac or recipes.td3"),
        ("td3 env=cartpole", "use recipes.dqn"),
        ("sac env=atari/pong", "use recipes.dqn"),
        ("sac env=ant", "use recipes.td3"),
        ("acer env=ant", "use recipes.td3"),
        ("acer env=hopper", "or those of another environment: acer=halfcheetah env=hopper"),
        ("r2d2 env=cartpole", "or those of another environment: r2d2=cartpole_positions env=cartpole"),
        ("sac env=invertedpendulum", "or those of another environment: sac=pendulum env=invertedpendulum"),
        ("r2d2 r2d2=cartpole_positions env=atari/pong", "recipes.r2d2 needs vector observations; use recipes.dqn"),
        ("distributed --help atari", "--help atari: there is no such topic"),
        (
            "distributed dqn=cartpole env=atari/pong",
            "recipes.distributed does not support Atari games; use recipes.dqn",
        ),
        ("dqn env.id=Pendulum-v1", "use recipes.sac, recipes.td3 or recipes.acer"),
        ("dqn env.id=CartPol-v1", "Did you mean: CartPole?"),
        ("dqn env=threerooms +env.options.gama=.9", "env.options.gama: recipes.envs:ThreeRooms-v0 has no option gama"),
        ("dqn env=threerooms +env.evaluations.a.shaping=gpa", "env.evaluations.a: ThreeRooms(shaping='gpa')"),
        ("dqn sampler=per sampler.omega=1", "sampler has no key omega; it is an option of sampler=reaper"),
        ("dqn sampler=per sampler.stratifed=true", "sampler has no key stratifed; did you mean stratified?"),
        ("dqn sampler=per sampler.stratified=true", "add a keyword that the file does not list with +sampler.strat"),
        ("dqn +dqn.optimizer=adam", "dqn.optimizer=adam: must be a group, as in dqn.optimizer={name: adam}"),
        ("acer acer.sigma=.1", "acer.sigma has no effect on the actions of env=cartpole; leave it out"),
        ("acer env=pendulum acer.statistics=logits", "acer.statistics has no effect on the actions of env=pendulum"),
        ("acer env.id=Pendulum-v1 acer.sigma=.1", "acer does not set sigma by default; write +acer.sigma=.1"),
        ("acer updates_per_graph=2", "recipes.acer has no key updates_per_graph"),
        ("distributed +updates_per_graph=2", "the configuration has no key updates_per_graph"),
        ("study study.first_seed=-1", "study.first_seed=-1: must be >= 0"),
        ("dqn sampler=dper", "recipes.dqn does not support it; use recipes.td3 or recipes.sac"),
        ("acer sampler=dper", "recipes.acer does not support it; use recipes.td3 or recipes.sac"),
        ("dqn sampler=sset", "env=cartpole has no events"),
        ("dqn --seed=3", "--seed=3: there is no such flag; options have no dashes: seed=<value>"),
        ("dqn --cgf job", "--cgf: there is no such flag; did you mean --cfg?"),
        ("dqn seed 3", "seed: write seed=<value>, without spaces around the equals sign"),
        ("dqn seed=1,2", "add -m for one run with each of them"),
        ("dqn hydra.run.dri=x", "did you mean hydra.run.dir"),
        ("dqn --help atri", "--help atri: there is no such topic; did you mean atari?"),
        ("dqn --help sampler=reapr", "did you mean reaper?"),
    ],
)
def test_mistakes_are_answered_with_the_right_name(refused, command, hint):
    recipe, *words = command.split()
    assert hint in refused(recipe, *words)


@pytest.mark.parametrize(
    ("command", "choice"),
    [
        ("dqn compile=ture", "true"),
        ("dqn stop_at_threshold=Flase", "false"),
        ("dqn device=cud", "cuda, cuda:1 or cpu"),
        ("dqn logger.backend=tensorbord", "tensorboard"),
        ("dqn dqn.loss_function=smooth", "smooth_l1"),
        ("dqn +env.truncation=terminate", "terminal"),
        ("dqn env=threerooms env.training.shaping=gpa", "gap"),
        ("dqn sampler.name=pre", "per"),
        ("dqn +dqn.optimizer.name=adm", "adam"),
        ("dqn sampler=rank +sampler.segments=piecwise", "piecewise"),
        ("dqn env=threerooms sampler=sset sampler.retention=pined", "pinned"),
        ("dqn env=threerooms sampler=sset sampler.allocation=sistematic", "systematic"),
        ("dqn env=threerooms sampler=sset sampler.correction=mixtur", "mixture"),
        ("dqn env=threerooms sampler=sset_per sampler.priority.kind=rnak", "rank"),
        ("td3 sampler=dper sampler.score=kld", "kl"),
        ("td3 sampler=dper sampler.granularity=bach", "batch"),
        ("td3 sampler=dper sampler.critic.name=pre", "per"),
        ("td3 td3.noise=gausian", "gaussian"),
        ("acer acer.returns=retrase", "retrace"),
        ("acer acer.statistics=prob", "probs or log_probs"),
        ("sac env=lunarlander_continuous env.events.land_near_middle.function=land_near_midle", "land_near_middle"),
        ("study study.recipe=dqm", "dqn"),
        ("experiments.dper_analysis granularity=[bach]", "batch"),
    ],
)
def test_mistyped_values_are_answered_with_the_right_one(refused, command, choice):
    recipe, *words = command.split()
    assert refused(recipe, *words).endswith(f"did you mean {choice}?\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("dqn dqn.gamma", "dqn.gamma: write dqn.gamma=<value>"),
        ("dqn device=gpu", "device=gpu: choose auto, cpu, cuda"),
        ("dqn seed=abc", "seed=abc: must be a whole number"),
        ("dqn dqn.total_steps=1e4", "dqn.total_steps=10000.0: must be a whole number, as in 10000"),
        ("dqn seed=null", "seed=null: must have a value"),
        ("study study.envs=[]", "study.envs=[]: must have at least one environment"),
        ("study study.variants={per:", "a bracket is not closed; quote the whole word: 'key={name: [value]}'"),
        ("dqn dqn.gamma=high", "dqn.gamma=high: must be a number"),
        ("dqn dqn.hidden_sizes=64", "dqn.hidden_sizes=64: must be a list, as in dqn.hidden_sizes=[64]"),
        ("dqn sampler.alpha=abc", "sampler.alpha=abc: must be a number or {start, end}"),
        ("dqn +sampler.eps=true", "sampler.eps=True: must be a number"),
        ("dqn +sampler.eps={start:.4}", "sampler.eps={'start': 0.4}: must be a number"),
        ("dqn +dqn.optimizer.weight_decay=0.1", "dqn.optimizer.weight_decay: dqn.optimizer has no key weight_decay"),
        ("dqn dqn.n_step=50000", "dqn.n_step=50000: num_envs · n_step must be < dqn.total_steps=50000"),
        (
            "sac sampler=dper sampler.critic={name:lap}",
            "sampler=lap: needs the Huber loss; this recipe does not have it",
        ),
        ("dqn sampler=recency +sampler.beta={start:.4}", "sampler.beta={'start': 0.4}: must be a number"),
        ("dqn ~sampler.beta +sampler.beta={start:.4}", "sampler.beta: needs end, as in sampler.beta={start: "),
        ("dqn env=threerooms sampler=sset_per sampler.priority=per", "sampler.priority=per: must be a group, as in"),
        (
            "td3 sampler=dper sampler.critic=per",
            "sampler.critic=per: must be a group, as in sampler.critic={name: per}",
        ),
        (
            "dqn env=atari/pong env.atari.repeat_action_probability=2",
            "repeat_action_probability=2.0: must be in [0, 1]",
        ),
        ("dqn num_threads=1000000000000", "num_threads=1000000000000: must be <= 1024"),
        ("dqn dqn.buffer_size=0", "dqn.buffer_size=0: must be > 0"),
        ("dqn logger.backend=paper", "logger.backend=paper: choose null or tensorboard"),
        ("dqn sampler.alpha=-1", "ReaPERSampler(alpha=-1): alpha must be >= 0"),
        ("dqn dqn.buffer_size=1000000000000", "dqn.buffer_size=1000000000000: needs at least 44,000 GB, and cpu has "),
        ("dqn dqn.batch_size=200000", "dqn.batch_size=200000: must be <= dqn.buffer_size=100000"),
        ("dqn dqn.buffer_size=100", "dqn.train_interval=256: must be <= dqn.buffer_size=100"),
        ("acer acer.buffer_size=100", "acer.batch_size=320: must be <= acer.buffer_size=100"),
        ("acer +acer.sigma=.3", "acer.sigma: has no effect on discrete actions; leave it out"),
        ("acer acer=pendulum acer.dueling=false", "acer.dueling: has no effect on discrete actions"),
        ("acer env=pendulum +acer.statistics=probs", "acer.statistics: has no effect on continuous actions"),
        (
            "acer acer.returns=truncated_importance_sampling",
            "acer.returns=truncated_importance_sampling: actions are discrete; choose retrace, importance_sampling",
        ),
        ("acer acer.slice_len=0", "acer.slice_len=0: must be > 0"),
        ("acer acer.train_interval=100", "acer.train_interval=100: must be num_envs · acer.slice_len = 160"),
        ("dqn dqn.hidden_sizes=[10000000,10000000]", "not enough memory ("),
        ("td3 td3.buffer_size=1000000000000", "td3.buffer_size=1000000000000: needs at least "),
        ("acer acer.buffer_size=1000000000000", "acer.buffer_size=1000000000000: needs at least "),
        ("experiments.dper_analysis", "run=null: pass the directory of a run of recipes.td3"),
        ("experiments.dper_analysis run=nowhere", "run=nowhere: no config.yaml there"),
        ("dqn resume=nowhere", "resume=nowhere: no config.yaml there"),
        ("dqn --run --multirun", "Only one of --run, --multirun"),
    ],
)
def test_values_that_cannot_be_are_refused_before_training_starts(refused, command, message):
    recipe, *words = command.split()
    assert message in refused(recipe, *words)


def test_an_environment_without_settings_in_any_recipe_is_told_how_to_get_some():
    message = no_such_option("dqn", "line", "dqn", ["env=line"])
    way = "write recipes/conf/dqn/line.yaml, or choose those of another environment, as in dqn=acrobot env=line"
    assert way in message


PACKAGES = {"minatar": "minatar", "doorkey": "minigrid", "lavagap": "minigrid", "atari": "ale_py"}


def installed(env):
    package = PACKAGES.get(env.split("/")[0], PACKAGES.get(env.split("_")[0]))
    return package is None or importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_supports_the_environments_that_it_offers(shown, recipe):
    schema = import_module(f"recipes.common.schemas.{recipe}").Config
    offered = re.search(r"\n  env=\w+: (.*?)\n(?=  \w+=)", shown(recipe), re.DOTALL)
    names = offered[1].split(", or")[0].replace(",", " ").split()
    games = ["atari/pong"] if "atari/<game>" in offered[1] else []
    assert set(names) == set(environments(recipe)) and bool(games) == (recipe in ("dqn", "acer"))
    for env in filter(installed, names + games):
        assert check_command_line(recipe, schema, [f"env={env}"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_environment_without_settings_runs_with_those_that_the_message_names(refused, recipe):
    schema = import_module(f"recipes.common.schemas.{recipe}").Config
    named = 0
    for env in {*options("env"), "atari/pong"} - {*environments(recipe)}:
        if not installed(env) or (env == "atari/pong" and recipe in ("dqn", "acer")):
            continue
        found = re.search(r"or those of another environment: (.*)", refused(recipe, f"env={env}"))
        if found:
            named += 1
            assert check_command_line(recipe, schema, found[1].split())
            continue
        # no settings of the recipe fit: neither do those of its first environment
        with pytest.raises(ValueError):
            check_command_line(recipe, schema, [f"{RECIPES[recipe]}={environments(recipe)[0]}", f"env={env}"])
    assert named >= 1


def test_a_run_of_another_recipe_is_not_resumed(refused, tmp_path):
    (tmp_path / "config.yaml").write_text("dqn: {}\n")
    (tmp_path / "checkpoint.zip").touch()
    message = f"resume={tmp_path}: a run of recipes.dqn; use python -m recipes.dqn resume={tmp_path}"
    assert message in refused("td3", f"resume={tmp_path}")


def test_a_directory_of_something_else_is_not_resumed(refused, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}\n")
    (tmp_path / "checkpoint.zip").touch()
    assert f"resume={tmp_path}: config.yaml there is not that of a training run" in refused("dqn", f"resume={tmp_path}")


@pytest.mark.parametrize(("trained", "resumed"), [("dqn", "distributed"), ("distributed", "dqn")])
def test_recipes_with_the_same_hyperparameters_are_told_apart(refused, tmp_path, trained, resumed):
    OmegaConf.save(compose_config(trained, []), tmp_path / "config.yaml")
    (tmp_path / "checkpoint.zip").touch()
    message = f"resume={tmp_path}: a run of recipes.{trained}; use python -m recipes.{trained} resume={tmp_path}"
    assert message in refused(resumed, f"resume={tmp_path}")


@pytest.mark.parametrize("word", ["sampler=per,reaper,pre", "dqn.gamma=.9,2"])
def test_all_jobs_of_a_sweep_are_checked_before_the_first_starts(refused, word):
    assert f"{word.split('=')[0]}={word.split(',')[-1]}" in refused("dqn", "-m", "seed=1,2", word)


@pytest.mark.parametrize("words", [["seed=3"], ["-m", "seed=3,4"]])
def test_runs_get_a_directory_named_after_recipe_environment_sampler_and_seed(tmp_path, words):
    running = command("td3", *words, *tiny("td3"), cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    _, errors = running.communicate(timeout=300)
    assert running.returncode == DONE, errors
    found = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("config.yaml"))
    seeds = words[-1].removeprefix("seed=").split(",")
    assert [name.rpartition("-")[0].rpartition("-")[0] for name in found] == [
        f"runs/td3/pendulum/per/seed{seed}" for seed in seeds
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_samplers_and_environments_of_a_recipe_pass_the_checks(recipe):
    schema = import_module(f"recipes.common.schemas.{recipe}").Config
    own = environments(recipe)
    with_events = next((env for env in ("threerooms", "halfcheetah") if env in own), own[0])
    commands = [f"env={own[0]}"] + [f"env={with_events} sampler={name}" for name in options("sampler", recipe)]
    huber = "td3.loss_function=smooth_l1" if recipe == "td3" else "dqn.loss_function=smooth_l1"
    commands = [f"{words} {huber}" if words.endswith("lap") else words for words in commands]
    if recipe == "acer":
        # settings of a task with the other kind of actions, some without effect
        commands += ["env=cartpole acer=pendulum", "env=pendulum acer=cartpole"]
        commands = [f"{words} sampler.retention=ring" if "sset" in words else words for words in commands]
    for words in commands:
        assert check_command_line(recipe, schema, words.split())


def test_the_names_of_samplers_and_their_classes_agree_with_those_that_are_built():
    built = {name: None if kind is RandomSampler else kind.__name__ for name, kind in replay.SAMPLERS.items()}
    assert {name: signatures.SAMPLER_CLASSES[name] for name in built} == built
    assert set(signatures.SAMPLER_CLASSES) == set(options("sampler"))


@pytest.mark.parametrize(
    "kind",
    [ProportionalSampler, RankBasedSampler, ReaPERSampler, EventTableSampler, DecoupledSampler, torch.optim.Adam],
)
def test_signatures_read_from_source_agree_with_the_classes(kind):
    module = "torchrl_replay_ext" if kind.__module__.startswith("torchrl_replay_ext") else "torch.optim.adam"
    found, true = signatures.arguments(module, kind.__name__), inspect.signature(kind).parameters
    assert list(found) == list(true)
    for name, argument in found.items():
        assert (argument.default is None) == (true[name].default is inspect.Parameter.empty)


@pytest.mark.parametrize("place", ["file", "file/run", "/dev/null/run", "/proc/nowhere/run"])
def test_directories_that_cannot_be_made_are_named(refused, tmp_path, place):
    (tmp_path / "file").touch()
    errors = refused("dqn", f"hydra.run.dir={tmp_path / place}")
    assert str((tmp_path / place).parts[-2]) in errors
    assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("experiment", [cliffwalk, sset_tabular, stylized])
def test_experiments_name_an_output_directory_that_cannot_be_made(capsys, experiment):
    with pytest.raises(SystemExit) as exit:
        experiment.main(["--out", "/dev/null/run"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith("error: --out /dev/null/run: Not a directory\n")


def test_mistakes_are_reported_before_torch_is_imported():
    code = (
        "import runpy, sys\n"
        "sys.argv[0] = 'dqn'\n"
        "try:\n    runpy.run_module('recipes.dqn', run_name='__main__')\n"
        "except SystemExit as exit:\n    print(exit.code, 'torch' in sys.modules)\n"
    )
    for words in ("dqn.gama=3", "dqn.gamma=3", "env=pendulum", "+sampler.alhpa=3", "env.id=CartPol-v1", "--help"):
        found = subprocess.run([sys.executable, "-c", code, words], cwd=ROOT, capture_output=True, text=True)
        assert found.stdout.splitlines()[-1] == ("0 False" if words == "--help" else "2 False"), found.stderr


@pytest.fixture
def shown(monkeypatch, capsys):
    """The text of --help on a terminal of 100 columns."""

    def run(recipe, *words):
        monkeypatch.setattr(sys, "argv", [recipe, "--help", *words])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit:
            run_recipe(recipe)
        assert exit.value.code == 0
        return capsys.readouterr().out

    return run


def explained(text):
    """Options and explanations in a text of --help."""
    lines = text.split("as key=value with their defaults")[1].splitlines()
    rows = []
    for line in lines:
        if match := re.match(r"  (\+?[\w.<>]+)(?:=\S.*?)?(?:  +(\S.*))?$", line):
            rows.append([match[1], match[2] or ""])
        elif rows and line.startswith("    "):
            rows[-1][1] += line
    return dict(rows)


@pytest.mark.parametrize(
    "command",
    [
        "dqn env=threerooms sampler=sset_per",
        "dqn env=atari/pong sampler=rank",
        "distributed",
        "sac env=humanoid sampler=sset",
        "td3 env=lunarlander_continuous sampler=dper",
        "acer env=halfcheetah sampler=recency",
        "experiments.dper_analysis",
        "study study=sset_tworooms",
    ],
)
def test_help_explains_every_option(shown, command):
    recipe, *words = command.split()
    text = shown(recipe, *words)
    options = explained(text)
    # values of an entry are explained with the entry
    whole = ("env.events", "study.variants", "study.claims", "study.envs")
    for option, explanation in options.items():
        assert explanation or option.rpartition(".")[0] in whole, option
    config = composed(recipe, words)
    for group, value in config.items():
        for key in value if isinstance(value, DictConfig) else ():
            assert f"{group}.{key}" in options
    assert all(len(line) <= 100 for line in text.splitlines() if "=[" not in line and "={" not in line)


def test_help_explains_options_that_no_file_lists(shown):
    options = explained(shown("dqn", "env=threerooms", "sampler=reaper"))
    for option, words in {
        "+env.truncation": "how targets treat a time limit",
        "+env.evaluations": "columns return_<name> of progress.csv",
        "env.events.<name>.history": "number of transitions, up to and including the event",
        "+env.events.<name>.above": "the reward is larger than this value",
        "+dqn.optimizer": "name and keyword arguments",
        "+sampler.weight_norm": "largest weight of the batch",
    }.items():
        assert words in " ".join(options[option].split())


def test_the_help_of_a_study_quotes_the_words_of_command_lines(shown):
    text = shown("study", "study=reaper")
    assert 'study.variants.per=["sampler=per"]' in text
    assert OverridesParser.create().parse_override('study.fixed=["compile=true"]').value() == ["compile=true"]
    assert 'study.fixed=["compile=true"]' in text


def test_help_lists_games_and_their_options_on_request(shown):
    assert "ms_pacman" not in shown("dqn")
    text = shown("dqn", "atari")
    assert "ms_pacman" in text and "env.atari.frame_skip=4  " in text


def test_running_out_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**50)
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**58)
    assert is_out_of_memory(torchs.value) and is_out_of_memory(numpys.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes with ps")
@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_while_a_graph_is_compiled_ends_like_any_other(tmp_path, saved):
    """The compiler's processes get the signal too, as all of a terminal's do."""
    run_dir = tmp_path / "run"
    words = [*tiny("dqn"), "sampler=per", "compile=true", f"hydra.run.dir={run_dir}"]
    words += ["checkpoint_interval=16"] * saved
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    running = command("dqn", *words, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        # a kernel: a compiler is started before, too, to try out what the processor can do
        while not any(".main.cpp" in line for line in processes(running.pid)):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline, "no compiler was started"
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)
        out, errors = running.communicate(timeout=120)
        assert running.returncode == INTERRUPTED, errors
        assert "Traceback" not in errors and "Error" not in errors
        assert out.startswith("interrupted at step ") and out.count("\n") == 1
        assert (run_dir / "checkpoint.zip").is_file() == saved
        assert (f"resume={run_dir}" in out) == saved
        deadline = time.monotonic() + 20
        while processes(running.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not processes(running.pid)
    finally:
        if processes(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
