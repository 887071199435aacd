"""Beam search through the whole engine: beside transformers, in any company, with everything else that may be asked."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, AsyncLLM, RequestOutput, SamplingParams
from kvern.errors import InvalidParameter
from kvern.request.sampling_params import StructuredOutput
from tests.support.families import make_checkpoint
from tests.support.idle import is_idle
from tests.support.internals import core_of, engine_of

PROMPTS = [[5, 9, 17, 33, 2, 81], [5, 9, 17, 33, 2, 80, 40, 41, 42, 43, 44, 45], [100] * 10]
COMPANY = SamplingParams(temperature=1.0, seed=1, max_tokens=9, n=2, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_tokens": 2048,
    "block_size": 4,
    "threads": 1,
}
EMBEDDED = Path(__file__).parents[2] / "src/kvern/embedded/kvern-1m"


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """The shared engine, which every test leaves idle."""
    yield tiny_llm
    assert is_idle(tiny_llm)


def score(answer: Any, params: SamplingParams) -> float:
    return float(answer.cumulative_logprob / len(answer.token_ids) ** params.length_penalty)


def check_against_transformers(
    model: Any, prompt: list[int], output: RequestOutput, params: SamplingParams, tolerance: float
) -> None:
    """The same sequences in the same order, with the same scores."""
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    assert len(output.outputs) == params.n
    for answer, sequence, wanted in zip(output.outputs, expected.sequences, expected.sequences_scores, strict=True):
        assert answer.token_ids == sequence[len(prompt) :][: len(answer.token_ids)].tolist()
        assert score(answer, params) == pytest.approx(float(wanted), abs=tolerance)


SEARCHES = [
    SamplingParams(beam_width=width, n=count, length_penalty=penalty, early_stopping=early, max_tokens=14)
    for (width, count), penalty, early in itertools.product(
        ((2, 1), (4, 4), (7, 3)), (1.0, 0.0, -0.7, 2.0), (False, True, "never")
    )
]


@pytest.mark.parametrize(
    "family",
    [pytest.param("llama", marks=pytest.mark.nightly), "gemma3", pytest.param("qwen3_moe", marks=pytest.mark.nightly)],
)
def test_beams_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of one batch, each with another kind of search, beside requests that sample."""
    from transformers import AutoModelForCausalLM

    make_checkpoint(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    stops = [2, 7, 30, 61, 90]  # random models end their answers too seldom
    model.generation_config.eos_token_id = stops
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(SEARCHES))]
    searches = [params.replace(stop_token_ids=stops) for params in SEARCHES]
    company = [COMPANY] * len(PROMPTS)
    with LLM(str(tmp_path), max_batch_requests=24, **OPTIONS) as llm:
        outputs = llm.generate([*PROMPTS, *prompts], [*company, *searches])
        assert is_idle(llm)
    endings = set()
    for prompt, output, params in zip(prompts, outputs[len(PROMPTS) :], SEARCHES, strict=True):
        check_against_transformers(model, prompt, output, params, 2e-3)
        endings |= {answer.finish_reason for answer in output.outputs}
    assert endings == {"stop", "length"}


def test_the_embedded_model_searches_like_transformers() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with LLM(str(EMBEDDED), dtype="float32", max_model_len=128, threads=1) as llm:
        prompts = [
            llm.tokenizer.encode(text) for text in ("Once upon a time", "Question: what is two plus two? Answer:")
        ]
        searches = [params.replace(max_tokens=20) for params in SEARCHES[4:20:5]]
        for params in searches:
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                check_against_transformers(model, prompt, output, params, 2e-3)
        assert is_idle(llm)


# Whatever the engine does


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


MIXED = [
    SamplingParams(beam_width=4, n=4, max_tokens=20, early_stopping="never", stop_token_ids=[7, 30, 61]),
    SamplingParams(beam_width=3, n=2, max_tokens=17, logprobs=2, prompt_logprobs=1),
    COMPANY.replace(max_tokens=20),
]


