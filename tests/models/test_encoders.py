"""Encoders: vectors and judgements as transformers makes them, alone and in any batch, and what they refuse."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, EngineConfig
from kvern.cli.main import main
from kvern.engine.relevance import sigmoid
from kvern.errors import ConfigError, InvalidRequest, UnsupportedModel
from kvern.models.embedder import spec_of_folder
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.request.request import PromptInput
from kvern.runner.encoder_runner import check_encoder
from tests.support.encoders import (
    ENCODERS,
    LENGTH,
    expected_labels,
    expected_logits,
    expected_vector,
    make_encoder,
    set_pooling,
)
from tests.support.internals import engine_of

TOLERANCE = 1e-4
QUERY = "What do foxes eat?"
PAIRS = [
    (QUERY, "Mice and berries."),
    (QUERY, "Foxes are red."),
    ("a", "b"),
    ("red", "mice and berries are what red foxes eat"),
    (QUERY, ""),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("encoders")
    return {kind: make_encoder(kind, parent / kind) for kind in ENCODERS}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("classifiers")
    return {kind: make_encoder(kind, parent / kind, labels=1) for kind in ENCODERS}


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def texts(seed: int, count: int = 24) -> list[list[int]]:
    """Of random lengths, among them the shortest and the longest, and some of the same."""
    chance = random.Random(seed)
    lengths = [1, LENGTH, *(chance.choice([2, 7, 16, 17, 40, chance.randint(1, LENGTH)]) for _ in range(count - 2))]
    return [[chance.randrange(3, 320) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", ENCODERS)
def test_vectors_are_those_of_transformers(kind: str, kernels: bool, folders: dict[str, Path]) -> None:
    given = texts(3)
    with LLM(str(folders[kind]), threads=1, cpu_kernels=kernels, max_batch_tokens=100) as llm:
        together = llm.embed(given)
        for token_ids, vector in zip(given, together, strict=True):
            assert vector == pytest.approx(expected_vector(folders[kind], token_ids), abs=TOLERANCE)
            assert vector == pytest.approx(llm.embed(token_ids)[0], abs=1e-5)
        assert llm.statistics().steps < 2 * len(given), "texts share steps"


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", ENCODERS)
def test_judgements_are_those_of_transformers(kind: str, kernels: bool, classifiers: dict[str, Path]) -> None:
    expected = expected_labels(classifiers[kind], PAIRS)
    assert max(expected) - min(expected) > 100 * TOLERANCE, "the model tells pairs apart"
    with LLM(str(classifiers[kind]), threads=1, cpu_kernels=kernels) as llm:
        assert llm.relevance(PAIRS) == pytest.approx([sigmoid(label) for label in expected], abs=TOLERANCE)
        for pair, label in zip(PAIRS, expected, strict=True):
            assert llm.relevance([pair]) == pytest.approx([sigmoid(label)], abs=TOLERANCE)
        with pytest.raises(InvalidRequest, match="is a classifier and gives no embeddings"):
            llm.embed("fox")


@pytest.mark.parametrize("kind", ENCODERS)
def test_labels_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    names = {0: "good", 1: "bad", 2: "neither"}
    folder = make_encoder(kind, tmp_path / "model", labels=3, id2label=names)
    given = ["red foxes", "mice and berries are what red foxes eat", "a"]
    expected = torch.tensor([expected_logits(folder, text) for text in given], dtype=torch.float64)
    with LLM(str(folder), threads=1) as llm:
        found = llm.classify(given)
        assert [list(each) for each in found] == [["good", "bad", "neither"]] * 3
        exclusive = expected.softmax(-1).tolist()
        assert [list(each.values()) for each in found] == [pytest.approx(row, abs=TOLERANCE) for row in exclusive]
        assert llm.encode(given, pooling_task="classify") == [list(each.values()) for each in llm.classify(given)]
        assert llm.classify(given[1], truncate_prompt_tokens=4) != found[1:2]
        with pytest.raises(InvalidRequest, match="the model has 3 labels and judges no pairs"):
            llm.relevance(PAIRS)
        with pytest.raises(InvalidRequest, match="pooling_task is 'token_embed'"):
            llm.encode(given, pooling_task="token_embed")  # type: ignore[arg-type]
    change_config(folder, problem_type="multi_label_classification")
    with LLM(str(folder), threads=1) as llm:
        several = [list(each.values()) for each in llm.classify(given)]
        assert several == [pytest.approx(row, abs=TOLERANCE) for row in expected.sigmoid().tolist()]
    change_config(folder, problem_type="regression")
    with LLM(str(folder), threads=1) as llm, pytest.raises(InvalidRequest, match="its numbers are no probabilities"):
        llm.classify(given)


def test_the_second_of_two_texts_is_of_another_kind(classifiers: dict[str, Path]) -> None:
    with LLM(str(classifiers["bert"]), threads=1) as llm:
        read = engine_of(llm).inputs.pair("red", "foxes")
        assert read.second_text is not None and read.token_ids[read.second_text - 1] == 2
        assert engine_of(llm).inputs.pair("red", "").second_text == read.second_text


@pytest.mark.sample(3)
@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "mean"])
@pytest.mark.parametrize("kernels", [True, False])
def test_pooling_is_what_the_folder_says(pooling: str, kernels: bool, tmp_path: Path) -> None:
    folder = make_encoder("modernbert", tmp_path / "model", local_attention=20)
    old = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "lasttoken": "pooling_mode_lasttoken"}
    given = texts(5, 8)
    for fields in ({"pooling_mode": pooling}, {name: name == old[pooling] for name in old.values()}):
        set_pooling(folder, **fields)
        with LLM(str(folder), threads=1, cpu_kernels=kernels) as llm:
            for token_ids, vector in zip(given, llm.embed(given), strict=True):
                assert vector == pytest.approx(expected_vector(folder, token_ids, pooling), abs=TOLERANCE)


@pytest.mark.parametrize("kernels", [True, False])
def test_long_texts_with_local_layers(kernels: bool, tmp_path: Path) -> None:
    """More queries than attend together, more keys than a split has, and longer than a step."""
    folder = make_encoder("modernbert", tmp_path / "model", max_position_embeddings=400, local_attention=128)
    chance = random.Random(1)
    given = [[chance.randrange(3, 320) for _ in range(length)] for length in (400, 300, 64, 65)]
    with LLM(str(folder), threads=1 + kernels, cpu_kernels=kernels, max_batch_tokens=370) as llm:
        for token_ids, vector in zip(given, llm.embed(given), strict=True):
            assert vector == pytest.approx(expected_vector(folder, token_ids), abs=TOLERANCE)


def test_texts_get_the_tokens_that_the_tokenizer_puts_around_them(folders: dict[str, Path]) -> None:
    """All of them, whatever the tokenizer's file says of cutting."""
    with LLM(str(folders["bert"]), threads=1) as llm:
        text = "mice and berries are what red foxes eat " * 2
        token_ids = llm.tokenizer.encode(text)
        assert len(token_ids) > 6 and (token_ids[0], token_ids[-1]) == (1, 2)
        assert llm.embed(text)[0] == pytest.approx(expected_vector(folders["bert"], token_ids), abs=TOLERANCE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("quantization", "least"), [("fp8", 0.9), ("int8", 0.99), ("int4", 0.8)])
