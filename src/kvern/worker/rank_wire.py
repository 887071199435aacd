"""What the process of the first rank and those of the others say to each other: msgpack, never pickle.

first rank --> StartRank on standard input; LoadWeights, TakeMemory, then RunStep and UseIdleTime, in order --> rank
first rank <-- Found, HasRoom, IsReady; Failed in the place of any of them: it cannot start               <-- rank
"""

from typing import Any

import msgspec

from kvern.step import SchedulerOutput
from kvern.worker.plan import Findings, Layout, Plan, Room


class RankMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One message; arrays on the wire, the tag first."""


class StartRank(RankMessage):
    """The options as built-in values, the model's folder, and which rank the process is."""

    config: dict[str, Any]
    folder: str
    rank: int


class LoadWeights(RankMessage):
    """What all ranks agreed on, and where they meet, as `Ranks.connect` takes it."""

    plan: Plan
    meeting: str


class TakeMemory(RankMessage):
    """The KV cache that all of them have."""

    layout: Layout


class RunStep(RankMessage):
    """The next step."""

    output: SchedulerOutput


class UseIdleTime(RankMessage):
    """`Runner.idle`."""


class Found(RankMessage):
    """What `Worker.probe` found."""

    findings: Findings


class HasRoom(RankMessage):
    """What `Worker.load` left."""

    room: Room


class IsReady(RankMessage):
    """Steps can run."""


class Failed(RankMessage):
    """Why the rank cannot start."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(StartRank).decode
decode_for_rank = msgspec.msgpack.Decoder(LoadWeights | TakeMemory | RunStep | UseIdleTime).decode
decode_for_first = msgspec.msgpack.Decoder(Found | HasRoom | IsReady | Failed).decode
