"""A check that the memory of a machine without GPUs holds a model, before any of it is allocated."""

import os

from kvern.cpu.host_memory import processes_here, total_memory
from kvern.errors import ConfigError
from kvern.io.ray_nodes import MOST_PROCESSES
from kvern.layers.build import Build
from kvern.spec.model import ModelSpec


def check_memory(weight_bytes: int, spec: ModelSpec, build: Build, all_stages: int | None) -> None:
    """Raises ConfigError if the host's memory does not hold the weights of all ranks that may be there.

    `weight_bytes` are this rank's; `all_stages`, for pipeline stages, is the total of all stages.
    """
    here = processes_here(build.ranks.processes)
    weights = weight_bytes * here
    if all_stages is not None:
        weights = min(weights, all_stages)  # stages are uneven: what is too much is noticed by the fullest
    rotations = 4 * build.max_model_len * sum(rope.dim for rope in {layer.rope for layer in spec.layers} if rope)
    memory = total_memory()
    if weights + 2 * rotations > memory:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB, the positions {2 * rotations / 1e9:.1f} GB, and this "
            f"machine has {memory / 1e9:.1f} GB: use a smaller model, or lower max_model_len"
            + (", or have fewer ranks on a machine (docs/ray.md)" if MOST_PROCESSES in os.environ else "")
        )
