"""The defaults of every model type, by transformers' configuration classes.

    python -m tests.support.model_defaults        # writes src/kvern/models/defaults.json

Settings are those that kvern's families name anywhere.
"""

import ast
import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import kvern.models.describe
from kvern.models.registry import FAMILIES

MODELS = Path(kvern.models.describe.__file__).parent
FILE = MODELS / "defaults.json"
TEXT_TYPES = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text"),
    *("clip_text_model", "siglip_text_model", "siglip2_text_model"),
)
"""Model types of inner language models, which are no families."""
OF_THE_FILE = {"architectures", "dtype", "id2label", "bos_token_id", "eos_token_id", "rope_parameters", "text_config"}
"""Settings that have no effect when omitted, or are derived from others."""


@cache
def named() -> frozenset[str]:
    """All texts in the modules that read configurations."""
    modules = [*(MODELS / "families").glob("*.py"), MODELS / "describe.py"]
    trees = [ast.parse(module.read_text()) for module in modules]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(node.value for node in nodes if isinstance(node.value, str)) - OF_THE_FILE


def table() -> dict[str, dict[str, Any]]:
    """The default of each setting by model type; null where there is none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types = [*(name for name in FAMILIES.names if name in CONFIG_MAPPING), *TEXT_TYPES]
    return {name: row for name in types if (row := _row(CONFIG_MAPPING[name]))}


def _row(kind: Any) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(kind) if field.name in named()}
    given = {name: value for name, value in fields.items() if isinstance(value, bool | int | float | str | list)}
    if "text_config" in (field.name for field in dataclasses.fields(kind)):
        return {}
    rope = getattr(kind(), "rope_parameters", None) or {}
    if typed := rope.get("full_attention"):
        local = rope["sliding_attention"]["rope_theta"]
        return {**given, "rope_theta": typed["rope_theta"], "rope_local_base_freq": local}
    if rope.get("rope_type", "default") != "default":
        return {**given, "rope_parameters": rope, "rope_theta": kind.default_theta}
    return {**given, **{name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}}


def main() -> None:
    lines = (f'"{name}": {json.dumps(row, sort_keys=True)}' for name, row in sorted(table().items()))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
