"""Tiny random encoders with tokenizers of their own, and what transformers makes of texts by them."""

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvern.layers.build import Build
from kvern.models.encoder import Encoder
from kvern.models.registry import spec_from_config

LENGTH = 80
_COMMON = {
    "vocab_size": 320,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 72,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "roberta": {"max_position_embeddings": LENGTH + 2, "type_vocab_size": 2},
    "xlm-roberta": {"max_position_embeddings": LENGTH + 2, "type_vocab_size": 1},
    "modernbert": {
        "local_attention": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
}
BEGIN, END = "[CLS]", "[SEP]"
_PAIRS = {"bert": f"{BEGIN} $A {END} $B:1 {END}:1", "modernbert": f"{BEGIN} $A {END} $B {END}"}
Pairs = list[tuple[str, str]]


def make_encoder(kind: str, folder: Path, *, labels: int = 0, **fields: Any) -> Path:
    """Save an encoder into `folder`, a classifier of so many `labels` if there are any."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    named = {"num_labels": labels} if labels else {}
    config = AutoConfig.for_model(kind, **_COMMON | ENCODERS[kind] | named | fields)
    torch.manual_seed(0)
    model = (AutoModelForSequenceClassification if labels else AutoModel).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    _save_tokenizer(kind, folder)
    return folder


def make_random(kind: str, folder: Path, *, labels: int = 0, **fields: Any) -> Path:
    """Makes an encoder without transformers; see `make_encoder`."""
    architecture = "ModelForSequenceClassification" if labels else "Model"
    named = {"model_type": kind, "architectures": [architecture], "id2label": {"0": "A"}, "torch_dtype": "float32"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | ENCODERS[kind] | named | fields))
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    outline = Encoder(spec, Build(torch.float32, torch.device("cpu"), 1))
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, target in outline.tensor_targets().items():
        deviation = 0.3 if len(target.shape) == 1 else target.shape[1] ** -0.5
        gain = "norm" in name and name.endswith("weight")
        weights[name] = torch.randn(target.shape, generator=generator) * deviation + gain
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(kind, folder)
    return folder


def _save_tokenizer(kind: str, folder: Path) -> None:
    special = ["[PAD]", BEGIN, END] if kind in _PAIRS else [BEGIN, "[PAD]", END]
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator(["mice and berries are what red foxes eat"] * 4, trainer)
    pair = _PAIRS.get(kind, f"{BEGIN} $A {END} {END} $B:1 {END}:1")
    result.post_processor = processors.TemplateProcessing(
        f"{BEGIN} $A {END}", pair, [(token, special.index(token)) for token in (BEGIN, END)]
    )
    result.enable_truncation(6)  # as published ones have it, which says nothing of what the model can read
    result.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": BEGIN, "sep_token": END}))


def set_pooling(folder: Path, **pooling: Any) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@functools.lru_cache(maxsize=4)
def _reference(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    classifies = "Classification" in AutoConfig.from_pretrained(folder).architectures[0]
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def expected_vector(folder: Path, token_ids: list[int], pooling: str = "mean") -> list[float]:
    """The normalized vector of one text alone."""
    with torch.inference_mode():
        states = _reference(folder)(torch.tensor([token_ids])).last_hidden_state[0]
    state = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[pooling]
    vector: list[float] = torch.nn.functional.normalize(state, dim=0).tolist()
    return vector


def expected_labels(folder: Path, pairs: Pairs) -> list[float]:
    """The scores of each pair alone by the head."""
    return [number for pair in pairs for number in expected_logits(folder, *pair)]


def expected_logits(folder: Path, *texts: str) -> list[float]:
    """The head's numbers for a text, or for two that are read together."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()
    model, encoding = _reference(folder), backend.encode(*texts)
    kinds = {"token_type_ids": torch.tensor([encoding.type_ids])} if model.config.model_type == "bert" else {}
    with torch.inference_mode():
        logits: list[float] = model(torch.tensor([encoding.ids]), **kinds).logits[0].tolist()
    return logits
