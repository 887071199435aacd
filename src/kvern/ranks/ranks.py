"""Ranks that compute one model together: processes, each with a device and a share of the weights."""

import socket
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import permutations
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvern.device import marks
from kvern.device.transfer import upload
from kvern.ranks.stages import WHOLE, Stage

if TYPE_CHECKING:
    from kvern.cpu.ranks import SharedMemory
    from kvern.kernels.peer_words import PeerMemory
    from kvern.ranks.peer_sums import PeerExchange, PeerSums
    from kvern.ranks.process_group import Meeting
    from kvern.ranks.shared_norms import SharedNorms


class Share(NamedTuple):
    """The share of a rank in a dimension that has `whole` entries in a checkpoint."""

    held: range
    whole: int


class PaddedShare(NamedTuple):
    """A share that is stored with padding: `size` entries, of which the last ones are none of the checkpoint's."""

    size: int
    share: Share


def places(shares: Iterable[Share]) -> Iterator[tuple[int, range]]:
    """Places of parts that follow each other: where the share of a rank begins, and its entries in a checkpoint.

    The first is a place among all that the rank holds.
    """
    place = begin = 0
    for held, whole in shares:
        yield place, range(begin + held.start, begin + held.stop)
        place, begin = place + len(held), begin + whole


class Ranks:
    """Rank `rank` of `size`, which share the layers of a `stage`.

    All of them call the same methods in the same order, on tensors of the same shapes.

    Tensors stay on the ranks' devices; on GPUs no method waits, and a CUDA graph may hold what it does. A method raises
    RuntimeError where another rank has ended, or on a CPU does not come within the time given to `connect`.

    `check` raises it for calls that were captured on a CPU, and raise nothing when they are made again.

    With `dp_attention` this is a rank of DP attention: it shares experts with the other ranks, and nothing else.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, stage: Stage = WHOLE, dp_attention: "DPAttention | None" = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.stage = stage
        self.dp_attention = dp_attention
        self._memory: SharedMemory | None = None
        self._meeting: Meeting | None = None
        self.peers: PeerSums | None = None
        """Sums of few rows on GPUs, which norms behind them may join."""
        self.exchange: PeerExchange | None = None
        """The exchange of rows of which each rank has few, on GPUs."""
        self.norms: SharedNorms | None = None
        """The norms of steps of many rows, which ranks share."""
        self.mapped_bytes = 0
        """Bytes of this rank's GPU to which other GPUs write."""
        self.lost = torch.zeros(1, dtype=torch.int32)
        """Not 0: another rank has ended, and kernels wait for none, see `peer_words.addresses_of`."""
        self._ordered = False
        self._groups: list[Any] = []

    def connect(
        self,
        place: Path | str,
        device: torch.device,
        seconds: float,
        kernels: frozenset[str] = frozenset(),
        *,
        ordered: bool = False,
        listener: socket.socket | None = None,
        on_host: bool = False,
    ) -> None:
        """Meet the others, who name the same place as of `Meeting`; wait for them so long at most.

        CPUs share memory if all have the `kernels` "cpu_ranks", as only those of one machine may; else they talk
        through gloo, and wait so long each time; GPUs talk through NCCL. With `ordered` sums of many numbers have the
        same order of additions as sums of few. What calls `numbers` has to say `on_host`.
        """
        if self.dp_attention is not None:
            self.dp_attention.connect(place, device, seconds, kernels, ordered=ordered, listener=listener)
            return
        from kvern.cpu.ranks import SharedMemory
        from kvern.ranks.process_group import Meeting, end_with

        self._ordered = ordered
        own = f"stage-{self.stage.index}"
        shares_memory = "cpu_ranks" in kernels
        if self.size > 1 and shares_memory:
            file = Path(place)
            self._memory = SharedMemory(file.with_name(f"{file.name}-{own}"), self.rank, self.size, seconds)
        if self.processes == 1 or (self.stage.count == 1 and shares_memory):
            return
        self._meeting = meeting = Meeting(place, self.processes, device, seconds, listener)
        if self.size > 1 and not shares_memory:
            self._groups.append(meeting.group(own, self.rank, self.size))
            if on_host and device.type == "cuda":
                self._groups.append(meeting.group(f"{own}-host", self.rank, self.size, torch.device("cpu")))
        end_with(self, self._groups)
        self.stage.connect(meeting, f"rank-{self.rank}")

    def map_peers(self, width: int, dtype: torch.dtype, device: torch.device) -> "PeerMemory":
        """Memory of each other for such rows. All ranks call this; it raises RuntimeError, which says why, on all."""
        from kvern.kernels.peer_words import row_words_of
        from kvern.ranks.peer_memory import on_all, processors_together
        from kvern.ranks.peer_sums import mapped

        if self._meeting is None or not self._meeting.on_one_machine:
            raise RuntimeError("they meet over a network")
        store = self._meeting.store(f"stage-{self.stage.index}-peers")
        programs = processors_together(store, self.rank, self.size, device)
        if not programs:
            raise RuntimeError("not every GPU reaches the memory of all others")
        given = store, self.rank, self.size
        self.lost = self.lost.pin_memory()  # that GPUs read
        memory = on_all(*given, lambda: mapped(*given, self.lost, row_words_of(width, dtype), device, programs))
        self.mapped_bytes += memory.memory.nbytes
        return memory

    def map_norms(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> "SharedNorms":
        """The shared norms of halves of so many rows, after `map_peers`; all ranks call this. Raises as that."""
        from kvern.ranks.peer_memory import map_words, on_all
        from kvern.ranks.shared_norms import SharedNorms, memory_of

        assert self._meeting is not None
        store = self._meeting.store(f"stage-{self.stage.index}-norms")
        given, words = (store, self.rank, self.size), memory_of(self.size, rows, width, dtype)
        memories = on_all(*given, lambda: map_words(store, "norms", *given[1:], device, words))
        self.mapped_bytes += memories[self.rank].nbytes
        return SharedNorms(memories, self.lost, self.rank, rows, width, dtype)

    def of_own_stage(self) -> "Ranks":
        """The ranks of this stage alone, once they have met: for a whole model beside its layers, with all experts."""
        ranks = copy(self)
        ranks.stage, ranks.dp_attention = WHOLE, None
        return ranks

    @property
    def number(self) -> int:
        """This process's number among those of all stages."""
        return self.stage.index * self.size + self.rank

    @property
    def processes(self) -> int:
        """Returns how many compute the model, those of all stages."""
        return self.sharing_experts * self.stage.count

    @property
    def drops_rows(self) -> bool:
        """True if a last layer may leave out rows that are not sampled from: no other rank counts on them."""
        return self.stage.is_last and self.dp_attention is None

    @property
    def of_experts(self) -> "Ranks":
        """The ranks that have a share of the same experts each."""
        return self if self.dp_attention is None else self.dp_attention.ranks

    @property
    def sharing_experts(self) -> int:
        """The number of ranks `of_experts`."""
        return self.of_experts.size

    def share(self, count: int, copies: int = 1) -> Share:
        """This rank's share of a dimension that is cut into parts of `count` entries; `copies` adjacent ranks have the
        same part."""
        first = self.rank // copies * count
        return Share(range(first, first + count), count * self.size // copies)

    def padded_share(self, whole: int, multiple: int = 1) -> PaddedShare:
        """This rank's share of a dimension that is cut into parts of one size, a multiple of `multiple`.

        The last parts may hold less than that.
        """
        count = -(-whole // (self.size * multiple)) * multiple
        first = min(self.rank * count, whole)
        return PaddedShare(count, Share(range(first, min(first + count, whole)), whole))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, on each of them, in the same order of additions; `x` may be overwritten."""
        if self.size == 1:
            return x
        outer = marks.enter(marks.COLLECTIVES)
        if self._memory is not None:
            x = self._memory.sum(x)
        elif self.peers is not None and self.peers.takes(x):
            x = self.peers.sum(x)
        else:
            x = self.group_sum(x)
        marks.begin(outer)
        return x

    def group_sum(self, x: Tensor) -> Tensor:
        """The sum through NCCL or gloo, whatever `x` is."""
        x = x.contiguous()
        if not self._ordered or self.size == 2:
            self._groups[0].allreduce([x]).wait()
            return x
        first, *others = self._parts(x)
        total = first.float()
        for part in others:
            total += part
        return x.copy_(total)

    def beside(self, x: Tensor, width: int | None = None) -> Tensor:
        """`x [N, columns]` of all ranks side by side, on each of them: `[N, width]`, the first columns, or all."""
        width = x.shape[1] * self.size if width is None else width
        outer = marks.enter(marks.COLLECTIVES)
        if self._memory is not None:
            whole = self._memory.beside(x, width)
        else:
            whole = torch.cat(self._parts(x), -1)[:, :width].contiguous()
        marks.begin(outer)
        return whole

    def numbers(self, *numbers: int) -> list[list[int]]:
        """The numbers of each rank, on each of them; the host waits for the others, and no device does."""
        told = torch.tensor([numbers])
        if self._memory is not None:
            found: list[list[int]] = self._memory.beside(told, told.numel() * self.size).view(self.size, -1).tolist()
            return found
        parts = list(told.new_empty(self.size, *told.shape).unbind())
        self._groups[-1].allgather([parts], [told]).wait()
        return [part[0].tolist() for part in parts]

    def gather(self, x: Tensor) -> Tensor:
        """The all-gather of `x [N, width]` by rank: `[size * N, width]` on each of them."""
        outer = marks.enter(marks.COLLECTIVES)
        if self._memory is not None:
            rows = self._memory.beside(x.view(1, -1), self.size * x.numel()).view(-1, x.shape[1])
        elif self.exchange is not None and self.exchange.takes(x, len(x)):
            rows = self.exchange.gather(x)
        else:
            rows = self.group_gather(x)
        marks.begin(outer)
        return rows

    def group_gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks through NCCL or gloo, whatever `x` is."""
        out = x.new_empty(self.size * len(x), x.shape[1])
        self._groups[0]._allgather_base(out, x.contiguous()).wait()
        return out

    def sum_scattered(self, x: Tensor) -> Tensor:
        """This rank's rows `[N, width]` of the sum of the `x [size * N, width]` of all ranks."""
        count = len(x) // self.size
        if self._ordered or x.device.type == "cpu":
            return self.sum(x)[self.rank * count :][:count]
        if self.exchange is not None and self.exchange.takes(x, count):
            return self.exchange.sum_scattered(x)
        return self.group_sum_scattered(x)

    def group_sum_scattered(self, x: Tensor) -> Tensor:
        """The scattered sum through NCCL, whatever `x` is."""
        out = x.new_empty(len(x) // self.size, x.shape[1])
        self._groups[0]._reduce_scatter_base(out, x.contiguous()).wait()
        return out

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The `x` of all ranks."""
        parts = list(x.new_empty(self.size, *x.shape).unbind())
        self._groups[0].allgather([parts], [x.contiguous()]).wait()
        return parts

    def hand(self, x: Tensor, source: int, target: int) -> None:
        """Write what the rank `source` has in `x`, contiguous and as large on all, to that of the rank `target`."""
        numbers = x.view(1, -1).view(torch.uint8)  # of any dtype, also those that no library sends
        if self._memory is not None:
            found = self._memory.beside(numbers, self.size * numbers.shape[1])
            if self.rank == target:
                numbers.copy_(found[:, source * numbers.shape[1] :][:, : numbers.shape[1]])
        elif self.rank == source:
            self._groups[0].send([numbers], target, 0).wait()
        elif self.rank == target:
            self._groups[0].recv([numbers], source, 0).wait()

    def hand_once(self, device: torch.device) -> None:
        """Have each hand something to each, since NCCL takes memory for a pair when it first does that."""
        for source, target in permutations(range(self.size), 2):
            self.hand(torch.zeros(1, device=device), source, target)

    def first(self, x: Tensor) -> Tensor:
        """The `x` of the first rank, on each of them; `x` is contiguous, and overwritten on the others."""
        if self._memory is not None:
            return self._memory.first(x)
        self._groups[0].broadcast([x]).wait()
        return x

    def least(self, x: Tensor) -> Tensor:
        """The least of what all ranks, and those of earlier stages, have at each place of `x [N]`, on each of them."""
        least = x if self.size == 1 else self.beside(x[:, None], self.size).amin(-1)
        if not self.stage.is_first:
            least = least.minimum(self.stage.receive(torch.empty_like(least)))
        if not self.stage.is_last:
            self.stage.send(least)
        return least

    def meet(self, device: torch.device) -> None:
        """All ranks, and those of earlier stages, have come here when the first of the last stage goes on."""
        self.least(torch.zeros(1, dtype=torch.int32, device=device)).tolist()

    def check(self) -> None:
        """Raise RuntimeError if a rank was missing in a call that was captured."""
        if self._memory is not None:
            self._memory.check()

    def abort(self) -> list[Thread]:
        """Others have ended: let this GPU wait for them in NCCL no more, in threads that Python's end may find busy."""
        from kvern.ranks.process_group import abort

        inner = [] if self.dp_attention is None else self.dp_attention.ranks.abort()
        return [*inner, *abort(self._groups, awaited=False), *self.stage.abort()]

    def release(self) -> None:
        """Others have ended: let kernels that wait for words of theirs go on, with wrong numbers, now and later."""
        with torch.inference_mode():  # as it was made
            self.lost.fill_(1)
        if self.dp_attention is not None:
            self.dp_attention.ranks.release()


NO_ROOM = -1, -1, -1


class DPAttention:
    """DP attention: each rank computes attention for its own requests, and all ranks share the experts.

    The rows `[T, width]` of a step are gathered from the `ranks` before the experts, and the sums are scattered.

    All ranks call the same methods in the same order. Rows travel padded to as many as the rank with most of them has.
    Until `agree` is called all ranks have equally many, as in measurements at start and in captured steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.room: list[int] | None = None
        """The size of a captured step of all ranks; None: the step is launched kernel by kernel."""
        self._counts: list[int] = []
        """Rows of each rank; empty: all have equally many."""
        self._places: Tensor | None = None
        self._device = torch.device("cpu")

    def connect(
        self,
        place: Path | str,
        device: torch.device,
        seconds: float,
        kernels: frozenset[str],
        *,
        ordered: bool,
        listener: socket.socket | None,
    ) -> None:
        self._device = device
        self.ranks.connect(place, device, seconds, kernels, ordered=ordered, listener=listener, on_host=True)

    def agree(self, count: int, room: tuple[int, int, bool] | None) -> int:
        """This rank's next step has so many rows: how many that of the rank with most has.

        `room`: what a captured step has to have room for that does this one, decodes and tokens of prompts, and whether
        it must be one of decodes alone; None: there can be none. If there is one that has room for whatever any of them
        has, all replay it.
        """
        told = self.ranks.numbers(count, *(room or NO_ROOM))
        self._counts, self._places = [first for first, *_ in told], None
        rooms = [tuple(wanted) for _, *wanted in told]
        decodes, tokens, is_plain = map(max, zip(*rooms, strict=True))
        self.room = None if NO_ROOM in rooms or (is_plain and tokens) else [decodes, tokens]
        return max(self._counts)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks `[N, width]`, on each of them, of this one's `x [T, width]`."""
        most = max(self._counts, default=len(x))
        padded = x if len(x) == most else torch.cat((x, x.new_zeros(most - len(x), x.shape[1])))
        rows, places = self.ranks.gather(padded.contiguous()), self._places_of_rows(most)
        return rows if places is None else rows.index_select(0, places)

    def sum_scattered(self, x: Tensor, count: int) -> Tensor:
        """This rank's rows `[count, width]` of the sum of the `x [N, width]` of all ranks."""
        most = max(self._counts, default=count)
        places = self._places_of_rows(most)
        if places is not None:
            x = x.new_zeros(self.ranks.size * most, x.shape[1]).index_copy_(0, places, x)
        return self.ranks.sum_scattered(x)[:count]

    def _places_of_rows(self, most: int) -> Tensor | None:
        """The indices of the rows of all ranks among the padded ones, [N] int64; None: nothing is padded.

        They are sent once for a step, and not at all for one that is replayed.
        """
        if self._places is None and min(self._counts, default=most) < most:
            places = [rank * most + row for rank, count in enumerate(self._counts) for row in range(count)]
            self._places = upload(places, torch.int64, self._device)
        return self._places


def dp_attention_rank(rank: int, size: int) -> Ranks:
    """Rank `rank` of `size` in DP attention."""
    return Ranks(dp_attention=DPAttention(Ranks(rank, size)))


def ranks_of(
    number: int, size: int, layers: Sequence[range], *, embeds: bool = False, entries: Sequence[int] = ()
) -> Ranks:
    """Process `number` of stages with these layers, each of `size` ranks that share all of them.

    `embeds`, `entries`: as of `Stage`.
    """
    index, rank = divmod(number, size)
    if len(layers) == 1:
        return Ranks(rank, size)
    return Ranks(rank, size, Stage(index, len(layers), layers[index], embeds=embeds, entries=entries))


ALONE = Ranks()
