"""Models whose norms add up what ranks compute: two ranks, each a thread, answer as one does alone."""

from pathlib import Path

import pytest
import torch

import kvern.runner.worker
from kvern.ranks.ranks import ALONE
from tests.support.families import make_checkpoint
from tests.support.kernel_list import KERNELS
from tests.support.kernels.rank_turns import sampled, together

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted in turns"),
]


@pytest.fixture(autouse=True)
def all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    monkeypatch.setattr(kvern.runner.worker, "usable_kernels", lambda *_: (groups, groups))


@pytest.mark.parametrize("family", [pytest.param("llama_bias", marks=pytest.mark.nightly), "qwen2_moe"])
def test_norms_add_up_what_ranks_compute(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    expected = sampled(folder, ALONE)
    (first, ranks), (second, other) = together(tmp_path, lambda ranks: sampled(folder, ranks, tensor_parallel_size=2))
    assert first == second == expected
    assert ranks.joined == other.joined and set(ranks.joined) == {1, 2}, "norms of few rows"
    assert not ranks.shown, "no rank has all logits"
