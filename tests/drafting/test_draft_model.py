"""A second model's drafts: answers stay as they are, and its keys are right whatever happens to rows and blocks."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.layers.linear_method import LinearMethod
from kvern.runner.captured_decodes import CapturedDecodes
from tests.support.drafting_requests import EVERYTHING, PROMPTS
from tests.support.internals import check_integrity, core_of, drafter_of, set_depth, vocab_size_of
from tests.support.outputs import answer_logprobs, tokens_and_texts
from tests.support.peft_adapters import make_adapter
from tests.support.speculation import AnyLength

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "block_size": 4}
SMALL: dict[str, Any] = OPTIONS | {"max_batch_requests": 4, "kv_cache_tokens": 96, "max_batch_tokens": 7}


def guessing(folder: Path, draft: Path, most: int = 5, **options: Any) -> LLM:
    """An engine that guesses any number of drafts, now and then none, whether they pay or not."""
    llm = LLM(str(folder), draft_model=str(draft), **options)
    core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), most)
    return llm


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's files, but for weights, which are random and others."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("draft") / "other"
    shutil.copytree(tiny_model, folder)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, path)
    return folder


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), kv_cache_tokens=512, max_batch_requests=8, **OPTIONS) as llm:
        yield llm


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("same", "compiled"),
    [
        (True, True),
        (False, False),
        *(pytest.param(same, not same, marks=pytest.mark.nightly) for same in (True, False)),
    ],
)
def test_every_parameter(same: bool, compiled: bool, plain: LLM, tiny_model: Path, other_model: Path) -> None:
    prompts = [PROMPTS[index % 3] for index in range(len(EVERYTHING))]
    expected = plain.generate(prompts, EVERYTHING)
    draft = tiny_model if same else other_model
    sizes: dict[str, Any] = {"kv_cache_tokens": 512, "max_batch_requests": 8, "cpu_kernels": compiled}
    with guessing(tiny_model, draft, **OPTIONS, **sizes) as llm:
        found = llm.generate(prompts, EVERYTHING)
        statistics = llm.statistics()
        check_integrity(llm)
    assert tokens_and_texts(found) == tokens_and_texts(expected)
    assert list(answer_logprobs(found)) == pytest.approx(list(answer_logprobs(expected)), abs=1e-4)
    assert statistics.draft_tokens > 100
    assert statistics.accepted_tokens > 100 if same else statistics.accepted_tokens < statistics.draft_tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [1, 2])
def test_its_keys_are_right_whatever_happens(depth: int, tiny_model: Path) -> None:
    """The model guesses for itself: a draft is wrong if and only if it read keys that are not its own.

    Prompts come in pieces, begin alike, lose their blocks and get them again; the drafter falls behind and catches up.
    """
    prompts = [[5, 9, 17, 33, 2, 81] * 4, [5, 9, 17, 33, 2, 81] * 2 + [7, 8], [100] * 10, [5, 9, 17, 33]] * 3
    params = [
        SamplingParams(temperature=0.9 * (index % 2), seed=index, n=1 + index % 2, max_tokens=20, ignore_eos=True)
        for index in range(len(prompts))
    ]
    with LLM(str(tiny_model), **SMALL) as llm:
        expected = tokens_and_texts(llm.generate(prompts, params))
    with guessing(tiny_model, tiny_model, **SMALL) as llm:
        set_depth(llm, depth)
        assert tokens_and_texts(llm.generate(prompts, params)) == expected
        assert tokens_and_texts(llm.generate(prompts[::-1], params[::-1])) == expected[::-1]
        statistics = llm.statistics()
    assert statistics.preemptions > 0 and statistics.cached_tokens > 0
    assert statistics.draft_tokens > 200
    assert statistics.accepted_tokens == statistics.draft_tokens


def test_kernels_draft_several_tokens_in_one_call(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows that go on; a draft is wrong if and only if it read keys that are not its own."""
    calls: list[tuple[int, int]] = []
    repeat = CapturedDecodes.repeat

    def noted(decodes: CapturedDecodes, rows: Sequence[tuple[int, int]], times: int) -> bool:
        assert repeat(decodes, rows, times)
        calls.append((len(rows), times))
        return True

    monkeypatch.setattr(CapturedDecodes, "repeat", noted)
    options: dict[str, Any] = {"kv_cache_tokens": 512, "max_batch_requests": 4, "cpu_kernels": True}
    with guessing(tiny_model, tiny_model, **OPTIONS, **options) as llm:
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
        llm.generate(PROMPTS, params)
        statistics = llm.statistics()
    assert statistics.accepted_tokens == statistics.draft_tokens > 50
    assert {rows for rows, _ in calls} >= {1, 2} and {times for _, times in calls} >= {1, 2, 3}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_and_stop_strings(plain: LLM, tiny_model: Path, tmp_path: Path) -> None:
    adapters = {"one": str(make_adapter(tiny_model, tmp_path / "one", 1, r=3))}
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=20, ignore_eos=True)
    names, found = ["one", None, "one"], []
    stops = [item.outputs[0].text[9:11] for item in plain.generate(PROMPTS, params)]
    stopping = [params.replace(stop=[stop]) for stop in stops]
    places: dict[str, Any] = OPTIONS | {"max_adapters": 1, "adapters": adapters, "kv_cache_tokens": 512}
    for llm in (LLM(str(tiny_model), **places), guessing(tiny_model, tiny_model, **places)):
        with llm:
            outputs = llm.generate(PROMPTS, params, adapter=names), llm.generate(PROMPTS, stopping)
            found.append([tokens_and_texts(output) for output in outputs])
    assert found[0] == found[1]


