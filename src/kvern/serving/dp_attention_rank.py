"""A rank of DP attention other than the first: `python -m kvern.serving.dp_attention_rank ADDRESS PARENT`.

It is a rank as any other (`runner/ranks/rank_process.py`), except that it schedules and takes turns instead of steps.
"""

import sys
from typing import TYPE_CHECKING

from kvern.engine.factory import make_drafting, make_rank_core
from kvern.runner.ranks.rank_executors import DPAttentionExecutor
from kvern.runner.ranks.rank_process import Rank, main
from kvern.runner.ranks.rank_wire import AddAdapter, PlaceExperts, TakeTurn, TurnTaken, decode_for_rank, encode
from kvern.serving.dp_attention import take_turn

if TYPE_CHECKING:
    import zmq


def run_turns(socket: "zmq.Socket[bytes]", rank: Rank) -> None:
    """Take turns without end. Raises what a step raised: then the ranks do not agree any more."""
    assert rank.ranks.dp_attention is not None
    executor = DPAttentionExecutor(rank.worker, rank.ranks.dp_attention, None, rank.tier)
    drafting = make_drafting(rank.config, rank.spec, rank.layout, rank.draft)
    core = make_rank_core(rank.config, rank.folder, rank.layout, executor, drafting)
    while True:
        match decode_for_rank(socket.recv()):
            case AddAdapter() as message:
                core.add_adapter(message.key, message.adapter())
            case PlaceExperts(placements):
                rank.worker.place_experts(placements)
            case TakeTurn() as turn:
                events = take_turn(core, executor, turn)
                socket.send(encode(TurnTaken(events, core.statistics(), core.has_work)))
            case other:
                raise AssertionError(f"{other} is for ranks that take steps")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), run_turns))
