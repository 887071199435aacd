"""A setting of config.json that no model can have is told by its name and in kvern's words, for every family."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern.errors import UnsupportedModel
from kvern.models.registry import spec_from_config
from tests.support.configs import LLAMA
from tests.support.families import FAMILIES, make_config

PYTHONS = re.compile(
    r"NoneType|subscriptable|has no attribute|unsupported operand|not supported between|iterable|Error|zip\(|unpack"
    r"|invalid literal|could not convert|division|modulo|positional|keyword|must be real|int\(\)|float\(\)|indices"
    r"|not callable|unhashable|has no len|math domain|expected|out of range|can only|must be str"
)
"""What Python says of values that it cannot take."""
OURS = re.compile(
    r"(activation|layer type|rope scaling) .* is unknown; known: |config.json lacks|layers attends|has keys of its own"
    r"|entries of a head|from \d of \d groups|experts is 0"
)
"""What kvern says of several settings that do not go together, or by another name than a setting's."""
DAMAGED: tuple[Any, ...] = (None, "x", 0, -1, [7], {})
BY_DAY = ("llama3", "gemma4_experts", "deepseek_v32", "gpt_oss")


def damaged(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration with each of its settings left out, and replaced; those of the language model within too."""
    for name, value in config.items():
        if name in ("architectures", "model_type"):
            continue
        yield name, {key: kept for key, kept in config.items() if key != name}
        yield from ((name, config | {name: spoilt}) for spoilt in DAMAGED)
        if name in ("text_config", "rope_parameters") and isinstance(value, dict):
            yield from ((inner, config | {name: spoilt}) for inner, spoilt in damaged(value))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in FAMILIES]
)
def test_a_bad_setting_is_named(family: str, tmp_path: Path) -> None:
    """Or left as it is, where it makes no difference."""
    make_config(family).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec_from_config(config)
    unnamed = []
    for name, spoilt in damaged(config):
        try:
            spec_from_config(spoilt)
        except UnsupportedModel as error:
            text = str(error)
            if PYTHONS.search(text) or (name not in text and not OURS.search(text)):
                unnamed.append((name, text))
    assert not unnamed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": "small"}, "as this architecture: rms_norm_eps is 'small'$"),
        ({"hidden_size": None}, "hidden_size is None: it must be a whole number above 0"),
        ({"intermediate_size": 0}, "intermediate_size is 0: width is 0: it must be above 0$"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, r"rope_parameters.factor is '2'"),
        ({"attention_bias": "false"}, "attention_bias is 'false': it must be true or false, not a text$"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: 4 attention heads cannot share 3"),
        ({"hidden_size": None, "rms_norm_eps": "small"}, "cannot be read as this architecture: "),
    ],
)
def test_the_message_says_what_the_setting_is(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        spec_from_config(LLAMA | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["layer_types", "no_rope_layers"])
def test_what_is_said_of_each_layer_is_said_of_all(name: str) -> None:
    config = LLAMA | {"architectures": None, "model_type": "smollm3"}
    with pytest.raises(UnsupportedModel, match=f"{name} has 2 entries, and num_hidden_layers is 6"):
        spec_from_config(config | {name: [1, 1]})
    with pytest.raises(UnsupportedModel, match=f"{name} is 'full_attention': it must be a list"):
        spec_from_config(config | {name: "full_attention"})
