"""On a GPU: steps that raise, and devices that are broken for good, end the request that causes it and nobody else.

Run with `pytest -m gpu`.
"""

import concurrent.futures
from pathlib import Path

import pytest
import torch

from kvern import LLM
from tests.support.engine_deaths import LENGTH, PROMPTS, Streams, deadly, with_processors
from tests.support.failing_runner import MARKS, OPTIONS, REASON, FailingRunner, crowd, said
from tests.support.idle import is_idle
from tests.support.internals import core_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("where", ["before", "behind", "result"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_step_that_raises(tiny_model: Path, where: str, graphs: bool) -> None:
    prompts, params = crowd()
    marked = [number for number, prompt in enumerate(prompts) if MARKS.keys() & set(prompt)]
    innocent = [number for number in range(30) if number not in marked]
    with LLM(str(tiny_model), cuda_graphs=graphs, kv_cache_tokens=4096, **OPTIONS) as llm:
        expected = llm.generate([prompts[number] for number in innocent], [params[number] for number in innocent])
        core_of(llm).scheduler.cache.tree.clear()
        FailingRunner(llm, where)
        found = llm.generate(prompts, params, on_error="return")
        assert is_idle(llm)
        assert [output.failure for output in found] == [REASON if n in marked else None for n in range(30)]
        assert [said(found[number]) for number in innocent] == [said(output) for output in expected]


@pytest.mark.alone
@pytest.mark.parametrize("how", ["assert", "exit"])
def test_a_device_that_is_broken_for_good(tmp_path: Path, how: str) -> None:
    """Nothing can be computed after an assertion on the device: another engine goes on, without the guilty request."""
    with with_processors(tmp_path) as served, concurrent.futures.ThreadPoolExecutor(32) as pool:
        client = served.client()
        whole = client.completions.create(model="kvern-1m", prompt=PROMPTS[0], temperature=0, max_tokens=8)
        streams = Streams(client, pool)
        streams.begun.wait(240)
        assert "was alone when the engine died" in deadly(client, how, 2)
        assert all(len(text) > LENGTH for text in streams.texts())
        assert served.figure("requests_refused_total", reason="crash") == 1
        again = client.completions.create(model="kvern-1m", prompt=PROMPTS[0], temperature=0, max_tokens=8)
        assert again.choices[0].text == whole.choices[0].text
