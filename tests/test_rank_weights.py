"""Engines of several processes with quantized weights, adapters, and caches in 8 bits answer as those of one do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.structured_output import StructuredOutput
from tests.packers import awq, gptq, store
from tests.peft_adapters import make_adapter
from tests.test_quantized_four_bits import AWQ, GPTQ, LINEAR

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ASKED = {
    "greedy": GREEDY,
    "seeded": GREEDY.replace(temperature=0.8, seed=3),
    "pattern": GREEDY.replace(structured=StructuredOutput(regex="20[0-9]{2}-(0[1-9]|1[0-2])"), ignore_eos=False),
    "beams": SamplingParams(beam_width=3, n=2, max_tokens=6, temperature=None),
}
PROMPTS = ["The quick brown fox jumps over the lazy dog, and the dog", "over the lazy dog"]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 96,
    "max_batch_requests": 8,
    "max_batch_tokens": 24,
    "kv_cache_tokens": 1024,
}

TWO_RANKS = {"tensor_parallel_size": 2}
TWO_STAGES = {"pipeline_parallel_size": 2}


def answers(llm: LLM, adapters: list[str | None]) -> list[list[list[int]]]:
    """Every adapter with every way to be asked, in one batch and one after another: places change hands."""
    asked = [(prompt, params, name) for prompt in PROMPTS for params in ASKED.values() for name in adapters]
    prompts, params, names = map(list, zip(*asked, strict=True))
    outputs = llm.generate(prompts, params, adapter=names)
    outputs += [llm.generate(PROMPTS[0], GREEDY, adapter=name)[0] for name in (*adapters, *adapters)]
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def check(
    model: Path, adapters: Mapping[str, Path], divided: Mapping[str, int] = TWO_RANKS, **options: Any
) -> list[list[list[int]]]:
    """The answers of two ranks, or of the `divided` model, which are those of one process."""
    given = {name: str(path) for name, path in adapters.items()}
    found = []
    for ranks in ({}, divided):
        with LLM(str(model), adapters=given, **(OPTIONS | options | ranks)) as llm:
            found.append(answers(llm, [None, *adapters]))
            llm._engine.core.scheduler.check_integrity()
    assert found[1] == found[0]
    return found[0]


def test_packed_weights_adapters_and_codes_of_keys(tiny_model: Path, tmp_path: Path) -> None:
    adapters = {name: make_adapter(tiny_model, tmp_path / name, seed, r=4) for seed, name in enumerate(("one", "two"))}
    packed = store(tiny_model, tmp_path, gptq, LINEAR, GPTQ).quantized
    found = check(packed, adapters, kv_cache_dtype="fp8", max_adapters=1)
    assert len({str(answer) for answer in found[:3]}) == 3, "adapters change answers"


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("form", ["awq", "plain"])
def test_other_formats(form: str, dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    adapters = {"one": make_adapter(tiny_model, tmp_path / "one", 0, r=4)}
    model = tiny_model if form == "plain" else store(tiny_model, tmp_path, awq, LINEAR, AWQ).quantized
    check(model, adapters, kv_cache_dtype=dtype)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of all layers, and one of a layer that each stage but one knows by name alone."""
    folder = tmp_path_factory.mktemp("adapters")
    chosen: dict[str, dict[str, Any]] = {"one": {"r": 4}, "last": {"r": 3, "layers_to_transform": [1]}}
    return {
        name: make_adapter(tiny_model, folder / name, seed, **options)
        for seed, (name, options) in enumerate(chosen.items())
    }


@pytest.mark.parametrize(
    "divided", [TWO_STAGES, pytest.param(TWO_STAGES | TWO_RANKS, marks=pytest.mark.nightly)], ids=str
)
def test_each_stage_adds_its_layers_part_of_an_adapter_to_codes_of_its_own(
    divided: dict[str, int], adapters: dict[str, Path], tiny_model: Path
) -> None:
    found = check(tiny_model, adapters, divided, max_adapters=1, kv_cache_dtype="int8")
    assert len({str(answer) for answer in found[:3]}) == 3, "adapters change answers"


def test_adapters_come_and_go_while_stages_compute(adapters: dict[str, Path], tiny_model: Path) -> None:
    params = GREEDY.replace(max_tokens=30)
    with LLM(str(tiny_model), **(OPTIONS | TWO_STAGES), max_adapters=1) as llm:
        engine: Any = llm._engine
        expected = {}
        for name, path in adapters.items():
            llm.load_adapter(name, str(path))
            expected[name] = llm.generate(PROMPTS[0], params, adapter=name)[0].outputs[0].token_ids
        assert expected["one"] != expected["last"]
        engine.add("given up", PROMPTS[0], params, adapter="one")
        engine.step()
        engine.abort(["given up"])  # the step that loads its adapter has not begun here
        llm.unload_adapter("one")
        assert llm.generate(PROMPTS[0], params, adapter="last")[0].outputs[0].token_ids == expected["last"]
        llm.load_adapter("one", str(adapters["last"]))
        assert llm.generate(PROMPTS[0], params, adapter="one")[0].outputs[0].token_ids == expected["last"]
        assert len(engine.core.executor._worker._store._adapters) == 2
        engine.core.scheduler.check_integrity()
