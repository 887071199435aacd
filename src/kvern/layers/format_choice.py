"""The choice of the formats of a model's weights, by its configuration."""

import re
from collections.abc import Mapping
from typing import Any

from kvern.errors import ConfigError, KvernError, UnsupportedModel
from kvern.io.files import reason
from kvern.layers.linear_format import LINEAR_METHODS, LinearFormat, LinearMethods


def linear_methods(
    config: Mapping[str, Any], unquantized: LinearFormat, quantization: str | None = None
) -> LinearMethods:
    """The formats of the weights of a `config.json`'s model; `unquantized` is the format of plain weights.

    `quantization`: what plain weights are made while they are loaded, "fp8", "int8" or "int4"; None: nothing. Raises
    UnsupportedModel if the `quantization_config` is of no registered kind, or cannot be read as one; ConfigError if it
    is another than `quantization`.
    """
    stored = config.get("quantization_config")
    if not stored:
        return LinearMethods(unquantized) if quantization is None else _made_online(quantization, unquantized)
    name = stored.get("quant_method") if isinstance(stored, dict) else stored
    if quantization not in (None, name):
        raise ConfigError(
            f"quantization is {quantization}, but the model's weights are stored quantized by {str(name)[:60]!r}: "
            "leave quantization out"
        )
    make = LINEAR_METHODS.get(name) if isinstance(name, str) else None
    if make is None:
        raise UnsupportedModel(
            f"the model is quantized by {str(name)[:60]!r}; kvern loads float32, float16 and bfloat16 weights, and "
            f"what is registered: {', '.join(LINEAR_METHODS.names) or 'nothing yet'}"
        )
    try:
        return make(stored, unquantized)
    except KvernError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError, re.error) as error:
        raise UnsupportedModel(f"quantization_config cannot be read as {name!r:.60}: {reason(error)}") from error


def _made_online(code: str, unquantized: LinearFormat) -> LinearMethods:
    from kvern.formats.online import made_online

    return made_online(code, unquantized)
