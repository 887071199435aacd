"""A runner whose steps raise where marked prompts come to a certain length."""

from typing import Any

from kvern import LLM, RequestOutput, SamplingParams
from kvern.request.sampling_params import StructuredOutput
from kvern.request.step import ModelRunnerOutput, SchedulerOutput
from kvern.runner.executor import Executor
from tests.support.internals import core_of, worker_of

MARKS = {250: 0, 251: 1, 252: 3}
"""Token ids that mark a prompt, and the number of generated tokens after which its steps fail."""


def unreadable() -> ModelRunnerOutput:
    raise RuntimeError("as\nplanned")


class FailingRunner:
    """Runs steps through the engine's own runner; `where` they fail: "before", "behind" or in the "result"."""

    def __init__(self, llm: LLM, where: str = "behind") -> None:
        core: Any = core_of(llm)
        worker = worker_of(llm)
        self._runner, worker.runner = worker.runner, self
        self.embeddings = self._runner.embeddings
        core.executor = Executor(worker, core.executor.tier)
        self._where = where
        self._limits: dict[int, int] = {}
        self.failures = 0

    def execute(self, output: SchedulerOutput) -> Any:
        limits = dict(self._limits)
        for fork in output.forked:
            self._limits[fork.slot] = limits[fork.source]
        for request in output.joined:
            prompt = request.spec.prompt.token_ids
            self._limits[request.slot] = min(
                (len(prompt) + MARKS[mark] for mark in MARKS if mark in prompt), default=999
            )
        fails = any(item.start + item.count > self._limits[item.slot] - 1 for item in output.scheduled)
        self.failures += fails
        if fails and self._where == "before":
            raise RuntimeError("as\nplanned")
        result = self._runner.execute(output)
        if fails and self._where == "behind":
            raise RuntimeError("as\nplanned")
        for part in getattr(result, "_parts", [result]) if fails else ():
            part.result = unreadable
        return result

    def idle(self) -> bool:
        return self._runner.idle()

    def abandon(self) -> None:
        self._runner.abandon()


REASON = "its step failed: RuntimeError: as planned"


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


FORM = StructuredOutput(json={"type": "array", "items": {"enum": [1, 22, "a"]}, "maxItems": 3})


KINDS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.9, seed=4, max_tokens=16, structured=FORM),
    SamplingParams(beam_width=3, n=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, prompt_logprobs=0, ignore_eos=True),
]


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 64,
    "block_size": 4,
    "max_batch_requests": 12,
    "max_batch_tokens": 48,
}


def crowd() -> tuple[list[list[int]], list[SamplingParams]]:
    """Thirty prompts that begin alike, of all kinds, four of which are marked."""
    prompts = [[*range(20, 20 + 5 * (number % 4)), 100 + number, 7] for number in range(30)]
    for number, mark in zip((3, 10, 17, 24), [*MARKS, 252], strict=True):
        prompts[number].insert(2, mark)
    return prompts, [KINDS[number % len(KINDS)] for number in range(30)]


def said(output: RequestOutput) -> list[Any]:
    return [(answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason) for answer in output.outputs]
