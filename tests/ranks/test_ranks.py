"""What several ranks decide together, and steps that are run in parts: the same everywhere, from plain data."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.models.registry import spec_from_config
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, StepTooLarge
from kvern.runner.plan import (
    REQUIRED_KERNELS,
    CacheChunks,
    ChangingCache,
    FreeMemory,
    Layout,
    Plan,
    ProbedDevice,
    agree,
    lay_out,
)
from kvern.runner.step_parts import StepParts

SPEC = spec_from_config(
    {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
    }
)
CONFIG = EngineConfig(model="model", max_batch_requests=8)
ALL = REQUIRED_KERNELS | {"attention", "linear", "norm"}


def found(*kernels: frozenset[str]) -> list[ProbedDevice]:
    return [ProbedDevice("cuda", "bfloat16", each, f"GPU-{rank}") for rank, each in enumerate(kernels)]


def test_what_does_not_work_on_one_rank_is_used_by_none() -> None:
    plan = agree(found(ALL, ALL - {"linear"}, ALL - {"attention"}), CONFIG, SPEC)
    assert plan.kernels == REQUIRED_KERNELS | {"norm"}
    assert (plan.linear_backend, plan.attention_backend) == ("cublas", "torch_sdpa")
    assert plan.gpus == ("GPU-0", "GPU-1", "GPU-2")
    assert agree(found(ALL), CONFIG, SPEC).attention_backend == "auto"
    assert not agree(found(ALL, ALL - {"batch"}), CONFIG, SPEC).kernels, "the batch lives on every device or on none"


def test_the_fullest_rank_bounds_the_cache() -> None:
    plan = agree(found(ALL, ALL), CONFIG, SPEC)
    rooms = [FreeMemory(100_000, 100), FreeMemory(64_000, 200), FreeMemory(90_000, 100)]
    layout = lay_out(rooms, plan, CONFIG)
    assert layout.blocks * layout.block_size == 320
    assert lay_out(rooms[:1], plan, CONFIG).blocks == 63, "of 1000 tokens"
    with pytest.raises(ConfigError, match="the KV cache has room for 10 tokens"):
        lay_out([*rooms, FreeMemory(1000, 100)], plan, EngineConfig(model="model", max_model_len=64))


def test_a_library_that_one_rank_lacks_attends_nowhere() -> None:
    plan = agree(found(ALL, ALL), CONFIG, SPEC)
    both = frozenset({"triton", "flashinfer"})
    rooms = [
        FreeMemory(100_000, 100, {"decode": "triton", "mixed": "flashinfer"}, both),
        FreeMemory(100_000, 100, {}, both),
    ]
    assert lay_out(rooms, plan, CONFIG).attention == {"decode": "triton", "mixed": "flashinfer"}
    rooms[1] = FreeMemory(100_000, 100, {"decode": "triton", "mixed": "triton"}, frozenset({"triton"}))
    assert lay_out(rooms, plan, CONFIG).attention == {"decode": "triton", "mixed": "triton"}


MIB = 1 << 20


def changing(own: int, most: int, unit: int = 4, fixed: int = 7 * MIB) -> FreeMemory:
    """A rank whose cache changes, of blocks of 16 KiB."""
    return FreeMemory(MIB, 1024, changing=ChangingCache(unit, fixed, own, most))


def test_a_cache_that_changes_has_memory_for_one_sequence_and_addresses_for_the_largest() -> None:
    elastic = replace(CONFIG, elastic_kv_cache=True, max_batch_requests=1000)
    plan = agree(found(ALL, ALL), elastic, SPEC)
    layout = lay_out([changing(64 * MIB, 100 * MIB), changing(48 * MIB, 90 * MIB, 8, 9 * MIB)], plan, elastic)
    assert layout.blocks == 90 * 64, "of the rank with the least"
    assert layout.chunks == CacheChunks(88, 8, 9 * MIB, 48 * 64), "of whole units"
    assert (layout.own_chunks, layout.most_chunks) == (34, 66), "alone it takes no more than its share"
    assert layout.least_chunks == 1 and layout.least_blocks == 88, "a sequence of 128 tokens"
    assert layout.certain_bytes == 9 * MIB + 88 * 16 * 1024
    small = lay_out([changing(2 * MIB, 100 * MIB)], plan, elastic)
    assert small.chunk == 8 and small.blocks == 8 * 256, "chunks are small where a model has little of its own"
    few = lay_out([changing(64 * MIB, 100 * MIB)], plan, replace(elastic, kv_cache_tokens=1000))
    assert (few.blocks, few.chunk, few.least_chunks, few.own_chunks) == (64, 4, 2, 16)
    assert lay_out([changing(64 * MIB, 100 * MIB)], plan, elastic).kernels == plan.kernels
    fixed = lay_out([FreeMemory(MIB, 1024)], plan, elastic)
    assert (fixed.chunk, fixed.unit, fixed.certain_bytes, fixed.own_chunks) == (0, 0, 0, 0), (
        "a GPU whose cache keeps its size"
    )


def test_what_a_model_has_of_its_own_bounds_its_sequences_in_whole_chunks() -> None:
    long = replace(SPEC, max_position_embeddings=8192)
    elastic = replace(CONFIG, elastic_kv_cache=True)
    plan = agree(found(ALL), elastic, long)
    room = changing(5 * MIB + 100_000, 64 * MIB, 16)
    layout = lay_out([room], plan, elastic)
    assert (layout.max_model_len, layout.chunk) == (5 * 1024, 16), "of 326 blocks 320"
    assert layout.least_chunks * layout.chunk_bytes <= 5 * MIB + 100_000
    asked = replace(elastic, max_model_len=6000)
    with pytest.raises(ConfigError, match="room for 5216 tokens"):
        lay_out([room], agree(found(ALL), asked, long), asked)


def test_all_of_it_can_be_sent() -> None:
    plan = agree(found(ALL), CONFIG, SPEC)
    room = FreeMemory(100_000, 100, {"decode": "triton"}, frozenset({"triton"}))
    room = msgspec.structs.replace(room, changing=ChangingCache(1, 2, 30_000, 40_000))
    values: list[Any] = [*found(ALL), plan, room, lay_out([room], plan, CONFIG)]
    for value, kind in zip(values, (ProbedDevice, Plan, FreeMemory, Layout), strict=True):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


class SmallDevice:
    """Holds a few tokens at a time; a step samples the position that follows."""

    def __init__(self, most: int) -> None:
        self.most, self.ran, self.grown = most, [0][:0], [0][:0]

    def execute(self, output: SchedulerOutput) -> Any:
        self.grown += [slot for slot, _, _ in output.grown]
        if output.token_count > self.most:
            raise StepTooLarge("(0 MiB free)") from MemoryError("too little")
        self.ran.append(output.token_count)
        tokens = [[item.start + item.count] if item.sampled else [] for item in output.scheduled]
        made = ModelRunnerOutput(tokens, [None] * len(tokens), [None] * len(tokens))
        return type("Result", (), {"result": lambda self: made})()


def test_a_step_that_is_too_large_is_cut_and_so_are_later_ones() -> None:
    device = SmallDevice(6)
    steps = StepParts(device.execute)
    scheduled = [ScheduledTokens(0, 0, 15, 1), ScheduledTokens(1, 9, 1, 1), ScheduledTokens(2, 4, 4, 0)]
    for number, tried in ((1, [0]), (2, [0, 0])):
        result = steps.execute(SchedulerOutput(number, grown=[(0, 0, [5])], scheduled=scheduled)).result()
        assert result.token_ids == [[15], [10], []]
        assert device.grown == tried, "differences come once"
        assert sum(device.ran) == 20 * number and max(device.ran) <= 6


def test_a_step_that_is_too_large_is_cut_around_spans() -> None:
    device = SmallDevice(6)
    item = ScheduledTokens(0, 10, 15, 1, spans=((12, 17), (19, 25)))
    assert StepParts(device.execute).execute(SchedulerOutput(1, scheduled=[item])).result().token_ids == [[25]]
    assert device.ran == [2, 5, 2, 6]


SPAN = ScheduledTokens(0, 3, 5, 1, spans=((3, 8),))


@pytest.mark.parametrize(
    "item", [ScheduledTokens(0, 3, 1, 1), ScheduledTokens(0, 3, 5, 5), SPAN], ids=["token", "drafts", "span"]
)
def test_what_cannot_be_cut_fails_with_its_cause(item: ScheduledTokens) -> None:
    with pytest.raises(MemoryError, match="too little"):
        StepParts(SmallDevice(0).execute).execute(SchedulerOutput(1, scheduled=[item]))
