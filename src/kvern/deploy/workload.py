"""A workload as token ids, and one run of it on an engine.

It is a workload of `kvern bench`, a file of token ids, or a load: a recorded file or a line of properties. Loads are
replayed at their arrivals; a run's cost is then the mean time of a request, otherwise the time of all.
"""

import contextlib
import hashlib
import os
import random
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from kvern.bench.percentile import percentile
from kvern.bench.replay import Replay
from kvern.bench.serving_data import Prompts
from kvern.bench.workloads import SUITES, WORKLOADS, resolve
from kvern.engine.engine import Engine
from kvern.errors import ConfigError
from kvern.loads.source import is_drawn
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import SamplingParams

ON_GPU = "mixed256"
ON_CPU = "rate=inf,requests=16,input=256,output=64"
"""The usual workloads."""
MOST_REQUESTS = 4096
"""Requests of a load that are measured."""
TEMPERATURE = 0.6


class Request(NamedTuple):
    """A prompt that arrives after so many seconds, and the tokens of its answer."""

    arrival: float
    prompt: list[int]
    output: int


class Workload(NamedTuple):
    """Requests, by arrival. `shares`: prompts have beginnings in common."""

    text: str
    requests: list[Request]
    shares: bool

    @property
    def at_once(self) -> bool:
        """True if all arrive together."""
        return self.requests[-1].arrival == 0

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and answer."""
        return [(len(request.prompt), request.output) for request in self.requests]

    def part(self, parts: int) -> "Workload":
        """Returns what one of several alike engines gets."""
        return self if parts == 1 else self._replace(requests=self.requests[::parts])


class Run(NamedTuple):
    """A run: its cost, and the 99th percentiles of times to first tokens and between tokens, in seconds."""

    seconds: float
    ttft: float
    itl: float
    tokens_per_second: float


def read_workload(text: str | None, vocabulary: int, context: int, on_gpu: bool) -> Workload:
    """Reads a workload; None: the usual one for the device. Raises ConfigError."""
    given, text = text, text or (ON_GPU if on_gpu else ON_CPU)
    if text in WORKLOADS or _has_token_ids(text):
        [found] = resolve((text,), vocabulary)
        requests = [Request(0.0, prompt, count) for prompt, count in zip(found.prompts, found.lengths, strict=True)]
        shares = text.startswith("shared")
    elif is_drawn(text) or os.path.exists(text):
        replay = Replay(text, MOST_REQUESTS, Prompts(vocabulary, random.Random(0)), 0, None)
        first = replay.requests[0].arrival
        requests = []
        for number, item in enumerate(replay.requests):
            prompt = replay.sample(number).prompt
            ids = [token for token in prompt if isinstance(token, int)]  # they all are, with a vocabulary
            requests.append(Request(item.arrival - first, ids, item.output_tokens))
        blocks = [block for item in replay.requests for block in item.blocks]
        shares = len(set(blocks)) < len(blocks)
    else:
        names = ", ".join(name for name in WORKLOADS if name not in SUITES)
        raise ConfigError(
            f"workload {text!r:.80} is unknown: choose one of {names}, a .jsonl file, or a load such as {ON_CPU}"
        )
    if given is None:
        requests = [_shortened(request, context) for request in requests]
    longest = max(len(request.prompt) + request.output for request in requests)
    if longest > context:
        raise ConfigError(f"workload {text:.80} has requests of {longest} tokens, above the model's context {context}")
    return Workload(text, requests, shares)


def _shortened(request: Request, context: int) -> Request:
    """Returns a request of the usual workload that fits a short context."""
    return Request(request.arrival, request.prompt[: context // 2], min(request.output, context // 4))


def _has_token_ids(text: str) -> bool:
    """True if the first line of a file is of token ids, and not of a load."""
    if is_drawn(text) or not os.path.isfile(text):
        return False
    with contextlib.suppress(OSError), Path(text).open("rb") as file:
        return b"prompt_token_ids" in file.readline(1 << 20)
    return False


def run_workload(engine: Engine, workload: Workload) -> Run:
    """Runs all requests at their arrivals, with nothing cached from earlier runs."""
    options = RequestOptions(namespace=hashlib.sha256(os.urandom(16)).digest()[:16])
    waiting = list(enumerate(workload.requests))[::-1]
    begins = dict[str, float]()
    last = dict[str, float]()
    seen = dict[str, int]()
    first: list[float] = []
    between: list[float] = []
    whole: list[float] = []
    began = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - began
        while waiting and waiting[-1][1].arrival <= now:
            number, request = waiting.pop()
            params = SamplingParams(max_tokens=request.output, temperature=TEMPERATURE, ignore_eos=True, seed=number)
            begins[str(number)] = now if workload.at_once else request.arrival
            engine.add(str(number), request.prompt, params, options)
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1][1].arrival - (time.perf_counter() - began)))
            continue
        changed = engine.step()
        now = time.perf_counter() - began
        for output in changed:
            key, count = output.request_id, len(output.outputs[0].token_ids)
            if count > seen.get(key, 0):
                if key in seen:
                    between.append((now - last[key]) / (count - seen[key]))
                else:
                    first.append(now - begins[key])
                seen[key] = count
                last[key] = now
            if output.finished:
                output.check()
                whole.append(now - begins[key])
    seconds = time.perf_counter() - began
    cost = seconds if workload.at_once else statistics.fmean(whole)
    rate = sum(request.output for request in workload.requests) / seconds
    return Run(cost, percentile(first, 99), percentile(between, 99) if between else 0.0, rate)
