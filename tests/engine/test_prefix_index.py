"""The server's index of what engines have cached, kept by what they tell, and the choice of an engine by it."""

import random
from collections.abc import Iterator, Sequence

import pytest

from kvern.cache.block_pool import BlockPool
from kvern.cache.journal import CacheJournal, NameLedger
from kvern.cache.keys import MARK, root_key
from kvern.cache.prefix_names import ENDS, NEXT_TOKENS, PrefixNames, named_tokens, prefix_names
from kvern.cache.radix import Node, RadixCache
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.store_figures import StorePrice
from kvern.serving.choice import BUSY_TOKENS, MOST_LOAD, EngineLoads, Load
from kvern.serving.engine_cache import CacheTeller
from kvern.serving.prefix_index import MOST_LEFT, TOKENS_OF_NAME, Expected, PrefixIndex, cached_tokens
from kvern.serving.wire import CacheChanges, decode_for_server, encode

NAMESPACES = (b"", b"one")


def named(tokens: Sequence[int], namespace: bytes = b"", marks: Sequence[tuple[int, bytes]] = ()) -> list[bytes]:
    prompt = PromptInput([*tokens], block_keys=tuple(marks))
    return prefix_names(RequestSpec("1", prompt, SamplingParams().resolved({}), 8, namespace=namespace))


class Cache:
    """An engine's prefix tree, with requests that come and go at random, and what it tells."""

    def __init__(self, dice: random.Random, block_size: int) -> None:
        self._dice, self._size = dice, block_size
        self.pool = BlockPool(400)
        self.tree = RadixCache(self.pool, block_size)
        self._journal: CacheJournal | None = None

    def watch_cache(self, wanted: bool) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = CacheJournal(self.tree) if wanted else None

    @property
    def cached_names(self) -> NameLedger | None:
        return None if self._journal is None else self._journal.ledger

    def store_prices(self) -> dict[str, StorePrice]:
        """A tier of its own, with pages of so many tokens."""
        return {"host": StorePrice(10.0, 0.5, self._dice.randrange(2, 20) * TOKENS_OF_NAME)}

    def live(self) -> None:
        """A sequence is cached that shares some beginning with earlier ones, its last block in parts; or some go."""
        if self._dice.random() < 0.3:
            self.tree.evict(self._dice.randrange(20))
            return
        namespace = self._dice.choice(NAMESPACES)
        tokens = [self._dice.randrange(2) for _ in range(3)]
        contents = [tokens[place * 3 // 900] for place in range(self._dice.randrange(900))]
        if contents and self._dice.random() < 0.2:
            contents[self._dice.randrange(len(contents))] = MARK + 7
        path: list[Node] = []
        for start in range(0, len(contents), self._size):
            piece = tuple(contents[start : start + self._size])
            if not self.pool.free_count:
                self.tree.evict(1)
            if not self.pool.free_count:
                break
            (block,) = self.pool.allocate(1)
            insert = self.tree.insert if len(piece) == self._size else self.tree.insert_tail
            node = insert(namespace, path[-1] if path else None, piece, block, 0)
            self.pool.release([block])
            if node is None or len(node.tokens) < self._size:
                break
            self.tree.acquire([node])
            path.append(node)
        self.tree.release(path)

    def names(self) -> set[bytes]:
        """The names of all that is cached, made anew."""
        found: set[bytes] = set()
        for namespace, node in self.tree.named_nodes():
            contents: list[int] = []
            above: Node | None = node
            while above is not None:
                contents[:0] = above.tokens
                above = above.parent
            marks = [(place, b"") for place, item in enumerate(contents) if item >= MARK]
            assert all(contents[place] == MARK + 7 for place, _ in marks)
            spec = RequestSpec("1", PromptInput([]), SamplingParams().resolved({}), 8, namespace=namespace)
            found.update(prefix_names(spec, contents))
        return found


def has_news(cache: Cache) -> bool:
    return cache.cached_names is not None and cache.cached_names.has_news


def told(cache: Cache, heard: list[CacheChanges]) -> CacheTeller:
    def send(changes: CacheChanges) -> None:
        message = decode_for_server(encode(changes))
        assert isinstance(message, CacheChanges)
        heard.append(message)

    return CacheTeller(cache, send)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 16, 48, 128, 900])
