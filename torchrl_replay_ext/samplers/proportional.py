"""Proportional prioritized experience replay."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_bool
from torchrl_replay_ext.compilation import is_traced
from torchrl_replay_ext.core.sum_tree import SumTree, UpdateMask
from torchrl_replay_ext.samplers.base import PrioritySampler


@PrioritizedSampler.register
class ProportionalSampler(PrioritySampler):
    r"""Draws transitions in proportion to a power of their TD error (Schaul et al. 2016, proportional variant).

    P(i) = d_i^α / Σ_k d_k^α with d_i = \|δ_i\| + eps, and w_i = (N · P(i))^−β divided by the largest weight. New
    transitions get the largest d seen so far, 1 before the first update. See ``max_priority_within_buffer`` if single
    outliers should not stay the priority of new transitions for ever.

    A drop-in for the ``sampler`` of a stock :class:`~torchrl.data.TensorDictReplayBuffer`, in plain PyTorch. Sums are
    exact: d^α is kept in fixed point, in units of 2^-23 = 1.2e-7 (rounded up). At a capacity of 10^6, d^α may be up to
    5 · 10^5.

    Args:
        capacity: number of slots, at least that of the storage.
        alpha: priority exponent, >= 0, or :class:`~torchrl_replay_ext.Anneal`; 0 is uniform. Default: 0.6.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.4.
        eps: added to \|δ\|, so that every transition can be drawn; with 0, transitions without TD error cannot.
            Default: 1e-6.
        stratified: draw one transition from each of B segments of equal mass instead of B independent ones. Default:
            False.
        td_error: ``"squared"`` (default) if the loss writes δ² to the buffer's priority key, ``"absolute"`` if it
            writes \|δ\|. Most TorchRL losses write δ² (DQN, TD3, DDPG, REDQ, IQL, CQL), SAC, DiscreteSAC, CrossQ and
            TQC write \|δ\|. A wrong value raises no error: it doubles or halves the exponent.
        weight_norm: ``"buffer"`` (default): weights are divided by the largest weight of any stored transition;
            ``"batch"``: by the largest of the batch.
        max_priority_within_buffer: new transitions get the largest d of the stored transitions that have been updated,
            instead of the largest d ever seen; rows that the same write overwrites do not count. If no stored
            transition has been updated, the last such value is kept. Default: False.

    Raises:
        TypeError: if a number or a flag has another type.
        ValueError: if an argument is out of range, or, at the first write, ``capacity`` is smaller than the storage.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000), sampler=ProportionalSampler(1000, alpha=0.6), batch_size=4
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | Anneal = 0.6,
        beta: float | Anneal = 0.4,
        eps: float = 1e-6,
        stratified: bool = False,
        td_error: TDError = "squared",
        weight_norm: WeightNorm = "buffer",
        max_priority_within_buffer: bool = False,
    ):
        require_bool("ProportionalSampler", "stratified", stratified)
        self._stratified = stratified
        super().__init__(
            capacity,
            alpha=alpha,
            beta=beta,
            eps=eps,
            td_error=td_error,
            weight_norm=weight_norm,
            max_priority_within_buffer=max_priority_within_buffer,
        )

    def _allocate(self, size: int, device: torch.device) -> None:
        self._seen = 0
        self._tree = SumTree(size, track_min=self._weight_norm == "buffer", device=device)
        self._shape_changed()

    def _clear(self) -> None:
        self._tree.clear_()

    def _write(self, slots: Tensor, storage: Storage | None) -> None:
        self._stamp_slots(slots)
        self._tree.write(slots, self._mass(self._max_priority).expand(slots.shape[0]))

    def _drop(self, slots: Tensor) -> None:
        self._tree.write(slots, torch.zeros_like(slots))

    def _limit(self, alpha: float) -> float:
        return self._largest(self._tree, alpha)

    def _update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        self._tree.write(slots, self._mass(priority), lazy=True, mask=mask)

    def _draw(self, batch_size: int) -> tuple[Tensor, Tensor, float | Tensor | None]:
        slots, mass = self._tree.sample(batch_size, stratified=self._stratified, generator=self._rng)
        if self._weight_norm == "batch":
            return slots, mass, None
        if not self._tree.prepared:
            clock = self._clock.item()
            if clock != self._seen:
                # another process may have written
                self._tree.forget_min()
                self._seen = clock
        smallest = self._tree.min()
        if is_traced():
            # + 0, so that an update waits until the minima were read
            slots = slots + (smallest.clamp(1, 2**62 - 1) >> 62)
        return slots, mass, smallest

    def _unnormalized(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots).double()

    def _reweight(self, slots: Tensor | None = None) -> None:
        self._reweight_tree(self._tree, slots)

    def _check(self) -> None:
        if bool(((self._tree.leaves[: self._size] > 0) & (self._stamp == 0)).any()):
            raise AssertionError("ProportionalSampler: a slot that holds nothing can be drawn")

    def _tensors(self) -> dict[str, Tensor]:
        return {"masses": self._tree.rows}

    def _restored(self) -> None:
        self._tree.rebuild_()