@pytest.fixture(scope="module")
def roomy(folder: Path) -> list[RequestOutput]:
    """The answers of an engine with room for everything."""
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, MIXED)
        assert llm.statistics().preemptions == 0
        return outputs


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_tokens": 64},
        {"kv_cache_tokens": 64, "prefix_cache": False},
        {"max_batch_requests": 4, "max_batch_tokens": 5},
        {"kv_cache": "contiguous", "kv_cache_tokens": 64 * 5},
        {"batching": "static", "kv_cache_tokens": 72, "chunked_prefill": False},
    ],
    ids=str,
)
def test_no_room_and_no_switch_changes_an_answer(
    options: dict[str, Any], folder: Path, roomy: list[RequestOutput]
) -> None:
    with LLM(str(folder), **(OPTIONS | options)) as llm:
        outputs = llm.generate(PROMPTS, MIXED)
        assert is_idle(llm)
        if options.get("kv_cache_tokens", 1000) < 100:
            assert llm.statistics().preemptions > 0
    for output, expected in zip(outputs, roomy, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [answer.token_ids for answer in expected.outputs]
        for answer, wanted in zip(output.outputs, expected.outputs, strict=True):
            assert answer.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
            assert len(answer.logprobs or ()) == len(wanted.logprobs or ())
        assert len(output.prompt_logprobs or ()) == len(expected.prompt_logprobs or ())


def test_beams_share_the_blocks_of_their_prompt(llm: LLM) -> None:
    prompt = [7 + index % 200 for index in range(160)]
    cache = core_of(llm).scheduler.cache
    most = 0.0
    stream = llm.stream(prompt, SamplingParams(beam_width=8, max_tokens=12))
    engine = engine_of(llm)
    engine.add("beams", prompt, SamplingParams(beam_width=8, max_tokens=12))
    while engine.has_work:
        engine.step()
        most = max(most, cache.usage * cache.pool.capacity)
    assert 10 + 8 <= most <= 10 + 2 * 8, "ten blocks of the prompt, and one or two for each beam"
    assert len(list(stream)) == 1, "nothing of a search is certain before all of it"
    assert next(iter(llm.stream(prompt, SamplingParams(beam_width=8, max_tokens=12)))).cached_tokens >= 158


def test_one_beam_is_greedy(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=12, logprobs=0))[0].outputs[0]
    beam = llm.generate(PROMPTS[1], SamplingParams(beam_width=1, max_tokens=12, early_stopping=True))[0].outputs[0]
    assert beam.token_ids == greedy.token_ids and beam.finish_reason == greedy.finish_reason
    assert beam.cumulative_logprob == pytest.approx(greedy.cumulative_logprob, abs=1e-4)


def test_leaving_ends_all_beams(llm: LLM) -> None:
    engine = engine_of(llm)
    for steps in (0, 1, 2, 5):
        engine.add("left", PROMPTS[0], SamplingParams(beam_width=5, max_tokens=50, ignore_eos=True))
        for _ in range(steps):
            engine.step()
        engine.abort(["left"])
        assert is_idle(llm)


@pytest.mark.nightly
def test_async_searches(tiny_model: Path) -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny_model), max_model_len=64, threads=1) as llm:
            params = SamplingParams(beam_width=3, n=3, max_tokens=6)
            several = await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS))
            assert all(len(outputs[0].outputs) == 3 for outputs in several)

    asyncio.run(ask())


# With everything else


@pytest.mark.features("beams", "n", "logprobs")
def test_logprobs_of_beams(llm: LLM) -> None:
    params = SamplingParams(beam_width=4, n=4, max_tokens=8, logprobs=3, prompt_logprobs=2)
    output = llm.generate(PROMPTS[1], params)[0]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPTS[1])
    for answer in output.outputs:
        assert answer.logprobs is not None
        chosen = [table[token] for token, table in zip(answer.token_ids, answer.logprobs, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen), abs=1e-3)
        for entry, table in zip(chosen, answer.logprobs, strict=True):
            assert len(table) in (3, 4) and entry.rank == 1 + sum(
                other.logprob > entry.logprob for other in table.values()
            )
            assert entry.token is not None
        alone = llm.generate([*PROMPTS[1], *answer.token_ids[:-1]], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
        scored = [
            next(iter(table.values())).logprob for table in (alone.prompt_logprobs or [])[len(PROMPTS[1]) :] if table
        ]
        assert [entry.logprob for entry in chosen[:-1]] == pytest.approx(scored, abs=1e-3)


def test_bans_and_penalties_change_what_beams_follow(llm: LLM) -> None:
    plain = SamplingParams(beam_width=4, n=4, max_tokens=8)
    free = llm.generate(PROMPTS[0], plain)[0].outputs
    first = free[0].token_ids[0]
    banned = llm.generate(PROMPTS[0], plain.replace(logit_bias={first: -1e9}))[0].outputs
    assert all(first not in answer.token_ids for answer in banned)
    allowed = llm.generate(PROMPTS[0], plain.replace(allowed_token_ids=[40, 41]))[0].outputs
    assert len({tuple(answer.token_ids) for answer in allowed}) == 4
    assert all(set(answer.token_ids) <= {40, 41} for answer in allowed)
    assert all(answer.cumulative_logprob > -8 * 0.7 * 2 for answer in allowed), "of what is allowed, not of everything"
    once = llm.generate(PROMPTS[0], plain.replace(frequency_penalty=2.0, repetition_penalty=100.0))[0].outputs
    assert all(len(set(answer.token_ids)) == 8 for answer in once)


def test_fewer_answers_than_asked_for(llm: LLM) -> None:
    """Two sequences are possible; and none, which is said."""
    params = SamplingParams(beam_width=4, n=4, max_tokens=1, allowed_token_ids=[40, 41])
    output = llm.generate(PROMPTS[0], params)[0]
    assert sorted(answer.token_ids for answer in output.outputs) == [[40], [41]] and output.finished
    words = [llm.tokenizer.decode([first, second]) for first in (40, 41) for second in (40, 41)]
    output = llm.generate(PROMPTS[0], params.replace(max_tokens=8, bad_words=words), on_error="return")[0]
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason, output.finished) == ("", "abort", True)
    assert answer.stop_reason == "no beam can go on: every next token is banned"


