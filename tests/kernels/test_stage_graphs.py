"""Stages replay their decodes, and hand rows on between replays; kernels and replays are interpreted here."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.models.loader import LoadOptions, load_model
from kvern.ranks.ranks import Ranks
from kvern.runner.decode_graphs import StageEnds
from tests.support.families import make_checkpoint
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import token_ids
from tests.support.peft_adapters import make_adapter
from tests.support.stages_here import NearStage, capture_here

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="no graphs"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]
PROMPTS = [[5 + number, 9, 17, *range(number)] for number in range(7)]
LENGTHS = [9, 8, 7, 6, 5, 4, 3]
"""Of the answers, so that there are steps of all numbers of requests."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}


def asked(**given: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=length, ignore_eos=True, **given) for length in LENGTHS]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "stages", "changed", "params"),
    [
        ("llama", 2, {}, asked(temperature=0)),
        pytest.param("llama", 3, {}, asked(temperature=1.0, seed=3, top_p=0.9, logprobs=2), marks=pytest.mark.nightly),
        pytest.param("llama", 2, {}, asked(temperature=0, dry_multiplier=0.8), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", 2, {}, asked(temperature=0), marks=pytest.mark.nightly),
        pytest.param("qwen3_5", 2, HYBRID, asked(temperature=0), marks=pytest.mark.nightly),
    ],
    ids=["two", "three, options", "sampled behind", "experts", "states"],
)
def test_stages_that_replay_answer_as_one_process_does(
    family: str,
    stages: int,
    changed: dict[str, Any],
    params: list[SamplingParams],
    tmp_path: Path,
    on_device: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint(family, tmp_path, **{"num_hidden_layers": stages} | changed)
    options, count = OPTIONS | {"max_batch_requests": 8}, 2 * stages + 1
    prompts, params = PROMPTS[-count:], params[-count:]
    expected = token_ids(LLM(str(folder), device="cpu", **options).generate(prompts, params))
    replayed = capture_here(monkeypatch, stages)
    llm = on_device(folder, **options, pipeline_parallel_size=stages)
    assert token_ids(llm.generate(prompts, params)) == expected
    assert replayed == replayed[:1] * stages
    assert set(replayed[0]) == {1, 2, 3}, "of three one pads"


def test_rows_are_handed_on_as_they_were_and_padded_anew(tmp_path: Path) -> None:
    """Whatever a step makes of the memory that it begins or ends with, while a message is on its way."""
    folder, mail = make_checkpoint("llama", tmp_path), [deque[torch.Tensor]()]
    first, last = (
        StageEnds(
            load_model(folder, LoadOptions(ranks=Ranks(stage=NearStage(index, [range(1), range(1, 3)], mail)))), 4
        )
        for index in range(2)
    )
    ids = torch.arange(4)
    for _ in range(2):
        rows = first.entered(ids)
        expected = rows[[0, 1, 2, 0]]
        first.hand_on(rows[:3])
        rows.zero_()
        last.receive(3, 4)
        entered = last.entered(ids)
        assert torch.equal(entered, expected)
        entered += 1000


@pytest.mark.nightly
def test_adapters_and_keys_in_eight_bits(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=2)
    adapters = {name: str(make_adapter(folder, tmp_path / name, seed, r=4)) for seed, name in enumerate(("one", "two"))}
    options = OPTIONS | {"kv_cache_dtype": "fp8", "max_adapters": 1, "max_batch_requests": 8}
    chosen = [None, "one", "two", "one", None, "two", "one"]

    def answers_of(**changed: Any) -> list[list[list[int]]]:
        llm = on_device(folder, adapters=adapters, **options | changed)
        return token_ids(llm.generate(PROMPTS, asked(temperature=0), adapter=chosen))

    expected = answers_of()
    replayed = capture_here(monkeypatch, 2)
    assert answers_of(pipeline_parallel_size=2) == expected
    assert [*map(bool, replayed)] == [False, False, True, True], "scales are measured first"
