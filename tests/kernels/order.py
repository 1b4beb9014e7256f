"""A pytest plugin that changes the order in which Triton's interpreter does what a GPU does at once.

``TRITON_INTERPRET=1 ORDER=reversed pytest -p tests.kernels.order tests/kernels``: programs of a launch, and lanes of an
atomic operation or a store, one after the other from the last one on; ``ORDER=shuffled``: in random order. A test whose
result depends on the order shows a race.
"""

import os

import numpy as np
import triton.runtime.interpreter as interpreter

_is_reversed = {"reversed": True, "shuffled": False}[os.environ["ORDER"]]
_numbers, _changed = np.random.default_rng(0), {"programs": 0, "lanes": 0}


def _order(count):
    return np.arange(count)[::-1] if _is_reversed else _numbers.permutation(count)


class _Memory:
    """The interpreter's access to memory, with lanes in another order."""

    def __init__(self, memory):
        self._memory = memory

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def store(self, pointers, values, mask):
        _changed["lanes"] += pointers.size
        return self._memory.store(*_in(_order(pointers.size), pointers.shape, pointers, values, mask))

    def atomic_rmw(self, operation, pointers, values, mask, semantics):
        order, shape = _order(pointers.size), pointers.shape
        found = self._memory.atomic_rmw(operation, *_in(order, shape, pointers, values, mask), semantics)
        result = np.empty_like(found)
        result[order] = found
        _changed["lanes"] += len(order)
        return result.reshape(shape)


def _in(order, shape, *lanes):
    return [np.ascontiguousarray(np.broadcast_to(each, shape).reshape(-1)[order]) for each in lanes]


interpreter._interpreter = _Memory(interpreter._interpreter)
_builder = type(interpreter.interpreter_builder)
_set_grid, _set_program = _builder.set_grid_dim, _builder.set_grid_idx


def _begin_launch(builder, x, y, z):
    _set_grid(builder, x, y, z)
    builder.order = _order(x)
    _changed["programs"] += x


def _begin_program(builder, x, y, z):
    _set_program(builder, int(builder.order[x]), y, z)


_builder.set_grid_dim, _builder.set_grid_idx = _begin_launch, _begin_program


def pytest_sessionfinish(session):
    """The plugin must have changed something: names inside Triton may change."""
    assert not session.testscollected or all(_changed.values()), _changed
