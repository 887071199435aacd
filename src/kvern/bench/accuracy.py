"""The accuracy of a model in several configurations: by the embedded model's exam, or tasks of lm-eval.

The exam (`exam.jsonl`, made by `training/exam.py`) has held-out questions of each task that the embedded model learnt;
an answer is right to the letter or wrong. Other models are better asked tasks of lm-eval.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import typing
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvern.bench.record import Better, Case, figure
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.llm import LLM
from kvern.options.arguments import option_types
from kvern.options.values import converted
from kvern.request.sampling_params import SamplingParams
from kvern.serving.chats import chat_request

EXAM = Path(__file__).parent / "exam.jsonl"
LONGEST_ANSWER = 320
SPREAD = 1.96
"""Standard errors on each side of an interval that has the true value in 95 of 100 cases."""


@dataclass(frozen=True)
class Score:
    """A share of right answers or another metric of a task, with its standard error and interval if they are known.

    better   None: nobody says which way is
    """

    task: str
    metric: str
    value: float
    error: float | None
    better: Better | None = "higher"
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Graded:
    """Scores of a configuration, and the tokens per second of each run: generated ones, for lm-eval also read ones."""

    scores: list[Score]
    rates: list[float]


@dataclass(frozen=True)
class Asked:
    """The questions: tasks of lm-eval, or none for the exam."""

    tasks: tuple[str, ...] = ()
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    repeat: int = 1

    def check(self) -> None:
        """Raises ConfigError if lm-eval is asked for and is not installed, or does not know a task."""
        if self.tasks:
            _task_manager(self)

    def grade(self, llm: LLM) -> Graded:
        """Asks a model everything. Raises ConfigError."""
        if not self.tasks:
            return sit_exam(llm, self.limit, self.repeat)
        return evaluate(llm, self)

    @property
    def workload(self) -> dict[str, Any]:
        """The questions, as a record tells them from others."""
        digest = None if self.tasks else hashlib.sha256(EXAM.read_bytes()).hexdigest()[:16]
        return {"tasks": list(self.tasks) or ["exam"], "limit": self.limit, "few": self.num_fewshot, "digest": digest}


def configurations(base: EngineConfig, texts: Sequence[str]) -> dict[str, EngineConfig]:
    """Returns configurations by texts such as quantization=int8,kv_cache_dtype=fp8. Raises ConfigError."""
    types, found = option_types(), dict[str, EngineConfig]()
    for text in texts or ("",):
        options: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, sign, value = (piece.strip() for piece in part.partition("="))
            if not sign:
                raise ConfigError(f"set is {text!r:.80}: it must be NAME=VALUE, several with commas between them")
            name = name.replace("-", "_")
            if value.lower() == "none" and type(None) in typing.get_args(types.get(name)):
                options[name] = None
            else:
                options[name] = converted(name, value, types, f"set {part!r:.80}", strict=False)
        found[text or "as given"] = dataclasses.replace(base, **options)
    return found


def case_of(name: str, config: EngineConfig, asked: Asked) -> Case:
    """Starts a configuration, asks it everything, and returns the case of a record. Raises KvernError."""
    llm = LLM(**{item.name: getattr(config, item.name) for item in dataclasses.fields(config)})
    try:
        graded = asked.grade(llm)
    finally:
        llm.close()
    figures = {"tokens_per_second": figure(graded.rates, "tokens/s", "higher", main=True)}
    for score in graded.scores:
        if score.better is not None:  # else it cannot be compared
            figures["score"] = figure([score.value], score.metric, score.better)
            break
    return Case(name, figures, asked.workload, {"scores": [dataclasses.asdict(score) for score in graded.scores]})


def share(task: str, marks: Sequence[bool]) -> Score:
    """Returns the share of right answers with its standard error, and Wilson's interval, which also holds where
    nearly all are right."""
    count, value = len(marks), sum(marks) / len(marks)
    error, square = math.sqrt(value * (1 - value) / count), SPREAD**2 / count
    middle, half = value + square / 2, SPREAD * math.sqrt(error**2 + square / (4 * count))
    interval = (max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square)))
    return Score(task, "right", value, error, interval=interval)


def sit_exam(llm: LLM, limit: int | None, repeat: int) -> Graded:
    """Asks the questions of the exam at once, the first `limit` of each task, after one of each that is not timed."""
    questions = list(_questions(limit))
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
    chats = [chat_request(llm._inputs.chat, row["messages"], params, row["tools"] or None) for row in questions]
    prompts = [chat.prompt for chat in chats]
    rates, texts = list[float](), list[str]()
    firsts = {question["task"]: prompt for question, prompt in zip(questions, prompts, strict=True)}
    llm.generate(list(firsts.values()), params)
    for _ in range(repeat):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        texts = [output.outputs[0].text for output in outputs]
        rates.append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    marks: dict[str, list[bool]] = defaultdict(list)
    for question, text in zip(questions, texts, strict=True):
        marks[question["task"]].append(text.strip() == question["answer"])
    every = [mark for task in marks.values() for mark in task]
    return Graded([share("exam", every), *(share(task, of) for task, of in marks.items())], rates)


def _questions(limit: int | None) -> Iterator[dict[str, Any]]:
    """The questions of the exam."""
    seen: Counter[str] = Counter()
    for line in EXAM.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        seen[row["task"]] += 1
        if limit is None or seen[row["task"]] <= limit:
            yield row


@cache
def _task_manager(asked: Asked) -> Any:
    """Returns lm-eval's tasks, read once. Raises ConfigError if it is not installed or a task is unknown."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"tasks {', '.join(asked.tasks)} are those of lm-eval, which cannot be imported ({error}): "
            "pip install lm-eval, or leave --tasks out for the exam of the embedded model"
        ) from None
    manager = TaskManager(include_path=None if asked.include_path is None else str(asked.include_path))
    if unknown := [task for task in asked.tasks if not manager.match_tasks([task])]:
        raise ConfigError(f"lm-eval has no task {unknown[0]!r}: lm_eval ls tasks lists them")
    return manager


