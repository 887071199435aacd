"""Tiny random models that see, with tokenizer and chat template of the embedded model, for combined features."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

import kvern
from tests.support.combined_features import ADAPTERS
from tests.support.model_features import QUERIES
from tests.support.peft_adapters import make_adapter
from tests.support.vision_models import FAMILIES, make_vision_model

EMBEDDED = Path(kvern.__file__).parent / "embedded" / "kvern-1m"
TEXT_PART = "{%- if part.type == 'text' -%}"
NAMES = {
    "image_token_index": "[IMG]",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|vid|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Fields of configs, and the tokens whose ids they hold."""


def seeing_model(kind: str, folder: Path) -> dict[str, Any]:
    """Options of an engine with a model of a family and with adapters that are called like the embedded one's."""
    family, words = FAMILIES[kind], tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    words.add_special_tokens([token for token in family.special if words.token_to_id(token) is None])

    def config() -> Any:
        made = family.config()
        made.text_config.vocab_size = words.get_vocab_size()
        made.text_config.eos_token_id = made.eos_token_id = words.token_to_id("<|end|>")
        for name, token in NAMES.items():
            if token in family.special:
                setattr(made, name, words.token_to_id(token))
        return made

    model = make_vision_model(kind, folder / "model", replace(family, config=config))
    words.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text((EMBEDDED / "tokenizer_config.json").read_text())
    template = (EMBEDDED / "chat_template.jinja").read_text()
    written = f"{{%- if part.type == 'image' -%}}{family.written}{{%- endif -%}}{TEXT_PART}"
    (model / "chat_template.jinja").write_text(template.replace(TEXT_PART, written))
    adapters = {
        name: str(make_adapter(model, folder / name, seed, target_modules=QUERIES))
        for seed, name in enumerate(ADAPTERS)
    }
    return {"model": str(model), "adapters": adapters}
