"""A step of an encoder on a device: texts one behind the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvern.device.transfer import send
from kvern.request.request import PromptInput
from kvern.spec.model import EncoderSpec


@dataclass(frozen=True)
class TextBatch:
    """S texts of T tokens in all, without padding.

    lengths                       of each text, on the host
    token_ids, positions, types   [T] int64: positions within the text, and kinds of tokens
    starts, counts                [S] int32: the index of each text's first token among the T, and its length
    pooled                        [S] int32: the index of the token whose state is read of a text that is not averaged
    """

    lengths: Sequence[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    pooled: torch.Tensor


def build_text_batch(texts: Sequence[PromptInput], spec: EncoderSpec, device: torch.device) -> TextBatch:
    """Build a batch of texts for an encoder by one copy without waiting."""
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    starts, tokens = ends - lengths, int(ends[-1])
    numbers = np.zeros(3 * tokens + 3 * len(texts), dtype=np.int32)
    token_ids, positions, types = numbers[: 3 * tokens].reshape(3, tokens)
    token_ids[:] = np.concatenate([np.array(text.token_ids, dtype=np.int32) for text in texts])
    positions[:] = np.arange(tokens, dtype=np.int32) - np.repeat(starts, lengths)
    for text, start, end in zip(texts, starts, ends, strict=True):
        if text.second_text is not None:
            types[start + text.second_text : end] = spec.second_type
    pooled = starts + [_pooled(text.token_ids, spec) for text in texts]
    numbers[3 * tokens :] = np.concatenate([starts, lengths, pooled])
    sent = send(numbers, device)
    of_tokens, of_texts = sent[: 3 * tokens].long().view(3, tokens), sent[3 * tokens :].view(3, len(texts))
    return TextBatch([len(text) for text in texts], *of_tokens.unbind(), *of_texts.unbind())


def _pooled(token_ids: Sequence[int], spec: EncoderSpec) -> int:
    """The place of the token whose state is read. A text without the token that ends texts is read at its first."""
    if spec.pooling == "lasttoken":
        return len(token_ids) - 1
    if spec.pooling != "end":
        return 0
    end = max(token_ids) if spec.end_token < 0 else spec.end_token
    return token_ids.index(end) if end in token_ids else 0