def evaluate(llm: LLM, asked: Asked) -> Graded:
    """Runs tasks of lm-eval. Raises ConfigError."""
    manager = _task_manager(asked)
    from lm_eval import simple_evaluate

    from kvern.bench.lm_eval_model import EvaluatedModel

    model = EvaluatedModel(llm)
    found = simple_evaluate(
        model,
        tasks=list(asked.tasks),
        num_fewshot=asked.num_fewshot,
        limit=asked.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=1000,
    )
    assert found is not None  # as in ranks other than the first
    scores = scores_of(found)
    if not scores:
        raise ConfigError(f"tasks {', '.join(asked.tasks)} have no metric that is a number")
    return Graded(scores, [model.tokens / max(model.seconds, 1e-9)])


def scores_of(found: Mapping[str, Any]) -> list[Score]:
    """Returns the metrics that are numbers in what lm-eval found."""
    return [
        Score(task, name, float(value), error, _better(found, task, name), _around(float(value), error))
        for task, values in found["results"].items()
        for key, value in values.items()
        if "," in key and "_stderr" not in key and isinstance(value, int | float)
        for name, error in [(key.partition(",")[0], _error(values, key))]
    ]


def _around(value: float, error: float | None) -> tuple[float, float] | None:
    """The interval of a value whose errors are normal."""
    return None if error is None else (value - SPREAD * error, value + SPREAD * error)


def _better(found: Mapping[str, Any], task: str, metric: str) -> Better | None:
    """The way in which lm-eval says that a metric is better; None where it does not, as of groups of unlike tasks."""
    higher = found["higher_is_better"].get(task, {}).get(metric)
    return None if higher is None else "higher" if higher else "lower"


def _error(values: dict[str, Any], key: str) -> float | None:
    """The standard error that lm-eval gives a metric."""
    name, _, rest = key.partition(",")
    found = values.get(f"{name}_stderr,{rest}")
    return float(found) if isinstance(found, int | float) else None
