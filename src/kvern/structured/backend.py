"""What a library that follows grammars does for kvern.

StructuredOutput --compile--> text, which travels to the engine --matcher--> one row's Matcher --fill--> masks
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvern.request.structured_output import StructuredOutput

if TYPE_CHECKING:
    import torch


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def consume_tokens(self, tokens: list[int], /) -> bool:
        """Go on; False, and an error from now on, if the grammar does not allow them."""

    def consume_token(self, token: int, /) -> bool:
        """Go on with one."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Go on as far as the grammar allows: the number of tokens consumed. Others are no error."""

    def is_stopped(self) -> bool:
        """The answer can only end, or has."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str:
        """Why the grammar cannot be followed any more; empty if it can."""

    def reset(self) -> bool:
        """Go back to the beginning; False if that cannot be done."""

    def rollback(self, tokens: int, /) -> bool:
        """Take back the last tokens that it consumed before it was stopped, and the one that stopped it.

        False, and an error from now on, if they are fewer; an error stays.
        """

    def deep_copy(self) -> "Matcher": ...


class Backend(Protocol):
    """Of one model's tokenizer. End-of-sequence tokens are in its masks where the grammar ends, and only there."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that no text of a grammar matches."""

    def compile(self, structured: StructuredOutput) -> str:
        """The grammar as `matcher` takes it. Raises InvalidParameter or ValueError with what cannot be expressed."""

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of an answer. May be called by several threads."""

    def fill(self, going: Sequence[tuple[Any, int]], masks: "torch.Tensor", side_by_side: bool) -> None:
        """Write what each of its matchers allows into the given row of `masks` [R, words] int32, on the host.

        `side_by_side`: with threads of its own.
        """

    def way_out(self, matcher: Any, most: int) -> list[int] | None:
        """Tokens by which the JSON that is being written ends soon, the one that ends the answer left out.

        None: no such way of at most so many tokens is known. The matcher stays where it is.
        """
