"""States of stages before the last see the drafts that the last has kept; kernels and replays are interpreted here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.worker
from kvern import LLM, SamplingParams
from kvern.cache.messages import StateMessage
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceRows, build_device_batch
from kvern.drafting.drafting import Drafting
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.memory import bytes_noted
from kvern.runner.ranks.rank_limits import rank_of
from kvern.runner.startup import Startup
from kvern.runner.worker import Worker
from tests.support.draft_heads import add_prediction
from tests.support.families import make_checkpoint
from tests.support.head_drafting import Always
from tests.support.idle import is_idle
from tests.support.internals import core_of
from tests.support.kernels.device_engines import NETS, OPTIONS, WITH_STATES
from tests.support.outputs import token_ids
from tests.support.speculation import AnyLength, accepted_of_prediction, speculating
from tests.support.stages_here import capture_here

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="no graphs"),
]
HEAD = list(range(20, 28))
PROMPTS = [[*HEAD, 7, 9], [*HEAD, 41], [5, 9, 17], [*HEAD, 7, 9, 3]]
"""Some begin alike."""
LITTLE_ROOM = OPTIONS | {"kv_cache_tokens": 48, "max_batch_tokens": 12, "max_model_len": 32}
"""Of four requests some have to give way."""
LENGTH: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(temperature=1.0, seed=3, **LENGTH),
    SamplingParams(temperature=1.0, seed=4, presence_penalty=1.0, **LENGTH),
    SamplingParams(temperature=0, **LENGTH),
]


def two_of_each(family: str) -> dict[str, Any]:
    """A layer with states and one with keys and values for each of two stages."""
    sizes = WITH_STATES[family]
    return sizes | {"layer_types": sizes["layer_types"] * 2, "num_hidden_layers": 4}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "guessed_there"),
    [
        ("qwen3_next", False),
        *(
            pytest.param(family, there, marks=pytest.mark.nightly)
            for family in WITH_STATES
            for there in (False, True)
            if (family, there) != ("qwen3_next", False)
        ),
    ],
)
def test_drafts_leave_the_answers(
    family: str, guessed_there: bool, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a proposer, or of what guesses behind the last stage; later ones go on with states that were kept."""
    make_checkpoint(family, tmp_path, **two_of_each(family))
    expected = LLM(str(tmp_path), device="cpu", **OPTIONS).generate(PROMPTS, PARAMS)
    replayed = capture_here(monkeypatch, 2)
    llm = on_device(tmp_path, pipeline_parallel_size=2, **LITTLE_ROOM)
    with speculating(llm, expected, 0.6, most=3, on_device=guessed_there):
        assert token_ids(llm.generate(PROMPTS, PARAMS)) == token_ids(expected)
        found = llm.statistics()
    assert 0 < found.accepted_tokens < found.draft_tokens
    assert found.preemptions and found.cached_tokens
    assert all(replayed), "steps without drafts are graphs"
    assert is_idle(llm)


@pytest.mark.nightly
def test_an_engine_looks_up_drafts_and_follows_predictions(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafting, "most", AnyLength.most)
    make_checkpoint("granitemoehybrid", tmp_path, **two_of_each("granitemoehybrid"))
    few = [params.replace(allowed_token_ids=[5, 6, 7]) for params in PARAMS]
    plain = LLM(str(tmp_path), device="cpu", **OPTIONS)
    said, told = (
        token_ids(plain.generate(PROMPTS, few)),
        plain.generate([PROMPTS[2]], PARAMS[0])[0].outputs[0].token_ids,
    )
    capture_here(monkeypatch, 2)
    llm = on_device(tmp_path, proposer="ngram", pipeline_parallel_size=2, **OPTIONS)
    assert token_ids(llm.generate(PROMPTS, few)) == said
    assert llm.statistics().accepted_tokens > 0
    assert accepted_of_prediction(llm, PROMPTS[2], PARAMS[0], told, 4) > 1


