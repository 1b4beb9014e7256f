import os
import tempfile
import time

import pytest

BEGIN = time.monotonic()
# torch sets it when it is imported
CACHE = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

import torch  # noqa: E402
import torch._inductor.config  # noqa: E402

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--simdlen",
        type=int,
        help="bits of the vectors in code that torch.compile generates for the CPU: 512, 256, or 1 for none",
    )
    parser.addoption("--max-seconds", type=float, help="skip the tests that have not begun after so many seconds")


def pytest_configure(config):
    simdlen, capability = config.getoption("--simdlen"), os.environ.get("ATEN_CPU_CAPABILITY")
    if CACHE is None and (simdlen is not None or capability is not None):
        # the compile cache ignores the vector width, and code compiled for another width can crash
        cache = f"torchinductor_{os.getuid()}_{capability}_{simdlen}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), cache)
    if simdlen is not None:
        torch._inductor.config.cpp.simdlen = simdlen


def pytest_runtest_setup(item):
    limit = item.config.getoption("--max-seconds")
    if limit is not None and time.monotonic() - BEGIN > limit:
        pytest.skip("--max-seconds have passed")


@pytest.fixture
def from_scratch():
    """Nothing compiled is left from another test, nor for the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
