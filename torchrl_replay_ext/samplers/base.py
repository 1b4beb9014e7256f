"""The base class of samplers: TorchRL's calls, priorities and weights. A subclass says how likely each slot is."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Anneal, make_exponents
from torchrl_replay_ext.arguments import TDError, require_bool, require_choice, require_finite, require_integer, shown
from torchrl_replay_ext.compilation import Array, gather_in_bounds, is_traced, raise_if, to_device
from torchrl_replay_ext.core.layout import Layout, flat_slots, out_of_range, unravel
from torchrl_replay_ext.kernels.layouts import EMPTY, INVALID, OUT_OF_RANGE
from torchrl_replay_ext.kernels.ops import as_tensor
from torchrl_replay_ext.samplers.bound_state import BoundState
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, ShardDraws
from torchrl_replay_ext.samplers.wrapper import ShowsArguments

# Stands for a TD error that is missing. TorchRL's buffers pass it for rows that they add and for samples without TD
# errors.
NO_TD_ERROR = -math.inf
# In graphs, each update applies an annealed alpha to this number of slots, in turns through the whole buffer.
_REWEIGHTED = 64


class Draw(NamedTuple):
    """A batch of slots.

    The rows must be in random order: a row's position must not depend on its slot, because a part of a batch must be a
    sample like the whole. Samplers that draw from strata assign the rows to them in random order.

    Importance-sampling weights are (density / smallest)^−β.

    Args:
        slots: int64 [B], contiguous, also as a NumPy array.
        density: float64 or int64 [B], likewise; proportional to the probability of each slot; 0 if nothing can be
            drawn. Default: None, no weights are computed; those of ``extras`` stay.
        smallest: the smallest positive density of all stored slots, or a tensor that begins with it, [1 or more] in the
            dtype of ``density``. Default: None, weights are divided by the largest weight of the batch.
        extras: further entries of the batch, [B] each. Default: None.
    """

    slots: Array
    density: Array | None = None
    smallest: Tensor | None = None
    extras: dict[str, Tensor] | None = None


class _Entries(dict):
    """Entries of a batch that lie on the device of the storage.

    TorchRL moves those of a plain dict there, with torch's pytrees, which do not look into subclasses. This saves as
    much time as the draw of 32 rows takes.
    """


def _require_own_names(owner: str, taken: Iterable[str]) -> None:
    """TypeError if a sampler uses a private name of its base class, ``taken``, which would change what that does."""
    for name in taken:
        if name.startswith("_") and not name.startswith(("__", "_abc_")):
            raise TypeError(f"{owner}.{name}: the base class uses this name; choose another one.")


class ReplaySampler(BoundState, ShardDraws, ShowsArguments, Sampler):
    """A sampler for TorchRL's replay buffers.

    A subclass is one method of prioritized replay. It defines

    * ``allocate(layout)``: arrays for the slots, once their number and device are known;
    * ``write(slots, rows)`` and ``remove(slots)``: changes by new transitions, and by those that are lost;
    * ``update(slots, priority)``: changes by TD errors, if it needs more than ``self.slots.priority``;
    * ``draw(count, generator)`` and ``density(slots)``: how likely each slot is.

    This class converts TorchRL's indices to flat slots (a storage of shape [T, E, ...] has T·E·... slots in row-major
    order), validates arguments and follows writes. It computes priorities from TD errors, and importance-sampling
    weights from densities.

    * A new transition gets the largest d = |δ| + eps seen so far, at least 1. With ``max_priority_within_buffer`` it
      gets the largest d of the stored transitions that have been updated.
    * If an update contains a slot several times, the largest TD error counts.
    * Rows of an update are dropped and counted if their slot was overwritten after the draw, see
      :meth:`update_priority`. The write stamps of a :class:`~torchrl_replay_ext.CompilableReplayBuffer` identify such
      rows exactly.
    * A compiled step keeps no Python state and reads no tensor values. It counts input that is an error in eager mode.
      No method may branch on the values of tensors then, except ``write`` if ``writes_in_graphs`` is False.
    * On an accelerator, eager code reads no values of updates either, because the host would have to wait for the
      device. It counts invalid rows like a compiled step, or raises errors with
      :func:`~torchrl_replay_ext.validate_on_accelerators`.

    Args:
        capacity: number of slots, at least the capacity of the storage. Default: None, the capacity of the storage.
        eps: constant added to |δ|, >= 0. Default: 0.
        min_priority: the smallest d of an updated transition, >= 0. Default: 0.
        td_error: ``"squared"`` (default) if the loss writes δ², ``"absolute"`` if it writes |δ|.
        max_priority_within_buffer: if True, new transitions get the largest d of the stored transitions that have been
            updated. Default: False.
        **exponents: ``alpha``, ``beta`` and ``omega``, each a number or an :class:`~torchrl_replay_ext.Anneal`, whose
            schedule counts updates. ``beta`` is the exponent of the weights; without it, batches have none.
    """

    # False if draws do not depend on TD errors: update_priority does nothing then. If the class says so, TorchRL's
    # buffers pass it no TD errors
    takes_priorities = True
    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = "max"

    def __init__(
        self,
        capacity: int | None = None,
        *,
        eps: float = 0.0,
        min_priority: float = 0.0,
        td_error: TDError = "squared",
        max_priority_within_buffer: bool = False,
        **exponents: float | Anneal,
    ):
        name, before = self.owner, dict(vars(self))
        self.capacity = None if capacity is None else require_integer(name, "capacity", capacity)
        require_choice(name, "td_error", td_error, get_args(TDError))
        super().__init__(
            Layout((self.capacity or 1,), torch.device("cpu")),
            make_exponents(name, **exponents),
            eps=require_finite(name, "eps", eps),
            min_priority=require_finite(name, "min_priority", min_priority),
            td_error=td_error,
            within_buffer=require_bool(name, "max_priority_within_buffer", max_priority_within_buffer),
        )
        changed = (key for key, value in before.items() if hasattr(ReplaySampler, key) or vars(self)[key] is not value)
        _require_own_names(name, changed)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.owner = vars(cls).get("owner", cls.__name__)
        if not cls.__module__.startswith(f"{__package__}."):
            _require_own_names(cls.__name__, filter(partial(hasattr, ReplaySampler), vars(cls)))
        if cls.takes_priorities:
            # TorchRL's buffers pass TD errors to this class alone
            PrioritizedSampler.register(cls)
        elif issubclass(cls, PrioritizedSampler):
            raise TypeError(f"{cls.__name__}: a subclass of a sampler with TD errors expects them too.")

    def _set_up_state(self, layout: Layout) -> None:
        super()._set_up_state(layout)
        _require_own_names(self.owner, filter(partial(hasattr, ReplaySampler), self._saved_names))
        # True if more than the kernel changes has to follow priorities
        self._needs_update_call = self.slots.within_buffer or type(self).update is not ReplaySampler.update
        self._refresh_limit()
        if self.slots.largest.item() > self.max_supported_priority:
            raise ValueError(
                f"{self.owner}(min_priority={shown(self.slots.min_priority)}): must be <= "
                f"{shown(self.max_supported_priority)} for {layout.size} slots and this alpha."
            )

    @property
    def default_priority(self) -> float:
        """What TorchRL's buffers pass for rows without TD errors; such rows keep their priorities."""
        return NO_TD_ERROR

    # --- what a method defines, besides allocate(), write() and remove()

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """Update what depends on priorities. Default: do nothing.

        Args:
            slots: int64 [n], each slot once; rows of slot -1 are skipped (in eager code on the CPU there are none).
            priority: d of each slot, float32 [n].
        """

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        """Draw ``count`` slots with replacement.

        Raises:
            RuntimeError: if nothing can be drawn. Where values cannot be read, all rows are then slot 0 with density 0.
        """

    @abstractmethod
    def density(self, slots: Tensor) -> Tensor:
        """A number proportional to the probability of each of ``slots`` [n], float64 [n]."""

    def reweight(self, slots: Tensor | None) -> None:
        """Recompute the density of ``slots`` [n], or of all slots if None, after an exponent has changed.

        Default: do nothing, for methods that keep no powers.
        """

    @property
    def max_supported_priority(self) -> float:
        """The largest d that can be represented. Default: what the sampler's sum trees can hold, if it has any."""
        return min([torch.finfo(torch.float32).max, *(tree.max_supported_priority for tree in self._trees())])

    def stored_slots(self) -> Tensor:
        """The slots that can be drawn, int64 [n]. Default: all that hold a transition."""
        return self.slots.stored()

    def own_stats(self) -> dict[str, Tensor]:
        """Further statistics for logging, scalars."""
        return {}

    # --- before each use

    def synchronize(self, storage: Storage | None) -> bool:
        """Bring the state up to date with the storage; in a graph, only check both. Returns True in a graph."""
        if is_traced():
            self._require_bound(storage)
            return True
        if storage is not self._bound_storage:
            self.bind(storage)
        if self._storage_writes is not None and self._storage_writes.writes > self._known_writes:
            self._require_all_writes()
        if not self._knows_storage and storage is not None and self.slots.is_empty and _torchrl.length(storage):
            self._take_in_storage(storage, int(_torchrl.next_step(storage)))
        return False

    def flat_slots(self, index: int | Tensor | tuple) -> Tensor:
        """Flat slots, in row-major order, of TorchRL's index; int64 [n]."""
        return to_device(flat_slots(self.owner, index, self.layout), self.layout.device)

    # --- draws

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Draw ``batch_size`` slots.

        Returns:
            The index, [B], or a tuple of [B] for a storage of more dimensions, and a dict with further columns:
            ``priority_weight``, float32 [B], at most 1, and those of the method.

        Raises:
            RuntimeError: if the buffer is empty, or all priorities are 0. A traced step raises no error: all rows are
                slot 0, with weight 0. Likewise an accelerator, if all priorities are 0.
            ValueError: if the buffer has ``sample_unit=Sequence(...)`` and slots are not in time order.
        """
        slots, info = self.draw_rows(storage, batch_size, is_complete=True)
        return unravel(slots, self.layout.shape), info if self.layout.for_graphs else _Entries(info)

    def draw_rows(
        self, storage: Storage, batch_size: int, *, is_complete: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:
        """Draw flat slots, [B], and further columns: weights and, if the draw ``is_complete``, write stamps.

        A complete draw is counted, since updates of its rows are expected.
        """
        name, layout = self.owner, self.layout
        if type(batch_size) is not int or batch_size < 1:
            batch_size = require_integer(f"{name}.sample", "batch_size", batch_size)
        if not self.synchronize(storage) and self.slots.is_empty:
            raise RuntimeError(f"Cannot sample from an empty storage. {name}: write to the buffer first.")
        slots, density, smallest, extras = self.draw(batch_size, self._rng)
        if isinstance(density, Tensor):
            # kernels that return arrays raise it themselves
            message = f"{name}: all priorities are 0, so no transition can be drawn; use eps > 0."
            raise_if(lambda: density[0] == 0, lambda: RuntimeError(message), skip_on=layout.skip_checks_on)
        beta = self.hyperparameters.get("beta")
        weight, stamp = self.slots.drawn(
            slots,
            density,
            smallest,
            None if beta is None else beta.views()[0],
            is_counted=is_complete and self.takes_priorities,
            is_stamped=is_complete and self.layout.for_graphs,
        )
        slots = as_tensor(slots)
        info = {} if weight is None else {"priority_weight": weight}
        if stamp is not None:
            info[STAMP_KEY] = stamp
        return slots, info if extras is None else info | extras

    # --- priorities

    def update_priority(
        self,
        index: int | Tensor | tuple,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        stamp: Tensor | None = None,
    ) -> None:
        """Set the priorities of slots from their TD errors.

        Args:
            index: slots, in TorchRL's format: int, [n], or [n, ndim] for a storage of more dimensions.
            priority: TD errors, one per slot or a single number: δ² if ``td_error="squared"``, |δ| if ``"absolute"``.
            storage: the buffer's storage. Default: None.
            stamp: the entry ``"write_stamp"`` of the sample, [B]. Rows whose slot was overwritten after the draw are
                dropped. None (default): a row is dropped if its slot was drawn and then overwritten within the last 64
                draws, and has not been drawn since. An update all of whose rows were written since the last draw is
                always applied.

        Raises:
            ValueError: if a TD error, in float32, is negative, not finite or too large, or the shapes do not match.
            IndexError: if a slot is out of range, or empty and never drawn. After an error the state is unchanged. A
                traced step, and an accelerator, raise no error: such rows change nothing and are counted in
                :meth:`stats`.
        """
        if not self.takes_priorities:
            return
        in_graph = self.synchronize(storage)
        if not in_graph:
            self._require_not_forked()
        if not self.layout.known and self.slots.is_empty:
            raise IndexError(f"{self.owner}.update_priority: the storage is empty; write to the buffer first.")
        slots = self.flat_slots(index)
        error = self._td_errors(priority, slots.shape[0])
        if not slots.shape[0]:
            return
        # in graphs and on accelerators, invalid rows are left out and counted
        refuses = not in_graph and (slots.is_cpu or self.layout.validate)
        # on accelerators only a number that was expanded is read, as TorchRL's buffers do
        is_expanded = not refuses and not in_graph and (error.shape[0] == 1 or error.stride(0) == 0)
        if is_expanded and error[0] == NO_TD_ERROR:
            self._ignore_missing(slots)
            return
        stamp = None if stamp is None else stamp.to(self.layout.device)
        reason, row_or_count, updated, d = self.slots.update(slots, error, stamp, refuses=refuses)
        if reason == INVALID and bool((error == NO_TD_ERROR).all()):
            self._ignore_missing(slots)
            return
        if reason:
            raise self._refused_update(reason, slots, error, row=row_or_count)
        if row_or_count and self._needs_update_call:
            if isinstance(updated, np.ndarray):
                updated, d = torch.from_numpy(updated[:row_or_count]), torch.from_numpy(d[:row_or_count])
            self.slots.recount(updated)
            self.update(updated, d)
        self.step()

    def _td_errors(self, td_errors: Any, count: int) -> Tensor:
        """Convert TD errors, one for each of ``count`` slots or a scalar for all of them, to float32 [count].

        ValueError if ``td_errors`` has another number of elements.
        """
        device = self.layout.device
        if isinstance(td_errors, Tensor) and td_errors.dtype == torch.float32 and td_errors.device == device:
            # conversions that change nothing take as long as the rest
            error = td_errors.detach() if td_errors.requires_grad else td_errors
        else:
            error = torch.as_tensor(td_errors, dtype=torch.float32, device=device).detach()
        if error.ndim != 1:
            error = error.reshape(-1)
        if error.shape[0] == count:
            return error
        if torch.as_tensor(td_errors).ndim != 0:
            raise ValueError(
                f"{self.owner}.update_priority: there are {error.shape[0]} TD errors for {count} indices; pass one TD "
                "error per transition."
            )
        return error.expand(count)

    def _ignore_missing(self, slots: Tensor) -> None:
        """Ignore an update without TD errors. A sample is counted, with a warning; not rows that were just stored."""
        slots_in_range = slots.clamp(0, self.layout.size - 1)
        if bool((gather_in_bounds(self.slots.drawn_at, slots_in_range) > 0).any()):
            self.slots.counts[1].add_(len(slots))
            warnings.warn(
                f"{self.owner}: the batch has no TD errors in the entry that the buffer's priority_key names "
                '(default: "td_error"), so priorities stay as they are. The loss must write this entry, or pass '
                "priority_key=.",
                stacklevel=2,
            )

    def _refused_update(self, reason: int, slots: Tensor, error: Tensor, row: int) -> Exception:
        """The error for a row of an update; ``reason``: see :mod:`~torchrl_replay_ext.kernels.layouts`."""
        slot = int(slots[row])
        if reason == OUT_OF_RANGE:
            return out_of_range(self.owner, slot, self.layout.shape)
        if reason == EMPTY:
            return IndexError(f"{self.owner}.update_priority: slot {slot} is out of range: it is empty.")
        limit, wrong = self.max_supported_priority, np.float32(float(error[row]))
        return ValueError(
            f"{self.owner}.update_priority: TD error {shown(wrong)} at index {slot} (position {row} "
            f"of the update); TD errors must be >= 0 and finite, and the priority |δ| + eps at most {shown(limit)}."
        )

    # --- hyperparameters

    def step(self) -> None:
        """Count an update, advance the schedules, and apply an annealed alpha to stored transitions."""
        for hyperparameter in self.hyperparameters.values():
            if hyperparameter.annealed:
                hyperparameter.step()
        alpha = self.hyperparameters.get("alpha")
        if alpha is None or not alpha.annealed:
            return
        if not self.layout.for_graphs:
            if alpha.just_ended():
                self.reweight(None)
        else:
            cursor = self.slots.reweighted
            slots = (cursor + torch.arange(_REWEIGHTED, device=self.layout.device)) % self.layout.size
            cursor.add_(_REWEIGHTED)
            self.reweight(slots)

    def set_hyperparameter(self, name: str, value: float | Tensor | Anneal) -> None:
        """Assign a number or a schedule.

        Raises:
            ValueError: if alpha is too large for the largest priority; nothing is changed then.
        """
        with self.exclusive():
            hyperparameter = self.hyperparameters[name]
            before, saved = float(hyperparameter.value), hyperparameter.state()
            hyperparameter.set(value)
            if name == "alpha":
                largest, bound = self.slots.largest_so_far(), hyperparameter.bound
                if largest > self.max_supported_priority:
                    hyperparameter.load(saved)
                    raise ValueError(
                        f"{self.owner}(alpha={shown(bound)}): alpha is too large for the largest priority so far, "
                        f"{shown(largest)}; use a smaller alpha."
                    )
                if float(hyperparameter.value) != before:
                    self.reweight(None)
            self._refresh_limit()

    def _refresh_limit(self) -> None:
        """Compute the largest d that updates may contain, after hyperparameters have changed."""
        self.slots.limit.fill_(min(self.max_supported_priority, torch.finfo(torch.float32).max))

    def _finish_load(self, num_writes: int) -> None:
        self._refresh_limit()
        super()._finish_load(num_writes)

    # --- inspection

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability of each stored slot in one draw, float64 [len(storage)], slots in row-major order. O(N)."""
        with _torchrl.exclusive(storage):
            self.synchronize(storage)
            density = self.density(torch.arange(_torchrl.length(storage), device=self.layout.device))
        return density / density.sum().clamp_min(torch.finfo(torch.float64).tiny)

    def stats(self) -> TensorDict:
        """Statistics for logging, as a TensorDict of float32 scalars. O(N).

        ``num_items``: stored transitions. ``effective_sample_size``: (Σp)²/Σp² as a share of ``num_items``; 1 if all p
        are equal. ``priority_min``, ``priority_median``, ``priority_max``: of the density of draws, relative to its
        mean. ``never_updated``: share of transitions that still have the priority of a new one. ``max_priority``: d of
        new transitions. ``dropped_updates``: rows not updated because their slot was overwritten. ``rejected_updates``:
        rows not updated for one of two reasons. In a graph or on an accelerator, the TD error is negative, not finite
        or too large, or the slot does not exist (errors in eager code on the CPU, or with validation). In TorchRL's
        TensorDictReplayBuffer, the sample has no entry ``priority_key`` (an error in CompilableReplayBuffer). And the
        value of each hyperparameter.

        To print the numbers, call ``to_dict()``: a TensorDict prints only shapes.

        Examples:
            >>> from torchrl_replay_ext import ProportionalSampler
            >>> {name: round(number.item(), 2) for name, number in ProportionalSampler(8).stats().to_dict().items()}
            {'num_items': 0.0, 'effective_sample_size': 1.0, 'priority_min': 1.0, 'priority_median': 1.0,
             'priority_max': 1.0, 'never_updated': 0.0, 'max_priority': 1.0, 'dropped_updates': 0.0,
             'rejected_updates': 0.0, 'alpha': 0.6, 'beta': 0.4}
        """
        with self.exclusive():
            values = self._all_stats()
        scalars = {key: value.to(self.layout.device, torch.float32).reshape(()) for key, value in values.items()}
        return TensorDict(scalars, device=self.layout.device)

    def _all_stats(self) -> dict[str, Tensor]:
        state, slots = self.slots, self.stored_slots()
        density, count = self.density(slots), len(slots)
        if not count or not bool(density.sum() > 0):
            density = torch.ones(1, dtype=torch.float64, device=density.device)
        relative = density / density.mean()
        return {
            "num_items": torch.tensor(count, device="cpu"),
            "effective_sample_size": 1 / (relative**2).mean(),
            "priority_min": relative.min(),
            "priority_median": relative.median(),
            "priority_max": relative.max(),
            "never_updated": (gather_in_bounds(state.priority, slots) < 0).sum() / max(count, 1),
            "max_priority": state.largest,
            "dropped_updates": state.counts[0],
            "rejected_updates": state.counts[1],
            **{name: hyperparameter.value for name, hyperparameter in self.hyperparameters.items()},
            **self.own_stats(),
        }

    def __getstate__(self) -> dict[str, Any]:
        # the buffer pickles the storage
        return {
            **super().__getstate__(),
            "_bound_storage": None,
            "_storage_writes": None,
            "_process": None,
            "_is_spawned": get_spawning_popen() is not None,
        }

    def __repr__(self) -> str:
        values = [f"capacity={self.capacity}", *self._repr_values()]
        if self.takes_priorities:
            values.append(f"td_error={self.slots.td_error!r}")
        return f"{type(self).__name__}({', '.join(values)})"

    def _repr_values(self) -> list[str]:
        """The hyperparameters in the representation of this sampler."""
        return [f"{name}={float(h.value):g}" for name, h in self.hyperparameters.items()]
