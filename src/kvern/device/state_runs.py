"""A step's runs of tokens, as the kernels of layers with states read them."""

from collections.abc import Sequence

import numpy as np
import torch

from kvern.device.transfer import send
from kvern.kernels import delta_net
from kvern.kernels.convolution import Runs


def chunks_of(counts: Sequence[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """First tokens of the chunks of runs of these lengths, and how many they have: [2, chunks] int64."""
    lengths, chunk = np.array(counts), delta_net.CHUNK
    firsts = np.cumsum(lengths) - lengths
    in_run = -(-lengths // chunk)
    run = np.repeat(np.arange(len(lengths)), in_run)
    begins = chunk * (np.arange(len(run)) - np.repeat(np.cumsum(in_run) - in_run, in_run))
    return np.stack((firsts[run] + begins, np.minimum(chunk, lengths[run] - begins)))


def runs_of(states: torch.Tensor, counts: Sequence[int]) -> Runs:
    """Runs of these lengths, one behind the other, that go on with `states [R]` int32."""
    lengths = np.array(counts)
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    parts = [np.cumsum(lengths) - lengths, lengths, of_token, chunks_of(counts).flatten()]
    sent = send(np.concatenate(parts).astype(np.int32), states.device)
    first, count, requests, chunks = torch.split(sent, [len(part) for part in parts])
    return Runs(states, first, count, requests, chunks.view(2, -1))
