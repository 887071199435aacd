"""The messages between the process of the first rank and those of the others: msgpack, never pickle.

first rank --> StartRank on standard input; LoadWeights, TakeMemory, then RunStep and what is between steps --> rank
first rank <-- IsHere, HasFiles, Found, HasRoom, IsReady; Failed in the place of any: it cannot start      <-- rank

Ranks in DP attention get TakeTurn in the place of RunStep, and answer each with TurnTaken.

All come in order: an adapter is there before the first step that loads it, and goes after the last.

The tier of the first rank says which pages there are; each rank saves and loads those of its own heads and layers.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch

from kvern.adapters.peft import Adapter, LowRank
from kvern.ranks.expert_placement import Placement
from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.request import FinishReason, Progress, RequestSpec
from kvern.request.step import SchedulerOutput
from kvern.request.weights import WeightsFound, WeightSource
from kvern.runner.plan import FreeMemory, Layout, Plan, ProbedDevice

Method = Literal[
    "forget",
    "idle",
    "sleep",
    "wake",
    "map_cache",
    "release_pages",
    "begin_counting",
    "count_experts",
    "drop_adapter",
    "take_weights",
    "drop_weights",
]


class RankMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One message; arrays on the wire, the tag first."""


class StartRank(RankMessage):
    """The options as built-in values, the folders of the model and its draft, which rank the process is, and how stages
    share layers.

    `layers`: where those of each stage begin and end.
    """

    config: dict[str, Any]
    folder: str
    draft: str | None
    rank: int
    layers: list[tuple[int, int]]


class LoadWeights(RankMessage):
    """The plan that all ranks agreed on, and where they meet, as `Ranks.connect` takes it."""

    plan: Plan
    meeting: str


class TakeMemory(RankMessage):
    """The KV cache that all of them have."""

    layout: Layout


class RunStep(RankMessage):
    """The next step."""

    output: SchedulerOutput


class Call(RankMessage):
    """A method of `Executor`, which each rank carries out for its own part between the steps before and after it."""

    method: Method
    arguments: tuple[int, ...] = ()


class TakeTurn(RankMessage):
    """Begin and end requests at this rank, whose they are, then run its next step, or join in that of the others.

    `added`: each with how far an earlier engine brought it. `finished`: answers, by the reason and stop string that
    they end for. `unloaded`: adapters that no other request will use.
    """

    added: list[tuple[RequestSpec, Sequence[Progress]]] = []
    finished: list[tuple[list[str], FinishReason, str | None]] = []
    unloaded: list[int] = []


class TurnTaken(RankMessage):
    """Results of the steps of a rank in DP attention, how it stands, and whether it has more to do."""

    events: list[TokenEvent]
    statistics: EngineStatistics
    has_work: bool


class PlaceExperts(RankMessage):
    """Between the steps before and after it, the experts of these layers change their places."""

    placements: dict[int, Placement]


class AddAdapter(RankMessage):
    """An adapter for steps to load, whole: by part its rank and the bytes of both matrices of this dtype."""

    key: int
    dtype: str
    digest: bytes
    parts: dict[str, tuple[int, bytearray, bytearray]]

    @classmethod
    def of(cls, key: int, adapter: Adapter) -> "AddAdapter":
        """The message for an adapter that was read."""
        dtype = next((part.down.dtype for part in adapter.parts.values()), torch.float32)
        parts = {name: (part.rank, _bytes(part.down), _bytes(part.up)) for name, part in adapter.parts.items()}
        return cls(key, str(dtype).removeprefix("torch."), adapter.digest, parts)

    def adapter(self) -> Adapter:
        """The adapter, which shares the message's memory."""
        dtype = getattr(torch, self.dtype)
        parts = {
            name: LowRank(
                torch.frombuffer(down, dtype=dtype).view(rank, -1), torch.frombuffer(up, dtype=dtype).view(-1, rank)
            )
            for name, (rank, down, up) in self.parts.items()
        }
        return Adapter(parts, self.digest)


class ReadWeights(RankMessage):
    """`Executor.read_weights`; FoundWeights will say what came of it."""

    version: str
    sources: list[WeightSource]


class FoundWeights(RankMessage):
    """The result of reading new weights."""

    version: str
    found: WeightsFound


class Measured(RankMessage):
    """The seconds of the parts of a stage in a step, by the codes of `device/marks.py`."""

    step: int
    seconds: dict[int, float]


class Saved(RankMessage):
    """A rank has saved the pages of all steps up to this one, as far as they are awaited."""

    rank: int
    step: int


class IsHere(RankMessage):
    """The rank runs, and its messages arrive."""


class HasFiles(RankMessage):
    """The model's files are on the rank's machine, which on a Ray cluster may have had to load them first."""


class Found(RankMessage):
    """The result of `Worker.probe`."""

    findings: ProbedDevice


class HasRoom(RankMessage):
    """The result of `Worker.load`."""

    room: FreeMemory


class IsReady(RankMessage):
    """Steps can run."""


class Failed(RankMessage):
    """Why the rank cannot start."""

    reason: str


def _bytes(matrix: torch.Tensor) -> bytearray:
    return bytearray(matrix.view(torch.uint8).numpy())


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(StartRank).decode
decode_for_rank = msgspec.msgpack.Decoder(
    LoadWeights | TakeMemory | RunStep | TakeTurn | Call | PlaceExperts | AddAdapter | ReadWeights
).decode
decode_for_first = msgspec.msgpack.Decoder(
    IsHere | HasFiles | Found | HasRoom | IsReady | TurnTaken | FoundWeights | Measured | Saved | Failed
).decode
