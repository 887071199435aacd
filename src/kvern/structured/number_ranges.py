"""Regular expressions for the whole numbers between two bounds of any size."""

from collections.abc import Iterator


def whole_numbers(low: int | None, high: int | None) -> str | None:
    """A regular expression for integers from `low` to `high`, None: unbounded; returns None if there are none."""
    if low is not None and high is not None and low > high:
        return None
    made = []
    if low is None or low < 0:
        largest = -1 if high is None else min(high, -1)
        made.append(f"-(?:{'|'.join(_positive(-largest, None if low is None else -low))})")
    if high is None or high >= 0:
        made += _positive(max(low or 0, 0), high)
    return "|".join(made)


def _positive(low: int, high: int | None) -> Iterator[str]:
    """Patterns by number of digits; both bounds are 0 or more."""
    most = len(str(low if high is None else high))
    for digits in range(len(str(low)), most + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = 10**digits - 1
        yield _between(str(first), str(last if high is None else min(high, last)))
    if high is None:
        yield f"[1-9][0-9]{{{most},}}"


def _between(low: str, high: str) -> str:
    """A pattern for numbers between bounds with equal numbers of digits."""
    if low == high:
        return low
    count = len(low)
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{count}}}"
    if low[0] == high[0]:
        return low[0] + _between(low[1:], high[1:])
    if count == 1:
        return f"[{low}-{high}]"
    parts = [low[0] + _between(low[1:], "9" * (count - 1)), high[0] + _between("0" * (count - 1), high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{count - 1}}}")
    return f"(?:{'|'.join(parts)})"
