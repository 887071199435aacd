"""Draft heads that several ranks share guess what those of one process do: whole engines in `test_rank_engines.py`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.drafting.device.drafter import ComputedStep, GuardedDrafter
from kvern.drafting.models.formats import load_draft_head
from kvern.drafting.models.medusa_heads import load_medusa
from kvern.errors import ConfigError
from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, load_model
from kvern.ranks.ranks import Ranks, ranks_of
from kvern.ranks.stages import Stage
from kvern.request.step import SchedulerOutput
from tests.support.draft_heads import add_prediction, write_eagle
from tests.support.families import make_checkpoint
from tests.support.head_drafting import HEAD_KINDS, OPTIONS, PROMPTS, drafted, drafting, states_of, write_head
from tests.support.internals import check_integrity, core_of, vocab_size_of
from tests.support.model_outputs import PROMPT
from tests.support.outputs import tokens_and_texts
from tests.support.peft_adapters import make_adapter
from tests.support.rank_threads import SECONDS, of_ranks
from tests.support.speculation import AnyLength
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT


def of_eagle(folder: Path, decoder: Decoder) -> torch.Tensor:
    head = load_draft_head(folder, decoder)
    inputs = head.layer_inputs()
    return drafted(head, states_of(decoder, () if inputs is None else tuple(inputs.entries)))[1]


def of_medusa(folder: Path, decoder: Decoder) -> torch.Tensor:
    heads, states = load_medusa(folder, decoder), states_of(decoder)
    return torch.stack([heads.logits(states, head) for head in range(heads.count)])


class Failing:
    reads_hidden, inputs = False, None
    caches = ()
    graphs = ()

    def prepare(self, output: SchedulerOutput) -> None:
        raise ValueError("it fails")

    def draft(self, step: ComputedStep) -> None:
        raise ValueError("it fails")


def test_a_drafter_that_fails_on_a_rank_costs_the_step() -> None:
    """Another one's drafts would be verified there."""
    GuardedDrafter(Failing()).prepare(SchedulerOutput(1))
    for ranks in (Ranks(1, 2), Ranks(stage=Stage(1, 2))):
        with pytest.raises(ValueError, match="it fails"):
            GuardedDrafter(Failing(), ranks=ranks).prepare(SchedulerOutput(1))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_of_ranks_guess_as_those_of_one_process(kind: str, tmp_path: Path) -> None:
    target, folder = make_checkpoint("llama", tmp_path / "target"), tmp_path / "head"
    compute: Callable[[Path, Decoder], torch.Tensor] = of_medusa if kind == "medusa" else of_eagle
    write_head(kind, folder, target)

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


TWO_STAGES = {"pipeline_parallel_size": 2}
TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("kind", "compiled", "divided"),
    [
        ("eagle", True, TWO_STAGES),
        ("eagle3", True, TWO_STAGES),
        *(
            pytest.param(kind, compiled, divided, marks=pytest.mark.nightly)
            for kind in HEAD_KINDS
            for compiled in (True, False)
            for divided in (TWO_RANKS, TWO_STAGES, TWO_RANKS | TWO_STAGES)
        ),
    ],
)
def test_engines_of_ranks_draft_as_one_process_does(
    kind: str, compiled: bool, divided: dict[str, int], tmp_path: Path
) -> None:
    target = make_tiny_model(tmp_path / "target")
    write_head(kind, tmp_path / "head", target)
    params = [SamplingParams(temperature=value, seed=3, max_tokens=24, ignore_eos=True) for value in (0, 0.8, 1.2)]
    options = OPTIONS | {"cpu_kernels": compiled, "draft_model": str(tmp_path / "head"), "device": "cpu"}
    found = []
    for ranks in ({}, divided):
        with LLM(str(target), **options | ranks) as llm, drafting(llm, 3) as drafts:
            found.append((tokens_and_texts(llm.generate(PROMPTS, params)), sorted(drafts)))
    assert found[0] == found[1]
    assert len(found[0][1]) > 20


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("entries", "layers"),
    [
        ((0, 1, 2, 3), [range(1), range(1, 3)]),
        ((3, 0, 2, 0), [range(1), range(1, 2), range(2, 3)]),
        ((1,), [range(2), range(2, 3)]),
        ((2,), [range(1), range(1, 3)]),
    ],
)
def test_the_last_stage_has_the_inputs_of_layers_of_others(
    entries: tuple[int, ...], layers: list[range], size: int, tmp_path: Path
) -> None:
    """In the order in which the head wants them, whoever has these layers; again, with others, in the next pass."""
    folder = make_checkpoint("llama", tmp_path)
    texts = torch.tensor(PROMPT), torch.tensor(PROMPT[:3])
    members = [ranks_of(number, size, layers, entries=entries) for number in range(len(layers) * size)]

    @torch.inference_mode()
    def compute(ranks: Ranks) -> list[torch.Tensor]:
        ranks.connect(folder / "meeting", torch.device("cpu"), SECONDS)
        decoder = load_model(folder, LoadOptions(ranks=ranks))
        return [states_of(decoder, entries if ranks.stage.is_last else (), text) for text in texts]

    with ThreadPoolExecutor(len(members)) as threads:
        found = list(threads.map(compute, members))[-size:]
    with torch.inference_mode():
        expected = [states_of(load_model(folder), entries, text) for text in texts]
    for last in found:
        torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.nightly
