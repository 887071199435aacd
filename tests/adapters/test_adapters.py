"""LoRA adapters answer as PEFT's merged models do, in whatever company."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvern import LLM, SamplingParams
from kvern.adapters.bank import AdapterBank
from kvern.adapters.peft import read_adapter
from kvern.adapters.places import AdapterPlaces
from kvern.errors import InvalidRequest
from kvern.layers.adapted_linear import AdaptedRows, StackedLinear
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.models.loader import load_model
from kvern.request.sampling_params import StructuredOutput
from tests.support.families import make_checkpoint, reference_logits
from tests.support.internals import adapters_in_memory, check_integrity, core_of, engine_of
from tests.support.model_outputs import PROMPT, logits
from tests.support.new_weights import change_weights, perturbed
from tests.support.peft_adapters import ATTENTION, EVERYTHING, make_adapter, merge

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 17, 33, 2, 81], [5, 9, 17, 33, 2, 80, 40, 41, 42, 43, 44, 45], [100] * 10]
OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_batch_requests": 8, "kv_cache_tokens": 1024, "threads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "small": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 4},
    "pattern": {
        "r": 3,
        "lora_alpha": 6,
        "rank_pattern": {"o_proj": 7, r"layers\.0\.mlp\.down_proj": 2},
        "alpha_pattern": {"gate_proj": 1},
        "use_rslora": True,
    },
    "one-layer": {"target_modules": ATTENTION, "layers_to_transform": [1]},
}
NAMES = [None, *KINDS]


@pytest.fixture(scope="module")
def files(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of an adapter of each kind."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(tiny_model, folder / name, seed, **options)
        for seed, (name, options) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def expected(
    tiny_model: Path, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, list[list[int]]]:
    """What the model, and the model merged with each adapter, answers to each prompt alone."""
    folder = tmp_path_factory.mktemp("merged")
    models = {None: tiny_model} | {name: merge(tiny_model, path, folder / name) for name, path in files.items()}
    answers = {}
    for name, path in models.items():
        with LLM(str(path), **OPTIONS) as llm:
            answers[name] = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]
    return answers


@pytest.fixture(scope="module")
def make(tiny_model: Path, files: dict[str, Path]) -> Callable[..., LLM]:
    adapters = {name: str(path) for name, path in files.items()}
    return lambda **options: LLM(str(tiny_model), **(OPTIONS | {"adapters": adapters} | options))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "modules", "excluded"),
    [
        ("llama_bias", EVERYTHING, None),
        ("llama_bias", EVERYTHING, ["layers.1.self_attn.q_proj", "up_proj"]),
        pytest.param("llama_bias", EVERYTHING, r".*[.]0[.]mlp.*", marks=pytest.mark.nightly),
        ("gemma2", "all-linear", None),
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"], None),
        pytest.param(
            "gpt_neox", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], None, marks=pytest.mark.nightly
        ),
        pytest.param("starcoder2", ["q_proj", "c_fc", "c_proj"], None, marks=pytest.mark.nightly),
        pytest.param("cohere", r".*\.(self_attn\.[qk]_proj|mlp\.up_proj)", None, marks=pytest.mark.nightly),
        pytest.param("mixtral", ATTENTION, None, marks=pytest.mark.nightly),
    ],
)
def test_logits_agree_with_peft(family: str, modules: Any, excluded: Any, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", 3, r=5, target_modules=modules, exclude_modules=excluded)
    decoder = load_model(model)
    plain = logits(decoder, PROMPT)
    bank = AdapterBank(decoder, places=2, rank=8, kernels=False)
    bank.load(1, read_adapter(adapter, decoder.spec, bank.targets, 8, torch.float32))
    merged = merge(model, adapter, tmp_path / "merged")
    changed = logits(decoder, PROMPT, bank.select([1], [len(PROMPT)], None))
    assert (changed - reference_logits(merged, PROMPT)).abs().max() < 5e-5
    assert (changed - plain).abs().max() > 0.1, "the adapter changes too little to be seen"
    assert torch.equal(logits(decoder, PROMPT, bank.select([-1], [len(PROMPT)], None)), plain)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"max_batch_tokens": 8}, marks=pytest.mark.nightly),
        pytest.param({"max_adapters": 2}, marks=pytest.mark.nightly),
        {"max_adapters": 1, "prefix_cache": False},
        {"kv_cache_tokens": 96, "block_size": 4},
    ],
    ids=["all at once", "in chunks", "two places", "one place", "preempted"],
)
def test_mixed_in_one_batch_each_answers_as_its_merged_model(
    make: Callable[..., LLM], expected: dict[str | None, list[list[int]]], options: dict[str, Any]
) -> None:
    with make(**options) as llm:
        each = [(name, index) for index in range(len(PROMPTS)) for name in NAMES]
        for _ in range(2):  # the second time out of the prefix cache
            outputs = llm.generate([PROMPTS[index] for _, index in each], GREEDY, adapter=[name for name, _ in each])
            for (name, index), output in zip(each, outputs, strict=True):
                assert output.outputs[0].token_ids == expected[name][index], (name, index)
        assert len({tuple(answers[0]) for answers in expected.values()}) == len(NAMES)
        if "kv_cache_tokens" in options:
            assert llm.statistics().preemptions
        check_integrity(llm)


def test_beside_everything_else_that_a_request_may_ask(
    make: Callable[..., LLM], expected: dict[str | None, list[list[int]]]
) -> None:
    with make() as llm:
        several = SamplingParams(max_tokens=6, n=3, seed=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
        adapted, plain = llm.generate([PROMPTS[0]] * 2, several, adapter=["all", None])
        assert adapted.prompt_logprobs != plain.prompt_logprobs
        again = llm.generate(PROMPTS[0], several, adapter="all")[0]
        assert [item.token_ids for item in again.outputs] == [item.token_ids for item in adapted.outputs]
        *_, last = llm.stream(PROMPTS[1], GREEDY, adapter="small")
        assert last.outputs[0].token_ids == expected["small"][1]
        biased = GREEDY.replace(allowed_token_ids=[7, 8], max_tokens=3)
        assert set(llm.generate(PROMPTS[0], biased, adapter="pattern")[0].outputs[0].token_ids) <= {7, 8}
        first, other, again = llm.score([(PROMPTS[0], PROMPTS[1])] * 3, adapter=["all", None, "all"])
        assert first.logprob == pytest.approx(again.logprob, abs=1e-3) != other.logprob
        beams = SamplingParams(beam_width=3, n=2, max_tokens=5, logprobs=1)
        names = ["all", None, "small"]
        searched = [llm.generate(PROMPTS[0], beams, adapter=name)[0].outputs for name in names]
        together = llm.generate([PROMPTS[0]] * 3, [beams, GREEDY, beams], adapter=names)
        for index in (0, 2):
            found = [answer.token_ids for answer in together[index].outputs]
            assert (
                found
                == [answer.token_ids for answer in searched[index]]
                != [answer.token_ids for answer in searched[1]]
            )
        assert together[1].outputs[0].token_ids == expected[None][0]
        chosen = GREEDY.replace(ignore_eos=False, structured=StructuredOutput(choice=["fox", "dog"]))
        assert llm.generate(PROMPTS[0], chosen, adapter="all")[0].outputs[0].text in ("fox", "dog")
        message = [{"role": "user", "content": "the fox"}]
        assert llm.chat(message, GREEDY, adapter="all")[0].outputs[0].token_ids != (
            llm.chat(message, GREEDY)[0].outputs[0].token_ids
        )


def test_more_adapters_than_places_take_turns(make: Callable[..., LLM]) -> None:
    with make(max_adapters=2) as llm:
        places = core_of(llm).scheduler.adapters
        for name, loads in (("small", 1), ("all", 2), ("small", 2), ("pattern", 3), ("small", 3), ("all", 4)):
            llm.generate(PROMPTS[0], GREEDY, adapter=name)
            assert places.load_count == loads, name


def test_who_waits_for_a_place_is_passed_by_requests_without_an_adapter_alone(make: Callable[..., LLM]) -> None:
    with make(max_adapters=1) as llm:
        engine = engine_of(llm)
        long = GREEDY.replace(max_tokens=40)
        engine.add("first", PROMPTS[0], long, adapter="all")
        engine.step()
        engine.add("waits", PROMPTS[0], GREEDY, adapter="small")
        engine.add("behind", PROMPTS[0], GREEDY, adapter="all")
        engine.add("passes", PROMPTS[0], GREEDY)
        ended = []
        while engine.has_work:
            ended += [output.request_id for output in engine.step() if output.finished]
        assert ended == ["passes", "first", "waits", "behind"]


def test_places_keep_what_runs_and_give_up_what_was_used_longest_ago() -> None:
    places = AdapterPlaces(2)
    assert places.enter(7) == (0, True)
    assert places.enter(8) == (1, True)
    assert not places.fits(9)
    places.leave(8)
    places.leave(7)
    assert places.enter(8) == (1, False)
    assert places.enter(9) == (0, True)
    assert not places.fits(7)
    places.check_integrity([8, 9])
    places.leave(9)
    places.forget(9)
    places.check_integrity([8])
    assert places.enter(7) == (0, True)


def test_loaded_under_an_old_name_other_weights_find_nothing_cached(
    make: Callable[..., LLM], files: dict[str, Path], expected: dict[str | None, list[list[int]]]
) -> None:
    with make(adapters={}, max_adapters=2) as llm:
        prompts = [prompt * 3 for prompt in PROMPTS]
        for name in ("all", "pattern"):
            llm.load_adapter("mine", str(files[name]))
            for index, prompt in enumerate(PROMPTS):
                assert llm.generate(prompt, GREEDY, adapter="mine")[0].outputs[0].token_ids == expected[name][index]
            first = llm.generate(prompts, GREEDY, adapter="mine")
            again = llm.generate(prompts, GREEDY, adapter="mine")
            assert not any(output.cached_tokens >= 16 for output in first)
            assert all(output.cached_tokens >= 16 for output in again)
            llm.unload_adapter("mine")
        with pytest.raises(InvalidRequest, match="there is no adapter 'mine'"):
            llm.generate(PROMPTS[0], GREEDY, adapter="mine")


def test_an_unloaded_adapter_finishes_what_it_began(
    make: Callable[..., LLM], expected: dict[str | None, list[list[int]]]
) -> None:
    with make(max_batch_requests=1) as llm:
        engine = engine_of(llm)
        outputs = [engine.add(str(number), PROMPTS[0], GREEDY, adapter="all") for number in range(2)]
        engine.step()
        engine.unload_adapter("all")
        assert "all" not in engine.adapters
        with pytest.raises(InvalidRequest):
            engine.add("late", PROMPTS[0], GREEDY, adapter="all")
        while engine.has_work:
            engine.step()
        assert [output.outputs[0].token_ids for output in outputs] == [expected["all"][0]] * 2
        assert adapters_in_memory(engine) == len(KINDS) - 1


def test_an_adapter_that_overflows_spoils_no_row_but_its_own() -> None:
    cpu = torch.device("cpu")
    layer = StackedLinear(Linear(8, {"o": 6}, Build(torch.float32, cpu, 16)))
    layer.base.fill_random(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for index, size in enumerate((1.0, 1e38)):
        layer.load(index, {"o": (torch.full((2, 8), size), torch.randn(6, 2, generator=generator))})
    x = torch.rand(5, 8, generator=generator) + 1
    found = layer(x, AdaptedRows.of([0, 1, -1, 1, 0], cpu))
    assert not found[[1, 3]].isfinite().any()
    kept = torch.tensor([0, 2, 4])
    torch.testing.assert_close(found[kept], layer(x[kept], AdaptedRows.of([0, -1, 0], cpu)))
    assert found[kept].isfinite().all()


def test_adapters_stay_when_weights_change(tiny_model: Path, tmp_path: Path) -> None:
    """Their answers are those of an engine that starts with the new weights, also while a request runs."""
    adapters = {"one": str(make_adapter(tiny_model, tmp_path / "one", seed=1))}
    new = tmp_path / "new"
    shutil.copytree(tiny_model, new)
    save_file(perturbed(tiny_model), new / "model.safetensors")
    with LLM(str(new), adapters=adapters, **OPTIONS) as llm:
        expected = [llm.generate(PROMPTS, GREEDY, adapter=name) for name in ("one", None)]
    with LLM(str(tiny_model), adapters=adapters, **OPTIONS) as llm:
        before = llm.generate(PROMPTS, GREEDY, adapter="one")
        engine = engine_of(llm)
        running = engine.add("running", PROMPTS[0], GREEDY, adapter="one")
        while len(running.outputs[0].token_ids) < 4:
            engine.step()
        change_weights(llm, "1", new)
        while engine.has_work:
            engine.step()
        found = [llm.generate(PROMPTS, GREEDY, adapter=name) for name in ("one", None)]
        check_integrity(llm)
    assert running.outputs[0].token_ids[:4] == before[0].outputs[0].token_ids[:4]
    for outputs, wanted in zip(found, expected, strict=True):
        assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in wanted]
    assert before[1].outputs[0].token_ids != expected[0][1].outputs[0].token_ids
