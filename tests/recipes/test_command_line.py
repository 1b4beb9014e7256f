"""The real commands: what stderr says of mistakes, exit codes, and Ctrl-C while a graph is compiled."""

import os
import signal
import subprocess
import sys
import time

import pytest

from recipes.run import BAD_CONFIG, INTERRUPTED
from tests.recipes.runs import ROOT, tiny


def start(*words, **environment):
    """A command in a session of its own, as a terminal would start it."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes(session):
    """The command lines of the processes of a session."""
    found = subprocess.run(["ps", "-ww", "-o", "args=", "-s", str(session)], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "<defunct>" not in line]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes with ps")
@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_while_a_graph_is_compiled_ends_like_any_other(tmp_path, saved):
    """The compiler's processes get the signal too, as all of a terminal's do."""
    run_dir = tmp_path / "run"
    words = [*tiny("dqn"), "sampler=per", "compile=true", f"hydra.run.dir={run_dir}"]
    words += ["checkpoint_interval=16"] * saved
    running = start("recipes.dqn", *words, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
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
