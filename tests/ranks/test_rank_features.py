"""Features of requests and of engines with models that are divided: each keeps its promise.

An engine of each division answers all batches; each has too little room for a batch, a prefix cache, and drafts.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvern import LLM, RequestOutput, SamplingParams
from kvern.cache.messages import PAGE_TOKENS
from kvern.engine.engine import Engine
from tests.support.combined_answers import check_same
from tests.support.combined_features import FEATURES, OF_TEXT, OPTIONS, Alone, Ask, Result, Run, at_once
from tests.support.combined_images import seeing_model
from tests.support.combined_requests import TOGETHER, asks_with, plain_asks, random_model, too_little_room
from tests.support.idle import core_here, is_idle
from tests.support.internals import engine_of
from tests.support.rank_features import DIVISIONS, OF_ENGINES, SEVERAL, models_of
from tests.support.speculation import AnyLength, Remembered

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
ASKED = [frozenset(["structured", "n", "logprobs"]), frozenset(["beams"]), frozenset(["prefix cache"])]
"""What features of engines are tried with."""
EVERYTHING = [features | {"prefix cache", "preemption", "streaming", "speculation"} for features in TOGETHER]


@pytest.fixture(autouse=True)
def hands_over_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.serving.choice.LEAST_HANDED_OVER", 65)


@dataclass
class Models:
    """Random models of families, and what requests get alone of an engine with some options; each is made once."""

    folder: Path
    _options: dict[str, dict[str, Any]] = field(default_factory=dict)
    _alone: dict[str, Alone] = field(default_factory=dict)

    def options(self, family: str | None, feature: str, division: str) -> dict[str, Any]:
        """Those of an engine with the family's model as the feature needs it, or with the embedded one."""
        if family is None:
            return {}
        if family not in self._options:
            changes = models_of(feature, division)[family]
            self._options[family] = random_model(family, self.folder / family, **changes)
        return self._options[family]

    def seeing(self, kind: str) -> dict[str, Any]:
        """Those of an engine with a model of a family that reads images."""
        if kind not in self._options:
            self._options[kind] = seeing_model(kind, self.folder / kind)
        return self._options[kind]

    def alone(self, **options: Any) -> Alone:
        key = repr(options)
        if key not in self._alone:
            self._alone[key] = Alone(**options)
        return self._alone[key]

    def check(self) -> None:
        for alone in self._alone.values():
            alone.check()


