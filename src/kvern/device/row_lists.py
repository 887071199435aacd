"""The biases, bans and allowed tokens of requests, as kernels read them: one list of numbers on the device."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import send
from kvern.request.step import Fork, NewRequest


class ListedRows(BatchRows):
    """Rows whose lists are on the device, for kernels that read them by their addresses."""

    @cached_property
    def _lists(self) -> list[torch.Tensor | None]:
        """Each row's, for as long as kernels may read them."""
        return [None] * len(self.requests)

    def fork(self, forked: Sequence[Fork]) -> None:
        kept = [self._lists[fork.source] for fork in forked]
        super().fork(forked)
        for fork, numbers in zip(forked, kept, strict=True):
            self._lists[fork.slot] = numbers

    def _list(self, request: NewRequest) -> int:
        numbers = list_of(request)
        kept = self._lists[request.slot] = None if numbers is None else send(numbers, self.device)
        return 0 if kept is None else kept.data_ptr()


def list_of(request: NewRequest) -> "np.ndarray[tuple[int], np.dtype[np.int32]] | None":
    """int32 numbers, as `kernels.constraints.change` says; None: the request asks for nothing of this."""
    params, spec = request.params, request.spec
    biases = params.logit_bias or {}
    allowed = _mask(params.allowed_token_ids or [])
    ends = sorted(spec.stop_token_ids) if params.min_tokens else []
    words = spec.bad_word_ids
    if not (biases or len(allowed) or ends or words):
        return None
    lengths = [len(word) for word in words]
    header = [
        len(allowed),
        len(biases),
        len(ends),
        spec.prompt_length + params.min_tokens,
        len(words),
        max(lengths, default=0),
    ]
    table = [number for both in zip(accumulate(lengths, initial=0), lengths, strict=False) for number in both]
    numbers: np.ndarray[tuple[int], np.dtype[np.int32]] = np.concatenate(
        [
            np.array([*header, *biases], dtype=np.int32),
            np.array(list(biases.values()), dtype=np.float32).view(np.int32),
            allowed,
            np.array([*ends, *table, *(token for word in words for token in word)], dtype=np.int32),
        ]
    )
    return numbers


def _mask(allowed: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """A bit for each token id, to the last that is allowed."""
    ids = np.array(allowed, dtype=np.int64)
    words = np.zeros(0 if not allowed else int(ids.max()) // 32 + 1, dtype=np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)
