"""Trained LoRA adapters of the embedded model `kvern-1m`."""

from pathlib import Path

ADAPTERS = {name: str(Path(__file__).parent / "adapters" / name) for name in ("captain", "gull")}
