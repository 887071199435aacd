"""Several models as users name them: flags, configuration files, folders."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvern import EngineConfig
from kvern.cli.main import read_command
from kvern.errors import ConfigError, ModelNotFound
from kvern.residency.gpus import UNKNOWN_BYTES, GpuMemory, gpu_memory, share_alone, shares
from kvern.residency.options import ServedModel, keep_alive_of, one_or_several, served_models
from kvern.residency.policy import Terms
from tests.support.nvml import Driver

CPU = EngineConfig(device="cpu", threads=3)


def models_of(*arguments: str, **environment: str) -> tuple[str | None, dict[str, Any]]:
    command, _ = read_command(["serve", *arguments], environment)
    return command.engine.model, dict(command.server.models)


def test_flags_name_one_model_or_several() -> None:
    assert models_of("--model", "a/b") == ("a/b", {})
    assert models_of("--model", "/a/b=c") == ("/a/b=c", {})
    assert models_of("--model", "chat=a/b=c", "--threads", "1") == (None, {"chat": "a/b=c"})
    assert models_of("--model=chat=a", "--model", "b/c") == (None, {"chat": "a", "b/c": "b/c"})
    assert models_of(KVERN_MODELS='{"chat": {"model": "a", "pin": true}}') == (
        None,
        {"chat": {"model": "a", "pin": True}},
    )
    with pytest.raises(ConfigError, match="--model gives a twice"):
        models_of("--model", "a=b", "--model", "a=c")


def test_a_file_gives_each_model_its_options(tmp_path: Path) -> None:
    file = tmp_path / "kvern.yaml"
    file.write_text(
        "max-model-len: 512\nmodels:\n  chat: {model: kvern-12m, pin: true, aliases: [gpt-4o]}\n"
        "  small: {model: kvern-1m, max-model-len: 64, keep_alive: 5m, weight: 2}\n"
    )
    command, _ = read_command(["serve", "--config", str(file), "--device", "cpu"], {})
    chat, small = served_models(command.engine, command.server.models, None)
    assert (chat.name, chat.names, chat.terms) == ("chat", ["chat", "gpt-4o"], Terms(pin=True))
    assert (chat.engine.model, chat.engine.max_model_len) == ("kvern-12m", 512)
    assert (small.engine.max_model_len, small.terms) == (64, Terms(weight=2.0, keep_alive=300.0))
    assert small.estimate().awake > 1 << 30 and small.estimate().asleep is None
    [tiny] = served_models(CPU, {"tiny": {"model": "kvern-1m", "kv_cache_tokens": 1024}}, None)
    assert 400_000_000 < tiny.estimate().awake < 500_000_000
    assert 400_000_000 < small.estimate().needed_from("cold") < 500_000_000, "its KV cache comes as it fills"


def test_a_model_without_a_name_comes_first_and_keeps_its_options() -> None:
    engine = EngineConfig("kvern-12m", device="cpu", adapters={"fox": "/fox"}, max_model_len=256)
    first, second = served_models(engine, {"small": "kvern-1m"}, None)
    assert first.engine == replace(engine, elastic_kv_cache=True) and first.names == ["kvern-12m", "fox"]
    assert (second.names, second.engine.max_model_len, second.engine.adapters) == (["small"], 256, {})


def test_a_folder_of_models(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    shutil.copytree(tiny_model, tmp_path / "org" / "tiny")
    (tmp_path / "empty").mkdir()
    for name in ("q.Q4_K_M.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-q.gguf", "note.txt"):
        (tmp_path / name).write_bytes(b"x" * 10)
    found = {one.name: one for one in served_models(CPU, {}, tmp_path)}
    assert set(found) == {"tiny", "org/tiny", "q.Q4_K_M", "big"}
    assert len(found["big"].files) == 2 and found["big"].engine.threads == 3
    named = served_models(CPU, {"tiny": {"model": "kvern-1m"}}, tmp_path)
    assert [one.engine.model for one in named if one.name == "tiny"] == ["kvern-1m"]


@pytest.mark.parametrize(
    ("engine", "models", "reason"),
    [
        (CPU, {"a": {"modl": "x"}}, "models.a.modl is no option of a model: did you mean model?"),
        (CPU, {"a": {"pin": True}}, "models.a has no model"),
        (CPU, {"a": 5}, "models.a is 5: it must be a model"),
        (CPU, {"a": {"model": "kvern-1m", "weight": 0}}, "models.a.weight is 0.0: it must be above 0"),
        (CPU, {"a": {"model": "kvern-1m", "keep_alive": "soon"}}, "models.a.keep_alive is 'soon': it must be seconds"),
        (CPU, {"a": "kvern-1m", "b": {"model": "kvern-1m", "aliases": ["a"]}}, "a names two models"),
        (EngineConfig(device="cpu", chat_template="x"), {"a": "kvern-1m"}, "chat_template is for one model"),
        (EngineConfig(device="cuda"), {"a": "kvern-1m", "b": "kvern-1m"}, "this process sees no GPU"),
        (
            CPU,
            {"a": "kvern-1m", "b": {"model": "kvern-1m", "device": "cuda"}},
            "model b runs on a GPU and a on the CPU",
        ),
    ],
)
def test_wrong_options_are_refused(engine: EngineConfig, models: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        served_models(engine, models, None)
    with pytest.raises(ModelNotFound, match="neither a file or folder"):
        served_models(CPU, {"a": "nothing"}, None)


CARD = GpuMemory(total=140 << 30, usable=126 << 30)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_several_models_share_the_gpus_or_the_memory_of_the_machine(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern.residency.options.GPU_FILE", tmp_path if has_gpu else tmp_path / "none")
    monkeypatch.setattr("kvern.residency.options.gpu_memory", lambda names, is_shared_out: CARD)
    monkeypatch.setattr("kvern.residency.options.seen_gpus", lambda engine: ["0"])
    models = {"a": "kvern-1m", "b": {"model": "kvern-1m", "gpu_memory_share": 0.25}}
    found = served_models(EngineConfig(), models, None)
    assert [one.gpu for one in found] == [CARD if has_gpu else None] * 2
    assert all(one.engine.enable_sleep == has_gpu for one in found)
    if has_gpu:
        assert [one.estimate().awake for one in found] == [one.gpu_bytes for one in found]
        assert found[1].gpu_bytes == CARD.total // 4
        assert [one.engine.elastic_kv_cache for one in found] == [True, False], "who is given a share keeps it"
    assert all(one.gpu is None for one in served_models(CPU, models, None))
    for device in ("auto", "cuda"):
        assert one_or_several(EngineConfig(device=device), {"a": "kvern-1m"}, None)[1] == [], "one model alone"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"executor": "ray"}, "leave executor ray out"),
        ({"device": "cpu"}, "give all the same device"),
        ({"enable_dp_attention": True, "tensor_parallel_size": 2}, "the only one of a server"),
    ],
)
def test_models_that_cannot_share_gpus_are_refused(
    options: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern.residency.options.GPU_FILE", tmp_path)
    monkeypatch.setattr("kvern.residency.options.gpu_memory", lambda names, is_shared_out: CARD)
    monkeypatch.setattr("kvern.residency.options.seen_gpus", lambda engine: ["0"])
    with pytest.raises(ConfigError, match=reason):
        served_models(EngineConfig(), {"a": "kvern-1m", "b": {"model": "kvern-1m", **options}}, None)


def test_memory_of_gpus_that_nobody_tells_is_a_plain_error() -> None:
    with pytest.raises(ConfigError, match=r"does not tell the memory of GPUs GPU-none|knows 0 of the GPUs GPU-none"):
        gpu_memory(["GPU-none"])


def test_a_gpu_that_this_process_may_not_use_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.residency.options.GPU_FILE", tmp_path)
    monkeypatch.setattr("kvern.residency.options.seen_gpus", lambda engine: [])
    assert all(one.gpu is None for one in served_models(EngineConfig(), {"a": "kvern-1m", "b": "kvern-1m"}, None))


def test_cards_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cards = ("GPU-ab12", 100, 99), ("GPU-cd34", 200, 50)
    monkeypatch.setitem(sys.modules, "pynvml", Driver(*cards))  # type: ignore[arg-type]
    assert gpu_memory(["0"]) == gpu_memory(["GPU-ab"]) == GpuMemory(100, 96)
    assert gpu_memory(["0"], is_shared_out=True) == GpuMemory(100, 100)
    assert not caplog.records
    assert gpu_memory(["0", "GPU-cd34"], is_shared_out=True) == GpuMemory(100, 48)
    assert "other programs hold" in caplog.text
    with pytest.raises(ConfigError, match="knows 1 of the GPUs 1, 2"):
        gpu_memory(["1", "2"])


@pytest.mark.parametrize(
    ("weights", "given"),
    [
        ([16 << 30, 1 << 30], [None, None]),
        ([70 << 30, 60 << 30, 0], [None, None, None]),
        ([16 << 30] * 20, [None] * 20),
        ([111 << 30, 1 << 30], [None, None]),
        ([60 << 30, 16 << 30], [0.6, None]),
        ([0, 16 << 30], [0.8, None]),
    ],
)
def test_each_model_has_room_for_its_weights_and_may_be_awake(weights: list[int], given: list[float | None]) -> None:
    found = [share * CARD.total for share in shares(weights, given, CARD)]
    for size, said, taken in zip(weights, given, found, strict=True):
        assert said is not None or (size or UNKNOWN_BYTES) < taken <= CARD.usable + 1
        assert said is None or taken == said * CARD.total
    if len(weights) == 2 and weights[0] < 100 << 30 and given[0] != 0.8:
        assert CARD.usable - (1 << 20) < sum(found) <= CARD.usable, "all of the card is used"
    if given[0] == 0.8:
        assert found[1] < 27 << 30, "beside a model that was given much one gets what it needs"
    assert share_alone(0, CARD) == share_alone(UNKNOWN_BYTES, CARD), (
        "a model without files, such as one of dummy weights"
    )


def test_a_model_that_was_downloaded_gets_a_share_for_its_files(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 64 << 30)
    engine = EngineConfig("far/away", gpu_memory_share=0.2)
    assert (ServedModel(engine, gpu=CARD, is_guess=True).sized(tmp_path).gpu_bytes or 0) > (64 << 30) * 1.25
    for known in (ServedModel(engine, gpu=CARD), ServedModel(engine)):
        assert known.sized(tmp_path) is known


def test_a_folder_that_is_none_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        served_models(CPU, {}, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no model"):
        served_models(CPU, {}, tmp_path)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        (-1, None),
        ("-1m", None),
        (90, 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("2.5s", 2.5),
        ("999999999d", None),
        ("9" * 400, None),
    ],
)
def test_keep_alive_is_ollamas(value: object, seconds: float | None) -> None:
    assert keep_alive_of(value, "keep_alive") == seconds


def test_models_are_written_as_json() -> None:
    command, _ = read_command(["serve", "--models", json.dumps({"a": "kvern-1m"})], {})
    assert command.server.models == {"a": "kvern-1m"}
