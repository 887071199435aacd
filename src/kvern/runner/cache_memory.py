"""The memory of a KV cache that changes while the engine runs."""

from kvern.cpu.asleep import give_back
from kvern.device.chunked_memory import ChunkedMemory
from kvern.runner.loaded_model import Runner


def map_blocks(runner: Runner, chunked: ChunkedMemory | None, blocks: int) -> int:
    """Have memory behind the first blocks alone. Returns the number of blocks that may be used; no step runs.

    A CPU's system brings memory again when it is used; a GPU may have less than was asked for.
    """
    if chunked is not None:
        if blocks < chunked.blocks:
            runner.forget_blocks(range(blocks, chunked.scratch))
        return chunked.resize(blocks)
    for pool in runner.pools:
        for part in pool:
            give_back(part[blocks:])
    return blocks
