"""Answers with guesses at them and without, by engines in turn: tokens a second, and how many guesses were right.

    python benchmarks/speculation.py --proposer ngram suffix --task copy template story
    python benchmarks/speculation.py --draft-model own kvern-1m --task chat --temperature 0 1

Tasks, as far as the embedded model can do them:

    run         a run of random tokens, eight times: most models go on with it
    quote       a passage of a text, from some words on; as the next, for what `training.editing` makes of the model
    edit        a text in which a name, or a thing, is another one
    repeat      a text
    extract     what a text says of a person as JSON, each time of another one
    template    the same, of a few people again and again
    story       tales of all kinds, in which nothing repeats
    predicted   tales, whose clients predict them but for every 20th token
    chat        tales, sums, lists and facts, in turn

On a CPU times are the processor's, also those from which engines learn what a draft costs: other programs do not count.
"""

import argparse
import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.observe.metrics import DraftFigures
from kvern.request.request import RequestOptions

PLAIN, CONTROL = "none", "none again"
OWN = "own"
"""The draft model that the embedded model brings along, as it is used by default."""
WARMING = 8
"""Rounds that are not counted: steps are captured in them, and it is learnt what they take."""
ENDLESS = ("run",)
"""Tasks whose answers have all their tokens."""
NAMES = ["Anna", "Paul", "Mia", "Omar", "Lena", "Ivan", "Sara", "Tom", "Nina", "Carl", "Rosa", "Hugo"]
CITIES = ["Bremen", "Leipzig", "Paris", "London", "Rome", "Vienna", "Oslo", "Madrid", "Lisbon", "Prague"]
TRADES = ["baker", "teacher", "sailor", "doctor", "painter", "farmer", "driver", "tailor"]
THINGS = ["fox", "boat", "lamp", "garden", "king", "river", "clock", "dog", "bridge", "cloud", "horse", "tower"]
Asked = list[tuple[list[int], list[int]]]
"""Prompts, and what clients predict, as token ids."""


