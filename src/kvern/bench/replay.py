"""A recorded or drawn load as requests to a server: prompts of the same lengths that share the same blocks."""

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from kvern.bench.serving import LoadRun, Sample, Sender
from kvern.bench.serving_data import Prompts
from kvern.errors import ConfigError
from kvern.loads.request import BLOCK_TOKENS
from kvern.loads.source import read_load

MOST_TENANTS = 16
"""Tenants that have figures of their own."""
WORD = np.dtype("<u4")


class Replay:
    """The requests of a load. `seed` makes their tokens: another one shares nothing with what a server has cached."""

    def __init__(self, text: str, count: int | None, prompts: Prompts, seed: int, longest: int | None) -> None:
        """Reads the first `count` requests of a load, none of more than `longest` tokens. Raises ConfigError."""
        self.requests = list(itertools.islice(read_load(text), count))
        for number, request in enumerate(self.requests, 1):
            tokens = request.prompt_tokens + request.output_tokens
            if longest is not None and tokens > longest:
                what = f"request {number} of load {text} has {tokens} tokens, prompt and answer"
                raise ConfigError(f"{what}, and the server's limit is {longest}: raise its max_model_len, or drop it")
        self._prompts = prompts
        self._seed = seed

    async def run(self, sender: Sender, speed: float, concurrency: int | None) -> dict[str, LoadRun]:
        """Sends all at their times, `speed` times as fast; the outcomes of all, and those of each of a few tenants."""
        first = self.requests[0].arrival
        arrivals = [(request.arrival - first) / speed for request in self.requests]
        run = await sender.run(_Samples(self), arrivals, concurrency, ahead=False)
        tenants = dict.fromkeys(sorted(request.tenant for request in self.requests))
        parts = {f"tenant {name or 'unknown'}": run.of(name) for name in tenants}
        return {"replay": run} | (parts if 1 < len(parts) <= MOST_TENANTS else {})

    def sample(self, number: int) -> Sample:
        """Returns a request with its prompt."""
        request = self.requests[number]
        names = request.blocks or [f"of {number} {block}" for block in range(-(-request.prompt_tokens // BLOCK_TOKENS))]
        tokens = [token for name in names for token in self._block(name)][: request.prompt_tokens]
        return self._prompts.sample(tokens, request.output_tokens, request.tenant)

    def _block(self, name: int | str) -> list[int]:
        """Returns the tokens of a block, the same for the same name wherever the vocabulary has the same size."""
        known = self._prompts.range
        drawn = hashlib.shake_128(f"{self._seed} {name}".encode()).digest(WORD.itemsize * BLOCK_TOKENS)
        found: list[int] = (np.frombuffer(drawn, WORD) % len(known) + known.start).tolist()
        return found


class _Samples(Sequence[Sample]):
    """The requests of a replay; each prompt is made when it is asked for, as all together may fill the memory."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def __len__(self) -> int:
        return len(self._replay.requests)

    def __getitem__(self, number: int) -> Sample:  # type: ignore[override]
        return self._replay.sample(number)
