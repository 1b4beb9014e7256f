"""Reliability-adjusted prioritized experience replay."""

from __future__ import annotations

from functools import partial
from typing import get_args

from tensordict import NestedKey
from torchrl.data.replay_buffers import PrioritizedSampler

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_choice, require_integer
from torchrl_replay_ext.distributions.episode_reader import EpisodeReader
from torchrl_replay_ext.distributions.reaper import ReliabilityAdjusted
from torchrl_replay_ext.distributions.reliability import Reliability, Truncated
from torchrl_replay_ext.samplers.adapter import PrioritySampler
from torchrl_replay_ext.samplers.hyperparameters import ALPHA, BETA, exponent, make_exponents


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
        capacity: number of slots, at least that of the storage; None (default): that of the storage.
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

    alpha = exponent("alpha", ALPHA)
    beta = exponent("beta", BETA)
    omega = exponent(
        "omega",
        """Exponent of the reliability.

        A compiled step makes as many proposals per draw as the omega that was set when it was compiled needs (the
        larger end of an :class:`~torchrl_replay_ext.Anneal`). With a larger one its draws stay exact, but take longer.
        """,
    )

    def __init__(
        self,
        capacity: int | None = None,
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
        name = "ReaPERSampler"
        require_integer(name, "num_streams", num_streams)
        require_choice(name, "truncated", truncated, get_args(Truncated))
        require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm))
        hyperparameters = make_exponents(name, alpha=alpha, beta=beta, omega=omega)
        model = partial(
            Reliability,
            omega=hyperparameters["omega"],
            reader=EpisodeReader(done_key=done_key, traj_key=traj_key, init_key=init_key),
            num_streams=num_streams,
            truncated=truncated,
            terminated_key=terminated_key,
        )
        super().__init__(
            capacity,
            partial(
                ReliabilityAdjusted,
                alpha=hyperparameters["alpha"],
                make_reliability=model,
                weight_norm=weight_norm,
                may_be_zero=eps == 0,
            ),
            hyperparameters=hyperparameters,
            eps=eps,
            td_error=td_error,
            max_priority_within_buffer=max_priority_within_buffer,
        )
