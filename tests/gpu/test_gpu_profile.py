"""Traces of an engine's steps on a GPU, which a process writes that has no GPU. Run with `pytest -m gpu`."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from kvern import LLM
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.serving.engine_traces import StepTraces
from kvern.serving.wire import TakeTrace
from tests.support.gpu_engines import HALVES
from tests.support.internals import core_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DEVICE = "cuda"
LENGTH = 200


def answers(llm: LLM, traces: StepTraces, name: str) -> list[list[int]]:
    """The tokens of four requests, until the last of which steps go on."""
    core, found = core_of(llm), dict[str, list[int]]()
    for number in range(4):
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True).resolved()
        core.add(RequestSpec(f"{name}{number}", PromptInput([20 + number, *range(30, 60)]), params, LENGTH))
    while core.has_work:
        for event in traces.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
    return list(found.values())


def test_a_process_without_the_gpu_writes_what_the_gpu_did(tmp_path: Path) -> None:
    llm = LLM(device=DEVICE, **HALVES, deterministic=True)
    traces = StepTraces(core_of(llm), lambda: None, tmp_path)
    expected = answers(llm, traces, "before ")
    for number in range(2):
        traces.begin(TakeTrace(20, 100.0))
        assert answers(llm, traces, f"{number} ") == expected
        while not (found := traces.answers()):
            pass
        assert found[0].error is None
        events = json.loads(gzip.decompress(found[0].trace))["traceEvents"]
        assert {f"step {count}" for count in range(1, 21)} <= {str(event.get("name")) for event in events}
        assert DEVICE == "cpu" or any(event.get("cat") == "kernel" for event in events)
    assert answers(llm, traces, "after ") == expected
    assert not list(tmp_path.iterdir())
