"""Answers with guesses at them and without, by engines in turn: tokens a second, and how many guesses were right.

    python benchmarks/speculation.py --proposer ngram suffix --task copy template story

Tasks, as far as the embedded model can do them:

    run         a run of random tokens, eight times: most models go on with it
    copy        a text of the model's own, twice, and its beginning: the rest is quoted
    extract     what a text says of a person as JSON, each time of another one
    template    the same, of a few people again and again
    story       tales of all kinds, in which nothing repeats
    predicted   tales, whose clients predict them but for every 20th token

Times are the processor's, also those from which engines learn what a draft costs: other programs do not count.
"""

import argparse
import copy
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvern import LLM, RequestOutput, SamplingParams
from kvern.engine.core import EngineCore
from kvern.observe.drafts import DraftFigures

PLAIN = "none"
ENDLESS = ("run", "copy")
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

    def draw(self, task: str, count: int) -> Asked:
        """So many prompts with predictions."""
        return [getattr(self, task)() for _ in range(count)]

    def run(self) -> tuple[list[int], list[int]]:
        return [self._dice.randrange(300, 2000) for _ in range(12)] * 8, []

    def copy(self) -> tuple[list[int], list[int]]:
        tale = self._tale(self._tale_prompt())
        return tale * 2 + tale[:12], []

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
        engine.add(str(index), prompt, params.replace(seed=seed + index), prediction=predicted)
        for index, (prompt, predicted) in enumerate(asked)
    ]
    while engine.has_work:
        engine.step()
    yield from outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hugging Face id; the embedded model if left out")
    parser.add_argument("--proposer", nargs="+", default=["ngram"])
    parser.add_argument("--task", nargs="+", default=["run"])
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"threads": arguments.threads, "max_model_len": 1024}
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.output)
    for count in arguments.requests:
        for task in arguments.task:
            params = params.replace(ignore_eos=task in ENDLESS)
            llms = {name: LLM(arguments.model, proposer=name, **options) for name in arguments.proposer}
            llms[PLAIN] = LLM(arguments.model, speculation="off", **options)
            for llm in llms.values():
                core = llm._engine.core
                if isinstance(core, EngineCore) and core.drafting is not None:
                    core.drafting._clock = time.process_time
            tasks = Tasks(llms[PLAIN], params)
            before = {name: copy.copy(llm.statistics()) for name, llm in llms.items()}
            rates: dict[str, list[float]] = {name: [] for name in llms}
            same = True
            for turn in range(arguments.rounds + 1):
                asked = tasks.draw(task, count)
                answers = []
                for name, llm in llms.items():
                    unpredicted: Asked = [(prompt, []) for prompt, _ in asked]
                    start = time.process_time()
                    outputs = answered(llm, unpredicted if name == PLAIN else asked, params, turn * count)
                    answers.append([output.outputs[0].token_ids for output in outputs])
                    seconds = time.process_time() - start
                    if turn:
                        rates[name].append(sum(map(len, answers[-1])) / seconds)
                same = same and all(answer == answers[0] for answer in answers)
            for name in arguments.proposer:
                figures = DraftFigures.between(before[name], llms[name].statistics())
                ratios = sorted(mine / plain for mine, plain in zip(rates[name], rates[PLAIN], strict=True))
                found = {
                    "task": task,
                    "requests": count,
                    "proposer": name,
                    "tok/s": round(max(rates[name]), 1),
                    "without": round(max(rates[PLAIN]), 1),
                    "ratio, median of rounds": round(ratios[len(ratios) // 2], 2),
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
