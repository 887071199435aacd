"""`kvern serve` with a folder of models, as programs made for ollama use it."""

import contextlib
import os
import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.support.plain_gguf import write_plain_gguf
from tests.support.served import ENGINE, Served, children_of, command_of, eventually, serving

OPTIONS = ("--threads", "1", "--dtype", "float32", "--device", "cpu", "--kv-cache-tokens", "2048")


def engines_of(served: Served) -> list[int]:
    return [child for child in children_of(served.process.pid) if ENGINE in command_of(child)]


def test_a_folder_of_models_is_served_to_ollamas_client(tiny_model: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(tiny_model, models / "tiny")
    write_plain_gguf(models / "plain.Q8_0.gguf")
    with (
        serving("--models-dir", str(models), "--data-dir", str(tmp_path / "data"), *OPTIONS) as served,
        ollama.Client(host=served.url.removesuffix("/v1"), headers={"authorization": "Bearer x"}) as client,
    ):
        assert "serving tiny, plain.Q8_0 on" in served.said
        names = {str(one.model): one for one in client.list().models}
        assert set(names) == {"tiny:latest", "plain.Q8_0:latest"}
        assert names["plain.Q8_0:latest"].details is not None and names["plain.Q8_0:latest"].details.format == "gguf"
        assert client.show("tiny").details is not None and list(client.ps().models) == [], "nothing was woken"

        told: dict[str, Any] = {"raw": True, "options": {"temperature": 0, "num_predict": 8}}
        first = client.generate("tiny", "a fox", keep_alive="5m", **told).response
        [loaded] = client.ps().models
        assert loaded.model == "tiny:latest" and loaded.expires_at is not None and loaded.expires_at.year < 9999
        assert client.generate("plain.Q8_0", "a fox", **told).done
        assert {one.model for one in client.ps().models} == set(names)
        assert client.generate("tiny", keep_alive=0).done_reason == "unload"
        eventually(lambda: [one.model for one in client.ps().models] == ["plain.Q8_0:latest"])
        assert client.generate("tiny", "a fox", **told).response == first
        with pytest.raises(ollama.ResponseError, match="keep_alive is 'soon'"):
            client.generate("tiny", "a fox", keep_alive="soon", **told)
    assert engines_of(served) == []


@pytest.mark.nightly
@pytest.mark.slow
def test_random_switches_with_engines_that_are_killed(tiny_model: Path, tmp_path: Path) -> None:
    """Three models, memory for two, clients that want any of them, and a process killed now and then: all are answered
    as they were before, and no process is left over."""
    models = tmp_path / "models"
    for name in ("one", "two", "three"):
        shutil.copytree(tiny_model, models / name)
    arguments = ("--models-dir", str(models), "--models-memory", "900MB", "--data-dir", str(tmp_path / "data"))
    body = {"prompt": [5, 9, 17, 33], "max_tokens": 20, "temperature": 0.0}
    with serving(*arguments, *OPTIONS) as served:

        def ask(seed: int) -> tuple[str, str]:
            dice, client = random.Random(seed), served.client().with_options(max_retries=4)  # of a first wake
            said = set()
            for _ in range(8):
                name = dice.choice(("one", "two", "three"))
                answer = client.completions.create(model=name, **body)  # type: ignore[call-overload]
                said.add(answer.choices[0].text)
                if dice.random() < 0.2 and (engines := engines_of(served)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(dice.choice(engines), signal.SIGKILL)
            [text] = said
            return name, text

        with ThreadPoolExecutor(3) as pool:
            texts = {text for _, text in pool.map(ask, range(3))}
        assert len(texts) == 1
        assert len(engines_of(served)) <= 4, "those of models that are awake, and one in reserve"
        _, _, listed = served.raw("GET", "/v1/models")
        assert sum(entry["state"] == "awake" for entry in listed["data"]) <= 3
    assert engines_of(served) == []