@pytest.fixture(scope="module")
def models(packages: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    made = Models(tmp_path_factory.mktemp("models"))
    yield made
    made.check()


class Divided:
    """An engine with a divided model, and what requests get without it."""

    def __init__(self, llm: LLM, alone: Alone, drafts: bool) -> None:
        self.llm, self.alone = llm, alone
        self._texts: list[list[int]] = []
        engine = engine_of(llm)
        self.drafts = drafts and isinstance(engine, Engine)
        """Whether drafts are verified however long they take; several engines decide themselves."""
        if drafts and isinstance(engine, Engine):
            proposer = None if llm.config.draft_model else Remembered(self._texts)
            drafting = AnyLength(proposer, engine.inputs.vocab_size, 3 if proposer is None else 0)
            core_here(llm).drafting = drafting  # the first rank's, of those with requests of their own

    def answered(self, asks: Sequence[Ask]) -> tuple[list[Result], Run]:
        """All of them in one batch of streams; then the last one that is a single sequence again, or with a tier a
        prompt of a page, at whose end states are kept.

        Three times: of two engines one then answers it for the second time.
        """
        known = [self.alone(ask).output for ask in asks]
        self._texts[:] = [[*each.prompt_token_ids, *answer.token_ids] for each in known for answer in each.outputs]
        before = self._counted()
        results = streams(self.llm, asks)
        preemptions, drafts, right = map(operator.sub, self._counted(), before)
        single, page = next(ask for ask in reversed(asks) if ask.params.sequences == 1), OPTIONS["block_size"]
        if self.llm.config.kv_tier:
            single, page = Ask("Tell me of a fox. " * 12, SamplingParams(temperature=0, max_tokens=4)), PAGE_TOKENS
        again = [at_once(self.llm, [single])[0].output for _ in range(3)]
        repeated = max(again, key=lambda output: output.cached_tokens)
        lost = {result.output.request_id for result in results} if preemptions else set()  # nobody says which of them
        return results, Run(lost, [], self.alone, (drafts, right), repeated, page)

    def _counted(self) -> tuple[int, int, int]:
        seen = self.llm.statistics()
        return seen.preemptions, seen.draft_tokens, seen.accepted_tokens

    def check(self, combinations: Sequence[frozenset[str]], times: int = 1) -> tuple[list[Result], Run]:
        """Requests of each combination in one batch with plain ones."""
        asks = plain_asks() + [ask for features in combinations for ask in asks_with(features, times)]
        results, run = self.answered(asks)
        for result in results:
            for answer, expected in zip(result.answers, self.alone(result.ask).answers, strict=True):
                check_same(answer, expected)
        for features in combinations:
            mine = [result for result in results if result.ask.features == features]
            assert mine
            for name in features:
                if name == "speculation" and not self.drafts:
                    assert self.llm.statistics().draft_tokens  # since the start
                else:
                    FEATURES[name].check(mine, run)
        return results, run


def streams(llm: LLM, asks: Sequence[Ask]) -> list[Result]:
    """All streams side by side, in turns."""
    running = {
        number: llm.stream_chat(ask.messages, ask.params, adapter=ask.adapter, **ask.tools)
        for number, ask in enumerate(asks)
    }
    outputs: dict[int, RequestOutput] = {}
    news: list[list[list[str]]] = [[] for _ in asks]
    while running:
        for number, stream in list(running.items()):
            output = next(stream, None)
            if output is None:
                del running[number]
            else:
                outputs[number] = output
                news[number].append([answer.text for answer in output.outputs])
    return [Result(ask, outputs[number], streamed=news[number]) for number, ask in enumerate(asks)]


@contextmanager
def divided(
    division: str, alone: Alone, asks: Sequence[Ask], drafts: bool, options: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Divided]:
    """An engine with too little room for these."""
    room = too_little_room(asks, alone)
    sizes = {"kv_cache_tokens": room, "max_model_len": room, "windowed_kv_cache": "off", "prefix_cache": True}
    with LLM(**alone.options | sizes | options | DIVISIONS[division]) as llm:
        yield Divided(llm, alone, drafts)
        assert not engine_of(llm).has_work
        assert not isinstance(llm._engine, Engine) or is_idle(llm)


def everything_with(division: str) -> list[frozenset[str]]:
    """Of two engines, or ranks with requests of their own, each has room for its half, as it may come."""
    several = division in SEVERAL or "enable_dp_attention" in DIVISIONS[division]
    together = frozenset(OF_TEXT) - ({"preemption"} if several else set())
    return [features & together for features in EVERYTHING]


class Engines:
    """One at a time, of the division that is asked for, with what every request of `OF_TEXT` needs."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._division: str | None = None
        self._open = ExitStack()

    def alone(self, division: str) -> Alone:
        family = next(iter(models_of("structured", division)), None)
        return self._models.alone(**self._models.options(family, "structured", division))

    def of(self, division: str) -> Divided:
        if division != self._division:
            self.close()
            asks = plain_asks() + [ask for features in everything_with(division) for ask in asks_with(features, 1)]
            options = {"proposer": "ngram"} if division in SEVERAL else {}
            made = divided(division, self.alone(division), asks, True, options)
            self._made = self._open.enter_context(made)
            self._division = division
        return self._made

    def close(self) -> None:
        self._division = None
        self._open.close()


@pytest.fixture(scope="module")
def engines(models: Models) -> Iterator[Engines]:
    made = Engines(models)
    yield made
    made.close()


def cells(division: str) -> Iterator[Any]:
    """Each feature, and all of them together."""
    everything = everything_with(division)
    for feature in OF_TEXT:
        marks = [pytest.mark.features(feature, division), pytest.mark.nightly]
        yield pytest.param(division, [frozenset([feature])], id=f"{feature}-{division}", marks=marks)
    together = frozenset[str]().union(*everything)
    marks = [pytest.mark.features(*together, division), pytest.mark.nightly]
    yield pytest.param(division, everything, id=f"everything-{division}", marks=marks)


@pytest.mark.parametrize(("division", "combinations"), [cell for division in DIVISIONS for cell in cells(division)])
def test_features_of_requests(division: str, combinations: list[frozenset[str]], engines: Engines) -> None:
    if combinations != [{"preemption"}]:
        engines.of(division).check(combinations)
        return
    asks = plain_asks() + asks_with(combinations[0], 4)  # with less room than the others' prompts take
    with divided(division, engines.alone(division), asks, True) as engine:
        engine.check(combinations, 4)


OF_FAMILIES = [
    pytest.param(
        feature,
        division,
        family,
        id="-".join(filter(None, (feature, division, family))),
        marks=[pytest.mark.features(feature, division), pytest.mark.nightly],
    )
    for feature in OF_ENGINES
    for division in DIVISIONS
    for family in models_of(feature, division) or [None]
]


@pytest.mark.parametrize(("feature", "division", "family"), OF_FAMILIES)
def test_features_of_engines(feature: str, division: str, family: str | None, models: Models) -> None:
    of_engine = OF_ENGINES[feature]
    model = models.options(family, feature, division) | {"adapters": {}}
    tier = {name: value for name, value in of_engine.options.items() if name == "kv_tier"}  # needs the prefix cache
    alone = models.alone(**model, **{name: value for name, value in of_engine.options.items() if name not in tier})
    asks = plain_asks() + [ask for features in ASKED for ask in asks_with(features, 2)]
    drafts = not of_engine.options.keys().isdisjoint(("proposer", "draft_model"))
    with divided(division, alone, asks, drafts, tier) as engine:
        results, run = engine.check(ASKED, 2)
        if of_engine.changes:
            plain = models.alone(**model)
            assert any(logprobs(result) != logprobs(plain(result.ask)) for result in results)
        if engine.drafts:
            assert 0 < run.drafts[1] < run.drafts[0]
        if feature == "deterministic":
            for result in results:
                assert logprobs(at_once(engine.llm, [result.ask])[0]) == logprobs(result)
        if feature == "KV tier":
            check_tier(engine.llm)


def with_images(division: str) -> list[frozenset[str]]:
    """Two of `everything_with`: samples with an adapter, and beams."""
    samples, _, beams, *_ = everything_with(division)
    return [samples | {"images"}, beams | {"images"}]


WITH_IMAGES = [
    pytest.param(
        division,
        id=division,
        marks=[pytest.mark.features(*frozenset().union(*with_images(division)), division), pytest.mark.nightly],
    )
    for division in DIVISIONS
]


@pytest.mark.parametrize("division", WITH_IMAGES)
def test_features_beside_images(division: str, models: Models) -> None:
    whole_experts = "enable_expert_parallel" in DIVISIONS[division]
    alone = models.alone(**models.seeing("qwen3_vl_moe" if whole_experts else "qwen3_vl"))
    asks = plain_asks() + [ask for features in with_images(division) for ask in asks_with(features, 1)]
    options = {"proposer": "ngram"} if division in SEVERAL else {}
    with divided(division, alone, asks, True, options) as engine:
        engine.check(with_images(division))


def logprobs(result: Result) -> list[Any]:
    return [answer.logprobs for answer in result.answers]


def check_tier(llm: LLM) -> None:
    """What a request left in the cache comes back behind others that needed all of it."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = list(range(20, 120))
    size = llm.config.kv_cache_tokens or 0
    others = [list(range(number, number + size - 1)) for number in (200, 1000)]
    [first] = llm.generate([prompt], params)
    for _ in range(4):  # a store may be late, and then the prompt is computed
        llm.generate(others, SamplingParams(max_tokens=1))
        [second] = llm.generate([prompt], params)
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        if second.cached_tokens:
            return
    pytest.fail("no page came back")
