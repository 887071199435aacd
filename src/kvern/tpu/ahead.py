"""Steps compiled for a TPU that is not there: `python -m kvern.tpu.ahead`, a process for one chip.

libtpu has the compiler. It takes the settings of its machine from the environment when it is loaded, and may end the
process: so it runs in a child, which reads a `Request` from stdin and writes a line for each `Step`.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvern.errors import ConfigError
from kvern.io.children import end_with_parent
from kvern.tpu import BLOCK_SIZE, CHUNK

Chip = Literal["v5e", "v6e", "v5p"]
TOPOLOGIES: dict[Chip, str] = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
"""The smallest arrangement that the compiler knows of each chip; one of them is compiled for."""
MEMORY: dict[Chip, float] = {"v5e": 16e9, "v6e": 32e9, "v5p": 95e9}
"""Bytes of a chip's memory, as its maker says."""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs: the chip may be in use
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the cloud which machine this is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class Request(msgspec.Struct):
    """A model's folder and dtype, and the sizes of its steps: there are blocks for `rows` sequences of full length."""

    folder: str
    chip: Chip
    dtype: str
    rows: int
    max_model_len: int
    block_size: int = BLOCK_SIZE
    chunk: int = CHUNK


class Step(msgspec.Struct):
    """Bytes of a compiled step on the chip, or the `error` of the compiler.

    `arguments` hold the weights and the `caches`, of which `in_place` bytes are overwritten by the results.
    """

    name: str
    caches: int = 0
    arguments: int = 0
    in_place: int = 0
    results: int = 0
    temporary: int = 0
    code: int = 0
    error: str = ""

    @property
    def total(self) -> int:
        """All that is on the chip while the step runs."""
        return self.arguments + self.results - self.in_place + self.temporary + self.code


def compiled(request: Request) -> list[Step]:
    """The steps of a model as compiled for a chip: a chunk of a prompt, and a decode. Raises ConfigError."""
    command = [sys.executable, "-m", "kvern.tpu.ahead"]
    done = subprocess.run(  # noqa: S603 (no shell, our own words)
        command, input=msgspec.json.encode(request), env={**os.environ, **ENVIRONMENT}, capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"the compiler for {request.chip} ended: {said[-1][:500]}")
    return msgspec.json.decode(done.stdout, type=list[Step])


def _steps(request: Request) -> Iterator[Step]:
    """Compiles, in the child."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    from kvern.models.embedder import spec_of_folder
    from kvern.models.loader import outline_model, read_config
    from kvern.tpu.attention import Rows, paged
    from kvern.tpu.function import cache_shape, make_step
    from kvern.tpu.weights import weights_of

    device = topologies.get_topology_desc(TOPOLOGIES[request.chip], platform="tpu").devices[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("chip",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    decoder = outline_model(Path(request.folder), request.dtype, "dummy")
    spec = spec_of_folder(
        Path(request.folder), read_config(Path(request.folder))
    )  # an outline has no rotary embeddings
    weights = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), weights_of(decoder))
    table = -(-request.max_model_len // request.block_size)
    shapes = [cache_shape(layer, request.rows * table, request.block_size) for layer in spec.attentions]
    caches = [array(shape, weights["embed"].dtype) for shape in shapes]
    held = sum(cache.size * cache.dtype.itemsize for cache in caches)
    step = jax.jit(make_step(spec, request.max_model_len, paged), donate_argnums=1)
    for name, rows, width in (("prefill", 1, min(request.chunk, request.max_model_len)), ("decode", request.rows, 1)):
        places = Rows(array((rows, table)), array((rows,)), array((rows,)))
        with jax.set_mesh(mesh):
            try:
                lowered = step.lower(weights, caches, array((rows, width)), places)
                memory = lowered.compile().memory_analysis()
            except Exception as error:  # Pallas and XLA have their own
                yield Step(name, held, error=" ".join(str(error).split())[:300])
                continue
        yield Step(
            name,
            held,
            memory.argument_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.output_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
        )


if __name__ == "__main__":
    end_with_parent()
    sys.stdout.buffer.write(
        msgspec.json.encode(list(_steps(msgspec.json.decode(sys.stdin.buffer.read(), type=Request))))
    )
