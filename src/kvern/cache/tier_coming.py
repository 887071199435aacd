"""Prompts that other engines still compute: what stores have of them is loaded before they come."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from kvern.cache.messages import Part, TierIndex
from kvern.request.request import Request


@dataclass(eq=False)
class ComingPrompt:
    """A prompt of which stores have more than was loaded.

    `contents` has one integer for each position, `reserve` returns the blocks that are left for others.
    """

    request: Request
    contents: Sequence[int]
    reserve: Callable[[], int]
    question: int | None
    """The question to distant stores; None: they have answered, or there are none."""
    behind: bytes | None = None
    """A page that is loaded before more is looked for; None: no page."""


class ComingPrompts:
    """The prompts of which it is to be decided what is loaded. `tier`: what knows the stores."""

    def __init__(self, tier: TierIndex) -> None:
        self._tier = tier
        self._prompts: dict[str, ComingPrompt] = {}

    @property
    def are_any(self) -> bool:
        """Something is still to be decided."""
        return bool(self._prompts)

    def add(
        self,
        request: Request,
        contents: Sequence[int],
        reserve: Callable[[], int],
        parts: Iterable[tuple[bytes, Part]],
    ) -> None:
        """Stores have more of a prompt: distant ones are asked which of these parts of pages they have."""
        self._prompts[request.request_id] = ComingPrompt(request, contents, reserve, self._tier.ask(parts))

    def due(self, arriving: Container[bytes]) -> list[ComingPrompt]:
        """Returns those that can be decided now, and forgets them. `arriving`: the pages that are on their way."""
        found = [one for one in self._prompts.values() if self._is_due(one, arriving)]
        for one in found:
            del self._prompts[one.request.request_id]
        return found

    def _is_due(self, one: ComingPrompt, arriving: Container[bytes]) -> bool:
        if one.question is not None and self._tier.answered(one.question):
            one.question = None
        return one.question is None and (one.behind is None or one.behind not in arriving)

    def wait(self, one: ComingPrompt, behind: bytes) -> None:
        """One is decided on when a page has come, or has been given up."""
        one.behind = behind
        self._prompts[one.request.request_id] = one

    def arrived(self, request: Request) -> None:
        """A request has come, and looks for itself."""
        self._prompts.pop(request.request_id, None)

    def clear(self) -> None:
        """Forgets all."""
        self._prompts.clear()
