"""The header of a GGUF file with an architecture's short names. No torch is imported."""

import math
import struct
from dataclasses import dataclass
from typing import Any

from kvern.errors import CorruptCheckpoint
from kvern.formats.gguf.header import Header, TensorInfo

MOST_FACTORS = 4096


@dataclass(frozen=True)
class GgufModel:
    """The header of a model's first file, the tensors of all, and its architecture's values by short name."""

    header: Header
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.header.get("general.architecture", str, ""))

    def value(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        return self.header.get(f"{self.architecture}.{name}", kind, default)

    def needed(self, name: str, kind: type) -> Any:
        value = self.value(name, kind)
        if value is None:
            raise CorruptCheckpoint(f"{self.header.file}: {self.architecture}.{name} is missing; download it again")
        return value

    @property
    def layers(self) -> int:
        """The number of layers, without the last ones that only draft."""
        return int(self.needed("block_count", int) - self.value("nextn_predict_layers", int, 0))

    def tensor(self, name: str) -> TensorInfo | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def has(self, name: str) -> bool:
        """True if the model or one of its layers has a tensor of this name."""
        return any(tensor.name == name or tensor.name.endswith(f".{name}") for tensor in self.tensors)

    def rows(self, name: str, dim: int = -2) -> int:
        """The length of a dimension of the first layer's tensor of this name."""
        found = next((tensor for tensor in self.tensors if tensor.name.endswith(f".{name}")), None)
        if found is None or len(found.shape) < -dim:
            raise CorruptCheckpoint(f"{self.header.file}: there is no tensor {name} of two dimensions")
        return found.shape[dim]

    def floats(self, name: str) -> list[float] | None:
        """A short tensor of 32-bit numbers."""
        tensor = self.tensor(name)
        if tensor is None:
            return None
        if tensor.type.name != "f32" or math.prod(tensor.shape) > MOST_FACTORS:
            raise CorruptCheckpoint(f"{tensor.file}: the tensor {name} should hold a few 32-bit numbers")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return [value for (value,) in struct.iter_unpack("<f", stream.read(tensor.nbytes))]
