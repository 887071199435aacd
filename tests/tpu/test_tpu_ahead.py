"""Steps for TPUs without one: lowered by JAX, which any machine can, and compiled by libtpu, with bounds of memory."""

import sys
from pathlib import Path

import pytest

from kvern.errors import ConfigError
from kvern.models.loader import outline_model
from kvern.tpu import ahead
from tests.support.tpu import make_random, needs_jax, needs_libtpu

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""Those of Llama 3.2 1B, with two layers."""


@needs_jax
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU v5p"])
def test_steps_are_lowered_for_a_tpu_with_the_kernel_in_each_layer(kind: str, tmp_path: Path) -> None:
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from kvern.tpu.attention import Rows, paged
    from kvern.tpu.function import cache_shape, make_step
    from kvern.tpu.weights import weights_of

    decoder = outline_model(make_random(tmp_path, {}), "bfloat16", "dummy")
    weights = weights_of(decoder)
    layers = decoder.spec.attentions
    caches = [jax.ShapeDtypeStruct(cache_shape(layer, 8, 128), weights["embed"].dtype) for layer in layers]
    step = jax.jit(make_step(decoder.spec, 256, paged), donate_argnums=1)
    mesh = AbstractMesh((1,), ("chip",), abstract_device=AbstractDevice(kind, "tpu", 1 + (kind == "TPU v5p")))
    for rows, width in ((1, 256), (4, 1)):
        whole = jax.ShapeDtypeStruct((rows, width), "int32")
        row = jax.ShapeDtypeStruct((rows,), "int32")
        places = Rows(jax.ShapeDtypeStruct((rows, 2), "int32"), row, row)
        with use_abstract_mesh(mesh):
            lowered = jax.export.export(step, platforms=["tpu"])(weights, caches, whole, places)
        assert lowered.mlir_module().count("@tpu_custom_call") == len(layers)


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chip", ahead.TOPOLOGIES)
def test_steps_compile_for_a_chip_and_take_little_more_than_weights_and_cache(
    chip: ahead.Chip, dtype: str, tmp_path: Path
) -> None:
    request = ahead.Request(str(make_random(tmp_path, SIZES)), chip, dtype, rows=8, max_model_len=4096)
    width = 2 if dtype == "bfloat16" else 4
    cache = 2 * 8 * 4096 * 2 * 8 * 128 * width  # heads of 64 take 128 lanes
    prefill, decode = ahead.compiled(request)
    for step in (prefill, decode):
        assert step.error == ""
        assert step.caches == cache
        assert step.in_place >= cache  # donated: no step copies the cache
        assert step.arguments + 80e6 > step.total
        assert step.total < ahead.MEMORY[chip]
    assert decode.temporary < 8e6


@needs_libtpu
@pytest.mark.nightly
def test_what_does_not_fit_is_said_by_the_compiler(tmp_path: Path) -> None:
    request = ahead.Request(str(make_random(tmp_path, SIZES)), "v5e", "float32", rows=64, max_model_len=131072)
    assert ["hbm" in step.error and step.total == 0 for step in ahead.compiled(request)] == [True, True]


def test_a_compiler_that_ends_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 134\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigError, match="the compiler for v6e ended: broken"):
        ahead.compiled(ahead.Request("nowhere", "v6e", "auto", 1, 128))
