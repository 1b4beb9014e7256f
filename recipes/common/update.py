"""Updates of a round, eager or as compiled graphs, and optimizers that can be chosen by name: Adam and RMSProp."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import SACLoss, TD3Loss
from tqdm import tqdm

from recipes.common.config import RunConfig
from recipes.common.errors import ConfigError, did_you_mean
from recipes.common.run import Run
from torchrl_replay_ext import AdamStep, compile_step

# Writes new transitions to the buffer, unless they are None, and makes a fixed number of updates. Returns the numbers
# to log, as tensors [updates].
Update = Callable[[TensorDictBase | None], dict[str, Tensor]]


def weight_factor(batch: TensorDictBase, weights: str) -> Tensor | float:
    """The factor of a loss of TorchRL that makes its weighted mean the one that `weights` names.

    TorchRL divides by the sum of the weights, Σ w l / Σ w, so their scale has no effect ("normalized"). PER and ReaPER
    (Algorithm 1 of both papers) divide by the number of rows, Σ w l / B ("mean").

    Args:
        batch: a batch, [B].
        weights: "normalized" or "mean".

    Returns:
        The mean weight, [], for "mean"; 1 for "normalized" and for batches without weights.
    """
    weight = batch.get("priority_weight", None)
    return 1.0 if weight is None or weights == "normalized" else weight.mean()


def stack_updates(losses: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The numbers of consecutive updates as tensors [updates], detached. Only the last update must have all names."""
    return {name: torch.stack([each[name].detach() for each in losses if name in each]) for name in losses[-1]}


def make_round(update: Update, replay: Any, run: Run) -> Callable[[TensorDictBase | None], None]:
    """Build the function that ends a round: it writes the new transitions and makes the updates that follow them.

    Args:
        update: makes `updates_per_graph` updates. It is compiled if `compile` is set.
        replay: the buffer, a TensorDictReplayBuffer or a RemoteReplay.
        run: the run. It logs the losses, and its steps decide whether learning has started.

    Returns:
        A function of the transitions that :meth:`Run.collect` returned, [train_interval].
    """
    config = run.config
    num_calls = config.learning.gradient_steps // config.updates_per_graph
    step = compile_update(update, config) if config.compile else update
    # If a round is one graph, the graph also writes the batch. Exceptions: on a GPU, because batches come from the CPU;
    # and samplers that sort ranks or evaluate events, which they do outside of graphs.
    writes = num_calls == 1 and run.device.type == "cpu" and getattr(replay.sampler, "writes_in_graphs", True)

    def learn(data: TensorDictBase | None) -> None:
        learns, call = run.env_steps > config.learning.learning_starts, step
        if data is not None and not replay.write_count:
            # The first write sets up the buffer and must be eager. The graph always gets data, or never.
            call = update
        if data is not None and not (learns and writes and call is step):
            replay.extend(data)
            data = None
        for _ in range(num_calls if learns else 0):
            run.log_losses(call(data))

    return learn


def compile_update(update: Callable[..., dict[str, Tensor]], config: RunConfig) -> Callable[..., dict[str, Tensor]]:
    """Compile an update by compile_step. The first call, which compiles, says how long it took."""
    step, called = compile_step(update, cudagraphs=config.cudagraphs), False

    def call(*arguments: Any) -> dict[str, Tensor]:
        nonlocal called
        if called:
            return step(*arguments)
        started = time.perf_counter()
        tqdm.write("compiling the update ...", file=sys.stderr)
        result, called = step(*arguments), True
        tqdm.write(f"compiled the update in {time.perf_counter() - started:.1f} s", file=sys.stderr)
        return result

    return call


