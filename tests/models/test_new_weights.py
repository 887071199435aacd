"""Weights that replace others: what two models must have alike, which earlier files count, and what is given up."""

import asyncio
import gc
import json
import re
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from kvern.errors import InvalidWeights
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.models.updates import stamp_of, updated_tensors
from kvern.models.weighted import WeightedModel
from kvern.request.weights import WeightsFound, WeightSource
from kvern.runner.memory import DeviceMemory
from kvern.runner.new_weights import NewWeights, check_fitting, check_memory, read_weights
from kvern.runner.weight_reader import WeightReader
from kvern.serving.client_weights import EngineWeights
from kvern.serving.wire import WeightsRead


def layer(**parts: Any) -> Any:
    """A layer with a weight and some other parts."""
    made = nn.Module()
    made.register_buffer("weight", torch.ones(2, 2))
    vars(made).update(parts)
    return made


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ({"zero": None}, {"zero": torch.ones(2)}, "Module.zero is not there in the served model"),
        ({}, {"order": torch.ones(2)}, "Module.order is not there in the served model"),
        ({"zero": torch.ones(2)}, {"zero": None}, "Module.zero is stored in another form"),
        ({"zero": torch.ones(2)}, {}, "Module.zero keeps numbers of the weights that cannot be made anew"),
        ({"zero": torch.ones(2)}, {"zero": torch.ones(3)}, "Module.zero is stored in another form"),
        ({"zero": torch.ones(1).expand(3)}, {"zero": torch.ones(3)}, "Module.zero has the same memory in several"),
        ({"factor": 1.0}, {"factor": 2.0}, "Module.factor is 1, and with these weights 2"),
    ],
)
def test_models_that_are_not_made_alike_are_refused(old: dict[str, Any], new: dict[str, Any], error: str) -> None:
    """Formats leave a tensor out by its values: zeros in the middle, an order that is none."""
    with pytest.raises(InvalidWeights, match=error):
        NewWeights(WeightsFound()).pair(layer(**old), layer(**new))


def test_what_steps_made_of_a_tensor_shows_the_new_numbers() -> None:
    old, new = layer(zero=None), layer(zero=None)
    vars(old)["view"] = old.weight[:1]
    new.weight += 4.0
    found = NewWeights(WeightsFound())
    found.pair(old, new)
    assert found.take() == []
    assert old.view.tolist() == [[5.0, 5.0]] and old.weight.tolist() == new.weight.tolist()


@pytest.fixture
def parts(tiny_model: Path, tmp_path: Path) -> dict[str, Path]:
    """Files with some tensors: of the first layer, of the second, and of the first again."""
    tensors = load_file(tiny_model / "model.safetensors")
    found = {}
    for name, number in (("first", 0), ("second", 1), ("again", 0)):
        found[name] = tmp_path / f"{name}.safetensors"
        save_file({key: value for key, value in tensors.items() if f"layers.{number}." in key}, found[name])
    return found


def test_only_files_that_are_needed_are_read_again(tiny_model: Path, parts: dict[str, Path]) -> None:
    """Post-training writes the same tensors at each step, and deletes what it wrote before."""
    spec: Any = spec_from_config(read_config(tiny_model))
    nothing = re.compile("$^")

    def names_of(path: Path) -> str:
        return updated_tensors(tiny_model, [WeightSource(str(path))], nothing, spec).names

    kept = [
        WeightSource(str(parts[name]), stamp_of(parts[name]), names_of(parts[name])) for name in ("first", "second")
    ]
    parts["first"].unlink()
    found = updated_tensors(tiny_model, [*kept, WeightSource(str(parts["again"]))], nothing, spec)
    assert {tensor.file.name for tensor in found.stored} == {
        "model.safetensors",
        "second.safetensors",
        "again.safetensors",
    }
    parts["second"].unlink()
    with pytest.raises(InvalidWeights, match="second"):
        updated_tensors(tiny_model, [*kept, WeightSource(str(parts["again"]))], nothing, spec)


