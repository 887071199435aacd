"""Stages of a model: how layers are divided, what a stage loads and computes, and which requests share a step."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.errors import ConfigError
from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, load_model, outline_model, read_config
from kvern.models.registry import spec_from_config
from kvern.models.share import WholeExperts
from kvern.models.stages import balanced, check_stages, divide
from kvern.ranks.expert_placement import first_placement
from kvern.ranks.ranks import Ranks, ranks_of
from kvern.ranks.stages import Stage
from kvern.request.step import SchedulerOutput
from kvern.runner.ranks.experts import experts_of, move_experts
from tests.support.divided_families import STAGE_CHANGES
from tests.support.families import FAMILIES, make_checkpoint, make_config
from tests.support.gguf_files import folder_of, write_gguf
from tests.support.model_outputs import PROMPT, hidden_states, logits
from tests.support.rank_features import NOT_DIVIDED
from tests.support.rank_threads import load_with
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

SECONDS = 60.0
FEW = ("llama3", "gemma3", "gpt_neox", "qwen3_moe")
"""Tied embeddings, windows, tensors that are reordered first, experts."""


def logits_of_stages(folder: Path, stages: int, size: int, load: Callable[..., Decoder]) -> list[torch.Tensor]:
    """Of PROMPT, as each of `size` ranks of the last of so many stages has them; ranks are threads here."""
    layers = divide(outline_model(folder), stages)
    members = [ranks_of(number, size, layers) for number in range(stages * size)]  # there until all have ended

    def compute(ranks: Ranks) -> torch.Tensor:
        ranks.connect(folder / "meeting", torch.device("cpu"), SECONDS)
        run = logits if ranks.stage.is_last else hidden_states
        return run(load(folder, ranks=ranks), PROMPT)

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(compute, members))[-size:]


def check(folder: Path, stages: int, size: int = 1, load: Callable[..., Decoder] = load_with) -> None:
    expected = logits(load_model(folder), PROMPT)
    for found in logits_of_stages(folder, stages, size, load):
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FEW)
def test_stages_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    check(make_checkpoint(family, tmp_path), 2)


def test_stages_of_several_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    check(make_checkpoint("llama3", tmp_path), 2, 2)


def test_each_stage_moves_experts_of_its_own_layers_alone(tmp_path: Path) -> None:
    placements = dict.fromkeys(range(3), first_placement(5, 2, 1)[::-1])

    def load(folder: Path, ranks: Ranks) -> Decoder:
        decoder = load_model(folder, LoadOptions(ranks=ranks, whole_experts=WholeExperts(1)))
        layers = experts_of(decoder)
        assert layers.keys() == {*(ranks.stage.layers or ())}
        move_experts(layers, placements, ranks)
        assert {experts.share.placement for experts in layers.values()} == {placements[0]}
        return decoder

    check(make_checkpoint("mixtral", tmp_path), 2, 2, load)


def test_the_last_stage_learns_what_every_process_could_have(tmp_path: Path) -> None:
    members = [ranks_of(number, 2, [range(1), range(1, 2)]) for number in range(4)]

    def least(ranks: Ranks) -> list[int]:
        ranks.connect(tmp_path / "meeting", torch.device("cpu"), SECONDS)
        mine = 2 * ranks.stage.index + ranks.rank
        return ranks.least(torch.tensor([9 if place == mine else 10 + place for place in range(5)])).tolist()

    with ThreadPoolExecutor(len(members)) as threads:
        found = list(threads.map(least, members))
    assert found[2] == found[3] == [9, 9, 9, 9, 14]


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_divided_but_those_that_are_refused(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path, **STAGE_CHANGES.get(family, {}))
    spec = spec_from_config(read_config(folder))
    if family in NOT_DIVIDED:
        with pytest.raises(ConfigError, match=f"^pipeline_parallel_size is 2, and .* has {NOT_DIVIDED[family]}, which"):
            check_stages(spec, 2)
        return
    check_stages(spec, 2)
    check(folder, 2)


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 64,
    "max_batch_tokens": 16,
    "max_batch_requests": 4,
    "block_size": 4,
    "kv_cache_tokens": 192,  # of four sequences of 64 some have to give way
}


def tokens_of(folder: Path, **options: Any) -> list[list[int]]:
    """What is made of prompts of which some begin alike."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, number % 3] * (1 + number % 4) for number in range(8)]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    with LLM(str(folder), **OPTIONS | options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "deepseek_v3", "lfm2", "qwen3_next"])
def test_engines_in_stages_answer_as_one_process_does(family: str, tmp_path: Path) -> None:
    """Windows, experts, latents, and layers that keep states."""
    folder = make_checkpoint(family, tmp_path, **STAGE_CHANGES.get(family, {}))
    assert tokens_of(folder, pipeline_parallel_size=2) == tokens_of(folder)


