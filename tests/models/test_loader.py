"""Weights arrive in place from any layout of files, in little memory, and every fault is named before data is read."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern.errors import ConfigError, CorruptCheckpoint, KvernError, ModelNotFound, UnsupportedModel
from kvern.layers.build import Build
from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, load_model, load_weights, read_config
from kvern.models.registry import spec_from_config
from kvern.text.tokenizer import Tokenizer
from tests.support.families import change_tensors, make_checkpoint, make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path)


def weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    return dict(decoder.named_parameters())


def fault(folder: Path) -> str:
    with pytest.raises(CorruptCheckpoint) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_shards_with_an_index_load_like_one_file(folder: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    make_model("llama").save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    one, many = weights(load_model(folder)), weights(load_model(sharded))
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_runs_of_rows_load_like_whole_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights(load_model(folder))
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 500)
    runs = weights(load_model(folder))
    assert all(torch.equal(whole[name], runs[name]) for name in whole)


@pytest.mark.parametrize("later", [False, True])
def test_of_tensors_in_several_files_the_index_names_one(folder: Path, later: bool) -> None:
    """Checkpoints are changed by one more file, whose tensors the index names instead of those before."""
    expected, tensors = weights(load_model(folder)), load_file(folder / "model.safetensors")
    files = ["model-00001.safetensors", "zz.safetensors" if later else "an-overlay.safetensors"]
    norm = {"model.norm.weight": tensors["model.norm.weight"]}
    save_file(tensors | {"model.norm.weight": torch.zeros_like(norm["model.norm.weight"])}, folder / files[0])
    save_file(norm, folder / files[1])
    index = {"weight_map": dict.fromkeys(tensors, files[0]) | dict.fromkeys(norm, files[1])}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = weights(load_model(folder))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    index["weight_map"]["another"] = index["weight_map"].pop("model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "tensor model.norm.weight is in two files" in fault(folder)


def test_files_of_any_name_load_without_an_index(folder: Path) -> None:
    expected = weights(load_model(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model-00001-of-00001.safetensors")
    assert torch.equal(weights(load_model(folder))["lm_head.method.weight"], expected["lm_head.method.weight"])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", torch.bfloat16), ("half", torch.float16), ("fp32", torch.float32), ("auto", torch.float32)],
)
def test_dtypes(folder: Path, name: str, dtype: torch.dtype) -> None:
    assert load_model(folder, LoadOptions(dtype=name)).embed_tokens.method.dequantize().dtype == dtype


def test_auto_follows_the_configuration_then_the_weights(folder: Path) -> None:
    config = read_config(folder) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).embed_tokens.method.dequantize().dtype == torch.float16
    (folder / "config.json").write_text(json.dumps(config | {"dtype": None}))
    assert load_model(folder).embed_tokens.method.dequantize().dtype == torch.float32


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int3' is unknown"):
        load_model(folder, LoadOptions(dtype="int3"))


def test_random_weights_need_no_file_and_are_the_same_twice(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = (weights(load_model(folder, LoadOptions(load_format="dummy"))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["layers.0.attention_in.weight"].std() == 0
    assert first["lm_head.method.weight"].std() > 0


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.1.self_attn.k_proj.weight": None})
    assert "1 missing: model.layers.1.self_attn.k_proj.weight [24, 48]" in fault(folder)


def test_an_unexpected_tensor_is_named_with_its_shape(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.9.mlp.up_proj.weight": torch.zeros(3, 4)})
    assert "1 unexpected: model.layers.9.mlp.up_proj.weight [3, 4]" in fault(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    change_tensors(folder, **{"model.norm.weight": torch.zeros(47)})
    assert "1 misshapen: model.norm.weight has [47], the configuration asks for [48]" in fault(folder)


def test_all_faults_are_told_at_once_and_long_lists_are_cut(folder: Path) -> None:
    change_tensors(folder, **{f"extra.{i}": torch.zeros(1) for i in range(9)}, **{"model.norm.weight": None})
    message = fault(folder)
    assert "1 missing: model.norm.weight" in message
    assert "9 unexpected: extra.0 [1]" in message and "and 4 more" in message


def test_harmless_leftovers_are_ignored(folder: Path) -> None:
    expected = load_model(folder).state_dict()
    change_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)})
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_nothing_is_read_before_all_is_checked(folder: Path) -> None:
    decoder = Decoder(spec_from_config(read_config(folder)), Build(torch.float32, torch.device("cpu"), 64))
    for parameter in decoder.parameters():
        parameter.fill_(5.0)
    change_tensors(folder, **{"model.norm.weight": torch.zeros(47)})
    with pytest.raises(CorruptCheckpoint):
        load_weights(decoder, folder)
    assert all(parameter.eq(5.0).all() for parameter in decoder.parameters())


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_named_with_its_size(folder: Path, kept: float) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    message = fault(folder)
    assert f"{file} has {file.stat().st_size} bytes" in message
    if kept in (0.5, -1):
        assert f"its header describes {len(whole)}" in message


def test_a_file_with_bytes_too_many_is_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"tail")
    assert "its header describes" in fault(folder)


@pytest.mark.parametrize("header", [b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F4", "shape": [1]}}'])
def test_an_unreadable_header_is_refused(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "unreadable safetensors header" in fault(folder)


def test_a_header_whose_offsets_do_not_fit_its_shapes_is_refused(folder: Path) -> None:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "tensor model.norm.weight of 12 bytes has offsets 0 to 8" in fault(folder)


def test_tensors_that_share_their_bytes_are_refused(folder: Path) -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for name in "ab"}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "has tensor b at byte 0 of its data, where 8 is expected" in fault(folder)


def test_an_index_that_names_missing_files_is_refused(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of them missing: model-00001-of-00002.safetensors" in fault(folder)


def test_an_unreadable_index_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "holds a JSON list, not an object" in fault(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "is not a safetensors index" in fault(folder)


def test_a_folder_without_weights_or_configuration_is_not_a_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"holds no \*.safetensors"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"config\.json does not exist"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_configuration_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in fault(folder)


def test_a_quantized_checkpoint_is_refused_by_name(folder: Path) -> None:
    config = read_config(folder) | {"quantization_config": {"quant_method": "aqlm"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantized by 'aqlm'"):
        load_model(folder)


MEASURE = """
import sys
from pathlib import Path
from kvern.models.loader import LoadOptions, load_model
decoder = load_model(Path(sys.argv[1]), LoadOptions(dtype=sys.argv[2], max_model_len=64))
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path, dtype: str) -> None:
    """400 MB of bfloat16 zeros in a sparse file, a quarter of them in one tensor."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    targets = Decoder(spec_from_config(config), Build(torch.bfloat16, torch.device("meta"), 64)).tensor_targets()
    header, end = {}, 0
    for name, target in targets.items():
        begin, end = end, end + 2 * torch.Size(target.shape).numel()
        header[name] = {"dtype": "BF16", "shape": target.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 390e6
    command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
    peak = 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    held = end * (2 if dtype == "fp32" else 1)
    assert held < peak < 1.15 * held + 300e6


ABSURD: list[Any] = [10**9, 10**30, -1, 0, 1.5, float("nan"), True, "x" * 10_000, [], {}, [[1]], {"a": {"b": 1}}, None]
"""In place of any value."""


def damaged(value: Any) -> Iterator[Any]:
    """The value with each part of it replaced by each of `ABSURD`, and each part of an object left out."""
    yield from ABSURD
    if isinstance(value, dict):
        for key, part in value.items():
            yield {other: kept for other, kept in value.items() if other != key}
            yield from (value | {key: spoilt} for spoilt in damaged(part))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], spoilt, *value[index + 1 :]] for spoilt in damaged(part))


def loads_or_says_why(folder: Path) -> bool:
    message = ""
    try:
        Tokenizer(folder)
        load_model(folder, LoadOptions(max_model_len=64))
    except KvernError as error:
        message = str(error)
    assert "\n" not in message and len(message) < 2000
    return not message


@pytest.mark.nightly
def test_no_damage_to_the_configuration_is_more_than_one_line(folder: Path) -> None:
    config = read_config(folder) | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_parameters": None,
        "quantization_config": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert loads_or_says_why(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for spoilt in damaged(config):
        (folder / "config.json").write_text(json.dumps(spoilt))
        loads_or_says_why(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000, "kilobytes"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        "qwen3_moe",
        "mistral3",
        *(
            pytest.param(family, marks=pytest.mark.nightly)
            for family in ("mixtral", "phi3", "gpt_neox", "minimax_m2", "ministral3")
        ),
    ],
)
def test_no_damage_to_a_familys_own_settings_is_more_than_one_line(family: str, tmp_path: Path) -> None:
    config = read_config(make_checkpoint(family, tmp_path))
    for spoilt in damaged(config):
        message = ""
        try:
            spec_from_config(spoilt if isinstance(spoilt, dict) else {})
        except KvernError as error:
            message = str(error)
        assert "\n" not in message and len(message) < 2000


def test_no_damage_to_the_header_is_more_than_one_line(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    count = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + count])
    some = dict(list(header.items())[:3])
    for spoilt in damaged(some):
        text = json.dumps(header | spoilt if isinstance(spoilt, dict) else spoilt).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + count :])
        loads_or_says_why(folder)
    for begin in range(0, len(content), 997):
        file.write_bytes(content[:begin])
        assert not loads_or_says_why(folder)


NESTED = "[" * 100_000 + "]" * 100_000
NAMES = ["config.json", "model.safetensors", "model.safetensors.index.json"]
TEXTS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]


@pytest.mark.parametrize("name", [*NAMES, *TEXTS, "chat_template.jinja", "chat_template.json"])
def test_what_is_no_file_of_text_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    file = folder / name

    def pipe() -> None:
        os.mkfifo(file)

    def huge() -> None:
        with file.open("wb") as stream:
            stream.truncate(1 << 40)

    kinds: list[Callable[[], object]] = [
        *(pipe, file.mkdir, huge),
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(file),
        lambda: file.write_bytes(b"\xff\xfe"),
    ]
    if not name.endswith(("jinja", "safetensors")):
        kinds.append(lambda: file.write_text('{"a": ' + NESTED + "}"))
    for make in kinds:
        file.unlink(missing_ok=True)
        make()
        if name in NAMES:
            with pytest.raises(KvernError):
                load_model(folder)
        else:
            with pytest.raises(CorruptCheckpoint) as caught:
                Tokenizer(folder)
            assert "\n" not in str(caught.value)
        if file.is_dir():
            file.rmdir()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "x" * 300, "a\0b", 7])
def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, name: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "model.safetensors.index.json" in fault(folder)


def test_a_model_that_the_machine_cannot_hold_is_refused_before_it_is_built(folder: Path) -> None:
    sizes = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 500, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(read_config(folder) | sizes))
    with pytest.raises(ConfigError, match=r"the weights take \d+\.\d GB"):
        load_model(folder, LoadOptions(load_format="dummy"))
    assert "tensors for 500 layers" in fault(folder)
