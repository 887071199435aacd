"""Engines of several processes with quantized weights, adapters, and caches in 8 bits answer as those of one do."""

from pathlib import Path
from typing import Any

import pytest

from kvern import LLM
from tests.support.four_bit_checkpoints import AWQ, GPTQ, LINEAR
from tests.support.internals import adapters_in_memory, engine_of
from tests.support.packers import awq, gptq, store
from tests.support.peft_adapters import make_adapter
from tests.support.rank_weights import GREEDY, OPTIONS, PROMPTS, TWO_RANKS, check_weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT


TWO_STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.nightly
def test_packed_weights_adapters_and_codes_of_keys(tiny_model: Path, tmp_path: Path) -> None:
    adapters = {name: make_adapter(tiny_model, tmp_path / name, seed, r=4) for seed, name in enumerate(("one", "two"))}
    packed = store(tiny_model, tmp_path, gptq, LINEAR, GPTQ).quantized
    found = check_weights(packed, adapters, kv_cache_dtype="fp8", max_adapters=1)
    assert len({str(answer) for answer in found[:3]}) == 3, "adapters change answers"


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("form", ["awq", "plain"])
def test_other_formats(form: str, dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    adapters = {"one": make_adapter(tiny_model, tmp_path / "one", 0, r=4)}
    model = tiny_model if form == "plain" else store(tiny_model, tmp_path, awq, LINEAR, AWQ).quantized
    check_weights(model, adapters, kv_cache_dtype=dtype)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of all layers, and one of a layer that each stage but one knows by name alone."""
    folder = tmp_path_factory.mktemp("adapters")
    chosen: dict[str, dict[str, Any]] = {"one": {"r": 4}, "last": {"r": 3, "layers_to_transform": [1]}}
    return {
        name: make_adapter(tiny_model, folder / name, seed, **options)
        for seed, (name, options) in enumerate(chosen.items())
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    "divided", [TWO_STAGES, pytest.param(TWO_STAGES | TWO_RANKS, marks=pytest.mark.nightly)], ids=str
)
def test_each_stage_adds_its_layers_part_of_an_adapter_to_codes_of_its_own(
    divided: dict[str, int], adapters: dict[str, Path], tiny_model: Path
) -> None:
    found = check_weights(tiny_model, adapters, divided, max_adapters=1, kv_cache_dtype="int8")
    assert len({str(answer) for answer in found[:3]}) == 3, "adapters change answers"


def test_adapters_come_and_go_while_stages_compute(adapters: dict[str, Path], tiny_model: Path) -> None:
    params = GREEDY.replace(max_tokens=30)
    with LLM(str(tiny_model), **(OPTIONS | TWO_STAGES), max_adapters=1) as llm:
        engine: Any = engine_of(llm)
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
        assert adapters_in_memory(engine) == 2
        engine.core.scheduler.check_integrity()
