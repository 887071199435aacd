"""How much of a machine's memory ranks and engines may take, and what is refused before it is taken."""

import json
from pathlib import Path

import pytest
import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.io.sockets import MOST_PROCESSES
from kvern.models import loader
from kvern.models.loader import LoadOptions, load_model, outline_model, read_config
from kvern.models.registry import spec_from_config
from kvern.ranks.ranks import Ranks, ranks_of
from kvern.runner.startup import Startup
from kvern.runner.worker import Worker
from tests.support.tiny_model import CONFIG

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 4 layers, whose positions take nothing beside its weights."""
    changed = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changed))
    return tmp_path


def weights(folder: Path) -> int:
    return outline_model(folder, load_format="dummy").weight_bytes


def load(folder: Path, ranks: Ranks) -> int:
    """Bytes of weights that this rank has."""
    return load_model(folder, LoadOptions(load_format="dummy", max_model_len=1, ranks=ranks)).weight_bytes


def test_all_ranks_of_one_machine_have_to_fit_into_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "total_memory", lambda: int(0.6 * weights(folder)))
    for ranks in (Ranks(), Ranks(0, 2), ranks_of(0, 1, [range(2), range(2, 4)])):
        with pytest.raises(ConfigError, match="and this machine has"):
            load(folder, ranks)


def test_a_node_holds_its_own_share_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Ray cluster whose nodes have room for one rank each."""
    monkeypatch.setattr(loader, "total_memory", lambda: int(0.6 * weights(folder)))
    monkeypatch.setenv(MOST_PROCESSES, "1")
    assert load(folder, Ranks(0, 2)) < 0.55 * weights(folder)
    assert load(folder, ranks_of(0, 1, [range(2), range(2, 4)])) < 0.55 * weights(folder)
    with pytest.raises(ConfigError, match="and this machine has"):
        load(folder, Ranks())


def test_stages_may_be_uneven(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "total_memory", lambda: int(1.1 * weights(folder)))
    layers = [range(1), range(1, 4)]
    assert load(folder, ranks_of(1, 1, layers)) > 0.6 * weights(folder)
    monkeypatch.setattr(loader, "total_memory", lambda: int(0.9 * weights(folder)))
    with pytest.raises(ConfigError, match="and this machine has"):
        load(folder, ranks_of(1, 1, layers))


def test_the_memory_of_a_node_is_for_the_processes_that_it_may_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(folder), data_parallel_size=4, tensor_parallel_size=2, device="cpu")
    spec = spec_from_config(read_config(folder))

    def processes() -> int:
        return Worker(config, folder, spec, CPU, Startup(), ranks=Ranks(0, 2)).memory.processes

    assert processes() == 8
    for most, expected in (("1", 1), ("3", 3), ("64", 8)):
        monkeypatch.setenv(MOST_PROCESSES, most)
        assert processes() == expected
