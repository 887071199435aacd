"""Features of a request and of the engine, two and two and all together, in real requests: each keeps its promise.

Whatever a request asks for beside, its answers are those that it gets alone, at once, from an engine with room and
without a prefix cache; on top of that every feature is checked by what it alone promises. `docs/features.md` is made
from the tests here and elsewhere that are marked with the features that they combine.
"""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvern import LLM
from kvern.errors import ConfigError
from kvern.request.sampling_params import StructuredOutput
from tests.support.combined_answers import pieces
from tests.support.combined_batches import EVERYWHERE, check_combinations
from tests.support.combined_features import ADAPTERS, OF_TEXT, PROMISED, Alone, Ask
from tests.support.combined_questions import RECORD
from tests.support.combined_requests import TOGETHER, asks_with, plain_asks, random_model, too_little_room
from tests.support.feature_matrix import ROOT, page, several_ranks
from tests.support.served import serving
from tests.support.tool_questions import gathered

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    """Of the embedded model where a test names no family, else of a random one with its tokenizer and template."""
    family = getattr(request, "param", None)
    made = Alone(**({} if family is None else random_model(family, tmp_path_factory.mktemp(family))))
    yield made
    made.check()


def marks_of(pair: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """By day, those of a request meet others only in what is tried together; each is tried alone, too."""
    at_night = len({*pair}) == 2 and not {*pair} <= EVERYWHERE
    return [pytest.mark.features(*pair), *([pytest.mark.nightly] if at_night else [])]


PAIRS = [
    pytest.param(frozenset(pair), id="+".join(sorted(set(pair), key=OF_TEXT.index)), marks=marks_of(pair))
    for pair in itertools.combinations_with_replacement(OF_TEXT, 2)
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("features", PAIRS)
def test_two_features(features: frozenset[str], alone: Alone) -> None:
    check_combinations([features], alone)


OTHERS = ("qwen3_5", "gpt_oss", "deepseek_v3")
"""Families with states, with sinks and windows, and with latents."""
KIN = ("nemotron_h", "granitemoehybrid", "falcon_h1")
"""Those that keep other states: all features in one batch, at night."""
OTHER_PAIRS = [pytest.param(family, param.values[0], id=f"{family}-{param.id}") for family in OTHERS for param in PAIRS]


@pytest.mark.nightly
@pytest.mark.parametrize(("alone", "features"), OTHER_PAIRS, indirect=["alone"])
def test_two_features_of_other_models(features: frozenset[str], alone: Alone) -> None:
    check_combinations([features], alone, times=1)


REFUSED: dict[str, set[str]] = {
    "qwen3_5": {"deterministic"},
    "gpt_oss": set(),
    "deepseek_v3": {"kv_cache_dtype"},
}
"""What an engine of a family does not take; all features above it does."""
ENGINE_OPTIONS: dict[str, object] = {
    "deterministic": True,
    "kv_tier": ("host:32MB",),
    "kv_cache_dtype": "int8",
    "quantization": "int8",
    "proposer": "ngram",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("alone", "refused"), REFUSED.items(), indirect=["alone"], ids=REFUSED)
def test_options_of_engines_are_taken_or_refused_by_name(alone: Alone, refused: set[str]) -> None:
    found = set()
    for name, value in ENGINE_OPTIONS.items():
        try:
            LLM(**alone.options | {"prefix_cache": True, "adapters": {}, name: value}).close()
        except ConfigError as error:
            if name not in str(error):
                raise
            found.add(name)
    assert found == refused


RARE = ("top_n_sigma", "xtc_probability", "dynatemp_range")


@pytest.mark.features(*OF_TEXT)
def test_everything_at_once(alone: Alone) -> None:
    """Requests of several features each, all in one batch that is streamed, preempted and taken from the cache."""
    pairs = itertools.combinations(OF_TEXT, 2)
    assert all(any({*pair} <= features | EVERYWHERE for features in TOGETHER) for pair in pairs), "in one request each"
    check_combinations([features | EVERYWHERE for features in TOGETHER], alone, times=1)


@pytest.mark.nightly
@pytest.mark.parametrize("alone", [*OTHERS, *KIN], indirect=True)
def test_everything_at_once_of_other_models(alone: Alone) -> None:
    check_combinations([features | EVERYWHERE for features in TOGETHER], alone, times=1)


def body_of(ask: Ask) -> dict[str, Any]:
    """The request for `/v1/chat/completions`."""
    params = ask.params
    body: dict[str, Any] = {"model": ask.adapter or "kvern-1m", "messages": ask.messages, "stream": True, **ask.tools}
    body["stream_options"] = {"include_usage": True}
    body |= {"max_tokens": params.max_tokens, "temperature": params.temperature, "n": params.n, "seed": params.seed}
    body["logit_bias"] = params.logit_bias
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    if params.structured is not None:
        form = {"name": "record", "schema": params.structured.json, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    own = ("dry_multiplier", "dry_allowed_length", "dry_sequence_breakers", *RARE)
    body["extra_body"] = {name: getattr(params, name) for name in own}
    if params.beam_width is not None:
        body["extra_body"] |= {"use_beam_search": True, "best_of": params.beam_width}
    return {name: value for name, value in body.items() if value is not None}


@pytest.mark.nightly
@pytest.mark.features(*OF_TEXT)
def test_everything_at_once_over_http(alone: Alone) -> None:
    """The same batch as streams of a server without room."""
    asks = [ask for features in TOGETHER for ask in asks_with(features, 1)] + plain_asks()
    size = str(too_little_room(asks, alone))
    adapters = [argument for name, folder in ADAPTERS.items() for argument in ("--adapter", f"{name}={folder}")]
    sizes = ["--kv-cache-tokens", size, "--max-model-len", size, "--block-size", "4", "--threads", "1"]
    options = ["--dtype", "float32", "--proposer", "ngram", *adapters, *sizes]
    with serving("--model", "kvern-1m", *options) as served:
        client = served.client()

        def answered(ask: Ask) -> tuple[list[dict[str, Any]], int]:
            chunks = list(client.chat.completions.create(**body_of(ask)))
            return gathered(chunks, ask.params.n), chunks[-1].usage.prompt_tokens_details.cached_tokens

        with ThreadPoolExecutor(len(asks)) as pool:
            found = [list(pool.map(answered, asks)) for _ in range(2)][1]
        assert served.figure("num_preemptions_total") > 0
        assert served.figure("spec_decode_num_draft_tokens_total") > 0
    assert any(cached for ask, (_, cached) in zip(asks, found, strict=True) if ask.params.sequences == 1)
    for ask, (choices, _) in zip(asks, found, strict=True):
        for choice, answer in zip(choices, alone(ask).answers, strict=True):
            content, calls = pieces(answer)
            assert (choice["content"], [tuple(call) for call in choice["calls"]]) == (content, calls)
            assert choice["tokens"] == len(answer.logprobs or ())


def test_a_demanded_call_goes_before_a_record(alone: Alone) -> None:
    asked = replace(asks_with(frozenset(["tools"]), 1)[0], features=frozenset())
    plain = [pieces(answer) for answer in alone(asked).answers]
    assert all(calls for _, calls in plain)
    with_form = alone(asked.sampling(structured=StructuredOutput(json=RECORD)))
    assert [pieces(answer) for answer in with_form.answers] == plain


def test_the_page_is_current_and_no_cell_is_empty() -> None:
    command = [sys.executable, "-m", "tests.support.feature_matrix"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == (ROOT / "docs/features.md").read_text(), "python -m tests.support.feature_matrix > docs/features.md"
    tests = {param.id: param.values[0] for param in PAIRS if param.id != "tools+n"}
    with pytest.raises(SystemExit, match="no test combines tools and n"):
        page(tests, dict.fromkeys(OF_TEXT, ""))
    with pytest.raises(SystemExit, match="no test combines structured and images"):
        page(tests, PROMISED)
    tried = {"1": frozenset(["n", "tp"])}
    assert "| n | promised |" in several_ranks(tried, {"n": "promised"}, ["tp"])
    with pytest.raises(SystemExit, match="no test combines n and dp"):
        several_ranks(tried, {"n": ""}, ["tp", "dp"])
