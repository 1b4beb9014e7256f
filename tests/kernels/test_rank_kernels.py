"""Kernels of ranks."""

import numpy as np
import torch

from tests.kernels.implementations import INTERPRETED, plainly
from torchrl_replay_ext.kernels import ops
from torchrl_replay_ext.samplers.rank import RankBuckets


def some_ranks(size):
    return RankBuckets(size, torch.device("cpu"))


def arrays(ranks):
    constant = "_new", "_removed"
    return {key: each for key, each in vars(ranks).items() if isinstance(each, torch.Tensor) and key not in constant}


def test_all_implementations_have_the_same_ranks(run):
    size, generator = 40, np.random.default_rng(0)
    ranks, other = some_ranks(size), some_ranks(size)
    # the naive model: the slots of each bucket; the first bucket is in reverse
    buckets, newest = {}, 0
    for _ in range(40 if INTERPRETED else 150):
        count = int(generator.integers(0, 12))
        # with duplicates, except on CUDA, and slots out of range
        some = generator.permutation(size + 2)[:count] - 1 if run.is_cuda else generator.integers(-1, size + 1, count)
        slots = torch.from_numpy(some)
        d = torch.from_numpy(generator.choice([0.0, 1e-40, 0.5, 1.0, 1.001, 2.0, 3e38], count)).float()
        change = int(generator.integers(3))
        for each, call in ((ranks, plainly), (other, run)):
            call(*[(each.insert, slots), (each.remove, slots), (each.update, slots, d)][change])
        if run.is_cuda:
            run(ops.rank_rebuild, *other._views())
            newest = int(slots[-1]) if count and change == 0 else newest
        # the last of duplicates counts
        last = {}
        for slot, number in [*zip(slots.tolist(), d.view(torch.int32).tolist(), strict=True)][::-1]:
            last.setdefault(slot, number)
        for slot in last:
            for members in buckets.values():
                if slot in members:
                    members[members.index(slot)] = members[-1]
                    members.pop()
        for slot, number in [*last.items()][::-1]:
            if 0 <= slot < size and change != 1:
                buckets.setdefault(2**31 if change == 0 else number >> 16, []).append(slot)
        order = [s for key in sorted(buckets)[::-1] for s in buckets[key][:: -1 if key == 2**31 else 1]]
        if run.is_cuda:
            # sorted, the newest slots of a bucket first
            ring = {slot: (newest - slot) % size for slot in range(size)}
            order = [slot for key in sorted(buckets)[::-1] for slot in sorted(buckets[key], key=ring.__getitem__)]
        for name, array in arrays(ranks).items():
            assert run.is_cuda or torch.equal(array, arrays(other)[name]), name
        assert int(run(other.total)) == len(order)
        assert run(other.find, torch.arange(-1, len(order) + 1)).tolist() == [0, *order, 0]
        where = {slot: rank for rank, slot in enumerate(order)}
        assert run(other.rank_of, torch.arange(-1, size + 1)).tolist() == [
            where.get(s, -1) for s in range(-1, size + 1)
        ]
        u, alpha = torch.rand(20, dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
        weights = torch.arange(1.0, size + 1, dtype=torch.float64) ** -alpha
        found, density, smallest = map(ops.as_tensor, run(other.draw, u, weights.cumsum(0), alpha))
        if not order:
            assert not found.any() and not density.any()
            continue
        sums = np.cumsum(weights[: len(order)].numpy())
        rank = np.searchsorted(sums, u.numpy() * sums[-1], side="right").clip(0, len(order) - 1)
        assert found.tolist() == [order[r] for r in rank]
        torch.testing.assert_close(density, weights[rank])
        torch.testing.assert_close(smallest, weights[len(order) - 1 : len(order)])


def test_ranks_stay_in_range_whatever_the_state_holds(run):
    ranks = some_ranks(50)
    ranks.insert(torch.arange(50))
    for seed in range(20):
        torch.manual_seed(seed)
        for array in arrays(ranks).values():
            limit = 2 ** int(torch.randint(1, 29, ()))
            array.copy_(torch.randint(-limit, limit, array.shape))
        ranks._counts[0] = 10**6
        found = run(ranks.find, torch.randint(-5, 10**6, (100,)))
        assert int(found.min()) >= 0 and int(found.max()) < 50
        run(ranks.rank_of, torch.randint(-5, 60, (100,)))
        u = torch.rand(20, dtype=torch.float64)
        found, *_ = run(ranks.draw, u, u.cumsum(0), u)
        assert int(found.min()) >= 0 and int(found.max()) < 50
        run(ranks.update, torch.randint(-5, 60, (100,)), torch.rand(100))
    ranks._offset.random_()
    run(ranks.rebuild, torch.rand(50), torch.rand(50) < 0.5)
    run(ranks.clear)
    assert int(ranks.total()) == 0 and run(ranks.find, torch.tensor([-1, 0])).tolist() == [0, 0]


def test_the_table_of_ranks_is_filled_when_alpha_has_changed_enough(run):
    table, exponent = torch.zeros(20, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for alpha, step, applied in ((0.0, 0.01, False), (0.7, 0.01, True), (0.705, 0.01, False), (0.705, 0.0, True)):
        before = table.clone()
        run(ops.rank_tabulate, table, exponent, torch.tensor([alpha], dtype=torch.float64), step)
        expected = torch.arange(1.0, 21.0, dtype=torch.float64).pow(-alpha).cumsum(0)
        torch.testing.assert_close(table, expected if applied else before, rtol=1e-12, atol=0)
