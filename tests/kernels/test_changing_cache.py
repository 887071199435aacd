"""A KV cache on the device whose memory comes and goes in chunks: kernels touch no block without memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.engine.core import EngineCore
from kvern.errors import ConfigError
from kvern.runner import kernel_backend
from kvern.runner.plan import ChangingCache
from tests.support.host_cuda import HostMapped, have_cuda_on_the_host
from tests.support.internals import core_of, engine_of, runner_of, worker_of
from tests.support.kernels.device_engines import OPTIONS
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("few_products")
PARAMS = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
PROMPTS = [[5 + number, *range(30, 50)] for number in range(3)]


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        have_cuda_on_the_host(monkeypatch)
        monkeypatch.setattr(kernel_backend, "changing_cache", lambda *_: ChangingCache(16, 0, 1 << 20, 1 << 24))


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.usefixtures("changing")
def test_answers_stay_while_memory_comes_and_goes_and_is_refused(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path)
    options: dict[str, Any] = OPTIONS | {"max_model_len": 64, "kv_cache_tokens": 1 << 10}
    expected = answers(on_device(folder, **options))
    llm = on_device(folder, **options, elastic_kv_cache=True)
    core = core_of(llm)
    assert isinstance(core, EngineCore)
    memory = core.scheduler.cache.memory
    least = engine_of(llm).layout.least_chunks
    for chunks in (memory.most_chunks, least + 1):
        assert core.resize_cache(chunks)[0] == chunks
        assert core.statistics().cache_refused == 0
        assert answers(llm) == expected
    monkeypatch.setattr(HostMapped, "left", 0)
    assert core.resize_cache(memory.most_chunks)[0] == least + 1
    assert core.statistics().cache_refused == memory.most_chunks
    assert answers(llm) == expected
    core.resize_cache(least)
    assert core.statistics().cache_refused == 0
    assert core.resize_cache(least + 1)[0] == least + 1, "what was given back may be taken again"


@pytest.mark.usefixtures("changing")
def test_a_model_and_its_draft_go_on_while_chunks_come_and_go_and_rows_name_none_that_went(
    tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    folder = make_tiny_model(tmp_path)
    options: dict[str, Any] = OPTIONS | {"max_model_len": 64, "kv_cache_tokens": 1 << 10, "draft_model": str(folder)}
    expected = answers(on_device(folder, **options))
    llm = on_device(folder, **options, elastic_kv_cache=True, overlap=False)
    core, engine = core_of(llm), engine_of(llm)
    memory, table = core.scheduler.cache.memory, runner_of(llm).model.rows.block_table
    assert len(worker_of(llm).memory.chunked._pools) == 2, "of the model and of its draft"
    core.resize_cache(memory.most_chunks)
    requests = [engine.add(str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS)]
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 3 == 0:
            core.resize_cache(1 if steps % 6 else memory.most_chunks)
            assert table[:-1].max() < memory.capacity, "kernels may look at names behind a sequence"
            assert (table[-1] == memory.most).all(), "batches are padded with a block that always has memory"
    assert [request.outputs[0].token_ids for request in requests] == expected
    assert core.scheduler.preemption_count


@pytest.mark.usefixtures("changing")
def test_a_card_without_memory_for_one_sequence_is_a_plain_error(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMapped, "left", 0)
    with pytest.raises(ConfigError, match="no memory for the KV cache of 64 tokens beside what others have: lower max"):
        on_device(make_tiny_model(tmp_path), **OPTIONS | {"max_model_len": 64}, elastic_kv_cache=True)
