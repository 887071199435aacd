"""Engines whose ranks have whole experts, which change their places; and what is told of the use of experts."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from kvern import LLM
from kvern.errors import EngineDied
from kvern.observe.metrics import Metrics, busiest_rows
from kvern.ranks.expert_placement import Placement, rank_loads
from kvern.ranks.ranks import Ranks
from kvern.runner.ranks.experts import ExpertBalance, Move, moves_between
from kvern.runner.torch_backend import TorchBackend
from tests.support.expert_requests import OPTIONS, answers
from tests.support.families import make_checkpoint
from tests.support.four_bit_checkpoints import GPTQ
from tests.support.internals import core_of
from tests.support.packers import gptq, store
from tests.support.served import eventually, serving
from tests.support.tiny_model import make_tiny_model

EXPERTS_ALONE = GPTQ | {"dynamic": {"-:.*self_attn": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in codes of four bits."""
    folder = tmp_path_factory.mktemp("mixtral")
    model = make_checkpoint("mixtral", folder / "model", intermediate_size=192)
    return store(model, folder, gptq, r"experts\.\d", EXPERTS_ALONE).quantized


def noted(function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        called.append(function.__name__)
        return function(*arguments)

    return call


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


def test_tokens_of_experts_are_counted(alone: LLM) -> None:
    before = alone.expert_tokens()
    computed = alone.statistics().computed_tokens
    answers(alone)
    first, second, last = (sum(now) - sum(then) for now, then in zip(alone.expert_tokens(), before, strict=True))
    assert first == second == 2 * (alone.statistics().computed_tokens - computed), "two experts a token"
    assert 0 < last <= first, "the last layer computes what is sampled behind"
    assert [len(layer) for layer in before] == [5, 5, 5]


@pytest.mark.nightly
def test_several_engines_tell_what_they_have_counted_together(folder: Path) -> None:
    with LLM(str(folder), data_parallel_size=2, **OPTIONS) as two:
        answers(two)
        first, second, last = map(sum, two.expert_tokens())
        assert first == second == 2 * two.statistics().computed_tokens
        assert 0 < last <= first


@pytest.mark.nightly
def test_stages_tell_what_all_of_them_have_counted(tmp_path: Path) -> None:
    """A step that samples nothing computes more rows in the last layer: here each prompt is computed in one step."""
    folder = str(make_checkpoint("glm4_moe", tmp_path))
    options = OPTIONS | {"max_batch_tokens": 256, "prefix_cache": False}
    with LLM(folder, **options) as one:
        answers(one)
        expected = one.expert_tokens()
    assert list(map(bool, expected)) == [False, True, True], "the first stage has no experts"
    with LLM(folder, pipeline_parallel_size=3, **options) as staged:
        answers(staged)
        assert staged.expert_tokens() == expected
        executor: Any = core_of(staged).executor
        executor._others._end._processes[1].kill()
        with pytest.raises(EngineDied, match="it lost rank 1, which ended with a signal, SIGKILL"):
            staged.expert_tokens()


def check_moves(folder: Path, expected: list[list[int]], stages: int = 1) -> None:
    options = {"enable_expert_parallel": True, "redundant_experts": 2, "rebalance_experts": "1ms"}
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": stages}
    with LLM(str(folder), **sizes, **OPTIONS, **options) as ranked:
        executor: Any = core_of(ranked).executor
        assert answers(ranked) == expected
        assert sum(ranked.expert_tokens()[0]) == 2 * ranked.statistics().computed_tokens
        placed, first = executor._balance._placements, executor._worker.expert_placements()
        assert {layer for layer in first if placed[layer] != first[layer]} == {0, 1, 2}, "experts have moved"
        assert answers(ranked) == expected


def test_ranks_whose_experts_move_answer_as_one_process_does(
    folder: Path, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(alone)
    called: list[str] = []
    for owner, name in ((Ranks, "hand"), (TorchBackend, "room")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), called))
    check_moves(folder, expected)
    assert called[:3] == ["hand", "hand", "room"], "what handing over takes is taken before the cache is"


