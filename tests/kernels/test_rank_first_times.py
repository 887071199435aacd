"""What layers of one of several ranks launch is on the list of a start's kernels, in the same specialisation.

No kernel is run, nor does another rank answer: which kernels are launched, and on what, does not depend on either.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import kvern.runner.worker
from kvern.config import EngineConfig
from kvern.kernels.peer_words import row_words_of
from kvern.layers.tuned_linear import TunedLinear
from kvern.models.checkpoint import read_headers
from kvern.models.loader import read_config, stored_methods
from kvern.ranks import peer_sums
from kvern.ranks.peer_sums import TIMED_ROWS, PeerSums
from kvern.ranks.ranks import Ranks
from kvern.runner.loaded_model import Stored
from tests.kernels.recorded import recorded, recorded_at_start, zeroed
from tests.support.families import make_checkpoint
from tests.support.kernel_list import KERNELS
from tests.support.kernels.rank_turns import sampled

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded by Triton's interpreter")


class SecondOfTwo(Ranks):
    """A rank that hears of no other."""

    def __init__(self) -> None:
        super().__init__(1, 2)

    def group_sum(self, x: Tensor) -> Tensor:
        return x

    def sum(self, x: Tensor) -> Tensor:
        return x

    def beside(self, x: Tensor, width: int | None = None) -> Tensor:
        return torch.cat([x] * self.size, -1)[:, :width]

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_layers_of_a_rank_launch_was_launched_at_start(
    quantization: Literal["int8"] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint("llama_bias", tmp_path, vocab_size=200)  # of which 100 are a rank's
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    made: list[tuple[EngineConfig, torch.dtype, Stored, bool]] = []

    def usable(config: Any, dtype: Any, device: Any, startup: Any, model: Stored, *_: Any) -> Any:
        plain = TunedLinear(torch.device("meta"), "auto")
        methods = stored_methods(read_config(folder), model.spec, read_headers(folder), plain, quantization)
        made.append((config, dtype, model._replace(methods=methods), False))
        return groups, groups

    def mapped(store: Any, what: str, rank: int, size: int, device: torch.device, words: int) -> Any:
        return [torch.zeros(words, dtype=torch.int64)] * size

    monkeypatch.setattr(kvern.runner.worker, "usable_kernels", usable)
    monkeypatch.setattr(peer_sums, "map_words", mapped)
    monkeypatch.setattr(torch, "empty", zeroed(torch.empty))
    monkeypatch.setattr(torch, "empty_like", zeroed(torch.empty_like))
    ranks = SecondOfTwo()
    memory = peer_sums.mapped(None, 1, 2, ranks.lost, row_words_of(48, torch.float32), torch.device("cpu"), programs=1)
    ranks.peers = PeerSums(memory, 48, torch.float32)
    ranks.peers.ways = ["whole"] * len(TIMED_ROWS)
    with recorded(monkeypatch) as launched:
        sampled(folder, ranks, tensor_parallel_size=2, quantization=quantization, head_quantization="none")
    known = recorded_at_start(made, monkeypatch)
    assert {name for name, _ in launched} >= {"_peer_sum_kernel"}
    of_layers = ("_matvec", "_small_matmul", "_packed", "_scale", "_quantize", "_rms_norm", "_coded", "_gated", "_peer")
    missing = [f"{name} {form}" for name, form in launched if name.startswith(of_layers) and (name, form) not in known]
    assert not missing, "\n".join(missing)
