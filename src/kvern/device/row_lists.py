"""What a request's biases, bans and allowed tokens are to `kernels.constraints`: one list of numbers on the device."""

from itertools import accumulate

import numpy as np

from kvern.kernels.constraints import HEADER
from kvern.step import NewRequest


def list_of(request: NewRequest) -> "np.ndarray[tuple[int], np.dtype[np.int32]] | None":
    """int32 numbers, as `kernels.constraints.change` reads them; None: the request asks for nothing of this."""
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
    assert len(header) == HEADER
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
