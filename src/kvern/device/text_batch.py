"""A step of an encoder on a device: texts one behind the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvern.device.transfer import send
from kvern.request.request import PromptInput


@dataclass(frozen=True)
class TextBatch:
    """S texts of T tokens in all, without padding.

    lengths                       of each text, on the host
    token_ids, positions, types   [T] int64: positions within the text, and kinds of tokens
    starts, counts                [S] int32: the index of each text's first token among the T, and its length
    """

    lengths: Sequence[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def build_text_batch(texts: Sequence[PromptInput], second_type: int, device: torch.device) -> TextBatch:
    """Build a batch of texts by one copy without waiting. The second text of a pair has `second_type`."""
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    starts, tokens = ends - lengths, int(ends[-1])
    numbers = np.zeros(3 * tokens + 2 * len(texts), dtype=np.int32)
    token_ids, positions, types = numbers[: 3 * tokens].reshape(3, tokens)
    token_ids[:] = np.concatenate([np.array(text.token_ids, dtype=np.int32) for text in texts])
    positions[:] = np.arange(tokens, dtype=np.int32) - np.repeat(starts, lengths)
    for text, start, end in zip(texts, starts, ends, strict=True):
        if text.second_text is not None:
            types[start + text.second_text : end] = second_type
    numbers[3 * tokens :] = np.concatenate([starts, lengths])
    sent = send(numbers, device)
    of_tokens, of_texts = sent[: 3 * tokens].long().view(3, tokens), sent[3 * tokens :].view(2, len(texts))
    return TextBatch([len(text) for text in texts], *of_tokens.unbind(), *of_texts.unbind())
