"""Engines of several processes answer as those of one do, and end together."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM
from kvern.config import EngineConfig
from kvern.engine.factory import build_core
from kvern.errors import ConfigError, EngineDied
from kvern.io import ray_nodes
from kvern.models.folder import model_folder
from kvern.request.outputs import RequestOutput
from kvern.runner.ranks import rank_processes
from kvern.runner.startup import Startup
from tests.support.internals import engine_of
from tests.support.rank_requests import (
    ALL,
    ASKED,
    OPTIONS,
    PLAIN,
    RANK,
    SEEDED,
    answers,
    check_streams,
    is_running,
    ranks_of,
)
from tests.support.served import SMALL, child_of, eventually, serving
from tests.support.speculation import AnyLength
from tests.support.tiers import figures, settle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def ranked(packages: None) -> Iterator[LLM]:
    with LLM(**OPTIONS | ALL, tensor_parallel_size=2) as llm:
        engine: Any = engine_of(llm)
        engine.core.drafting = AnyLength(None, engine.inputs.vocab_size, 3)
        yield llm


@pytest.fixture(scope="module")
def expected(packages: None) -> list[RequestOutput]:
    with LLM(**OPTIONS | ALL) as alone:
        return answers(alone)


def check(expected: list[RequestOutput], found: list[RequestOutput]) -> None:
    for name, one, other in zip(list(ASKED) * 2, expected, found, strict=True):
        assert [item.token_ids for item in other.outputs] == [item.token_ids for item in one.outputs], name
        for item, ours in zip(one.outputs, other.outputs, strict=True):
            for table, found_table in zip(item.logprobs or [], ours.logprobs or [], strict=True):
                assert list(table) == list(found_table)
                wanted = [entry.logprob for entry in table.values()]
                assert [entry.logprob for entry in found_table.values()] == pytest.approx(wanted, abs=1e-4)


def check_blocks_come_back(llm: LLM) -> None:
    prompts = [list(range(100 * number + 50, 100 * number + 170)) for number in range(6)]  # more than the cache holds
    params = SEEDED.replace(max_tokens=8, logprobs=1)
    expected = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    settle(llm)
    found = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert figures(llm).hit_tokens, "blocks came back"
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert [output.logprobs for output in found] == [output.logprobs for output in expected]


def test_two_ranks_answer_as_one_process_does(
    ranked: LLM, expected: list[RequestOutput], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvern"):
        check(expected, answers(ranked))
    assert "not captured" not in caplog.text
    assert any(ranked.statistics().drafts_by_position), "drafts were verified"


def test_blocks_come_back_to_all_ranks_and_no_bit_depends_on_the_batch(ranked: LLM) -> None:
    check_blocks_come_back(ranked)


def test_a_rank_that_hangs_while_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ranks_of(os.getpid())
    monkeypatch.setattr(rank_processes, "PATIENCE", 0.0)
    monkeypatch.setattr(rank_processes, "TIMES", 0)
    with pytest.raises(ConfigError, match="rank 1 has not connected, long after the first one was ready for it"):
        LLM(tensor_parallel_size=2, **OPTIONS)
    assert ranks_of(os.getpid()) == before


class FarProcess:
    """A rank on a machine that its messages do not leave."""

    def __init__(self, *_: object, **__: object) -> None:
        self._ended = threading.Event()

    def start(self, *_: object) -> None:
        """It runs."""

    def wait(self) -> int:
        self._ended.wait()
        return -signal.SIGKILL

    def kill(self) -> None:
        self._ended.set()


@pytest.mark.timeout(300)
def test_a_rank_on_another_machine_that_never_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "NodeProcess", FarProcess)
    monkeypatch.setattr(ray_nodes, "own_group", object)
    monkeypatch.setattr(ray_nodes, "join_cluster", lambda: "127.0.0.1")
    monkeypatch.setattr(rank_processes, "PATIENCE", 1.0)
    config = EngineConfig(**OPTIONS, tensor_parallel_size=2, executor="ray")
    with pytest.raises(ConfigError, match=r"rank 1 has not connected, .* or the network between them"):
        build_core(config, model_folder(config), Startup())


def test_a_rank_whose_engine_was_killed_removes_the_folder_that_they_met_in(tmp_path: Path) -> None:
    folder = tmp_path / "kvern-met"
    folder.mkdir()
    (folder / "rank-1").touch()
    command = [sys.executable, "-m", RANK, f"ipc://{folder / 'rank-1'}", str(os.getppid())]  # who did not start it
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
        assert rank.wait(100) == 1
    assert not folder.exists()


def test_a_lost_rank_ends_an_engine_in_its_process_with_the_reason() -> None:
    before = ranks_of(os.getpid())
    with LLM(tensor_parallel_size=2, **OPTIONS) as llm:
        engine: Any = engine_of(llm)
        folder = Path(engine.core.executor._others.meeting).parent
        assert folder.exists()
        (rank,) = set(ranks_of(os.getpid())) - set(before)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDied, match="it lost rank 1, which ended with a signal, SIGKILL"):
            llm.generate("Once upon a time", PLAIN)
        assert ranks_of(os.getpid()) == before
        eventually(lambda: not folder.exists())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "size",
    [
        {"pipeline_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.nightly),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_stages_answer_as_one_process_does_and_end_together(
    size: dict[str, int], expected: list[RequestOutput]
) -> None:
    before = ranks_of(os.getpid())
    with LLM(**OPTIONS | ALL | size) as llm:
        engine: Any = engine_of(llm)
        engine.core.drafting = AnyLength(None, engine.inputs.vocab_size, 3)
        check(expected, answers(llm))
        assert any(llm.statistics().drafts_by_position), "drafts were verified"
        check_blocks_come_back(llm)
        rank = next(rank for rank in ranks_of(os.getpid()) if rank not in before)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"it lost rank [0-3], which ended with a signal, SIGKILL"):
            llm.generate("Once upon a time", PLAIN)
    assert ranks_of(os.getpid()) == before


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["-tp", "-pp"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_a_rank_ends_or_hangs(how: signal.Signals, option: str) -> None:
    check_streams(how, option, "cpu", "8")


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_behind_its_engine() -> None:
    with serving(*SMALL, "-tp", "2") as served:
        engine = served.engine_pid()
        rank = child_of(engine, RANK)
        os.kill(rank, signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: not is_running(rank))


@pytest.mark.nightly
def test_an_engine_that_is_forgotten_leaves_no_process() -> None:
    before = ranks_of(os.getpid())
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    (rank,) = set(ranks_of(os.getpid())) - set(before)
    del llm
    gc.collect()
    assert not is_running(rank)
