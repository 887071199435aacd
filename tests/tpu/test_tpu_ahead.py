"""Steps for TPUs without one: lowered by JAX, which any machine can, and compiled by libtpu, with bounds of memory."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvern.errors import ConfigError
from kvern.models.embedder import spec_of_folder
from kvern.models.loader import outline_model, read_config
from kvern.tpu import ahead
from tests.support.tpu import needs_jax, write_config

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 131072,
}
"""Heads as in Llama 3.2 1B."""


@needs_jax
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU v5p"])
def test_steps_are_lowered_for_a_tpu_with_the_kernel_in_each_layer(kind: str, tmp_path: Path) -> None:
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from kvern.tpu.attention import Rows, paged
    from kvern.tpu.function import cache_shape, make_step
    from kvern.tpu.weights import weights_of

    folder = write_config(tmp_path, {})
    weights = weights_of(outline_model(folder, "bfloat16", "dummy"))
    spec = spec_of_folder(folder, read_config(folder))
    layers = spec.attentions
    caches = [jax.ShapeDtypeStruct(cache_shape(layer, 8, 128), weights["embed"].dtype) for layer in layers]
    step = jax.jit(make_step(spec, 256, paged), donate_argnums=1)
    mesh = AbstractMesh((1,), ("chip",), abstract_device=AbstractDevice(kind, "tpu", 1 + (kind == "TPU v5p")))
    for rows, width in ((1, 256), (4, 1)):
        whole = jax.ShapeDtypeStruct((rows, width), "int32")
        row = jax.ShapeDtypeStruct((rows,), "int32")
        places = Rows(jax.ShapeDtypeStruct((rows, 2), "int32"), row, row)
        with use_abstract_mesh(mesh):
            lowered = jax.export.export(step, platforms=["tpu"])(weights, caches, whole, places)
        assert lowered.mlir_module().count("@tpu_custom_call") == len(layers)
        assert "cosine" in lowered.mlir_module(), "positions are not rotated"


@pytest.fixture(scope="module")
def _libtpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiler that this JAX asks for: it is large, and installed for these tests where it is not there."""
    if importlib.util.find_spec("libtpu") is not None:
        yield
        return
    needed = next(text.partition(";")[0] for text in requires("jax") or () if text.startswith("libtpu"))
    folder = tmp_path_factory.mktemp("libtpu")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), needed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{needed} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        yield
    shutil.rmtree(folder)  # 700 MB


@needs_jax
@pytest.mark.nightly
@pytest.mark.usefixtures("_libtpu")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("chip", "dtype"), [*((chip, "bfloat16") for chip in ahead.TOPOLOGIES), ("v5e", "float32")])
def test_steps_compile_for_a_chip_and_take_little_more_than_weights_and_cache(
    chip: ahead.Chip, dtype: str, tmp_path: Path
) -> None:
    request = ahead.Request(str(write_config(tmp_path, SIZES)), chip, dtype, rows=8, max_model_len=4096)
    width = 2 if dtype == "bfloat16" else 4
    cache = 2 * 8 * 4096 * 2 * 8 * 128 * width  # heads of 64 take 128 lanes
    prefill, decode = ahead.compiled(request)
    for step in (prefill, decode):
        assert step.error == ""
        assert step.caches == cache
        assert step.in_place >= cache  # donated: no step copies the cache
        assert step.total < step.arguments + 32e6
    assert decode.temporary < 8e6


@needs_jax
@pytest.mark.nightly
@pytest.mark.usefixtures("_libtpu")
def test_what_does_not_fit_is_said_by_the_compiler(tmp_path: Path) -> None:
    request = ahead.Request(str(write_config(tmp_path, SIZES)), "v5e", "bfloat16", rows=64, max_model_len=131072)
    assert ["exceeds available HBM" in step.error for step in ahead.compiled(request)] == [True, True]


@needs_jax
def test_errors_of_lowering_are_told_in_one_line_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    from jax.experimental import topologies

    def fail(*_: object) -> None:
        raise ValueError("no such\n  block" + " shape" * 100)

    chip = SimpleNamespace(devices=jax.devices("cpu"))
    monkeypatch.setattr(topologies, "get_topology_desc", lambda name, platform: chip)
    monkeypatch.setattr("kvern.tpu.attention.paged", fail)
    request = ahead.Request(str(write_config(tmp_path, {})), "v5e", "bfloat16", rows=2, max_model_len=256)
    steps = list(ahead._steps(request))
    assert [step.name for step in steps] == ["prefill", "decode"]
    assert {step.error for step in steps} == {("no such block" + " shape" * 100)[:300]}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_compiler_ends_with_the_command_that_waits_for_it(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    (tmp_path / "jax.py").write_text(
        f"import signal\nalive = open({str(fifo)!r}, 'w')\nprint('here', file=alive, flush=True)\nsignal.pause()\n"
    )
    ask = "from kvern.tpu import ahead; ahead.compiled(ahead.Request('nowhere', 'v5e', 'auto', 1, 128))"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    parent = subprocess.Popen([sys.executable, "-c", ask], env={**os.environ, "PYTHONPATH": paths})
    with fifo.open() as alive:
        assert alive.readline() == "here\n"
        parent.terminate()
        assert parent.wait() == -signal.SIGTERM
        assert alive.read() == "", "it has ended"


def test_a_compiler_that_ends_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 134\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ConfigError, match="the compiler for v6e ended: broken"):
        ahead.compiled(ahead.Request("nowhere", "v6e", "auto", 1, 128))
