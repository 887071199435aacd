"""Greedy tokens by steps of a JAX function over a paged KV cache, and the same logits by PyTorch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.pallas import tpu as pltpu

from kvern.errors import InvalidRequest
from kvern.models.decoder import Decoder
from kvern.quantize.blocks import LayersAttend
from kvern.tpu import BLOCK_SIZE, CHUNK
from kvern.tpu.attention import Rows, paged, plain
from kvern.tpu.function import Attention, cache_shape, make_step
from kvern.tpu.refusals import check
from kvern.tpu.weights import weights_of

AttentionName = Literal["auto", "pallas", "plain"]


@dataclass
class Answer:
    """The tokens after a prompt, and the logits `[vocab]` float32 of which each is the highest."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)


def attention_named(name: AttentionName) -> Attention:
    """The attention of a name: "auto" is the kernel on a TPU, else plain; elsewhere the kernel is interpreted."""
    on_tpu = jax.default_backend() == "tpu"
    if name == "plain" or (name == "auto" and not on_tpu):
        return plain
    return paged if on_tpu else partial(paged, interpret=pltpu.InterpretParams(detect_races=True))


class JaxModel:
    """A decoder as a compiled function, with a KV cache of so many blocks."""

    def __init__(
        self, decoder: Decoder, attend: Attention, blocks: int, block_size: int = BLOCK_SIZE, chunk: int = CHUNK
    ) -> None:
        spec = decoder.spec
        check(spec)
        self.block_size, self.chunk = block_size, chunk
        self.max_model_len = decoder.build.max_model_len
        self.weights = jax.device_put(weights_of(decoder))
        dtype = self.weights["embed"].dtype
        self._caches = [jnp.zeros(cache_shape(layer, blocks, block_size), dtype) for layer in spec.attentions]
        self._free = list(range(blocks))
        self._step = jax.jit(make_step(spec, self.max_model_len, attend), donate_argnums=1)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Collection[int] = ()) -> list[Answer]:
        """Greedy answers to prompts, which end with a token of `stop`. Raises InvalidRequest if they are too long."""
        answers = [Answer(prompt) for prompt in prompts]
        tables = self._tables([len(prompt) + max_tokens for prompt in prompts])
        for answer, table in zip(answers, tables, strict=True):
            self._prefill(answer, table)
        for _ in range(max_tokens - 1):
            running = [answer.tokens[-1] not in stop for answer in answers]
            if not any(running):
                break
            starts = [len(answer.prompt) + len(answer.tokens) - 1 for answer in answers]
            tokens = np.array([[answer.tokens[-1]] for answer in answers], np.int32)
            logits = self._run(tokens, Rows(tables, starts, running))
            for answer, row, runs in zip(answers, logits, running, strict=True):
                if runs:
                    _take(answer, row)
        self._free += tables.flatten().tolist()
        return answers

    def _tables(self, lengths: Sequence[int]) -> np.ndarray[Any, Any]:
        """The blocks of each row, `[R, B]`."""
        if (longest := max(lengths)) > self.max_model_len:
            raise InvalidRequest(
                f"prompt and answer have {longest} tokens, and max_model_len is {self.max_model_len}: shorten the "
                "prompt, or lower max_tokens"
            )
        count = -(-longest // self.block_size)
        if len(lengths) * count > len(self._free):
            raise InvalidRequest(f"{len(lengths)} rows of {count} blocks are more than the {len(self._free)} free ones")
        taken = [self._free.pop() for _ in range(len(lengths) * count)]
        return np.array(taken, np.int32).reshape(len(lengths), count)

    def _prefill(self, answer: Answer, table: np.ndarray[Any, Any]) -> None:
        for start in range(0, len(answer.prompt), self.chunk):
            part = answer.prompt[start : start + self.chunk]
            width = min(self.chunk, 1 << (len(part) - 1).bit_length())  # few widths: each is compiled
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(part)] = part
            [logits] = self._run(tokens, Rows(table[None], [start], [len(part)]))
        _take(answer, logits)

    def _run(self, tokens: np.ndarray[Any, Any], rows: Rows) -> np.ndarray[Any, Any]:
        given = Rows(*(jnp.asarray(part, jnp.int32) for part in rows))
        logits, self._caches = self._step(self.weights, self._caches, tokens, given)
        return np.asarray(logits)


def _take(answer: Answer, logits: np.ndarray[Any, Any]) -> None:
    answer.logits.append(logits)
    answer.tokens.append(int(logits.argmax()))


@dataclass(frozen=True)
class Difference:
    """The largest differences of logits from PyTorch's, and the largest of those."""

    prefill: float
    decode: float
    largest: float


@torch.inference_mode()
def compare(decoder: Decoder, answers: Sequence[Answer]) -> Difference:
    """Compares with one pass of kvern's PyTorch model over each prompt and its answer, which knows no cache."""
    prefill = [0.0]
    decode = [0.0]
    largest = [0.0]
    for answer in answers:
        tokens = torch.tensor([*answer.prompt, *answer.tokens[:-1]])
        attend = LayersAttend(decoder.spec, len(tokens))
        wanted = torch.arange(len(answer.prompt) - 1, len(tokens))
        hidden = decoder(tokens, torch.arange(len(tokens)), attend)
        expected = decoder.logits(hidden[wanted]).numpy()
        found = np.abs(expected - np.stack(answer.logits)).max(axis=1)
        prefill.append(float(found[0]))
        decode += found[1:].tolist()
        largest.append(float(np.abs(expected).max()))
    return Difference(*(float(np.max(found)) for found in (prefill, decode, largest)))  # which keeps NaN
