"""Descriptions of models without a family: found, proved, written, read and served; wrong ones are noticed."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from kvern import LLM, SamplingParams
from kvern.cli.main import main
from kvern.describing import proof, search
from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.models.decoder import Decoder
from kvern.models.loader import read_config
from kvern.models.registry import KEY, is_described, spec_from_config
from kvern.models.spec_file import FILE, digest_of, from_data, to_data
from kvern.spec.model import ModelSpec
from tests.support.families import FAMILIES, make_checkpoint, reference_greedy

FOUND = (
    *("iquestcoder", "jais2", "mellum", "hyperclovax", "exaone_moe", "flex_olmo", "granite_swa", "granitemoe_swa"),
    *("granitemoeshared", "hy_v3", "solar_open", "vaultgemma", "cohere2_moe", "flint", "got_ocr2"),
    "moss_transcribe_diarize",
)
NOT_FOUND = ("bitnet", "diffllama", "aria_text", "gpt2")
BY_DAY = ("jais2", "hy_v3")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in FOUND]
)
def test_a_type_without_a_family_is_described(model_type: str) -> None:
    found = search.search(AutoConfig.for_model(model_type))
    assert found.off <= search.AGREEMENT
    assert from_data(to_data(found.spec)) == found.spec
    assert len(found.spec.layers) == AutoConfig.for_model(model_type).get_text_config().num_hidden_layers


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name == "bitnet" else pytest.mark.nightly) for name in NOT_FOUND]
)
def test_a_type_with_other_parts_is_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModel):
        search.search(AutoConfig.for_model(model_type))


CHANGING = {
    "chunks": ("llama4_text", {"attention_chunk_size": 128}, "layers of the types chunked_attention"),
    "queries that grow": (
        "llama4_text",
        {"layer_types": ["full_attention"] * 2},
        "floor_scale is|_chunk",
    ),
    "a limit": ("jais2", {"swiglu_limit": 7.0}, "swiglu_limit is 7.0, whose effect"),
}


@pytest.mark.parametrize("what", CHANGING)
def test_what_a_short_prompt_does_not_show_is_refused(what: str) -> None:
    model_type, settings, message = CHANGING[what]
    with pytest.raises(UnsupportedModel, match=message):
        search.search(AutoConfig.for_model(model_type, num_hidden_layers=2, **settings))


def test_attention_that_changes_at_a_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries grow from a position on, which is a setting without a telling name."""
    right = search.logits_of

    def scaled(decoder: Decoder, ids: Tensor, first: int = 0) -> Tensor:
        return right(decoder, ids, first) * (1.1 if first >= 300 else 1.0)

    monkeypatch.setattr(search, "logits_of", scaled)
    with pytest.raises(UnsupportedModel, match=r"off by 0\..* of their spread from position 300 on"):
        search.search(AutoConfig.for_model("jais2", num_hidden_layers=2, grows_from=300))


def _offset(spec: ModelSpec) -> ModelSpec:
    return replace(spec, norm=replace(spec.norm, offset=1.0))


def _theta(spec: ModelSpec) -> ModelSpec:
    layers = (
        replace(layer, rope=replace(layer.rope, theta=2 * layer.rope.theta)) for layer in spec.layers if layer.rope
    )
    return replace(spec, layers=tuple(layers))


