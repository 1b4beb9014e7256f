"""Messages of commands after mistakes, their exit codes, --help, and Ctrl-C while a graph is compiled."""

import os
import sys

import pytest

from recipes.common.cli import DONE, compose_job, run_recipe
from recipes.common.config import RECIPES
from recipes.common.options import environments
from recipes.common.run import save_config
from recipes.common.schemas import SCHEMAS
from tests.recipes.runs import ROOT, command, tiny


@pytest.fixture
def recipe_refuses(tmp_path, monkeypatch, refused):
    """Runs a command line that must be refused without leaving files; gives what stderr says."""

    def run(recipe, *words):
        monkeypatch.setattr(sys, "argv", [recipe, *words])
        monkeypatch.chdir(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        errors = refused(run_recipe, recipe)
        assert errors.startswith("bad configuration: ") and errors.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
        return errors

    return run


MISTAKES = {
    # options
    "dqn dqn.gama=.9": "dqn.gama: there is no such option; did you mean dqn.gamma?",
    "dqn env=threerooms +env.events.x={histroy:3,eta:.1}": "has no key histroy; did you mean history?",
    "dqn +sampler.alhpa=.5": "unexpected keyword argument 'alhpa'; did you mean alpha?",
    "dqn sampler.name=per": "sampler.name=per: write sampler=per, which also sets the options of this sampler",
    # choices
    "dqn sampler=reapr": "sampler=reapr: there is no such choice; did you mean reaper?",
    "study study.variants.per=['sampler=pre']": "study.variants.per, env=cartpole: sampler=pre: there is no such",
    "dqn env=pendulum": "env=pendulum: recipes.dqn has no settings for it; use recipes.sac or recipes.td3",
    "dqn sampler.beta={start:.4,stop:1}": "sampler.beta: its value has keys that are not known; choose start, end",
    "study study=none.yaml": "study=none.yaml: no such file",
    "distributed env=atari/pong": "env=atari/pong: algorithm=dqn has no settings for it; choose acrobot, ",
    "dqn env.id=Pendulum-v1": "recipes.dqn is for discrete actions, recipes.sac and recipes.td3 for continuous",
    "dqn sampler=dper": "sampler=dper: choose uniform, per, rank, reaper, recency",
    "dqn sampler=sset": "env=cartpole has no events",
    "acer env=halfcheetah sampler=sset": "transitions must stay in their order; use ring",
    "dqn env=tworooms +env.events.x={history:1,eta:.1}": "has no bool x in every step; its flags are at_gap, done",
    "dqn logger.backend=loger": "logger.backend=loger: this package is missing",
    "study study.variants.per=['env=acrobot']": "env=acrobot cannot be a word of a variant",
    # values
    "dqn device=cud": "device=cud: Expected one of cpu, cuda",
    "dqn dqn.gamma=2": "dqn.gamma=2.0: must be in [0, 1]",
    "dqn cudagraphs=true": "needs compile=true",
    "dqn dqn.n_step=100000": "dqn.n_step=100000: needs dqn.total_steps >= 100000",
    "dqn +dqn.optimizer.amsgrad=true": "the optimizer has amsgrad=True",
    "dqn env=threerooms env.events.done.eta=0": "eta=0: must be in [0, 1], and > 0 at the start or the end",
    "r2d2 r2d2.buffer_size=64": "a window for each environment",
    "dqn dqn.tau=0.1": "exactly one of dqn.tau and dqn.target_update_interval=10",
    "dqn dqn.cagrad=0.5": "dqn.cagrad=0.5: needs sampler=sset or sset_per",
    "dqn sampler=lap dqn.loss_function=l2": "needs the Huber loss, dqn.loss_function=smooth_l1",
    "sac env=hopper +env.events.x={above:9,novel:1,history:1,eta:.1}": "needs null for the others of above, quantile",
    "dqn env=atari/pong sampler=sset +env.events.x={above:1,history:1,eta:.1}": "rewards are clipped to 1",
    "sac env=halfcheetah sampler=sset sac.n_step=2": "of env.events depends on the reward or",
    "dqn env=threerooms sampler=sset_per sampler.priority=per": "priority=per: must be a group",
    "td3 updates_per_graph=1": "must be a multiple of td3.policy_delay",
    "acer acer.c=-1": "acer.c=-1.0: must be >= 0",
    "acer acer.train_interval=100": "acer.train_interval=100: must be num_envs · acer.slice_len = 160",
    "acer acer.returns=truncated_importance_sampling": "actions are discrete; choose retrace, importance_sampl",
    "acer acer.sigma=0.2": "acer.sigma: there is no such option",
    "acer acer.critic_coeff=inf": "acer.critic_coeff=.inf: must be in [0, inf)",
    "distributed algorithm=td3 env=pendulum td3.noise=ou": "recipes.distributed does not support it; use recipes.td3",
    "distributed algorithm=sac env=pendulum sampler=lap": "SAC has no such option",
    "study study.baseline=magic": "choose uniform, per, rank, reaper",
    # words
    "dqn dqn.gamma": "write key=value",
    "dqn -m seed=1,2 dqn.gamma=.9,2": "dqn.gamma=2.0: must be in [0, 1]",
    # directories
    "dqn resume=nowhere": "resume=nowhere: no config.yaml there",
    "dqn hydra.run.dir=/dev/null/run": "/dev/null/run: Not a directory",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_named_before_anything_is_written(recipe_refuses, command):
    recipe, *words = command.split()
    assert MISTAKES[command] in recipe_refuses(recipe, *words)


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
    monkeypatch.setattr(sys, "argv", ["td3", "-m", "seed=3,4", "td3.gamma=.8,.9", *tiny("td3")])
    with pytest.raises(SystemExit) as exit:
        run_recipe("td3")
    assert exit.value.code == DONE
    found = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("config.yaml"))
    names = [name.split("-")[0] for name in found]
    assert names == [f"runs/td3/pendulum/per/seed{seed}" for seed in (3, 3, 4, 4)]


@pytest.mark.parametrize("recipe", ["dqn", "study"])
def test_mistakes_are_reported_before_torch_is_imported(tmp_path, recipe):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    paths = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for folder in (ROOT, tmp_path):  # a command works from any folder
        running = command(recipe, "seed=-1", "seeds=0", cwd=folder, env=paths)
        errors = running.communicate(timeout=120)[1]
        assert running.returncode == 2 and errors.startswith("bad configuration: ")


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("dqn env=threerooms sampler=reaper", ["gamma: 0.99 # disc", "weight_norm: ``", "    above: the event occ"]),
        ("td3 env=lunarlander_continuous sampler=dper", ["num_candidates: ", "policy_delay: "]),
        # a file that takes over the settings of another one
        ("acer env=halfcheetah", ["sigma: ", "slice_len: "]),
        ("distributed algorithm=td3 env=pendulum", ["num_collectors: ", "policy_delay: ", "seed: 1 # seed of"]),
        ("study study=sset_tworooms", ["least: ", "workers: null # runs in parallel"]),
        ("dqn atari", ["frame_skip: emulator frames", "ms_pacman"]),
    ],
)
def test_help_explains_options(monkeypatch, capsys, command, texts):
    recipe, *words = command.split()
    monkeypatch.setattr(sys, "argv", [recipe, "--help", *words])
    with pytest.raises(SystemExit) as exit:
        run_recipe(recipe)
    shown = capsys.readouterr().out
    assert exit.value.code == DONE and [text for text in texts if text not in shown] == []
