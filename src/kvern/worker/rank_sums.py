"""Which sums of ranks on GPUs go through memory of each other, and which through NCCL: what is faster, alike on all."""

import torch

from kvern.device.measurements import Measurements
from kvern.device.ranks import Ranks
from kvern.device.timing import time_calls
from kvern.kernels.peer_sum import row_words_of

SECTION = "sums of ranks"


def choose_sums(ranks: Ranks, width: int, dtype: torch.dtype, device: torch.device, known: Measurements) -> list[str]:
    """Let `ranks` sum rows of `width` in the way that is faster on the first of them; a line about that.

    All ranks call this before a model is built, and then do alike.
    """
    if not row_words_of(width, dtype):
        return [f"sums of ranks: NCCL, since rows are {width} of {dtype}"]
    try:
        peers = ranks.map_peers(width, dtype, device)
    except RuntimeError as error:
        return [f"sums of ranks: NCCL, since their GPUs share no memory: {str(error).splitlines()[0]}"]
    if peers is None:
        return ["sums of ranks: NCCL, since not every GPU reaches the memory of all others"]
    key = f"{ranks.size} ranks, {width}, {dtype}"
    most = _first(ranks, most_rows_known(known, key), device)
    if most < 0:
        most = _first(ranks, peers.most_that_pay(ranks.group_sum, time_calls), device)
        known.remember(SECTION, {key: most})
        known.save()
    if most == 0:
        return ["sums of ranks: NCCL, which is faster"]
    peers.most_rows = most
    ranks.peers = peers
    return [f"sums of ranks: memory of each other for up to {most} rows, with the norm behind; NCCL for more"]


def most_rows_known(known: Measurements, key: str) -> int:
    """For up to how many rows that was faster which sums in memory; -1: it was never measured."""
    return int(known.section(SECTION).get(key, -1))


def _first(ranks: Ranks, number: int, device: torch.device) -> int:
    """What the first rank says."""
    return int(ranks.first(torch.tensor([number], device=device)))
