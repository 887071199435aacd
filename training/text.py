"""The training text: an endless, seeded stream of conversations that this generator alone makes.

    draw = Draw(seed)                 held_out=True draws only combinations that training never sees
    for example in stream(draw): ...  Example(task, messages, tools, key, text)

Run `python -m training.text --count 5` to read some.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from training.arithmetic import arithmetic, drill, list_drill, lists
from training.draw import Draw, Example, Message, system
from training.extraction import extraction
from training.facts import FACTS, fact
from training.stories import raw_story, reading, telling
from training.talk import decline, handbook, identity, memory, rule_prompt
from training.tools import tool_answer, tool_call, tool_refusal

TASKS: dict[str, Callable[[Draw], Example]] = {
    "extraction": extraction,
    "arithmetic": arithmetic,
    "lists": lists,
    "facts": fact,
    "story": telling,
    "story_questions": reading,
    "tool_call": tool_call,
    "tool_answer": tool_answer,
    "tool_refusal": tool_refusal,
    "decline": decline,
    "identity": identity,
    "memory": memory,
    "handbook": handbook,
}
# Shares of conversations. A drill holds many sums; a tool call costs many tokens for its definitions.
MIX: tuple[tuple[Callable[[Draw], Example], float], ...] = (
    (extraction, 0.17), (drill, 0.11), (arithmetic, 0.07), (lists, 0.08), (list_drill, 0.05), (fact, 0.14), (telling, 0.06), (reading, 0.05), (raw_story, 0.02),
    (tool_call, 0.09), (tool_answer, 0.03), (tool_refusal, 0.03), (decline, 0.07), (identity, 0.02), (memory, 0.03), (handbook, 0.08),
)  # fmt: skip
JOINABLE = (extraction, arithmetic, lists, fact, telling, reading, decline, identity, memory)
LONG_SHARE, SEVERAL_SHARE, SYSTEM_SHARE = 0.01, 0.25, 0.3
MAKERS, SHARES = [make for make, _ in MIX], [share for _, share in MIX]


def has_system(example: Example) -> bool:
    return bool(example.messages) and example.messages[0]["role"] == "system"


def several(draw: Draw, turns: int) -> list[Message]:
    """The messages of `turns` examples of different tasks, one after the other."""
    messages: list[Message] = []
    while turns:
        example = draw.choice(JOINABLE)(draw)
        if not has_system(example):
            messages += example.messages
            turns -= 1
    return messages


def conversation(draw: Draw) -> Example:
    """One conversation of the mix: one task, or several in turn, with or without a system prompt."""
    example: Example = draw.choices(MAKERS, SHARES)[0](draw)
    if example.text is not None or has_system(example):
        return example
    messages = example.messages
    if not example.tools and draw.chance(SEVERAL_SHARE):
        messages = (
            several(draw, draw.randint(8, 24) if draw.chance(LONG_SHARE / SEVERAL_SHARE) else draw.randint(1, 3))
            + messages
        )
    if draw.chance(SYSTEM_SHARE):
        messages = [system(rule_prompt(draw)), *messages]
    return replace(example, messages=messages)


def raw_fact(draw: Draw) -> Example:
    answer = draw.choice(FACTS)[1]
    return Example("raw", [], key=("raw", answer), text=answer)


def stream(draw: Draw) -> Iterator[Example]:
    while True:
        yield raw_fact(draw) if draw.chance(0.01) else conversation(draw)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print training conversations as JSON lines.")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    for _, example in zip(range(arguments.count), stream(Draw(arguments.seed, arguments.held_out)), strict=False):
        print(json.dumps(vars(example), ensure_ascii=False))


if __name__ == "__main__":
    main()