@pytest.mark.nightly
def test_quantized_weights_are_divided(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", hidden_size=128, intermediate_size=256)
    expected = tokens_of(folder, quantization="int8")
    assert tokens_of(folder, pipeline_parallel_size=2, quantization="int8") == expected


@pytest.mark.nightly
def test_gguf_files_are_divided(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model", hidden_size=64, intermediate_size=96)
    check(folder_of(write_gguf(model, tmp_path, "Q8_0").file, tmp_path), 2)


def test_each_stage_has_a_layer_with_keys_and_values() -> None:
    assert balanced([1] * 8, 0, 0, 2, [0, 1, 2]) == [range(2), range(2, 8)]
    assert balanced([1] * 8, 0, 0, 2, [6, 7]) == [range(7), range(7, 8)]


@pytest.mark.parametrize(
    ("costs", "before", "behind", "expected"),
    [
        ([1, 1, 1, 1], 0, 0, [2, 2]),
        ([1, 1, 1, 1], 0, 2, [3, 1]),
        ([1, 1, 1, 1], 2, 0, [1, 3]),
        ([1, 1, 1, 1], 0, 9, [3, 1]),
        ([5, 1, 1, 1, 1, 1], 0, 0, [1, 5]),
        ([1, 1, 1, 1, 1, 1, 1], 0, 1, [2, 3, 2]),
        ([1, 1, 1], 0, 7, [1, 1, 1]),
    ],
)
def test_layers_are_cut_where_the_largest_stage_is_smallest(
    costs: list[int], before: int, behind: int, expected: list[int]
) -> None:
    found = balanced(costs, before, behind, len(expected), range(len(costs)))
    assert [place for places in found for place in places] == list(range(len(costs)))
    assert [len(places) for places in found] == expected


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=4, vocab_size=3000)
    assert divide(outline_model(folder), 2) == [range(3), range(3, 4)]
    folder = make_checkpoint("llama", tmp_path / "small", num_hidden_layers=4, vocab_size=64)
    assert divide(outline_model(folder), 2) == [range(2), range(2, 4)]


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_holds_its_layers_alone(tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    whole = load_model(folder)
    first, last = (
        load_model(folder, LoadOptions(ranks=Ranks(stage=Stage(index, 2, places))))
        for index, places in enumerate((range(1), range(1, 3)))
    )
    embedding, head = whole.embed_tokens.method.dequantize(), whole.lm_head.method.dequantize()
    assert torch.equal(first.embed_tokens.method.dequantize(), embedding)
    assert torch.equal(last.lm_head.method.dequantize(), head)
    both = first.weight_bytes + last.weight_bytes
    assert both == whole.weight_bytes + (embedding.nbytes if tied else 0)
    assert not hasattr(first, "lm_head") and hasattr(last, "embed_tokens") == tied


@pytest.mark.parametrize(
    ("family", "stages", "reason"),
    [
        ("llama", 4, "pipeline_parallel_size is 4, and llama has 3 layers that keep keys and values: lower it"),
        ("gemma3n", 2, "and gemma3n_text has several residual streams, which is not possible together yet"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(family: str, stages: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_stages(spec_from_config(make_config(family).to_dict()), stages)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0: it must be at least 1"),
        ({"pipeline_parallel_size": 8}, "pipeline_parallel_size is 8, and llama has 7 layers that keep"),
    ],
)
def test_what_stages_cannot_do_yet_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM("kvern-12m", **{"pipeline_parallel_size": 2, "device": "cpu", **options})


class TracedEngine(SimulatedEngine):
    """Remembers the requests of the steps that begin, and how many are then on their way."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.steps: list[set[str]] = []
        self.in_flight: list[int] = []
        self.tokens: list[int] = []

    def submit(self, output: SchedulerOutput) -> Any:
        self.steps.append(set(output.request_ids))
        self.tokens.append(output.token_count)
        self.in_flight.append(len(self.device.queue) + 1)
        return super().submit(output)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_prompt_leaves_a_decode_its_time_in_every_step(stages: int) -> None:
    """Also in steps without that decode, which is on its way through other stages and goes on behind them."""
    setup = Setup(stages=stages, depth=stages, max_model_len=300, spare_blocks=200, spare_budget=100, step_rows=6)
    engine = TracedEngine(setup)
    engine.add([1, 2], max_tokens=90)
    for _ in range(3):
        engine.step()
    engine.add(list(range(3, 203)), max_tokens=1)
    before = len(engine.tokens)
    while len(engine.tokens) < before + 20:
        engine.step()
    assert max(engine.tokens[before:]) <= 6


@pytest.mark.parametrize(("stages", "requests"), [(2, 4), (2, 5), (2, 2), (3, 6), (3, 4), (4, 8)])
def test_in_steady_decode_each_stage_has_a_step_of_other_requests(stages: int, requests: int) -> None:
    setup = Setup(stages=stages, depth=stages, slots=requests, max_model_len=100, spare_blocks=300, spare_budget=50)
    engine = TracedEngine(setup)
    for number in range(requests):
        engine.add([number % 3, 1, 2], max_tokens=60)
    while len(engine.steps) < 60:
        engine.step()
    assert set(engine.in_flight[20:]) == {stages}, "no stage is without a step"
    for begin in range(20, 50, stages):
        together = engine.steps[begin : begin + stages]
        taken = Counter(name for step in together for name in step)
        assert taken == Counter(f"{number}#0" for number in range(requests))
        sizes = [len(step) for step in together]
        assert max(sizes) - min(sizes) <= 1


def test_steps_are_even_again_when_requests_have_ended() -> None:
    setup = Setup(stages=2, depth=2, slots=8, max_model_len=100, spare_blocks=300, spare_budget=50)
    engine = TracedEngine(setup)
    first = [engine.add([number % 3, 1], max_tokens=60)[0] for number in range(8)]
    while len(engine.steps) < 21:
        engine.step()
    for request in [request for request in first if request.request_id in engine.steps[-1]][:3]:
        engine.finish(request)
    while len(engine.steps) < 40:
        engine.step()
    assert sorted(len(step) for step in engine.steps[-2:]) == [2, 3]
    assert set(engine.in_flight[-10:]) == {2}


def test_a_single_request_is_in_one_step_at_a_time() -> None:
    engine = TracedEngine(replace(Setup(), stages=2, depth=2))
    engine.add([0, 1, 2], max_tokens=10)
    engine.run()
    assert set(engine.in_flight) == {1}
