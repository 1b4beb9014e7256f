"""The code that torch generates for a CUDA device if all tensors are there. Torch must be built for CUDA."""

from importlib import import_module

import pytest

from recipes.common import update as updates
from recipes.common.cli import DONE
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed
from tests.test_compiled import CASES, step
from torchrl_replay_ext.compilation import EagerFallback

pytest.importorskip("triton")

from tests.cuda_code import code_for_cuda

pytestmark = pytest.mark.usefixtures("from_scratch")


@pytest.fixture(autouse=True)
def no_code_for_the_cpu(monkeypatch):
    """Leave out what graphs do on the CPU only."""
    monkeypatch.setattr(EagerFallback, "replace", lambda self, condition, results, inputs: results)


def assert_only_kernels(code):
    """All is computed by kernels of the GPU, in one part, without waiting."""
    assert "triton_" in code
    for foreign in ("cpp_fused", ".item()", "def partition_1(", "torch.ops."):
        assert foreign not in code[code.index("async_compile.wait") :]


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