@pytest.mark.nightly
def test_ranks_whose_plain_experts_move_answer_as_one_process_does(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    with LLM(str(folder), **OPTIONS) as llm:
        expected = answers(llm)
    check_moves(folder, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_whose_experts_move_answer_as_one_process_does(folder: Path, alone: LLM, stages: int) -> None:
    check_moves(folder, answers(alone), stages)


@pytest.mark.nightly
def test_ranks_with_parts_of_quantized_experts_answer_as_one_process_does(folder: Path, alone: LLM) -> None:
    with LLM(str(folder), tensor_parallel_size=2, **OPTIONS) as ranked:
        assert answers(ranked) == answers(alone)


def test_experts_move_where_that_makes_work_even() -> None:
    clock, counts = [0.0], [[10, 10, 10, 10], [0] * 4]
    balance = ExpertBalance({0: ((0, 2), (1, 3))}, 60, clock=lambda: clock[0])

    def due() -> list[Placement]:
        return list(balance.due(lambda: lambda: [list(layer) for layer in counts]).values())

    clock[0] = 61
    assert due() == [], "work is even"
    counts[0] = [110, 12, 90, 15]
    assert due() == [], "it is not time"
    clock[0] = 122
    (placement,) = due()
    assert max(rank_loads(placement, [100, 2, 80, 5])) == 102
    clock[0] = 183
    assert due() == [], "nothing happened since"


def test_moves_are_between_ranks_that_have_and_have_not() -> None:
    old, new = ((0, 1), (2, 0)), ((2, 1), (2, 0))
    assert moves_between(old, new) == [Move(1, 0, 0, 0)]
    assert moves_between(old, old) == []


def test_metrics_add_up_over_engines() -> None:
    metrics = Metrics("m")
    assert b"expert_tokens" not in generate_latest(metrics.registry)
    metrics.experts.count([[], [3, 4]])
    metrics.experts.count([[], [5, 4]])
    metrics.restarted()
    metrics.experts.count([[], [1, 0]])
    text = generate_latest(metrics.registry).decode()
    assert 'kvern:expert_tokens_total{expert="0",layer="1",model_name="m"} 6.0' in text
    assert 'expert="1",layer="1",model_name="m"} 4.0' in text


def test_the_closing_table_names_the_busiest_expert() -> None:
    assert busiest_rows([[], [0, 0]]) == []
    assert busiest_rows([[], [6, 1, 1, 0], [2, 2, 2, 2]]) == [
        ("busiest experts, of an even share", "2.00 on average, 3.00 of 0 in layer 1"),
        ("experts that nobody chose", "1 of 8"),
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_counts_experts_over_engines_that_follow_one_another(stages: str, tmp_path: Path) -> None:
    make_checkpoint("mixtral", make_tiny_model(tmp_path), vocab_size=288)
    experts = ("--enable-expert-parallel", "--rebalance-experts", "50ms", "--redundant-experts", "1")
    sizes = ("--threads", "1", "--dtype", "float32", "--device", "cpu", "--max-batch-requests", "4")
    with serving(str(tmp_path), "-tp", "2", "-pp", stages, *experts, *sizes, "--expert-counts") as served:

        def ask() -> None:
            extra = {"ignore_eos": True}
            served.client().completions.create(model=str(tmp_path), prompt="a dog", max_tokens=40, extra_body=extra)

        ask()
        eventually(lambda: served.figure("expert_tokens_total", layer="0") >= 2 * 40)
        before, engine = served.figure("expert_tokens_total", layer="0"), served.engine_pid()
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: served.figure("engine_restarts_total") == 1)
        assert served.figure("expert_tokens_total", layer="0") == before
        ask()
        eventually(lambda: served.figure("expert_tokens_total", layer="0") >= before + 2 * 40)
