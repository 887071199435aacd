"""A logits processor of a package for tests that ends its engine while it reads an image, once at each `STAGES`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvern.models.vision import VisionTower
from kvern.runner import decoders
from kvern.sample.processors import ProcessorModel
from tests.support.processors import Shift

STAGES = ("decoding", "encoding")
"""Where engines end: when a child process has the file, and before the encoder has ended."""
FOLDER = "FOLDER_OF_LOST_ENGINES"
"""The environment variable that names the folder with a file for each stage at which an engine has ended."""


class LoseEngine(Shift):
    """Its making is what counts."""

    def __init__(self, model: ProcessorModel) -> None:
        ask, by_parts = decoders._ask, VisionTower.by_parts

        def asked(*given: Any) -> Any:
            end_once("decoding")
            return ask(*given)

        def interrupted(*given: Any) -> Iterator[Any]:
            parts = by_parts(*given)
            yield next(parts)
            yield next(parts)  # as many as are rehearsed at start
            end_once("encoding")
            yield from parts

        decoders._ask = asked  # type: ignore[assignment]
        VisionTower.by_parts = interrupted  # type: ignore[assignment, method-assign]


def end_once(stage: str) -> None:
    """Kills this process, unless one has ended at this stage."""
    note = Path(os.environ[FOLDER]) / stage
    if not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)
