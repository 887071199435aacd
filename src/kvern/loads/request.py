"""One request of a load: when it arrives, how long it is, and what it shares with others."""

import msgspec

BLOCK_TOKENS = 512
"""Tokens that one hash stands for, as in Mooncake's traces."""


class LoadRequest(msgspec.Struct, frozen=True, gc=False):
    """A request without its text. `arrival` is in seconds from the beginning of the load."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Hashes of the prompt's blocks, in order, the last perhaps of fewer tokens; empty if it shares nothing.

    Equal hashes are equal tokens after an equal beginning; of a longer and a shorter block with one hash, the longer
    begins with the shorter.
    """
    tenant: str = ""
    session: str = ""
    """The conversation that it goes on with."""
