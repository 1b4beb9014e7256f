"""Importing the package again; Numba's cache of kernels if its files are damaged or cannot be written."""

import errno
import importlib
import sys
import warnings

import numba
import numpy as np
import pytest
import torch
from numba.core import caching
from torchrl.objectives import utils

from torchrl_replay_ext.kernels import loop as loops


def double(array):
    for i in range(len(array)):
        array[i] *= 2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loops._TolerantCache, "has_warned", False)
    return tmp_path


def use():
    """Compile ``double`` as a new process does, and call it for two dtypes; returns how often the cache was of use."""
    compiled = loops.loop(double)
    for dtype in (np.int64, np.float32):
        array = np.ones(3, dtype)
        compiled(array)
        assert array.tolist() == [2, 2, 2]
    return sum(compiled.stats.cache_hits.values())


def warnings_of_use():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert use() == 0
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_cache_is_reported_once_and_written_again(cache, ending, left):
    assert [use(), use()] == [0, 2]
    for file in cache.rglob(f"*.{ending}"):
        file.write_bytes(file.read_bytes()[:left])
    (message,) = warnings_of_use()
    assert message.startswith(f"torchrl_replay_ext: the cache of compiled kernels in {cache}")
    assert "NUMBA_CACHE_DIR" in message
    assert use() == 2


def test_a_full_disk_is_reported_once(cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", full)
    (message,) = warnings_of_use()
    assert "No space left on device" in message and str(cache) in message


def test_code_for_other_arguments_is_not_used(cache):
    """Two processes that write at the same time can exchange the files of two signatures."""
    use()
    first, second = sorted(cache.rglob("*.nbc"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    (message,) = warnings_of_use()
    assert "found code for" in message
    assert use() == 2


def test_the_package_can_be_imported_again(monkeypatch):
    # TorchRL would know the RetraceEstimator of the second import
    monkeypatch.setattr(utils, "_VALUE_ESTIMATOR_REGISTRY", dict(utils._VALUE_ESTIMATOR_REGISTRY))
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchrl_replay_ext"}
    try:
        for name in modules:
            del sys.modules[name]
        ops = importlib.import_module("torchrl_replay_ext.kernels.ops")
        assert ops is not modules["torchrl_replay_ext.kernels.ops"]
        for kernel in (ops.tree_root, modules["torchrl_replay_ext.kernels.ops"].tree_root):
            root = torch.zeros(1, dtype=torch.int64)
            kernel._operation(torch.tensor([7, 3]), root)
            assert root.item() == 7
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchrl_replay_ext"]:
            del sys.modules[name]
        sys.modules.update(modules)
