"""The protocol of a grammar library.

StructuredOutput --compile--> text, which is sent to the engine --matcher--> one row's Matcher --fill--> masks
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvern.request.structured_output import StructuredOutput

if TYPE_CHECKING:
    import torch


class Matcher(Protocol):
    """The state of one answer in its grammar."""

    def consume_tokens(self, tokens: list[int], /) -> bool:
        """Advances the state; returns False, and stays in an error, if the grammar does not allow the tokens."""

    def consume_token(self, token: int, /) -> bool:
        """Consumes one token; False if the grammar does not allow it."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Consumes tokens as far as the grammar allows, without an error for others; returns their number."""

    def is_stopped(self) -> bool:
        """The answer can only end, or has."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str:
        """The reason why the grammar cannot be followed any more; empty if it can."""

    def reset(self) -> bool:
        """Returns to the start state; False if that is impossible."""

    def rollback(self, tokens: int, /) -> bool:
        """Take back the last tokens that it consumed before it was stopped, and the one that stopped it.

        False, and an error from now on, if they are fewer; an error stays.
        """

    def deep_copy(self) -> "Matcher": ...


class Backend(Protocol):
    """A grammar library with one model's tokenizer. Masks allow end-of-sequence tokens only where the grammar ends."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that no text of a grammar matches."""

    def compile(self, structured: StructuredOutput) -> str:
        """Compiles a grammar for `matcher`. Raises InvalidParameter or ValueError for unsupported parts."""

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of an answer. May be called by several threads."""

    def fill(self, going: Sequence[tuple[Any, int]], masks: "torch.Tensor", side_by_side: bool) -> None:
        """Writes the tokens that each matcher allows into its row of `masks` [R, words] int32, on the host.

        `side_by_side`: use threads of the library.
        """

    def way_out(self, matcher: Any, most: int) -> list[int] | None:
        """Tokens that finish the current JSON, without the token that ends the answer.

        None: no way of at most `most` tokens is known. The matcher's state does not change.
        """
