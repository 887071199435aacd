"""Draft heads that several ranks share guess what those of one process do: whole engines in `test_rank_engines.py`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvern.errors import ConfigError
from kvern.models.decoder import Decoder
from kvern.models.draft_formats import load_draft_head
from kvern.models.loader import load_model
from kvern.models.medusa_formats import load_medusa
from tests.draft_heads import write_eagle, write_medusa
from tests.families import make_checkpoint
from tests.test_draft_heads import drafted, states_of
from tests.test_tensor_parallel import of_ranks


def of_eagle(folder: Path, decoder: Decoder) -> torch.Tensor:
    head = load_draft_head(folder, decoder)
    inputs = head.layer_inputs()
    return drafted(head, states_of(decoder, () if inputs is None else tuple(inputs.entries)))[1]


def of_medusa(folder: Path, decoder: Decoder) -> torch.Tensor:
    heads, states = load_medusa(folder, decoder), states_of(decoder)
    return torch.stack([heads.logits(states, head) for head in range(heads.count)])


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_heads_of_ranks_guess_as_those_of_one_process(kind: str, tmp_path: Path) -> None:
    target, folder = make_checkpoint("llama", tmp_path / "target"), tmp_path / "head"
    compute: Callable[[Path, Decoder], torch.Tensor] = of_eagle
    if kind == "medusa":
        write_medusa(folder, target, drafted=41)
        compute = of_medusa
    else:
        write_eagle(folder, target, drafted=41 if kind == "eagle3" else None)

    @torch.inference_mode()
    def logits(decoder: Decoder) -> torch.Tensor:
        return compute(folder, decoder).clamp(min=-1e9)

    expected = logits(load_model(target))
    one, other = of_ranks(target, 2, logits)
    assert (one - expected).abs().max() < 1e-4
    assert torch.equal(one, other), "each rank draws the same drafts"


def test_a_head_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    write_eagle(tmp_path / "head", target, intermediate_size=81)
    with pytest.raises(ConfigError, match="has 81 entries in an MLP, which so many ranks cannot share evenly"):
        of_ranks(target, 2, lambda decoder: load_draft_head(tmp_path / "head", decoder))