def test_a_tied_head_is_compared_once_its_contents_have_come(tiny_model: Path, tmp_path: Path) -> None:
    spec = spec_from_config(read_config(tiny_model))
    assert spec.tie_word_embeddings
    tensors = {"lm_head.weight": torch.zeros(288, 64), "model.norm.weight": torch.ones(64)}
    save_file(tensors, file := tmp_path / "head.safetensors")
    check_fitting(tiny_model, spec, [WeightSource(str(file))], has_come=False)
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight in .* is not equal to"):
        check_fitting(tiny_model, spec, [WeightSource(str(file))])


def test_settings_of_quantization_are_compared(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    spec: Any = spec_from_config(config)
    with pytest.raises(InvalidWeights, match="quantization_config"):
        read_weights(tiny_model, spec, [WeightSource(str(tmp_path))], lambda stored: (), lambda path: None)


def test_files_that_change_while_they_are_read_are_refused(tiny_model: Path, parts: dict[str, Path]) -> None:
    spec: Any = spec_from_config(read_config(tiny_model))

    def load(stored: Sequence[object]) -> tuple[()]:
        parts["first"].touch()
        return ()

    with pytest.raises(InvalidWeights, match="was changed while it was read"):
        read_weights(tiny_model, spec, [WeightSource(str(parts["first"]))], load, lambda path: None)


class OneWeight(WeightedModel):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.zeros(250))


def test_engines_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.runner.new_weights.available_memory", lambda: 3000)
    model = OneWeight()
    check_memory([model, None], DeviceMemory(torch.device("cpu")), 3, Path("new"))
    with pytest.raises(InvalidWeights, match="end other programs"):
        check_memory([model, None], DeviceMemory(torch.device("cpu")), 4, Path("new"))


class Model:
    """Stands for the memory of a second model."""


class ReadingWorker:
    """A worker that reads until it is told to end, and then fails."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.models: list[weakref.ref[Model]] = []

    def read_weights(self, sources: object) -> object:
        model = Model()
        self.models.append(weakref.ref(model))
        self.began.set()
        self.go.wait(60)
        if sources == ["good"]:
            return SimpleNamespace(found=WeightsFound(), take=lambda model=model: [])
        raise InvalidWeights("as planned")


@pytest.mark.parametrize("source", ["bad", "good"])
def test_a_second_model_goes_as_soon_as_it_is_not_needed(source: str) -> None:
    worker: Any = ReadingWorker()
    reader = WeightReader(worker)
    gc.disable()
    try:
        reader.begin("1", [source])  # type: ignore[list-item]
        worker.go.set()
        while (found := reader.answer()) is None:
            worker.began.wait(0.01)
        assert found.error == (None if source == "good" else "as planned")
        if source == "good":
            reader.take()
        reader._pool.submit(int).result()  # type: ignore[union-attr]  # the thread has let go of its last call
        assert worker.models[0]() is None
    finally:
        gc.enable()


def test_nothing_is_read_any_more_after_settling() -> None:
    worker: Any = ReadingWorker()
    reader = WeightReader(worker)
    reader.begin("1", [])
    worker.began.wait()
    reader.begin("2", [])  # waits for the first
    reader.drop()
    threading.Timer(0.05, worker.go.set).start()
    reader.settle()
    assert len(worker.models) == 1 and reader.answer() is None


def test_what_is_said_of_an_update_that_was_given_up_is_not_the_next_ones() -> None:
    async def check() -> None:
        sent: list[object] = []
        engine = EngineWeights(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
        first = asyncio.create_task(engine.load("1", []))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(engine.load("2", []))
        await asyncio.sleep(0)
        engine.hear(WeightsRead("1", WeightsFound(stamp="old")))
        assert not second.done()
        engine.hear(WeightsRead("2", WeightsFound(stamp="new")))
        assert (await second).stamp == "new" and engine.read == "2"

    asyncio.run(check())
