"""Messages of commands after mistakes, their exit codes, --help, and Ctrl-C while a graph is compiled."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from recipes.common.cli import DONE, INTERRUPTED, compose_job, is_out_of_memory, run_recipe
from recipes.common.config import RECIPES
from recipes.common.options import choices_of, environments
from recipes.common.run import save_config
from recipes.common.schemas import SCHEMAS
from recipes.experiments import cliffwalk
from tests.recipes.runs import ROOT, command, processes, tiny, wait_until


@pytest.fixture
def recipe_refuses(tmp_path, monkeypatch, refused):
    """Runs a command line that must be refused without leaving files; gives what stderr says."""

    def run(recipe, *words):
        monkeypatch.setattr(sys, "argv", [recipe, *words])
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        errors = refused(run_recipe, recipe, "run_study" if recipe == "study" else "train")
        assert errors.startswith("bad configuration: ") and errors.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return errors

    return run


MISTAKES = {
    # options
    "dqn dqn.gama=.9": "dqn.gama: there is no such option; did you mean dqn.gamma?",
    "dqn +dqn.gama=.9": "dqn has no key gama; did you mean gamma?",
    "dqn lr=.9": "did you mean dqn.learning_rate?",
    "dqn samplr=per": "did you mean sampler?",
    "dqn env=threerooms +env.events.x={histroy:3,eta:.1}": "has no key histroy; did you mean history?",
    "dqn sampler.eps=.1": "Options that no file lists are set with a +",
    "dqn +sampler.alhpa=.5": "unexpected keyword argument 'alhpa'; did you mean alpha?",
    "dqn sampler=uniform +sampler.beta=.4": "takes no arguments",
    "dqn sampler.name=per": "sampler.name=per: write sampler=per, which also sets the options of this sampler",
    "dqn +dqn.optimizer={name:adam,bteas:1}": "unexpected keyword argument 'bteas'",
    # choices
    "dqn sampler=reapr": "sampler=reapr: there is no such choice; did you mean reaper?",
    "dqn env=atari/pongg": "did you mean atari/pong",
    "dqn env=gridworld": "env=gridworld: there is no such choice; choose acrobot, ",
    "study study.variants.per=['sampler=pre']": "study.variants.per, env=cartpole: sampler=pre: there is no such",
    "dqn env=pendulum": "env=pendulum: recipes.dqn has no settings for it; use recipes.sac or recipes.td3",
    "r2d2 r2d2=cartpole_positions env=atari/pong": "recipes.r2d2 needs vector observations",
    "distributed env=atari/pong": "env=atari/pong: algorithm=dqn has no settings for it; choose acrobot, ",
    "distributed algorithm=td3": "env=cartpole: algorithm=td3 has no settings for it; choose ant, ",
    "dqn env.id=Pendulum-v1": "use recipes.dqn for discrete actions, recipes.sac or recipes.td3",
    "td3 env.id=CartPole-v1": "needs bounded continuous actions",
    "dqn env.id=CartPol-v1": "Did you mean: `CartPole`?",
    "dqn env=threerooms +env.options.gama=.9": "unexpected keyword argument 'gama'",
    "dqn sampler=dper": "sampler=dper: choose uniform, per, rank, reaper, recency",
    "dqn sampler=sset": "env=cartpole has no events",
    "acer env=halfcheetah sampler=sset": "transitions must stay in their order; use ring",
    "dqn env=tworooms +env.events.x={history:1,eta:.1}": "has no flag x; its flags are at_gap, done",
    # values
    "dqn compile=ture": "compile: Value 'ture' is not a valid bool",
    "dqn device=cud": "device=cud: choose auto, cpu, cuda",
    "dqn dqn.loss_function=smooth": "choose smooth_l1, l2; did you mean smooth_l1?",
    "dqn +dqn.optimizer.name=adm": "optimizer.name=adm: choose adam, rmsprop; did you mean adam?",
    "dqn dqn.hidden_sizes=64": "dqn.hidden_sizes: ",
    "dqn dqn.gamma=2": "dqn.gamma=2.0: must be in [0, 1]",
    "dqn dqn.batch_size=0": "must be > 0",
    "dqn seed=null": "seed: Incompatible value 'None'",
    "dqn num_envs=3": "must divide dqn.train_interval=256",
    "dqn cudagraphs=true": "needs compile=true",
    "dqn dqn.tau=0.1": "exactly one of dqn.tau and dqn.target_update_interval=10",
    "dqn dqn.cagrad=much": "must be a number or {start, end}",
    "dqn dqn.cagrad=0.5": "dqn.cagrad=0.5: needs sampler=sset or sset_per",
    "dqn dqn.learning_starts=50000": "must be in [0, dqn.total_steps)",
    "dqn dqn.n_step=50000": "dqn.n_step=50000: num_envs · n_step must be < dqn.total_steps=50000",
    "dqn dqn.batch_size=200000": "dqn.batch_size=200000: must be <= dqn.buffer_size=100000",
    "dqn +env.evaluations={mean:{}}": "mean must be an identifier other than mean",
    "dqn +env.random_score=1": "must be two different numbers or both null",
    "dqn sampler=lap dqn.loss_function=l2": "needs the Huber loss, dqn.loss_function=smooth_l1",
    "dqn env=threerooms env.events.done.eta={start:.9,end:.1}": "the sum of all eta is 1.1",
    "dqn env=threerooms +env.events.done.function=land": "choose land_between_flags, land_near_middle",
    "dqn env=threerooms +env.events.done.quantile=1.0": "must be in (0, 1)",
    "sac env=hopper +env.events.x={above:9,novel:1,history:1,eta:.1}": "needs null for the others of above, quantile",
    "sac env=halfcheetah sampler=sset sac.n_step=2": "of env.events depends on the reward or",
    "dqn sampler=recency sampler.half_life=0": "half_life must be > 0",
    "dqn env=threerooms +env.events.done.resolution=1": "needs novel=1",
    "dqn env=tworooms sampler=sset env.events.done.history=50000": "history=50000, more than the",
    "dqn env=threerooms sampler=sset_per sampler.priority=per": "priority=per: must be a group",
    "sac sampler=dper sampler.critic={name:lap}": "its name=lap: choose uniform, per, rank, reaper",
    "td3 sampler=dper sampler.critic=per": "sampler.critic=per: must be a group, as in {name: per}",
    "td3 td3.policy_delay=0": "must be > 0",
    "td3 updates_per_graph=1": "must be a multiple of td3.policy_delay",
    "r2d2 +r2d2.n_step=3": "must be 1; use r2d2.target_steps",
    "acer acer.batch_size=10": "must be a multiple of acer.slice_len=20",
    "acer acer.replay_ratio=0 acer.on_policy=false": "makes no updates",
    "acer acer.c=-1": "acer: ACERLoss(c=-1.0): c must be >= 0",
    "acer acer.train_interval=100": "acer.train_interval=100: must be num_envs · acer.slice_len = 160",
    "acer acer.returns=truncated_importance_sampling": "actions are discrete; choose retrace, importance_sampl",
    "distributed num_shards=3": "must divide dqn.buffer_size",
    "distributed dqn.n_step=2": "recipes.distributed does not support it",
    "distributed algorithm=td3 env=pendulum td3.noise=ou": "recipes.distributed does not support it; use recipes.td3",
    "distributed algorithm=sac env=pendulum sampler=lap": "needs the Huber loss, which algorithm=sac has not",
    "study study.baseline=magic": "choose uniform, per, rank, reaper",
    "study study.envs=[]": "must have at least one environment",
    "dqn dqn.buffer_size=1000000000000": "dqn.buffer_size=1000000000000: needs at least 32,000 GB, and cpu has ",
    "dqn dqn.hidden_sizes=[10000000,10000000]": "not enough memory (",
    # words
    "dqn dqn.gamma": "write key=value",
    "dqn seed=1,2": "To sweep over it, add --multirun",
    "study study.variants={per:": "write key=value, with special characters quoted",
    "dqn -m seed=1,2 dqn.gamma=.9,2": "dqn.gamma=2.0: must be in [0, 1]",
    "dqn --help sampler=reapr": "did you mean reaper?",
    # directories
    "dqn resume=nowhere": "resume=nowhere: no config.yaml there",
    "dqn hydra.run.dir=/dev/null/run": "/dev/null/run: Not a directory",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_named_before_anything_is_written(recipe_refuses, command):
    recipe, *words = command.split()
    assert MISTAKES[command] in recipe_refuses(recipe, *words)


def test_unknown_flags_are_refused(monkeypatch, refused):
    monkeypatch.setattr(sys, "argv", ["dqn", "--seed=3"])
    assert "unrecognized arguments: --seed=3" in refused(run_recipe, "dqn")


@pytest.mark.parametrize("recipe", RECIPES)
def test_event_tables_and_separate_batches_for_the_actor_pass_the_checks(recipe):
    env = next((env for env in ("threerooms", "halfcheetah") if env in environments(recipe)), None)
    for sampler in {"sset", "sset_per", "dper", "dper_uniform"} & {*SCHEMAS[recipe].samplers}:
        ring = ["sampler.retention=ring"] * (recipe == "acer")
        assert compose_job(recipe, [f"env={env}", f"sampler={sampler}", *ring])[0].env.name == env


def test_a_run_is_not_resumed_by_another_recipe_or_with_other_settings(recipe_refuses, tmp_path):
    config, _ = compose_job("dqn", [])
    (tmp_path / "checkpoint.zip").touch()
    (tmp_path / "config.yaml").write_text("dqn: {}\nseed: 1\n")
    assert "a run of another recipe" in recipe_refuses("td3", f"resume={tmp_path}")
    save_config(config, tmp_path)
    assert "seed=3: a resumed run keeps its configuration" in recipe_refuses("dqn", f"resume={tmp_path}", "seed=3")
    resumed, run_dir = compose_job("dqn", [f"resume={tmp_path}", "device=cpu"])
    assert (resumed.device, resumed.seed, run_dir) == ("cpu", 1, tmp_path)


def test_runs_get_a_directory_named_after_recipe_environment_sampler_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["td3", "-m", "seed=3,4", *tiny("td3")])
    with pytest.raises(SystemExit) as exit:
        run_recipe("td3")
    assert exit.value.code == DONE
    found = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("config.yaml"))
    names = [name.rpartition("-")[0].rpartition("-")[0] for name in found]
    assert names == ["runs/td3/pendulum/per/seed3", "runs/td3/pendulum/per/seed4"]


def test_mistakes_are_reported_before_torch_is_imported():
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('recipes.dqn', run_name='__main__')\n"
        "except SystemExit as exit:\n    print(exit.code, 'torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code, "dqn.gamma=3"], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "2 False", found.stderr


def test_an_output_directory_that_cannot_be_made_is_named(refused):
    errors = refused(cliffwalk.main, ["--out", "/dev/null/run"])
    assert errors.endswith("error: --out /dev/null/run: Not a directory\n")


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
                "+env.events.<name>.quantile": "quantile of the last 10,000 rewards",
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
        ("distributed", {"num_collectors": "collector actors", "dqn.gamma": "discount"}),
        ("distributed algorithm=td3 env=pendulum", {"td3.tau": "share of actor and critics"}),
        ("study study=sset_tworooms", {"study.least": "value of the column", "workers": "runs in parallel"}),
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
        # a kernel: a compiler is started before, too, to try out what the processor can do
        wait_until(lambda: any(".main.cpp" in line for line in processes(running.pid)) or running.poll() is not None)
        assert running.poll() is None, running.communicate()
        os.killpg(running.pid, signal.SIGINT)
        out, errors = running.communicate(timeout=120)
        assert running.returncode == INTERRUPTED, errors
        assert "Traceback" not in errors and "Error" not in errors
        assert out.startswith("interrupted at step ") and out.count("\n") == 1
        assert (run_dir / "checkpoint.zip").is_file() == saved
        assert (f"resume={run_dir}" in out) == saved
        wait_until(lambda: not processes(running.pid), 20)
        assert not processes(running.pid)
    finally:
        if processes(running.pid):
            os.killpg(running.pid, signal.SIGKILL)
