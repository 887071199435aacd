"""The batch as it lives on the device: one row a running request."""

import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from kvern.device.transfer import send, upload
from kvern.request.step import Fork, GrownTable, NewRequest, ScheduledTokens


class WindowTables(NamedTuple):
    """The block tables beside the first one, where layers with a window have `tables` of their own.

    A block of the pool may be several of a layer's: `parts` of one with a window, `whole_parts` of one without. Tables
    have the number of the first. Where `whole_parts` is above 1, layers without a window have the last table, with the
    blocks of the first, whose numbers remain the pool's.
    """

    tables: int = 0
    parts: int = 1
    whole_parts: int = 1


NO_WINDOWS = WindowTables()


class BatchRows:
    """Tensors with a row for each slot; a step reads and advances them in place.

    tokens       [slots, max_model_len + 1] int32   prompt, output, and the token sampled last
    block_table  [slots, max_blocks] int32          the KV blocks of the sequence in order
    window_tables  each [slots, max_blocks] int32   others, as `WindowTables` says; what a window passed means nothing
    seeds        [slots] int64                      key of the request's random numbers
    top_k        [slots] int64                      0: all
    adapters     [slots] int64                      index of the adapter; -1: none
    changes      [slots] int64                      what changes its logits: 1 penalties, 2 its list, 3 both
    prompt_lengths  [slots] int64
    lists        [slots] int64                      address of its biases and bans; 0: none, or they stay on the host
    logprobs     [slots] int64                      most probable tokens that are reported; -1: nothing is
    turn_first, turn_shift  [slots] int64           `PromptInput.turn`
    num_computed_tokens  [slots] int32              of rows with drafts in flight, whose number the host does not know
    temperature, top_p, min_p, typical_p, repetition, presence, frequency   [slots] float32
    """

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        max_blocks: int,
        device: torch.device,
        windows: WindowTables = NO_WINDOWS,
    ) -> None:
        self.device = device
        self.tokens = _zeros(slots, max_model_len + 1, torch.int32, device)
        tables = 1 + windows.tables + (windows.whole_parts > 1)
        self._windows, self._tables = windows, _zeros(tables * slots, max_blocks, torch.int32, device)
        self.block_table, *self.window_tables = self._tables.view(tables, slots, max_blocks).unbind(0)
        self.num_computed_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._integers = _zeros(9, slots, torch.int64, device)
        self._numbers = _zeros(7, slots, torch.float32, device)
        (
            self.seeds,
            self.top_k,
            self.adapters,
            self.changes,
            self.prompt_lengths,
            self.lists,
            self.logprobs,
            self.turn_first,
            self.turn_shift,
        ) = self._integers
        self.adapters.fill_(-1)
        self.logprobs.fill_(-1)
        (
            self.temperature,
            self.top_p,
            self.min_p,
            self.typical_p,
            self.repetition,
            self.presence,
            self.frequency,
        ) = self._numbers
        self.requests: list[NewRequest | None] = [None] * slots

    def fork(self, forked: Sequence[Fork]) -> None:
        """Let rows go on behind others, all as they were before; the blocks they do not share come with `grow`."""
        if not forked:
            return
        taken = [fork for fork in forked if fork.slot != fork.source]
        sent = [
            (fork.slot, fork.source, fork.length, fork.token_id)
            for fork in (*taken, *(fork for fork in forked if fork.slot == fork.source))
        ]
        slots, sources, lengths, token_ids = upload(
            list(chain(*zip(*sent, strict=True))), torch.int64, self.device
        ).view(4, -1)
        if taken:
            targets = [(self.tokens[:, : max(fork.length for fork in taken)], 0)]
            targets += [(table, 0) for table in (self.block_table, *self.window_tables)]
            requests = [self.requests[fork.source] for fork in taken]
            if any(self.requests[fork.slot] is not request for fork, request in zip(taken, requests, strict=True)):
                targets += [(self._integers, 1), (self._numbers, 1)]
            to, origin = slots[: len(taken)], sources[: len(taken)]
            for target, dimension in targets:
                target.index_copy_(dimension, to, target.index_select(dimension, origin))
            for fork, request in zip(taken, requests, strict=True):
                self.requests[fork.slot] = request
        self.tokens.index_put_((slots, lengths), token_ids.int())

    def join(self, joined: Sequence[NewRequest]) -> None:
        """Let requests take their rows."""
        if not joined:
            return
        integers: list[list[int]] = [[] for _ in range(9)]
        numbers: list[list[float]] = [[] for _ in range(7)]
        for request in joined:
            params = request.params
            self.requests[request.slot] = request
            address = self._list(request)
            values_of_integers = (
                request.seed,
                params.top_k,
                request.adapter_index,
                params.penalizes_tokens + 2 * (address != 0),
                request.spec.prompt_length,
                address,
                -1 if params.logprobs is None else params.logprobs,
                *request.spec.prompt.turn,
            )
            for column, integer in zip(integers, values_of_integers, strict=True):
                column.append(integer)
            values = (
                params.temperature,
                params.top_p,
                params.min_p,
                params.typical_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
            for row, value in zip(numbers, values, strict=True):
                row.append(value)
        slots = upload([request.slot for request in joined], torch.int64, self.device)
        self._integers.index_copy_(1, slots, upload(list(chain(*integers)), torch.int64, self.device).view(9, -1))
        self._numbers.index_copy_(1, slots, upload(list(chain(*numbers)), torch.float32, self.device).view(7, -1))
        self._write(self.tokens, [(request.slot, 0, request.token_ids) for request in joined])
        self.grow([(request.slot, 0, request.block_ids) for request in joined])

    def grow(self, grown: Sequence[tuple[int, int, list[int]]]) -> None:
        """Append blocks to block tables: (slot, index of the first new entry, block ids)."""
        if not grown:
            return
        parts, last = self._windows.whole_parts, len(self.window_tables) * len(self.block_table)
        runs = list(grown)
        if parts > 1:
            runs += [(last + slot, first, [block * parts for block in blocks]) for slot, first, blocks in grown]
        self._write(self._tables, runs)

    def grow_windows(self, grown: Sequence[GrownTable]) -> None:
        """Append blocks to block tables of layers with a window."""
        if grown:
            slots, parts = len(self.block_table), self._windows.parts
            runs = [
                ((1 + item.table) * slots + item.slot, item.first, [block * parts for block in item.block_ids])
                for item in grown
            ]
            self._write(self._tables, runs)

    def draft(self, drafts: Sequence[tuple[int, int, list[int]]]) -> None:
        """Let rows go on with drafts: (slot, first position, token ids)."""
        if drafts:
            self._write(self.tokens, drafts)

    def certain(self, scheduled: Sequence[ScheduledTokens]) -> Sequence[ScheduledTokens]:
        """The scheduled tokens with the starts that only the device knew; waits for the device, if there are any."""
        if not any(item.uncertain for item in scheduled):
            return scheduled
        computed = self.num_computed_tokens.tolist()
        return [
            msgspec.structs.replace(item, start=computed[item.slot]) if item.uncertain else item for item in scheduled
        ]

    def starts(self, scheduled: Sequence[ScheduledTokens]) -> torch.Tensor:
        """The first positions of the requests of a step, [R] int32, without waiting."""
        flat = [(item.slot, item.start, item.uncertain) for item in scheduled]
        slots, planned, uncertain = upload(list(chain(*zip(*flat, strict=True))), torch.int64, self.device).view(3, -1)
        return torch.where(uncertain > 0, self.num_computed_tokens[slots], planned.int())

    def advance(
        self, scheduled: Sequence[ScheduledTokens], starts: torch.Tensor, rejected: torch.Tensor | None = None
    ) -> None:
        """Remember what a step computes of its rows from `starts` [R] int32 on, less what is `rejected` [R]."""
        flat = [item.slot for item in scheduled] + [item.count for item in scheduled]
        slots, counts = upload(flat, torch.int64, self.device).view(2, -1)
        counts = counts if rejected is None else counts - rejected
        self.num_computed_tokens[slots] = starts + counts.int()

    def _list(self, request: NewRequest) -> int:
        """The address of the request's biases and bans, if kernels read them."""
        return 0

    def _write(self, target: torch.Tensor, runs: Iterable[tuple[int, int, list[int]]]) -> None:
        """Write runs of values to rows of `target`: (row, first column, values)."""
        on_host = target.numpy() if target.device.type == "cpu" else None
        for slot, first, values in runs:
            numbers = np.frombuffer(struct.pack(f"{len(values)}i", *values), dtype=np.int32)
            if on_host is not None:
                on_host[slot, first : first + len(values)] = numbers
            else:
                target[slot, first : first + len(values)] = send(numbers, target.device)

    @property
    def turns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`turn_first` and `turn_shift`."""
        return self.turn_first, self.turn_shift

    def request(self, slot: int) -> NewRequest:
        """The request in a row that is taken."""
        request = self.requests[slot]
        assert request is not None, f"row {slot} is empty"
        return request

    def adapter_indices(self, slots: Sequence[int]) -> list[int]:
        """Indices of the adapters of the requests in these rows; -1: a request uses none."""
        return [self.request(slot).adapter_index for slot in slots]

    def sampled_slots(self, scheduled: Sequence[ScheduledTokens]) -> list[int | None]:
        """The rows that go on with the token sampled for them, None for others: parts of prompts, and beams."""
        return [
            item.slot if item.sampled and self.request(item.slot).params.beam_width is None else None
            for item in scheduled
        ]


def _zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [rows, columns], all rows aligned and as far apart as a multiple of 16: Triton compiles for that, once."""
    return torch.zeros(rows, -(-columns // 16) * 16, dtype=dtype, device=device)[:, :columns]


class ListedRows(BatchRows):
    """Rows whose lists are on the device, for kernels that read them by their addresses."""

    @cached_property
    def _lists(self) -> list[torch.Tensor | None]:
        """Each row's, for as long as kernels may read them."""
        return [None] * len(self.requests)

    def fork(self, forked: Sequence[Fork]) -> None:
        kept = [self._lists[fork.source] for fork in forked]
        super().fork(forked)
        for fork, numbers in zip(forked, kept, strict=True):
            self._lists[fork.slot] = numbers

    def _list(self, request: NewRequest) -> int:
        numbers = list_of(request)
        kept = self._lists[request.slot] = None if numbers is None else send(numbers, self.device)
        return 0 if kept is None else kept.data_ptr()


def list_of(request: NewRequest) -> "np.ndarray[tuple[int], np.dtype[np.int32]] | None":
    """The request's biases, bans and allowed tokens as int32 numbers, in the format of `kernels.constraints.change`.

    None: the request has none.
    """
    params, spec = request.params, request.spec
    biases = params.logit_bias or {}
    ends = sorted(spec.stop_token_ids) if params.min_tokens else []
    words = spec.bad_word_ids
    if not (biases or params.allowed_token_ids or ends or words):
        return None
    allowed = _mask(params.allowed_token_ids or [])
    lengths = [len(word) for word in words]
    header = [
        len(allowed),
        len(biases),
        len(ends),
        spec.prompt_length + params.min_tokens,
        len(words),
        max(lengths, default=0),
    ]
    table = [number for both in zip(accumulate(lengths, initial=0), lengths, strict=False) for number in both]
    numbers: np.ndarray[tuple[int], np.dtype[np.int32]] = np.concatenate(
        [
            np.array([*header, *biases], dtype=np.int32),
            np.array(list(biases.values()), dtype=np.float32).view(np.int32),
            allowed,
            np.array([*ends, *table, *(token for word in words for token in word)], dtype=np.int32),
        ]
    )
    return numbers


def _mask(allowed: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """A bit for each token id, to the last that is allowed."""
    ids = np.array(allowed, dtype=np.int64)
    words = np.zeros(0 if not allowed else int(ids.max()) // 32 + 1, dtype=np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words.view(np.int32)
