"""LLM in the words of other libraries: mappings of parameters, and calls as pipelines of transformers have them."""

import asyncio
import copy
import inspect
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvern import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutput
from kvern.errors import ConfigError, EngineClosed, InvalidParameter, InvalidRequest, RequestFailed
from kvern.options.arguments import engine_config
from tests.support.internals import engine_of

TALK = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, max_model_len=256) as llm:
        yield llm


def test_parameters_may_be_a_mapping(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate(["Once", "Long ago"], greedy)
    for params in ({"temperature": 0, "max_tokens": 8}, [greedy, {"temperature": 0, "max_tokens": 8}]):
        found = llm.generate(["Once", "Long ago"], params)
        assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert llm.chat(TALK, {"temperature": 0})[0].outputs[0].text == "4"
    *_, last = llm.stream("Once", {"temperature": 0, "max_tokens": 8})
    assert last.outputs == expected[0].outputs
    with pytest.raises(InvalidParameter, match="no sampling parameter 'temprature': did you mean temperature"):
        llm.generate("Once", {"temprature": 0})
    with pytest.raises(InvalidParameter, match="temperature"):
        llm.generate("Once", {"temperature": "hot"})


def test_a_call_is_that_of_a_pipeline(llm: LLM) -> None:
    [plain] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=6))
    text = plain.outputs[0].text
    assert llm("Once upon a time", max_new_tokens=6, do_sample=False) == [{"generated_text": "Once upon a time" + text}]
    several = llm(["Once upon a time"] * 2, max_new_tokens=6, do_sample=False, return_full_text=False)
    assert several == [[{"generated_text": text}]] * 2
    [said] = llm(TALK, temperature=0)
    assert said["generated_text"] == [*TALK, {"role": "assistant", "content": "4"}]
    assert len(llm("Once", num_return_sequences=3, max_new_tokens=2, seed=1)) == 3
    with pytest.raises(InvalidParameter, match="do_sample is false"):
        llm("Once", do_sample=False, temperature=0.5)
    assert llm.get_tokenizer() is llm.tokenizer


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_seq": 3}, "there is no option max_num_seq: did you mean max_num_seqs"),
        ({"port": 80}, "the options are the fields of kvern.EngineConfig"),
        ({"max_num_seqs": 3, "max_batch_requests": 4}, "give one of them"),
        ({"dtype": torch.float64}, "dtype float64 is refused"),
        ({"max_model_len": [3]}, "max_model_len is .3.: expected int, got array"),
        ({"threads": "4"}, "threads is '4': expected int, got str"),
        ({"enforce_eager": "yes"}, "enforce_eager is 'yes': it must be true or false"),
        ({"adapters": ["a"]}, "adapters is .'a'.: expected object, got array"),
        ({"max_num_seqs": -3}, "it must be at least 1"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM("kvern-1m", **options)


def test_values_of_python_are_options() -> None:
    found = engine_config(
        Path("model"), {"dtype": torch.bfloat16, "logits_processors": ["a:b"], "download_dir": Path("x")}
    )
    assert found == EngineConfig("model", dtype="bfloat16", logits_processors=("a:b",), download_dir="x")
    for kind in (LLM, AsyncLLM):  # what `help` shows
        assert inspect.signature(kind).parameters.keys() == inspect.signature(EngineConfig).parameters.keys()


def test_arguments_of_calls_are_named(llm: LLM) -> None:
    options: dict[str, Any]
    for options, said in (
        ({"adaptr": "x"}, "generate has no argument 'adaptr': did you mean adapter"),
        ({"use_tqdm": True, "progress": False}, "generate has progress and use_tqdm, which mean the same"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0: it must be at least 1, or -1"),
    ):
        with pytest.raises((InvalidRequest, InvalidParameter), match=said):
            llm.generate("Once", **options)
    with pytest.raises(InvalidRequest, match="chat has no argument 'thinking_buget': did you mean thinking_budget"):
        llm.chat(TALK, thinking_buget=4)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="a prompt has prompt, mm_data: give prompt or prompt_token_ids"):
        llm.generate({"prompt": "Once", "mm_data": {}})
    with pytest.raises(InvalidRequest, match="multi_modal_data has image: it may have nothing: this model reads text"):
        llm.generate({"prompt": "Once", "multi_modal_data": {"image": b""}})
    with pytest.raises(InvalidParameter, match="beam_search needs beam_width"):
        llm.beam_search("Once")
    with pytest.raises(InvalidRequest, match="kvern-12m has no labels"):
        llm.classify("Once")


def test_long_prompts_are_cut(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("Once upon a time there was a fox")
    params = SamplingParams(temperature=0, max_tokens=2)
    for prompt in ("Once upon a time there was a fox", tokens):
        [found] = llm.generate(prompt, params, truncate_prompt_tokens=4)
        assert found.prompt_token_ids == tokens[-4:]
    [found] = llm.generate(["fox " * 900], params, truncate_prompt_tokens=-1)
    assert len(found.prompt_token_ids) == llm.max_model_len - 1


def test_cached_prompts_are_forgotten(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    prompt = list(range(300, 340))
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert llm.reset_prefix_cache()
    third, fourth = (llm.generate(prompt, params)[0] for _ in range(2))
    assert [output.cached_tokens for output in (first, second, third, fourth)] == [0, 39, 0, 39]
    assert first.outputs == second.outputs == third.outputs == fourth.outputs


def test_a_closed_engine_says_so_and_holds_nothing() -> None:
    llm = LLM("kvern-1m", threads=1, max_model_len=64)
    stream = llm.stream("Once", {"max_tokens": 40})
    next(stream)
    core = weakref.ref(engine_of(llm).core)
    llm.close()
    assert core() is None, "the weights and the KV cache are freed"
    with pytest.raises(RequestFailed, match="the engine was closed"):
        next(stream)
    for call in (
        lambda: llm.generate("Once"),
        lambda: next(llm.stream("Once")),
        llm.statistics,
        lambda: llm.score([("a", " b")]),
    ):
        with pytest.raises(EngineClosed, match="the engine is closed: make another one"):
            call()
    llm.close()
    assert llm.config.model == "kvern-1m" and llm.tokenizer.encode("Once")


def test_a_start_counts_from_the_call() -> None:
    with LLM("kvern-1m", threads=1, max_model_len=64) as llm:
        assert "import" not in engine_of(llm).startup.stages, "a notebook may be hours old"


@pytest.mark.nightly
def test_async_verbs_have_the_same_names() -> None:
    async def main() -> None:
        async with AsyncLLM("kvern-1m", max_num_seqs=4, max_model_len=64) as llm:
            params = SamplingParams(temperature=0, max_tokens=4)
            [plain] = await llm.generate("Once", params)
            [named] = await llm.generate({"prompt": "Once"}, params, truncate_prompt_tokens=5)
            assert named.outputs == plain.outputs
            [beams] = await llm.beam_search("Once", {"beam_width": 2, "max_tokens": 4})
            assert len(beams.outputs) == 2
            assert llm.get_tokenizer() is llm.tokenizer and llm.max_model_len == 64
            prompt = list(range(300, 340))
            cached = [(await llm.generate(prompt, params))[0].cached_tokens for _ in range(2)]
            assert llm.reset_prefix_cache()
            assert [*cached, (await llm.generate(prompt, params))[0].cached_tokens] == [0, 39, 0]
            with pytest.raises(InvalidRequest, match="generate has no argument 'use_tdqm'"):
                await llm.generate("Once", use_tdqm=True)  # type: ignore[call-arg]
            with pytest.raises(AttributeError, match="'AsyncLLM' object has no attribute 'add_request': stream"):
                getattr(llm, "add_request")  # noqa: B009
            with pytest.raises(InvalidRequest, match="kvern-1m has no labels"):
                await llm.classify("Once")

    asyncio.run(main())


@dataclass
class Form:
    """A form of answers as an object of another library."""

    json: dict[str, Any] | str | None = None
    choice: list[str] | None = None
    disable_any_whitespace: bool = False
    _backend: str | None = None


class Beams(msgspec.Struct):
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0


def test_objects_of_other_libraries_are_read_by_their_fields(llm: LLM) -> None:
    given: Any = {"structured_outputs": Form(choice=["yes", "no"], _backend="auto")}
    assert SamplingParams(**given) == SamplingParams(structured=StructuredOutput(choice=["yes", "no"]))
    beams: Any = Beams(2, 4)
    [found] = llm.beam_search("Once", beams)
    assert found.outputs == llm.beam_search("Once", {"beam_width": 2, "max_tokens": 4})[0].outputs
    wrong: Any = 3
    for call in (llm.generate, llm.beam_search, llm.chat):
        with pytest.raises(InvalidParameter, match="sampling_params is 3: give SamplingParams, or a mapping"):
            call("Once" if call != llm.chat else TALK, wrong)
    given = {"structured": Form(choice=["a"], disable_any_whitespace=True)}
    with pytest.raises(InvalidParameter, match="unknown field `disable_any_whitespace`"):
        SamplingParams(**given)


def test_prompts_are_written_as_transformers_writes_them(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    written = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert written == tokenizer.chat_prompt(TALK, add_generation_prompt=False)
    assert tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False) == llm.chat_prompt(TALK)
    with pytest.raises(InvalidRequest, match="apply_chat_template has no return_tensors"):
        tokenizer.apply_chat_template(TALK, return_tensors="pt")


def test_outputs_are_plain_data(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    outputs = llm.generate("Once", params)
    assert pickle.loads(pickle.dumps(outputs)) == copy.deepcopy(outputs) == outputs
    assert pickle.loads(pickle.dumps(params)) == params
    for name, said in (("metrics", "queue_seconds is the wait"), ("sequenes", "has no attribute 'sequenes'$")):
        with pytest.raises(AttributeError, match=said):
            getattr(outputs[0], name)
    with pytest.raises(AttributeError, match="has no attribute 'lora_request': adapters are"):
        getattr(outputs[0].outputs[0], "lora_request")  # noqa: B009


def test_names_of_sampling_parameters() -> None:
    assert SamplingParams(max_new_tokens=3) == SamplingParams(max_tokens=3)  # type: ignore[call-arg]
    form = {"json": '{"type": "object"}', "disable_fallback": False, "regex": None}
    found = SamplingParams(structured_outputs=form).structured  # type: ignore[call-arg]
    assert found is not None and found.json == {"type": "object"}
    for options, said in (
        ({"max_tokens": 3, "max_new_tokens": 4}, "max_tokens is 3 and max_new_tokens 4: give one of them"),
        ({"max_token": 3}, "there is no sampling parameter 'max_token': did you mean max_tokens"),
        ({"structured": {"jso": 1}}, "structured: Object contains unknown field `jso`"),
        ({"structured": {"json": "{"}}, "json is not valid JSON"),
    ):
        with pytest.raises(InvalidParameter, match=said):
            SamplingParams(**options)
