"""Custom logits processors: enabled by the operator, told by requests, alone in what they change and in failing."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern import LLM, AsyncLLM, EngineConfig, SamplingParams
from kvern.errors import ConfigError, InvalidParameter, RequestFailed
from kvern.llm import FailedRequest
from kvern.request.sampling_params import StructuredOutput
from kvern.serving.client import EngineClient
from tests.support.idle import is_idle
from tests.support.processors import NAMES, Step, follow, install, install_example, installed_package
from tests.support.served import Served, eventually

OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_batch_requests": 16, "kv_cache_tokens": 4096, "threads": 1}
PROMPT = [5, 9, 17, 33, 2, 81]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """The package, for this process and for engines of their own processes."""
    site = str(install(tmp_path / "site"))
    monkeypatch.syspath_prepend(site)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [site, str(pytestconfig.rootpath), *known]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def llm(tiny_model: Path, installed: None) -> Iterator[LLM]:
    with LLM(str(tiny_model), logits_processors=tuple(NAMES), **OPTIONS) as llm:
        yield llm
        assert is_idle(llm)


def following(by: int, count: int = 30, start: int = PROMPT[-1], **more: int) -> list[int]:
    tokens = [start]
    for _ in range(count):
        tokens.append(follow(tokens[-1], Step(by, **more)))
    return tokens[1:]


def with_step(by: int, **options: Any) -> SamplingParams:
    asked = {"follow": {"by": by}}
    return SamplingParams(**({"max_tokens": 30, "ignore_eos": True, "logits_processors": asked} | options))


def test_a_processor_sees_every_token(llm: LLM) -> None:
    """Requests with arguments of their own, beside some without."""
    plain = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    [alone] = llm.generate([PROMPT], plain)
    params = [with_step(1), plain, with_step(7, temperature=0), with_step(2, n=3), with_step(90)]
    outputs = llm.generate([PROMPT] * 5, params)
    assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids
    for output, by in zip((outputs[0], *outputs[2:]), (1, 7, 2, 90), strict=True):
        assert [answer.token_ids for answer in output.outputs] == [following(by)] * len(output.outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_tokens": 96, "block_size": 4},
        {"max_batch_tokens": 5, "max_batch_requests": 4},
        {"batching": "static", "prefix_cache": False},
        {"kv_cache": "contiguous"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("installed")
def test_switches_and_preemption_change_nothing(tiny_model: Path, options: dict[str, Any]) -> None:
    plain = [SamplingParams(seed=seed, max_tokens=30, ignore_eos=True) for seed in range(3)]
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = [llm.generate([PROMPT], params)[0].outputs[0].token_ids for params in plain]
    with LLM(str(tiny_model), logits_processors=("follow",), **(OPTIONS | options)) as llm:
        outputs = llm.generate([PROMPT] * 8, [*map(with_step, range(1, 6)), *plain])
        assert [output.outputs[0].token_ids for output in outputs] == [*map(following, range(1, 6)), *expected]
        assert (llm.statistics().preemptions > 0) == ("block_size" in options)


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    [output] = llm.generate([PROMPT], with_step(1, logprobs=2))
    [answer] = output.outputs
    score = llm.score([(PROMPT, answer.token_ids)])[0]
    assert answer.logprobs is not None
    found = [table[token].logprob for token, table in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert found == pytest.approx(score.token_logprobs, abs=1e-4)


@pytest.mark.usefixtures("installed")
def test_beams_that_go_on_in_rows_of_others_have_none_of_their_processors(tiny_model: Path) -> None:
    beams = SamplingParams(beam_width=3, n=3, max_tokens=6, ignore_eos=True)
    short, long = (
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logits_processors={"double": {}})
        for count in (1, 20)
    )
    with LLM(str(tiny_model), dtype="float32", max_batch_requests=4, logits_processors=("double",)) as llm:
        [alone] = llm.generate([[5, 6, 7]], beams)
        *_, beside = llm.generate([[1], [2], [3], [4], [5, 6, 7]], [short, short, short, long, beams])
    assert [answer.token_ids for answer in beside.outputs] == [answer.token_ids for answer in alone.outputs]


@pytest.mark.usefixtures("installed")
def test_the_options_order_counts(tiny_model: Path) -> None:
    """Not that of the request, whose fields have none."""
    greedy = SamplingParams(temperature=0, max_tokens=1)
    found = {}
    for order in (("shift", "double"), ("double", "shift")):
        with LLM(str(tiny_model), logits_processors=order, **OPTIONS) as llm:
            [best] = llm.generate([PROMPT], greedy)[0].outputs[0].token_ids
            asked = [{"shift": {}, "double": {}}, {"double": {}, "shift": {}}, {"shift": {}}]
            outputs = llm.generate([PROMPT] * 3, [greedy.replace(logits_processors=each) for each in asked])
            found[order] = [output.outputs[0].token_ids[0] for output in outputs]
    assert found["shift", "double"] == [(best + 1) * 2 % 288, (best + 1) * 2 % 288, best + 1]
    assert found["double", "shift"] == [(best * 2 + 1) % 288, (best * 2 + 1) % 288, best + 1]


def test_penalties_come_before_and_grammars_after(llm: LLM) -> None:
    biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={50: 1e6}, logits_processors={"shift": {}})
    assert llm.generate([PROMPT], biased)[0].outputs[0].token_ids == [51] * 3
    form = StructuredOutput(regex="[ab]{4}")
    bound = SamplingParams(max_tokens=30, structured=form, logits_processors={"follow": {"by": 1}}, seed=1)
    assert re.fullmatch("[ab]{4}", llm.generate([PROMPT], bound)[0].outputs[0].text)


FAULTS = [
    ({"how": "join"}, "logits processor break failed: KeyError: 'no such\\\\nthing'", 1),
    ({"how": "apply"}, "logits processor break failed: RuntimeError: as planned", 1),
    ({"how": "apply", "after": 4}, "logits processor break failed: RuntimeError: as planned", 5),
    ({"how": "nan", "after": 2}, "logits processor break left no token that could be sampled", 3),
    ({"how": "nothing"}, "logits processor break left no token that could be sampled", 1),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("fault", "said", "tokens"), FAULTS, ids=range(len(FAULTS)))
@pytest.mark.parametrize("filters", [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 40}, {"typical_p": 0.8}], ids=str)
def test_one_that_fails_ends_its_request_alone(
    llm: LLM, fault: dict[str, Any], said: str, tokens: int, filters: dict[str, Any]
) -> None:
    """Others with the same processor, in the same step, go on as if it were not there."""
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": 3, **filters}
    plain = SamplingParams(**common)
    expected = llm.generate([PROMPT], plain)[0].outputs[0].token_ids
    healthy = plain.replace(logits_processors={"break": {"how": "apply", "after": 1000}})
    broken = plain.replace(logits_processors={"break": fault})
    several = [healthy, broken, plain, broken, healthy]
    outputs = [output.outputs[0] for output in llm.generate([PROMPT] * 5, several, on_error="return")]
    for index in (0, 2, 4):
        assert (outputs[index].token_ids, outputs[index].finish_reason) == (expected, "length")
    for index in (1, 3):
        assert outputs[index].finish_reason == "abort" and re.fullmatch(said, str(outputs[index].stop_reason))
        assert len(outputs[index].token_ids) == tokens


def test_infinite_logits_are_sampled(llm: LLM) -> None:
    for options in ({"temperature": 0}, {"temperature": 1e-4}, {"top_p": 0.5}, {"typical_p": 0.5}):
        params = SamplingParams(max_tokens=4, logits_processors={"break": {"how": "infinite"}}, **options)
        assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == [7] * 4


def test_a_job_goes_on_behind_one_that_fails(llm: LLM) -> None:
    broken = SamplingParams(max_tokens=4, logits_processors={"break": {"how": "nothing"}})
    inputs = [("a", PROMPT, SamplingParams(max_tokens=4)), ("b", PROMPT, broken)]
    results = {result.request_id: result for result in llm.as_completed(inputs)}
    failed = results["b"]
    assert isinstance(failed, FailedRequest) and isinstance(failed.error, RequestFailed)
    assert not isinstance(results["a"], FailedRequest)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"other": {}}, "logits_processors names 'other': this engine has follow, break, end, shift, double"),
        ({"follow": {}}, "follow: Object missing required field `by`"),
        ({"follow": {"by": "1"}}, "Expected `int`, got `str`"),
        ({"follow": {"by": 0}}, "follow: by is 0: it must be at least 1"),
        ({"follow": {"by": 1, "buy": 2}}, "unknown field `buy`"),
        ({"shift": None}, "shift is None: it must be an object of arguments"),
        (["shift"], "logits_processors is ['shift']: it must be an object"),
    ],
    ids=range(7),
)
def test_what_requests_may_not_say(llm: LLM, asked: Any, said: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(said)):
        llm.generate([PROMPT], SamplingParams(logits_processors=asked))


def test_none_is_enabled_unless_the_operator_does(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="this engine has none"):
        tiny_llm.generate([PROMPT], SamplingParams(logits_processors={"follow": {"by": 1}}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folow", "names 'folow': installed are break, double, end, follow, function, lose engine, missing, shift"),
        ("missing", "(tests.support.processors:Missing) cannot be loaded: AttributeError"),
        ("function", "(tests.support.processors:install) has no Arguments and no join and no apply"),
        ("tests.support.processors:Follow", "installed are break"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_cannot_be_enabled(tiny_model: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM(str(tiny_model), logits_processors=(name,), **OPTIONS)
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineClient(EngineConfig(model=str(tiny_model), logits_processors=(name,)))


@pytest.mark.nightly
@pytest.mark.usefixtures("installed")
def test_async(tiny_model: Path) -> None:
    """Requests of AsyncLLM, of which one fails."""

    async def run() -> None:
        async with AsyncLLM(str(tiny_model), logits_processors=("follow", "break"), **OPTIONS) as llm:
            breaking = SamplingParams(ignore_eos=True, logits_processors={"break": {"how": "apply", "after": 3}})
            params = [with_step(1), breaking, with_step(3)]
            first, failed, last = await llm.generate([PROMPT] * 3, params, on_error="return")
            assert [output.outputs[0].token_ids for output in (first, last)] == [following(1), following(3)]
            assert failed.failure == "logits processor break failed: RuntimeError: as planned"
            assert len(failed.outputs[0].token_ids) == 4
            with pytest.raises(RequestFailed, match="as planned"):
                async for _ in llm.stream(PROMPT, breaking):
                    pass

    asyncio.run(run())


# Over HTTP, with the example, installed as one installs packages


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with installed_package(install_example(tmp_path_factory.mktemp("example"))):
        served = Served(
            "--threads", "1", "--max-model-len", "512", "--logits-processors", "alphabet", "break", "follow"
        )
    yield served
    served.stop()


@pytest.mark.nightly
def test_the_example(server: Served) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": "kvern-12m", "prompt": "Once upon a time", "max_tokens": 40, "seed": 1}
    options["extra_body"] = {"min_tokens": 10}
    free = client.completions.create(**options).choices[0].text
    for characters in ("0123456789 ", "aeiou "):
        extra = {"min_tokens": 10, "logits_processors": {"alphabet": {"characters": characters}}}
        text = client.completions.create(**(options | {"extra_body": extra})).choices[0].text
        assert text and set(text) <= set(characters)
    assert client.completions.create(**options).choices[0].text == free
    message = [{"role": "user", "content": "Say something."}]
    chat = client.chat.completions.create(model="kvern-12m", messages=message, max_tokens=30, extra_body=extra)
    assert set(chat.choices[0].message.content or "") <= set("aeiou ")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kvern_alphabet:Alphabet": {}}, "this engine has alphabet, break, follow"),
        ({"alphabet": {"characters": ""}}, "characters is empty"),
        ({"alphabet": {"characters": 5}}, "Expected `str`"),
        ({"alphabet": {"code": "import os"}}, "unknown field `code`"),
        ({"alphabet": "import os"}, "must be an object"),
        ("import os", "must be an object"),
    ],
    ids=range(6),
)
def test_bad_arguments_over_http(server: Served, asked: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().completions.create(model="kvern-12m", prompt="x", extra_body={"logits_processors": asked})
    error: Any = refused.value.body
    assert said in error["message"] or "expected object" in error["message"]


def test_a_failure_over_http_hurts_nobody(server: Served) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": "kvern-12m", "prompt": "Once", "seed": 5, "max_tokens": 60}
    expected = client.completions.create(**options).choices[0].text
    extra = {"logits_processors": {"break": {"how": "apply", "after": 3}}}
    with client.completions.create(**options, stream=True) as other:
        with pytest.raises(openai.InternalServerError, match="logits processor break failed: RuntimeError: as planned"):
            client.completions.create(**options, extra_body=extra)
        with pytest.raises(openai.APIError, match="logits processor break failed"):
            list(client.completions.create(**options, stream=True, extra_body=extra))
        assert "".join(chunk.choices[0].text for chunk in other) == expected
    assert server.figure("engine_restarts_total") == 0


@pytest.mark.nightly
def test_a_processor_goes_on_in_the_next_engine(server: Served) -> None:
    client = server.client()
    asked = {"logits_processors": {"follow": {"by": 1, "below": 4000}}, "ignore_eos": True}
    options: dict[str, Any] = {"model": "kvern-12m", "prompt": [5, 6], "max_tokens": 300}
    expected = client.completions.create(**options, extra_body=asked).choices[0].text
    stream = client.completions.create(**options, extra_body=asked, stream=True)
    text = "".join(next(stream).choices[0].text for _ in range(20))
    before = server.figure("engine_restarts_total")
    server.kill_engine()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected
    eventually(lambda: server.figure("engine_restarts_total") == before + 1)
