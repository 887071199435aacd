"""A model as lm-eval asks one."""

import time
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from kvern.errors import ConfigError
from kvern.llm import LLM
from kvern.request.sampling_params import SamplingParams

MOST_TOKENS = 256
"""Tokens of an answer where a task does not say it."""


class EvaluatedModel(LM):  # type: ignore[misc]
    """An LLM, with the tokens that it has read and written, and the seconds that they took."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm = llm
        self.tokens = 0
        self.seconds = 0.0

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of continuations, and whether each is what the model would write."""
        began = time.perf_counter()
        scores = self.llm.score([request.args for request in requests])
        self.seconds += time.perf_counter() - began
        self.tokens += sum(score.context_tokens + len(score.token_ids) for score in scores)
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise ConfigError(
            f"task {requests[0].task_name} measures the perplexity of whole documents, which kvern bench accuracy does "
            "not: choose tasks of answers or choices"
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answers to prompts, each up to a text that ends it."""
        params = [_params(request.args[1]) for request in requests]
        began = time.perf_counter()
        outputs = self.llm.generate([request.args[0] for request in requests], params)
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs)
        return [output.outputs[0].text for output in outputs]


def _params(asked: dict[str, Any]) -> SamplingParams:
    """Sampling parameters by those of a task: greedy, unless it samples."""
    until: str | Sequence[str] = asked.get("until") or []
    stop = [until] if isinstance(until, str) else list(until)
    most = asked.get("max_gen_toks") or asked.get("max_tokens") or MOST_TOKENS
    temperature = float(asked.get("temperature", 0.0)) if asked.get("do_sample", True) else 0.0
    return SamplingParams(temperature=temperature, max_tokens=int(most), stop=[text for text in stop if text] or None)