def test_who_cannot_guess_is_named(tiny_model: Path, other_model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(other_model, draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"draft_model .* cannot guess for .*: its tokenizer has other tokens: serve it apart"
    ):
        LLM(str(tiny_model), draft_model=str(draft), **OPTIONS)
    with pytest.raises(ConfigError, match=r"cannot guess for .*: its vocabulary of 4096 is larger than|other tokens"):
        LLM(str(tiny_model), draft_model="kvern-1m", **OPTIONS)
    with LLM(str(tiny_model), draft_model=str(draft), speculation="off", kv_cache_tokens=128, **OPTIONS) as llm:
        assert core_of(llm).drafting is None


def test_a_draft_is_quantized_as_is_asked(plain: LLM, tiny_model: Path) -> None:
    """Whatever the model is; answers are the model's."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = tokens_and_texts(plain.generate(PROMPTS, params))
    options: dict[str, Any] = {"kv_cache_tokens": 512, "max_batch_requests": 8, "draft_quantization": "int8"}
    with guessing(tiny_model, tiny_model, **OPTIONS, **options) as llm:
        drafter: Any = drafter_of(llm)
        names = {method.name for method in drafter._model.decoder.modules() if isinstance(method, LinearMethod)}
        assert tokens_and_texts(llm.generate(PROMPTS, params)) == expected
        assert llm.statistics().accepted_tokens > 0
    assert any("int8" in name.lower() for name in names), names


def test_the_draft_of_an_embedded_model_is_quantized() -> None:
    """It is read in half the time, and is right almost as often."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    options: dict[str, Any] = {"threads": 1, "kv_cache_tokens": 512, "max_model_len": 256, "dtype": "float32"}
    answers = []
    for more in ({}, {"speculation": "off"}):
        with LLM("kvern-12m", **options, **more) as llm:
            if not more:
                core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 5)
                drafter: Any = drafter_of(llm)
                names = {method.name for method in drafter._model.decoder.modules() if isinstance(method, LinearMethod)}
            answers.append(tokens_and_texts(llm.generate("Once upon a time", params)))
            if not more:
                assert llm.statistics().accepted_tokens > 0
    assert answers[0] == answers[1]
    assert any("int8" in name.lower() for name in names), names
    assert EngineConfig("kvern-12m", draft_model="kvern-1m").draft_format is None


@pytest.mark.parametrize("options", [{}, {"draft_model": "mtp"}])
def test_there_must_be_a_draft_to_quantize(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"draft_quantization is int8, and draft_model names .*: name a draft model"):
        EngineConfig("somewhere", draft_quantization="int8", **options)
