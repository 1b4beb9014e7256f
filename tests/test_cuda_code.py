"""The code that torch generates for a CUDA device if all tensors are there. Torch must be built for CUDA."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.common import update as updates
from recipes.common.cli import DONE
from tests import test_kernels
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed
from tests.test_compiled import CASES, step
from torchrl_replay_ext.kernels import ops

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.cuda_code import code_for_cuda

pytestmark = pytest.mark.usefixtures("from_scratch")


def assert_only_kernels(code):
    """All is computed by kernels of the GPU, in one part, without waiting."""
    assert "triton_" in code
    called = code[code.index("async_compile.wait") :]
    modules = "tree|rows|reaper|lanes|episodes|slices|rank|events"
    called = re.sub(rf"torch\.ops\.torchrl_replay_ext\.({modules})_", "our_", called)
    for foreign in ("cpp_fused", ".item()", "def partition_1(", "torch.ops."):
        assert foreign not in called
    # Triton rejects a product of an int32 index, x0 or r0_1, and a number that is out of its range
    assert not re.search(r"\d{11,}\)?\*[xr]\d", code)


@pytest.mark.parametrize(
    "name", slow_but(["slices, uniform, two columns, not padded", "events, uniform, lemma2"], CASES)
)
def test_steps_of_buffers_are_compiled_to_kernels_of_the_gpu(name):
    case = CASES[name]
    buffer, experience = case.buffer(), case.experience()
    for _ in range(8):
        buffer.extend(experience.take(4))
    step(buffer, experience.take(4))
    assert_only_kernels(code_for_cuda(lambda data: step(buffer, data, case.extends), experience.take(4)))


@pytest.mark.parametrize("name", slow_but(["dqn, event tables"], RUNS))
def test_updates_of_recipes_are_compiled_to_kernels_of_the_gpu(name, tmp_path, monkeypatch):
    recipe, overrides = RUNS[name]
    module, compiled = import_module(f"recipes.{recipe}"), set()

    def generated(function, cudagraphs):
        def call(*arguments):
            if function not in compiled:
                compiled.add(function)
                assert_only_kernels(code_for_cuda(function, *arguments))
            return function(*arguments)

        return call

    for place in (updates, module):
        if hasattr(place, "compile_step"):
            monkeypatch.setattr(place, "compile_step", generated)
    assert module.train(composed(recipe, *overrides, "compile=true", "device=cpu"), tmp_path) == DONE
    assert compiled


# --- our own kernels

INT64 = "*i64"
TREE = {"leaves": INT64, "pages": INT64, "num_pages": "i32", "capacity": "i32", "count": "i32"}
ROWS = {"nodes": INT64, "index": INT64}
KERNELS = {
    "draw": ("_walk", TREE | {"nodes": INT64, "target": "*fp64", "leaf": INT64, "mass": INT64}),
    "find": ("_walk", TREE | {"nodes": INT64, "target": INT64, "leaf": INT64, "mass": INT64}),
    "prefix": ("_prefix", TREE | ROWS | {"size": "i32", "total": INT64}),
    "get": ("_get", TREE | {"index": INT64, "mass": INT64}),
    "write": ("_write", TREE | ROWS | {"minima": INT64, "size": "i32", "mass": INT64, "alpha": INT64}),
    "write_power": ("_write", TREE | ROWS | {"minima": INT64, "size": "i32", "mass": "*fp32", "alpha": "*fp64"}),
    "refresh_maxima": (
        "_refresh_maxima",
        {"leaves": INT64, "maxima": INT64, "size": "i32", "capacity": "i32", "index": INT64, "count": "i32"},
    ),
}


@pytest.mark.parametrize("has_pages", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_tree_kernels_are_compiled_for_the_gpu(name, has_pages):
    import torchrl_replay_ext.kernels.cuda.tree as kernels

    function, arguments = KERNELS[name]
    kernel = getattr(kernels, function)
    constants = {"has_pages": has_pages, "is_fraction": name == "draw", "is_one_mass": has_pages, "track_min": True}
    constants |= {"is_power": name == "write_power"}
    constants |= {"levels": 5, "num_rows": 64, "num_together": 64}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {key: "constexpr" if key in constants else arguments[key] for key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


INT32, FLOAT64 = "*i32", "*fp64"
SLOTS = {"slots": INT64, "generation": INT64, "draws": INT32, "num_draws": INT64, "count": "i32", "size": "i32"}
OF_ROWS = {
    "_drawn": SLOTS | {"density": INT64, "smallest": INT64, "beta": FLOAT64, "weight": "*fp32", "stamp": INT64},
    "_record": SLOTS | {"number": INT64, "d": "*fp32", "largest": FLOAT64},
    "_update": SLOTS
    | {"error": "*fp32", "stamp": INT64, "real": "*i1", "d": "*fp32", "d_bits": INT32, "largest": FLOAT64}
    | {"counts": INT64, "limit": FLOAT64, "eps": "fp32", "smallest": "fp32", "kept": INT64, "kept_d": "*fp32"}
    | {"result": INT64},
}


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("name", OF_ROWS)
def test_kernels_of_rows_are_compiled_for_the_gpu(name, flag):
    import torchrl_replay_ext.kernels.cuda.rows as kernels

    kernel = getattr(kernels, name)
    flags = ("has_weight", "has_smallest", "has_stamp", "has_real", "counts_draws", "squared", "refuses", "stays")
    constants = dict.fromkeys(flags, flag) | {"is_own": not flag, "counts_draws": True, "num_rows": 64}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {key: "constexpr" if key in constants else OF_ROWS[name][key] for key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def compiled_only(monkeypatch, architecture, kernels):
    """Compile the given kernels at their calls, with the arguments of these, instead of running them."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", architecture, 32))
    target.get_current_device = target.get_current_stream = lambda *_: 0
    compiled, launch = [], JITFunction.run

    def run(*arguments, warmup, **options):
        compiled.append(launch(*arguments, warmup=True, **options))

    monkeypatch.setattr(driver, "_active", target)
    monkeypatch.setattr(JITFunction, "run", run)
    for kernel in kernels:
        monkeypatch.setattr(kernel, "_on_cpu", lambda *given, on=kernel._on_cuda: on(*map(ops.as_tensor, given)))
    return compiled


