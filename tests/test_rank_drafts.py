"""Draft heads that several ranks share guess what those of one process do: whole engines in `test_rank_engines.py`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.device.ranks import Ranks
from kvern.errors import ConfigError
from kvern.models.decoder import Decoder
from kvern.models.draft_formats import load_draft_head
from kvern.models.loader import load_model
from kvern.models.medusa_formats import load_medusa
from kvern.step import SchedulerOutput
from kvern.worker.drafter import ComputedStep, GuardedDrafter
from tests.draft_heads import write_eagle, write_medusa
from tests.families import make_checkpoint
from tests.test_draft_heads import drafted, states_of
from tests.test_head_drafting import OPTIONS, PROMPTS, drafting
from tests.test_speculation import answers
from tests.test_tensor_parallel import of_ranks
from tests.tiny_model import make_tiny_model


def of_eagle(folder: Path, decoder: Decoder) -> torch.Tensor:
    head = load_draft_head(folder, decoder)
    inputs = head.layer_inputs()
    return drafted(head, states_of(decoder, () if inputs is None else tuple(inputs.entries)))[1]


def of_medusa(folder: Path, decoder: Decoder) -> torch.Tensor:
    heads, states = load_medusa(folder, decoder), states_of(decoder)
    return torch.stack([heads.logits(states, head) for head in range(heads.count)])


class Failing:
    reads_hidden, inputs, graphs = False, None, None

    def prepare(self, output: SchedulerOutput) -> None:
        raise ValueError("it fails")

    def draft(self, step: ComputedStep) -> None:
        raise ValueError("it fails")


def test_a_drafter_that_fails_on_a_rank_costs_the_step() -> None:
    """Another one's drafts would be verified there."""
    GuardedDrafter(Failing()).prepare(SchedulerOutput(1))
    with pytest.raises(ValueError, match="it fails"):
        GuardedDrafter(Failing(), ranks=Ranks(1, 2)).prepare(SchedulerOutput(1))


KINDS = ["eagle", "eagle3", "medusa"]


def write(kind: str, folder: Path, target: Path) -> None:
    if kind == "medusa":
        write_medusa(folder, target, drafted=41)
    else:
        write_eagle(folder, target, drafted=41 if kind == "eagle3" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_ranks_guess_as_those_of_one_process(kind: str, tmp_path: Path) -> None:
    target, folder = make_checkpoint("llama", tmp_path / "target"), tmp_path / "head"
    compute: Callable[[Path, Decoder], torch.Tensor] = of_medusa if kind == "medusa" else of_eagle
    write(kind, folder, target)

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


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_of_ranks_draft_as_one_process_does(kind: str, compiled: bool, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    write(kind, tmp_path / "head", target)
    params = [SamplingParams(temperature=value, seed=3, max_tokens=24, ignore_eos=True) for value in (0, 0.8, 1.2)]
    options = OPTIONS | {"cpu_kernels": compiled, "draft_model": str(tmp_path / "head"), "device": "cpu"}
    found = []
    for size in (1, 2):
        with LLM(str(target), tensor_parallel_size=size, **options) as llm, drafting(llm, 3) as drafts:
            found.append((answers(llm.generate(PROMPTS, params)), drafts))
    assert found[0] == found[1]
    assert len(found[0][1]) > 20
