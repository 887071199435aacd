"""Names of prefixes, by which a server knows which of its engines have the beginning of a prompt cached.

    | 32 | 32 | 64 | 64 | ... 2048 |  128  | ... 4096 |  256  | ...        the ends of pieces: `ENDS`
    name(root)  = root_key(namespace)
    name(piece) = block_key(name of the piece before, contents of the piece)

Every process makes the same names for the same prefixes, whatever the sizes of its blocks. Pieces are longer where a
prefix is, a sixteenth of it or less, so that a prompt of 8192 tokens has 65 names.
"""

from collections.abc import Iterator, Sequence

from kvern.cache.keys import block_key, contents_of, root_key
from kvern.request.request import RequestSpec, cache_namespace

PIECE_TOKENS = 32
"""The first two pieces: a shorter beginning is computed sooner than it is worth a thought."""
NEXT_TOKENS = 64
LONGEST_PREFIX = 1 << 30


def _ends() -> tuple[int, ...]:
    ends = [PIECE_TOKENS, 2 * PIECE_TOKENS]
    while ends[-1] < LONGEST_PREFIX:
        ends.append(ends[-1] + max(NEXT_TOKENS, 1 << ends[-1].bit_length() - 5))
    return tuple(ends)


ENDS = _ends()
"""The number of tokens up to the end of each piece of a prefix."""


def named_tokens(count: int) -> int:
    """Returns how many tokens the first `count` names of a prefix stand for."""
    return ENDS[count - 1] if count else 0


class PrefixNames:
    """The names of a prefix, each made when it is first asked for: those that nobody has are seldom asked for."""

    def __init__(self, root: bytes, contents: Sequence[int], known: Sequence[bytes] = ()) -> None:
        """`known`: the first names, which need not be made again."""
        self._contents = contents
        self._root = root
        self._made = [*known]

    def __iter__(self) -> Iterator[bytes]:
        made = self._made
        contents = self._contents
        start = 0
        for place, stop in enumerate(ENDS):
            if stop > len(contents):
                return
            if place == len(made):
                made.append(block_key(made[-1] if made else self._root, contents[start:stop]))
            yield made[place]
            start = stop


def prompt_names(spec: RequestSpec, *, adapter_digest: bytes = b"", weights: bytes = b"") -> PrefixNames:
    """The names of a prompt: equal where prompts begin alike in one namespace. `weights`: see `weights_prefix`."""
    root = root_key(b"", weights + cache_namespace(spec, adapter_digest))
    return PrefixNames(root, contents_of(spec.prompt.token_ids, dict(spec.prompt.block_keys)))


def prefix_names(
    spec: RequestSpec, answer: Sequence[int] = (), known: Sequence[bytes] = (), *, adapter_digest: bytes = b""
) -> list[bytes]:
    """All names of a prompt and an answer, of which the first are `known`."""
    contents = contents_of(spec.prompt.token_ids, dict(spec.prompt.block_keys))
    root = root_key(b"", cache_namespace(spec, adapter_digest))
    return [*PrefixNames(root, [*contents, *answer] if answer else contents, known)]
