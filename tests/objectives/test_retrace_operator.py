"""Proposition 1 of the ACER paper: the operator B of Eq. 20 is Retrace, and contracts towards Q^π.

A random world with T steps per episode, of which all trajectories are enumerated, so expectations are exact.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from torchrl_replay_ext.functional import retrace

STATES, ACTIONS, T, GAMMA = 3, 2, 3, 0.9


class World:
    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.reward, self.q = rng.normal(size=(2, T, STATES, ACTIONS))
        self.pi, self.mu = rng.dirichlet(np.full(ACTIONS, 0.7), size=(2, T, STATES))
        self.next = rng.dirichlet(np.ones(STATES), size=(STATES, ACTIONS))

    def operator(self, q, c):
        """Eq. 20 as a recursion: what truncation cuts off is replaced by Q of the next step."""
        result, behind = np.zeros_like(q), np.zeros(STATES)
        for t in reversed(range(T)):
            result[t] = self.reward[t] + GAMMA * self.next @ behind
            rho = self.pi[t] / self.mu[t]
            corrected = (self.pi[t] * np.maximum(1 - c / rho, 0) * q[t]).sum(-1)
            behind = corrected + (self.mu[t] * np.minimum(c, rho) * result[t]).sum(-1)
        return result

    def expected_retrace(self, q, c, state, action):
        """The mean over all trajectories from a first state and action, weighted by their probability under μ."""
        rows = []
        for states in itertools.product(range(STATES), repeat=T - 1):
            for actions in itertools.product(range(ACTIONS), repeat=T - 1):
                rows.append(list(zip((state, *states), (action, *actions), strict=True)))
        chance = np.ones(len(rows))
        for n, row in enumerate(rows):
            for t in range(1, T):
                chance[n] *= self.next[row[t - 1]][row[t][0]] * self.mu[t][row[t]]
        value = np.append((self.pi * q).sum(-1)[1:], np.zeros((1, STATES)), 0)  # of the states after each step

        def column(of):
            cells = [[[of(t, *row[t], *row[t + 1 : t + 2])] for t in range(T)] for row in rows]
            return torch.tensor(cells, dtype=torch.float64)

        ends = torch.arange(T).eq(T - 1).view(1, T, 1).expand(len(rows), T, 1)
        found = retrace(
            GAMMA,
            1.0,
            column(lambda t, s, a, *_: math.log(self.pi[t, s, a])),
            column(lambda t, s, a, *_: math.log(self.mu[t, s, a])),
            column(lambda t, s, a, *_: q[t, s, a]),
            column(lambda t, s, a, *after: value[t, after[0][0]] if after else 0.0),
            column(lambda t, s, a, *_: self.reward[t, s, a]),
            ends,
            rho_thresh=c,
        )
        return chance @ found[:, 0, 0].numpy()


@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 2.0, math.inf])
def test_the_operator_is_retrace_and_contracts(c):
    for seed in range(3):
        world = World(seed)
        result = world.operator(world.q, c)
        for state, action in np.ndindex(STATES, ACTIONS):
            expected = world.expected_retrace(world.q, c, state, action)
            assert result[0, state, action] == pytest.approx(expected, abs=1e-12)
        truth = world.operator(world.q, math.inf)  # importance sampling: Q has no effect
        np.testing.assert_allclose(world.operator(truth, c), truth)
        assert abs(result - truth).max() <= GAMMA * abs(world.q - truth).max()


def test_without_traces_the_operator_is_bellmans():
    world = World(0)
    value = np.append((world.pi * world.q).sum(-1)[1:], np.zeros((1, STATES)), 0)
    expected = world.reward + GAMMA * np.einsum("sax,tx->tsa", world.next, value)
    np.testing.assert_allclose(world.operator(world.q, 0.0), expected)
