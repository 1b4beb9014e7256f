"""Messages of commands after mistakes, their exit codes, --help, and Ctrl-C while a graph is compiled."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from recipes.common.cli import BAD_CONFIG, DONE, INTERRUPTED, composed_job, is_out_of_memory, run_recipe, schema_of
from recipes.common.config import RECIPES
from recipes.common.errors import ConfigError
from recipes.common.hints import choices_of, compose_config, environments
from recipes.experiments import cliffwalk, sset_tabular, stylized
from tests.recipes.runs import ROOT, command, tiny


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
    ("command", "message"),
    [
        # options
        ("dqn dqn.gama=.9", "dqn.gama: dqn has no key gama; did you mean gamma?"),
        ("dqn +dqn.gama=.9", "dqn has no key gama; did you mean gamma?"),
        ("dqn gamma=.9", "did you mean dqn.gamma?"),
        ("dqn lr=.9", "did you mean dqn.learning_rate?"),
        ("sac sac.lr=.9", "did you mean actor_learning_rate or critic_learning_rate or alpha_learning_rate?"),
        ("dqn sede=3", "did you mean seed?"),
        ("dqn samplr=per", "did you mean sampler?"),
        ("study study.colum=x", "did you mean column?"),
        ("dqn seed.x=3", "seed has no key x"),
        ("dqn env=threerooms env.events.at_gop.eta=.1", "env.events has no key at_gop"),
        ("dqn env=threerooms +env.events.x={histroy:3,eta:.1}", "has no key histroy; did you mean history?"),
        ("dqn sampler.alhpa=.5", "sampler has no key alhpa; did you mean alpha?"),
        ("dqn sampler.eps=.1", "Options that no file lists are set with a +"),
        ("dqn +sampler.alhpa=.5", "unexpected keyword argument 'alhpa'; did you mean alpha?"),
        ("td3 sampler=dper +sampler.critic.alhpa=.5", "unexpected keyword argument 'alhpa'; did you mean alpha?"),
        ("dqn sampler=uniform +sampler.beta=.4", "takes no arguments"),
        ("dqn +sampler.num_streams=4", "multiple values for keyword argument 'num_streams'"),
        ("dqn sampler.name=per", "sampler.name=per: write sampler=per, which also sets the options of this sampler"),
        ("dqn +dqn.optimizer={name:adam,bteas:1}", "unexpected keyword argument 'bteas'"),
        ("acer updates_per_graph=2", "recipes.acer has no key updates_per_graph"),
        ("distributed +updates_per_graph=2", "the configuration has no key updates_per_graph"),
        # choices
        ("dqn sampler=reapr", "sampler=reapr: there is no such choice; did you mean reaper?"),
        ("dqn env=cartpol", "did you mean cartpole?"),
        ("dqn env=atari/pongg", "did you mean atari/pong"),
        ("study study=reper", "did you mean reaper or dper?"),
        ("study study.variants.per=['sampler=pre']", "study.variants.per, env=cartpole: sampler=pre: there is no such"),
        ("dqn env=pendulum", "env=pendulum: recipes.dqn has no settings for it; use recipes.sac or recipes.td3"),
        ("acer env=hopper", "or those of another environment, as in acer=acrobot env=hopper"),
        ("r2d2 r2d2=cartpole_positions env=atari/pong", "recipes.r2d2 needs vector observations"),
        ("distributed dqn=cartpole env=atari/pong", "recipes.distributed does not support it; use recipes.dqn"),
        ("dqn env.id=Pendulum-v1", "use recipes.sac, recipes.td3 or recipes.acer"),
        ("dqn env.id=CartPol-v1", "Did you mean: `CartPole`?"),
        ("dqn env=threerooms +env.options.gama=.9", "unexpected keyword argument 'gama'"),
        ("dqn sampler=dper", "sampler=dper: choose uniform, per, rank, reaper, recency"),
        ("dqn sampler=sset", "env=cartpole has no events"),
        ("acer env=halfcheetah sampler=sset", "transitions must stay in their order; use ring"),
        # values
        ("dqn compile=ture", "compile: Value 'ture' is not a valid bool"),
        ("dqn device=cud", "device=cud: choose auto, cpu, cuda, cuda:1 ..., mps or xpu; did you mean cuda"),
        ("dqn dqn.loss_function=smooth", "did you mean smooth_l1?"),
        ("dqn +env.truncation=terminate", "did you mean terminal?"),
        ("dqn +dqn.optimizer.name=adm", "optimizer.name=adm: choose adam, rmsprop; did you mean adam?"),
        ("td3 sampler=dper sampler.critic.name=pre", "did you mean per"),
        ("acer acer.returns=retrase", "did you mean retrace?"),
        ("study study.recipe=dqm", "did you mean dqn?"),
        ("experiments.dper_analysis granularity=[bach]", "choose batch, group, transition"),
        ("dqn seed=abc", "seed: Value 'abc' of type 'str' could not be converted to Integer"),
        ("dqn seed=null", "seed: Incompatible value 'None'"),
        ("dqn dqn.hidden_sizes=64", "dqn.hidden_sizes: "),
        ("dqn sampler.alpha=-1", "ReaPERSampler(alpha=-1): alpha must be >= 0"),
        ("dqn dqn.n_step=50000", "dqn.n_step=50000: num_envs · n_step must be < dqn.total_steps=50000"),
        (
            "sac sampler=dper sampler.critic={name:lap}",
            "its name=lap: choose uniform, per, rank, reaper",
        ),
        ("td3 sampler=dper sampler.critic=per", "sampler.critic=per: must be a group, as in {name: per}"),
        ("dqn env=threerooms sampler=sset_per sampler.priority=per", "priority=per: must be a group"),
        ("dqn num_threads=1000000000000", "num_threads=1000000000000: must be <= 1024"),
        ("dqn dqn.batch_size=200000", "dqn.batch_size=200000: must be <= dqn.buffer_size=100000"),
        ("acer acer.returns=truncated_importance_sampling", "actions are discrete; choose retrace, importance_sampl"),
        ("acer acer.train_interval=100", "acer.train_interval=100: must be num_envs · acer.slice_len = 160"),
        ("dqn dqn.buffer_size=1000000000000", "dqn.buffer_size=1000000000000: needs at least 44,000 GB, and cpu has "),
        ("dqn dqn.hidden_sizes=[10000000,10000000]", "not enough memory ("),
        # words
        ("dqn dqn.gamma", "write key=value"),
        ("dqn seed=1,2", "To sweep over it, add --multirun"),
        ("study study.variants={per:", "write key=value, with special characters quoted"),
        ("dqn -m seed=1,2 sampler=per,reaper,pre", "sampler=pre: there is no such choice"),
        ("dqn -m seed=1,2 dqn.gamma=.9,2", "dqn.gamma=2.0: must be in [0, 1]"),
        ("dqn --help sampler=reapr", "did you mean reaper?"),
        ("dqn dqn.cagrad=0.5", "dqn.cagrad=0.5: needs sampler=sset or sset_per"),
        ("acer acer.c=-1", "acer: ACERLoss(c=-1.0): c must be >= 0"),
        ("td3 sampler=dper sampler.num_candidates=0", "num_candidates must be an integer >= 1"),
        ("td3 env.id=CartPole-v1", "needs bounded continuous actions"),
        ("dqn +env.evaluations={wide:{width:3}}", "env.id=CartPole-v1: "),
        ("dqn env=tworooms sampler=sset env.events.done.history=50000", "history=50000, more than the"),
        ("dqn env=tworooms +env.events.x={history:1,eta:.1}", "has no flag x; its flags are at_gap, done"),
        ("dqn env=tworooms env.training.shaping=none", "must be one of None, 'gap'"),
        ("dqn env.id=recipes.worlds:TwoRooms-v0", "env.id=recipes.worlds:TwoRooms-v0: "),
        ("dqn env=tworooms sampler=sset sampler.retention=forever", "retention must be 'ring' or 'pinned'"),
        ("dqn env=tworooms sampler=sset_per sampler.priority.kind=best", "kind must be one of"),
        # directories
        ("dqn resume=nowhere", "resume=nowhere: no config.yaml there"),
        ("experiments.dper_analysis run=nowhere", "run=nowhere: no config.yaml there"),
        ("dqn hydra.run.dir=/dev/null/run", "/dev/null/run: Not a directory"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(refused, command, message):
    recipe, *words = command.split()
    assert message in refused(recipe, *words)


@pytest.mark.parametrize(
    ("recipe", "rules"),
    [
        (
            "dqn",
            {
                "dqn.gamma=2": "must be in [0, 1]",
                "dqn.batch_size=0": "must be > 0",
                "seed=-1": "must be in [0, 2^31)",
                "device=abacus": "choose auto",
                "num_envs=3": "must divide dqn.train_interval=256",
                "updates_per_graph=3": "must divide dqn.gradient_steps=128",
                "cudagraphs=true": "needs compile=true",
                "logger.backend=paper": "choose null, tensorboard",
                "dqn.tau=0.1": "exactly one of dqn.tau and dqn.target_update_interval=10",
                "dqn.target_update_interval=null": "exactly one of",
                "dqn.loss_function=l3": "choose smooth_l1, l2",
                "dqn.cagrad=1": "must be in [0, 1)",
                "dqn.cagrad={start: 0.5, end: 1}": "must be in [0, 1)",
                "dqn.cagrad=much": "must be a number or {start, end}",
                "dqn.learning_starts=50000": "must be in [0, dqn.total_steps)",
                "dqn.initial_epsilon=0.01": "must be <= dqn.initial_epsilon",
                "+env.evaluations={mean: {}}": "mean must be an identifier other than mean",
                "+env.random_score=1": "must be two different numbers or both null",
                "weights=sum": "choose normalized, mean",
                "sampler=lap dqn.loss_function=l2": "needs the Huber loss, dqn.loss_function=smooth_l1",
                "env=threerooms env.events.done.eta=0.9": "the sum of all eta is 1.1, must be <= 1",
                "env=threerooms env.events.done.eta={start: 0.9, end: 0.1}": "the sum of all eta is 1.1",
                "env=threerooms env.events.done.eta={start: 0.1, end: 2}": "must be in [0, 1]",
                "env=threerooms env.events.done.eta=half": "must be a number or {start, end}",
                "env=threerooms env.events.done.history=0": "must be >= 1",
                "env=threerooms +env.events.done.function=land": "choose null, land_between_flags, land_near_middle",
                "env=atari/pong env.atari.noop_max=-1": "must be >= 0",
                "env=atari/pong env.atari.repeat_action_probability=2": "must be in [0, 1]",
            },
        ),
        (
            "sac",
            {
                "sac.tau=0": "must be in (0, 0.5]",
                "sac.initial_alpha=0": "must be > 0",
                "sac.target_entropy=auto": "'auto' of type 'str' could not be converted to Float",
            },
        ),
        (
            "td3",
            {
                "td3.policy_noise=-1": "must be >= 0",
                "td3.noise=pink": "choose gaussian, ou",
                "td3.policy_delay=0": "must be > 0",
                "td3.policy_delay=often": "could not be converted to Integer",
                "updates_per_graph=1": "must be a multiple of td3.policy_delay",
                "sampler=dper sampler.critic={name: sset}": "has no events",
            },
        ),
        (
            "r2d2",
            {
                "r2d2.burn_in=-1": "must be >= 0",
                "r2d2.units=0": "must be > 0",
                "r2d2.eta=1.5": "must be in [0, 1]",
                "r2d2.tau=null": "must be in (0, 0.5]",
                "num_envs=16 r2d2.buffer_size=10001": "must divide r2d2.buffer_size=10001",
                "+r2d2.n_step=3": "must be 1; use r2d2.target_steps",
                "sampler=sset": "choose uniform, per, rank, reaper, recency",
            },
        ),
        (
            "acer",
            {
                "acer.slice_len=0": "must be > 0",
                "acer.batch_size=10": "must be a multiple of acer.slice_len=20",
                "acer.replay_ratio=-1": "must be >= 0",
                "acer.replay_ratio=0 acer.on_policy=false": "makes no updates",
                "acer.average=1": "must be in [0, 1)",
                "acer.statistics=odds": "choose probs, logits, log_probs",
            },
        ),
        (
            "distributed",
            {
                "num_collectors=0": "must be >= 1",
                "num_shards=3": "must divide dqn.buffer_size",
                "prefetch=17": "must be in [0, 16]",
                "compile=true": "recipes.distributed does not support it; use recipes.dqn",
                "dqn.n_step=2": "recipes.distributed does not support it",
            },
        ),
        (
            "study",
            {
                "seeds=0": "must be >= 1",
                "study.baseline=magic": "choose uniform, per, rank, reaper",
                "study.in_a_row=0": "must be >= 1",
                "study.first_seed=-1": "must be >= 0",
                "study.envs=[]": "must have at least one environment",
            },
        ),
    ],
)
def test_values_out_of_range_are_named_with_their_rule(recipe, rules):
    for words, rule in rules.items():
        with pytest.raises(ConfigError) as error:
            composed_job(recipe, re.split(r" (?=[+a-z_.0-9]+=)", words))
        assert rule in str(error.value), words


def test_unknown_flags_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dqn", "--seed=3"])
    with pytest.raises(SystemExit) as exit:
        run_recipe("dqn")
    assert exit.value.code == BAD_CONFIG and "unrecognized arguments: --seed=3" in capsys.readouterr().err


PACKAGES = {"minatar": "minatar", "doorkey": "minigrid", "lavagap": "minigrid", "atari": "ale_py"}


def installed(env):
    package = PACKAGES.get(env.split("/")[0], PACKAGES.get(env.split("_")[0]))
    return package is None or importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_samplers_and_environments_of_a_recipe_pass_the_checks(recipe):
    own = [env for env in environments(recipe) if env != "atari"]
    with_events = next((env for env in ("threerooms", "halfcheetah") if env in own), own[0])
    commands = [f"env={env}" for env in own]
    commands += [f"env={with_events} sampler={name}" for name in schema_of(recipe).samplers]
    huber = "td3.loss_function=smooth_l1" if recipe == "td3" else "dqn.loss_function=smooth_l1"
    commands = [f"{words} {huber}" if words.endswith("lap") else words for words in commands]
    if recipe == "acer":
        # settings of a task with the other kind of actions, some without effect
        commands += ["env=cartpole acer=pendulum", "env=pendulum acer=cartpole"]
        commands = [f"{words} sampler.retention=ring" if "sset" in words else words for words in commands]
    commands += ["env=atari/pong"] * (recipe in ("dqn", "acer"))
    for words in commands:
        assert composed_job(recipe, words.split()).env.name


@pytest.mark.parametrize(
    ("config", "recipe", "message"),
    [
        ("dqn: {}", "td3", "a run of recipes.dqn; use python -m recipes.dqn resume="),
        ("model: {}", "dqn", "config.yaml there is not that of a training run"),
        ("dqn", "distributed", "a run of recipes.dqn;"),
        ("distributed", "dqn", "a run of recipes.distributed;"),
    ],
)
def test_a_run_of_another_recipe_is_not_resumed(refused, tmp_path, config, recipe, message):
    (tmp_path / "checkpoint.zip").touch()
    content = config if ":" in config else OmegaConf.to_yaml(compose_config(config, []))
    (tmp_path / "config.yaml").write_text(content)
    assert message in refused(recipe, f"resume={tmp_path}")


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


@pytest.mark.parametrize("experiment", [cliffwalk, sset_tabular, stylized])
def test_experiments_name_an_output_directory_that_cannot_be_made(capsys, experiment):
    with pytest.raises(SystemExit) as exit:
        experiment.main(["--out", "/dev/null/run"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith("error: --out /dev/null/run: Not a directory\n")


def test_mistakes_in_names_and_values_are_reported_before_torch_is_imported():
    code = (
        "import runpy, sys\n"
        "sys.argv[0] = 'dqn'\n"
        "try:\n    runpy.run_module('recipes.dqn', run_name='__main__')\n"
        "except SystemExit as exit:\n    print(exit.code, 'torch' in sys.modules)\n"
    )
    for words in ("dqn.gama=3", "dqn.gamma=3", "env=pendulum"):
        found = subprocess.run([sys.executable, "-c", code, words], cwd=ROOT, capture_output=True, text=True)
        assert found.stdout.splitlines()[-1] == "2 False", found.stderr


@pytest.fixture
def shown(monkeypatch, capsys):
    """The text of --help on a terminal of 100 columns, by option."""

    def run(recipe, *words):
        monkeypatch.setattr(sys, "argv", [recipe, "--help", *words])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit:
            run_recipe(recipe)
        assert exit.value.code == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "dqn env=threerooms sampler=reaper",
            {
                "dqn.gamma": "discount factor",
                "+env.truncation": "how targets treat a time limit",
                "+env.events.<name>.above": "the reward is larger than this value",
                "+dqn.optimizer": "name and keyword arguments",
                "+sampler.weight_norm": "largest weight of the batch",
                "sampler.omega": "exponent of the reliability",
            },
        ),
        ("dqn env=lavagap sampler=sset_per", {"env.reward_threshold": "", "sampler.priority": "", "dqn.gamma": "disc"}),
        ("dqn env=atari/pong sampler=rank", {"env.atari": "preprocessing", "dqn.optimizer": ""}),
        ("sac env=humanoid sampler=sset", {"sac.target_entropy": "entropy of the policy"}),
        ("td3 env=lunarlander_continuous sampler=dper", {"sampler.num_candidates": "candidate batches"}),
        (
            "acer env=halfcheetah",
            {"acer.sigma": "deviation of the Gaussian policy", "num_envs": "stepped together"},
        ),
        ("distributed", {"num_collectors": "collector actors"}),
        ("study study=sset_tworooms", {"study.least": "value of the column", "workers": "runs in parallel"}),
        ("experiments.dper_analysis", {"draws": "actor batches"}),
        ("dqn atari", {"env.atari.frame_skip": "emulator frames"}),
    ],
)
def test_help_explains_options(shown, command, options):
    recipe, *words = command.split()
    text = shown(recipe, *words)
    for option, explanation in options.items():
        found = re.search(rf"\n  {re.escape(option)}=(.*(?:\n    .*)*)", text)
        assert found and explanation in " ".join(found[1].split()), option
    assert all(len(line) <= 100 for line in text.splitlines()[40:] if "=[" not in line and "={" not in line)


def test_help_lists_choices(shown):
    text = shown("dqn")
    assert "ms_pacman" not in text and "ms_pacman" in shown("dqn", "atari")
    assert "threerooms" in text and "pendulum" not in text.split("Options with")[0]
    assert "dper" not in text.split("Options with")[0] and {"lap", "sset_per"} <= {*choices_of("sampler")}


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