@pytest.mark.features("structured", "beams", "n")
def test_structured_beams(llm: LLM) -> None:
    """Every beam follows the grammar from where it stands; the order is that of the model."""
    choice = ["the fox", "the dog", "quick", "lazy fox"]
    params = SamplingParams(beam_width=4, n=4, max_tokens=20, structured=StructuredOutput(choice=choice))
    answers = llm.generate(PROMPTS[0], params)[0].outputs
    assert {answer.text for answer in answers} <= set(choice) and len(
        {str(answer.token_ids) for answer in answers}
    ) == 4
    assert [score(answer, params) for answer in answers] == sorted(
        (score(answer, params) for answer in answers), reverse=True
    )
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22, 333]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    structured = StructuredOutput(json={**schema, "additionalProperties": False})
    outputs = llm.generate([PROMPTS[0], PROMPTS[2]], params.replace(max_tokens=60, structured=structured))
    for answer in itertools.chain(*(output.outputs for output in outputs)):
        assert answer.finish_reason == "stop" and json.loads(answer.text).keys() == {"a", "b"}
    assert len({answer.text for answer in outputs[0].outputs}) == 4


@pytest.mark.features("structured", "beams", "n", "logprobs", "preemption")
def test_structured_beams_without_room(tiny_model: Path) -> None:
    """They lose their blocks and their rows, and their grammars follow them."""
    structured = StructuredOutput(regex=r"(the|quick|fox)( (the|quick|fox)){3,5}")
    params = SamplingParams(beam_width=4, n=4, max_tokens=40, logprobs=1, structured=structured)
    found = []
    for tokens in (4096, 64):
        with LLM(str(tiny_model), max_model_len=64, kv_cache_tokens=tokens, block_size=4, threads=1) as llm:
            found.append(llm.generate([PROMPTS[0], PROMPTS[1]], params))
            assert (llm.statistics().preemptions > 0) == (tokens == 64)
            assert is_idle(llm)
    for roomy, tight in zip(*found, strict=True):
        assert [answer.token_ids for answer in roomy.outputs] == [answer.token_ids for answer in tight.outputs]
        for answer in tight.outputs:
            assert re.fullmatch(structured.regex or "", answer.text)
            assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)


def test_beams_end_at_stop_strings(llm: LLM) -> None:
    (token,) = llm.tokenizer.encode("e")
    (other,) = llm.tokenizer.encode("o")
    params = SamplingParams(beam_width=4, n=4, max_tokens=6, allowed_token_ids=[token, other], stop=["ee", "oo"])
    answers = llm.generate(PROMPTS[0], params.replace(early_stopping="never"))[0].outputs
    assert len(answers) == 4
    for answer in answers:
        text = llm.tokenizer.decode(answer.token_ids)
        if answer.finish_reason == "stop":
            assert text.endswith(str(answer.stop_reason)) and answer.text == text[:-2]
        assert not any(stop in text[:-1] for stop in ("ee", "oo"))
    assert {answer.stop_reason for answer in answers} & {"ee", "oo"}
    late = llm.generate(PROMPTS[0], params.replace(min_tokens=4))[0].outputs
    assert all(len(answer.token_ids) > 4 for answer in late)


def test_beams_end_at_stop_strings_of_several_tokens(llm: LLM) -> None:
    """One that was begun by a beam is completed by those that go on behind it, and a character by its last byte."""
    letters = [llm.tokenizer.encode(letter)[0] for letter in "eo"]
    halves = llm.tokenizer.encode("é")
    assert len(halves) == 2
    params = SamplingParams(beam_width=6, n=6, max_tokens=8, early_stopping="never")
    for allowed, stop in ((letters, ["eoe", "ooe", "eeee"]), ([*letters, *halves], ["eé", "oé", "éé"])):
        answers = llm.generate(PROMPTS[0], params.replace(allowed_token_ids=allowed, stop=stop))[0].outputs
        assert "stop" in {answer.finish_reason for answer in answers}
        for answer in answers:
            text, before = (llm.tokenizer.decode(answer.token_ids[:end]) for end in (None, -1))
            assert (answer.finish_reason == "stop") == any(word in text for word in stop)
            assert not any(word in before for word in stop)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 65}, "beam_width is 65: it must be a finite number at least 1 and at most 64"),
        ({"beam_width": 2.5}, "beam_width is 2.5: it must be a whole number"),
        ({"beam_width": 2, "n": 3}, "n is 3, above beam_width 2"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature is 0.7 with beam_width 2"),
        ({"beam_width": 2, "top_p": 0.7}, "top_p is 0.7 with beam_width 2"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty is 11"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0 without beam_width"),
        ({"early_stopping": True}, "early_stopping is True without beam_width"),
    ],
)
def test_what_cannot_be_searched_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        SamplingParams(**fields)


def test_no_more_beams_than_rows(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="beam_width is 17, and 16 sequences run at the same time at most"):
        llm.generate(PROMPTS[0], SamplingParams(beam_width=17))
