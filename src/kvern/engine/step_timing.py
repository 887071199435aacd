"""A handful of steps, timed at start: what the engine predicts with before the steps of requests correct it."""

import itertools
import statistics
import time
from collections import deque

from kvern.cache.messages import NO_STATE, StateMessage, WindowMessage
from kvern.engine.step_costs import StepCosts
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import GrownTable, NewRequest, ScheduledTokens, SchedulerOutput, StepResult
from kvern.runner.executor import Executor
from kvern.runner.plan import Layout

DECODES = 16
"""Requests of a plain decode step, and beside each prompt."""
SIZES = (64, 256, 512, 1024, 2048)
"""Tokens of steps with a prompt, up to the first that takes LONGEST times a plain decode step, or LONG."""
LONGEST = 4
LONG = 0.2
"""Seconds: the same for any model, so that a slow machine starts none the less."""
CONTEXT = 2048
"""Keys before decodes and before a prompt, to see what reading them takes."""
PLAIN, MIXED = 7, 4
"""Steps of each kind. The first may compile, and behind the last the host launches nothing: they do not count."""


def time_steps(executor: Executor, layout: Layout) -> tuple[float, StepCosts] | None:
    """Seconds of a plain decode step, and the costs of steps with prompts; None if there can be no such steps.

    It is to be called before there are requests, whose rows and blocks it writes.
    """
    if min(layout.max_batch_requests, layout.least_blocks) < 2:
        return None
    timing = _Timing(executor, layout)
    if timing.longest < 2:
        return None
    requests = timing.requests
    plain = timing.seconds(0, None)
    rows: list[int] = []
    seconds: list[float] = []
    for size in SIZES:
        count = min(size - requests, timing.longest)
        if rows and (count + requests <= rows[-1] or seconds[-1] > min(LONGEST * plain, LONG)):
            break
        rows.append(count + requests)
        seconds.append(timing.seconds(0, (0, count)))
    largest, context = rows[-1] - requests, timing.context
    per_key = max(timing.seconds(context, None) - plain, 0.0) / (requests * context)
    per_pair = max(timing.seconds(0, (context, largest)) - seconds[-1], 0.0) / (largest * context)
    products = [took - per_pair * (count - requests) ** 2 / 2 for count, took in zip(rows, seconds, strict=True)]
    executor.forget()
    return plain, StepCosts(rows, [max(took, plain) for took in products], per_key, per_pair)


class _Timing:
    """Rows that have joined an executor's batch, for decodes and one prompt.

    `longest`: tokens that a prompt's step can have; `context`: tokens that may be before them, or before a decode.
    """

    def __init__(self, executor: Executor, layout: Layout) -> None:
        self._executor, self._depth = executor, layout.depth
        size, most = layout.block_size, layout.least_blocks
        rows = min(DECODES + 1, layout.max_batch_requests, most, max(2, most * size // (2 * CONTEXT)))
        blocks = min(most // rows, -(-layout.max_model_len // size))
        room = min(blocks * size, layout.max_model_len) - PLAIN
        self.requests = rows - 1
        self.context = max(1, min(CONTEXT, room // 2))
        self.longest = max(1, min(room - self.context, layout.max_batch_tokens - self.requests))
        self._steps = 0
        asked = RequestSpec("", PromptInput([0]), ResolvedParams(), 1)
        tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
        numbers = range(layout.window_tables)
        windows = [GrownTable(row, number, 0, table) for number in numbers for row, table in enumerate(tables)]
        self._extensions = WindowMessage(windows).by_name() if windows else {}
        if layout.states:
            states = [(row, row) for row in range(rows)]
            self._extensions |= StateMessage([(NO_STATE, state) for _, state in states], states).by_name()
        self._joining = [NewRequest(row, asked, asked.params, 0, [0], table) for row, table in enumerate(tables)]

    def seconds(self, context: int, prompt: tuple[int, int] | None) -> float:
        """Returns the median time of steps with all decodes after `context` tokens, and (start, count) of a prompt.

        As many steps are in flight as there will be.
        """
        ends: list[float] = []
        on_way: deque[StepResult] = deque()
        repeats = PLAIN if prompt is None else MIXED
        for step in range(repeats):
            scheduled = [ScheduledTokens(row, context + step, 1, 1) for row in range(self.requests)]
            if prompt is not None:
                scheduled.append(ScheduledTokens(self.requests, *prompt, 1))
            self._steps += 1
            output = SchedulerOutput(self._steps, joined=self._joining, scheduled=scheduled)
            output.extensions = self._extensions
            on_way.append(self._executor.submit(output))
            self._joining, self._extensions = [], {}
            while len(on_way) >= (self._depth if step + 1 < repeats else 1):
                on_way.popleft().result()
                ends.append(time.perf_counter())
        return statistics.median_low(end - before for before, end in itertools.pairwise(ends[:-1]))