@pytest.mark.nightly
def test_the_models_own_layer_drafts_behind_the_last_stage(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3_next", tmp_path, vocab_size=12, **two_of_each("qwen3_next"))
    alone = NETS | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    add_prediction(tmp_path, "qwen3_next", "qwen", vocab_size=12, **alone)
    prompts, params = [[5, 9, 7, 3, 2, 8], [3, 1, 4, 1, 5] * 3], [PARAMS[0], PARAMS[1]]
    expected = LLM(str(tmp_path), device="cpu", **OPTIONS).generate(prompts, params)
    capture_here(monkeypatch, 2)
    llm = on_device(tmp_path, draft_model="mtp", pipeline_parallel_size=2, **OPTIONS)
    core: Any = core_of(llm)
    core.drafting = Always(12, 3)
    assert token_ids(llm.generate(prompts, params)) == token_ids(expected)
    assert 0 < llm.statistics().accepted_tokens < llm.statistics().draft_tokens


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_state_sees_drafts_when_it_is_told_if_its_request_still_has_it(
    family: str, tmp_path: Path, device: torch.device
) -> None:
    """Two steps are on their way; state 1 is given to another request before the second is told of, 0 is then kept."""
    make_checkpoint(family, tmp_path, **two_of_each(family))
    spec, rows = spec_from_config(read_config(tmp_path)), DeviceRows(2, 32, 8, device, scratch_block=0)
    told, at_once = (DeviceStateMemory(spec, 3, 3, torch.float32, device) for _ in range(2))
    random, given, kept = torch.Generator().manual_seed(0), StateMessage([], [(0, 0), (1, 1)]), [[2, 1], [3, 3]]
    layers = []
    for memory in (told, at_once):
        memory.prepare(SchedulerOutput(1, extensions=given.by_name()))
    for counts in kept:
        batch = build_device_batch(rows, [ScheduledTokens(slot, 0, 3, 3) for slot in (0, 1)], 4)
        steps = [memory.plan(batch) for memory in (told, at_once)]
        for late, early in zip(*(step.noted for step in steps), strict=True):
            for target, copied in zip(*([item.inputs, *(item.written or ())] for item in (late, early)), strict=True):
                copied.copy_(target.copy_(torch.rand(target.shape, generator=random)))
        layers = [[tensor for layer in step.layers for tensor in layer] for step in steps]
        told.defer()
        at_once.accept(torch.tensor(counts, device=device))
    assert not any(tensor.any() for tensor in layers[0]), "nobody has told them"
    for memory in (told, at_once):  # the second has seen all
        memory.prepare(SchedulerOutput(3, extensions=StateMessage([(-1, 1)], []).by_name(), kept=kept[:1]))
        memory.prepare(SchedulerOutput(4, extensions=StateMessage([(0, 2)], []).by_name(), kept=kept[1:]))
    for late, early in zip(*layers, strict=True):
        assert torch.equal(late, early) and torch.equal(late[2], late[0])
        assert late[0].any() and not late[1].any()


def test_what_drafts_note_is_counted(tmp_path: Path, device: torch.device) -> None:
    """But for what one layer after another reads."""
    make_checkpoint("qwen3_next", tmp_path, **two_of_each("qwen3_next"))
    spec, rows = spec_from_config(read_config(tmp_path)), DeviceRows(2, 32, 8, device, scratch_block=0)
    memory = DeviceStateMemory(spec, 2, 3, torch.bfloat16, device)
    noted = memory.plan(build_device_batch(rows, [ScheduledTokens(0, 0, 3, 3)], 4)).noted
    found = sum(tensor.nbytes for item in noted for tensor in [item.inputs, *(item.written or ())])
    assert found == 3 * bytes_noted(spec, torch.bfloat16)


def test_stages_before_the_last_begin_with_kernels_for_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody guesses behind the last."""
    folder, asked = make_checkpoint("qwen3_next", tmp_path, **two_of_each("qwen3_next")), [True][:0]

    def usable(*given: Any) -> tuple[frozenset[str], frozenset[str]]:
        asked.append(given[-1])
        return frozenset(), frozenset()

    monkeypatch.setattr(kvern.runner.worker, "usable_kernels", usable)
    spec = spec_from_config(read_config(folder))
    given: list[dict[str, Any]] = [{"draft_model": "mtp"}, {"proposer": "ngram"}, {"proposer": "ngram"}, {}]
    for options, speculation in zip(given, ["auto", "auto", "off", "auto"], strict=True):
        config = EngineConfig(str(folder), **options, speculation=speculation, device="cpu", pipeline_parallel_size=2)
        ranks = rank_of(config, 0, [range(2), range(2, 4)], folder)
        Worker(config, folder, spec, torch.device("cpu"), Startup(), folder, ranks).probe()
    assert asked == [True, True, False, False]
