"""The choice of kernels for the steps on a device, and of the threads of a CPU beside them."""

import contextlib
import dataclasses
from itertools import chain

import torch

from kvern.config import EngineConfig
from kvern.cpu.kernel_library import BuildError
from kvern.cpu.processor import chosen_isa
from kvern.cpu.ready import working_groups
from kvern.errors import ConfigError
from kvern.layers.linear_method import LinearMethod
from kvern.models.weighted import WeightedModel
from kvern.runner.loaded_model import Stored
from kvern.runner.plan import CPU_KERNELS, RANK_KERNELS, Plan
from kvern.runner.startup import Startup

CPU_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of models that kernels of a CPU compute."""


def settle_threads(config: EngineConfig, plan: Plan, *models: WeightedModel) -> None:
    """Let PyTorch have one thread where kernels do all that takes long: its threads would spin on their cores.

    Raises ConfigError if steps must be deterministic, and PyTorch multiplies or attends.
    """
    missing = sorted(CPU_KERNELS - plan.kernels)
    parts = chain.from_iterable(model.modules() for model in models)
    plain = {item.name for item in parts if isinstance(item, LinearMethod) and not item.compiled}
    if not missing and not plain:
        torch.set_num_threads(1)
    elif config.deterministic:
        found = f"there are no kernels {', '.join(missing)}" if missing else f"none multiplies {', '.join(plain)}"
        raise ConfigError(
            f"deterministic is on, which takes kvern's kernels for this CPU, but {found}: in PyTorch a token's results "
            "depend on the batch; see the messages above, choose dtype bfloat16 or float32 and another format of "
            "weights, or leave deterministic off"
        )
    if config.deterministic and config.adapter_places:
        raise ConfigError(
            "deterministic is on and there may be adapters: on a CPU PyTorch multiplies theirs, with results that "
            "depend on the batch; leave one of both off"
        )


def usable_kernels(
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    startup: Startup,
    model: Stored,
    draft: Stored | None = None,
    drafts: bool = False,
) -> tuple[frozenset[str], frozenset[str]]:
    """The groups of kernels that the options allow and that work on this device, for a model and for its draft model.

    `drafts`: some are verified. Raises ConfigError.
    """
    isa = chosen_isa().name  # refused if it is wrong, whether or not kernels are wanted
    if device.type == "cpu" and config.cpu_kernels and dtype in CPU_DTYPES:
        with startup.stage(f"kernels for {isa}"):
            if config.deterministic:  # it cannot do without
                from kvern.cpu.build import build

                with contextlib.suppress(BuildError, OSError):
                    build(config.cache_folder)
            groups = working_groups(config.cache_folder, torch.get_num_threads())
            groups = groups if config.executor == "processes" else groups - RANK_KERNELS  # machines share no memory
            return groups, groups
    if device.type != "cuda" or not config.triton_kernels:
        return frozenset(), frozenset()
    from kvern.device.measurements import keep_builds
    from kvern.kernels.launch import is_amd
    from kvern.runner.dummy_steps import groups_of
    from kvern.runner.gpu_checks import check_head_dim
    from kvern.runner.kernel_check import broken_groups
    from kvern.runner.recorded_kernels import record_launches

    check_head_dim(config, model.spec)
    keep_builds(config.cache_folder)
    with startup.stage("kernels"):
        launches = [record_launches(config, dtype, model, drafts=drafts)]
        if draft is not None:
            launches.append(record_launches(of_draft(config), dtype, draft, drafts=True))
        broken = broken_groups(launches, device)
    groups, of_its_draft = groups_of(model.spec) - broken[0], groups_of((draft or model).spec) - broken[-1]
    if is_amd(device):  # no test has run them on such a card
        from kvern.runner.kernel_numbers import Model, wrong_groups

        with startup.stage("numbers"):
            groups -= wrong_groups(Model(config, dtype, model, device), groups)
            if draft is not None and not draft.has_head:
                of_its_draft -= wrong_groups(Model(of_draft(config), dtype, draft, device), of_its_draft)
    return groups, of_its_draft


def of_draft(config: EngineConfig) -> EngineConfig:
    """The options of a draft model or head, whose cache is never in 8 bits, and which has no adapters."""
    return dataclasses.replace(config, kv_cache_dtype="auto", adapters={}, max_adapters=None)
