"""A compiled step takes the same time for every capacity: its code copies and allocates nothing of that size."""

import math
import re
from dataclasses import replace

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.utils import run_and_get_code

from tests.params import slow_but
from tests.test_compiled import CASES, reaper, step
from torchrl_replay_ext import compile_step

pytestmark = pytest.mark.usefixtures("from_scratch")

CAPACITY = 40_000
# below the number of sums in a sum tree, which is a fifteenth of the number of leaves
LARGE = CAPACITY // 16
WRITING = [name for name, case in CASES.items() if case.extends]
# the original case normalises weights over the whole buffer, which takes a pass over the buffer
OVER_THE_BATCH = {"reaper, two columns": replace(CASES["reaper, two columns"], sampler=reaper())}
LOOP = re.compile(r"<\s*static_cast<\w+>\((\d+)L?\)")
ALLOCATION = re.compile(r"empty_strided\w*\(\(([\d, ]+)\)")


def large_steps(code: str) -> list[str]:
    """Lines of generated code with a loop over, or an allocation of, at least ``LARGE`` entries."""
    found = []
    for line in code.splitlines():
        loops = [int(bound) for bound in LOOP.findall(line)]
        sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in ALLOCATION.findall(line)]
        if max([*loops, *sizes], default=0) >= LARGE:
            found.append(line.strip())
    return found


def code_of(function, *arguments) -> str:
    without_graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with without_graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        return "\n".join(run_and_get_code(function, *arguments)[1])


@pytest.mark.parametrize("name", slow_but(("proportional",), WRITING))
def test_a_step_with_writes_touches_nothing_of_the_size_of_the_capacity(name):
    case = replace({**CASES, **OVER_THE_BATCH}[name], capacity=CAPACITY)
    experience, buffer = case.experience(), case.buffer()
    for _ in range(5):
        buffer.extend(experience.take(CAPACITY // 4))
    compiled = compile_step(lambda data: step(buffer, data))
    code = code_of(compiled, experience.take(8))
    assert len(code) > 1000
    assert not large_steps(code)


def test_a_copy_of_the_size_of_the_capacity_is_found():
    """Negative control: the check finds a write that copies the tensor that it changes."""
    stored = torch.zeros(CAPACITY)

    def write(index):
        return torch.index_copy(stored, 0, index, torch.ones(8))[index] + 1

    assert large_steps(code_of(compile_step(write), torch.arange(8)))
