"""The code that torch generates for a CUDA device if all tensors are there. Torch must be built for CUDA."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from recipes.common import update as updates
from recipes.common.cli import DONE
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed
from tests.test_compiled import CASES, step
from torchrl_replay_ext.kernels.ops import Kernel

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.cuda_code import code_for_cuda

pytestmark = pytest.mark.usefixtures("from_scratch")


@pytest.fixture(autouse=True)
def code_of_the_gpu(monkeypatch):
    """Graphs are traced with tensors on the CPU; use kernels only if they have a version for the GPU."""
    monkeypatch.setattr(Kernel, "runs_on", lambda self, state: self._for_cuda)


def assert_only_kernels(code):
    """All is computed by kernels of the GPU, in one part, without waiting."""
    assert "triton_" in code
    called = code[code.index("async_compile.wait") :]
    for module in ("tree", "lanes", "episodes", "slices"):
        called = called.replace(f"torch.ops.torchrl_replay_ext.{module}_", "our_kernel_")
    for foreign in ("cpp_fused", ".item()", "def partition_1(", "torch.ops."):
        assert foreign not in called


@pytest.mark.parametrize("name", slow_but(["slices, uniform, two columns, not padded"], CASES))
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
        if hasattr(place, "compiled"):
            monkeypatch.setattr(place, "compiled", generated)
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
    "write": ("_write", TREE | ROWS | {"minima": INT64, "size": "i32", "mass": INT64}),
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
    constants |= {"levels": 5, "num_rows": 64, "num_together": 64}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {key: "constexpr" if key in constants else arguments[key] for key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


BOOL, INT32 = "*i1", "*i32"
SLOTS = {"slots": INT64, "lane_of": INT64, "begins": BOOL, "ended": BOOL}
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
    counts = {"count": INT32} if module == "episodes" else {}
    constants = {"has_ids": assigned, "has_initial": assigned, "is_assigned": assigned, "can_refuse": assigned}
    constants |= {"block": 4, "levels": 5, "record_levels": 5, "stops": assigned, "is_padded": assigned}
    constants |= {"is_one_mass": assigned, "has_number": assigned, "num_rows": 64}
    if name in ("_write", "_remove_all", "_update"):
        constants.pop("num_rows")
    types = SLOTS | EPISODES | counts
    signature = {key: "constexpr" if key in constants else types.get(key, "i32") for key in kernel.arg_names}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]


def test_tree_kernels_in_the_interpreter_of_triton():
    tests = [sys.executable, "-m", "pytest", "-x", str(Path(__file__).with_name("test_kernels.py"))]
    subprocess.run(tests, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
