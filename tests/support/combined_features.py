"""The features of a request and of the engine: how each is asked for, and what it alone promises."""

import io
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import pytest
from PIL import Image

from kvern import LLM, PromptInput, RequestOutput, SamplingParams
from kvern.request.outputs import CompletionOutput
from kvern.request.request import sample_seed
from kvern.request.sampling_params import StructuredOutput
from kvern.tools.checks import read_tools
from tests.support.combined_answers import CLOSE, check_same
from tests.support.combined_questions import ARGUMENTS, RECORD, TOOLS
from tests.support.idle import is_idle
from tests.support.internals import core_of, engine_of
from tests.support.served import eventually
from tests.support.trained_adapters import ADAPTERS
from tests.support.vision_models import picture

OPTIONS: dict[str, Any] = {
    "model": "kvern-1m",
    "adapters": ADAPTERS,
    "dtype": "float32",
    "block_size": 4,
    "max_model_len": 320,
    "kv_cache_tokens": 8192,
    "prefix_cache": False,
    "threads": 1,
}
BEAMS, ANSWERS = 4, 3
CALL = 7
"""The id of `<tool_call>`."""


@dataclass(frozen=True, eq=False)
class Ask:
    """A request, with the names of the features that it was given."""

    question: str
    params: SamplingParams
    adapter: str | None = None
    tools: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    image: bytes | None = None
    """The file of an image before the question."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        if self.image is None:
            return [{"role": "user", "content": self.question}]
        parts = [{"type": "image", "image": self.image}, {"type": "text", "text": self.question}]
        return [{"role": "user", "content": parts}]

    def sampling(self, **changes: Any) -> "Ask":
        return replace(self, params=self.params.replace(**changes))


@dataclass
class Result:
    """The result of one request.

    streamed       the texts of all answers at each update
    cached_before  prompt tokens from the prefix cache when the batch ran first
    """

    ask: Ask
    output: RequestOutput
    cached_before: int = 0
    streamed: list[list[str]] = field(default_factory=list)

    @property
    def answers(self) -> list[CompletionOutput]:
        return self.output.outputs


class Alone:
    """The answers of requests that run alone, on an engine with enough memory and without a prefix cache."""

    def __init__(self, **options: Any) -> None:
        self.options = OPTIONS | options
        self.trained = self.options["model"] == OPTIONS["model"]
        """A model for expected answers; only the embedded one has known behaviour without features."""
        self._llm = LLM(**self.options)
        self._known: dict[str, Result] = {}

    def __call__(self, ask: Ask) -> Result:
        key = repr(replace(ask, features=frozenset()))
        if key not in self._known:
            [self._known[key]] = at_once(self._llm, [ask])
            assert not self._known[key].output.cached_tokens or ask.params.n > 1  # which share their prompt
        return self._known[key]

    def ends(self, result: Result, answer: CompletionOutput) -> bool:
        """Whether the answer is whole: of a random model a beam may not be, since it takes no shortest way out.

        One that takes it may have no token left by which it would say so, and is then reported as cut off.
        """
        if not self.trained and answer.finish_reason == "length":
            return result.ask.params.beam_width is None
        assert answer.finish_reason == "stop", answer.text
        return True

    def logprobs(
        self, result: Result, answer: CompletionOutput, adapter: str | None, image: bytes | None = None
    ) -> list[float]:
        """Log-probabilities of an answer's tokens by the model with an adapter, computed as a prompt.

        `image`: another one of the same size instead of the request's.
        """
        prompt = result.output.prompt_token_ids
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=len(prompt))
        image = image or result.ask.image
        whole = PromptInput([*prompt, *answer.token_ids], () if image is None else (image,))
        [output] = self._llm.generate([whole], params, adapter=adapter)
        tables = (output.prompt_logprobs or [])[len(prompt) :]
        return [table[token].logprob for token, table in zip(answer.token_ids, tables, strict=True) if table]

    def check(self) -> None:
        assert self._llm.statistics().preemptions == 0
        assert is_idle(self._llm)


@dataclass
class Run:
    """The results of a batch on one engine, and the data for comparisons."""

    preempted: set[str]
    """Ids of the outputs whose requests lost their blocks."""
    cached: list[int]
    """Tokens that came out of the cache, each time that the batch was answered."""
    alone: Alone
    drafts: tuple[int, int] = (0, 0)
    """The numbers of verified and of accepted drafts."""
    repeated: RequestOutput | None = None  # of a request that came again as the last one, behind the batch
    page: int = OPTIONS["block_size"]
    """Tokens of which so many are cached together."""


def at_once(llm: LLM, asks: Sequence[Ask]) -> list[Result]:
    chats = []
    for ask in asks:
        options = dict(ask.tools)
        use = read_tools(options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls"))
        chats.append(llm.chat_request(ask.messages, ask.params, use))
    adapters = [ask.adapter for ask in asks]
    outputs = llm.generate([chat.prompt for chat in chats], [chat.params for chat in chats], adapter=adapters)
    for chat, output in zip(chats, outputs, strict=True):
        for answer in output.outputs:
            answer.message = chat.message(answer.text)
    return [Result(ask, output) for ask, output in zip(asks, outputs, strict=True)]


def streamed(llm: LLM, asks: Sequence[Ask]) -> list[Result]:
    """All streams side by side, in threads; the engine gets them in this order, and begins when it has all of them."""

    def one(ask: Ask) -> Result:
        news = []
        for output in llm.stream_chat(ask.messages, ask.params, adapter=ask.adapter, **ask.tools):
            news.append([answer.text for answer in output.outputs])
        return Result(ask, output, streamed=news)

    core = core_of(llm)
    step = core.step

    def step_for_all() -> Any:
        if len(engine_of(llm).request_ids) < len(asks):
            return []
        del core.step
        return step()

    core.step = step_for_all
    with ThreadPoolExecutor(len(asks)) as pool:
        streams: list[Future[Result]] = []
        for ask in asks:
            streams.append(pool.submit(one, ask))
            eventually(lambda: len(engine_of(llm).request_ids) >= len(streams) or streams[-1].done())
        return [stream.result() for stream in streams]


class Feature(ABC):
    """Something to ask for. Its document says what it promises, and `check` tests that."""

    def options(self) -> dict[str, Any]:
        """The engine options that a feature needs."""
        return {}

    def ask(self, ask: Ask, number: int) -> Ask:
        """The request with this feature, one of several."""
        return ask

    @abstractmethod
    def check(self, results: Sequence[Result], run: Run) -> None:
        """`results` are those of the requests that have the feature."""


class Structured(Feature):
    """Every answer validates against its JSON schema, and none would without the constraint."""

    def ask(self, ask: Ask, number: int) -> Ask:
        return ask.sampling(structured=StructuredOutput(json=RECORD))

    def check(self, results: Sequence[Result], run: Run) -> None:
        records = 0
        for result in results:
            for answer in result.answers:
                if (answer.message is None or not answer.message.tool_calls) and run.alone.ends(result, answer):
                    jsonschema.validate(json.loads(answer.text), RECORD)
                    records += 1
            for answer in run.alone(result.ask.sampling(structured=None)).answers:
                assert answer.message is not None
                assert not is_record(answer.message.content)
        assert records


def is_record(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), RECORD)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


class ToolCalls(Feature):
    """Calls are read from the answers, and their arguments validate: one call in each where a call is required, and
    with a schema for the answer a record or a call."""

    def ask(self, ask: Ask, number: int) -> Ask:
        choice = "required" if ask.params.structured is None else "auto"
        if choice == "auto" and number % 3 < 2:
            ask = ask.sampling(logit_bias={CALL: 50.0 if number % 3 else -50.0})
        return replace(ask, tools={"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False})

    def check(self, results: Sequence[Result], run: Run) -> None:
        calls = 0
        for result in results:
            for answer in result.answers:
                assert answer.message is not None
                if not run.alone.ends(result, answer):
                    continue
                if result.ask.tools["tool_choice"] == "required":
                    assert len(answer.message.tool_calls) == 1
                    assert not answer.message.content
                elif result.ask.params.logit_bias:
                    assert bool(answer.message.tool_calls) == (result.ask.params.logit_bias[CALL] > 0)
                for call in answer.message.tool_calls:
                    jsonschema.validate(json.loads(call.arguments), ARGUMENTS[call.name])
                    calls += 1
        assert calls


class Beams(Feature):
    """The answers are distinct, the best first, and their scores are the model's log-probabilities (with a grammar or
    DRY, which ban tokens: at least these)."""

    def ask(self, ask: Ask, number: int) -> Ask:
        return ask.sampling(beam_width=BEAMS, n=BEAMS, temperature=None, seed=None)

    def check(self, results: Sequence[Result], run: Run) -> None:
        for result in results:
            params = result.ask.params
            assert len({tuple(answer.token_ids) for answer in result.answers}) == len(result.answers) == params.n
            scores = []
            for answer in result.answers:
                total = answer.cumulative_logprob
                assert total is not None
                scores.append(total / len(answer.token_ids))
                own = sum(run.alone.logprobs(result, answer, result.ask.adapter))
                if params.structured is None and not result.ask.tools and not params.penalizes_repetitions:
                    assert total == pytest.approx(own, abs=CLOSE)
                assert total >= own - CLOSE
            assert scores == sorted(scores, reverse=True)


class Several(Feature):
    """There are `n` answers: the seed of each follows from the request's and its number; of beams, the `n` best."""

    def ask(self, ask: Ask, number: int) -> Ask:
        return ask.sampling(n=ANSWERS)

    def check(self, results: Sequence[Result], run: Run) -> None:
        texts = set()
        for result in results:
            params = result.ask.params
            assert len(result.answers) == params.n == ANSWERS
            if params.beam_width is not None:
                singles = run.alone(result.ask.sampling(n=params.beam_width)).answers[: params.n]
            else:
                seeds = [sample_seed(params.seed or 0, index) for index in range(params.n)]
                singles = [run.alone(result.ask.sampling(n=1, seed=seed)).answers[0] for seed in seeds]
            for answer, single in zip(result.answers, singles, strict=True):
                check_same(answer, single)
                texts.add((result.ask.question, str(answer.token_ids)))
        assert len(texts) > len({result.ask.question for result in results})


