"""What a `config.json` leaves out is what the installed transformers takes for it, whatever the model type."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvern.errors import KvernError
from kvern.models.defaults import completed
from kvern.models.registry import FAMILIES as REGISTERED
from kvern.models.registry import spec_from_config
from kvern.spec.model import ModelSpec
from tests.support.encoders import ENCODERS
from tests.support.families import FAMILIES, make_config
from tests.support.model_defaults import FILE, table

SAYS_NOTHING = {"model_type", "bos_token_id", "text_config"}
"""Without the type there is no class; a token that begins texts is the tokenizer's; a text has a type of its own."""


def plain(config: Any) -> dict[str, Any]:
    return dict(json.loads(json.dumps(config.to_dict())))


def test_the_table_is_that_of_the_installed_transformers() -> None:
    """Versions differ: `python -m tests.support.model_defaults` writes the table anew and names the changes."""
    assert json.loads(FILE.read_text()) == json.loads(json.dumps(table()))


TILED = {"idefics3", "internvl", "internvl_chat", "llava", "llava_next", "smolvlm"}
"""Models of several language models, which have defaults of their own."""
TWO_TOWERS = {"clip", "siglip", "siglip2"}
"""Models whose encoder of texts has them."""


def test_every_model_type_has_defaults() -> None:
    types = [name for name in REGISTERED.names if name.islower()]
    known = [name for name in types if completed({}, name)]
    whole = {"gemma3", "gemma3n", "gemma4", "kimi_k25", "mistral3", "qwen3_5", "qwen3_5_moe"}
    assert {"kimi_k2", *whole, "glm4v", "glm46v", "glm4v_moe", *TILED, *TWO_TOWERS} == {
        name for name in types if name not in known and "_vl" not in name
    }, "Kimi K2 has those of deepseek_v3, and language models within others their own"
    assert (
        completed({"rms_norm_eps": 1e-3, "rope_parameters": None}, "nowhere", "cwm")["rope_parameters"]["factor"] == 16
    )


def spec(config: dict[str, Any]) -> ModelSpec | None:
    try:
        return spec_from_config(config)
    except KvernError:
        return None


def left_out(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration without each of its settings, those of inner objects too."""
    for name, value in config.items():
        if name in SAYS_NOTHING or (name == "tie_word_embeddings" and "text_config" in config):
            continue
        yield name, {key: config[key] for key in config if key != name}
        if name == "rope_parameters" and isinstance(value, dict):
            yield from ((f"{name}.{inner}", {**config, name: rest}) for inner, rest in left_out(value))
    if isinstance(text := config.get("text_config"), dict):
        yield from ((f"text_config.{inner}", {**config, "text_config": rest}) for inner, rest in left_out(text))


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.nightly] if number % 3 else [])
        for number, family in enumerate([*FAMILIES, *ENCODERS])
    ],
)
def test_settings_that_are_left_out_are_the_types_own(family: str) -> None:
    """Transformers reads what is left, and writes every setting out: kvern takes both for the same model."""
    from transformers import AutoConfig

    encoder = ENCODERS.get(family)
    config = plain(make_config(family) if encoder is None else AutoConfig.for_model(family, **encoder))
    assert (whole := spec(config)) is not None
    compared = 0
    for name, rest in left_out(config):
        try:
            full = AutoConfig.for_model(**json.loads(json.dumps(rest)))
        except Exception:  # it reads no such configuration
            continue
        compared += 1
        expected = spec(plain(full))
        if expected is not None:
            assert spec(rest) == expected, name
    assert compared > 20 and whole.layers
