"""Ranks in DP attention, which share experts, answer as one process does."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, EngineConfig, SamplingParams
from kvern.engine.engine import Engine
from kvern.engine.step_ring import StepRing, read_steps
from kvern.errors import ConfigError, EngineDied
from kvern.models.loader import LoadOptions, load_model
from kvern.models.registry import spec_from_config
from kvern.models.share import WholeExperts, share_of
from kvern.ranks.ranks import dp_attention_rank
from kvern.request.outputs import RequestOutput
from kvern.runner.ranks.rank_limits import check_ranks
from kvern.spec.model import MoeSpec
from tests.support.draft_heads import write_eagle, write_medusa
from tests.support.families import make_checkpoint, make_config, similar_prompts
from tests.support.internals import core_of, engine_of
from tests.support.model_outputs import logits
from tests.support.peft_adapters import ATTENTION, make_adapter
from tests.support.rank_requests import ASKED
from tests.support.served import children_of, command_of, eventually, serving
from tests.support.speculation import AnyLength, Remembered
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]
SECONDS = 60.0
CPU = torch.device("cpu")
RANK = "kvern.serving.dp_attention_rank"
FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "glm4_moe", "dots1", "deepseek_v3", "qwen3_next")
"""With shared experts, behind gates, too; layers without experts; latents; states."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 128,
    "max_batch_tokens": 24,  # most prompts are computed in several steps
    "max_batch_requests": 6,
    "block_size": 4,
    "kv_cache_tokens": 140,  # requests are preempted
}
RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True}
ALL: dict[str, Any] = {
    "kv_tier": ("host:64MB",),
    "proposer": "ngram",
    "redundant_experts": 2,
    "rebalance_experts": "1ms",
}
"""Options that go with it."""
SPEC = spec_from_config(make_config("qwen3_moe").to_dict())
PROCESSORS = ("double",)
"""Custom ones, of requests of all kinds in the same batch."""
TEXTS: list[list[int]] = []
"""That the first rank guesses answers to be."""


@pytest.mark.parametrize(
    ("family", "size", "whole"),
    [
        ("qwen2_moe", 2, WholeExperts(3)),
        ("deepseek_v3", 3, WholeExperts()),
        *(
            pytest.param(family, 2, whole, marks=pytest.mark.nightly)
            for family in FAMILIES
            for whole in (None, WholeExperts())
        ),
    ],
)
def test_each_rank_computes_its_own_rows(family: str, size: int, whole: WholeExperts | None, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    prompts = [similar_prompts(100)[rank] for rank in range(size - 1)]  # the last has no rows

    def run(rank: int) -> torch.Tensor | None:
        ranks = dp_attention_rank(rank, size)
        ranks.connect(folder / "meeting", CPU, SECONDS)
        decoder = load_model(folder, LoadOptions(ranks=ranks, whole_experts=whole))
        assert ranks.dp_attention is not None
        if rank < len(prompts):
            ranks.dp_attention.agree(len(prompts[rank]), None)
            return logits(decoder, prompts[rank])
        ranks.dp_attention.agree(0, (0, 0, False))
        with torch.inference_mode():
            decoder.assist()
        return None

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    alone = load_model(folder)
    for prompt, own in zip(prompts, found, strict=False):
        assert own is not None
        assert (own - logits(alone, prompt)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("steps", "room"),
    [
        ([(3, (3, 0, False)), (5, (5, 0, False))], [5, 0]),
        ([(3, (3, 0, False)), (9, (1, 8, False)), (0, (0, 0, False))], [3, 8]),
        ([(3, (3, 0, False)), (900, None)], None),
        ([(0, (0, 0, False)), (2, (2, 0, False))], [2, 0]),
        ([(3, (3, 0, True)), (5, (5, 0, False))], [5, 0]),
        ([(3, (3, 0, True)), (9, (1, 8, False))], None),
    ],
    ids=[
        "decodes",
        "a prompt beside decodes",
        "a long prompt",
        "nothing",
        "plain decodes",
        "a prompt beside them",
    ],
)
def test_ranks_replay_what_has_room_for_each_or_launch_kernels(
    steps: list[tuple[int, tuple[int, int, bool] | None]], room: list[int] | None, tmp_path: Path
) -> None:
    size = len(steps)

    def run(rank: int) -> tuple[int, list[int] | None, list[float], list[float]]:
        dp_attention = dp_attention_rank(rank, size).dp_attention
        assert dp_attention is not None
        dp_attention.connect(tmp_path / "meeting", CPU, SECONDS, frozenset(), ordered=False, listener=None)
        count, own_room = steps[rank]
        most = dp_attention.agree(count, own_room)
        rows = torch.full((count, 1), float(rank))
        everybodys = dp_attention.gather(rows)
        return (
            most,
            dp_attention.room,
            everybodys[:, 0].tolist(),
            dp_attention.sum_scattered(everybodys, count)[:, 0].tolist(),
        )

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    counts = [count for count, _ in steps]
    gathered = [float(rank) for rank, count in enumerate(counts) for _ in range(count)]
    summed = [[float(rank * size)] * count for rank, count in enumerate(counts)]
    assert found == [(max(counts), room, gathered, own) for own in summed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"))
    return make_checkpoint("qwen3_moe", folder, vocab_size=288)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    names = enumerate(("one", "two"))
    return {name: str(make_adapter(folder, made / name, seed, target_modules=ATTENTION)) for seed, name in names}


@pytest.fixture(scope="module")
def ranked(folder: Path, adapters: dict[str, str], packages: None) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS | RANKS | ALL, adapters=adapters, logits_processors=PROCESSORS) as llm:
        engine: Any = engine_of(llm)
        engine.core._core.drafting = AnyLength(Remembered(TEXTS), engine.inputs.vocab_size)  # the other's is its own
        yield llm


@pytest.fixture(scope="module")
def alone(folder: Path, adapters: dict[str, str], packages: None) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, adapters=adapters, logits_processors=PROCESSORS) as llm:
        yield llm