class Logprobs(Feature):
    """Every token has its entry among the most probable ones, with the model's own value, and asking changes no
    token."""

    def ask(self, ask: Ask, number: int) -> Ask:
        return ask.sampling(logprobs=2)

    def check(self, results: Sequence[Result], run: Run) -> None:
        for result in results:
            silent = run.alone(result.ask.sampling(logprobs=None)).answers
            for answer, other in zip(result.answers, silent, strict=True):
                check_same(answer, other)
                assert other.logprobs is None
                assert answer.logprobs is not None
                chosen = [table[token].logprob for token, table in zip(answer.token_ids, answer.logprobs, strict=True)]
                assert chosen == pytest.approx(run.alone.logprobs(result, answer, result.ask.adapter), abs=CLOSE)
                for table in answer.logprobs:
                    assert {1, 2} <= {entry.rank for entry in table.values()}
                    assert len(table) in (2, 3)
                assert answer.cumulative_logprob is not None
                assert answer.cumulative_logprob >= sum(chosen) - CLOSE


class Adapters(Feature):
    """Each request is answered by the model with its own adapter. The batch has two adapters and requests without
    one."""

    def ask(self, ask: Ask, number: int) -> Ask:
        return replace(ask, adapter=list(ADAPTERS)[number % len(ADAPTERS)])

    def check(self, results: Sequence[Result], run: Run) -> None:
        assert {result.ask.adapter for result in results} == set(ADAPTERS)
        for result in results:
            for answer in result.answers:
                own, base = (sum(run.alone.logprobs(result, answer, name)) for name in (result.ask.adapter, None))
                assert abs(own - base) > 10 * CLOSE


