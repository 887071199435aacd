"""Encoders through the kernels of GPUs answer as transformers does; the kernels are interpreted here."""

from pathlib import Path
from typing import Any

import pytest
import torch

import kvern.runner.encoder_runner
from kvern import LLM
from kvern.engine.relevance import sigmoid
from kvern.kernels.groups import ENCODER_GROUPS
from tests.support.encoders import expected_labels, expected_vector, make_encoder, set_pooling

TEXTS = [[5, 9, 17, 33], [7], list(range(3, 43))]
PAIRS = [("What do foxes eat?", "Mice and berries."), ("a", "b")]
BY_NIGHT = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("roberta", "xlm-roberta")]
SMALL = {"num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def all_kernels_work(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(kvern.runner.encoder_runner, "usable_kernels", lambda *_: (ENCODER_GROUPS, ENCODER_GROUPS))


def make(folder: Path, device: torch.device, **options: Any) -> LLM:
    return LLM(str(folder), device=device.type, dtype="float32", **options)


@pytest.mark.parametrize("kind", ["bert", "modernbert", *BY_NIGHT])
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path, device: torch.device) -> None:
    folder = make_encoder(kind, tmp_path, **SMALL)
    with make(folder, device, max_batch_tokens=42) as llm:
        for token_ids, vector in zip(TEXTS, llm.embed(TEXTS), strict=True):
            assert vector == pytest.approx(expected_vector(folder, token_ids), abs=1e-4)
        assert llm.statistics().steps == 2


def test_pooling_of_the_last_token(tmp_path: Path, device: torch.device) -> None:
    folder = make_encoder("modernbert", tmp_path, num_hidden_layers=1)
    set_pooling(folder, pooling_mode="lasttoken")
    with make(folder, device) as llm:
        for token_ids, vector in zip(TEXTS, llm.embed(TEXTS), strict=True):
            assert vector == pytest.approx(expected_vector(folder, token_ids, "lasttoken"), abs=1e-4)


def test_judgements_are_those_of_transformers(tmp_path: Path, device: torch.device) -> None:
    folder = make_encoder("bert", tmp_path, labels=1, **SMALL)
    with make(folder, device) as llm:
        expected = [sigmoid(label) for label in expected_labels(folder, PAIRS)]
        assert llm.relevance(PAIRS) == pytest.approx(expected, abs=1e-4)