def test_quantized_vectors_point_the_same_way(quantization: Any, least: float, folders: dict[str, Path]) -> None:
    given = texts(7, 6)
    for kind, folder in folders.items():
        with LLM(str(folder), threads=1, quantization=quantization) as llm:
            for token_ids, vector in zip(given, llm.embed(given), strict=True):
                expected = torch.tensor(expected_vector(folder, token_ids))
                assert float(torch.tensor(vector) @ expected) > least, kind


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_vectors_are_the_same_bits_in_any_batch(kind: str, folders: dict[str, Path]) -> None:
    given = texts(11, 12)
    with LLM(str(folders[kind]), threads=2, deterministic=True, dtype="bfloat16") as llm:
        assert llm.embed(given) == [llm.embed(token_ids)[0] for token_ids in given]


def test_bfloat16_vectors_point_the_same_way(folders: dict[str, Path]) -> None:
    given = texts(9, 6)
    for kernels in (True, False):
        with LLM(str(folders["bert"]), threads=1, dtype="bfloat16", cpu_kernels=kernels) as llm:
            for token_ids, vector in zip(given, llm.embed(given), strict=True):
                assert float(torch.tensor(vector) @ torch.tensor(expected_vector(folders["bert"], token_ids))) > 0.995


def test_old_names_of_norms_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_encoder("bert", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    head = {"cls.predictions.bias": torch.zeros(320)}
    save_file(old | head, folder / "model.safetensors")
    change_config(folder, architectures=["BertForMaskedLM"])
    expected = expected_vector(folder, [5, 6, 7])
    with LLM(str(folder), threads=1) as llm:
        assert llm.embed([5, 6, 7])[0] == pytest.approx(expected, abs=TOLERANCE)


# What is refused


def test_what_an_encoder_does_not_do(folders: dict[str, Path], classifiers: dict[str, Path]) -> None:
    with LLM(str(folders["xlm-roberta"]), threads=1) as llm:
        assert llm.config.max_model_len is None and engine_of(llm).layout.max_model_len == LENGTH
        nothing = "^xlm-roberta is an encoder: it gives embeddings and generates nothing; ask /v1/embeddings$"
        for ask in (llm.generate, llm.stream):
            with pytest.raises(InvalidRequest, match=nothing):
                list(ask("fox"))
        with pytest.raises(InvalidRequest, match=nothing):
            llm.chat([{"role": "user", "content": "fox"}])
        with pytest.raises(InvalidRequest, match=nothing):
            llm.score([("a", "b")])
        with pytest.raises(
            InvalidRequest, match=f"the text has {LENGTH + 1} tokens, and xlm-roberta reads {LENGTH} at"
        ):
            llm.embed([5] * (LENGTH + 1))
        with pytest.raises(InvalidRequest, match="does not judge pairs of texts"):
            llm.relevance(PAIRS)
    with LLM(str(classifiers["roberta"]), threads=1) as llm, pytest.raises(InvalidRequest, match="is a classifier"):
        llm.generate("fox")


def test_two_texts_are_for_encoders(folders: dict[str, Path], tiny_llm: LLM) -> None:
    with LLM(str(folders["bert"]), threads=1) as llm:
        one, two = llm.embed([PromptInput([5, 6]), PromptInput([5, 6], second_text=1)])
        assert one != two
        with pytest.raises(InvalidRequest, match="second_text is 3"):
            llm.embed([PromptInput([5, 6], second_text=3)])
    with pytest.raises(InvalidRequest, match="second_text is 1: only encoders read two texts"):
        tiny_llm.generate([PromptInput([5, 6], second_text=1)])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"proposer": "ngram"}, "proposer ngram does not go with bert, which is an encoder: nothing is generated"),
        ({"kv_tier": ("host",)}, "kv_tier host does not go with bert"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 does not go with bert"),
        ({"max_adapters": 1}, "adapters does not go with bert"),
    ],
)
def test_options_that_do_not_go_with_an_encoder(options: dict[str, Any], reason: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folders["bert"]), threads=1, **options)


