"""The batch as it lives on the device: one row a running request."""

from collections.abc import Iterable

import torch

from kvern.step import NewRequest


class BatchRows:
    """Tensors with a row for each slot; a step reads and advances them in place.

    tokens       [slots, max_model_len + 1] int32   prompt, output, and the token sampled last
    block_table  [slots, max_blocks] int32          the KV blocks of the sequence in order
    seeds        [slots] int64                      key of the request's random numbers
    temperature, top_k, top_p, min_p, typical_p, repetition, presence, frequency   [slots]

    What few requests use (bias, bans, allowed tokens, log-probabilities) stays in `requests`, on the host.
    """

    def __init__(self, slots: int, max_model_len: int, max_blocks: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(slots, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(slots, max_blocks, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p, self.typical_p, self.repetition, self.presence, self.frequency = (
            torch.zeros(slots, dtype=torch.float32, device=device) for _ in range(7)
        )
        self.requests: list[NewRequest | None] = [None] * slots

    def join(self, joined: Iterable[NewRequest]) -> None:
        """Let requests take their rows."""
        for request in joined:
            slot, params = request.slot, request.params
            self.requests[slot] = request
            self.tokens[slot, : len(request.token_ids)] = torch.tensor(request.token_ids, dtype=torch.int32)
            self.grow([(slot, 0, request.block_ids)])
            self.seeds[slot] = request.seed
            self.temperature[slot] = params.temperature if params.temperature is not None else 1.0
            self.top_k[slot] = max(params.top_k or 0, 0)
            self.top_p[slot] = params.top_p if params.top_p is not None else 1.0
            self.min_p[slot] = params.min_p
            self.typical_p[slot] = params.typical_p
            self.repetition[slot] = params.repetition_penalty
            self.presence[slot] = params.presence_penalty
            self.frequency[slot] = params.frequency_penalty

    def grow(self, grown: Iterable[tuple[int, int, list[int]]]) -> None:
        """Append blocks to block tables: (slot, index of the first new entry, block ids)."""
        for slot, first, blocks in grown:
            self.block_table[slot, first : first + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def request(self, slot: int) -> NewRequest:
        """The request in a row that is taken."""
        request = self.requests[slot]
        assert request is not None, f"row {slot} is empty"
        return request
