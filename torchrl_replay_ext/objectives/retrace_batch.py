"""Reads the entries that Retrace needs from a batch of trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.utils import expand_as_right
from torch import Tensor

from torchrl_replay_ext.objectives.categorical import action_index, log_probabilities
from torchrl_replay_ext.objectives.trajectory import (
    READ_BY_NETWORKS,
    WRITTEN_BY_POLICY,
    Trajectories,
    blank_invalid,
    read_masks,
    require_entry,
    require_single_steps,
    separate_episodes,
)

_OWNER = "RetraceEstimator"


class TrajectoryBatch:
    r"""A batch of trajectories [\*B, T].

    Args:
        tensordict: the batch.
        keys: the estimator's ``tensor_keys``.
        time_dim: the dimension of time.
        read: the entries that the estimator and its networks read.
    """

    def __init__(self, tensordict: TensorDictBase, keys: Any, time_dim: int, read: Iterable[NestedKey]):
        require_single_steps(_OWNER, tensordict, keys.steps_to_next_obs)
        self._keys = keys
        valid = read_masks(_OWNER, tensordict, [keys.mask])
        self._data = blank_invalid(tensordict, read, valid)
        self.rows = Trajectories.read(_OWNER, self._data, keys, valid, time_dim)

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
        time_dim = self.rows.time_dim
        last = torch.zeros_like(self.rows.done.movedim(time_dim, 0))
        last[-1] = True
        ended = (self.rows.done | last.movedim(0, time_dim)).squeeze(-1)
        shape = self._data.batch_size
        state, following = TensorDict(batch_size=shape), TensorDict(batch_size=shape)
        for key in observed:
            next_key = unravel_key(("next", key))
            value, after = (require_entry(_OWNER, self._data, each, READ_BY_NETWORKS) for each in (key, next_key))
            if after.shape == value.shape and next_key in written:
                # A hidden state. If the loss ran the network over the rows, those under "next" are 0 except where a
                # trajectory ends. So the hidden state stored for the next step is used, except there.
                after = torch.where(expand_as_right(ended, value), after, value.roll(-1, time_dim))
            if after.shape == value.shape:
                # the state after termination has no effect, but it may be NaN, which distributions reject
                after = torch.where(expand_as_right(self.rows.terminated.squeeze(-1), value), value, after)
            state.set(key, value)
            following.set(key, after)
        separate_episodes(state, following, networks)
        if existing is not None:
            for part, source in ((state, self._data), (following, self._data.get("next"))):
                if source.get(existing, None) is not None:
                    part.set(existing, source.get(existing))
        return state, following

    def action_taken(self, num_actions: int) -> Tensor:
        """The indices of the actions taken, int64 [*B, T, 1]."""
        key = self._keys.action
        action = require_entry(_OWNER, self._data, key, WRITTEN_BY_POLICY)
        return action_index(action, self._data.batch_size, num_actions, name=_OWNER, key=key, valid=self.rows.valid)

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
