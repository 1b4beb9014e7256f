"""Messages of commands after mistakes, their exit codes, and Ctrl-C while a graph is compiled."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from recipes.common.cli import BAD_CONFIG, INTERRUPTED, is_out_of_memory, run_recipe
from tests.recipes.runs import ROOT, command, tiny


def processes(session):
    """The command lines of the processes of a session."""
    found = subprocess.run(["ps", "-ww", "-o", "args=", "-s", str(session)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "<defunct>" not in line]


FUNCTIONS = {"study": "run_study", "dper_analysis": "analyse"}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command line that must be refused; gives what stderr says."""

    def run(recipe, *words):
        monkeypatch.setattr(sys, "argv", [recipe, f"hydra.run.dir={tmp_path / 'run'}", *words])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        with pytest.raises(SystemExit) as exit:
            run_recipe(recipe, FUNCTIONS.get(recipe, "train"))
        errors = capsys.readouterr().err
        assert exit.value.code == BAD_CONFIG
        assert errors.startswith("bad configuration: ") and errors.count("\n") == 1
        assert not (tmp_path / "run").exists()
        return errors

    return run


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("dqn sampler.alhpa=.5", "sampler.alhpa=.5: sampler has no key alhpa; did you mean alpha?"),
        ("dqn +sampler.alhpa=.5", "did you mean alpha?"),
        ("dqn dqn.gama=.9", "did you mean gamma?"),
        ("dqn +dqn.gama=.9", "did you mean gamma?"),
        ("dqn gamma=.9", "did you mean dqn.gamma?"),
        ("dqn sede=3", "did you mean seed?"),
        ("dqn samplr=per", "did you mean sampler?"),
        ("dqn env.nmae=x", "did you mean name?"),
        ("dqn sampler.beta.strat=.4", "sampler.beta has no key strat; did you mean start?"),
        ("dqn seed.x=3", "seed is a value and has no keys"),
        ("dqn sampler.num_streams=4", "add a keyword that the file does not list with +sampler.num_streams=4"),
        ("dqn env.truncation=terminal", "write +env.truncation=terminal"),
        ("dqn sampler=reapr", "did you mean reaper?"),
        ("dqn logger=tensorbord", "did you mean tensorboard?"),
        ("dqn dqn=cartpol", "did you mean cartpole?"),
        ("dqn env=cartpol", "did you mean cartpole?"),
        ("dqn env=atari/pongg", "did you mean atari/pong?"),
        ("dqn env=gridworld", "or atari/<game> (python -m recipes.dqn --help atari lists the games)"),
        ("study study=reper", "did you mean reaper or dper?"),
        ("dqn env=pendulum", "use recipes.sac or recipes.td3"),
        ("distributed env=pendulum", "use recipes.sac or recipes.td3"),
        ("td3 env=cartpole", "use recipes.dqn"),
        ("sac env=atari/pong", "use recipes.dqn"),
        ("sac env=ant", "use recipes.td3"),
        ("acer env=ant", "use recipes.td3"),
        ("dqn env.id=Pendulum-v1", "use recipes.sac, recipes.td3 or recipes.acer"),
    ],
)
def test_mistakes_are_answered_with_the_right_name(refused, command, hint):
    recipe, *words = command.split()
    assert hint in refused(recipe, *words)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("dqn dqn.gamma", "dqn.gamma: missing EQUAL"),
        ("dqn device=gpu", "device=gpu: choose auto, cpu, cuda"),
        ("dqn num_threads=1000000000000", "num_threads=1000000000000: must be <= 1024"),
        ("dqn dqn.buffer_size=0", "dqn.buffer_size=0: must be > 0"),
        ("dqn sampler.name=pre", "sampler.name=pre: choose uniform, per, rank, reaper"),
        ("dqn logger.backend=paper", "logger.backend=paper: choose null or tensorboard"),
        ("dqn dqn.buffer_size=1000000000000", "dqn.buffer_size=1000000000000: needs at least 44,000 GB, and cpu has "),
        ("dqn dqn.batch_size=1000000000000", "dqn.batch_size=1000000000000: needs at least 44,000 GB"),
        ("dqn dqn.hidden_sizes=[10000000,10000000]", "not enough memory ("),
        ("td3 td3.buffer_size=1000000000000", "td3.buffer_size=1000000000000: needs at least "),
        ("acer acer.buffer_size=1000000000000", "acer.buffer_size=1000000000000: needs at least "),
        ("dqn --run --multirun", "Only one of --run, --multirun"),
    ],
)
def test_values_that_cannot_be_are_refused_before_training_starts(refused, command, message):
    recipe, *words = command.split()
    assert message in refused(recipe, *words)


@pytest.mark.parametrize("place", ["file", "file/run", "/dev/null/run", "/proc/nowhere/run"])
def test_directories_that_cannot_be_made_are_named(refused, tmp_path, place):
    (tmp_path / "file").touch()
    errors = refused("dqn", f"hydra.run.dir={tmp_path / place}")
    assert str((tmp_path / place).parts[-2]) in errors
    assert (tmp_path / "file").is_file()


def test_mistakes_are_reported_before_torch_is_imported():
    code = (
        "import runpy, sys\n"
        "sys.argv[0] = 'dqn'\n"
        "try:\n    runpy.run_module('recipes.dqn', run_name='__main__')\n"
        "except SystemExit as exit:\n    print(exit.code, 'torch' in sys.modules)\n"
    )
    for word in ("dqn.gama=3", "dqn.gamma=3", "env=pendulum", "--help"):
        found = subprocess.run([sys.executable, "-c", code, word], cwd=ROOT, capture_output=True, text=True)
        assert found.stdout.splitlines()[-1] == ("0 False" if word == "--help" else "2 False"), found.stderr


def test_help_explains_every_option_and_lists_games_on_request(monkeypatch, capsys):
    def shown(*words):
        monkeypatch.setattr(sys, "argv", ["dqn", "--help", *words])
        with pytest.raises(SystemExit) as exit:
            run_recipe("dqn")
        assert exit.value.code == 0
        return capsys.readouterr().out

    text = shown("sampler=sset", "env=threerooms")
    for option in (
        "  seed=1                      seed of environments, networks and sampling, in [0, 2^31)\n",
        "  num_threads=1               CPU threads of torch, 1 to 1024; more than 1 slow such small networks down\n",
        "dqn.gradient_steps=",
        "sampler.retention=pinned",
        "env.reward_threshold=",
    ):
        assert option in text
    assert "breakout" not in text and "breakout" in shown("atari")


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