def answers(llm: LLM) -> list[RequestOutput]:
    """All in one batch, twice: the second time prompts come out of the prefix cache."""
    prompts = [similar_prompts(280)[number % 6] for number in range(len(ASKED))]
    adapters = [(None, None, "one", "two", None)[number % 5] for number in range(len(ASKED))]
    return [output for _ in range(2) for output in llm.generate(prompts, list(ASKED.values()), adapter=adapters)]


def test_requests_at_home_answer_as_in_one_process(alone: LLM, ranked: LLM) -> None:
    expected = answers(alone)
    TEXTS[:] = [[*one.prompt_token_ids, *item.token_ids] for one in expected for item in one.outputs]
    for name, one, other in zip(list(ASKED) * 2, expected, answers(ranked), strict=True):
        assert [item.token_ids for item in other.outputs] == [item.token_ids for item in one.outputs], name
        assert [item.finish_reason for item in other.outputs] == [item.finish_reason for item in one.outputs], name
        for item, ours in zip(one.outputs, other.outputs, strict=True):
            for table, found_table in zip(item.logprobs or [], ours.logprobs or [], strict=True):
                wanted = [entry.logprob for entry in table.values()]
                assert [entry.logprob for entry in found_table.values()] == pytest.approx(wanted, abs=1e-4)
    statistics = ranked.statistics()
    assert statistics.preemptions > 0
    assert statistics.cached_tokens > 0
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens
    executor: Any = core_of(ranked)._executor
    assert executor._balance._placements != executor._worker.expert_placements(), "experts have moved"
    assert (statistics.running, statistics.waiting) == (0, 0)


def test_the_time_of_all_ranks_has_causes_and_their_steps_are_seen(ranked: LLM, tmp_path: Path) -> None:
    core: Any = core_of(ranked)
    core._ring = StepRing(tmp_path / "ring")
    began, before = time.monotonic(), ranked.statistics()
    answers(ranked)
    after, took = ranked.statistics(), time.monotonic() - began
    spent = [later - earlier for later, earlier in zip(after.seconds, before.seconds, strict=True)]
    assert min(spent) >= 0 and sum(spent) == pytest.approx(took, rel=0.2), "not once for each rank"
    assert max(spent[:-1]) > 0
    earlier, later = (sum(ranked.statistics().seconds) for _ in range(2))
    assert earlier < later, "it is idle meanwhile"
    steps = read_steps(tmp_path / "ring")
    assert sum(step.tokens for step in steps) == after.computed_tokens - before.computed_tokens
    assert sum(step.rows for step in steps) == after.scheduled - before.scheduled
    assert all(step.seconds > 0 for step in steps)
    core._ring = None


