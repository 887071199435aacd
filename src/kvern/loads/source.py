"""A load by an option's text: the name of a file, or properties from which it is drawn."""

import os
from collections.abc import Iterator
from pathlib import Path

from kvern.loads.drawn import draw
from kvern.loads.file import read_file
from kvern.loads.request import LoadRequest


def is_drawn(text: str) -> bool:
    """True if a load is drawn from properties; else the text names a file."""
    return "=" in text and not os.path.exists(text)


def read_load(text: str) -> Iterator[LoadRequest]:
    """Yields the requests of a load in order of arrival. Raises ConfigError."""
    return draw(text) if is_drawn(text) else read_file(Path(text))
