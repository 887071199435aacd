"""The choice of block tables for layers with a window."""

from collections.abc import Iterable

from kvern.attention.groups import LayerGroups, group_layers
from kvern.config import EngineConfig
from kvern.runner.plan import Plan
from kvern.spec.model import ModelSpec


def choose_groups(config: EngineConfig, spec: ModelSpec, plan: Plan, libraries: Iterable[str] = ()) -> LayerGroups:
    """Block tables of a model's layers, where `libraries` attend."""
    groups = group_layers(spec.attentions)
    if groups.window is None:
        return groups
    obstacles = {
        "windowed_kv_cache is off": config.windowed_kv_cache == "off",
        "the contiguous cache has one block for each sequence": config.kv_cache != "paged",
        f"the tier {config.kv_tier} keeps blocks of one table": config.kv_tier is not None,
        "stages would divide the layers of a table": config.pipeline_parallel_size > 1,
        "states of recurrent layers are kept at other places": bool(spec.recurrent),
        "a draft model keeps all tokens": config.draft_model is not None and not groups.whole,
        "flashinfer plans for one block table": "flashinfer" in libraries,
        "its kernel does not work": plan.on_device and "windows" not in plan.kernels,
        f"no sequence is longer than the window of {groups.window}": plan.max_model_len <= groups.window,
    }
    reason = next((reason for reason, stands in obstacles.items() if stands), None)
    return groups if reason is None else LayerGroups.one_table(spec.attentions, reason)


def report(groups: LayerGroups) -> list[str]:
    """Lines for the report of a start."""
    if groups.reason:
        return [f"layers with a window keep all tokens: {groups.reason}"]
    return [] if groups.window is None else [f"layers with a window of {groups.window} keep no more tokens than that"]
