"""Reads the entries that Retrace needs from a batch of trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.utils import expand_as_right
from torch import Tensor

from torchrl_replay_ext.objectives.categorical import action_index, log_probabilities
from torchrl_replay_ext.objectives.shifted import ShiftedStates, require_shiftable
from torchrl_replay_ext.objectives.trajectory import blank_invalid, separate_episodes

_OWNER = "RetraceEstimator"
# The component that should have written an entry, for error messages.
_ENVIRONMENT = "the environment writes it"


def require_entry(tensordict: TensorDictBase, key: NestedKey, written_by: str) -> Tensor:
    """Return the entry ``key``; if it is missing, the KeyError names the component that writes it, ``written_by``."""
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"{_OWNER}: the batch has no entry {unravel_key(key)!r}; {written_by}.")
    return value


class TrajectoryBatch:
    r"""A batch of trajectories [\*B, T].

    Args:
        tensordict: the batch.
        keys: the estimator's ``tensor_keys``.
        time_dim: the dimension of time.
        read: the entries that the estimator and its networks read.
    """

    def __init__(self, tensordict: TensorDictBase, keys: Any, time_dim: int, read: Iterable[NestedKey]):
        mask = tensordict.get(keys.mask, None)
        self._keys, self._time_dim = keys, time_dim
        # True for steps that are not masked, bool [*B, T]; None if the batch has no mask
        self.valid = None if mask is None else mask.reshape(tensordict.batch_size)
        self._data = blank_invalid(tensordict, read, self.valid)
        # [*B, T, 1] each; a step before a masked step is done
        self.reward, done, terminated = (self._next_of_step(key) for key in (keys.reward, keys.done, keys.terminated))
        self.done, self.terminated = done.to(torch.bool), terminated.to(torch.bool)
        if self.valid is not None:
            valid = self.valid.movedim(time_dim, 0)
            continues = valid & torch.cat([valid[1:], torch.ones_like(valid[:1])])
            self.done = self.done | ~continues.movedim(0, time_dim).unsqueeze(-1)

    def _next_of_step(self, key: NestedKey) -> Tensor:
        shape = (*self._data.batch_size, 1)
        value = require_entry(self._data, ("next", key), _ENVIRONMENT)
        if value.shape != shape:
            raise ValueError(
                f"{_OWNER}: {('next', key)!r} has shape {tuple(value.shape)}, expected {shape}; {_ENVIRONMENT}."
            )
        return value

    def states(
        self, observed: Iterable[NestedKey], networks: list[Any], existing: NestedKey | None
    ) -> tuple[TensorDictBase, TensorDictBase]:
        r"""The inputs of the networks for x_t and for x_{t+1}, [\*B, T] each.

        Args:
            observed: the entries that the networks read.
            networks: the networks.
            existing: a further entry, copied if the batch has it. None: no further entry.
        """
        written = [unravel_key(key) for network in networks for key in network.out_keys]
        last = torch.zeros_like(self.done.movedim(self._time_dim, 0))
        last[-1] = True
        ended = (self.done | last.movedim(0, self._time_dim)).squeeze(-1)
        shape = self._data.batch_size
        state, following = TensorDict(batch_size=shape), TensorDict(batch_size=shape)
        for key in observed:
            next_key = unravel_key(("next", key))
            written_by = f"the networks read it; {_ENVIRONMENT}"
            value = require_entry(self._data, key, written_by)
            after = require_entry(self._data, next_key, written_by)
            if after.shape == value.shape and next_key in written:
                # A hidden state. If the loss ran the network over the rows, those under "next" are 0 except where a
                # trajectory ends. So the hidden state stored for the next step is used, except there.
                after = torch.where(expand_as_right(ended, value), after, value.roll(-1, self._time_dim))
            if after.shape == value.shape:
                # the state after termination has no effect, but it may be NaN, which distributions reject
                after = torch.where(expand_as_right(self.terminated.squeeze(-1), value), value, after)
            state.set(key, value)
            following.set(key, after)
        separate_episodes(state, following, networks)
        if existing is not None:
            for part, source in ((state, self._data), (following, self._data.get("next"))):
                if source.get(existing, None) is not None:
                    part.set(existing, source.get(existing))
        return state, following

    def shift(
        self, state: TensorDictBase, following: TensorDictBase, observed: list[NestedKey], networks: list[Any]
    ) -> ShiftedStates:
        """Find the next states that are not states of the batch.

        Args:
            state: the inputs of the networks for x_t, [*B, T].
            following: their inputs for x_{t+1}, [*B, T].
            observed: the entries that the networks read.
            networks: the networks.
        """
        require_shiftable(_OWNER, networks, observed)
        ends = self.done, self.terminated
        return ShiftedStates(_OWNER, ends, self.valid, state, following, observed, time_dim=self._time_dim)

    def action_taken(self, num_actions: int) -> Tensor:
        """The indices of the actions taken, int64 [*B, T, 1]."""
        key = self._keys.action
        action = require_entry(self._data, key, "the policy writes it, and the collector stores it")
        return action_index(action, self._data.batch_size, num_actions, name=_OWNER, key=key, valid=self.valid)

    def log_mu(self, taken: Tensor, num_actions: int) -> Tensor:
        """Log-probabilities of the actions taken under the behaviour policy, [*B, T, 1]."""
        shape = self._data.batch_size
        log_prob, behaviour = self._keys.sample_log_prob, self._keys.behaviour
        for key, expected in ((log_prob, (shape, taken.shape)), (behaviour, ((*shape, num_actions),))):
            value = self._data.get(key, None)
            if value is None:
                continue
            if value.shape not in expected:
                raise ValueError(
                    f"{_OWNER}: {key!r} has shape {tuple(value.shape)}, expected {tuple(expected[0])}; the policy that "
                    "acted writes it."
                )
            if key == log_prob:
                return value.reshape(taken.shape)
            return log_probabilities(value, key).gather(-1, taken)
        raise KeyError(
            f"{_OWNER}: the batch has neither {log_prob!r}, the log-probability of the action, nor {behaviour!r}, the "
            "logits of the policy that took it. A ProbabilisticActor(return_log_prob=True) writes both, and the "
            "collector stores them."
        )