class RMSProp:
    """RMSProp, centered as in the DQN paper (Graves 2013, eqs. 38-41, without momentum) or not centered as in A3C.

    n ← ρ n + (1 − ρ) g²,  m ← ρ m + (1 − ρ) g,  x ← x − lr g / √(n − m² + ε)

    torch.optim.RMSprop adds ε outside the root; there, rounding can make the number under the root negative. A call
    makes a step, which a graph can contain.

    Args:
        parameters: the parameters.
        lr: learning rate.
        decay: ρ, in [0, 1). Default: 0.95.
        eps: ε, > 0. The DQN paper's 0.01 is for a sum over a batch of 32, which is 0.01 / 32² for a mean. Default:
            0.01 / 32².
        centered: whether m² is subtracted; otherwise m = 0. Default: True.

    Raises:
        ValueError: if `decay` or `eps` is out of range.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, decay=0.95, eps=0.01 / 32**2, centered=True):
        if not (0 <= decay < 1 and eps > 0):
            raise ValueError(f"RMSProp(decay={decay}, eps={eps}): decay must be in [0, 1), eps > 0")
        self.parameters = list(parameters)
        self._lr, self._decay, self._eps, self._centered = lr, decay, eps, centered
        self._squares, self._means = ([torch.zeros_like(each) for each in self.parameters] for _ in range(2))

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Make one step with these gradients of the parameters."""
        columns = (self.parameters, gradients, self._squares, self._means)
        for parameter, gradient, square, mean in zip(*columns, strict=True):
            square.mul_(self._decay).addcmul_(gradient, gradient, value=1 - self._decay)
            variance = square
            if self._centered:
                mean.lerp_(gradient, 1 - self._decay)
                # rounding can make the difference negative
                variance = (square - mean * mean).clamp_min(0)
            parameter.sub_(self._lr * gradient / (variance + self._eps).sqrt())

    def state_dict(self) -> dict[str, list[Tensor]]:
        """The means n and m of each parameter."""
        return {"squares": self._squares, "means": self._means}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Restore a state from :meth:`state_dict`."""
        saved = [*state["squares"], *state["means"]]
        for own, value in zip([*self._squares, *self._means], saved, strict=True):
            own.copy_(value)


def make_step(optimizer: torch.optim.Adam | RMSProp) -> AdamStep | RMSProp:
    """The step of an optimizer as a function of the gradients, which a graph can contain."""
    try:
        return optimizer if isinstance(optimizer, RMSProp) else AdamStep(optimizer)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error


def make_optimizers(learning: Any, loss_module: SACLoss | TD3Loss) -> dict[str, torch.optim.Adam]:
    """The optimizers of the actor, the critics and, in SAC, alpha, by their names in checkpoints.

    Args:
        learning: the hyperparameters, a SACConfig or a TD3Config.
        loss_module: the loss.
    """
    actor, critics = loss_module.actor_network_params, loss_module.qvalue_network_params
    parameters = {"actor": actor.flatten_keys().values(), "critic": critics.flatten_keys().values()}
    if isinstance(loss_module, SACLoss):
        parameters["alpha"] = [loss_module.get_parameter("log_alpha")]
    return {
        f"{name}_optimizer": torch.optim.Adam(values, lr=getattr(learning, f"{name}_learning_rate"), fused=True)
        for name, values in parameters.items()
    }


def make_optimizer(
    config: dict[str, Any], parameters: Iterable[Tensor], learning_rate: float
) -> torch.optim.Adam | RMSProp:
    """Build the optimizer named by `config["name"]`: adam or rmsprop. The other entries are its keyword arguments.

    Raises:
        ConfigError: if the name or a keyword is unknown, or a value is invalid.
    """
    keywords = {key: value for key, value in config.items() if key != "name"}
    try:
        if config.get("name") == "adam":
            return torch.optim.Adam(parameters, lr=learning_rate, fused=True, **keywords)
        if config.get("name") == "rmsprop":
            return RMSProp(parameters, learning_rate, **keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer: {error}") from error
    hint = did_you_mean(str(config.get("name")), ("adam", "rmsprop"))
    raise ConfigError(f"optimizer.name={config.get('name')}: choose adam, rmsprop{hint}")
