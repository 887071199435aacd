"""Functions of JAX are compiled in a hurry: these tests run each of them once or twice."""

import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quickly_compiled() -> Iterator[None]:
    if importlib.util.find_spec("jax") is None:
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
