"""Makes the updates of a round, eager or as compiled graphs."""

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer

from recipes.common.config import FixedRoundsRunConfig
from torchrl_replay_ext import compile_step

# Writes new transitions to the buffer, unless they are None, and makes a fixed number of updates. Returns the numbers
# to log, as tensors [updates].
Update = Callable[[TensorDictBase | None], dict[str, Tensor]]


def total(losses: Mapping[str, Tensor] | TensorDictBase) -> Tensor:
    """The sum of the entries whose names begin with "loss"; the other entries are only logged."""
    return reduce(torch.add, [value for name, value in losses.items() if name.startswith("loss")])


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


def make_round(
    update: Update, replay: TensorDictReplayBuffer, config: FixedRoundsRunConfig, device: torch.device
) -> Callable[[TensorDictBase], list[dict[str, Tensor]]]:
    """Build the function that writes a batch of transitions and makes the updates that follow it.

    Args:
        update: makes `config.updates_per_graph` updates. It is compiled if `config.compile` is set.
        replay: the buffer.
        config: the configuration of the run.
        device: device of the buffer.

    Returns:
        A function of new transitions, [train_interval], that returns the results of `update`.
    """
    num_calls = config.learning.gradient_steps // config.updates_per_graph
    step: Callable[..., dict[str, Tensor]] = (
        compile_step(update, cudagraphs=config.cudagraphs) if config.compile else update
    )
    # If a round is one graph, the graph also writes the batch. Exceptions: on a GPU, because batches come from the CPU;
    # and samplers that sort ranks or evaluate events, which they do outside of graphs.
    writes_in_graph = num_calls == 1 and device.type == "cpu" and getattr(replay.sampler, "writes_in_graphs", True)

    def write_and_update(data: TensorDictBase) -> list[dict[str, Tensor]]:
        if not replay.write_count:
            # The first write sets up the buffer and must be eager. The graph always gets data, or never.
            return [update(data if number == 0 else None) for number in range(num_calls)]
        if writes_in_graph:
            return [step(data)]
        replay.extend(data)
        return [step(None) for _ in range(num_calls)]

    return write_and_update
