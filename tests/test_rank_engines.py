"""Engines of several processes answer as those of one do, and end together."""

import concurrent.futures
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.engine.factory import build_core
from kvern.errors import ConfigError, EngineDied
from kvern.models.folder import model_folder
from kvern.outputs import RequestOutput
from kvern.structured_output import StructuredOutput
from kvern.worker import rank_processes
from kvern.worker.startup import Startup
from tests import processors
from tests.served import ENGINE, SMALL, STORY, child_of, children_of, command_of, eventually, serving
from tests.speculation import AnyLength

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
RANK = "kvern.worker.rank_process"
OPTIONS: dict[str, Any] = {
    "model": "kvern-1m",
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 512,
    "max_batch_tokens": 24,  # most prompts are computed in several steps
    "max_batch_requests": 8,
    "block_size": 4,
    "kv_cache_tokens": 560,  # blocks leave it
}
ALL: dict[str, Any] = {
    "model": "kvern-12m",  # with a draft model of its own
    "deterministic": True,
    "target_itl": "1s",
    "logits_processors": ("follow", "double"),
    "kv_tier": "host memory",
}
"""Options that go with ranks, but for a proposer, which takes the draft model's place."""
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
PLAIN = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
SEEDED = PLAIN.replace(temperature=0.9, seed=5)
TOKENS = 400
STORY_SO_FAR = "The little dog ran to the big tree and the little cat ran to the small house. The little "
ASKED: dict[str, SamplingParams] = {
    "greedy": PLAIN,
    "seeded": SEEDED,
    "several": SEEDED.replace(n=3),
    "filters": SEEDED.replace(top_k=30, top_p=0.9, min_p=0.01, typical_p=0.95),
    "rare filters": SEEDED.replace(xtc_probability=0.5, top_n_sigma=2.0, dynatemp_range=0.3),
    "penalties": SEEDED.replace(presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3),
    "repetitions": PLAIN.replace(dry_multiplier=0.8),
    "biases": PLAIN.replace(logit_bias={20: 4.0}, bad_words=["the"], min_tokens=8),
    "log-probabilities": SEEDED.replace(logprobs=3, prompt_logprobs=2),
    "schema": SEEDED.replace(structured=StructuredOutput(json=SCHEMA), max_tokens=48, ignore_eos=False),
    "pattern": PLAIN.replace(structured=StructuredOutput(regex="(yes|no|maybe), [a-z ]{8,20}"), ignore_eos=False),
    "processors": SEEDED.replace(logits_processors={"double": {}}),
    "beams": PLAIN.replace(beam_width=3, n=2, max_tokens=8, temperature=None),
}


def answers(llm: LLM) -> list[RequestOutput]:
    """All of them in one batch, twice: the second time prompts come out of the prefix cache."""
    prompts = [STORY_SO_FAR + "Once upon a time " * (1 + index % 3) for index in range(len(ASKED))]
    first = llm.generate(prompts, list(ASKED.values()))
    return first + llm.generate(prompts, list(ASKED.values()))


def ranks_of(pid: int) -> list[int]:
    """The processes of an engine's other ranks, of which some may have ended."""
    return [child for child in children_of(pid) if RANK in command_of(child)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logits processors and a tier, installed for all processes that begin."""
    folder = processors.install(tmp_path_factory.mktemp("packages"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        root, known = str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), root, known])))
        yield


@pytest.fixture(scope="module")
def ranked(packages: None) -> Iterator[LLM]:
    with LLM(**OPTIONS | ALL, tensor_parallel_size=2) as llm:
        engine: Any = llm._engine
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
    engine: Any = llm._engine
    tier = engine.core.executor._noted._tier
    loaded = tier.loaded
    found = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert tier.loaded > loaded, "blocks came back"
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
    monkeypatch.setattr(rank_processes, "NodeProcess", FarProcess)
    monkeypatch.setattr(rank_processes, "own_group", object)
    monkeypatch.setattr(rank_processes, "join_cluster", lambda: "127.0.0.1")
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
        engine: Any = llm._engine
        folder = Path(engine.core.executor._others.meeting).parent
        assert folder.exists()
        (rank,) = set(ranks_of(os.getpid())) - set(before)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDied, match="it lost rank 1, which ended with a signal, SIGKILL"):
            llm.generate("Once upon a time", PLAIN)
        assert ranks_of(os.getpid()) == before
        eventually(lambda: not folder.exists())


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
        engine: Any = llm._engine
        engine.core.drafting = AnyLength(None, engine.inputs.vocab_size, 3)
        check(expected, answers(llm))
        assert any(llm.statistics().drafts_by_position), "drafts were verified"
        check_blocks_come_back(llm)
        rank = next(rank for rank in ranks_of(os.getpid()) if rank not in before)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"it lost rank [0-3], which ended with a signal, SIGKILL"):
            llm.generate("Once upon a time", PLAIN)
    assert ranks_of(os.getpid()) == before


def read(client: openai.OpenAI, seed: int, tokens: int) -> str:
    stream = client.completions.create(
        prompt="Once upon a time", seed=seed, stream=True, **STORY | {"max_tokens": tokens}
    )
    return "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["-tp", "-pp"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_a_rank_ends_or_hangs(how: signal.Signals, option: str) -> None:
    check_streams(how, option, "cpu", "8")


def check_streams(
    how: signal.Signals, option: str, device: str, timeout: str, tokens: int = TOKENS, slower: Sequence[str] = ()
) -> None:
    """That streams of two ranks on devices, of which one ends or hangs, are those of one process.

    `slower`: options by which a step takes long enough for a rank to be hit within its answers of so many `tokens`.
    """
    seeds, length = range(6), str(tokens + 112)
    given: dict[str, Any] = {"max_model_len": int(length), "dtype": "float32", "device": device}
    with LLM("kvern-1m", threads=1, kv_cache_tokens=16384, **given) as alone:
        params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in seeds]
        expected = [output.outputs[0].text for output in alone.generate(["Once upon a time"] * len(seeds), params)]
    small = [*SMALL, "--device", device, "--max-model-len", length, "--kv-cache-tokens", "16384", *slower]
    with serving(*small, "--engine-timeout", timeout, option, "2") as served:
        with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
            client = served.client()
            texts = [pool.submit(read, client, seed, tokens) for seed in seeds]
            eventually(lambda: served.figure("generation_tokens_total") > tokens / 4)
            engine = served.engine_pid()
            rank = child_of(engine, RANK)
            os.kill(rank, how)
            assert [text.result() for text in texts] == expected
        eventually(lambda: engine not in children_of(served.process.pid))  # another takes over
        eventually(lambda: len(ranks_of(served.engine_pid())) == 1)
        pids = [served.engine_pid(), *ranks_of(served.engine_pid())]
    for pid in [engine, rank, *pids]:
        eventually(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def test_a_rank_that_hangs_ends_behind_its_engine() -> None:
    with serving(*SMALL, "-tp", "2") as served:
        engine = served.engine_pid()
        rank = child_of(engine, RANK)
        os.kill(rank, signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: not is_running(rank))


def is_running(pid: int) -> bool:
    return RANK in command_of(pid) or ENGINE in command_of(pid)


@pytest.mark.nightly
def test_an_engine_that_is_forgotten_leaves_no_process() -> None:
    before = ranks_of(os.getpid())
    llm = LLM(tensor_parallel_size=2, **OPTIONS)
    (rank,) = set(ranks_of(os.getpid())) - set(before)
    del llm
    gc.collect()
    assert not is_running(rank)