def test_host_memory_that_another_engine_would_ignore(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(folders["bert"]), threads=1, swap_space=4, kv_tier_max_age="7d", kv_tier_heads=True) as llm:
        assert llm.embed([[5, 6]])
    assert "kv_tier host:4GiB has no effect: bert is an encoder and has no KV cache" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"quantization": "int8"},
            "quantization on a GPU does not go with bert, which is an encoder: there",
        ),
        ({"deterministic": True}, "deterministic on a GPU does not go with bert"),
    ],
)
def test_what_encoders_do_on_cpus_alone(options: dict[str, Any], reason: str, folders: dict[str, Path]) -> None:
    spec = spec_from_config(read_config(folders["bert"]))
    check_encoder(EngineConfig(**options), spec, torch.device("cpu"))
    with pytest.raises(ConfigError, match=reason):
        check_encoder(EngineConfig(**options), spec, torch.device("cuda"))


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("bert", {"is_decoder": True}, "is_decoder is true: bert is supported as an encoder alone"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification is not supported"),
        ("modernbert", {"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is unknown"),
        (
            "modernbert",
            {"layer_types": ["full_attention"] * 3},
            "layer_types has 3 entries, and num_hidden_layers is 4",
        ),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling is 'max'"),
    ],
)
def test_encoders_that_are_not_known(kind: str, fields: dict[str, Any], reason: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        spec_from_config(read_config(folders[kind]) | fields)


def test_pooling_that_is_not_known(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path / "model")
    set_pooling(folder, pooling_mode="max")
    with pytest.raises(UnsupportedModel, match="bert pools by 'max': only mean or cls or lasttoken is supported"):
        spec_of_folder(folder, read_config(folder))
    set_pooling(folder, pooling_mode="mean")
    dense = [{"type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(UnsupportedModel, match=r"bert passes its states through 'sentence_transformers.models.Dense'"):
        spec_of_folder(folder, read_config(folder))


def test_texts_are_as_sentence_transformers_takes_them(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path)
    file = folder / "sentence_bert_config.json"
    file.write_text(json.dumps({"max_seq_length": 20, "do_lower_case": True}))
    with LLM(str(folder), threads=1, cpu_kernels=False) as llm:
        assert llm.embed("Red FOXES") == llm.embed("red foxes")
        assert llm.embed([[5] * 20])
        with pytest.raises(InvalidRequest, match="the text has 21 tokens, and bert reads 20 at most"):
            llm.embed([[5] * 21])
    with LLM(str(folder), threads=1, cpu_kernels=False, max_model_len=LENGTH) as llm:
        assert llm.embed([[5] * LENGTH])
    file.write_text(json.dumps({"max_seq_length": "20"}))
    with pytest.raises(UnsupportedModel, match=r"max_seq_length of sentence_bert_config.json is '20'"):
        spec_of_folder(folder, read_config(folder))


@pytest.mark.parametrize("command", [["chat"], ["run", "in.jsonl", "out.jsonl"]])
def test_nothing_is_generated_at_the_command_line(
    command: list[str], folders: dict[str, Path], tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}')
    assert main([*command, "--model", str(folders["bert"]), "--no-cpu-kernels"]) == 2
    said = f"kvern {command[0]}: error: bert is an encoder: it gives embeddings and generates"
    assert capsys.readouterr().err.startswith(said)
    assert not Path("out.jsonl").exists()


def test_an_encoder_is_no_decoder(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="bert is an encoder: this works with models that generate text alone"):
        load_model(folders["bert"])
