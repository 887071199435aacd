"""The attention function that transformers' models call as `IMPLEMENTATION`, and the arguments of its calls.

Transformers makes no masks for this name: the attention function decides which keys a token sees.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from kvern.errors import UnsupportedModel
from kvern.layers.step_context import Attend
from kvern.spec.mixers import AttentionSpec

IMPLEMENTATION = "kvern"
WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "dropout", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Arguments that do not change the result of attention."""


class Call(NamedTuple):
    """A layer attends: `query [1, heads, T, dim]`, `key` and `value [1, kv_heads, T, dim]`, values of any dim."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object
    arguments: Mapping[str, Any]

    def layer(self) -> AttentionSpec:
        """The attention that the arguments describe; the head size is the larger one of keys and values.

        Raises UnsupportedModel for what kvern's attention does not support.
        """
        known = {"scaling", "sliding_window", "softcap", "is_causal", "s_aux", *WITHOUT_EFFECT}
        causal = self.arguments.get("is_causal")
        if not (getattr(self.module, "is_causal", True) if causal is None else causal):
            raise UnsupportedModel("it attends in both directions")
        if self.mask is not None:
            raise UnsupportedModel("it makes an attention mask of its own")
        for name, value in self.arguments.items():
            if name not in known and value is not None and value is not False:
                raise UnsupportedModel(f"its attention is called with {name}, which kvern does not know")
        if self.key.shape[2] != self.query.shape[2]:
            raise UnsupportedModel("it attends to keys that are not those of its tokens")
        scale = self.arguments.get("scaling")
        return AttentionSpec(
            self.query.shape[1],
            self.key.shape[1],
            max(self.key.shape[3], self.value.shape[3]),
            float(self.query.shape[3] ** -0.5 if scale is None else scale),
            self.arguments.get("sliding_window"),
            self.arguments.get("softcap"),
            sinks=self.sinks is not None,
        )

    @property
    def sinks(self) -> Tensor | None:
        """Logits `[heads]` that take part in the softmax without a value."""
        sinks: Tensor | None = self.arguments.get("s_aux")
        return sinks

    def unanswered(self) -> Tensor:
        """Zeros in place of the result of attention."""
        _, heads, tokens, _ = self.query.shape
        return self.value.new_zeros(tokens, heads, self.value.shape[3])


Answer = Callable[[Call], Tensor]
"""The function that computes a call's result, `[T, heads, dim of the values]`."""
_ANSWER: ContextVar[Answer] = ContextVar("answer")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **arguments: Any
) -> tuple[Tensor, None]:
    return _ANSWER.get()(Call(module, query, key, value, attention_mask, arguments))[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


@contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Uses this function for the attention calls of all models."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


class PagedAnswer:
    """One forward pass over a paged cache: the calls come in the order of `layers`."""

    def __init__(self, layers: tuple[AttentionSpec, ...], attend: Attend) -> None:
        self._layers = layers
        self._attend = attend
        self._index = 0

    def __call__(self, call: Call) -> Tensor:
        index, layer = self._index, self._layers[self._index]
        if call.layer() != layer:
            raise UnsupportedModel(f"attention {index} is now called as {call.layer()}, and was described as {layer}")
        self._index += 1
        rows = [_widened(item[0].transpose(0, 1), layer.head_dim) for item in (call.query, call.key, call.value)]
        return self._attend(index, *rows)[..., : call.value.shape[3]]


def _widened(rows: Tensor, width: int) -> Tensor:
    """Pads `rows [T, heads, dim]` with zeros, because keys and values share blocks of one width."""
    return F.pad(rows, (0, width - rows.shape[2])) if rows.shape[2] < width else rows.contiguous()
