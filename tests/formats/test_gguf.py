"""GGUF files: every architecture and type computes what the plain numbers do, and bad files are refused in a line."""

import random
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvern.config import EngineConfig
from kvern.errors import CorruptCheckpoint, InvalidRequest, KvernError, UnsupportedModel
from kvern.formats.gguf.files import tokenizer_files
from kvern.formats.gguf.header import QUANTIZED, Header, read_gguf_header
from kvern.formats.gguf.method import NUMBERS
from kvern.llm import LLM
from kvern.models.folder import model_folder
from kvern.models.hub import resolve_model
from kvern.models.loader import LoadOptions, load_model
from kvern.request.sampling_params import SamplingParams
from kvern.text.tokenizer import Tokenizer
from tests.support.cache_folder import cache_folder
from tests.support.families import make_checkpoint
from tests.support.gguf_files import ARCHITECTURES, MIXES, add_tokenizer, folder_of, write_gguf
from tests.support.model_outputs import PROMPT, logits
from tests.support.served import QUESTION, serving

SOFTMAX = gguf.ExpertGatingFuncType.SOFTMAX


@pytest.mark.parametrize("block", QUANTIZED.values(), ids=lambda block: block.name)
def test_blocks_stand_for_the_numbers_that_the_package_finds(block: Any) -> None:
    kind = gguf.GGMLQuantizationType[block.name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (block.numbers, block.size)
    blocks = np.random.default_rng(0).integers(0, 256, (500, block.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, kind)
    found = NUMBERS[block.name](torch.from_numpy(blocks)).numpy()
    kept = np.isfinite(expected)
    assert found.dtype == np.float32 and kept.mean() > 0.8
    assert np.array_equal(found.view(np.int32)[kept], expected.view(np.int32)[kept])


LIKE_THEIR_CHECKPOINTS = (
    "llama llama3 llama_bias mistral mixtral qwen3 qwen2_moe gemma gemma2 gemma3 phi3 olmo olmo2 olmoe cohere cohere2 "
    "granite granitemoe stablelm stablelm_parallel gpt_neox gpt_neox_sequential nemotron exaone4 exaone4_full glm4 "
    "ernie4_5 arcee seed_oss gpt_oss glm4_moe glm4_moe_groups minimax_m2 hunyuan_v1_dense granitemoehybrid"
)
FAMILIES: dict[str, dict[str, Any]] = {
    **{family: {} for family in LIKE_THEIR_CHECKPOINTS.split()},
    # what llama.cpp does not know of them
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "phi": {"qk_layernorm": False},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 4},
    "dots1": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "lfm2": {"conv_bias": False},
    "lfm2_moe": {"tie_word_embeddings": True},
}


@pytest.mark.sample(18)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "model", **FAMILIES[family])
    made = write_gguf(model, tmp_path)
    decoder = load_model(folder_of(made.file, tmp_path))
    assert decoder.build.dtype == torch.float32
    assert (logits(decoder, PROMPT) - logits(load_model(model), PROMPT)).abs().max() < 1e-4


def test_mamba_beside_an_mlp_without_experts(tmp_path: Path) -> None:
    model = make_checkpoint("granitemoehybrid", tmp_path / "model", num_local_experts=0, position_embedding_type="rope")
    decoder = load_model(folder_of(write_gguf(model, tmp_path, "F16").file, tmp_path))
    assert decoder.build.dtype == torch.float16
    rough = logits(load_model(model, LoadOptions(dtype="float16")), PROMPT)
    assert (logits(decoder, PROMPT) - rough).abs().max() < 0.05 * rough.abs().max()


def test_layers_that_draft_several_tokens_are_passed_over(tmp_path: Path) -> None:
    model = make_checkpoint("glm4_moe", tmp_path / "model")
    plain = write_gguf(model, tmp_path)

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_norm", "ffn_gate_inp"):
            writer.add_tensor(f"blk.3.{name}.weight", np.zeros((6, 48), dtype=np.float32))

    made = write_gguf(model, tmp_path / "drafting", describe=describe)
    found, expected = (logits(load_model(folder_of(item.file, tmp_path)), PROMPT) for item in (made, plain))
    assert torch.equal(found, expected)


def test_experts_that_are_scored_in_another_way_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint("glm4_moe", tmp_path / "model")
    made = write_gguf(model, tmp_path, describe=lambda writer: writer.add_expert_gating_func(SOFTMAX))
    with pytest.raises(UnsupportedModel, match="expert_gating_func is 1; kvern runs glm4moe with 2, sigmoids"):
        folder_of(made.file, tmp_path)


