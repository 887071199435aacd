"""How much it takes to decode JSON, found out without decoding it: it holds everything else up while it is done."""

MOST_WORK = 1_200_000
"""A value counts 1, a field of an object 4 more, a list or an object 16. Takes some 50 ms."""
WORK = ((b",", 1), (b":", 4), (b"{", 16), (b"[", 16))


def is_too_much(data: bytes) -> bool:
    """Whether decoding would take more than that. Texts cost nothing, whatever stands in them."""
    if _work(data) <= MOST_WORK:
        return False
    # much of it may stand in texts
    pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return pieces.count(b'"') > MOST_WORK // 2 or _work(b"".join(pieces.split(b'"')[::2])) > MOST_WORK


def _work(data: bytes) -> int:
    return sum(cost * data.count(character) for character, cost in WORK)
