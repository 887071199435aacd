"""Ranks as threads of the test process: what each computes with its share of a model."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, load_model
from kvern.ranks.ranks import Ranks
from tests.support.model_outputs import PROMPT, logits

SECONDS = 60.0
Result = TypeVar("Result")


def load_with(folder: Path, **options: Any) -> Decoder:
    """`load_model` with these `LoadOptions`."""
    return load_model(folder, LoadOptions(**options))


def of_ranks(
    folder: Path, size: int, compute: Callable[[Decoder], Result], load: Callable[..., Decoder] = load_with
) -> list[Result]:
    """The results of `compute` on each of `size` ranks, which are threads, with its share of a model."""

    def run(rank: int) -> Result:
        ranks = Ranks(rank, size)
        ranks.connect(folder / f"meeting-{size}", torch.device("cpu"), SECONDS)
        return compute(load(folder, ranks=ranks))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def logits_of_ranks(
    folder: Path, size: int, load: Callable[..., Decoder] = load_with, **options: Any
) -> list[torch.Tensor]:
    """The logits of PROMPT on each rank; `options` of `load`."""
    return of_ranks(folder, size, lambda decoder: logits(decoder, PROMPT), partial(load, **options))