def test_a_prompt_goes_where_it_is_cached_and_others_where_less_is_to_be_done(ranked: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    prompts = [list(range(first, first + 70)) for first in (10, 90)]
    ranked.generate(prompts, params)
    again = [ranked.generate([[*prompt, 5]], params)[0] for prompt in prompts for _ in range(2)]
    assert [output.cached_tokens >= 64 for output in again] == [True] * 4


def test_blocks_come_back_from_a_tier_of_each_rank(ranked: LLM) -> None:
    prompts = [list(range(first, first + 100)) for first in range(20, 150, 25)]  # a rank has room for one
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True)
    first, *_, last = ([ranked.generate([prompt], params)[0] for prompt in prompts] for _ in range(4))
    assert [output.cached_tokens >= 64 for output in last] == [True] * len(prompts)
    assert [output.outputs[0].token_ids for output in last] == [output.outputs[0].token_ids for output in first]


def test_adapters_come_and_go_at_all_ranks(folder: Path, alone: LLM, ranked: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[number, 7, 9] for number in range(20, 24)]  # two at each rank
    for seed in range(5, 8):  # each goes before the next comes
        path, found = str(make_adapter(folder, tmp_path / str(seed), seed, target_modules=ATTENTION)), []
        for llm in (alone, ranked):
            llm.load_adapter("late", path)
            engine = engine_of(llm)
            assert isinstance(engine, Engine)
            outputs = [engine.add(f"{seed}-{prompt[0]}", prompt, params, adapter="late") for prompt in prompts]
            llm.unload_adapter("late")  # those that wait have it still
            while engine.has_work:
                engine.step()
            found.append([output.outputs[0].token_ids for output in outputs])
        assert found[0] == found[1]
        assert found[1] != [output.outputs[0].token_ids for output in alone.generate(prompts, params)]


