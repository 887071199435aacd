"""The kernels' tests run interpreted on a CPU, and compiled where there is a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.attention import latent
from kvern.kernels import delta_net, filters, rotary
from kvern.kernels.attention_latent import latent_shape
from kvern.layers import tuned_linear
from kvern.layers.tuned_linear import matvec_shape
from tests.kernels.quick_interpreter import be_quick

if not torch.cuda.is_available():
    be_quick()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, device: torch.device, few_products: None) -> Callable[..., Any]:
    """Makes engines, `LLM`, whose batch lives on the device, through kernels that all work."""
    import kvern.runner.worker
    from kvern import LLM
    from tests.support.kernel_list import KERNELS

    groups = {kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper")}

    def make(folder: Path, **options: Any) -> LLM:
        with monkeypatch.context() as patched:
            patched.setattr(kvern.runner.worker, "usable_kernels", lambda *_: (frozenset(groups),) * 2)
            if device.type == "cpu":  # a short run takes as long as a chunk
                monkeypatch.setattr(delta_net, "CHUNK", 16)
            return LLM(str(folder), device=device.type, **options)

    return make


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run: a GPU, or Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Interpreted programs take milliseconds each, also those that find nothing to do.

    Two share a row of the filters, not 16, and a request's latents.
    """
    if device.type == "cpu":
        monkeypatch.setattr(filters, "SHARES", 2)
        monkeypatch.setattr(filters, "WEIGHED", 2048)
        monkeypatch.setattr(latent, "latent_shape", lambda *sizes: latent_shape(*sizes)._replace(splits=2))


@pytest.fixture
def few_products(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """One program has 64 outputs of a single row's product, and eight heads to rotate, not a few and one.

    No list of launches knows such programs.
    """
    if device.type == "cpu":
        monkeypatch.setattr(rotary, "FEW_TOKENS", 0)
        monkeypatch.setattr(tuned_linear, "matvec_shape", lambda *sizes: matvec_shape(*sizes)._replace(outputs=64))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Infinity is a value for a kernel; for numpy, which interprets it, it is worth a warning."""
    for item in items:
        if "kernels" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))
