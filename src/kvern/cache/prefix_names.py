"""Names of prefixes, by which a server knows which of its engines have the beginning of a prompt cached.

    | 32 | 32 | ... 1024 |  64  | ... 2048 |  128  | ...        the ends of pieces: `ENDS`
    name(root)  = root_key(namespace)
    name(piece) = block_key(name of the piece before, contents of the piece)

Every process makes the same names for the same prefixes, whatever the sizes of its blocks. Pieces are longer where a
prefix is, a sixteenth of it or less, so that a prompt of 8192 tokens has 80 names.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kvern.cache.keys import block_key, contents_of, root_key
from kvern.request.request import RequestSpec, cache_namespace

PIECE_TOKENS = 32
"""The shortest piece: a shorter beginning is computed sooner than it is worth a thought."""
LONGEST_PREFIX = 1 << 30


def _ends() -> tuple[int, ...]:
    ends = [PIECE_TOKENS]
    while ends[-1] < LONGEST_PREFIX:
        ends.append(ends[-1] + max(PIECE_TOKENS, 1 << ends[-1].bit_length() - 5))
    return tuple(ends)


ENDS = _ends()
"""The number of tokens up to the end of each piece of a prefix."""


def named_tokens(count: int) -> int:
    """Returns how many tokens the first `count` names of a prefix stand for."""
    return ENDS[count - 1] if count else 0


def prefix_names(
    spec: RequestSpec,
    answer: Sequence[int] = (),
    known: Sequence[bytes] = (),
    *,
    adapter_digest: bytes = b"",
    weights: bytes = b"",
) -> list[bytes]:
    """The names of a prompt and an answer: equal where they begin alike in one namespace.

    `known`: the first names, which need not be made again. `weights`: see `weights_prefix`.
    """
    contents = contents_of(spec.prompt.token_ids, dict(spec.prompt.block_keys))
    if answer:
        contents = [*contents, *answer]
    names = list(known)
    parent = names[-1] if names else root_key(b"", weights + cache_namespace(spec, adapter_digest))
    start = named_tokens(len(names))
    for end in ENDS[len(names) : bisect_right(ENDS, len(contents))]:
        parent = block_key(parent, contents[start:end])
        names.append(parent)
        start = end
    return names
