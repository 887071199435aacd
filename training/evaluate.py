"""Measures a model with kvern on held-out questions: exact match per task, and perplexity of what the assistant says.

python -m training.evaluate --model src/kvern/embedded/kvern-12m --count 200
"""

import argparse
import math
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import tensor

from kvern import LLM, SamplingParams
from training.exam import conversations, is_right, questions
from training.text import TASKS
from training.tokenizer import document, render
from training.train import weigh

EMBEDDED = Path(__file__).parent.parent / "src" / "kvern" / "embedded"
LONGEST_ANSWER = 320


def accuracy(llm: LLM, tokenizer: Tokenizer, task: str, count: int, seed: int) -> dict[str, tuple[int, int]]:
    """(right, asked) for the task, or for each of the tasks it consists of."""
    examples = questions(task, count, seed)
    prompts = [_ids(tokenizer, render(example.messages[:-1], example.tools, True)) for example in examples]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER), progress=True)
    scores: dict[str, list[bool]] = defaultdict(list)
    for example, output in zip(examples, outputs, strict=True):
        scores[example.task].append(is_right(example, output.outputs[0].text))
    return {name: (sum(marks), len(marks)) for name, marks in scores.items()}


def perplexity(llm: LLM, tokenizer: Tokenizer, count: int, seed: int) -> float:
    """Perplexity over the tokens that the assistant says in `count` held-out conversations of the training mix."""
    return perplexities(llm, tokenizer, count, seed)[0]


def perplexities(llm: LLM, tokenizer: Tokenizer, count: int, seed: int) -> tuple[float, float]:
    """The same, and that over all tokens of the conversations, users' and tools' included."""
    limit = llm.spec.max_position_embeddings - 1
    documents = [_ids(tokenizer, document(example)) for example in conversations(count, seed)]
    documents = [ids for ids in documents if len(ids) <= limit]
    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    spoken: list[float] = []
    every: list[float] = []
    for ids, output in zip(documents, llm.generate(documents, parameters, progress=True), strict=True):
        weights: list[float] = weigh(tensor([ids]))[0].tolist()
        for token, weight, scores in zip(ids, weights, output.prompt_logprobs or (), strict=True):
            if scores is not None:
                every.append(scores[token].logprob)
                spoken += [every[-1]] if weight == 1.0 else []
    return math.exp(-sum(spoken) / len(spoken)), math.exp(-sum(every) / len(every))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure an embedded model on held-out questions.")
    parser.add_argument("--model", type=Path, default=EMBEDDED / "kvern-12m")
    parser.add_argument("--count", type=int, default=200, help="questions a task, and conversations for perplexity")
    parser.add_argument("--seed", type=int, default=20_000)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    llm = LLM(str(arguments.model))
    table = Table("task", "right", "asked", "accuracy", title=f"{arguments.model.name}, held-out seed {arguments.seed}")
    for task in arguments.tasks:
        for name, (right, asked) in accuracy(llm, tokenizer, task, arguments.count, arguments.seed).items():
            table.add_row(name, str(right), str(asked), f"{100 * right / asked:.1f} %")
    table.add_section()
    table.add_row("perplexity", "", "", f"{perplexity(llm, tokenizer, arguments.count, arguments.seed):.3f}")
    Console().print(table)
    llm.close()


if __name__ == "__main__":
    main()
