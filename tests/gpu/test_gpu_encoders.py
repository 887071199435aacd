"""Encoders on a GPU: the CPU's vectors and judgements, in any company.

Run with `pytest -m gpu`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM
from kvern.errors import ConfigError
from tests.support.encoders import ENCODERS, make_random
from tests.support.two_towers import make_two_towers
from tests.support.vision_models import picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

LENGTH = 700
LARGE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 256}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_kernels": False}
PAIRS = [("What do foxes eat?", "Mice and berries."), ("red", "mice and berries are what red foxes eat"), ("a", "b")]


def make_large(kind: str, folder: Path, **fields: Any) -> Path:
    local = {"local_attention": 128} if kind == "modernbert" else {}
    positions = LENGTH + 2 * ("roberta" in kind)
    return make_random(kind, folder, **LARGE | local | {"max_position_embeddings": positions} | fields)


def texts(count: int = 40) -> list[list[int]]:
    chance = random.Random(2)
    lengths = [1, LENGTH, 127, 128, 129, *(chance.randint(1, LENGTH) for _ in range(count - 5))]
    return [[chance.randrange(3, 320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("kind", ENCODERS)
def test_vectors_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    folder, given = make_large(kind, tmp_path), texts()
    with LLM(str(folder), **CPU) as llm:
        expected = llm.embed(given)
    for options in ({}, {"overlap": False}, {"triton_kernels": False}, {"max_batch_tokens": 800}):
        with LLM(str(folder), dtype="float32", **options) as llm:
            for vector, other in zip(llm.embed(given), expected, strict=True):
                assert vector == pytest.approx(other, abs=1e-4), options
            assert llm.embed(given[7])[0] == pytest.approx(expected[7], abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_vectors_of_16_bits_point_the_same_way(kind: str, dtype: Any, tmp_path: Path) -> None:
    folder, given = make_large(kind, tmp_path), texts(12)
    with LLM(str(folder), **CPU) as llm:
        expected = torch.tensor(llm.embed(given))
    with LLM(str(folder), dtype=dtype) as llm:
        found = torch.tensor(llm.embed(given))
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.995


@pytest.mark.parametrize("kind", ENCODERS)
def test_judgements_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    folder = make_large(kind, tmp_path, labels=1)
    with LLM(str(folder), **CPU) as llm:
        expected = llm.relevance(PAIRS)
    with LLM(str(folder), dtype="float32") as llm:
        assert llm.relevance(PAIRS) == pytest.approx(expected, abs=1e-4)


def test_a_text_that_memory_has_no_room_for_is_refused(tmp_path: Path) -> None:
    folder = make_large("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"max_model_len 700 tokens does not fit|the weights take"):
        LLM(str(folder), dtype="float32", gpu_memory_share=0.001)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_texts_and_images_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    """Of one space, in steps of both, and alone."""
    folder = make_two_towers(kind, tmp_path)
    given: list[Any] = [
        "a photo of a cat",
        [5, 9, 17],
        *({"image": picture(30 + n, 90 - n, n)} for n in range(12)),
        "a",
    ]
    with LLM(str(folder), **CPU) as llm:
        expected = llm.embed(given)
    for options in ({}, {"triton_kernels": False}, {"max_batch_tokens": 64}):
        with LLM(str(folder), dtype="float32", **options) as llm:
            for vector, other in zip(llm.embed(given), expected, strict=True):
                assert vector == pytest.approx(other, abs=1e-4), options
            assert llm.embed(given[7])[0] == pytest.approx(expected[7], abs=1e-4)
    with LLM(str(folder), dtype="bfloat16") as llm:
        found = torch.tensor(llm.embed(given))
    assert torch.nn.functional.cosine_similarity(found, torch.tensor(expected)).min() > 0.99
