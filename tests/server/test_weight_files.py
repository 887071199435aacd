"""Files of weights that process groups brought: which are kept, and for how long."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvern.request.weights import WeightSource
from kvern.serving.client_weights import ClientWeights


class Files:
    """Notes which files are kept."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    def keep(self, paths: set[str]) -> None:
        self.kept = set(paths)


class NewEngine:
    """Reads weights, while an update ends."""

    version = ""

    def __init__(self, weights: ClientWeights, files: Files, fails: bool) -> None:
        self._weights, self._files, self._fails = weights, files, fails

    async def catch_up(self, link: object, version: str, sources: Sequence[WeightSource]) -> None:
        if version == "1":
            self._weights.version, self._weights._sources = "2", [WeightSource("newer")]
            self._weights._forget_files()
            assert self._files.kept == {"older", "newer"}
            if self._fails:
                raise OSError("as planned")
        self.version = version


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_stays_while_a_new_engine_reads_it(fails: bool) -> None:
    files: Any = Files()
    weights = ClientWeights(list, lambda: asyncio.sleep(0), files)
    weights.version, weights._sources = "1", [WeightSource("older")]
    engine: Any = NewEngine(weights, files, fails)
    link: Any = None
    if fails:
        with pytest.raises(OSError, match="as planned"):
            asyncio.run(weights.catch_up(engine, link))
    else:
        assert asyncio.run(weights.catch_up(engine, link)) and engine.version == "2"
    assert files.kept == {"newer"}
