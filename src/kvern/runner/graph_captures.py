"""Which decode steps are captured as CUDA graphs, and in which order: before anybody waits for one.

at start      the first of `captures`, those that most steps need, as many as a moment allows
idle moments  the others, one at a time; an engine that has none (`LLM`) captures all at start
in a step     none: a step whose graph is missing runs by a larger one, or one that reads common prefixes several
              times, or eagerly
"""

import logging
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from kvern.errors import ConfigError, in_a_line
from kvern.runner.shared_prefix import LEAST_REQUESTS

logger = logging.getLogger("kvern")


class Captured(NamedTuple):
    """What a graph does: a decode step of `size` rows.

    `options`: some of them ask for more than a temperature; `prefix`: what requests begin with in common is read once;
    `adapted`: rows may use adapters.
    """

    size: int
    options: bool
    prefix: bool
    adapted: bool


def padded_size(requests: int) -> int:
    """The batch size of the graph that runs this many requests: a power of two, a multiple of 8, or a quarter more."""
    if requests <= 8:
        return 1 << (requests - 1).bit_length()
    step = max(8, 1 << ((requests - 1).bit_length() - 3))
    return -(-requests // step) * step


def smallest(captured: Collection[Captured], requests: int, options: bool, adapted: bool) -> Captured | None:
    """Of those that run so many requests without looking for common prefixes; None: there is none."""
    exact = Captured(padded_size(requests), options, False, adapted)
    if exact in captured:
        return exact
    return min((other for other in captured if other[1:] == exact[1:] and other.size > requests), default=None)


def captures(requests: int, prefixes: bool, adapters: bool, samples: bool = True) -> Iterator[Captured]:
    """All graphs of an engine that runs so many requests at once, the likeliest first.

    Of a kind the largest comes first, in whose memory the others find place. `samples`: it is no stage before the last.
    """
    sizes = sorted({padded_size(count) for count in range(1, requests + 1)}, reverse=True)
    for adapted in (False, True) if adapters else (False,):
        for prefix in (False, True) if prefixes else (False,):
            for options in (False, True) if samples else (False,):
                for size in sizes:
                    if size >= LEAST_REQUESTS or not prefix:
                        yield Captured(size, options, prefix, adapted)


def give_up(missing: deque[Any], error: RuntimeError, *, is_alone: bool) -> None:
    """Leave out the graphs that are `missing`, since the capture of the one before had no GPU memory.

    Raises any other error, and ConfigError on one of several ranks: others have them, and would run other steps.
    """
    if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):  # which the driver says
        raise error
    count = 1 + len(missing)
    if not is_alone:
        raise ConfigError(
            f"no GPU memory for {count} CUDA graphs of this rank, which the others may have: lower max_batch_requests "
            f"or gpu_memory_share, or set cuda_graphs to false ({in_a_line(error)})"
        ) from error
    logger.warning("no GPU memory for %d CUDA graphs: such steps run slower; %s", count, in_a_line(error))
    missing.clear()
    torch.cuda.empty_cache()
