"""What all tests share: a deterministic hypothesis, an engine with `tests.support.tiny_model`, and a server."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, by whichever test imports it first

from kvern import LLM, EngineConfig
from kvern.cpu.build import build
from kvern.cpu.kernel_library import BuildError
from kvern.device.measurements import keep_builds
from tests.support.sampling import leave_to_the_night
from tests.support.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from tests.support.served import Served

settings.register_profile(
    "kvern",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile("night", settings.get_profile("kvern"))
"""Of `make test-all`: more examples (tests/support/sampling.py)."""
settings.load_profile("kvern")

with contextlib.suppress(BuildError):  # without a compiler tests run through PyTorch
    build(EngineConfig().cache_folder)

if torch.cuda.is_available():  # all tests share what one has compiled, also those with a cache folder of their own
    keep_builds(EngineConfig().cache_folder)


def pytest_sessionstart() -> None:
    """Nothing that is imported is garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a CPU, cases that no sample has are `nightly`, before `-m` looks at marks."""
    if not torch.cuda.is_available():
        leave_to_the_night(items)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a million objects that collections of garbage need not look at each time."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test, with the fixtures made for it, draws the same numbers each time."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with a tokenizer and a chat template; not to be changed."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_llm(tiny_model: Path) -> Iterator[LLM]:
    """An engine of the tiny model that tests share: leave nothing running behind."""
    with LLM(str(tiny_model), max_model_len=256, max_batch_requests=16, kv_cache_tokens=4096, threads=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Served]":
    """A server of the smallest model without keys, with a data folder, that tests share: leave nothing running behind.

    A module whose server has other options has a fixture of this name itself.
    """
    from tests.support.served import SMALL, serving  # tests of kernels need no clients

    with serving(*SMALL, "--data-dir", str(tmp_path_factory.mktemp("data"))) as served:
        yield served


@pytest.fixture(scope="session")
def talking_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Served]":
    """A server of the model that answers and calls tools, without keys, with a data folder, that tests share."""
    from tests.support.served import serving

    options = "--threads", "1", "--max-model-len", "1024", "--dtype", "float32"
    with serving("kvern-12m", *options, "--data-dir", str(tmp_path_factory.mktemp("data"))) as served:
        yield served


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logits processors and a cache tier of an installed package, for this process and all that it starts."""
    from tests.support.processors import installed_package

    with installed_package(tmp_path_factory.mktemp("packages")):
        yield
