"""Log-probabilities of tokens, found by a kernel, in the form in which those that PyTorch finds are."""

import torch

from kvern.device.transfer import upload
from kvern.kernels import logprobs
from kvern.sample.beams import most_probable
from kvern.sample.logprobs import DeviceLogprobs


def reported(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> DeviceLogprobs:
    """Log-probabilities as `token_logprobs` returns them."""
    found = logprobs.empty(len(tokens), logits.device)
    slots = torch.zeros(len(tokens), dtype=torch.int32, device=logits.device)
    logprobs.logprobs(logits, slots, upload([most], torch.int64, logits.device), tokens, found)
    return DeviceLogprobs.of(found, len(tokens), min(most, logits.shape[-1]))


def listed(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable tokens as `most_probable` returns them."""
    if count > logprobs.WIDTH:
        return most_probable(scores, count)
    found = reported(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device), count)
    return found.best, found.best_ids
