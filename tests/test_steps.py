"""Tests of compile_step: its errors. The recipes' tests compare compiled updates with eager ones."""

import copy
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.data import buffer_of, learnable
from torchrl_replay_ext import (
    AdamStep,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    FrameStackStorage,
    ProportionalSampler,
    compile_step,
)

pytestmark = pytest.mark.usefixtures("from_scratch")


def step_of_torch(network, optimizer, loss):
    for parameter, gradient in zip(
        network.parameters(), torch.autograd.grad(loss, [*network.parameters()]), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda network, optimizer, loss: optimizer.zero_grad(), "optimizer.zero_grad()"),
        (step_of_torch, "optimizer.step()"),
    ],
)
def test_what_cannot_be_compiled_is_named_with_the_way_out(function, line):
    network, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer, before = torch.optim.Adam(network.parameters()), copy.deepcopy(network)
    compiled = compile_step(lambda: function(network, optimizer, network(x).square().mean()))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"torchrl_replay_ext\.AdamStep\(optimizer\)") as caught:
            compiled()
        assert "test_steps.py" in str(caught.value) and line in str(caught.value)
    for parameter, old in zip(network.parameters(), before.parameters(), strict=True):
        assert parameter.grad is None and torch.equal(parameter, old)


@pytest.mark.parametrize("gradients", ["zeros", "none"])
def test_backward_adds_to_gradients_as_in_eager_code(gradients):
    network, x, rate = nn.Linear(3, 2), torch.randn(4, 3), 0.1
    other = copy.deepcopy(network)
    if gradients == "zeros":
        for parameter in (*network.parameters(), *other.parameters()):
            parameter.grad = torch.zeros_like(parameter)

    def update(network):
        network(x).square().mean().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.sub_(rate * parameter.grad)
        if gradients == "none":
            for parameter in network.parameters():
                parameter.grad = None

    compiled = compile_step(lambda: update(network))
    for _ in range(4):
        compiled()
        update(other)
    for parameter, expected in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.parametrize("cudagraphs", [False, True])
@pytest.mark.parametrize("way", ["stance", "variable"])
def test_with_the_compiler_off_a_step_runs_as_it_is(way, cudagraphs, monkeypatch):
    total = torch.zeros(())

    def step(x):
        assert not torch.compiler.is_compiling()
        return total.add_(x.sum()).clone()

    if way == "variable":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    off = nullcontext() if way == "variable" else torch.compiler.set_stance("force_eager")
    with off:
        compiled = compile_step(step, cudagraphs=cudagraphs)
        results = [compiled(torch.ones(size)).item() for size in (4, 4, 2, 4)]
    assert results == [4, 8, 10, 14]


def test_a_step_is_compiled_once_the_compiler_is_on():
    total, was_compiled = torch.zeros(()), []

    def step(x):
        return total.add_(x.sum()).clone(), torch.compiler.is_compiling()

    compiled = compile_step(step)
    for stance in ("force_eager", "force_eager", "default", "default", "default", "force_eager"):
        with torch.compiler.set_stance(stance):
            was_compiled.append(compiled(torch.ones(4))[1])
    assert total == 24 and was_compiled[:5] == [False, False, True, True, True]
    with pytest.raises(ValueError, match=r"has shape \[3\]"):
        compiled(torch.ones(3))


ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (ONES, torch.ones(3), r"argument 0 of step has shape \[3\] of .*the graph was compiled for shape \[4\] of "),
        (torch.ones(8)[:4], torch.ones(8)[::2], r"with strides \(2,\)"),
        ([ONES, 2.0], [ONES, 3.0], r"argument 0\[1\] of step has value 3\.0, but .* for value 2\.0"),
        ([ONES], [ONES, ONES], "has length 2, but"),
        (
            TensorDict({"a": {"b": torch.ones(4, 3)}}, [4]),
            TensorDict({"a": {"b": torch.ones(4, 2)}}, [4]),
            r"argument 0\['a'\]\['b'\] of step has shape \[4, 2\]",
        ),
        (
            TensorDict({"a": ONES}, [4]),
            TensorDict({"a": ONES, "b": ONES}, [4]),
            r"argument 0\['b'\] .* was compiled for nothing",
        ),
    ],
)
def test_arguments_may_change_in_nothing_but_values(first, second, message):
    total = torch.zeros(())

    def step(argument, **more):
        parts = argument.values(True, True) if isinstance(argument, TensorDict) else argument
        return total.add_(sum(part.sum() if isinstance(part, torch.Tensor) else part for part in parts))

    compiled = compile_step(step)
    compiled(first)
    before = compiled(first).item()
    with pytest.raises(ValueError, match=message):
        compiled(second)
    with pytest.raises(ValueError, match=r"argument more of step has shape \[4\].* compiled for nothing"):
        compiled(first, more=ONES)
    assert total == before


