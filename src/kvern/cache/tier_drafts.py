"""Keys of a draft model in a tier: which pages it has computed, and which blocks have what was loaded.

A draft model computes keys only for requests that get drafts, after the model: they are saved when it has caught up.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from kvern.cache.messages import TierMessage
from kvern.cache.radix import Node
from kvern.request.request import Request
from kvern.request.step import SchedulerOutput


class DraftTraffic:
    """The pages of a draft model's keys that are offered to a tier, and the blocks of which it has to be told."""

    def __init__(self, page_blocks: int) -> None:
        self._page_blocks = page_blocks
        self._rows: dict[int, Request] = {}
        self._offers: dict[Node, int] = {}
        """Nodes that end a page, and the steps after which its keys are written."""
        self._drafted: list[int] = []
        self._undrafted: list[int] = []

    @property
    def offered(self) -> Sequence[Node]:
        """The nodes of pages that may be saved."""
        return list(self._offers)

    def placed(self, request: Request) -> None:
        """A request has got a row, if it has one."""
        if request.slot >= 0:
            self._rows[request.slot] = request

    def left(self, request: Request) -> None:
        """A request runs no longer."""
        if self._rows.get(request.slot) is request:
            del self._rows[request.slot]

    def offer(self, output: SchedulerOutput, wants: Callable[[Node], bool]) -> None:
        """After a step that asks for drafts of a request, the draft model has keys of all its known tokens."""
        for item in output.scheduled:
            request = self._rows.get(item.slot)
            if request is not None and item.guesses:
                self._offer(request, output.step, wants)

    def _offer(self, request: Request, step: int, wants: Callable[[Node], bool]) -> None:
        per_page, nodes = self._page_blocks, request.nodes
        for end in range(len(nodes) // per_page * per_page, 0, -per_page):
            node, own = nodes[end - 1], range(end - per_page, end)
            is_own = all(nodes[index].block == request.block_ids[index] for index in own)
            if node in self._offers or not is_own or not wants(node):
                return
            self._offers[node] = step

    def completed(self, step: int) -> list[Node]:
        """The nodes whose pages are written now."""
        found = [*takewhile(lambda node: self._offers[node] <= step, self._offers)]
        for node in found:
            del self._offers[node]
        return found

    def came(self, blocks: Sequence[int], has_keys: bool) -> None:
        """Blocks were loaded: first the model's keys, and then, if it `has_keys`, the draft model's."""
        (self._drafted if has_keys else self._undrafted).extend(blocks)

    def tell(self, message: TierMessage) -> None:
        """Add the blocks that were loaded with and without a draft model's keys to the message of the next step."""
        message.drafted.extend(self._drafted)
        message.undrafted.extend(self._undrafted)
        self._drafted.clear()
        self._undrafted.clear()

    def lose(self, node: Node) -> None:
        """A node is about to be removed."""
        self._offers.pop(node, None)

    def undo(self) -> None:
        """Steps have failed: a draft model knows nothing for sure."""
        self._rows.clear()
        self._offers.clear()
        self._drafted.clear()  # all of these are undrafted, too
