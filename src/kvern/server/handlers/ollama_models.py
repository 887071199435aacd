"""Descriptions of the served models for ollama's clients."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern.api.ollama import LATEST, timestamp
from kvern.models.header import read_entries
from kvern.models.pooling import POOLING_FILE
from kvern.server.engines import ServedEngine
from kvern.text.tokenizer import read_json
from kvern.tools.formats import formats_of

FOR_EVER = "9999-12-31T23:59:59Z"
"""The time at which a model is unloaded that always stays loaded."""
SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint on disk. `digest` covers its configuration, and the names and sizes of its files."""

    config: dict[str, Any]
    size: int
    parameters: int
    modified: float
    digest: str

    @property
    def details(self) -> dict[str, Any]:
        """The checkpoint's format, family and size in ollama's words."""
        family = str(self.config.get("model_type", ""))
        quantized = self.config.get("quantization_config") or {}
        plain = str(self.config.get("torch_dtype") or self.config.get("dtype") or "")
        return {
            "parent_model": "",
            "format": "gguf" if quantized.get("quant_method") == "gguf" else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": ""
            if quantized
            else shortened(self.parameters),  # the shapes of packed weights do not give the number of parameters
            "quantization_level": str(quantized.get("quant_method", "")).upper() or SHORT.get(plain, plain.upper()),
        }


SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def read_files(folder: Path) -> ModelFiles:
    """Reads the sizes and the configuration of a checkpoint."""
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    statuses = [file.stat() for file in weights]
    parameters = 0
    for file in (file for file in weights if file.suffix == ".safetensors"):
        with file.open("rb") as stream:
            parameters += sum(math.prod(entry.shape) for entry in read_entries(stream)[1].values())
    listing = [f"{file.name} {status.st_size}" for file, status in zip(weights, statuses, strict=True)]
    content = (folder / "config.json").read_bytes() + "\n".join(listing).encode()
    return ModelFiles(
        read_json(folder / "config.json"),
        sum(status.st_size for status in statuses),
        parameters,
        max((status.st_mtime for status in statuses), default=0.0),
        hashlib.sha256(content).hexdigest(),
    )


def entry(name: str, engine: ServedEngine, files: ModelFiles) -> dict[str, Any]:
    """Returns a model's entry in the list of models; a name without a tag gets ollama's."""
    full = name if ":" in name else name + LATEST
    details = files.details if name in engine.models else {**files.details, "parent_model": engine.models[0]}
    modified = timestamp(files.modified)
    return {
        "name": full,
        "model": full,
        "modified_at": modified,
        "size": files.size,
        "digest": files.digest,
        "details": details,
    }


def running(name: str, engine: ServedEngine, files: ModelFiles) -> dict[str, Any]:
    """Returns a model's entry in the list of loaded models."""
    on_gpu = files.size if engine.client.ready.gpu is not None else 0
    told = entry(name, engine, files)
    del told["modified_at"]
    return {
        **told,
        "expires_at": FOR_EVER,
        "size_vram": on_gpu,
        "context_length": engine.client.inputs.max_model_len,
    }


def card(name: str, engine: ServedEngine, files: ModelFiles) -> dict[str, Any]:
    """Returns the details of a model."""
    client, told = engine.client, entry(name, engine, files)
    config, family = files.config, files.details["family"]
    about = {
        "context_length": client.inputs.max_model_len,
        "embedding_length": config.get("hidden_size"),
        "block_count": config.get("num_hidden_layers"),
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "vocab_size": client.inputs.vocab_size,
    }
    known = {f"{family}.{key}": value for key, value in about.items() if isinstance(value, int)}
    return {
        "modelfile": f"FROM {name}",
        "parameters": "",
        "template": client.tokenizer.chat_template.source(tools=False),
        "details": told["details"],
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": files.parameters,
            **known,
        },
        "capabilities": capabilities(engine),
        "modified_at": told["modified_at"],
    }


def capabilities(engine: ServedEngine) -> list[str]:
    """Returns the model's capabilities in ollama's words."""
    client, model = engine.client, engine.client.inputs.model
    template = client.tokenizer.chat_template.source(tools=True)
    tools, thinking = formats_of(template, client.config.tool_parser, client.config.reasoning_parser)
    can = {
        "completion": not model.is_encoder,
        "embedding": (client.folder / POOLING_FILE).is_file() if not model.is_encoder else not model.is_classifier,
        "tools": tools is not None and "tools" in template,
        "thinking": thinking is not None,
    }
    return [name for name, is_so in can.items() if is_so]


def shortened(count: int) -> str:
    """Returns a number of parameters in the usual short form, such as 7.6B."""
    unit, letter = next(((unit, letter) for unit, letter in SIZES if count >= unit), (1.0, ""))
    return f"{count / unit:.1f}{letter}"
