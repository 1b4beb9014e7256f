"""Kernels of trees, and what all kernels have in common."""

import copy
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from tests.emulated_device import EmulatedDevice
from tests.kernels.implementations import (
    CAPACITIES,
    TREES,
    a_tree,
    assert_equal,
    not_interpreted,
    plainly,
    scramble,
    tensors_of,
)
from torchrl_replay_ext import SumTree
from torchrl_replay_ext.core.sum_tree import MaxTree
from torchrl_replay_ext.kernels import layouts, ops


@pytest.mark.parametrize("capacity, paged", TREES)
def test_all_implementations_write_the_same(run, capacity, paged):
    tree = a_tree(capacity, paged)
    other = copy.deepcopy(tree)
    for count in (1, 40):
        # with duplicates, and rows out of range
        index = torch.randint(-2, capacity + 2, (count,))
        # few values, so that minima have ties and rise
        for mass in (torch.randint(0, 2**40, (count,)), *torch.randint(0, 4, (3, count)), 7, 0):
            tree.write(index, mass)
            run(other.write, index, mass)
            if run.is_cuda:
                # any of the duplicates wins
                found, given = other.get(index), torch.as_tensor(mass).expand(count)
                wins = (index.unsqueeze(1) == index) & (found.unsqueeze(1) == given)
                assert (wins.any(1) | (index < 0) | (index >= capacity)).all()
                tree.write(index, found)
            assert_equal(tensors_of(tree), tensors_of(other))
    # leaves that are in use: those that end the last page are not
    for each in (tree, other):
        each.leaves[each.leaves > 0] = 11
    tree.rebuild_()
    run(other.rebuild_)
    assert_equal(tensors_of(tree), tensors_of(other))
    run(other.write, torch.arange(capacity), torch.zeros(capacity, dtype=torch.int64))
    assert int(other.total()) == 0 and int(other.nodes.abs().max()) == 0
    assert other.minima.eq(layouts.NOTHING).all()


@pytest.mark.parametrize("paged", [False, True])
def test_a_large_write_in_several_thread_blocks(run, paged, monkeypatch):
    if run.is_cuda:
        monkeypatch.setattr("torchrl_replay_ext.kernels.cuda.tree._MANY", 100)
    tree = a_tree(1000, paged)
    other = copy.deepcopy(tree)
    for count in (99, 100, 700):
        index, mass = torch.randperm(1000)[:count], torch.randint(0, 2**40, (count,))
        tree.write(index, mass)
        run(other.write, index, mass)
        assert_equal(tensors_of(tree), tensors_of(other))


@pytest.mark.parametrize("capacity, paged", TREES)
def test_all_implementations_read_the_same(run, capacity, paged):
    tree = a_tree(capacity, paged)
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-53, *torch.rand(50).tolist()], dtype=torch.float64)
    border = tree.prefix(torch.arange(capacity + 1))[-100:]
    target = torch.cat([border, border - 1, torch.randint(int(tree.total()), (100,))])
    target = target[(target >= 0) & (target < tree.total())]
    index = torch.randint(-3, capacity + 3, (200,))
    for read in (
        lambda: tree.draw(u),
        lambda: tree.find(target),
        lambda: (tree.prefix(index), tree.get(index)),
        lambda: (tree.total(), torch.as_tensor(tree.total() if paged else tree.min())),
    ):
        assert_equal(read(), run(read))


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_all_implementations_track_the_same_maximum(run, capacity):
    tree = MaxTree(capacity)
    other = copy.deepcopy(tree)
    for count in (1, 40):
        index = torch.randint(capacity, (count,))
        tree.leaves[index] = other.leaves[index] = torch.randint(2**40, (1,))
        for each, call in ((tree, plainly), (other, run)):
            call(each.refresh, torch.cat([index, torch.tensor([-1, capacity])]))
        assert_equal(tensors_of(tree), tensors_of(other))
        assert int(run(other.max)) == int(other.leaves.max())
    run(other.rebuild_)
    assert_equal(tensors_of(tree), tensors_of(other))


def test_empty_rows(run):
    tree = a_tree(20)
    none = torch.zeros(0, dtype=torch.int64)
    before = copy.deepcopy(tree)
    run(tree.write, none, none)
    assert_equal(tensors_of(tree), tensors_of(before))
    for read in (tree.find, tree.get, tree.prefix, lambda rows: tree.draw(rows.double())):
        result = run(read, none)
        assert all(len(part) == 0 for part in (result if isinstance(result, tuple) else (result,)))


def test_a_tree_without_mass_yields_leaf_0(run):
    tree = SumTree(300)
    leaf, mass = run(tree.find, torch.tensor([-1, -1]))
    assert leaf.tolist() == mass.tolist() == [0, 0]


@pytest.mark.parametrize("paged", [False, True])
def test_walks_stay_in_range_whatever_the_state_holds(run, paged):
    tree = a_tree(1000, paged)
    scramble(tree.leaves, tree.nodes, tree.minima, *[tree.pages] * paged)
    tree.nodes[0] = 2**61
    leaf, _ = run(tree.draw, torch.rand(500, dtype=torch.float64))
    assert int(leaf.min()) >= 0 and int(leaf.max()) < 1000
    leaf, _ = run(tree.find, torch.randint(-(2**62), 2**62, (500,)))
    assert int(leaf.min()) >= 0 and int(leaf.max()) < 1000
    run(tree.prefix, torch.randint(-(2**62), 2**62, (500,)))


# --- accelerators


@not_interpreted
def test_an_accelerator_runs_each_kernel_with_one_launch():
    with EmulatedDevice("torchrl_replay_ext") as device:
        tree, index = SumTree(300, track_min=True, device="emulated"), torch.arange(20, device="emulated")
        device.reset()
        tree.write(index, index + 1)
        leaf, mass = tree.find(index)
        launches = {name: n for name, n in device.operations.items() if "torchrl_replay_ext" in name}
        assert launches == {"torchrl_replay_ext.tree_write": 1, "torchrl_replay_ext.tree_find": 1}
        assert not device.waits
        assert mass.tolist() == (leaf + 1).tolist()


# --- imports


def python(code, **arguments):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **arguments)


def test_the_import_of_the_package_imports_neither_numba_nor_triton_kernels():
    code = "import sys, torchrl_replay_ext; assert not {'numba', 'torchrl_replay_ext.kernels.cuda'} & {*sys.modules}"
    assert python(code).returncode == 0


def test_an_error_names_the_way_to_install_numba():
    code = "import sys; sys.modules['numba'] = None\nimport torchrl_replay_ext as t; t.SumTree(4).clear_()"
    assert "pip install 'numba" in python(code).stderr.splitlines()[-1]


WRITE = """
import numpy as np
from torchrl_replay_ext.kernels.rows import record
numbers, leaves = [np.zeros(16, np.int64) for _ in range(4)], np.zeros(16, np.int64)
state = numbers[0], numbers[1][:1], numbers[2], np.zeros(16, np.float32), np.ones(1)
record(*state, leaves, numbers[3], leaves[:0], leaves[:0], 16, np.ones(1), np.arange(1), True)
print(leaves[0])
"""


def test_machine_code_on_disk_is_that_of_all_sources(tmp_path):
    package = pathlib.Path(ops.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": "", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    layout = tmp_path / package.name / "kernels" / "layouts.py"
    for unit in (23, 22):
        # the loop is in another file
        layout.write_text(layout.read_text().replace("UNIT = 2**23", f"UNIT = 2**{unit}"))
        found = python(WRITE, cwd=tmp_path, env=environment)
        assert found.stdout == f"{2**unit}\n", found.stderr