@pytest.mark.parametrize(
    ("architecture", "retention", "allocation"), [(80, "ring", 0), (90, "pinned", 1), (90, "ring", 2)]
)
def test_kernels_of_event_tables_are_compiled_for_the_gpu(architecture, retention, allocation, monkeypatch):
    tables, _ = test_kernels.some_tables(retention)
    tree, slots = test_kernels.a_tree(len(tables.slot_at)), torch.arange(60)
    kernels = ops.events_set_masses, ops.events_plan, ops.events_draw, ops.events_mixture
    compiled = compiled_only(monkeypatch, architecture, kernels)
    nothing, exponent = torch.zeros(0, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
    state = slots, slots, tables.slot_at, tables.places, tables.counts, tables.journal, 0, 3
    for d, union in ((torch.rand(60), nothing), (torch.rand(0), nothing), (torch.rand(0), slots[:2])):
        ops.events_set_masses(*tree.arrays()[:3], d, exponent, union, *state)
    numbers, shares = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.float64)
    plan = slots[:1], shares, numbers, allocation, *tree.arrays()[:3], tables.counts, tables.begins
    plan += slots, shares.clone(), numbers.clone(), numbers.clone()
    ops.events_plan(*plan)
    ops.events_draw(*plan, tables.slot_at, tables.places, False, slots, slots.clone(), slots.double())
    ops.events_mixture(slots, shares, tree.leaves, tables.places, slots.double())
    assert [kernel.name for kernel in compiled] == ["_masses", "_write"] * 3 + ["_draw", "_draw", "_mixture"]
    assert all(kernel.asm["cubin"] for kernel in compiled)


@pytest.mark.parametrize(("architecture", "assigned"), [(80, True), (90, False)])
def test_kernels_of_reaper_are_compiled_for_the_gpu(architecture, assigned, monkeypatch):
    """With the arguments of calls, which are not launched."""
    index, generation = test_kernels.some_episodes(assigned, 2)
    tree = test_kernels.a_tree(300)
    compiled = compiled_only(monkeypatch, architecture, (ops.reaper_reliability, ops.reaper_smallest, ops.reaper_draw))
    index.reliability(torch.arange(300), generation)
    result, omega = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    ops.reaper_smallest(tree.leaves[:300], omega, result, *index.arrays(generation))
    test_kernels.draw_by_reliability(index, generation, 0.5, tree, tables=4 * assigned)
    assert [kernel.name for kernel in compiled] == ["_of", "_smallest", "_draw", "_average"][: 3 + assigned]
    assert all(kernel.asm["cubin"] for kernel in compiled)


RANKS = {"bucket": INT32, "members": INT32, "counts": INT32, "to": INT32}
RANKS |= dict.fromkeys(("place", "top", "slots", "rank", "slot"), INT64)


@pytest.mark.parametrize("name", ["_move", "_find", "_rank_of"])
def test_kernels_of_ranks_are_compiled_for_the_gpu(name):
    kernel = getattr(import_module("torchrl_replay_ext.kernels.cuda.rank"), name)
    constants = {key: value for key, value in {"is_one": False, "num_rows": 64}.items() if key in kernel.arg_names}
    signature = {key: "constexpr" if key in constants else RANKS.get(key, "i32") for key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


BOOL = "*i1"
WRITTEN = {"slots": INT64, "lane_of": INT64, "begins": BOOL, "ended": BOOL}
EPISODES = {
    **{name: INT64 for name in ("mass", "number", "lane_episode", "lane_next", "lane_total", "updated_at", "totals")},
    **{name: INT64 for name in ("leaves", "nodes", "pages", "maxima", "trajectory", "time", "recent", "rows", "run")},
    **{name: INT64 for name in ("lanes", "interrupted", "result", "start")},
    **{name: INT32 for name in ("free_records", "free_pages", "position_of", "episode", "start_of", "following")},
    **{name: BOOL for name in ("finished", "is_finished", "initial", "mask")},
}
WRITES = [
    ("lanes", "_assign"),
    ("episodes", "_write"),
    ("episodes", "_remove_all"),
    ("episodes", "_update"),
    ("slices", "_write"),
    ("slices", "_walk"),
]


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize(("module", "name"), WRITES)
def test_kernels_of_writes_are_compiled_for_the_gpu(module, name, assigned):
    kernel = getattr(import_module(f"torchrl_replay_ext.kernels.cuda.{module}"), name)
    counts = {"count": INT32} if module == "episodes" and name != "_update" else {}
    constants = {"has_ids": assigned, "has_initial": assigned, "is_assigned": assigned, "can_refuse": assigned}
    constants |= {"block": 4, "levels": 5, "record_levels": 5, "stops": assigned, "is_padded": assigned}
    constants |= {"is_one_mass": assigned, "has_number": assigned, "num_rows": 64, "num_together": 64}
    if name in ("_write", "_remove_all"):
        constants.pop("num_rows")
    types = WRITTEN | EPISODES | counts
    signature = {key: "constexpr" if key in constants else types.get(key, "i32") for key in kernel.arg_names}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]


def test_kernels_in_the_interpreter_of_triton():
    tests = [sys.executable, "-m", "pytest", "-x", str(Path(__file__).with_name("test_kernels.py"))]
    subprocess.run(tests, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
