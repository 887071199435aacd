"""The plan's split, checked against the model, and the model's files on this machine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvern.config import EngineConfig
from kvern.deploy.discover import FALLBACK, Discovered
from kvern.deploy.plan import Planned
from kvern.deploy.stage import Part, Work
from kvern.models.folder import model_folder
from kvern.models.hub import resolve_model
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.runner.ranks.rank_limits import check_ranks


class Sharded(msgspec.Struct):
    """The split, as options of engines, and the model's folder, all of it on this machine."""

    options: dict[str, Any]
    folder: str


class Shard:
    """The third stage; it downloads what the hub has."""

    name = "shard"
    result = Sharded

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """Nothing beside the plan."""
        return {}

    def run(self, work: Work) -> Sharded:
        """Downloads the pinned commit, and checks the split. Raises KvernError."""
        found = work.of(Discovered)
        options = work.of(Planned).options
        folder = resolve_model(found.model, revision=found.revision).absolute()
        if found.family != FALLBACK:
            config = EngineConfig(str(folder))
            described = model_folder(config)
            check_ranks(replace(config, **options), described, spec_from_config(read_config(described)))
        return Sharded(options, str(folder))

    def stands(self, work: Work, result: Sharded) -> bool:
        """False, so that files that were deleted are noticed: what is there is not downloaded again."""
        return False

    def report(self, result: Sharded) -> Part:
        """Engines and ranks."""
        ranks = result.options.get("tensor_parallel_size", 1) * result.options.get("pipeline_parallel_size", 1)
        engines = result.options.get("data_parallel_size", 1)
        return Part([("engines", f"{engines}, of {ranks} device{'s' * (ranks > 1)} each"), ("folder", result.folder)])
