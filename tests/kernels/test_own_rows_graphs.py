"""Ranks with rows of their own replay decodes of one size together; kernels and replays are interpreted here."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.worker.cuda_graph
import kvern.worker.worker
from kvern import LLM, EngineConfig, SamplingParams
from kvern.device.own_rows import OwnRows
from kvern.device.ranks import Ranks
from kvern.engine.factory import make_home_core
from kvern.engine.homes import take_turn
from kvern.kernel_list import KERNELS
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.request import PromptInput, RequestSpec
from kvern.sampling_params import ResolvedParams
from kvern.worker.cuda_graph import DecodedStep, DecodeGraph, DecodeGraphs
from kvern.worker.device_runner import DeviceRunner
from kvern.worker.executor import OwnRowsExecutor
from kvern.worker.plan import agree, lay_out
from kvern.worker.rank_wire import TakeTurn
from kvern.worker.startup import Startup
from kvern.worker.worker import Worker
from tests.families import make_checkpoint
from tests.kernels.test_device_engine import OPTIONS

pytestmark = [
    pytest.mark.usefixtures("few_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="no graphs"),
]
SECONDS = 120.0
TOKENS = 4
CPU = torch.device("cpu")
PROMPTS = [[[5, 9, 17, 33, 2], [3, 1, 4], [7, 8]], [[100, 101]]]
"""Those of each rank, which has other numbers of decodes in most steps."""


class Baton(Ranks):
    """A thread of several, of which one runs at a time but while it waits: Triton's interpreter knows no threads."""

    def __init__(self, rank: int, size: int, turn: threading.Lock) -> None:
        super().__init__(rank, size)
        self._turn = turn

    def _waiting(self, call: Callable[..., Any], *given: Any) -> Any:
        self._turn.release()
        try:
            return call(*given)
        finally:
            self._turn.acquire()

    def numbers(self, number: int) -> list[int]:
        found: list[int] = self._waiting(super().numbers, number)
        return found

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._waiting(super().gather, x)
        return found

    def sum_scattered(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._waiting(super().sum_scattered, x)
        return found


class Repeated:
    """In the place of a CUDA graph: computes the captured step again, for as many rows on all ranks."""

    def __init__(self, own_rows: OwnRows, step: Callable[[], DecodedStep]) -> None:
        self._own_rows, self._step, self.outputs = own_rows, step, step()

    def replay(self) -> None:
        self._own_rows._most = self._own_rows._places = None  # as it was captured
        for target, source in zip(self.outputs, self._step(), strict=True):
            target.copy_(source)


def repeated(step: Any, *_: Any) -> tuple[Repeated, DecodedStep]:
    graph = Repeated(step.func.__self__._decoder.build.ranks.own_rows, step)
    return graph, graph.outputs


class Recorded(DecodeGraphs):
    """Notes how large the graphs are that it replays, and for how many requests."""

    replayed: list[tuple[int, int]]

    def _replay(self, slots: list[int], *given: Any) -> DecodeGraph:
        graph = super()._replay(slots, *given)
        outputs = DecodedStep(*(output.clone() for output in graph.outputs))  # of a GPU they are copied sooner
        self.replayed.append((len(outputs.sampled), len(slots)))
        return dataclasses.replace(graph, outputs=outputs)


class Nothing:
    def __init__(self, *_: Any) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of a model; engines made now have their batch on the device, and capture steps."""
    groups = frozenset(kernel.group for kernel in KERNELS if not kernel.group.startswith("hopper"))
    monkeypatch.setattr(kvern.worker.worker, "usable_kernels", lambda *_: (groups, groups))
    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(kvern.worker.cuda_graph, "capture", repeated)
    return make_checkpoint("qwen3_moe", tmp_path)


def run_rank(folder: Path, rank: int, turn: threading.Lock) -> tuple[dict[str, list[int]], list[tuple[int, int]]]:
    """The answers of a rank's own requests, and what it has replayed."""
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True, "device": "cpu"}
    config = EngineConfig(model=str(folder), **OPTIONS | options)
    own_rows = OwnRows(Baton(rank, 2, turn))
    ranks = Ranks(own_rows=own_rows)
    with turn:
        worker = Worker(config, folder, spec := spec_from_config(read_config(folder)), CPU, Startup(), ranks=ranks)
        plan = agree([worker.probe()], config, spec)
    ranks.connect(folder / "meeting", CPU, SECONDS)
    with turn:
        layout = lay_out([worker.load(plan)], plan, config)
        worker.build(layout)
        runner: Any = worker.runner
        assert isinstance(runner, DeviceRunner)
        runner._graphs = Recorded(runner._decoder, runner._attention, runner._rows, layout.block_size, 0)
        runner._graphs.replayed = []
        executor = OwnRowsExecutor(worker, own_rows)
        while runner.idle():
            pass
        core = make_home_core(config, folder, layout, executor)
        params = ResolvedParams(temperature=0.0)
        asked = [
            RequestSpec(f"{rank}-{number}", PromptInput(prompt), params, TOKENS + number)
            for number, prompt in enumerate(PROMPTS[rank])
        ]
        answers: dict[str, list[int]] = {}
        message = TakeTurn([(spec, []) for spec in asked])
        while sum(own_rows.ranks.numbers(core.has_work or bool(message.added))):
            for event in take_turn(core, executor, message):
                answers.setdefault(event.request_id, []).extend(event.token_ids)
            message = TakeTurn()
    return answers, runner._graphs.replayed


@pytest.mark.nightly
def test_ranks_replay_decodes_of_one_size_together(folder: Path) -> None:
    alone = LLM(str(folder), device="cpu", **OPTIONS)
    prompts = [prompt for own in PROMPTS for prompt in own]
    lengths = [TOKENS + number for own in PROMPTS for number in range(len(own))]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    expected = [output.outputs[0].token_ids for output in alone.generate(prompts, params)]
    turn = threading.Lock()
    with ThreadPoolExecutor(2) as threads:
        (first, replayed), (second, others) = threads.map(lambda rank: run_rank(folder, rank, turn), range(2))
    assert [*first.values(), *second.values()] == expected
    assert [size for size, _ in replayed] == [size for size, _ in others]
    counts = {count for _, count in others}
    assert {0, 1} <= counts, "the other has fewer rows, in some steps none"