class Repetitions(Feature):
    """No two neighbouring tokens repeat, in prompt and answer, except where a grammar requires it. XTC, top-n-sigma and
    a dynamic temperature are in the same requests, except with beams."""

    def ask(self, ask: Ask, number: int) -> Ask:
        ask = ask.sampling(dry_multiplier=1e6, dry_allowed_length=1, dry_sequence_breakers=[])
        if ask.params.beam_width is not None:
            return ask
        return ask.sampling(top_n_sigma=1.9, xtc_probability=0.2, dynatemp_range=0.3)

    def check(self, results: Sequence[Result], run: Run) -> None:
        pairs = 0
        for result in results:
            without = run.alone(result.ask.sampling(dry_multiplier=0.0))
            pairs += sum(repeated_pairs(without, answer) for answer in without.answers)
            if result.ask.params.structured is None and not result.ask.tools:
                assert not any(repeated_pairs(result, answer) for answer in result.answers)
        assert pairs or not run.alone.trained


def repeated_pairs(result: Result, answer: CompletionOutput) -> int:
    """The number of pairs of adjacent tokens of the answer that occurred before."""
    tokens = [*result.output.prompt_token_ids, *answer.token_ids]
    pairs = list(itertools.pairwise(tokens))
    before = len(result.output.prompt_token_ids) - 1
    return sum(pairs[place] in pairs[:place] for place in range(before, len(pairs)))