def test_a_head_that_is_asked_late_has_read_prompts_in_parts(tmp_path: Path) -> None:
    """By requests with an adapter and without, of which those with one change what its entries are given."""
    target = make_tiny_model(tmp_path / "target")
    write_head("eagle3", tmp_path / "head", target)
    adapter = make_adapter(target, tmp_path / "adapter", 3)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)
    options = OPTIONS | {"draft_model": str(tmp_path / "head"), "device": "cpu", "adapters": {"one": str(adapter)}}
    found = []
    for divided in ({}, TWO_STAGES):
        with LLM(str(target), **options | divided) as llm, drafting(llm, 3, outputs=1) as drafts:
            outputs = llm.generate(PROMPTS * 2, params, adapter=["one", None] * 3)
            found.append((tokens_and_texts(outputs), sorted(drafts)))
    assert found[0] == found[1]
    assert len(found[0][1]) > 20


@pytest.mark.nightly
@pytest.mark.parametrize(
    "divided", [TWO_STAGES, pytest.param(TWO_STAGES | TWO_RANKS, marks=pytest.mark.nightly)], ids=str
)
def test_a_model_behind_the_last_stage_drafts_from_its_own_keys(divided: dict[str, int], tmp_path: Path) -> None:
    """It guesses for itself: a draft is wrong only if a stage, or the drafter, read other tokens than the others."""
    target = make_tiny_model(tmp_path / "target")
    prompts = [[1, 2, 3, 4, 5, 6, 7, number % 3] * (1 + number % 4) for number in range(8)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    options = OPTIONS | {"device": "cpu", "max_batch_requests": 4, "kv_cache_tokens": 128}
    with LLM(str(target), **options) as alone:
        expected = tokens_and_texts(alone.generate(prompts, params))
    with LLM(str(target), **options | divided | {"draft_model": str(target)}) as llm:
        core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 5)
        assert tokens_and_texts(llm.generate(prompts, params)) == expected
        found = llm.statistics()
        check_integrity(llm)
    assert found.preemptions
    assert found.accepted_tokens == found.draft_tokens > 100


@pytest.mark.nightly
def test_the_models_own_layer_drafts_behind_the_last_stage(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    make_checkpoint("glm4_moe", folder, vocab_size=288)
    add_prediction(folder, "glm4_moe", "deepseek", vocab_size=288, num_hidden_layers=1, first_k_dense_replace=0)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    found = []
    for divided in ({}, TWO_STAGES):
        options = OPTIONS | divided | {"draft_model": "mtp", "device": "cpu"}
        with LLM(str(folder), **options) as llm, drafting(llm, 2) as drafts:
            found.append((tokens_and_texts(llm.generate(PROMPTS, params)), sorted(drafts)))
    assert found[0] == found[1]
    assert len(found[0][1]) > 20
