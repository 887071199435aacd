"""Two ranks as threads that run in turn, because the interpreter of Triton is not thread-safe."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern import EngineConfig
from kvern.kernels.norm import add_rms_norm
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.ranks.ranks import Ranks
from kvern.ranks.stages import WHOLE, Stage
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.runner.plan import agree, lay_out
from kvern.runner.startup import Startup
from kvern.runner.worker import Worker
from tests.support.kernels.device_engines import OPTIONS

SECONDS = 120.0
CPU = torch.device("cpu")
PROMPTS = [5, 9, 17, 33, 2], [3, 1, 4]
STEPS = [[0], [0], [0, 1], [0, 1]]
"""The rows of each step: prompts, one decode, a prompt with a decode, two decodes."""


class Turns(Ranks):
    """A rank that is a thread and releases its turn only while it waits, because Triton's interpreter is not
    thread-safe.
    """

    def __init__(self, rank: int, turn: threading.Lock, stage: Stage = WHOLE) -> None:
        super().__init__(rank, 2, stage)
        self._turn = turn
        self.joined = [0][:0]
        """Rows of sums that a norm joined."""
        self.shown = [0][:0]
        """Columns that were put side by side."""

    def _waiting(self, call: Callable[..., Tensor], *given: Any) -> Tensor:
        self._turn.release()
        try:
            return call(*given)
        finally:
            self._turn.acquire()

    def group_sum(self, x: Tensor) -> Tensor:
        return self._waiting(super().group_sum, x)

    def beside(self, x: Tensor, width: int | None = None) -> Tensor:
        self.shown.append(x.shape[1])
        return self._waiting(super().beside, x, width)

    def gather(self, x: Tensor) -> Tensor:
        return self._waiting(super().gather, x)


class Peers:
    """Sums of up to two rows, as `PeerSums` makes them, without memory of each other."""

    def __init__(self, ranks: Turns) -> None:
        self._ranks = ranks

    def takes(self, x: Tensor) -> bool:
        return x.shape[0] <= 2

    def sum(self, x: Tensor) -> Tensor:
        return self._ranks.group_sum(x)

    def sum_norm(self, x: Tensor, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        self._ranks.joined.append(x.shape[0])
        return add_rms_norm(hidden, self._ranks.group_sum(x), weight, epsilon)


def together(folder: Path, compute: Callable[[Turns], Any], stage: Stage = WHOLE) -> list[tuple[Any, Turns]]:
    """The results of two ranks, and the ranks; they meet in the folder and sum in each other's memory."""
    turn = threading.Lock()

    def run(rank: int) -> tuple[Any, Turns]:
        ranks = Turns(rank, turn, stage)
        ranks.connect(folder / "meeting", CPU, SECONDS)
        ranks.peers = Peers(ranks)  # type: ignore[assignment]
        with turn:
            return compute(ranks), ranks

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def sampled(
    folder: Path, ranks: Ranks, steps: Sequence[Sequence[int]] = STEPS, **options: Any
) -> list[list[list[int]]]:
    """The tokens of a few steps."""
    config = EngineConfig(model=str(folder), **OPTIONS | {"device": "cpu"} | options)
    spec = spec_from_config(read_config(folder))
    worker = Worker(config, folder, spec, CPU, Startup(), ranks=ranks)
    plan = agree([worker.probe()], config, spec)
    worker.build(lay_out([worker.load(plan)], plan, config))
    asked = [
        RequestSpec(f"{row}", PromptInput(list(prompt)), ResolvedParams(temperature=0.0), 8)
        for row, prompt in enumerate(PROMPTS)
    ]
    known = [0] * len(PROMPTS)
    found = []
    for number, rows in enumerate(steps):
        joined, scheduled = [], []
        for row in rows:
            prompt, start = PROMPTS[row], known[row]
            if not start:
                blocks = list(range(1 + 4 * row, 5 + 4 * row))
                joined.append(NewRequest(row, asked[row], asked[row].params, 0, list(prompt), blocks))
            known[row] = start + 1 if start else len(prompt)
            scheduled.append(ScheduledTokens(row, start, known[row] - start, 1))
        output = SchedulerOutput(number, joined=joined, scheduled=scheduled)
        found.append(worker.runner.execute(output).result().token_ids)
    return found
