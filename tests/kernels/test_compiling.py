"""The first calls of kernels: what is said while Numba compiles, and the command that compiles all of them ahead."""

import logging
import subprocess
import sys

import numba
import numpy as np
import pytest
from numba.core import event

from tests.kernels.implementations import KERNELS, not_interpreted
from torchrl_replay_ext.kernels import __main__ as ahead
from torchrl_replay_ext.kernels import loop as loops
from torchrl_replay_ext.kernels import ops

Notice = loops._Notice
pytestmark = [not_interpreted, pytest.mark.usefixtures("notice")]


def double(array):
    for i in range(len(array)):
        array[i] *= 2


@pytest.fixture
def notice(monkeypatch):
    """A process that has said nothing yet, and says it at once."""
    monkeypatch.setattr(double, "__module__", "torchrl_replay_ext.kernels.tree")
    monkeypatch.setattr(loops, "NOTICE_AFTER", 0.0)
    registered = event._registered["numba:compile"]
    monkeypatch.setitem(event._registered, "numba:compile", [each for each in registered if type(each) is not Notice])
    event.register("numba:compile", Notice())


def test_a_process_says_once_why_first_calls_take_long_and_where_the_machine_code_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING, "torchrl_replay_ext"):
        for _ in range(2):
            loops.loop(double)(np.ones(3))
            loops.loop(double)(np.ones(3, np.int32))
    (message,) = caplog.messages
    assert str(tmp_path) in message and "python -m torchrl_replay_ext.kernels" in message


def test_nothing_is_said_if_the_machine_code_is_found_or_others_compile(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loops, "NOTICE_AFTER", 1e9)
    loops.loop(double)(np.ones(3))
    monkeypatch.setattr(loops, "NOTICE_AFTER", 0.0)
    with caplog.at_level(logging.WARNING, "torchrl_replay_ext"):
        loops.loop(double)(np.ones(3))
        monkeypatch.setattr(double, "__module__", __name__)
        loops.loop(double)(np.ones(3, np.int32))
    assert not caplog.messages


def test_the_command_runs_all_kernels(monkeypatch):
    called, call = set(), ops.Kernel.__call__

    def record(kernel, *arguments):
        called.add(kernel._name)
        call(kernel, *arguments)

    monkeypatch.setattr(ops.Kernel, "__call__", record)
    for _, rb in ahead.buffers():
        ahead.use(rb)
    # of accelerators, of failed writes, of conditions with context, and of an annealed alpha in graphs
    rare = {"episodes.apply", "events.remove", "events.earlier"}
    assert called == {kernel._name for kernel in KERNELS} - rare


INTERRUPTED = """
import os, signal, sys
import torch
from torchrl_replay_ext.core.sum_tree import SumTree

class Interrupt:
    def find_spec(self, name, *arguments):
        if name == "numba.core.typing":
            os.kill(os.getpid(), signal.SIGINT)

# a process that a shell started in the background ignores the signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
tree = SumTree(4)
try:
    tree.write(torch.tensor([0]), 5)
    print("not interrupted")
except KeyboardInterrupt:
    tree.write(torch.tensor([0]), 5)
    print(tree.total().item())
"""


def test_ctrl_c_while_numba_is_imported_does_no_harm():
    result = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert result.stdout == "5\n" and not result.stderr