@pytest.mark.parametrize(
    ("family", "mix"),
    [
        *[("llama", mix) for mix in MIXES if mix != "gpt_oss"],
        ("gpt_oss", "gpt_oss"),
        *[(family, "q4_k_m") for family in ("qwen3_moe", "phi3", "gemma3", "gpt_neox")],
    ],
)
def test_packed_blocks_compute_what_their_numbers_do(family: str, mix: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 256, "num_experts": 3, "num_experts_per_tok": 2, "mlp_only_layers": []}
    if family in ("gemma3", "gpt_oss"):
        sizes |= {"layer_types": ["sliding_attention"]}
    model = make_checkpoint(family, tmp_path / "model", **sizes)
    kinds = MIXES[mix]
    made = write_gguf(model, tmp_path, lambda name: next(kinds[part] for part in kinds if re.search(part, name)))
    folder = folder_of(made.file, tmp_path)
    decoder, plain = (
        load_model(folder, LoadOptions(dtype="float32")),
        load_model(made.plain, LoadOptions(dtype="float32")),
    )
    assert (logits(decoder, PROMPT) - logits(plain, PROMPT)).abs().max() < 2e-4
    assert decoder.weight_bytes < (1.01 if mix == "plain" else 0.5) * plain.weight_bytes
    assert load_model(folder, LoadOptions(load_format="dummy")).build.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as one Q8_0 file, tokenizer and template within."""
    folder = resolve_model("kvern-1m")
    return write_gguf(
        folder, tmp_path_factory.mktemp("embedded"), "Q8_0", describe=add_tokenizer(folder, "smollm")
    ).file


QUESTIONS = ["What is 17 + 25?", "What is the capital of France?", "Count from 3 to 9."]


def test_the_embedded_model_answers_from_its_file_alone(embedded: Path, tmp_path: Path) -> None:
    def answers(model: str) -> list[list[int]]:
        with LLM(model, cache_dir=cache_folder(tmp_path / "cache"), max_model_len=256) as llm:
            messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
            found = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
            return [list(output.outputs[0].token_ids) for output in found]

    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(embedded, alone / "any-name.gguf")
    pairs = list(zip(answers("kvern-1m"), answers(str(alone)), strict=True))
    assert sum(own == found for own, found in pairs) >= 2 and all(own[:2] == found[:2] for own, found in pairs)


def test_a_file_has_no_encoder_of_images_and_says_so(embedded: Path, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    said = r"reads text only: a GGUF file holds .* serve its safetensors$"
    for model, reason in ((str(embedded), said), ("kvern-1m", r"reads text only$")):
        options: dict[str, Any] = {"cache_dir": cache_folder(tmp_path / "cache"), "max_model_len": 256}
        with LLM(model, **options) as llm, pytest.raises(InvalidRequest, match=reason):
            llm.chat([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(("family", "name"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")])
def test_the_language_model_of_one_that_sees(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, family, name)
    made = write_gguf(make_checkpoint(family, tmp_path / "model", **FAMILIES[family]), tmp_path / "gguf")
    found, expected = load_model(folder_of(made.file, tmp_path)), load_model(made.plain)
    assert (logits(found, PROMPT) - logits(expected, PROMPT)).abs().max() < 2e-4


def test_a_file_is_served(embedded: Path, tmp_path: Path) -> None:
    with serving("--model", str(embedded), "--cache-dir", cache_folder(tmp_path), "--max-model-len", "256") as served:
        client = served.client()
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=QUESTION, max_tokens=8, temperature=0
        )
        assert answer.choices[0].message.content == "42"


def test_split_files_are_one_model(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    whole = write_gguf(model, tmp_path / "whole")
    write_gguf(model, tmp_path / "split", split=9)
    files = sorted((tmp_path / "split").glob("*.gguf"))
    assert len(files) == 4 and files[1].name == "model-00002-of-00004.gguf"
    expected = logits(load_model(folder_of(whole.file, tmp_path)), PROMPT)
    for given in (files[0], files[2], tmp_path / "split"):
        assert torch.equal(logits(load_model(folder_of(given, tmp_path)), PROMPT), expected)
    files[1].unlink()
    with pytest.raises(CorruptCheckpoint, match="is one of 4 files, 1 of them missing: model-00002-of-00004"):
        folder_of(files[0], tmp_path)


def packed_header(version: int = 3, tensors: int = 0, values: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def tensor_info(name: bytes = b"a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return struct.pack("<Q", len(name)) + name + numbers


FULL = bytes(1024)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", CorruptCheckpoint, "shorter than the header"),
        (b"GGML" + bytes(40), CorruptCheckpoint, "begins with b'GGML'"),
        (packed_header(1, rest=FULL), UnsupportedModel, "version 1; kvern reads versions 2 and 3"),
        (packed_header(3 << 24, rest=FULL), UnsupportedModel, "big-endian"),
        (packed_header(3, 1 << 40, rest=FULL), CorruptCheckpoint, "promises 1099511627776 tensors"),
        (packed_header(3, 0, 1 << 16, rest=FULL), CorruptCheckpoint, "promises 65536 values"),
        (
            packed_header(3, 0, 1, struct.pack("<Q", 1 << 50) + FULL),
            CorruptCheckpoint,
            "a name has 1125899906842624 bytes",
        ),
        (
            packed_header(3, 0, 1, struct.pack("<Q1sIQ", 1, b"k", 8, 1 << 50) + FULL),
            CorruptCheckpoint,
            "promises 112589990",
        ),
        (
            packed_header(3, 0, 1, struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 40) + FULL),
            CorruptCheckpoint,
            "array entries",
        ),
        (packed_header(3, 0, 1, struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1) + FULL), CorruptCheckpoint, "kind 9"),
        (packed_header(3, 0, 1, struct.pack("<Q1sI", 1, b"k", 77) + FULL), CorruptCheckpoint, "unknown kind 77"),
        (
            packed_header(3, 0, 2, struct.pack("<Q1sII", 1, b"k", 4, 1) * 2 + FULL),
            CorruptCheckpoint,
            "'k' is there twice",
        ),
        (
            packed_header(3, 2, 0, tensor_info() + tensor_info(offset=128) + FULL),
            CorruptCheckpoint,
            "'a' is there twice",
        ),
        (packed_header(3, 2, 0, tensor_info() + tensor_info(b"b") + FULL), CorruptCheckpoint, "lies over another"),
        (
            packed_header(3, 1, 0, tensor_info(shape=(1 << 20,)) + FULL),
            CorruptCheckpoint,
            r"it has 1.1 kB of 4.2 MB: it is cut off; download it again",
        ),
        (packed_header(3, 1, 0, tensor_info(shape=(1 << 40, 1 << 40)) + FULL), CorruptCheckpoint, "has the shape"),
        (packed_header(3, 1, 0, tensor_info(shape=(33,), kind=2) + FULL), CorruptCheckpoint, "Q4_0 asks for rows"),
        (packed_header(3, 1, 0, tensor_info(shape=(1,) * 9) + FULL), CorruptCheckpoint, "9 dimensions"),
        (
            packed_header(3, 1, 0, tensor_info(kind=16) + FULL),
            UnsupportedModel,
            "'a' is stored as IQ2_XXS; kvern reads F32",
        ),
        (packed_header(3, 1, 0, tensor_info(kind=99) + FULL), UnsupportedModel, "'a' is stored as unknown type 99"),
        (packed_header(3, 1, 0, tensor_info(offset=5) + FULL), CorruptCheckpoint, "lies over another"),
        (packed_header(rest=FULL), UnsupportedModel, "the GGUF architecture '' is unknown"),
    ],
)
def test_bad_files_are_refused_in_a_line(content: bytes, error: type[KvernError], message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        folder_of(file, tmp_path)
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_damaged_files_end_in_a_line_or_load(embedded: Path, tmp_path: Path) -> None:
    """Cut anywhere, or with bits turned over in what is said of the model: whatever is read stays within the file."""
    whole, rng = embedded.read_bytes(), random.Random(0)
    end = whole.index(b"token_embd.weight")
    tracemalloc.start()
    refused: list[str] = []
    for turn in range(60):
        data = bytearray(whole)
        if turn % 3 == 0:
            del data[rng.randrange(end + 2000) :]
        else:
            for _ in range(rng.choice((1, 3, 40))):
                place = rng.choice((rng.randrange(24), rng.randrange(end + 3000), rng.randrange(end, end + 3000)))
                data[place] ^= 1 << rng.randrange(8)
        file = tmp_path / f"{turn}.gguf"
        file.write_bytes(data)
        tracemalloc.reset_peak()
        try:
            folder = model_folder(EngineConfig(str(file), cache_dir=str(tmp_path)))
            load_model(folder, LoadOptions(device="meta", max_model_len=16))
            Tokenizer(folder)
        except KvernError as error:
            refused.append(str(error))
        assert tracemalloc.get_traced_memory()[1] < 60e6
        file.unlink()
    tracemalloc.stop()
    assert len(refused) > 30 and all("\n" not in line and len(line) < 1000 for line in refused)


def test_scales_of_blocks_that_are_no_numbers(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    file = write_gguf(model, tmp_path, lambda name: "Q8_0" if "attn_q" in name else "F32").file
    folder = folder_of(file, tmp_path)
    load_model(folder)
    begin = read_gguf_header(file).by_name["blk.0.attn_q.weight"].begin
    with file.open("r+b") as stream:
        stream.seek(begin)
        stream.write(struct.pack("<e", float("inf")))
    with pytest.raises(CorruptCheckpoint, match=r"layers\.0\.self_attn\.q_proj\.weight in .* is not finite"):
        load_model(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "gpt2", "tokens": ["a"], "merges": [1, 2]}, "pairs that are no tokens"),
        ({"model": "llama", "tokens": ["a"], "scores": ["x"]}, "it has 1 tokens, and scores"),
        ({"model": "llama", "tokens": ["a" * 5000], "scores": [0.0]}, "a token has 5000 characters: at most 1024"),
    ],
)
def test_vocabularies_that_cannot_be(values: dict[str, Any], message: str) -> None:
    header = Header(Path("a.gguf"), {f"tokenizer.ggml.{name}": value for name, value in values.items()}, ())
    with pytest.raises(CorruptCheckpoint, match=message):
        tokenizer_files(header)
