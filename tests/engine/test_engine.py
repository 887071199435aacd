"""LLM on a tiny random model: what goes in, what comes out, and what is left behind."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvern import LLM, PromptInput, SamplingParams
from kvern.engine.output import Answer
from kvern.engine.stop_strings import StopSearch, StopStrings
from kvern.errors import InvalidRequest, RequestFailed
from kvern.llm import FailedRequest
from kvern.request.events import TokenEvent
from kvern.request.outputs import RequestOutput
from kvern.request.request import requests_of, sample_seed
from kvern.serving.wire import AddRequest, decode_for_engine, encode
from kvern.text.detokenizer import IncrementalDetokenizer
from kvern.text.tokenizer import Tokenizer
from tests.support.idle import core_here, is_idle
from tests.support.internals import core_of, engine_of
from tests.support.sampling import examples

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=100)
PROMPTS = ["the quick brown fox", "jumps over the lazy dog and over the fox", "a"]
MESSAGES = [{"role": "user", "content": "the fox"}]


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """The shared engine, which every test leaves idle."""
    yield tiny_llm
    assert is_idle(tiny_llm)


# In and out


def test_texts_and_token_ids_are_the_same_prompts(llm: LLM) -> None:
    as_text = llm.generate(PROMPTS, GREEDY)
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    as_ids = llm.generate(ids, GREEDY)
    for prompt, tokens, first, second in zip(PROMPTS, ids, as_text, as_ids, strict=True):
        assert (first.prompt, second.prompt) == (prompt, None)
        assert first.prompt_token_ids == second.prompt_token_ids == tokens
        assert first.outputs == second.outputs and first.finished
        answer = first.outputs[0]
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
        assert len(answer.token_ids) == 12 and answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.logprobs is None and answer.cumulative_logprob is None and first.prompt_logprobs is None


def test_a_prompt_input_is_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    named, plain = llm.generate([PromptInput(ids, block_keys=((1, b"picture"),)), ids], GREEDY)
    assert named.outputs == plain.outputs and named.prompt_token_ids == ids
    assert llm.generate(PromptInput(ids), GREEDY)[0].outputs == plain.outputs


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attachments": (b"picture",)}, "1 attachments"),
        ({"block_keys": ((2, b"a"),)}, "position 2"),
        ({"block_keys": ((-1, b"a"),)}, "position -1"),
        ({"block_keys": ((1, b"a"), (0, b"b"))}, "position 0 after 1"),
        ({"block_keys": ((0, b""),)}, "b''"),
        ({"block_keys": ((True, b"a"),)}, "position True"),
        ({"block_keys": (b"a",)}, "position b'a'"),
        ({"block_keys": ((0, b"a" * 65),)}, "1 to 64 bytes"),
        ({"token_ids": []}, "is empty"),
        ({"token_ids": [5, 10**6]}, "1000000 at position 1"),
        ({"token_ids": [True, 5]}, "True at position 0"),
    ],
)
def test_prompt_inputs_that_are_refused(llm: LLM, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        llm.generate(PromptInput(**{"token_ids": [5, 6]} | fields), GREEDY)


def test_samples_of_neighbouring_seeds_are_independent(llm: LLM) -> None:
    """The first sample of a seed is the one that a request without `n` has; no other is one of another seed's."""
    drawn = GREEDY.replace(temperature=1.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate([[5, 6]] * 3, [drawn.replace(seed=seed, n=3) for seed in (7, 8, -2)])
    answers = [tuple(item.token_ids) for output in outputs for item in output.outputs]
    assert len(set(answers)) == 9
    alone = [llm.generate([5, 6], drawn.replace(seed=seed))[0].outputs[0].token_ids for seed in (7, 8, -2)]
    assert [tuple(one) for one in alone] == answers[::3]
    seeds = {sample_seed(seed, index) for seed in (*range(64), -2, 2**63 - 2, -(2**63)) for index in range(16)}
    assert len(seeds) == 67 * 16 - 2 and min(seeds) >= 0 and max(seeds) < 2**63  # -2 is 2**63 - 2, and -2**63 is 0


def test_a_prompt_crosses_to_the_engine_once(llm: LLM) -> None:
    """However many samples are asked for; there each has its own number and seed."""
    sizes = []
    for count in (1, 16):
        params = GREEDY.replace(n=count, temperature=1, seed=7, prompt_logprobs=0, logit_bias={5: 1.5})
        spec = engine_of(llm).inputs.request("a", [5, 6, 7] * 10, params)
        sizes.append(len(encode(AddRequest(spec))))
        message = decode_for_engine(encode(AddRequest(spec)))
        assert isinstance(message, AddRequest) and message.spec == spec
        requests = requests_of(message.spec, message.progress)
        assert [request.request_id for request in requests] == spec.answer_ids
        assert [request.seed for request in requests] == [sample_seed(7, index) for index in range(count)]
        assert {request.leader for request in requests[1:]} <= {requests[0]}
        assert [request.params.prompt_logprobs for request in requests] == [0] + [None] * (count - 1)
    assert sizes[1] - sizes[0] < 10


def test_requests_made_at_once_draw_different_seeds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stop between counting their requests and using the count, at the worst moment there is."""
    inputs = engine_of(llm).inputs
    both = threading.Barrier(2)

    class Meeting(type(inputs)):  # type: ignore[misc]
        @property
        def _seed(self) -> int:
            both.wait(240)
            return 0

    met = Meeting.__new__(Meeting)
    met.__dict__.update(inputs.__dict__)
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda name: met.request(name, [5, 6]), "ab"))
    assert made[0].seed != made[1].seed


def test_one_prompt_and_one_parameter_for_each(llm: LLM) -> None:
    assert len(llm.generate(PROMPTS[0], GREEDY)) == len(llm.generate([5, 6, 7], GREEDY)) == 1
    params = [GREEDY.replace(max_tokens=count) for count in (3, 1, 7)]
    assert [len(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)] == [3, 1, 7]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (one,) = llm.chat(MESSAGES, GREEDY)
    two = llm.chat([MESSAGES, [{"role": "system", "content": "a"}, *MESSAGES]], GREEDY)
    assert one.prompt_token_ids == llm.chat_prompt(MESSAGES) == llm.tokenizer.encode("<|user|>the fox<|assistant|>")
    assert two[0].outputs == one.outputs and two[1].prompt_token_ids != one.prompt_token_ids
    assert [*llm.stream_chat(MESSAGES, GREEDY)][-1].outputs == one.outputs


def test_stream_grows_token_by_token(llm: LLM) -> None:
    texts, counts = [], []
    for output in llm.stream(PROMPTS[0], GREEDY):
        texts.append(output.outputs[0].text)
        counts.append(len(output.outputs[0].token_ids))
    assert counts == list(range(1, 13))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    for output in llm.stream(PROMPTS[0], LONG):
        if len(output.outputs[0].token_ids) == 5:
            assert not is_idle(llm)
            break
    assert is_idle(llm)
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)


def test_streams_and_batches_may_be_nested(llm: LLM) -> None:
    alone = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
    outer = llm.stream(PROMPTS[0], GREEDY)
    next(outer)
    assert llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids == alone[1]
    *_, last = outer
    assert last.outputs[0].token_ids == alone[0]


def test_as_completed_yields_in_the_order_of_completion(llm: LLM) -> None:
    jobs = [(str(count), PROMPTS[0], GREEDY.replace(max_tokens=count)) for count in (9, 2, 5)]
    found = list(llm.as_completed(jobs))
    assert [result.request_id for result in found] == ["2", "5", "9"]
    assert all(isinstance(result, RequestOutput) and result.finished for result in found)


def test_as_completed_reads_only_as_far_as_it_must(llm: LLM) -> None:
    taken: list[int] = []

    def endless() -> Iterator[tuple[str, str, SamplingParams]]:
        for number in itertools.count():
            taken.append(number)
            yield str(number), PROMPTS[0], GREEDY

    results = llm.as_completed(endless(), max_in_flight=3)
    assert [next(results).request_id for _ in range(3)] == ["0", "1", "2"]
    assert len(taken) <= 6
    results.close()
    assert is_idle(llm)


def test_calls_of_as_completed_may_use_the_same_ids(llm: LLM) -> None:
    """Two batch jobs number their rows alike."""
    calls = [llm.as_completed([(str(row), PROMPTS[which], GREEDY) for row in range(3)]) for which in range(2)]
    found = list(zip(*calls, strict=True))
    assert [[output.request_id for output in outputs] for outputs in found] == [[str(row)] * 2 for row in range(3)]
    alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], GREEDY)]
    assert all([output.outputs[0].token_ids for output in outputs] == alone for outputs in found)


def test_an_answer_that_cannot_be_written_ends_with_its_fault_in_the_engine_as_well(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records and figures do not say that a stop string was found."""
    append, pieces = IncrementalDetokenizer.append, itertools.count()

    def failing(self: IncrementalDetokenizer, token_ids: list[int]) -> str:
        if next(pieces) == 3:
            raise ValueError("no such piece")
        return append(self, token_ids)

    core, ended = engine_of(llm).core, list[Any]()
    finish = core.finish
    monkeypatch.setattr(core, "finish", lambda ids, *why: (ended.append(why), finish(ids, *why))[1])
    monkeypatch.setattr(IncrementalDetokenizer, "append", failing)
    with pytest.raises(RequestFailed, match=r"^the answer cannot be written: ValueError$") as failed:
        list(llm.stream(PROMPTS[0], GREEDY))
    assert ended[0] == ("abort", str(failed.value)) and is_idle(llm)


def test_as_completed_reports_bad_inputs_and_goes_on(llm: LLM) -> None:
    several = GREEDY.replace(n=2, temperature=1.0)
    jobs: list[Any] = [
        ("good", PROMPTS[0], GREEDY),
        ("empty", "", GREEDY),
        ("good", PROMPTS[1], GREEDY),
        ("id", [5, 99999], GREEDY),
        ("none", None, GREEDY),
        ("good#0", PROMPTS[1], GREEDY),
        ("pair", PROMPTS[1], several),
        ("pair#1", PROMPTS[1], several),
    ]
    found = list(llm.as_completed(jobs))
    failed = [result for result in found if isinstance(result, FailedRequest)]
    assert [result.request_id for result in failed] == ["empty", "good", "id", "none"]
    assert all(isinstance(result.error, InvalidRequest) for result in failed)
    assert {result.request_id for result in found if result not in failed} == {"good", "good#0", "pair", "pair#1"}


def test_a_request_that_ends_at_the_context_is_cut_there(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_model_len=20, threads=1) as llm:
        prompt = [9] * 15
        for max_tokens in (None, 50):
            answer = llm.generate(prompt, GREEDY.replace(max_tokens=max_tokens))[0].outputs[0]
            assert (len(answer.token_ids), answer.finish_reason) == (5, "length")
        assert len(llm.generate([9] * 19, GREEDY)[0].outputs[0].token_ids) == 1
        with pytest.raises(InvalidRequest, match="the prompt has 20 tokens, and at most 19 leave room"):
            llm.generate([9] * 20, GREEDY)
        assert is_idle(llm)


# What ends an answer


def forced(llm: LLM, text: str, **fields: Any) -> tuple[list[int], SamplingParams]:
    """Parameters that make the model answer nothing but the one token of `text`."""
    (token,) = llm.tokenizer.encode(text)
    return [token], GREEDY.replace(allowed_token_ids=[token], **fields)


def test_stop_strings_end_the_answer_also_over_several_tokens(llm: LLM) -> None:
    prompt, params = forced(llm, "e", stop=["never", "eee", "eeee"])
    answer = llm.generate(prompt, params)[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == ("", "stop", "eee", 3)
    prompt, params = forced(llm, "e", stop="eee", include_stop_str_in_output=True)
    assert llm.generate(prompt, params)[0].outputs[0].text == "eee"


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    prompt, params = forced(llm, "e", stop="ee", min_tokens=5)
    answer = llm.generate(prompt, params)[0].outputs[0]
    assert (answer.finish_reason, len(answer.token_ids), answer.text) == ("stop", 6, "eeee")


def test_a_stream_holds_back_what_may_become_a_stop_string(llm: LLM) -> None:
    prompt, params = forced(llm, "e", stop="eeeX", max_tokens=6)
    texts = [output.outputs[0].text for output in llm.stream(prompt, params)]
    assert texts == ["", "", "", "e", "ee", "eeeeee"]


def test_end_of_sequence_and_stop_tokens(llm: LLM) -> None:
    (eos,) = llm.tokenizer.eos_token_ids
    free = SamplingParams(temperature=0, max_tokens=8, logit_bias={eos: 1000.0})
    answer = llm.generate(PROMPTS[0], free)[0].outputs[0]
    assert (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) == ([eos], "", "stop", None)
    answer = llm.generate(PROMPTS[0], free.replace(ignore_eos=True))[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == ([eos] * 8, "length")
    answer = llm.generate(PROMPTS[0], free.replace(min_tokens=3))[0].outputs[0]
    assert len(answer.token_ids) == 4 and eos not in answer.token_ids[:3] and answer.finish_reason == "stop"
    prompt, params = forced(llm, "e", stop_token_ids=llm.tokenizer.encode("e"))
    answer = llm.generate(prompt, params)[0].outputs[0]
    assert (answer.text, answer.stop_reason) == ("", prompt[0]), "the stop token is no part of the text"
    answer = llm.generate(prompt, params.replace(include_stop_str_in_output=True))[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("e", "stop")


def test_special_tokens_are_text_when_asked_for(llm: LLM) -> None:
    (eos,) = llm.tokenizer.eos_token_ids
    params = GREEDY.replace(allowed_token_ids=[eos], max_tokens=2)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == ""
    shown = llm.generate(PROMPTS[0], params.replace(skip_special_tokens=False))[0].outputs[0].text
    assert shown == "</s></s>"


TEXTS = st.text(alphabet="abé🦊", max_size=14)


@settings(max_examples=examples(150))
@given(
    text=TEXTS,
    stop=st.lists(st.text(alphabet="abé🦊", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    ending=st.sampled_from(("length", "abort")),
)
def test_streamed_text_never_retracts(
    tiny_model: Path, text: str, stop: list[str], include: bool, min_tokens: int, ending: Any
) -> None:
    """Token by token, any text and any stop strings: what was shown stays, and the end is where it must be."""
    tokenizer = Tokenizer(tiny_model)
    tokens = tokenizer.encode(text)
    assume(tokens)
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    answer = Answer(tokenizer, [5], params, StopSearch(StopStrings(stop)) if stop else None, 0)
    shown, stopped = "", None
    for place, token in enumerate(tokens):
        reason = "length" if ending == "length" and place == len(tokens) - 1 else None
        stopped = answer.add(TokenEvent("", [token], finish_reason=reason))
        assert answer.output.text.startswith(shown), "text was taken back"
        shown = answer.output.text
        if stopped is not None:
            break
    if answer.output.finish_reason is None:
        answer.end("abort", None)
    assert answer.output.text.startswith(shown)
    expected, cause = first_stop(tokenizer, tokens, stop, include, min_tokens)
    assert (answer.output.text, answer.output.stop_reason) == (expected, cause)
    assert answer.output.finish_reason == ("stop" if cause else ending)


def first_stop(
    tokenizer: Tokenizer, tokens: list[int], stop: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """The text cut at the first stop string that a token after `min_tokens` completes, by trying every token."""

    def whole(count: int) -> str:
        return tokenizer.decode(tokens[:count]).rstrip("\ufffd")

    for count in range(min_tokens + 1, len(tokens) + 1):
        before, text = whole(count - 1), whole(count)
        places = [(place, -order, word) for order, word in enumerate(stop) for place in ends_after(text, word, before)]
        if places:
            place, _, word = min(places, key=lambda found: (found[0], -found[1]))
            return text[: place + len(word) * include], word
    return tokenizer.decode(tokens), None


def ends_after(text: str, word: str, before: str) -> list[int]:
    return [place for place in range(len(text)) if text.startswith(word, place) and place + len(word) > len(before)]


# Whatever happens inside


def test_statistics_count_what_was_done(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_model_len=128, threads=1) as llm:
        prompt = list(range(10, 50))
        llm.generate([prompt, [7, 8]], GREEDY)
        before = llm.statistics()
        assert (before.requests, before.prompt_tokens, before.generation_tokens) == (2, 42, 24)
        assert (before.steps, before.preemptions, before.prefix_cache_hit_rate) == (12, 0, 0.0)
        (again,) = llm.generate(prompt, GREEDY)
        after = llm.statistics()
        assert again.cached_tokens == after.cached_tokens == 39, "all but the last token, which must be computed"
        assert after.prefix_cache_hit_rate == pytest.approx(39 / 82)
        assert after.computed_tokens == 42 + 2 * 11 + 1 + 11


def test_preemption_changes_no_answer(tiny_model: Path) -> None:
    prompts = [[5 + index, *range(20, 20 + 3 * index)] for index in range(8)]
    params = [GREEDY.replace(max_tokens=30, prompt_logprobs=0 if index % 3 else None) for index in range(8)]
    outputs = []
    for tokens in (4096, 64):
        with LLM(str(tiny_model), max_model_len=64, kv_cache_tokens=tokens, block_size=4, threads=1) as llm:
            outputs.append(llm.generate(prompts, params))
            assert (llm.statistics().preemptions > 0) == (tokens == 64)
            assert is_idle(llm)
    for large, small in zip(*outputs, strict=True):
        assert large.outputs == small.outputs
        assert len(small.prompt_logprobs or ()) == len(large.prompt_logprobs or ())


def test_a_failed_step_leaves_no_half_written_cache(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also Ctrl-C in the middle of a step: the next answer is right, and nobody waits for ever."""
    with LLM(str(tiny_model), max_model_len=128, max_batch_tokens=16, max_batch_requests=8, threads=1) as llm:
        prompt = list(range(20, 90))
        expected = llm.generate(prompt, GREEDY)[0].outputs
        core_of(llm).scheduler.cache.tree.clear()
        executor = core_of(llm).executor
        calls, execute = itertools.count(), executor._execute  # type: ignore[attr-defined]

        def interrupted(output: Any) -> Any:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return execute(output)

        monkeypatch.setattr(executor, "_execute", interrupted)
        other = llm.stream([7, 8, 9], LONG)
        next(other)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, GREEDY)
        assert is_idle(llm)
        with pytest.raises(RequestFailed, match="interrupted"):
            list(other)
        assert llm.generate(prompt, GREEDY)[0].outputs == expected


def test_closing_ends_what_runs(tiny_model: Path) -> None:
    with LLM(str(tiny_model), max_model_len=128, threads=1) as llm:
        output = next(llm.stream(PROMPTS[0], LONG))
        running = llm.stream(PROMPTS[1], LONG)
        kept = next(running)
        core = core_here(llm)
    assert kept.outputs[0].finish_reason == output.outputs[0].finish_reason == "abort"
    assert not core.has_work
    assert core.scheduler.cache.available_count == core.scheduler.cache.pool.capacity


PLAIN = """
import sys
from kvern.config import EngineConfig
from kvern.engine.factory import build_core
from kvern.models.folder import model_folder
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.runner.startup import Startup

config = EngineConfig(device="cpu", kv_cache_tokens=256)
core, _, _ = build_core(config, model_folder(config), Startup())
core.add(RequestSpec("0", PromptInput([5, 6, 7]), SamplingParams().resolved(), 4))
while core.has_work:
    core.step()
print(*sys.modules)
"""
UNUSED = {
    "jinja2",
    "llguidance",
    "kvern.drafting.predictions",
    "kvern.engine.beams",
    "kvern.engine.stop_strings",
    "kvern.models.changed_folder",
    "kvern.models.share",
    "kvern.models.stages",
    "kvern.ranks.expert_placement",
    "kvern.runner.gpu_checks",
    "kvern.runner.state_memory",
    "kvern.structured.masks",
    "kvern.text.tokenizer",
    "kvern.tools.thinking",
}


def test_a_plain_request_imports_nothing_for_options_that_it_leaves_out() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    assert "kvern.engine.core" in done.stdout.split()
    assert set(done.stdout.split()) & UNUSED == set()
