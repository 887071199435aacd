"""Spans of a prompt: tokens that see each other, later ones too, and that one step computes."""

Spans = tuple[tuple[int, int], ...]
"""(first, end) of each; positions ascend."""


def cut(spans: Spans, position: int) -> int:
    """Returns the last position up to this one at which a step may end."""
    return next((first for first, end in spans if first < position < end), position)


def least(spans: Spans, start: int) -> int:
    """Returns the fewest tokens that a step computes from a position on."""
    return next((end - first for first, end in spans if first == start), 1)


def within(spans: Spans, start: int, end: int) -> Spans:
    """Returns the spans between two positions."""
    if not spans or spans[-1][1] <= start:
        return ()
    return tuple(span for span in spans if start <= span[0] and span[1] <= end)
