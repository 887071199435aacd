"""Pages of the KV cache outside the device: which are saved and loaded, and who waits for them.

    the last block of a page is written, its step has returned --completed--> `saves` of the next step, which copies
        them before anything else
    a request arrives  --ask--> distant stores are asked which of its pages they have
    it is the next to run, or blocks are free while it waits; a tier has its next pages --lookup, prefetch--> blocks are
        allocated; `loads` of the next step, which begin after it; the request is LOADING --report--> the blocks enter
        the prefix tree, and it is WAITING

A page has `page_blocks` blocks, and the content key (`cache/keys.py`) of the last. What the cache has of its tokens
are its parts (`Part`), each of which is saved and loaded by itself: blocks, those of layers with a window, and the
state after its last token. A request can continue at the end of a page if the tree or the tier has the blocks of all
pages up to there, the windows' blocks as far back as a window reaches, and the state. The deepest such end is loaded,
and no window's block before it that no query sees.

The scheduler asks an index (`TierIndex`); the bytes are moved in the worker (`runner/tiered.py`). While loads are on
their way the worker reports with each step which of them have ended, with several ranks those that have ended on all. A
load that fails is reported as shorter and never raised: a step that raises has a request to blame. What was loaded is
ordinary cached prefix: the request is then admitted like any other, and so are all that waited for the same pages.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, takewhile
from weakref import WeakKeyDictionary, WeakSet

import msgspec

from kvern.cache.allocation import Allocation
from kvern.cache.extension import CacheExtension
from kvern.cache.keys import block_keys, edges_of
from kvern.cache.messages import NO_STATE, PageLoad, PageSave, Part, TierIndex, TierMessage
from kvern.cache.radix import CachedPrefix, CacheMemory, Node, SequenceEnd
from kvern.cache.shared_prompt import OtherSaves, SharedPrompt
from kvern.cache.states import StatePool
from kvern.cache.tier_coming import ComingPrompts
from kvern.cache.tier_drafts import DraftTraffic
from kvern.cache.tier_loads import KnownPrompt, LoadedPage, LoadedSpans, PendingLoad, left_by, loaded_page
from kvern.cache.windows import WindowedBlocks
from kvern.request.events import EngineStatistics
from kvern.request.request import Request, State
from kvern.request.spans import cut
from kvern.request.step import ExtensionMessage, SchedulerOutput

LOOK_STEPS = 16
"""A request that waits, and for which there are no blocks or answers yet, is looked at again after so many steps."""
NEVER = 1 << 62


class TierTraffic(CacheExtension):
    """The transfers to and from a tier, and the requests that wait for loads."""

    name = TierMessage.extension
    prefetches = True
    counts_tokens = False

    def __init__(self, tier: TierIndex, page_blocks: int, memory: CacheMemory) -> None:
        """The extensions for windows and states, if there are any, have been made before."""
        self._tier = tier
        self._page_blocks = page_blocks
        self._ends = slice(page_blocks - 1, None, page_blocks)
        self._pool = memory.pool
        self._memory = memory.memory
        self._tree = memory.tree
        self._block_size = memory.block_size
        before = [each for each in memory.extensions if isinstance(each, CacheExtension)]
        self._blocks = Allocation(memory, before)
        self._windows = next((each for each in before if isinstance(each, WindowedBlocks)), None)
        self._states = next((each for each in before if isinstance(each, StatePool)), None)
        self.tells_parts = self._windows is None and self._states is None
        self._window_member = 0 if self._windows is None else 1 + before.index(self._windows)
        self._has_blocks = memory.pool is memory.memory
        """The blocks of the first block table hold something."""
        self._offers: dict[Node, int] = {}
        """Nodes that end a page, and the steps after which it is written."""
        self._urgent: list[Node] = []
        """Nodes of prompts for other engines that the step which is planned writes."""
        self._offered_states: dict[Node, None] = {}
        """Nodes that are written, and whose states may be written soon."""
        self._others = OtherSaves(tier)
        self._drafts = DraftTraffic(page_blocks)
        self._saves: list[PageSave] = []
        self._sent: list[tuple[int, PageSave]] = []
        """Saves that steps on their way were told of, by the numbers of the steps."""
        self._loads: list[PageLoad] = []
        self._ended: list[int] = []
        self._completed = 0
        self._loading: dict[int, PendingLoad] = {}
        self._arriving: dict[bytes, PendingLoad] = {}
        self._numbers = 0
        self._asked: WeakSet[Request] = WeakSet()
        """Waiting requests for which a load was decided on, which happens once at most while a request waits."""
        self._looks: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """The steps from which on waiting requests are looked at again."""
        self._came = LoadedSpans([*tier.figures()])
        self._questions: dict[Request, int] = {}
        self._unanswered: dict[Request, None] = {}
        """Requests that wait for what distant stores answer."""
        self._coming = ComingPrompts(tier)
        self._planned = 0

    @property
    def is_loading(self) -> bool:
        return bool(self._loading or self._unanswered or self._saves or self._coming.are_any)

    @property
    def promised(self) -> int:
        return sum(load.lacking for load in self._loading.values())

    def count(self, statistics: EngineStatistics) -> None:
        statistics.stores = self._tier.figures()

    def arrived(self, request: Request, contents: Sequence[int]) -> None:
        self._came.arrived(request)
        self._coming.arrived(request)
        question = self._tier.ask(self._parts(self._prompt(request, contents)))
        if question is not None:
            self._questions[request] = question

    def ready(self) -> list[Request]:
        self._load_coming()
        found = [request for request in self._unanswered if self._tier.answered(self._questions[request])]
        for request in found:
            del self._unanswered[request]
        return found

    def forget(self, request: Request) -> None:
        self._questions.pop(request, None)
        self._unanswered.pop(request, None)

    def plan(self, output: SchedulerOutput) -> ExtensionMessage | None:
        """A step without requests runs if there are pages to move, or if no other step can report what has ended."""
        self._planned = output.step
        if self._tier.keeps_drafts:
            self._drafts.offer(output, lambda node: self._tier.wants(self._tree.key(node), Part.DRAFT))
        polls = bool(self._loading) and self._completed >= output.step - 1
        if not (output.scheduled or self._saves or self._loads or polls):
            return None
        written = self._written(output.step)
        message = TierMessage(self._saves, self._loads, self._ended, written=written, awaited=self._others.is_noted)
        self._sent += [(output.step, save) for save in (*message.saves, *written)]
        self._others.note(output.step, (*message.saves, *written))
        if output.scheduled:
            self._drafts.tell(message)
        self._saves = []
        self._loads = []
        self._ended = []
        is_needed = message.saves or message.loads or message.ended or message.undrafted or written or polls
        return message if is_needed else None

    def publish(self, request: Request, index: int, node: Node, step: int) -> None:
        if (index + 1) % self._page_blocks == 0:
            self._offers.pop(node, None)
            self._offers[node] = step
            if request.spec.hands_over and self._states is None:  # states are copied by the next step
                self._urgent.append(node)

    def _written(self, step: int) -> list[PageSave]:
        """The pages of prompts for other engines that a step writes: these wait for nothing else."""
        urgent = [node for node in self._urgent if self._offers.get(node) == step]
        self._urgent = []
        saves = [self._save_of(node, step) for node in urgent]
        for node in urgent:
            del self._offers[node]
        return [save for save in saves if save is not None]

    def completed(self, step: int) -> None:
        """Pages that are written now are saved by the next step, whatever it evicts."""
        self._completed = step
        self._sent = [each for each in self._sent if each[0] > step]
        for node in [*takewhile(lambda node: self._offers[node] <= step, self._offers)]:
            del self._offers[node]
            if (save := self._save_of(node, step)) is not None:
                self._saves.append(save)
            if self._states is not None:
                self._offered_states[node] = None
        if self._states is not None:
            self._save_states(self._states)
        for node in self._drafts.completed(step):
            blocks = [other.block for other in self._nodes_of(node)]
            self._saves.append(PageSave(self._tree.key(node), [[]], draft=blocks))

    def leave(self, request: Request, end: SequenceEnd | None) -> None:
        self._drafts.left(request)

    def _save_of(self, node: Node, step: int) -> PageSave | None:
        """A page's blocks after a step, if a store lacks them, and all tables have the whole page; None: none."""
        tables: list[list[int]] = [[]]
        key, nodes = self._tree.key(node), self._nodes_of(node)
        if self._has_blocks and self._tier.wants(key, Part.BLOCKS):
            tables[0] = [node.block for node in nodes]
        if self._windows is not None:
            held = self._windows.written(nodes, step)
            wanted = bool(held) and self._tier.wants(key, Part.WINDOWS)
            tables += [list(column) if wanted else [] for column in held or [()] * self._windows.tables]
        return PageSave(key, tables) if any(tables) else None

    def _save_states(self, states: StatePool) -> None:
        """Save the states that are written now: each is copied by the step after the one that computes it."""
        for node in [*self._offered_states]:
            if (state := states.copy_at(node)) != NO_STATE and not states.is_written(node):
                continue
            del self._offered_states[node]
            key = self._tree.key(node)
            if state != NO_STATE and self._tier.wants(key, Part.STATE):
                self._saves.append(PageSave(key, [[]], state))

    def _nodes_of(self, node: Node) -> list[Node]:
        """The nodes of the page that ends with a node."""
        nodes = [node]
        while len(nodes) < self._page_blocks:
            assert nodes[-1].parent is not None
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def _prompt(self, request: Request, contents: Sequence[int]) -> KnownPrompt:
        namespace, limit = request.cache_namespace, request.most_cached
        path, partial, shared = self._tree.match(namespace, contents, limit, request.cached_path)
        request.cached_path = path
        prefix = CachedPrefix(path, partial, shared, len(path))
        for extension in (self._windows, self._states):
            if extension is not None:
                prefix = extension.match(prefix, None)
        return KnownPrompt(request, contents, path, len(prefix.path) * self._block_size + prefix.shared, {})

    def _pages(self, prompt: KnownPrompt) -> Iterator[tuple[bytes, int]]:
        """The pages behind a prompt's path: their keys, and the numbers of blocks up to their ends."""
        size, path = self._block_size, prompt.path
        known, request = len(path), prompt.request
        parent = self._tree.key(path[-1]) if path else self._tree.root_key(request.cache_namespace)
        keys = block_keys(parent, prompt.contents[known * size : request.most_cached], size)
        return ((key, end) for end, key in enumerate(keys, known + 1) if end % self._page_blocks == 0)

    def _known_pages(self, prompt: KnownPrompt) -> Iterator[tuple[bytes, int]]:
        """The pages of a prompt's path that a load may need parts of."""
        if self._windows is None and self._states is None:
            return
        first = prompt.usable // self._block_size
        if self._windows is not None:
            first = self._windows.first_seen(prompt.usable)
        for end in range(first // self._page_blocks * self._page_blocks, len(prompt.path) + 1, self._page_blocks):
            if end:
                yield self._tree.key(prompt.path[end - 1]), end

    def _parts(self, prompt: KnownPrompt) -> Iterator[tuple[bytes, Part]]:
        """The parts of pages that a load may need."""
        for key, end in chain(self._known_pages(prompt), self._pages(prompt)):
            if self._has_blocks and end > len(prompt.path):
                yield key, Part.BLOCKS
            if self._windows is not None:
                yield key, Part.WINDOWS
            if self._states is not None:
                yield key, Part.STATE

    def lookup(self, request: Request, contents: Sequence[int], step: int, reserve: int) -> bool:
        """Load the pages that follow what the prefix tree has of a request, if the tier has any and it pays.

        None are loaded for a request that would not fit now, with `reserve` blocks left for others.
        """
        if request in self._asked:
            return False
        if request in self._questions and not self._tier.answered(self._questions[request]):
            self._unanswered[request] = None
            return True
        found = self._look(request, contents, reserve)
        if found is None:
            return False
        prompt, pages = found
        if self._joins(request, pages):
            return True
        self._asked.add(request)
        left = left_by(self._loading.values(), self._block_size)
        return self._loads_if_it_pays(prompt, pages, step, left, is_next=True)

    def prefetch(
        self,
        request: Request,
        contents: Callable[[], Sequence[int]],
        step: int,
        reserve: int,
        ahead: Callable[[], Sequence[tuple[int, int]]],
    ) -> bool:
        """Does as `lookup`, for a request that waits for others, in which time pages may come.

        What is decided here once is not decided again until it is the next to run.
        """
        if request in self._asked or step < self._looks.get(request, 0):
            return False
        self._looks[request] = step + LOOK_STEPS
        if request in self._questions and not self._tier.answered(self._questions[request]):
            return False
        found = self._look(request, contents(), reserve)
        if found is None:
            return False
        self._looks[request] = NEVER
        prompt, pages = found
        return self._joins(request, pages) or self._loads_if_it_pays(prompt, pages, step, ahead(), is_next=False)

    def _joins(self, request: Request, pages: Sequence[LoadedPage]) -> bool:
        """Let a request wait for pages that are on their way, if some are."""
        arriving = next((self._arriving[page.key] for page in pages if page.key in self._arriving), None)
        if arriving is None:
            return False
        arriving.add(request, self._block_size)
        return True

    def _loads_if_it_pays(
        self,
        prompt: KnownPrompt,
        pages: list[LoadedPage],
        step: int,
        ahead: Sequence[tuple[int, int]] | None,
        is_next: bool,
    ) -> bool:
        """Begin a load, for which the request waits unless `ahead` is None: then it is still to come."""
        end = pages[-1].end * self._block_size
        if not self._tier.pays([(page.store, page.part) for page in pages], prompt.usable, end, ahead or (), is_next):
            return False
        if self._tier.keeps_drafts:
            ends = [page for page in pages if page.part is Part.BLOCKS and self._has(prompt, page.key, Part.DRAFT)]
            pages += [loaded_page(prompt, page.key, Part.DRAFT, page.end) for page in ends]
        self._begin(prompt, pages, step, ahead is not None)
        return True

    def bring(self, request: Request, contents: Sequence[int], reserve: Callable[[], int]) -> None:
        self._coming.add(request, contents, reserve, self._parts(self._prompt(request, contents)))
        self._load_coming()

    def _load_coming(self) -> None:
        for coming in self._coming.due(self._arriving):
            found = self._look(coming.request, coming.contents, coming.reserve())
            behind = [] if found is None else [page.key for page in found[1] if page.key in self._arriving]
            if behind:
                self._coming.wait(coming, behind[0])
            elif found is not None:
                self._loads_if_it_pays(*found, self._planned + 1, None, is_next=False)

    def _look(
        self, request: Request, contents: Sequence[int], reserve: int
    ) -> tuple[KnownPrompt, list[LoadedPage]] | None:
        """The pages that may be loaded for a request; None: there are none, or they would not fit now."""
        prompt = self._prompt(request, contents)
        page_tokens = self._page_blocks * self._block_size
        if request.most_cached // page_tokens * page_tokens <= prompt.usable:
            return None
        following = self._pages(prompt)
        first = next(following, None)
        if first is not None and first[0] in self._arriving:
            return prompt, [LoadedPage(first[0], Part.BLOCKS, first[1], "")]
        if not self._fits(prompt, prompt.usable, reserve):
            return None
        pages = self._find(prompt, following if first is None else chain([first], following))
        if not pages or not self._fits(prompt, pages[-1].end * self._block_size, reserve):
            return None
        if self._states is not None and not self._states.has_spare():
            return None
        return prompt, pages

    def _fits(self, prompt: KnownPrompt, computed: int, reserve: int) -> bool:
        """True if a request that continues after `computed` tokens would fit."""
        tokens = len(prompt.contents)
        path = prompt.path
        needed = [0] * len(self._blocks.tables)
        needed[0] = -(-tokens // self._block_size) - len(path) + sum(not node.users for node in path)
        if self._windows is not None:
            needed[self._window_member] = self._windows.most_needed(computed, tokens)
        return self._blocks.fit(needed, reserve + self.promised)

    def _find(self, prompt: KnownPrompt, following: Iterator[tuple[bytes, int]]) -> list[LoadedPage]:
        """The pages to load so that a request can continue as late as possible; none if it cannot continue later."""
        beyond = [*takewhile(lambda page: not self._has_blocks or self._has(prompt, page[0], Part.BLOCKS), following)]
        if self._windows is None and self._states is None:
            return [loaded_page(prompt, key, Part.BLOCKS, end) for key, end in beyond]
        keys = {end: key for key, end in chain(self._known_pages(prompt), beyond)}
        size, spans = self._block_size, prompt.request.spec.prompt.spans
        end = max(keys, default=0)
        while end * size > prompt.usable:
            missing = self._missing(prompt, keys, end)
            if missing is None and cut(spans, end * size) == end * size:
                return self._to_load(prompt, keys, end)
            end = (end if missing is None else missing) - self._page_blocks
        return []

    def _has(self, prompt: KnownPrompt, key: bytes, part: Part) -> bool:
        """True if a store has a part of a page, or the part is being loaded."""
        if (key, part) not in prompt.sources:
            prompt.sources[key, part] = "" if key in self._arriving else self._tier.source(key, part)
        return prompt.sources[key, part] is not None

    def _missing(self, prompt: KnownPrompt, keys: dict[int, bytes], end: int) -> int | None:
        """The end of a page of which neither tree nor tier has what a request needs that continues at `end`.

        One that continues after that page and before `end` needs it, too.
        """
        if self._states is not None and not self._has(prompt, keys[end], Part.STATE):
            return end
        pages = self._window_pages(prompt, end)
        return next((page for page, _ in pages if not self._has(prompt, keys[page], Part.WINDOWS)), None)

    def _to_load(self, prompt: KnownPrompt, keys: dict[int, bytes], end: int) -> list[LoadedPage]:
        """The pages that the tree lacks for a request that continues at `end`: later ones depend on earlier ones."""
        known, per_page = len(prompt.path), self._page_blocks
        first = known // per_page * per_page + per_page
        ends = range(first, end + 1, per_page) if self._has_blocks else ()
        pages = [loaded_page(prompt, keys[page], Part.BLOCKS, page) for page in ends]
        for page, lacking in self._window_pages(prompt, end):
            pages.append(loaded_page(prompt, keys[page], Part.WINDOWS, page)._replace(windows=lacking))
        pages.sort(key=lambda page: page.end)
        return pages if self._states is None else [*pages, loaded_page(prompt, keys[end], Part.STATE, end)]

    def _window_pages(self, prompt: KnownPrompt, end: int) -> Iterator[tuple[int, list[int]]]:
        """The windows' part of what the tree lacks for a request that continues at `end`: ends of pages, and blocks."""
        if (windows := self._windows) is None:
            return
        known, per_page = len(prompt.path), self._page_blocks
        first = windows.first_seen(end * self._block_size)
        for page in range(first // per_page * per_page + per_page, end + 1, per_page):
            lacking = [
                index
                for index in range(max(first, page - per_page), page)
                if index >= known or windows.window_at(prompt.path[index]) is None
            ]
            if lacking:
                yield page, lacking

    def _begin(self, prompt: KnownPrompt, pages: list[LoadedPage], step: int, waits: bool) -> None:
        """Load pages of a prompt, for which its request `waits`, or will come."""
        size = self._block_size
        known = len(prompt.path)
        end = max(page.end for page in pages)
        numbers = [index for page in pages for index in page.windows]
        self._tree.acquire(prompt.path)
        needed = [0] * len(self._blocks.tables)
        needed[0] = max(0, end - known)
        if self._windows is not None:
            needed[self._window_member] = len(numbers) * self._windows.tables
            self._windows.touch(prompt.path[self._windows.first_seen(end * size) : end])
        taken = self._blocks.take(needed)
        edges = [*edges_of(prompt.contents[known * size : end * size], size)]
        windows = {}
        if self._windows is not None:
            columns = iter(taken[self._window_member])
            windows = dict(zip(numbers, zip(*[columns] * self._windows.tables, strict=True), strict=True))
        self._numbers += 1
        namespace = prompt.request.cache_namespace
        load = PendingLoad(namespace, prompt.path, prompt.usable, edges, pages, taken[0], step, [], windows)
        if waits:
            load.add(prompt.request, size)
        load.ahead_of = "" if waits else prompt.request.request_id
        if self._states is not None:
            load.state = self._states.reserve()
        self._loading[self._numbers] = load
        self._arriving |= dict.fromkeys((page.key for page in pages), load)
        tables = 0 if self._windows is None else self._windows.tables
        patience = self._tier.patience(prompt.usable, end * size)
        self._loads += [load.message(self._numbers, page, self._page_blocks, tables, patience) for page in pages]

    def placed(self, request: Request) -> None:
        if request.spec.hands_over:
            self._others.is_noted = True
            self._offer_again(request.nodes[self._ends])
        self._asked.discard(request)
        self._looks.pop(request, None)
        self._drafts.placed(request)
        loaded = self._came.take(request, request.answer.cached_tokens)
        if request.queue.preemptions == 0:
            request.answer.loaded_tokens = loaded

    def report(self, report: object) -> list[Request]:
        """Enter loaded pages into the prefix tree; the requests that waited. `report`: (load, first pages that came).

        A load that was given up, with the steps that were undone, is ignored.
        """
        ended = msgspec.convert(report, list[tuple[int, int]])
        return [request for number, count in ended for request in self.loaded(number, count)]

    def loaded(self, number: int, count: int) -> list[Request]:
        """The first `count` pages of a load have arrived, and the others will not; the requests that waited for it."""
        load = self._loading.pop(number, None)
        if load is None:
            return []
        self._ended.append(number)
        self._came.note(load, count, self._block_size)
        for page in load.pages[:count]:
            self._enter(load, page)
        self._end(load)
        return load.waiting

    def _enter(self, load: PendingLoad, page: LoadedPage) -> None:
        """A part of a page has arrived: nodes of the prefix tree have it."""
        if len(load.path) < page.end:
            place = slice(len(load.path) - load.known, page.end - load.known)
            step = max([load.step, *(node.step for node in load.path[-1:])])  # nodes are not older than parents
            loaded = zip(load.edges[place], load.blocks[place], strict=True)
            self._tree.grow(load.namespace, load.path, loaded, step)
            load.path[-1].key = page.key
        for index in page.windows:
            assert self._windows is not None
            self._windows.give(load.path[index], load.windows[index], load.step)
        if page.part in (Part.BLOCKS, Part.DRAFT):
            own = range(max(load.known, page.end - self._page_blocks), page.end)
            found = [(load.path[index].block, load.blocks[index - load.known]) for index in own]
            blocks = [block for block, loaded in found if block == loaded]
            self._drafts.came(blocks, page.part is Part.DRAFT)
        if page.part is Part.STATE:
            assert self._states is not None
            self._states.settle(load.state, load.path[page.end - 1], load.step)
            load.state = NO_STATE

    def shared(self, request: Request, contents: Sequence[int]) -> SharedPrompt:
        """Others find all pages that end before the last token, and the last state that is kept of these."""
        most, namespace = contents[: request.prompt_length - 1], request.cache_namespace
        keys = [*block_keys(self._tree.root_key(namespace), most, self._block_size)][self._ends]
        awaited = deque((key, Part.BLOCKS) for key in keys if self._has_blocks)
        awaited += [(key, Part.WINDOWS) for key in keys[-1:] if self._windows is not None]

        def cached() -> Sequence[Node]:
            return self._tree.match(namespace, most, len(most), [])[0][self._ends]

        if (states := self._states) is not None:
            kept = [self._tree.key(node) for node in cached() if states.copy_at(node) != NO_STATE]
            awaited += [(key, Part.STATE) for key in kept[-1:]]
        size = self._page_blocks * self._block_size
        return SharedPrompt(self._others, keys, awaited, size, self._is_planned, lambda: self._offer_again(cached()))

    def shared_part(self, request: Request, tokens: int) -> SharedPrompt | None:
        """Pages are saved in order, so the last one is awaited; what has windows or states is loaded with the last."""
        nodes = request.nodes[: tokens // self._block_size][self._ends]
        if not nodes or not self.tells_parts:
            return None
        keys, size = [*map(self._tree.key, nodes)], self._page_blocks * self._block_size
        return SharedPrompt(self._others, keys, deque([(keys[-1], Part.BLOCKS)]), size, self._is_planned, lambda: None)

    def _is_planned(self, key: bytes, part: Part) -> bool:
        """True if one of the next steps saves a part of a page, if it can."""
        offered = chain(self._offers, self._offered_states if part is Part.STATE else ())
        saves = chain(self._saves, (save for _, save in self._sent))
        return any(key == self._tree.key(node) for node in offered) or any(key == save.key for save in saves)

    def _offer_again(self, nodes: Sequence[Node]) -> None:
        """Save pages that are cached here and may have left the stores."""
        self._offers = {node: node.step for node in nodes} | self._offers

    def loads_beyond(self, capacity: int) -> bool:
        """See `CacheExtension`."""
        loads = self._loading.values()
        held = (chain(load.blocks if self._has_blocks else (), *load.windows.values()) for load in loads)
        return any(block >= capacity for block in chain(*held))

    def resized(self, capacity: int) -> None:
        """Pages with blocks that lose their memory are not saved."""
        self._saves = [
            save for save in self._saves if all(block < capacity for block in chain(save.draft, *save.tables))
        ]

    def undo(self, step: int, waiting: Sequence[Request]) -> None:
        """All loads are given up; the requests do without them, whatever failed."""
        loads = list(self._loading.values())
        self._ended += self._loading
        self._loading = {}
        self._loads = []
        self._saves = []
        self._sent = []
        self._drafts.undo()
        self._unanswered.clear()
        self._coming.clear()
        for load in loads:
            self._end(load)
        self._asked.update(waiting)

    def lose(self, node: Node) -> None:
        self._offers.pop(node, None)
        self._offered_states.pop(node, None)
        self._drafts.lose(node)

    def check(self, running: Sequence[Request], loading: Sequence[Request]) -> int:
        blocks = [block for load in self._loading.values() for block in load.blocks]
        windowed = [block for load in self._loading.values() for block in chain(*load.windows.values())]
        assert all(self._pool.references(block) == 1 for block in blocks), "a block that is being loaded is shared"
        assert all(self._memory.references(block) == 1 for block in windowed), "a window's block in a load is shared"
        assert self._arriving.keys() == {page.key for load in self._loading.values() for page in load.pages}
        awaited = {request for load in self._loading.values() for request in load.waiting} | self._unanswered.keys()
        assert awaited >= {request for request in loading if request.state is State.LOADING}, (
            "a request waits for blocks that nobody loads"
        )
        offered = {*self._offers, *self._offered_states, *self._drafts.offered}
        assert offered <= set(self._tree.nodes()), "a block is offered that was removed"
        assert {load.load for load in self._loads} <= self._loading.keys(), "a load was given up and is still planned"
        return len(blocks) + len(windowed)

    def _end(self, load: PendingLoad) -> None:
        self._tree.release(load.path)
        self._pool.release(load.blocks)
        for blocks in load.windows.values():
            self._memory.release(blocks)
        if self._states is not None and load.state != NO_STATE:
            self._states.settle(load.state, None, load.step)
        for key in {page.key for page in load.pages}:
            del self._arriving[key]
