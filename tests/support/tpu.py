"""Random checkpoints, and paged attention on random keys by NumPy in float64. JAX is imported when it is needed."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvern.models.loader import outline_model
from kvern.spec.mixers import AttentionSpec
from tests.support.configs import LLAMA

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
LANES = 128


def write_config(folder: Path, changes: dict[str, Any]) -> Path:
    """The config.json of a Llama of two layers in float32, with changes; the folder is returned."""
    config = LLAMA | {"num_hidden_layers": 2, "torch_dtype": "float32", "tie_word_embeddings": False} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_random(folder: Path, changes: dict[str, Any]) -> Path:
    """A checkpoint of random weights for `write_config`."""
    write_config(folder, changes)
    targets = outline_model(folder, load_format="dummy").tensor_targets()
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(target.shape, generator=generator) * 0.3 for name, target in targets.items()}
    tensors = {name: 1 + tensor if "norm" in name else tensor for name, tensor in drawn.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Case:
    """Rows of queries `[R, Q, heads, head_dim]` after `starts` stored tokens, `counts` of them real; float64."""

    spec: AttentionSpec
    query: np.ndarray[Any, Any]
    cache: np.ndarray[Any, Any]
    tables: np.ndarray[Any, Any]
    starts: Sequence[int]
    counts: Sequence[int]

    @classmethod
    def drawn(cls, spec: AttentionSpec, block_size: int, starts: Sequence[int], counts: Sequence[int]) -> "Case":
        """Blocks in any order; what no token has written is no number."""
        rng = np.random.default_rng(0)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        width = -(-max(lengths) // block_size)
        blocks = len(lengths) * width + 2
        tables = rng.permutation(blocks)[: len(lengths) * width].reshape(len(lengths), width)
        cache = np.full((blocks, 2, spec.kv_heads, block_size, LANES), np.nan)
        for table, length in zip(tables, lengths, strict=True):
            for token in range(length):
                place = cache[table[token // block_size], :, :, token % block_size]
                place[:] = 0
                place[..., : spec.head_dim] = rng.standard_normal((2, spec.kv_heads, spec.head_dim))
        query = rng.standard_normal((len(lengths), max(counts), spec.heads, spec.head_dim))
        return cls(spec, query, cache, tables, starts, counts)

    def expected(self) -> list[np.ndarray[Any, Any]]:
        """The attention of each row's real queries, `[count, heads, head_dim]`."""
        return [self._row(row) for row in range(len(self.tables))]

    def _row(self, row: int) -> np.ndarray[Any, Any]:
        spec, start, count = self.spec, self.starts[row], self.counts[row]
        stored = np.moveaxis(self.cache[self.tables[row]], 3, 1).reshape(-1, 2, spec.kv_heads, LANES)
        group = spec.heads // spec.kv_heads
        key, value = stored[: start + count, ..., : spec.head_dim].repeat(group, axis=2).swapaxes(0, 1)
        scores = np.einsum("qhd,khd->hqk", self.query[row, :count], key) * spec.scale
        behind = start + np.arange(count)[:, None] - np.arange(start + count)
        hidden = (behind < 0) | (behind >= (spec.window or start + count + 1))
        weights = np.exp(np.where(hidden, -np.inf, scores))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)

    def differences(self, attend: Any, dtype: str = "float32") -> list[float]:
        """The largest difference of each row from what is expected, of `attend(spec, query, cache, rows)`."""
        import jax
        import jax.numpy as jnp

        from kvern.tpu.attention import Rows

        rows = Rows(*(jnp.asarray(part, jnp.int32) for part in (self.tables, self.starts, self.counts)))
        given = jnp.asarray(self.query, dtype), jnp.asarray(self.cache, dtype), rows
        found = np.asarray(jax.jit(partial(attend, self.spec))(*given))
        return [
            float(np.abs(own[: len(expected)] - expected).max(initial=0))
            for own, expected in zip(found.astype(np.float64), self.expected(), strict=True)
        ]
