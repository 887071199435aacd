"""Models agree on the memory of their KV caches: whoever needs it gets it, and nobody takes more than there is."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.residency.agreement import CacheShare, agreed, next_sizes

MODEL = CacheShare(chunk_bytes=10, least=2, most=20, has=2, wanted=0)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, CacheShare], int]:
    shares = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        least = draw(st.integers(1, 5))
        most = least + draw(st.integers(0, 10))
        size, wanted = draw(st.sampled_from((1, 3, 10))), draw(st.integers(0, 20))
        shares[name] = CacheShare(size, least, most, draw(st.integers(least, most)), wanted)
    return shares, draw(st.integers(-20, 200))


def beyond(shares: dict[str, CacheShare], chunks: dict[str, int]) -> int:
    return sum(share.above_least(chunks[name]) for name, share in shares.items())


@settings(max_examples=300, deadline=None)
@given(worlds(), st.booleans())
def test_needs_come_first_and_no_more_than_there_is_is_given(
    world: tuple[dict[str, CacheShare], int], needed_alone: bool
) -> None:
    shares, spare = world
    found = agreed(shares, spare, needed_alone=needed_alone)
    assert all(share.least <= found[name] <= share.most for name, share in shares.items())
    assert beyond(shares, found) <= max(0, spare)
    needs = {name: share.needed for name, share in shares.items()}
    if beyond(shares, needs) <= spare:
        assert all(found[name] >= needs[name] for name in shares), "all could have what they need"
    if needed_alone:
        assert all(found[name] <= needs[name] for name in shares)
    elif any(found[name] < share.most for name, share in shares.items()):
        largest = max(share.chunk_bytes for share in shares.values())
        assert spare - beyond(shares, found) < largest * len(shares), "memory is left, and somebody could use it"
    kept = {name: replace(share, has=found[name]) for name, share in shares.items()}
    assert agreed(kept, spare, needed_alone=needed_alone) == found, "nobody moves twice"


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_memory_moves_in_turns_and_is_never_given_twice(world: tuple[dict[str, CacheShare], int]) -> None:
    shares, spare = world
    has = {name: share.has for name, share in shares.items()}
    most = max(spare, beyond(shares, has), 0)
    agreement = agreed(shares, spare)
    for _ in range(2):  # those that shrink have done so by the second time
        sizes = next_sizes(shares, spare, agreement)
        growing = {name: max(chunks, shares[name].has) for name, chunks in sizes.items()}
        assert beyond(shares, {**has, **growing}) <= most, "some grow before others have given theirs back"
        has |= sizes
        shares = {name: replace(share, has=has[name]) for name, share in shares.items()}
    assert has == agreement and next_sizes(shares, spare, agreement) == {}


def test_memory_follows_the_load() -> None:
    """An idle model gives back what another needs, and nothing moves while nobody needs anything."""
    shares = {"a": replace(MODEL, has=12), "b": MODEL}
    assert agreed(shares, 100) == {"a": 12, "b": 2}, "a keeps the prefixes that it has cached"
    shares["b"] = replace(MODEL, wanted=9)
    assert agreed(shares, 100) == {"a": 5, "b": 9}
    assert next_sizes(shares, 100, {"a": 5, "b": 9}) == {"a": 5}, "b waits for what a gives back"
    shares = {"a": replace(MODEL, has=5), "b": replace(MODEL, has=9)}
    assert agreed(shares, 100) == {"a": 5, "b": 9}


def test_two_that_need_more_than_there_is_have_as_much_each() -> None:
    shares = {"a": replace(MODEL, has=12, wanted=20), "b": replace(MODEL, wanted=20), "c": replace(MODEL, wanted=3)}
    assert agreed(shares, 100) == {"a": 6, "b": 7, "c": 3}


def test_caches_shrink_to_what_requests_need_while_the_machine_lacks_memory() -> None:
    shares = {"a": replace(MODEL, has=12, wanted=4), "b": replace(MODEL, has=2)}
    assert agreed(shares, 100, needed_alone=True) == {"a": 4, "b": 2}