def test_the_index_has_what_engines_have(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, goes, is lost on the way, or begins anew; against sets that are made anew each time."""
    monkeypatch.setattr("kvern.serving.engine_cache.MOST_NAMES", 7)
    dice = random.Random(block_size)
    index = PrefixIndex()
    caches = [Cache(dice, block_size) for _ in range(3)]
    sent: list[list[CacheChanges]] = [[] for _ in caches]
    tellers = [told(cache, heard) for cache, heard in zip(caches, sent, strict=True)]
    gaps = 0

    def ask(number: int) -> None:
        index.begin(number)
        tellers[number].watch(True)

    for number in range(3):
        ask(number)
    for _ in range(250):
        number = dice.randrange(3)
        caches[number].live()
        tellers[number].tell()
        event = dice.random()
        if event < 0.05 and sent[number]:
            lost = dice.randrange(len(sent[number]))
            if sent[number][lost].number:  # that the first one is lost is not to be told from its being late
                del sent[number][lost]
        elif event < 0.08:
            index.drop(number)  # it has ended; the next one begins without anything, what is on its way is late
            caches[number] = Cache(dice, block_size)
            late = sent[number][:]
            sent[number].clear()
            tellers[number] = told(caches[number], sent[number])
            assert all(index.hear(number, changes) for changes in late) and not index.names_of(number)
            ask(number)
        while sent[number] and dice.random() < 0.8:
            if not index.hear(number, sent[number].pop(0)):
                gaps += 1
                ask(number)
        index.check_integrity()
    for number, cache in enumerate(caches):
        while not has_news(cache):  # that something was lost is known from what comes after it
            cache.live()
        while has_news(cache) or sent[number]:
            tellers[number].tell()
            for changes in [*sent[number]]:
                sent[number].remove(changes)
                if not index.hear(number, changes):
                    ask(number)
        assert index.names_of(number) == cache.names()
        cache.tree.check_integrity()
    assert gaps
    for number in range(3):
        index.drop(number)
        index.check_integrity()
    tellers[0].watch(False)
    caches[0].live()
    tellers[0].tell()
    assert not sent[0] and not caches[0].tree.gaining and not caches[0].tree.losing, "nobody wants to know"


def test_pieces_are_longer_where_a_prefix_is() -> None:
    assert ENDS[:34] == (32, *range(64, 2049, 64), 2176) and len([end for end in ENDS if end <= 8192]) == 65
    starts = (0, *ENDS)
    assert all(end - start <= max(NEXT_TOKENS, start / 16) for start, end in zip(starts, ENDS, strict=False))
    tokens = [*range(5000)]
    names = named(tokens)
    assert len(set(names)) == len(names) and named_tokens(len(names)) <= 5000 < ENDS[len(names)]
    assert named(tokens[:3000]) == names[: len(named(tokens[:3000]))]
    assert not {*named(tokens, b"other")} & {*names}
    marked = named(tokens, marks=[(70, b"image")])
    assert marked[:2] == names[:2] and not {*marked[2:]} & {*names}


def test_what_an_engine_will_have_counts_until_it_has_told() -> None:
    index, names = PrefixIndex(), named([1] * 400)
    assert index.expect(0, names) is None, "nobody asked it"
    index.begin(0)
    assert index.hear(0, CacheChanges(0, names[:2], []))
    first, second = index.expect(0, names), index.expect(0, [*names, b"longer"])
    assert first is not None and second is not None
    assert cached_tokens(index.levels(names), 0) == named_tokens(len(names))
    assert cached_tokens(index.levels(names), 1) == 0
    index.withdraw(first)
    assert index.levels(names) == [(named_tokens(len(names)), {0})], "the other request has them, too"
    assert index.hear(0, CacheChanges(1, names[2:4], []))
    index.withdraw(second)
    assert index.levels(names) == [(named_tokens(4), {0})]
    third = index.expect(0, names)
    index.begin(0)
    fourth = index.expect(0, names)
    assert third is not None and fourth is not None
    index.withdraw(third)  # of the engine before
    assert cached_tokens(index.levels(names), 0) == named_tokens(len(names))
    index.withdraw(fourth)
    assert not index.levels(names)
    index.check_integrity()


OWN, SHARED = StorePrice(20.0, 0.25, 100 * TOKENS_OF_NAME), StorePrice(40.0, 0.5)


def test_what_tiers_keep_counts_less_what_a_load_takes() -> None:
    """1,024 tokens that one engine has, another had, and a third had the first half of."""
    names = named([1] * 1024)
    half = named([1] * 512)

    def told(prices: dict[str, StorePrice]) -> PrefixIndex:
        index = PrefixIndex()
        for number in range(4):
            index.begin(number)
            index.hear(number, CacheChanges(0, names if number < 3 else [], [], prices))
        index.hear(1, CacheChanges(1, [], names[::-1], prices))
        index.hear(2, CacheChanges(1, [], names[: len(half) - 1 : -1], prices))
        index.check_integrity()
        return index

    def counted(index: PrefixIndex) -> list[int]:
        return [cached_tokens(index.levels(names), number) for number in range(4)]

    def held(index: PrefixIndex) -> list[int]:
        return [index.held_tokens(names, number) for number in range(4)]

    assert counted(told({})) == held(told({})) == [1024, 0, 512, 0], "it has no tier"
    own = told({"host": OWN})
    assert counted(own) == [1024, 768 - 20, 512 + 384 - 20, 0] and held(own) == [1024, 1024, 1024, 0]
    shared = told({"disk": SHARED})
    assert counted(shared) == [1024, 512 - 40, 512 + 256 - 40, 512 - 40] and held(shared) == [1024] * 4
    both = told({"host": OWN, "peer": SHARED})
    assert counted(both) == [1024, 768 - 20, 512 + 384 - 20, 512 - 40]
    slow = told({"host": StorePrice(0.0, 1.5, 1 << 20)})
    assert counted(slow) == held(slow) == [1024, 0, 512, 0], "computing is faster"
    own.hear(1, CacheChanges(2, half, [], {"host": OWN}))
    assert counted(own)[1] == 512 + 384 - 20, "it has computed a part again"
    own.drop(1)
    own.check_integrity()
    assert counted(own)[1] == 0


def test_tiers_keep_what_left_last() -> None:
    """The room of the tier and the most that is remembered bound it."""
    index, prices = PrefixIndex(), {"host": StorePrice(0.0, 0.5, 3 * TOKENS_OF_NAME)}
    index.begin(0)
    names = named([1] * 1024)
    index.hear(0, CacheChanges(0, names, [], prices))
    index.hear(0, CacheChanges(1, [], names[::-1], prices))
    index.check_integrity()
    assert index.held_tokens(names, 0) == named_tokens(3)
    many = [number.to_bytes(16, "little") for number in range(MOST_LEFT + 10)]
    index.hear(0, CacheChanges(2, many, [], {"disk": SHARED}))
    index.hear(0, CacheChanges(3, [], many, {"disk": SHARED}))
    index.check_integrity()
    assert not index.held_tokens(many[9:10], 0) and index.held_tokens(many[-1:], 0)


def test_a_tier_that_is_off_counts_for_nothing_until_it_is_on_again() -> None:
    index, names = PrefixIndex(), named([1] * 1024)
    index.begin(0)
    index.hear(0, CacheChanges(0, names, [], {"host": OWN}))
    index.hear(0, CacheChanges(1, [], names[::-1]))
    assert index.held_tokens(names, 0) == 1024, "nobody told another price"
    for number, (prices, expected) in enumerate((({}, 0), ({"host": OWN}, 1024)), 2):
        index.hear(0, CacheChanges(number, [], [], prices))
        index.check_integrity()
        assert index.held_tokens(names, 0) == expected


class Fleet:
    """Engines that are simulated: they have what they were given, and are as busy as they were made."""

    def __init__(self, count: int, *, tiers: bool = False) -> None:
        self.tiers = tiers
        self.index, self.loads = PrefixIndex(), EngineLoads()
        self.numbers: dict[int, int] = dict.fromkeys(range(count), 0)
        for number in range(count):
            self.index.begin(number)
            self.index.hear(number, CacheChanges(0, [], []))
            self.busy(number, 0)

    def busy(self, number: int, tokens: int, full: bool = False, computed: int = 0) -> None:
        self.loads.put(Load(full, tokens, computed, number))

    def caches(self, number: int, names: Sequence[bytes]) -> None:
        self.tells(number, [*names], [])

    def tells(self, number: int, stored: list[bytes], removed: list[bytes]) -> None:
        self.numbers[number] += 1
        prices = {"host": OWN, "disk": SHARED} if self.tiers else {}
        self.index.hear(number, CacheChanges(self.numbers[number], stored, removed, prices))

    def chosen(self, names: Sequence[bytes], away: Sequence[int] = ()) -> int | None:
        return self.loads.cheapest(self.index.levels(names), lambda number: number not in away)

    def scanned(self, names: Sequence[bytes], away: Sequence[int] = ()) -> int | None:
        """The same by a look at each."""
        loads = {number: load for number, load in self.loads._loads.items() if number not in away}
        if not loads:
            return None
        least = min(loads.values())
        bound = max(self.loads.bound, least.tokens)

        def cost(load: Load) -> tuple[bool, int, int, int]:
            cached = cached_tokens(self.index.levels(names), load.number) if load.tokens <= bound else 0
            return load.full, load.tokens - cached, load.computed, load.number

        return min(loads.values(), key=cost).number


def prompts(dice: random.Random) -> Iterator[list[bytes]]:
    systems = [[dice.randrange(100) for _ in range(512)] for _ in range(4)]
    while True:
        yield named([*dice.choice(systems), *[dice.randrange(20)] * dice.randrange(3000)])


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("count", [1, 2, 40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_the_cheapest_is_found_without_a_scan(count: int, tiers: bool) -> None:
    dice, fleet = random.Random(count), Fleet(count, tiers=tiers)
    asked = prompts(dice)
    for _ in range(300):
        number = dice.randrange(count)
        fleet.caches(number, next(asked))
        if tiers and (has := sorted(fleet.index.names_of(number))):
            fleet.tells(number, [], has[: dice.randrange(len(has))])
        fleet.busy(number, dice.choice([0, dice.randrange(9000)]), dice.random() < 0.1, dice.randrange(3))
        away = [dice.randrange(count) for _ in range(dice.randrange(3))]
        names = next(asked)
        chosen, scanned = fleet.chosen(names, away), fleet.scanned(names, away)
        if chosen is None or scanned is None:
            assert chosen is scanned
            continue
        costs = [fleet.loads._loads[one] for one in (chosen, scanned)]
        cached = [cached_tokens(fleet.index.levels(names), one) for one in (chosen, scanned)]
        assert costs[0].full == costs[1].full and chosen not in away
        assert costs[0].tokens - cached[0] == costs[1].tokens - cached[1]
        assert costs[0].computed == costs[1].computed


def test_no_engine_is_loaded_for_the_sake_of_its_cache_alone() -> None:
    """1,000 engines, of which few have what all ask for: whoever is chosen was within the bound, or the least."""
    dice, fleet = random.Random(1), Fleet(1000)
    loads = dict.fromkeys(range(1000), 0)
    hot = named([5] * 8000)
    for number in range(3):
        fleet.caches(number, hot)
    for _ in range(4000):
        chosen = fleet.chosen(hot)
        assert chosen is not None
        least = min(loads.values())
        mean = sum(loads.values()) / 1000
        assert loads[chosen] <= max(MOST_LOAD * mean, BUSY_TOKENS, least)
        loads[chosen] += 64 if hot[-1] in fleet.index.names_of(chosen) else 8064
        if hot[-1] not in fleet.index.names_of(chosen):
            fleet.caches(chosen, hot)
        fleet.busy(chosen, loads[chosen])
        if dice.random() < 0.5:
            done = dice.randrange(1000)
            loads[done] = max(0, loads[done] - 4000)
            fleet.busy(done, loads[done])
    assert sum(hot[-1] in fleet.index.names_of(number) for number in range(1000)) > 3, "others have it now, too"


def test_conversations_stay_with_their_engines() -> None:
    dice, fleet = random.Random(2), Fleet(1000)
    system = [9] * 1000
    turns = {number: [*system, *(dice.randrange(50) for _ in range(200))] for number in range(300)}
    homes: dict[int, int] = {}
    busy = dict.fromkeys(range(1000), 0)
    for turn in range(4):
        for number, tokens in turns.items():
            chosen = fleet.chosen(named(tokens))
            assert chosen is not None
            assert homes.setdefault(number, chosen) == chosen
            fleet.caches(chosen, named(tokens))
            busy[chosen] = dice.randrange(100) if turn else busy[chosen] + 64
            fleet.busy(chosen, busy[chosen])
            tokens += [dice.randrange(50) for _ in range(200)]
        for number in {*homes.values()}:
            fleet.busy(number, dice.randrange(100))
    assert len({*homes.values()}) > 10, "they are spread"
    gone = homes[0]
    fleet.index.drop(gone)
    fleet.loads.drop(gone)
    assert fleet.chosen(named(turns[0])) not in (None, gone)
    assert gone not in fleet.loads


def test_the_index_has_all_that_is_expected_though_it_asks_for_few_names() -> None:
    """Against sets of all names of all requests."""
    dice, index = random.Random(3), PrefixIndex()
    told = [set[bytes]() for _ in range(4)]
    heard = [0] * 4
    coming: list[tuple[int, Expected, set[bytes]]] = []
    for number in range(4):
        index.begin(number)

    def tell(number: int, stored: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
        assert index.hear(number, CacheChanges(heard[number], [*stored], [*removed]))
        heard[number] += 1
        told[number] = told[number] - {*removed} | {*stored}

    beginnings = [[dice.randrange(3) for _ in range(3)] for _ in range(30)]
    prompts = [named([token for token in tokens for _ in range(300)]) for tokens in beginnings]
    starts = {name for names in prompts for name in names[:3]}
    for _ in range(600):
        number, names = dice.randrange(4), dice.choice(prompts)[: dice.randrange(18)]
        event = dice.random()
        if event < 0.4 and (expected := index.expect(number, names)) is not None:
            coming.append((number, expected, {*names} - told[number]))
        elif event < 0.6:
            tell(number, names)
        elif event < 0.7 and all(one != number for one, _, _ in coming):
            tell(number, [], sorted(told[number] - starts))
        elif 0.7 < event < 0.75:
            index.begin(number)
            told[number], heard[number] = set(), 0
            coming = [one for one in coming if one[0] != number]
        elif coming:
            index.withdraw(coming.pop(dice.randrange(len(coming)))[1])
        index.check_integrity()
        asked = dice.choice(prompts)
        levels = index.levels(asked)
        for engine, known in enumerate(told):
            has = known.union(*(others for one, _, others in coming if one == engine))
            count = next((place for place, name in enumerate(asked) if name not in has), len(asked))
            assert cached_tokens(levels, engine) == named_tokens(count)


def test_names_that_nobody_has_are_not_made() -> None:
    class Counted(list[int]):
        read = 0

        def __getitem__(self, part: object) -> list[int]:  # type: ignore[override]
            assert isinstance(part, slice)
            self.read = max(self.read, part.stop)
            return super().__getitem__(part)

    index = PrefixIndex()
    index.begin(0)
    index.hear(0, CacheChanges(0, named([1] * 300), []))
    contents = [Counted([1] * 300 + [2] * 5000 + [3] * size) for size in (0, 90)]
    alone, like = (PrefixNames(root_key(b"", b""), each) for each in contents)
    assert index.levels(alone) == [(256, {0})]
    expected = index.expect(0, alone)
    assert expected is not None and contents[0].read == 320, "the first that nobody has"
    assert index.levels(like) == [(named_tokens(len([*alone])), {0})], "it will have what both begin with"
    index.withdraw(expected)
    assert index.levels(like) == [(256, {0})]
    index.check_integrity()
