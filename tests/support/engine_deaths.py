"""Servers whose engine ends on request, and the streams that must survive it."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.processors import installed_package
from tests.support.served import PATIENCE, SMALL, STORY, Served, serving

PROMPTS = [f"Once upon a time there were {number}" for number in range(30)]
LENGTH = 150


@contextlib.contextmanager
def with_processors(folder: Path, *arguments: str) -> Iterator[Served]:
    """A server that has the processor which ends its engine."""
    with installed_package(folder), serving(*SMALL, "--logits-processors", "end", *arguments) as served:
        yield served


class Streams:
    """The streams of all prompts; `begun` when each has said something."""

    def __init__(self, client: openai.OpenAI, pool: concurrent.futures.Executor) -> None:
        self.begun = threading.Barrier(len(PROMPTS) + 1)
        self._client = client
        self._texts = [pool.submit(self._read, prompt) for prompt in PROMPTS]

    def _read(self, prompt: str) -> str:
        stream = self._client.completions.create(prompt=prompt, seed=9, stream=True, **(STORY | {"max_tokens": LENGTH}))
        text = next(iter(stream)).choices[0].text
        self.begun.wait(PATIENCE)
        return text + "".join(chunk.choices[0].text for chunk in stream)

    def texts(self) -> list[str]:
        return [text.result() for text in self._texts]


def deadly(client: openai.OpenAI, how: str, after: int) -> str:
    """Ask for what ends the engine; the error."""
    asked = {"logits_processors": {"end": {"how": how, "after": after}}, "ignore_eos": True}
    with pytest.raises(openai.InternalServerError) as refused:
        client.completions.create(model="kvern-1m", prompt="I end it", max_tokens=LENGTH, extra_body=asked)
    return str(refused.value)
