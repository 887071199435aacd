"""The protocol between the KV cache and what extends it: windows, recurrent states, tiers, and what a package adds.

A cache manager has a list of extensions and calls each of them, in order, at the same points of a request's life:

    waiting  --arrived->  an extension may begin to look for the prefix elsewhere
             --prefetch, lookup-->  it may bring more of the prefix; the request is LOADING until `report` or `ready`
                          names it
             --awaits-->  it may lack what its next tokens stand for; it is ENCODING until `report` or `ready` names it
             --match--->  an extension shortens a cached prefix to what a request can continue from
    admitted --begin, needed, take--> its memory for the request; `leave` if the request does not fit after all
    running  --placed-->  the request has a row, which the next step has to be told of
             --needed, take--> more memory for more tokens
             --publish->  a full block of the request has entered the prefix tree
             --fork---->  another request continues from what this one has computed
    ended    --leave--->  the memory goes to nodes of the prefix tree, or becomes free; `forget` in any case
    a step   --failed-->  the requests that cannot go on
             --encode-->  work beside the layers of the model, before prompts are scheduled
             --plan---->  the extension's message to the worker's side, in `SchedulerOutput.extensions`
             --report-->  what the worker's side answered, in `ModelRunnerOutput.reports`
             --completed, undo--> the step has returned, or has failed
    no step  --resized--> the memory that blocks have has changed

An extension keeps its own data of each request and of each node. It holds no tensor and reads no clock.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from kvern.cache.block_pool import BlockPool
from kvern.cache.radix import CachedPrefix, Node, SequenceEnd
from kvern.cache.shared_prompt import SharedPrompt
from kvern.request.events import EngineStatistics
from kvern.request.request import Request
from kvern.request.step import ExtensionMessage, SchedulerOutput


class CacheExtension:
    """One extension of the KV cache. Each method does nothing here: an extension overrides those that it needs."""

    name: ClassVar[str]
    """The name of its messages and reports in a step."""
    excludes: ClassVar[frozenset[str]] = frozenset()
    """The names of extensions that cannot be used beside this one."""
    pool: BlockPool | None = None
    """The pool of its blocks; None if it has no blocks."""
    tables: int = 0
    """Its block tables: how many blocks it needs for each further block of a request."""

    prefetches: bool = False
    """`prefetch` may do something."""
    tells_parts: bool = False
    """`shared_part` may return something that is loaded ahead."""
    counts_tokens: ClassVar[bool] = True
    """It has to be asked for a token that begins and fills no block, too."""

    @property
    def evictable_count(self) -> int:
        """Blocks of the pool that it can free."""
        return 0

    def evict(self, used: bool) -> bool:
        """Free the blocks of one node; with `used` also of a node that is likely to be used again.

        Returns whether there was such a node.
        """
        return False

    @property
    def is_loading(self) -> bool:
        """True if work for a request that waits is not finished: a load, a question, an encoding."""
        return False

    @property
    def promised(self) -> int:
        """Blocks of each table that others leave free: those who wait for a load need them as soon as it has ended."""
        return 0

    def arrived(self, request: Request, contents: Sequence[int]) -> None:
        """A request is queued; `contents` has one integer for each position."""

    def ready(self) -> Sequence[Request]:
        """The requests whose wait has ended since the last call without a report from a rank; called before each
        step."""
        return ()

    def lookup(self, request: Request, contents: Sequence[int], step: int, reserve: int) -> bool:
        """Bring more of the prefix of a waiting request, if possible; returns whether the request has to wait for it.

        `contents` has one integer for each position. `reserve` blocks are left for other requests.
        """
        return False

    def prefetch(
        self,
        request: Request,
        contents: Callable[[], Sequence[int]],
        step: int,
        reserve: int,
        ahead: Callable[[], Sequence[tuple[int, int]]],
    ) -> bool:
        """Bring more of the prefix of a request that waits for others; returns whether it waits for this, too.

        It is asked at each step, so it returns soon. `ahead`: the tokens of prompts, from one position to another, that
        are computed before the request runs. `reserve` blocks are left for other requests.
        """
        return False

    def awaits(self, request: Request, computed: int) -> bool:
        """True if a waiting request, which would go on after so many tokens, has to wait for what they stand for."""
        return False

    def failed(self) -> Sequence[tuple[Request, str]]:
        """The requests that cannot go on, as was found since the last call, and why; asked before each step."""
        return ()

    def encode(self, tokens: float) -> float:
        """Add work to the step that is planned, which costs as much as so many tokens at most; returns its cost."""
        return 0.0

    def match(self, prefix: CachedPrefix, step: int | None) -> CachedPrefix:
        """The part of a cached prefix from which a request can continue in `step`; None: in any later step."""
        return prefix

    def begin(self, request: Request, prefix: CachedPrefix) -> None:
        """Keep what a request that may be admitted shares with its cached prefix."""

    def has_room(self) -> bool:
        """True if there is memory, other than blocks, for one more request."""
        return True

    def needed(self, request: Request, tokens: int) -> int:
        """Returns the number of blocks that the request lacks for its first `tokens` tokens."""
        return 0

    def take(self, request: Request, blocks: list[int]) -> None:
        """Give an admitted or running request its blocks, as many as it needs: one in each table, then the next."""

    def placed(self, request: Request) -> None:
        """The request has got a row of the batch."""

    def until(self, request: Request, tokens: int) -> int:
        """Returns how many of the request's next `tokens` tokens the next step may compute."""
        return tokens

    def blocks_at(self, node: Node) -> Sequence[int]:
        """The node's blocks, one in each table. A request that shares a part of the node gets copies."""
        return ()

    def publish(self, request: Request, index: int, node: Node, step: int) -> None:
        """The request's block number `index`, which is full, has this node of the prefix tree."""

    def fork(self, parent: Request, child: Request, blocks: list[int]) -> Sequence[int]:
        """Let `child` continue from what `parent` has computed, with `blocks` of its own for the last, partial block.

        Returns the blocks of `parent` whose first tokens are to be copied to `blocks`.
        """
        return ()

    def retract(self, request: Request) -> None:
        """The request was forked and loses its row before any step has copied what it shares."""

    def leave(self, request: Request, end: SequenceEnd | None) -> None:
        """Drop what the request has. With `end`, nodes of the prefix tree keep what others may use."""

    def forget(self, request: Request) -> None:
        """The request has ended, whether it has run or not."""

    def lose(self, node: Node) -> None:
        """The node is about to be removed from the prefix tree."""

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        """The message for a step that is planned; None: there is nothing to tell.

        With nothing in `output.scheduled` the step runs only if there is a message.
        """
        return None

    def report(self, report: object) -> Sequence[Request]:
        """Takes the worker side's reply with a step. Returns the requests that need not wait any longer."""
        return ()

    def completed(self, step: int) -> None:
        """All steps up to this one have returned, or were undone."""

    def loads_beyond(self, capacity: int) -> bool:
        """True if blocks behind the first `capacity` ones cannot be given back before a load has ended."""
        return False

    def resized(self, capacity: int) -> None:
        """Only the first `capacity` blocks have memory from now on; those behind lose what is written to them."""

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        """The steps from `step` on have failed. No request runs; those of `waiting` need not wait for a report."""

    def shared(self, request: Request, contents: Sequence[int]) -> SharedPrompt | None:
        """Returns what other engines are to find of a prompt that is computed; None: nothing."""
        return None

    def shared_part(self, request: Request, tokens: int) -> SharedPrompt | None:
        """Returns what `shared` does, of the first tokens of a prompt; None: they cannot be loaded alone."""
        return None

    def bring(self, request: Request, contents: Sequence[int], reserve: Callable[[], int]) -> None:
        """Bring the prefix of a request that will come, now or soon; `reserve` returns the blocks left for others."""

    def renew(self) -> Sequence[Request]:
        """Later steps compute with other weights; returns the requests that need not wait any longer."""
        return ()

    def count(self, statistics: EngineStatistics) -> None:
        """Write its counters."""

    def close(self) -> None:
        """The engine ends."""

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        """Raise AssertionError if the extension's data are inconsistent; returns its references to blocks.

        `loading`: the requests that are LOADING or ENCODING.
        """
        return 0
