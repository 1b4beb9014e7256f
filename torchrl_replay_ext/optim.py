"""An optimizer step and gradient clipping for eager code and for compiled graphs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn


class AdamStep:
    r"""The step of a ``torch.optim.Adam`` as a function of the gradients, for eager code and for compiled graphs.

    m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²,  x ← x − lr m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)

    An eager call is a step of the optimizer itself. ``torch.compile(fullgraph=True)`` cannot trace that step, so inside
    a graph a call computes the formula. (The compiler can trace ``torch.optim.adam.adam``, but that function is slower
    on a CPU: it computes βᵗ again for every few entries of every parameter.)

    Both change the parameters and the state of the optimizer in place. ``optimizer.state_dict()``, checkpoints and
    steps of the optimizer therefore see every step. ``optimizer.load_state_dict`` copies a state into the same tensors,
    so a compiled graph goes on with it; only a learning rate that is a number in the graph must be as before.

    On a GPU, an optimizer that is not ``fused`` becomes ``capturable``: its step counts move there. With step counts on
    the CPU, a graph would wait for the GPU, and only parts of it could be replayed as CUDA graphs. The optimizer's
    ``state_dict`` has the new setting. To go on with it on the CPU, make an AdamStep there, which takes it back.

    Args:
        optimizer: an Adam with one parameter group, without ``amsgrad``, ``maximize`` and ``weight_decay``. If a
            learning rate scheduler changes ``lr``, make it a tensor on the parameters' device: each step reads the
            value of the tensor, while a compiled graph treats numbers as constants, also ``betas`` and ``eps``.

    Raises:
        ValueError: if the optimizer is not such an Adam, or has tensors as ``betas``, none of its parameters requires
            gradients, one of them is complex, or the optimizer has made different numbers of steps for them.

    Attributes:
        parameters: the parameters of the optimizer that require gradients now, in the order in which gradients are
            expected.

    Examples:
        >>> weight = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> step = AdamStep(torch.optim.Adam([weight], lr=0.1))
        >>> step(torch.autograd.grad(weight.square().sum(), step.parameters))
        >>> weight
        tensor([ 0.9000, -1.9000], requires_grad=True)
    """

    def __init__(self, optimizer: torch.optim.Adam):
        if not isinstance(optimizer, torch.optim.Adam):
            raise ValueError(f"AdamStep: optimizer must be a torch.optim.Adam, not {type(optimizer).__name__}.")
        self._optimizer, self._group = optimizer, optimizer.param_groups[0]
        # TorchRL's parameter collections also contain buffers, such as the bounds of a tanh policy
        self.parameters: list[Tensor] = [entry for entry in self._group["params"] if entry.requires_grad]
        unsupported = {
            "several parameter groups; make one optimizer and one AdamStep for each": len(optimizer.param_groups) > 1,
            **{f"{name}={self._group[name]}": self._group[name] for name in ("amsgrad", "maximize", "weight_decay")},
            "betas that are tensors; make them numbers": any(isinstance(beta, Tensor) for beta in self._group["betas"]),
            "no parameter that requires gradients": not self.parameters,
            "complex parameters; use their torch.view_as_real": any(each.is_complex() for each in self.parameters),
        }
        for what, is_there in unsupported.items():
            if is_there:
                raise ValueError(f"AdamStep: the optimizer has {what}. This is not supported.")
        self._place_counts()
        # of each parameter: first moments, second moments and the number of steps, by torch's names
        self._states = [self._state_of(parameter) for parameter in self.parameters]
        self._take_state()
        itself = ref(self)

        def take_loaded_state(_: torch.optim.Optimizer) -> None:
            if step := itself():
                step._take_loaded_state()

        optimizer.register_load_state_dict_post_hook(take_loaded_state)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the optimizer that a graph keeps if they are numbers: lr, betas and eps."""
        return {name: self._group[name] for name in ("lr", "betas", "eps")}

    def _place_counts(self) -> None:
        """Let the step counts lie on the device of the parameters, as those of fused optimizers do."""
        if not self._group["fused"]:
            # torch has capturable optimizers for all other devices
            others = "cpu", "mps", "mtia", "meta"
            self._group["capturable"] = all(parameter.device.type not in others for parameter in self.parameters)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter; what is missing is made as the optimizer makes it."""
        fused = self._group["fused"]
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32
        state = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.zeros((), dtype=dtype, device="cpu")
        given = self._optimizer.state.get(parameter, {})
        state = {name: given.get(name, made) for name, made in state.items()}
        state["step"] = state["step"].to(parameter.device if fused or self._group["capturable"] else "cpu")
        return state

    def _take_state(self) -> None:
        """Copy the state of the optimizer into the tensors that graphs read, and put these into the optimizer."""
        if len({float(self._optimizer.state.get(each, {}).get("step", 0)) for each in self.parameters}) > 1:
            raise ValueError(
                "AdamStep: the optimizer has made different numbers of steps for its parameters, because some had no "
                "gradient in some steps; the number must be the same for all. Make a new optimizer."
            )
        for parameter, own in zip(self.parameters, self._states, strict=True):
            state = self._optimizer.state[parameter]
            for name, tensor in own.items():
                # the state of an optimizer before its first step is empty
                tensor.copy_(state[name]) if name in state else tensor.zero_()
                state[name] = tensor

    @torch.no_grad()
    def _take_loaded_state(self) -> None:
        optimizer, group = self._optimizer, self._group
        loaded, optimizer.param_groups[0] = optimizer.param_groups[0], group
        if isinstance(group["lr"], Tensor):
            loaded["lr"] = group["lr"].copy_(torch.as_tensor(loaded["lr"]))
        group.update(loaded)
        self._place_counts()
        self._take_state()

    @torch.no_grad()
    def __call__(self, gradients: Iterable[Tensor]) -> None:
        """Update the parameters.

        Args:
            gradients: one per parameter, in the parameter's shape, as ``torch.autograd.grad(loss, step.parameters)``
                returns them.

        Raises:
            ValueError: if their number or a shape differs; nothing is changed then.
        """
        gradients = list(gradients)
        shapes = [None if gradient is None else tuple(gradient.shape) for gradient in gradients]
        expected = [tuple(parameter.shape) for parameter in self.parameters]
        if shapes != expected:
            raise ValueError(
                f"AdamStep: the gradients have shapes {shapes}, the parameters {expected}; pass "
                "torch.autograd.grad(loss, step.parameters)."
            )
        if not torch.compiler.is_dynamo_compiling():
            self._step(gradients)
            return
        beta1, beta2 = self._group["betas"]
        for state in self._states:
            state["step"].add_(1)
        # 1 − βᵗ = −tanh(x / 2) (1 + eˣ) with x = t log β, without cancellation in the first steps. The compiler
        # computes what has an exp and several users once; it would repeat expm1 for every few entries of parameters.
        count = self._states[0]["step"]
        exponents = [count * math.log(beta) if beta else torch.full_like(count, -math.inf) for beta in (beta1, beta2)]
        correction1, correction2 = (-(x / 2).tanh() * (1 + x.exp()) for x in exponents)
        rate, root = self._group["lr"] / correction1, correction2.sqrt()
        for parameter, gradient, state in zip(self.parameters, gradients, self._states, strict=True):
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            parameter.sub_(rate * mean / (square.sqrt() / root + self._group["eps"]))

    def _step(self, gradients: Sequence[Tensor]) -> None:
        """A step of the optimizer itself; ``grad`` of all parameters is left as it was."""
        own = self._group["params"]
        before = [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            # fused optimizers read the memory of a gradient in the order of the parameter's, whatever its strides
            same = gradient.stride() == parameter.stride()
            parameter.grad = gradient if same else torch.empty_like(parameter).copy_(gradient)
        self._optimizer.step()
        for parameter, gradient in zip(own, before, strict=True):
            parameter.grad = gradient


def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """Scale gradients down to a total 2-norm of at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        gradients: tensors of any shapes.
        max_norm: largest 2-norm of all gradients together, > 0.

    Returns:
        New tensors of the same shapes.

    Raises:
        ValueError: if ``max_norm`` is not > 0.

    Examples:
        >>> clip_gradients([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
        [tensor([0.6000]), tensor([0.8000])]
    """
    if not max_norm > 0:
        raise ValueError(f"clip_gradients(max_norm={max_norm}): max_norm must be > 0.")
    scale = (max_norm / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp_max(1.0)
    return [gradient * scale for gradient in gradients]
