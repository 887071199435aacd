"""The end of a prompt for other engines is told when each rank has stored its part of the pages."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM
from kvern.engine.hand_overs import HAND_OVER_SECONDS
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from tests.support.idle import core_here, is_idle
from tests.support.served import eventually
from tests.support.tiers import tier_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes start with a file of this test")
LONG = [10 + place * 7 % 110 for place in range(150)]
OPTIONS: dict[str, Any] = {"threads": 1, "device": "cpu", "dtype": "float32", "kv_cache_tokens": 4096}
SLOW_RANKS = """
import os, sys, time
if "kvern.runner.ranks.rank_process" in sys.orig_argv:
    from kvern.tiers.{module} import {owner} as owner
    call = owner.{method}
    def wait(*given):
        while not os.path.exists({path!r}):
            time.sleep(0.001)
        return call(*given)
    owner.{method} = wait
"""


SEALING = {"module": "shelf", "owner": "Shelf", "method": "_seal"}
PUTTING = {"module": "disk", "owner": "DiskStore", "method": "put"}


def slow_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **what: str) -> Path:
    """Processes of ranks wait with a method until there is a file of this path."""
    path = tmp_path / "may-store"
    (tmp_path / "sitecustomize.py").write_text(SLOW_RANKS.format(path=str(path), **what))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return path


@pytest.fixture(params=[{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def slow(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LLM, Path]]:
    """An engine whose other rank stores pages once there is a file."""
    path = slow_ranks(tmp_path, monkeypatch, **SEALING)
    with LLM(str(tiny_model), **OPTIONS, kv_tier=("host:8MB",), **request.param) as llm:
        yield llm, path


def test_an_end_is_told_when_all_ranks_have_stored_their_pages(slow: tuple[LLM, Path]) -> None:
    """Or after a while, if one of them does not; what is computed meanwhile is not awaited."""
    llm, path = slow
    core, tier = core_here(llm), tier_of(llm)
    now, events = 0.0, list[TokenEvent]()
    core._clock = lambda: now

    def steps() -> list[TokenEvent]:
        events.extend(core.step())
        return events

    spec = RequestSpec("r", PromptInput(LONG), ResolvedParams(), 30).prompt_alone()
    core.add(spec)
    eventually(lambda: steps() or (tier.figures()["host"].stored_tokens == 128 and core._handing.awaiting))
    for _ in range(20):
        assert not steps(), "the other rank has stored nothing"
    now = HAND_OVER_SECONDS
    assert [event.request_id for event in steps()] == ["r#0"]
    events.clear()
    core.add(RequestSpec("s", PromptInput([7, *LONG]), ResolvedParams(), 30).prompt_alone())
    eventually(lambda: steps() or (tier.figures()["host"].stored_tokens == 256 and core._handing.awaiting))
    for _ in range(20):
        assert not steps()
    path.touch()
    eventually(steps)
    [event] = events
    assert (event.request_id, event.finish_reason, event.stop_reason) == ("s#0", "length", None)
    assert is_idle(llm)


def test_an_end_waits_for_no_slow_store_beside_a_fast_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for what a slow store still gets of other prompts."""
    path = slow_ranks(tmp_path, monkeypatch, **PUTTING)
    stores = ("host:8MB", f"disk:{tmp_path / 'pages'}:8MB")
    with LLM(str(tiny_model), **OPTIONS, kv_tier=stores, tensor_parallel_size=2) as llm:
        core, events = core_here(llm), list[TokenEvent]()
        core._clock = lambda: 0.0
        try:
            for number in range(2):
                spec = RequestSpec(f"{number}", PromptInput([7 + number, *LONG]), ResolvedParams(), 30)
                core.add(spec.prompt_alone())
                eventually(lambda: events.extend(core.step()) or events)
                assert [(event.request_id, event.stop_reason) for event in events] == [(f"{number}#0", None)]
                events.clear()
        finally:
            path.touch()
        assert is_idle(llm)
