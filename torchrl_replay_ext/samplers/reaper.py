"""Reliability-adjusted prioritized experience replay."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_choice, require_integer
from torchrl_replay_ext.compilation import EagerFallback, gather_in_bounds, is_traced, uniform, where_int64
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.sum_tree import SumTree, UpdateMask
from torchrl_replay_ext.samplers.base import PrioritySampler
from torchrl_replay_ext.samplers.episode_reader import EpisodeReader, is_rewrite

# A pass over all N slots costs about as much as N / 32 proposals.
_PASS = 32
# Proposals beyond the multiple of the batch that is expected to be enough.
_SPARE = 16
# Above this omega the number of proposals no longer grows.
_MAX_OMEGA = 4.0

Truncated = Literal["finished", "ongoing"]


@PrioritizedSampler.register
class ReaPERSampler(PrioritySampler):
    r"""Draws transitions by TD error, adjusted for how reliable their target is (Pleiss et al., arXiv 2506.18482).

    With d_t = \|δ_t\| + eps, t = 1..n the stored transitions of an episode in time order::

        R_t = Σ_{i≤t} d_i / Σ_i d_i     episode finished                        (Eq. 16)
        R_t = Σ_{i≤t} d_i / F           episode ongoing                         (Eq. 16)
        F: the largest sum of d of an episode in the buffer                     (Eq. 17)
        Ψ_t = R_t^ω d_t^α,  P(t) = Ψ_t / Σ Ψ                                    (Eq. 15)
        w_t = (N P(t))^−β, divided by the largest weight                        (Eq. 18, Algorithm 1, line 12)

    ω = 0 is proportional PER, exactly. A drop-in for the ``sampler`` of a stock
    :class:`~torchrl.data.TensorDictReplayBuffer` with a round-robin writer, in plain PyTorch.

    Every draw follows Ψ as it is at that moment: transitions are proposed in proportion to d^α and accepted with
    probability R^ω, and R comes from prefix sums. An update costs O(log N) whatever the length of the episode.

    Departures from the paper:

    * Weights: Algorithm 1 (line 12) divides by the largest weight of all N stored transitions. That takes all N values
      of Ψ for each draw, O(N). The default ``weight_norm="batch"`` divides by the largest weight of the batch instead:
      the loss of a batch is scaled up by a factor that varies from batch to batch. ``"buffer"`` does what the paper
      does.
    * Priority of a new transition: the paper gives it the largest normalised priority p = Ψ / Σ Ψ, seen so far
      (Algorithm 1, lines 3 and 14) or stored (Algorithm 2, line 5). Here it has the largest d seen so far (1 before the
      first update) and reliability 1, so Ψ = d^α: values of p from different times have different sums Σ Ψ and do not
      compare. It keeps reliability 1 until a transition of its episode is updated or the episode ends. Its d counts in
      the sums of its episode: a large default outweighs the d of the rows that have been updated, and lowers the R of
      the rows before it. ``max_priority_within_buffer`` limits this to the largest d of the stored transitions.

    Where the paper leaves room:

    * Only what is stored counts: when the ring overwrites the head of an episode, its d leave the sums.
    * Finished is terminated or truncated, as in the authors' code; ``truncated="ongoing"`` for those who hold that
      a truncated target is not exact.
    * An episode that breaks off without an end stays ongoing, and the next one begins. In flat storage with one stream,
      a new trajectory id shows this; it warns once, since it also happens if several environments write without
      ``num_streams``. (A trajectory id that comes back after it was broken off is an error.) Nothing warns in a column
      of a storage of ``ndim`` >= 2, where trajectory ids restart, and where ``init_key`` marks the first transition of
      the next episode. With several streams in flat storage, only restarted ids and marks are accepted; the new episode
      takes the lane that was written to least recently, excluding lanes that this write continues. Several collectors
      in turn are told apart by ids that restart, unless the same id was going on: mark the first transitions then
      (torchrl's ``InitTracker``).

    Environments: one, or one per column of a storage of ``ndim`` >= 2, need nothing more. Several that write to one
    flat storage are told apart by ``traj_key``, which TorchRL's collectors write; pass their number as ``num_streams``.
    In flat storage, data of shape [E, T] must be flattened first: ``rb.append_transform(lambda td: td.reshape(-1),
    invert=True)``.

    d and d^α are kept in fixed point, in units of 2^-23 = 1.2e-7 (rounded up): scale rewards so that \|δ\| is typically
    above 1e-5. At a capacity of 10^6, d may be up to 5 · 10^5.

    Args:
        capacity: number of slots, at least that of the storage.
        alpha: exponent of the TD error, >= 0, or :class:`~torchrl_replay_ext.Anneal`. Default: 0.4.
        omega: exponent of the reliability, >= 0, or :class:`~torchrl_replay_ext.Anneal`. Default: 0.2.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.4.
        eps: added to \|δ\|, so that every transition can be drawn. Default: 1e-6.
        td_error: ``"squared"`` (default) if the loss writes δ² to the buffer's priority key, ``"absolute"`` if it
            writes \|δ\|, see :class:`~torchrl_replay_ext.ProportionalSampler`.
        num_streams: number of environments whose transitions are interleaved in flat storage. Default: 1.
        truncated: whether episodes that were truncated are ``"finished"`` (default) or ``"ongoing"``.
        done_key: where the end of an episode is stored, bool. Default: ``("next", "done")``.
        terminated_key: where its termination is stored, bool; read if ``truncated="ongoing"``. Default: ``("next",
            "terminated")``.
        traj_key: where trajectory ids are stored, int64; used if present, needed if ``num_streams`` > 1. Default:
            ``("collector", "traj_ids")``.
        init_key: where the first transition of an episode is marked, bool; used if present. Default: ``"is_init"``.
        weight_norm: ``"batch"`` (default): weights are divided by the largest of the batch; ``"buffer"``: by the
            largest of any stored transition, which costs O(N) for each draw.
        max_priority_within_buffer: new transitions get the largest d of the stored transitions that have been updated,
            instead of the largest d ever seen, see :class:`~torchrl_replay_ext.ProportionalSampler`. Rows that have not
            been updated count with that priority in the sums of their episode. Default: False.

    Raises:
        TypeError: if a number or a flag has another type.
        ValueError: if an argument is out of range; at a write, if ``capacity`` is smaller than the storage, more
            trajectories go on at once than ``num_streams``, or a trajectory comes back after it was broken off.
        KeyError: at a write, if the storage has no such key.

    Warns:
        UserWarning: at a write, once, if an episode broke off without an end.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=ReaPERSampler(1000), batch_size=4)
        >>> done = torch.zeros(10, 1, dtype=torch.bool)
        >>> done[4] = done[9] = True
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3), "next": {"done": done}}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    _needs_order = True
    _writes_in_turn = True

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | Anneal = 0.4,
        omega: float | Anneal = 0.2,
        beta: float | Anneal = 0.4,
        eps: float = 1e-6,
        td_error: TDError = "squared",
        num_streams: int = 1,
        truncated: Truncated = "finished",
        done_key: NestedKey = ("next", "done"),
        terminated_key: NestedKey = ("next", "terminated"),
        traj_key: NestedKey = ("collector", "traj_ids"),
        init_key: NestedKey = "is_init",
        weight_norm: WeightNorm = "batch",
        max_priority_within_buffer: bool = False,
    ):
        require_integer("ReaPERSampler", "num_streams", num_streams)
        require_choice("ReaPERSampler", "truncated", truncated, get_args(Truncated))
        self._num_streams = num_streams
        self._truncated = truncated
        self._terminated_key = terminated_key
        self._reader = EpisodeReader("ReaPERSampler", done_key=done_key, traj_key=traj_key, init_key=init_key)
        self._omega = Hyperparameter("ReaPERSampler", "omega", omega, hint="; use 0 for plain PER")
        super().__init__(
            capacity,
            alpha=alpha,
            beta=beta,
            eps=eps,
            td_error=td_error,
            weight_norm=weight_norm,
            max_priority_within_buffer=max_priority_within_buffer,
        )
        self._hyperparameters["omega"] = self._omega

    @property
    def omega(self) -> float:
        """Exponent of the reliability.

        A compiled step makes as many proposals per draw as the omega that was set when it was compiled needs (the
        larger end of an :class:`~torchrl_replay_ext.Anneal`). With a larger one its draws stay exact, but take longer.
        """
        return float(self._omega.value)

    @omega.setter
    def omega(self, value: float | Tensor | Anneal) -> None:
        self._omega.set(value)

    def _num_proposals(self, need: int) -> int:
        """Proposals for ``need`` draws: where R is evenly spread over (0, 1), one of 1 + omega is accepted."""
        return math.ceil(1.25 * (1 + min(self._omega.bound, _MAX_OMEGA)) * need) + _SPARE

    def _allocate(self, size: int, device: torch.device) -> None:
        self._omega.to(device)
        self._tree = SumTree(size, device=device)
        # running mean of the share of proposals that are accepted
        self._rate = torch.ones(1, dtype=torch.float64, device=device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=device)
        self._shape_changed()

    def _shape_changed(self) -> None:
        layout = self._streams_layout(self._num_streams)
        current = getattr(self, "_episodes", None)
        if (
            current is None
            or layout != (current.steps, current.lanes, current.assigned)
            or self._device != current.device
        ):
            self._episodes = EpisodeIndex(*layout[:2], assigned=layout[2], device=self._device)
        super()._shape_changed()
        if self._traceable:
            self._episodes.prepare()
            state = [*self._tree.graph_tensors(), *self._episodes.graph_tensors(), self._stamp, *self._omega.tensors()]
            self._fallback = EagerFallback(lambda drawn, _: list(self._draw_eagerly(drawn[0].shape[0])), state)

    def _clear(self) -> None:
        self._tree.clear_()
        self._episodes.clear_()
        self._rate.fill_(1.0)
        self._repeated.zero_()

    def _tensors(self) -> dict[str, Tensor]:
        return {"proposals": self._tree.rows, "acceptance_rate": self._rate, "repeated": self._repeated} | {
            f"episodes_{k}": v for k, v in self._episodes.tensors().items()
        }

    def _check(self) -> None:
        self._episodes.check_valid()
        stored = self._stamp[: self._num_slots] > 0
        if not torch.equal(self._episodes.episode != self._episodes._none, stored):
            raise AssertionError("ReaPERSampler: a slot that holds nothing has an episode, or the other way round")
        if bool(((self._tree.leaves[: self._size] > 0) & (self._stamp == 0)).any()):
            raise AssertionError("ReaPERSampler: a slot that holds nothing can be drawn")

    def _restored(self) -> None:
        self._tree.rebuild_()
        self._episodes.rebuild_()

    def nbytes(self) -> int:
        """Memory of the sampler's state in bytes."""
        shared = (self._stamp, self._priority)
        return self._tree.nbytes() + self._episodes.nbytes() + sum(t.numel() * t.element_size() for t in shared)

    def _limit(self, alpha: float) -> float:
        return min(self._largest(self._tree, alpha), self._episodes.max_priority)

    def _write(self, slots: Tensor, storage: Storage | None) -> None:
        if storage is None:
            raise ValueError("ReaPERSampler.mark_update: the storage is needed, to read where episodes end.")
        ended, trajectory, initial = self._reader.read(
            storage, slots, self._num_slots, needs_ids=self._episodes.assigned
        )
        finished = ended
        if self._truncated == "ongoing":
            terminated = self._reader.column(
                storage,
                self._terminated_key,
                self._num_slots,
                "which the environment writes and truncated='ongoing' needs; pass its name as terminated_key=.",
            )
            assert terminated is not None
            finished = terminated.index_select(0, slots).to(torch.bool)
        if not is_traced():
            streams = self._episodes.streams
            if is_rewrite(slots, self._stamp, streams, storage):
                # the transition stays where it is in its episode
                self._stamp_slots(slots)
                self._episodes.update(slots, SumTree.to_mass(self._max_priority).expand(slots.shape[0]), None)
                self._tree.write(slots, self._mass(self._max_priority).expand(slots.shape[0]))
                return
            self._reader.require_in_turn(slots, self._num_slots)
            if slots.shape[0] < self._num_slots:
                self._lose(streams.skipped(slots))
        self._episodes.write(
            slots,
            SumTree.to_mass(self._max_priority),
            self._clock + 1,
            ended=ended,
            finished=finished,
            trajectory=trajectory,
            initial=initial,
        )
        self._stamp_slots(slots)
        self._tree.write(slots, self._mass(self._max_priority).expand(slots.shape[0]))

    def _drop(self, slots: Tensor) -> None:
        self._episodes.drop(slots)
        self._episodes.streams.skip(slots)
        self._tree.write(slots, torch.zeros_like(slots))

    def _forget(self) -> None:
        self._episodes.forget()

    def _update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        self._tree.write(slots, self._mass(priority), mask=mask)
        self._episodes.update(slots, SumTree.to_mass(priority), self._clock, mask)

    def _reweight(self, slots: Tensor | None = None) -> None:
        self._reweight_tree(self._tree, slots)

    def _draw(self, batch_size: int) -> tuple[Tensor, Tensor, float | Tensor | None]:
        draw = self._draw_in_graph if is_traced() else self._draw_eagerly
        slots, density = draw(batch_size)
        return slots, density, self._smallest()

    def _propose(self, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw ``num`` proposals in proportion to d^α.

        Returns:
            Their slots, d^α, acceptance probability R^ω, and whether they are accepted, [num] each.
        """
        u, v = uniform(2, num, device=self._device, generator=self._rng)
        slots, mass = self._tree.draw(u)
        exact = self._eps == 0 or self._traceable
        factor = self._episodes.reliability(slots, self._stamp, exact=exact) ** self._omega.current()
        return slots, mass, factor, v < factor

    def _draw_eagerly(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Slots drawn from Ψ, and Ψ of each.

        Each round makes twice as many proposals per missing row. Where they would cost more than one pass over all
        Ψ, that pass draws the missing rows.
        """
        chosen: list[tuple[Tensor, Tensor]] = []
        need, made, scale = batch_size, 0, 1
        while need:
            if made > self._num_slots // _PASS:
                everything = self._stored_slots()
                density = self._unnormalized(everything)
                running = density.cumsum(0)
                u = uniform(need, device=self._device, generator=self._rng) * running[-1]
                drawn = torch.searchsorted(running, u, right=True).clamp_max(len(everything) - 1)
                chosen.append((everything[drawn], density[drawn].to(chosen[0][1].dtype)))
                break
            num = scale * self._num_proposals(need)
            made, scale = made + num, 2 * scale
            slots, mass, factor, accept = self._propose(num)
            accepted = accept.nonzero().squeeze(1)
            self._rate.mul_(0.9).add_(0.1 * accepted.shape[0] / num)
            accepted = accepted[:need]
            chosen.append((slots.index_select(0, accepted), (factor * mass).index_select(0, accepted)))
            need -= accepted.shape[0]
        if len(chosen) == 1:
            return chosen[0]
        return torch.cat([s for s, _ in chosen]), torch.cat([d for _, d in chosen])

    def _draw_in_graph(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """:meth:`_draw_eagerly` with one round of proposals.

        If too few proposals are accepted, a graph on the CPU has eager code draw the batch anew; each row follows Ψ
        either way, since accepted proposals are independent draws from Ψ however many there are. On other devices that
        would read from the device: there, accepted proposals are repeated, and if none is accepted, proposals are drawn
        in proportion to R^ω.
        """
        slots, mass, factor, accept = self._propose(self._num_proposals(batch_size))
        running = accept.cumsum(0)
        num = running[-1]
        self._rate.mul_(0.9).add_(0.1 / accept.shape[0] * num)
        wanted = torch.arange(batch_size, device=self._device)
        if self._device.type == "cpu":
            place = torch.searchsorted(running, wanted + 1)
            drawn = [gather_in_bounds(slots, place), gather_in_bounds(factor * mass, place)]
            short = (num < batch_size) & (self._tree.total() > 0)
            assert self._fallback is not None
            slots, density = self._fallback.replace(short, drawn, [])
            return slots, density
        self._repeated.add_((batch_size - num).clamp_min(0))
        place = torch.searchsorted(running, wanted % num.clamp_min(1) + 1)
        share = factor.cumsum(0)
        target = uniform(batch_size, device=self._device) * share[-1]
        unconditional = torch.searchsorted(share, target, right=True).clamp_max(len(share) - 1)
        place = where_int64(num > 0, place, unconditional)
        return gather_in_bounds(slots, place), gather_in_bounds(factor * mass, place)

    def _smallest(self) -> Tensor | None:
        """The smallest Ψ > 0 in the buffer, if weights are normalised by it."""
        if self._weight_norm == "batch":
            return None
        slots = torch.arange(self._num_slots, device=self._device) if is_traced() else self._stored_slots()
        everything = self._unnormalized(slots)
        return torch.where(everything > 0, everything, math.inf).min()

    def _reliability(self, slots: Tensor) -> Tensor:
        """R of ``slots`` [n], float64."""
        return self._episodes.reliability(slots, self._stamp)

    def _unnormalized(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots) * self._reliability(slots) ** self._omega.value

    def _extra_stats(self) -> dict[str, Tensor]:
        slots = self._stored_slots()
        mean = self._reliability(slots).mean() if slots.numel() else torch.ones(())
        return {
            "acceptance_rate": self._rate,
            "reliability_mean": mean,
            "repeated_draws": self._repeated,
            "broken_off": self._episodes.streams.broken_off.sum(),
        }
