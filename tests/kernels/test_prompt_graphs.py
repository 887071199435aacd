"""Steps with prompts, padded to the size of a graph, compute what they compute eagerly."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvern.runner.kernel_backend
import kvern.runner.prompt_graphs
from kvern import LLM, SamplingParams
from kvern.errors import ConfigError
from kvern.ranks.ranks import ALONE, Ranks, dp_attention_rank, ranks_of
from kvern.runner.decode_graphs import decode_shapes
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.memory import GRAPH_BYTES
from kvern.runner.prompt_graphs import MOST_KEYS, PromptKind, most_keys
from kvern.runner.step_graphs import capture_one
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.support.families import make_checkpoint
from tests.support.internals import engine_of, runner_of
from tests.support.kernels.device_engines import NETS, OPTIONS
from tests.support.kernels.repeated_graphs import RecordedGraphs
from tests.support.outputs import token_ids

PROMPTS = [[5, 9, 17, 33, 2, 81], [3, 1, 4, 1, 5] * 5, [7]]

LAYERS = {"qwen3_5": NETS | {"num_hidden_layers": 2}}
"""Of families that have more than one of each kind."""


@pytest.mark.parametrize(
    ("family", "params"),
    [
        pytest.param("llama", {"temperature": 0}, marks=pytest.mark.nightly),
        pytest.param("llama", {"temperature": 1.0, "seed": 3, "top_p": 0.9}, marks=pytest.mark.nightly),
        pytest.param("gemma2", {"temperature": 0, "logprobs": 2}, marks=pytest.mark.nightly),
        pytest.param("glm4_moe_lite", {"temperature": 0}, marks=pytest.mark.nightly),
        pytest.param("qwen3_5", {"temperature": 0}, marks=pytest.mark.nightly),
        pytest.param("nemotron_h", {"temperature": 0}, marks=pytest.mark.nightly),
        ("lfm2", {"temperature": 0}),
    ],
    ids=["greedy", "options", "logprobs", "latents", "delta nets", "Mamba-2", "convolutions"],
)
@pytest.mark.parametrize("shared_tokens", [256, pytest.param(0, marks=pytest.mark.nightly)])
def test_a_replayed_step_is_the_eager_one(
    family: str,
    params: dict[str, Any],
    shared_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_device: Callable[..., LLM],
) -> None:
    make_checkpoint(family, tmp_path, **LAYERS.get(family, {}))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, **params)
    options = {**OPTIONS, "max_batch_tokens": 24}
    expected = token_ids(on_device(tmp_path, **options).generate(PROMPTS, sampling))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "DECODES", (4,))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "TOKENS", (24,))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "SHARED_TOKENS", shared_tokens)
    llm = on_device(tmp_path, **options)
    runner = runner_of(llm)
    assert isinstance(runner, DeviceRunner)
    graphs = RecordedGraphs(PromptKind(runner.model, 100))
    runner.graphs = [graphs]
    assert token_ids(llm.generate(PROMPTS, sampling)) == expected
    decoding = {any(item.count == 1 for item in step.scheduled) for step in graphs.used}
    assert decoding == {False, True}, "steps with and without decodes were to be replayed"


def test_runs_of_hybrids_may_have_more_keys() -> None:
    """Of four layers one attends; both mixers of a layer count as one."""
    kinds = "llama", "qwen3_5_text", "falcon_h1"
    assert [most_keys(spec_of(kind, LARGE_MODELS)) for kind in kinds] == [MOST_KEYS, 4 * MOST_KEYS, MOST_KEYS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="simulates a GPU")
def test_memory_of_all_graphs_is_counted(
    tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where layers keep states: a rank that had no memory for one of its graphs would not start."""
    llm = on_device(make_checkpoint("lfm2", tmp_path), **OPTIONS | {"max_batch_tokens": 8, "max_batch_requests": 2})
    engine: Any = engine_of(llm)
    worker = engine.core.executor._worker
    runner, parts = worker.runner, worker._backend
    monkeypatch.setattr(parts, "_device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(parts, "_attention", lambda *_: runner.model.attention)
    monkeypatch.setattr(kvern.runner.kernel_backend, "DeviceRows", lambda *_, **__: runner.model.rows)
    monkeypatch.setattr(kvern.runner.kernel_backend, "DeviceStateMemory", lambda *_: runner.model.states)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(kvern.runner.prompt_graphs, "DECODES", (1,))
    monkeypatch.setattr(kvern.runner.prompt_graphs, "TOKENS", (4, 5))
    decodes = sum(1 for _ in decode_shapes(2, runner.model.attention.prefix_members > 0, False, True))
    assert parts._measure(worker._loaded) == (decodes + 2) * GRAPH_BYTES


class Missing:
    """Graphs whose capture fails."""

    priority = 0

    def __init__(self, error: Exception) -> None:
        self.missing = deque([(64, False, False, False), (32, False, False, False)])
        self._error = error

    def capture_next(self) -> None:
        self.missing.popleft()
        raise self._error


def idle(error: Exception, ranks: Ranks = ALONE) -> bool:
    return capture_one([Missing(error)], is_alone=ranks.processes == 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: out of memory")])
def test_without_memory_for_a_graph_the_engine_goes_on_without(error: Exception, caplog: Any) -> None:
    assert not idle(error)
    assert "no GPU memory for 2 CUDA graphs" in caplog.text


@pytest.mark.parametrize(
    "ranks",
    [Ranks(1, 2), ranks_of(1, 1, [range(1), range(1, 2)]), dp_attention_rank(0, 2)],
    ids=["ranks", "stages", "own rows"],
)
def test_ranks_without_memory_for_a_graph_end_since_others_have_it(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"no GPU memory for 2 CUDA graphs of this rank.*: lower max_batch_requests"):
        idle(torch.OutOfMemoryError("no room"), ranks)


def test_other_errors_of_a_capture_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        idle(RuntimeError("CUDA error: illegal instruction"))