def test_a_step_may_add_entries_to_its_arguments():
    buffer = buffer_of(ProportionalSampler, 64, compilable=True)
    buffer.extend(learnable(8))
    step = compile_step(lambda rows: buffer.extend(rows))
    rows = learnable(8)
    for _ in range(3):
        step(rows)  # writes "index"
    step(learnable(8))
    assert len(buffer) == 40


def test_entries_that_the_step_replaces_must_be_as_before():
    def step(batch):
        batch["pixels"] = batch["pixels"].float() / 255
        return batch["pixels"].sum()

    compiled, batch = compile_step(step), TensorDict({"pixels": torch.ones(4, dtype=torch.uint8)}, [4])
    compiled(batch)
    with pytest.raises(ValueError, match=r"argument 0\['pixels'\] of step has .*float32"):
        compiled(batch)


class State(nn.Module):
    """A state with Python values and tensors."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)


ZEROS = torch.zeros(3)
# a function that changes `state`, the state, and the error
CHANGES = {
    "shape": (
        lambda state, x: setattr(state, "a", torch.cat([state.a, x])),
        State(a=torch.zeros(3)),
        r"tensor '.*\.a' size mismatch at index 0\. expected 3, actual 6",
    ),
    "number": (
        lambda state, x: setattr(state, "n", state.n + 1),
        State(n=0),
        r"\.n == 0 .*lambda .*test_steps\.py:\d+",
    ),
    "None": (
        lambda state, x: setattr(state, "h", x if state.h is None else state.h + x),
        State(h=None),
        r"first call of step.*[\s\S]*state\.h was None and is a tensor now",
    ),
    "list": (
        lambda state, x: state.rows.append(x),
        State(rows=[]),
        r"not .*\.rows",
    ),
    "two states that start as one tensor": (
        lambda state, x: (setattr(state, "h", state.h + x), setattr(state, "c", state.c + 10 * x)),
        State(h=ZEROS, c=ZEROS),
        r"zeros and zeros\.clone\(\)[\s\S]*\.[hc] is .*\.[hc] ",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_first_call_changes_beside_the_values_of_tensors_is_named(change):
    function, state, says = CHANGES[change]

    def step(x):
        function(state, x)
        return x + 1

    compiled = compile_step(step)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            compiled(torch.ones(3))


def compiled_adam(**options):
    """A weight, its optimizer, and a compiled update that was called twice."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight], **options)
    step = AdamStep(optimizer)

    def update():
        step(torch.autograd.grad(weight.square().sum(), step.parameters))

    compiled = compile_step(update)
    for _ in range(2):
        compiled()
    return weight, optimizer, compiled


# torch does not see the steps of a graph
unseen_steps = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@unseen_steps
@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({"lr": 0.1}, {"lr": 0.05}, r"lr of the optimizer was 0.1 when .* and is 0.05 now.*lr=torch.tensor"),
        ({}, {"betas": (0.85, 0.999)}, r"betas of the optimizer was \(0.9, 0.999\) when .*cycle_momentum=False"),
        ({}, {"eps": 1e-3}, r"eps of the optimizer was 1e-08 when update was compiled and is 0.001 now"),
    ],
)
def test_numbers_of_the_optimizer_must_not_change(options, changed, message):
    weight, optimizer, compiled = compiled_adam(**{"lr": torch.tensor(0.1), **options})
    if "lr" not in options:
        # a learning rate that is a tensor may change
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10, cycle_momentum=False).step()
        compiled()
    optimizer.param_groups[0].update(changed)
    before = weight.detach().clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            compiled()
    assert torch.equal(weight, before)


def test_a_buffer_of_torchrl_is_named_as_what_cannot_be_compiled():
    rb = buffer_of(ProportionalSampler, 10, batch_size=4)
    rb.extend(learnable(8))

    def step():
        return rb.sample()["action"]

    with pytest.raises(RuntimeError, match=r"take a lock.*Use CompilableReplayBuffer[\s\S]*return rb\.sample\(\)"):
        compile_step(step)()


@pytest.mark.parametrize("storage", [CompilableTensorStorage, FrameStackStorage])
def test_the_first_write_in_a_graph_gives_the_error_of_the_storage(storage):
    rb = CompilableReplayBuffer(storage=storage(10))
    with pytest.raises(RuntimeError, match=rf"^{storage.__name__}: the first write must run outside the compiled"):
        compile_step(lambda data: rb.extend(data))(learnable(8))
