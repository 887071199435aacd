"""The states of a model's layers on a GPU: which row has which is on the device, where graphs read it."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from kvern.cache.messages import StateMessage
from kvern.device.device_batch import DeviceBatch
from kvern.device.transfer import send, upload
from kvern.kernels import delta_net
from kvern.kernels.accepted_drafts import Written, accept_writes
from kvern.kernels.convolution import Drafts, Runs, accept_inputs
from kvern.layers.device_states import DeviceStates, Noted
from kvern.request.step import SchedulerOutput
from kvern.runner.cached_model import StateStack
from kvern.spec.mixers import RecurrentSpec
from kvern.spec.model import ModelSpec


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


T = TypeVar("T")


class _Verified(NamedTuple):
    """The drafts of a step, which of its requests have them, and what all layers alike have noted of them."""

    drafts: Drafts
    requests: slice
    noted: Mapping[RecurrentSpec, Noted]


class DeviceStateMemory:
    """`StateMemory` (`runner/state_memory.py`) for a runner that never waits for its device.

    There is a place more than the scheduler knows, the last: that of the row that pads batches, and of rows whose
    requests were given none.
    """

    def __init__(self, spec: ModelSpec, states: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._mixers = dtype, spec.recurrent
        self._stacked = {
            mixer: [
                torch.zeros(
                    spec.recurrent.count(mixer),
                    states + 1,
                    *tensor.shape,
                    dtype=torch.float32 if tensor.exact else dtype,
                    device=device,
                )
                for tensor in mixer.states
            ]
            for mixer in dict.fromkeys(spec.recurrent)
        }
        """The states of like layers, which one launch changes."""
        self._layers = self._in_order({mixer: zip(*tensors, strict=True) for mixer, tensors in self._stacked.items()})
        self._padding = states
        self._of_row = torch.full((rows,), states, dtype=torch.int32, device=device)
        self._verified: _Verified | None = None
        self._due: deque[_Verified] = deque()
        """Steps with drafts of which a later stage says what is kept, as in `StateMemory`."""

    @property
    def stacks(self) -> list[StateStack]:
        """See `RowStates`."""
        return [
            StateStack([place for place, other in enumerate(self._mixers) if other == mixer], tensors)
            for mixer, tensors in self._stacked.items()
        ]

    def prepare(self, output: SchedulerOutput) -> None:
        for counts in output.kept if self._due else ():  # the last stage, which accepts at once, defers none
            self._see(self._due.popleft(), upload(counts, torch.int32, self._of_row.device))
        message = output.message(StateMessage)
        if message is None:
            return
        for source, target in message.copies:
            for verified in self._due:  # its request has gone while its drafts are verified
                verified.drafts.counts.masked_fill_(verified.drafts.states == target, 0)
            for stacked in chain.from_iterable(self._stacked.values()):
                if source < 0:
                    stacked[:, target].zero_()
                else:
                    stacked[:, target].copy_(stacked[:, source])
        changed = dict(message.given)
        if changed:
            slots, given = upload([*changed, *changed.values()], torch.int64, self._of_row.device).view(2, -1)
            self._of_row.index_copy_(0, slots, given.int())

    def plan(self, batch: DeviceBatch, cut: tuple[torch.Tensor, torch.Tensor] | None = None) -> DeviceStates:
        """Plan which tokens go on with which state.

        `cut`: `requests` and `chunks` of the step's `Runs`, where only the device knows how long they are.
        """
        states = self._of_row.index_select(0, batch.device_slots)
        alone, known = batch.decodes, batch.decodes + batch.drafted
        self._verified = None
        runs = None
        if cut is not None:
            firsts = batch.query_start_loc[known:] - known
            runs = Runs(states[known:], firsts, batch.device_counts[known:], *cut)
        elif known < len(states):
            runs = runs_of(states[known:], batch.counts[known:])
        if not batch.drafted:
            return DeviceStates(self._layers, states[:alone], None, runs)
        requests, tokens = slice(alone, known), len(batch.token_ids) - alone - sum(batch.counts[known:])
        firsts, counts = batch.query_start_loc[requests] - alone, batch.device_counts[requests]
        of_tokens = torch.repeat_interleave(counts, output_size=tokens).int()
        counts = counts.masked_fill(states[requests] == self._padding, 0)
        drafts = Drafts(states[requests], firsts, counts, of_tokens)
        noted = {mixer: self._noted(mixer, tokens) for mixer in self._stacked}
        self._verified = _Verified(drafts, requests, noted)
        return DeviceStates(
            self._layers,
            states[:alone],
            drafts,
            runs,
            self._in_order({mixer: _by_layer(of_layers) for mixer, of_layers in noted.items()}),
        )

    def accept(self, kept: torch.Tensor) -> None:
        """Let states see the drafts of the step that was planned last, as far as `kept [R]` says."""
        verified, self._verified = self._verified, None
        if verified is not None:
            self._see(verified, kept[verified.requests].int())

    def defer(self) -> None:
        verified, self._verified = self._verified, None
        if verified is not None:
            self._due.append(verified)

    def _see(self, verified: _Verified, kept: torch.Tensor) -> None:
        """Let states see as many drafts as `kept` says, int32, of each of the requests that have any."""
        counts = torch.minimum(kept, verified.drafts.counts)
        for mixer, noted in verified.noted.items():
            accept_inputs(self._stacked[mixer][0], noted.inputs, verified.drafts, counts)
            if noted.written is not None:
                accept_writes(self._stacked[mixer][1], noted.written, verified.drafts, counts)

    def _in_order(self, parts: Mapping[RecurrentSpec, Iterable[T]]) -> Sequence[T]:
        """One of the parts of each layer's kind for each layer, in the order of the layers."""
        following = {mixer: iter(each) for mixer, each in parts.items()}
        return [next(following[mixer]) for mixer in self._mixers]

    def _noted(self, mixer: RecurrentSpec, tokens: int) -> Noted:
        """FreeMemory for what all layers of a kind note of so many tokens."""
        layers, device = self._mixers.count(mixer), self._of_row.device
        inputs = torch.empty(layers, tokens, mixer.channels, dtype=self._dtype, device=device)
        if not mixer.written:
            return Noted(inputs, None, None)
        written = Written(*(torch.empty(layers, tokens, *shape, device=device) for shape in mixer.written))
        return Noted(inputs, written, torch.zeros(tokens, *written.values.shape[2:], device=device))


def _by_layer(noted: Noted) -> Iterable[Noted]:
    """The notes of all layers, one after another."""
    if noted.written is None:
        return (Noted(inputs, None, None) for inputs in noted.inputs)
    written = (Written(*parts) for parts in zip(*noted.written, strict=True))
    return (Noted(*parts, noted.read) for parts in zip(noted.inputs, written, strict=True))