class Images(Feature):
    """Each request reads its own image. The batch has several images, one of them twice, and requests without any."""

    def ask(self, ask: Ask, number: int) -> Ask:
        return replace(ask, image=file_of(60 + 15 * (number % 2), 90, number % 2))

    def check(self, results: Sequence[Result], run: Run) -> None:
        images = [result.ask.image for result in results]
        assert None not in images and 1 < len({*images}) < len(images)
        for result in results:
            assert result.ask.image is not None
            other = file_of(*Image.open(io.BytesIO(result.ask.image)).size, seed=2)
            for answer in result.answers:
                own, wrong = (run.alone.logprobs(result, answer, result.ask.adapter, each) for each in (None, other))
                assert max(abs(one - another) for one, another in zip(own, wrong, strict=True)) > 10 * CLOSE


def file_of(width: int, height: int, seed: int) -> bytes:
    """The file of a picture."""
    stream = io.BytesIO()
    picture(width, height, seed).save(stream, "PNG")
    return stream.getvalue()


class PrefixCache(Feature):
    """The second time, prompts come from the cache, and the answers are those of an engine without one."""

    def options(self) -> dict[str, Any]:
        return {"prefix_cache": True}

    def check(self, results: Sequence[Result], run: Run) -> None:
        if run.repeated is not None:
            last = len(run.repeated.prompt_token_ids) - 1
            assert run.repeated.cached_tokens >= last - last % run.page > 0
            return
        first, second = run.cached
        assert any(result.output.cached_tokens > result.cached_before for result in results) or second > first
        assert all(result.output.cached_tokens for result in results)


class Preemption(Feature):
    """Requests lose their blocks to others and continue later, with the answers of an engine with enough blocks."""

    def check(self, results: Sequence[Result], run: Run) -> None:
        assert any(result.output.request_id in run.preempted for result in results)


class Streaming(Feature):
    """The streams of a batch end with the answers that come at once; those of beams come complete."""

    def check(self, results: Sequence[Result], run: Run) -> None:
        for result in results:
            assert result.streamed[-1] == [answer.text for answer in result.answers]
            for texts, longer in itertools.pairwise(result.streamed):
                assert all(after.startswith(before) for before, after in zip(texts, longer, strict=True))
            assert len(result.streamed) == 1 or result.ask.params.beam_width is None
        samples = [result for result in results if result.ask.params.beam_width is None]
        assert not samples or sum(len(result.streamed) for result in samples) > len(samples)


class Speculation(Feature):
    """Drafts are verified, some accepted and some rejected; beams get none."""

    def check(self, results: Sequence[Result], run: Run) -> None:
        drafts, right = run.drafts
        assert 0 < right < drafts


FEATURES: dict[str, Feature] = {
    "structured": Structured(),
    "tools": ToolCalls(),
    "beams": Beams(),
    "n": Several(),
    "logprobs": Logprobs(),
    "LoRA": Adapters(),
    "DRY": Repetitions(),
    "images": Images(),
    "prefix cache": PrefixCache(),
    "preemption": Preemption(),
    "streaming": Streaming(),
    "speculation": Speculation(),
}
OF_TEXT = [name for name in FEATURES if name != "images"]
"""The features that models have which read no images."""

PROMISED = {name: " ".join((feature.__doc__ or "").split()) for name, feature in FEATURES.items()}
