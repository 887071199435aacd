"""What the process of the first rank and those of the others say to each other: msgpack, never pickle.

first rank --> StartRank on standard input; LoadWeights, TakeMemory, then RunStep, ForgetSteps and UseIdleTime --> rank
first rank <-- Found, HasRoom, IsReady; Failed in the place of any of them: it cannot start               <-- rank
"""

from typing import Any, Literal

import msgspec

from kvern.step import SchedulerOutput
from kvern.worker.plan import Findings, Layout, Plan, Room


class RankMessage(msgspec.Struct, tag=True, array_like=True, gc=False):
    """One message; arrays on the wire, the tag first."""


class StartRank(RankMessage):
    """The options as built-in values, the folders of the model and its draft, and which rank the process is."""

    config: dict[str, Any]
    folder: str
    draft: str | None
    rank: int


class LoadWeights(RankMessage):
    """What all ranks agreed on, and the file where they meet."""

    plan: Plan
    meeting: str


class TakeMemory(RankMessage):
    """The KV cache that all of them have."""

    layout: Layout


class TierCall(msgspec.Struct, array_like=True, gc=False):
    """What a tier of the KV cache was asked: a method of `KVTier`, its keys, and for `put` the block."""

    method: Literal["put", "acquire", "release", "lose"]
    keys: list[bytes]
    block: int = 0


class RunStep(RankMessage):
    """The next step, and what the first rank's tier was asked before."""

    output: SchedulerOutput
    tier_calls: list[TierCall] = []


class ForgetSteps(RankMessage):
    """`Executor.forget`."""


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
decode_for_rank = msgspec.msgpack.Decoder(LoadWeights | TakeMemory | RunStep | ForgetSteps | UseIdleTime).decode
decode_for_first = msgspec.msgpack.Decoder(Found | HasRoom | IsReady | Failed).decode