def _pairs(spec: ModelSpec) -> ModelSpec:
    layers = (replace(layer, rope=replace(layer.rope, interleaved=True)) for layer in spec.layers if layer.rope)
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize("wrong", [_offset, _theta, _pairs])
def test_a_wrong_description_is_noticed(
    wrong: Callable[[ModelSpec], ModelSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the small model, and on the layers of the model itself."""
    right = search.spec_of
    monkeypatch.setattr(search, "MOST", 1)
    monkeypatch.setattr(search, "spec_of", lambda facts, choice: wrong(right(facts, choice)))
    folder = make_checkpoint("jais2", tmp_path)
    with pytest.raises(UnsupportedModel, match="none of 1 candidates computes what transformers does"):
        proof.describe(folder)
    monkeypatch.setattr(search, "difference", lambda *_: 0.0)
    with pytest.raises(UnsupportedModel, match="with its own layers 0, 2 logits are off by"):
        proof.describe(folder)


def test_a_described_model_is_served_by_kvern(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("hy_v3", tmp_path)
    assert not is_described(read_config(folder))
    assert main(["describe", str(folder)]) == 0
    assert "with its own layers 0, 2 logits are off by" in capsys.readouterr().out
    prompt = [5, 6, 7, 8, 9, 10, 11]
    with LLM(str(folder), threads=1, max_model_len=64, kv_cache_tokens=128) as llm:
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert output.outputs[0].token_ids == reference_greedy(folder, prompt, 6)
    assert f"kvern computes hy_v3 by the description in {folder / FILE}" in caplog.text
    assert main(["describe", str(folder)]) == 0
    assert "is described already" in capsys.readouterr().out
    text = json.loads((folder / "config.json").read_text())
    assert digest_of(text) == digest_of(text | {"quantization_config": {}}) != digest_of(text | {"rms_norm_eps": 1.0})
    with pytest.raises(UnsupportedModel, match=r"made for another config\.json.*describe the model again"):
        LLM(str(folder), threads=1, max_model_len=64, kv_cache_tokens=128, hf_overrides={"rms_norm_eps": 1e-3})
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 0.001'))
    with pytest.raises(UnsupportedModel, match=r"made for another config\.json"):
        read_config(folder)
    assert main(["describe", str(folder)]) == 0
    assert spec_from_config(read_config(folder)).norm.epsilon == 1e-3


def test_a_description_beside_a_model_of_a_family_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / FILE).write_text("{}")
    assert KEY not in read_config(folder)
    assert f"{folder / FILE} is ignored: a family of kvern" in caplog.text


def test_weights_that_do_not_fit_write_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint("jais2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.other.weight": tensors.pop("model.norm.weight")}, folder / "model.safetensors")
    with pytest.raises(
        CorruptCheckpoint, match=r"1 missing: model\.norm\.weight .*1 unexpected: model\.layers\.0\.oth"
    ):
        proof.describe(folder)
    assert not (folder / FILE).exists()


def test_a_family_of_kvern_needs_no_description(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", str(make_checkpoint("llama", tmp_path))]) == 0
    assert "is described already: a family of kvern" in capsys.readouterr().out


def test_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint("jais2", tmp_path)
    for name in [name for name in sys.modules if name.startswith("kvern.describing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["describe", str(folder)]) == 2
    assert "pip install 'kvern[transformers]'" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "deepseek_v3", "lfm2", "qwen3_next", "llama3"])
def test_descriptions_are_data(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    spec = replace(spec_from_config(read_config(make_checkpoint(family, tmp_path))), renames=())
    assert from_data(to_data(spec)) == spec


WRONG: dict[str, tuple[Callable[[dict], object], str]] = {  # type: ignore[type-arg]
    "another class": (lambda data: data | {"is": "NormSpec"}, "cannot be read|describes a NormSpec"),
    "an unknown class": (lambda data: data | {"norm": {"is": "Popen"}}, "cannot be read"),
    "an unknown field": (lambda data: data | {"code": "x"}, "cannot be read"),
    "a text for a number": (lambda data: data | {"hidden_size": "48"}, "hidden_size"),
    "too many layers": (lambda data: data | {"layers": [[10**9, data["layers"][0][1]]]}, "at most"),
    "no layers": (lambda data: data | {"layers": 3}, "cannot be read"),
    "a slow rename": (lambda data: data | {"renames": [_rename(r"^(a+)+$", "b")]}, "kvern_model.json"),
    "an impossible rename": (lambda data: data | {"renames": [_rename(r"a", r"\1")]}, "is not possible"),
    "a slow expression": (lambda data: data | {"ignored": [r"^(a+)+$"]}, "may take forever"),
    "an expression with flags": (lambda data: data | {"ignored": ["(?i)a"]}, "cannot be read"),
    "an open expression": (lambda data: data | {"ignored": ["("]}, "cannot be read"),
    "a huge head": (lambda data: _in_layer(data, "mixer", head_dim=1 << 30), "head_dim is 1073741824: .* at most 4096"),
    "a huge rotation": (lambda data: _in_layer(data, "rope", dim=1 << 30), "dim is 1073741824: it must be at most"),
    "norms elsewhere": (lambda data: data | {"block": {"is": "BlockSpec", "norms": {"above": "x"}}}, "norms is"),
    "norms in a list": (lambda data: data | {"block": {"is": "BlockSpec", "norms": [1]}}, "norms is"),
    "a dtype": (lambda data: data | {"dtype": "int3"}, "dtype is 'int3'"),
    "a cap of 0": (lambda data: data | {"scales": {"is": "ScaleSpec", "softcap": 0.0}}, "softcap is 0.0"),
    "a list": (lambda data: [data], "cannot be read"),
}


def _in_layer(data: dict[str, Any], part: str, **changes: int) -> dict[str, Any]:
    count, layer = data["layers"][0]
    return data | {"layers": [[count, layer | {part: layer[part] | changes}]]}


def _rename(pattern: str, replacement: str) -> dict[str, str]:
    return {"is": "Rename", "pattern": pattern, "replacement": replacement}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_is_wrong_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    change, message = WRONG[what]
    data = to_data(replace(spec_from_config(read_config(make_checkpoint("llama", tmp_path))), renames=()))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        from_data(change(data))
    assert "\n" not in str(caught.value)
