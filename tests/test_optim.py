"""Optimizer steps for compiled graphs, against torch's own optimizers."""

import copy
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from torchrl_replay_ext import AdamStep, clip_gradients, compile_step


def pair(lr=1e-3, **options):
    """Two equal sets of parameters, each with its Adam."""
    start = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    sets = [[parameter.clone().requires_grad_() for parameter in start] for _ in range(2)]
    rates = [lr.clone() if isinstance(lr, torch.Tensor) else lr for _ in sets]
    return sets, [torch.optim.Adam(own, lr=rate, **options) for own, rate in zip(sets, rates, strict=True)]


@pytest.fixture(params=["eager", "in a graph"])
def make_step(request):
    """Makes the step of an optimizer, for eager code or traced as in a graph."""

    def make(optimizer):
        step = AdamStep(optimizer)
        if request.param == "eager":
            return step, step.parameters
        torch._dynamo.reset()
        return torch.compile(lambda gradients: step(gradients), backend="eager", fullgraph=True), step.parameters

    return make


# in a graph, the scheduler warns because the optimizer's own step is not called
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.5, 0.9), "eps": 0.1},
        {"lr": torch.tensor(0.1)},
        {"fused": True},
        {"eps": 0.0},
        # there is no log β
        {"betas": (0.0, 0.9)},
        {"betas": (0.9, 0.0)},
    ],
)
def test_adam_step_is_adam(make_step, options):
    """Gradients may have any strides, and a scheduler may change a learning rate that is a tensor."""
    (mine, theirs), (optimizer, reference) = pair(**options)
    step, parameters = make_step(optimizer)
    assert all(own is parameter for own, parameter in zip(parameters, mine, strict=True))
    schedulers = []
    if isinstance(options.get("lr"), torch.Tensor):
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, reference)]
    for _ in range(20):
        gradients = [torch.randn(2, 3, dtype=torch.float64).T, torch.randn(4, dtype=torch.float64)]
        step(gradients)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.contiguous()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    # step counts are float32, and so are the values computed from them
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_a_graph_computes_the_power_of_each_beta_once_and_not_for_every_few_entries():
    sets, (optimizer, _) = pair()
    step = AdamStep(optimizer)
    _, (source,) = run_and_get_code(torch.compile(step, fullgraph=True), [torch.ones_like(each) for each in sets[0]])
    assert len(re.findall(r"\bexp\(", source)) == 2


def test_entries_without_gradients_are_left_out_and_gradients_may_come_one_by_one():
    weight, bound = torch.ones(2, requires_grad=True), torch.ones(2)
    step = AdamStep(torch.optim.Adam([weight, bound], lr=0.1))
    assert len(step.parameters) == 1 and step.parameters[0] is weight
    step(gradient for gradient in torch.autograd.grad(weight.sum(), step.parameters))
    torch.testing.assert_close(weight, torch.full((2,), 0.9))
    assert torch.equal(bound, torch.ones(2))


def adam(*parameters, **options):
    return torch.optim.Adam([*parameters], **options)


def weight(dtype=None):
    return torch.zeros(2, dtype=dtype, requires_grad=True)


BETAS = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.999)), "capturable": True}
REFUSED = {
    "AdamStep: the optimizer has weight_decay=0.1": lambda: adam(weight(), weight_decay=0.1),
    "AdamStep: the optimizer has amsgrad=True": lambda: adam(weight(), amsgrad=True),
    "AdamStep: the optimizer has maximize=True": lambda: adam(weight(), maximize=True),
    "several parameter groups; make one optimizer and one AdamStep for each": lambda: adam(
        {"params": [weight()]}, {"params": [weight()]}
    ),
    r"optimizer must be a torch\.optim\.Adam, not SGD": lambda: torch.optim.SGD([weight()]),
    "no parameter that requires gradients": lambda: adam(torch.ones(2)),
    "betas that are tensors; make them numbers": lambda: adam(weight(), **BETAS),
    "complex": lambda: adam(weight(torch.complex64)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_only_plain_adam(message):
    with pytest.raises(ValueError, match=message):
        AdamStep(REFUSED[message]())


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 100.0])
def test_clipped_gradients_are_those_of_torch(max_norm):
    gradients = [torch.randn(3, 2), torch.randn(4)]
    before = [gradient.clone() for gradient in gradients]
    parameters = [torch.zeros_like(gradient).requires_grad_() for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, max_norm)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be > 0"):
            clip_gradients(gradients, wrong)
    clipped = clip_gradients(gradients, max_norm)
    torch.testing.assert_close(clipped, [parameter.grad for parameter in parameters])
    torch.testing.assert_close(gradients, before)


def test_parameters_without_a_state_get_one_and_gradients_stay():
    """A parameter that had no gradient at torch's first step has no state in torch's optimizer."""
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([used, unused])
    used.grad = torch.ones(2)
    with pytest.raises(ValueError, match="different numbers of steps"):
        optimizer.step()
        AdamStep(optimizer)
    fresh = torch.optim.Adam([used, unused])
    AdamStep(fresh)
    assert torch.equal(unused, torch.ones(2))
    AdamStep(fresh)([torch.full((2,), 5.0)] * 2)
    assert torch.equal(used.grad, torch.ones(2)) and unused.grad is None


@pytest.mark.parametrize("shapes", [[(2,)], [(2,), (3,)], [(2,), (1,), (1,)], [(2,), None]])
def test_gradients_that_do_not_fit_are_refused(shapes):
    parameters = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    parameters[0].grad = torch.full((2,), 5.0)
    optimizer = torch.optim.Adam(parameters)
    step = AdamStep(optimizer)
    with pytest.raises(ValueError, match=re.escape(f"the gradients have shapes {shapes}, the parameters [(2,), (1,)]")):
        step([None if shape is None else torch.zeros(shape) for shape in shapes])
    assert parameters[0].grad.tolist() == [5.0, 5.0]
    assert float(optimizer.state[parameters[0]]["step"]) == 0


def test_the_state_of_a_gpus_optimizer_continues_on_the_cpu():
    parameter = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    # looking for a state leaves an empty one
    assert not optimizer.state[parameter]
    AdamStep(optimizer)([torch.ones(3)])
    state = optimizer.state_dict()
    state["param_groups"][0]["capturable"] = True
    optimizer.load_state_dict(state)
    step = AdamStep(optimizer)
    step([torch.ones(3)])
    assert not optimizer.param_groups[0]["capturable"] and optimizer.state[parameter]["step"] == 2


@pytest.mark.usefixtures("from_scratch")
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_graph_goes_on_with_a_state_that_is_loaded(rate):
    """A state before the first step, and one after three steps, with another rate if it is a tensor."""
    weight, expected = (torch.tensor([1.0, -2.0], requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([weight], lr=copy.deepcopy(rate))
    step = AdamStep(optimizer)
    update = compile_step(lambda: step(torch.autograd.grad(weight.square().sum(), step.parameters)))
    fresh = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        update()
    used = copy.deepcopy(optimizer.state_dict())
    if isinstance(rate, torch.Tensor):
        used["param_groups"][0]["lr"] = torch.tensor(0.01)
    for state in (used, fresh, used):
        expected.detach().copy_(weight.detach())
        reference = torch.optim.Adam([expected], lr=0.1)
        reference.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(copy.deepcopy(state))
        for _ in range(2):
            update()
            reference.zero_grad()
            expected.square().sum().backward()
            reference.step()
            torch.testing.assert_close(weight, expected)
        torch.testing.assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"])
