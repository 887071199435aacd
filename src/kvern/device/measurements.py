"""Measurements of this machine's GPU, kept under the cache directory: which kernel is fastest where."""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvern.version import __version__

logger = logging.getLogger("kvern")


def keep_builds(folder: Path) -> None:
    """Let Triton and FlashInfer keep the kernels they build there, unless the user told them a place."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(folder / "flashinfer"))


class Measurements:
    """Answers by section and key, in one file for each GPU, PyTorch, Triton and kvern.

    A file that cannot be read is measured anew; one that cannot be written is a warning.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        import triton

        versions = f"torch-{torch.__version__}_triton-{triton.__version__}_kvern-{__version__}"
        gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-") if device.type == "cuda" else "cpu"
        self._path = folder / "measurements" / f"{gpu}_{versions}.json"
        self._sections: dict[str, dict[str, Any]] = {}
        self._changed = False
        try:
            stored = json.loads(self._path.read_text())
            self._sections = {str(name): dict(section) for name, section in stored.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is measured anew: %s", self._path, error)

    def section(self, name: str) -> dict[str, Any]:
        """The values of a section; JSON values by key."""
        return self._sections.get(name, {})

    def remember(self, name: str, answers: dict[str, Any]) -> None:
        """Add to a section."""
        if answers:
            self._sections.setdefault(name, {}).update(answers)
            self._changed = True

    def save(self) -> None:
        """Write what is new, in one go, so that another process never reads half a file."""
        if not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".tmp", delete=False) as file:
                json.dump(self._sections, file, indent=1)
            os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("measurements are not remembered: %s", error)
        self._changed = False
