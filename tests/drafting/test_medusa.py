"""Medusa heads compute and draft what their definition says, whoever wrote their files, and change no token."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.drafting.models.medusa_heads import load_medusa
from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model
from tests.support.draft_heads import medusa_logits, write_medusa
from tests.support.families import make_checkpoint
from tests.support.head_drafting import MEDUSA_FILE, OPTIONS, PROMPTS, drafting, medusa_drafts, states_of
from tests.support.outputs import tokens_and_texts
from tests.support.tiny_model import make_tiny_model


def scores(folder: Path, decoder: Decoder, states: torch.Tensor) -> torch.Tensor:
    """Of all heads of a folder, [T, heads, vocabulary]."""
    heads = load_medusa(folder, decoder)
    return torch.stack([heads.logits(states, head) for head in range(heads.count)], 1).double()


@pytest.mark.sample(2)
@pytest.mark.parametrize("names", ["authors", "vllm", "tensorrt"])
@pytest.mark.parametrize("drafted", [None, 40])
@torch.inference_mode()
def test_formats(names: str, drafted: int | None, tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    weights = write_medusa(tmp_path / "heads", target, names=names, layers=2, drafted=drafted)
    decoder = load_model(target)
    states = states_of(decoder)
    expected = medusa_logits(weights, states, decoder.spec.vocab_size)
    assert expected.shape[1] == 3
    torch.testing.assert_close(scores(tmp_path / "heads", decoder, states), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_files_of_torch_save(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target")
    write_medusa(tmp_path / "heads", target)
    decoder = load_model(target)
    states, file = states_of(decoder), tmp_path / "heads" / MEDUSA_FILE
    expected = scores(tmp_path / "heads", decoder, states)
    saved = file.with_suffix(".pt")
    weights = {name: tensor.bfloat16() if "bias" in name else tensor for name, tensor in load_file(file).items()}
    torch.save(weights, saved)
    file.unlink()
    torch.testing.assert_close(scores(tmp_path / "heads", decoder, states), expected, rtol=0.02, atol=0.02)
    torch.save(weights, saved, _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptCheckpoint, match=r"from before PyTorch 1\.6"):
        load_medusa(tmp_path / "heads", decoder)
    torch.save({"0.0.linear.weight": 3}, saved)
    with pytest.raises(CorruptCheckpoint, match=r"0\.0\.linear\.weight.*is no tensor"):
        load_medusa(tmp_path / "heads", decoder)
    torch.save([1], saved)
    with pytest.raises(CorruptCheckpoint, match="holds a list"):
        load_medusa(tmp_path / "heads", decoder)
    saved.write_bytes(b"PK" * 100)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        load_medusa(tmp_path / "heads", decoder)


@torch.inference_mode()
def test_the_models_output_layer(tmp_path: Path) -> None:
    """Heads without one of their own ask it, as those that say so do, whatever copy of it they bring."""
    target = make_checkpoint("llama", tmp_path / "target")
    weights = write_medusa(tmp_path / "heads", target, names="vllm")
    decoder = load_model(target)
    states, folder = states_of(decoder), tmp_path / "heads"
    weights |= {f"{head}.1.weight": decoder.lm_head.method.weight for head in range(3)}
    expected = medusa_logits(weights, states, decoder.spec.vocab_size)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"original_lm_head": True}))
    torch.testing.assert_close(scores(folder, decoder, states), expected, rtol=1e-4, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor for name, tensor in load_file(folder / MEDUSA_FILE).items() if "blocks" in name},
        folder / MEDUSA_FILE,
    )
    torch.testing.assert_close(scores(folder, decoder, states), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    target, folder = make_checkpoint("llama", tmp_path / "target"), tmp_path / "heads"
    decoder = load_model(target)
    others = make_tiny_model(tmp_path / "others")
    write_medusa(folder, others)
    with pytest.raises(UnsupportedModel, match="read states of 64 numbers, and the model's have 48"):
        load_medusa(folder, decoder)
    write_medusa(folder, target)
    stored = load_file(folder / MEDUSA_FILE)
    save_file(stored | {f"{head}.1.weight": torch.zeros(77, 48) for head in range(3)}, folder / MEDUSA_FILE)
    with pytest.raises(UnsupportedModel, match="for a vocabulary of 77 tokens, and the model has 131"):
        load_medusa(folder, decoder)
    save_file({name: tensor for name, tensor in stored.items() if name != "1.0.linear.bias"}, folder / MEDUSA_FILE)
    with pytest.raises(CorruptCheckpoint, match=r"1 missing: heads\.1\.0\.linear\.bias"):
        load_medusa(folder, decoder)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 1}))
    save_file(stored, folder / MEDUSA_FILE)
    with pytest.raises(CorruptCheckpoint, match=r"3 missing: heads\.3\.0\.linear\.weight"):
        load_medusa(folder, decoder)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 0}))
    with pytest.raises(UnsupportedModel, match="medusa_num_heads is 0: it must be from 1 to 64"):
        load_medusa(folder, decoder)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    save_file(stored | {"99999999.0.linear.weight": torch.zeros(48, 48)}, folder / MEDUSA_FILE)
    with pytest.raises(UnsupportedModel, match="files' number of heads is 100000000"):
        load_medusa(folder, decoder)
    save_file({"0.0.linear.weight": torch.tensor(1.0), "0.1.weight": torch.tensor(1.0)}, folder / MEDUSA_FILE)
    with pytest.raises(CorruptCheckpoint, match=r"0\.0\.linear\.weight has \[\]"):
        load_medusa(folder, decoder)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 2}))
    heads = load_medusa(folder, decoder, load_format="dummy")
    assert heads.count == 4 and heads.logits(torch.zeros(2, 48), 3).shape == (2, 131)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cpu_kernels", [False, True])
@torch.inference_mode()
def test_drafts_are_what_the_definition_says(cpu_kernels: bool, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    weights, decoder = write_medusa(tmp_path / "heads", target, drafted=150), load_model(target)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = OPTIONS | {"cpu_kernels": cpu_kernels}
    with LLM(str(target), **options) as llm:
        expected = llm.generate(PROMPTS, params)
    with LLM(str(target), draft_model=str(tmp_path / "heads"), **options) as llm, drafting(llm, 3) as found:
        assert tokens_and_texts(llm.generate(PROMPTS, params)) == tokens_and_texts(expected)
    assert len(found) > 20
    right = [drafts == medusa_drafts(decoder, weights, text, len(drafts)) for text, drafts in found]
    assert all(right), f"{right.count(False)} of {len(right)} are others"


def test_no_more_drafts_than_heads(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    write_medusa(tmp_path / "heads", target)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(str(target), draft_model=str(tmp_path / "heads"), **OPTIONS) as llm:
        llm.generate(PROMPTS[:1], params)
        assert len(llm.statistics().drafts_by_position) == 3