@pytest.mark.nightly
def test_adapters_change_shared_experts(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_moe", make_tiny_model(tmp_path), vocab_size=288)
    adapters = {"one": str(make_adapter(folder, tmp_path / "one", 1))}
    params, found = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), []
    for options in ({}, RANKS):
        with LLM(str(folder), **OPTIONS | options, adapters=adapters) as llm:
            outputs = llm.generate(similar_prompts(280), params, adapter=["one", None] * 3)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("model", "eagle", "medusa"))]
)
def test_each_rank_drafts_for_its_own_rows(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "model":  # the same, of which each rank has all experts
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    elif kind == "medusa":
        write_medusa(tmp_path, folder, drafted=41)
    else:
        write_eagle(tmp_path, folder, drafted=41 if kind == "eagle3" else None)
    params = [SamplingParams(temperature=value, seed=3, max_tokens=24, ignore_eos=True) for value in (0, 0.8, 1.2)] * 2
    found = []
    for options in ({}, RANKS):
        with LLM(str(folder), **OPTIONS | options, draft_model=str(tmp_path)) as llm:
            core: Any = core_of(llm)
            getattr(core, "_core", core).drafting = AnyLength(None, 288, 3)
            found.append([output.outputs[0].token_ids for output in llm.generate(similar_prompts(280), params)])
            assert llm.statistics().draft_tokens
            assert kind != "model" or llm.statistics().accepted_tokens > 50
    assert found[0] == found[1]


def test_answers_that_are_given_up_leave_the_others_as_they_are(folder: Path, alone: LLM, ranked: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = similar_prompts(280)
    expected = [output.outputs[0].token_ids for output in alone.generate(prompts, params)]
    engine = engine_of(ranked)
    assert isinstance(engine, Engine)
    outputs = [engine.add(f"one-{number}", prompt, params) for number, prompt in enumerate(prompts)]
    for _ in range(6):
        engine.step()
    engine.abort(["one-0", "one-3"])
    while engine.has_work:
        engine.step()
    found = [outputs[number].outputs[0].token_ids for number in (1, 2, 4, 5)]
    assert found == [expected[number] for number in (1, 2, 4, 5)]
    assert (ranked.statistics().running, ranked.statistics().waiting) == (0, 0)


def test_tokens_of_experts_are_counted_for_the_rows_of_all(ranked: LLM) -> None:
    before, computed = ranked.expert_tokens(), ranked.statistics().computed_tokens
    ranked.generate(similar_prompts(280), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    computed = ranked.statistics().computed_tokens - computed
    pairs = [sum(now) - sum(then) for now, then in zip(ranked.expert_tokens(), before, strict=True) if now]
    top_k = make_config("qwen3_moe").num_experts_per_tok
    assert pairs == [top_k * computed] * len(pairs)


@pytest.mark.parametrize("most", [[100], pytest.param([1, 100], marks=pytest.mark.nightly)], ids=["busy", "idle"])
def test_a_lost_rank_ends_the_engine_with_the_reason(folder: Path, most: list[int]) -> None:
    """The first rank has a part of the step, or takes part in another's alone."""
    before = children_of(os.getpid())
    with LLM(str(folder), **OPTIONS | RANKS) as ranked:
        (rank,) = [child for child in children_of(os.getpid()) if child not in before and RANK in command_of(child)]
        os.kill(rank, signal.SIGKILL)
        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in most]
        with pytest.raises(EngineDied, match="it lost rank 1, which ended with a signal, SIGKILL"):
            ranked.generate([[1, 2, number] for number in range(len(most))], params)


@pytest.mark.nightly
def test_streams_go_on_when_a_rank_ends(folder: Path, alone: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=100, ignore_eos=True)
    expected = alone.generate(["a dog"], params)[0].outputs[0].text
    flags = ("-tp", "2", "--enable-expert-parallel", "--enable-dp-attention", "--threads", "1", "--device", "cpu")
    with serving(str(folder), *flags, "--dtype", "float32", "--max-model-len", "128") as served:
        client = served.client().with_options(timeout=120)
        extra = {"ignore_eos": True}
        asked: dict[str, Any] = {"model": str(folder), "prompt": "a dog", "max_tokens": 100, "extra_body": extra}
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(client.completions.create, temperature=0.8, seed=9, **asked)
            eventually(lambda: served.figure("generation_tokens_total") > 20)
            (rank,) = [child for child in children_of(served.engine_pid()) if RANK in command_of(child)]
            os.kill(rank, signal.SIGKILL)
            assert text.result(120).choices[0].text == expected
        assert served.figure("engine_restarts_total") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 1}, "enable_dp_attention is on, and tensor_parallel_size is 1: raise it"),
        (
            {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_dp_attention": False},
            "engines beside each other share no experts; .* give tensor_parallel_size 2 and enable_dp_attention",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2 and enable_dp_attention are not possible together"),
        ({"draft_model": "mtp"}, "draft_model mtp and enable_dp_attention"),
        ({"target_itl": "20ms"}, "target_itl and enable_dp_attention"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused_by_name(options: dict[str, Any], reason: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_ranks(EngineConfig(model=str(folder), **{"device": "cpu", **RANKS, **options}), folder, SPEC)


def test_models_whose_experts_cannot_be_shared_so_are_refused() -> None:
    llama = spec_from_config(make_config("llama").to_dict())
    with pytest.raises(ConfigError, match="llama has no experts: leave enable_dp_attention off, or use data_parallel"):
        share_of(llama, 2, dp_attention=True)
    first = SPEC.layers[0]
    assert isinstance(first.mlp, MoeSpec)
    latent = replace(SPEC, layers=(replace(first, mlp=replace(first.mlp, latent=8)),))
    with pytest.raises(ConfigError, match="qwen3_moe has experts over narrower rows"):
        share_of(latent, 2, dp_attention=True)
    beside = replace(SPEC, layers=(replace(first, experts=first.mlp),))
    with pytest.raises(ConfigError, match="qwen3_moe has experts beside MLPs"):
        share_of(beside, 2, dp_attention=True)
