"""A Llama of 60 thousand random weights with a byte-level tokenizer and a chat template, for tests that need an engine
but no sense."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def make_tiny_model(folder: Path, special: Sequence[str] = ()) -> Path:
    """Write the checkpoint into ``folder``, always the same one, and return the folder. ``special``: further tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[*SPECIAL, *special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(tiny_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (288, 64), "model.norm.weight": (64,)}
    layer = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
    }
    for index in range(2):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {
        name: torch.ones(shape) if re.search("norm", name) else torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }
