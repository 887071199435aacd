"""The usual times of steps, kept under the cache folder: a file for each model, options and hardware.

In the file are the times with the last few versions of driver and libraries: steps are judged by those with the
present ones, and it is said how these compare with the ones before.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from kvern.config import EngineConfig
from kvern.engine.step_drift import Bucket
from kvern.io.files import reason
from kvern.runner.plan import Layout
from kvern.version import __version__

logger = logging.getLogger("kvern")
FOLDER = "step-times"
VERSIONS = 4
"""The number of versions that are kept, the last ones."""
MOST_BYTES = 4 << 20
SAME_SPEED = frozenset({
    "model", "revision", "download_dir", "tokenizer", "chat_template", "chat_template_kwargs", "generation_config",
    "override_generation_config", "policy", "aging_steps", "tool_parser", "reasoning_parser", "seed", "cache_dir",
    "served_model_name", "engine_timeout", "kv_cache_tokens", "gpu_memory_share", "enable_sleep", "elastic_kv_cache",
    "prefix_cache", "kv_tier", "kv_tier_listen", "kv_tier_max_age", "kv_tier_heads", "kv_events_config", "adapters",
    "target_itl", "draft_url", "max_batch_requests", "role", "prefill_server",
})  # fmt: skip
"""Options that do not change what a step of one size takes."""


class Kept(msgspec.Struct):
    """The seconds of steps by the names of their buckets, with these versions."""

    versions: dict[str, str]
    seconds: dict[str, float]


class StoredTimes(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a file: whose times they are, and those of some versions, the last one first."""

    engine: dict[str, str]
    kept: list[Kept]


class StepTimes:
    """A `Baseline` in a file. One that cannot be read is begun anew; one that cannot be written is a warning."""

    def __init__(self, folder: Path, engine: Mapping[str, str], versions: Mapping[str, str]) -> None:
        self._engine, self._versions = dict(engine), dict(versions)
        digest = hashlib.sha256(json.dumps(self._engine, sort_keys=True).encode()).hexdigest()
        self.path = folder / FOLDER / f"{digest[:32]}.json"
        self.seconds: dict[Bucket, float] = {}
        self.earlier: Mapping[Bucket, float] = {}
        self.earlier_name = ""
        self._writes, self._warns = True, True
        for kept, seconds in self._read():
            if kept.versions == self._versions:
                self.seconds = seconds
            elif not self.earlier_name:
                self.earlier, self.earlier_name = seconds, self._difference(kept.versions)

    def _read(self) -> list[tuple[Kept, dict[Bucket, float]]]:
        try:
            with open(self.path, "rb") as file:
                stored = msgspec.json.decode(file.read(MOST_BYTES), type=StoredTimes)
            if stored.engine != self._engine:
                raise ValueError("it is another engine's")
            found = [{Bucket.read(name): taken for name, taken in kept.seconds.items()} for kept in stored.kept]
            if not all(0 < taken < math.inf for seconds in found for taken in seconds.values()):
                raise ValueError("it has times that are no times")
            return list(zip(stored.kept, found, strict=True))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            if self._warns:
                logger.warning(
                    "what steps usually take is learnt anew, for %s cannot be used: %s", self.path, reason(error)
                )
            self._warns = False
            return []

    def _difference(self, versions: Mapping[str, str]) -> str:
        """Returns what other versions are, in words."""
        changed = sorted(
            name for name in {*versions, *self._versions} if versions.get(name) != self._versions.get(name)
        )
        pairs = (f"{name} {versions.get(name, 'none')} (now {self._versions.get(name, 'none')})" for name in changed)
        return ", ".join(pairs)

    def save(self) -> None:
        """Writes the file, with what others have written since, in one go, so that nobody reads half of it."""
        if not self._writes:
            return
        seconds: dict[str, float] = {}
        others: list[Kept] = []
        for kept, _ in self._read():
            if kept.versions == self._versions:
                seconds = kept.seconds
            else:
                others.append(kept)
        seconds |= {str(bucket): float(f"{taken:.4g}") for bucket, taken in self.seconds.items()}
        stored = StoredTimes(self._engine, [Kept(self._versions, seconds), *others[: VERSIONS - 1]])
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("wb", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                temporary = file.name
                file.write(msgspec.json.encode(stored))
            os.replace(temporary, self.path)
        except OSError as error:
            self._writes = False
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            logger.warning("what steps usually take is not kept for the next start: %s", reason(error))


def step_times(config: EngineConfig, layout: Layout, model: Mapping[str, object]) -> StepTimes:
    """Returns the times of an engine with this configuration; `model` is what its config.json says."""
    plain = EngineConfig()
    options = {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in SAME_SPEED and getattr(config, field.name) != getattr(plain, field.name)
    }
    digest = hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest()[:32]
    sizes = f"{layout.dtype}, {layout.token_bytes} bytes a token"
    engine = {"model": digest, "cache": sizes, "hardware": _hardware(layout), **options}
    versions = {"kvern": __version__, "torch": str(torch.__version__)}
    if layout.device == "cuda":
        import triton

        versions |= {"triton": str(triton.__version__), "driver": _driver()}
    return StepTimes(config.cache_folder, engine, versions)


def _hardware(layout: Layout) -> str:
    if layout.device == "cuda":
        return f"{len(layout.gpus)} x {torch.cuda.get_device_name()}"
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def _driver() -> str:
    """The version of the driver of NVIDIA's GPUs, as the kernel module says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def processor_name() -> str:
    """The name of the processor, as Linux says it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
