import os
import tempfile

import pytest
import torch
import torch._inductor.config

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--simdlen",
        type=int,
        help="bits of the vectors in code that torch.compile generates for the CPU: 512, 256, or 1 for none",
    )


def pytest_configure(config):
    simdlen, capability = config.getoption("--simdlen"), os.environ.get("ATEN_CPU_CAPABILITY")
    if simdlen is not None or capability is not None:
        # what was compiled for other vectors can crash here: the cache does not tell them apart
        cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{capability}_{simdlen}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    if simdlen is not None:
        torch._inductor.config.cpp.simdlen = simdlen


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