class Tasks:
    """Prompts, as token ids, and what clients predict. The tales that tasks are made of are those of `llm`."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self._dice = random.Random(0)
        sys.path.insert(0, str(Path(__file__).parents[1]))  # training/ is not installed
        self._asked = 0

    def draw(self, task: str, count: int) -> Asked:
        """So many prompts with predictions."""
        return [getattr(self, task)() for _ in range(count)]

    def run(self) -> tuple[list[int], list[int]]:
        return [self._dice.randrange(300, 2000) for _ in range(12)] * 8, []

    def quote(self) -> tuple[list[int], list[int]]:
        return self._taught("quote")

    def edit(self) -> tuple[list[int], list[int]]:
        return self._taught("edit")

    def repeat(self) -> tuple[list[int], list[int]]:
        return self._taught("repeat")

    def extract(self) -> tuple[list[int], list[int]]:
        return self._extract(NAMES, CITIES, TRADES), []

    def template(self) -> tuple[list[int], list[int]]:
        return self._extract(NAMES[:3], CITIES[:2], TRADES[:2]), []

    def story(self) -> tuple[list[int], list[int]]:
        return self._tale_prompt(), []

    def predicted(self) -> tuple[list[int], list[int]]:
        prompt = self._tale_prompt()
        tale = self._tale(prompt)
        for place in range(10, len(tale), 20):
            tale[place] = self._dice.randrange(300, 2000)
        return prompt, tale

    def chat(self) -> tuple[list[int], list[int]]:
        self._asked += 1
        return [self._sum, self.story, self._list, self.extract][self._asked % 4]()

    def _taught(self, task: str) -> tuple[list[int], list[int]]:
        """One that the model was not taught with."""
        from training.draw import Draw
        from training.editing import TASKS

        example = TASKS[task](Draw(self._dice.randrange(1 << 30), held_out=True))
        return self._chat(example.messages[0]["content"]), []

    def _sum(self) -> tuple[list[int], list[int]]:
        return self._chat(f"What is {self._dice.randrange(100)} plus {self._dice.randrange(100)}?"), []

    def _list(self) -> tuple[list[int], list[int]]:
        return self._chat(f"List {self._dice.randrange(3, 8)} things that a {self._dice.choice(TRADES)} needs."), []

    def _extract(self, names: Sequence[str], cities: Sequence[str], trades: Sequence[str]) -> list[int]:
        choose = self._dice.choice
        text = (
            f"{choose(names)} is a {choose(trades)}, {self._dice.randrange(20, 70)} years old, from {choose(cities)}."
        )
        return self._chat(f"{text} Write a JSON object with name, job, age and city.")

    def _tale_prompt(self) -> list[int]:
        choose = self._dice.choice
        return self._chat(f"Tell me a story about a {choose(THINGS)}, a {choose(THINGS)} and {choose(NAMES)}.")

    def _tale(self, prompt: list[int]) -> list[int]:
        return list(self._llm.generate([prompt], self._params.replace(seed=0))[0].outputs[0].token_ids)

    def _chat(self, text: str) -> list[int]:
        return self._llm.chat_prompt([{"role": "user", "content": text}])


def answered(llm: LLM, asked: Asked, params: SamplingParams, seed: int) -> Iterator[RequestOutput]:
    """The answers, in their order; each has a seed of its own, from this one on."""
    engine = llm._engine
    outputs = [
        engine.add(str(index), prompt, params.replace(seed=seed + index), RequestOptions(prediction=tuple(predicted)))
        for index, (prompt, predicted) in enumerate(asked)
    ]
    while engine.has_work:
        engine.step()
    yield from outputs


def engines(arguments: argparse.Namespace) -> dict[str, LLM]:
    """By who guesses in them, all of the same model."""
    guessing: dict[str, dict[str, Any]] = {name: {"proposer": name} for name in arguments.proposer}
    guessing |= {name: {} if name == OWN else {"draft_model": name} for name in arguments.draft_model}
    common: dict[str, Any] = {"threads": arguments.threads, "max_model_len": 1024}
    common |= {"max_batch_requests": max(arguments.requests), "load_format": arguments.load_format}
    if arguments.control:
        guessing[CONTROL] = {"speculation": "off"}
    return {
        name: LLM(arguments.model, **common, **options)
        for name, options in (guessing | {PLAIN: {"speculation": "off"}}).items()
    }


def use_clock(llm: LLM, clock: Callable[[], float]) -> None:
    """Have an engine learn from this clock what drafts cost."""
    engine: Any = llm._engine
    core = engine.core
    if core.drafting is not None:
        core.drafting._clock = clock
        core.executor._worker.runner._drafter.clock = clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--proposer", nargs="+", default=[])
    parser.add_argument("--draft-model", nargs="+", default=[], help="folders, Hugging Face ids, or own")
    parser.add_argument("--control", action="store_true", help="two engines without drafts: what differs is noise")
    parser.add_argument("--task", nargs="+", default=["run"])
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    arguments = parser.parse_args()
    llms = engines(arguments)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for llm in llms.values():
        use_clock(llm, clock)
    for count, task, temperature in itertools.product(arguments.requests, arguments.task, arguments.temperature):
        params = SamplingParams(temperature=temperature, max_tokens=arguments.output, ignore_eos=task in ENDLESS)
        tasks = Tasks(llms[PLAIN], params)
        before = {name: copy.copy(llm.statistics()) for name, llm in llms.items()}
        tokens, seconds = 0, {name: [0.0] * arguments.rounds for name in llms}
        same = True
        for turn in range(-WARMING, arguments.rounds):
            asked = tasks.draw(task, count)
            unpredicted: Asked = [(prompt, []) for prompt, _ in asked]
            answers = []
            for name in [*llms][turn % len(llms) :] + [*llms][: turn % len(llms)]:
                llm, start = llms[name], clock()
                outputs = answered(llm, unpredicted if name == PLAIN else asked, params, (turn + WARMING) * count)
                answers.append([output.outputs[0].token_ids for output in outputs])
                if turn >= 0:
                    seconds[name][turn] = clock() - start
            tokens += sum(map(len, answers[-1])) if turn >= 0 else 0
            same = same and all(answer == answers[0] for answer in answers)
        for name, llm in llms.items():
            if name == PLAIN:
                continue
            figures = DraftFigures.between(before[name], llm.statistics())
            ratios = sorted(plain / mine for mine, plain in zip(seconds[name], seconds[PLAIN], strict=True))
            found = {
                "task": task,
                "requests": count,
                "temperature": temperature,
                "guessed by": name,
                "tok/s": round(tokens / sum(seconds[name]), 1),
                "without": round(tokens / sum(seconds[PLAIN]), 1),
                "ratio": round(sum(seconds[PLAIN]) / sum(seconds[name]), 2),
                "median of rounds": round(ratios[len(ratios) // 2], 2),
                "least and most": [round(ratios[0], 2), round(ratios[-1], 2)],
                "drafts": figures.count,
                "right": figures.accepted,
                "tokens a step with drafts": round(figures.tokens_a_step, 2),
                "same answers": same,
            }
            print(json.dumps(found), flush=True)
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
