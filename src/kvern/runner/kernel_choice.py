"""The choice of kernels for the steps on a device, and of the threads of a CPU beside them."""

import contextlib
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvern.config import EngineConfig
from kvern.cpu.build import BuildError
from kvern.cpu.processor import chosen_isa
from kvern.cpu.ready import build, working_groups
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods
from kvern.layers.linear_method import LinearMethod
from kvern.models.weighted import WeightedModel
from kvern.ranks.ranks import ALONE, Ranks
from kvern.runner.device import check_head_dim
from kvern.runner.plan import (
    BATCH_REQUESTS,
    BATCH_TOKENS,
    CPU_KERNELS,
    EIGHT_BIT,
    RANK_KERNELS,
    Plan,
)
from kvern.runner.startup import Startup
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.kernel_list import Inputs

CPU_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of models that kernels of a CPU compute."""


def settle_threads(config: EngineConfig, plan: Plan, model: WeightedModel) -> None:
    """Let PyTorch have one thread where kernels do all that takes long: its threads would spin on their cores.

    Raises ConfigError if steps must be deterministic, and PyTorch multiplies or attends.
    """
    missing = sorted(CPU_KERNELS - plan.kernels)
    plain = {item.name for item in model.modules() if isinstance(item, LinearMethod) and not item.compiled}
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


class Stored(NamedTuple):
    """A model as its steps multiply: what it is made of, how its weights are stored, and who shares it.

    `has_head`: a draft head guesses beside it.
    """

    spec: ModelSpec
    methods: LinearMethods
    ranks: Ranks = ALONE
    has_head: bool = False


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
                with contextlib.suppress(BuildError, OSError):
                    build(config.cache_folder)
            groups = working_groups(config.cache_folder, torch.get_num_threads())
            groups = groups if config.executor == "processes" else groups - RANK_KERNELS  # machines share no memory
            return groups, groups
    if device.type != "cuda" or not config.triton_kernels:
        return frozenset(), frozenset()
    from kvern.device.measurements import keep_builds
    from kvern.runner.kernel_check import working_kernels

    check_head_dim(config, model.spec)
    keep_builds(config.cache_folder)
    launched = [(model.spec, inputs_of(config, dtype, device, model, drafts))]
    if draft is not None:
        launched.append((draft.spec, inputs_of_draft(config, dtype, device, draft)))
    with startup.stage("kernels"):
        working = working_kernels(launched)
    return working[0], working[-1]


def inputs_of(config: EngineConfig, dtype: torch.dtype, device: torch.device, model: Stored, drafts: bool) -> "Inputs":
    """The inputs that kernels are launched on at a start, of a model that may verify `drafts`."""
    from kvern.kernel_list import Inputs
    from kvern.kernel_list.quantized import packed_kinds

    on_meta = Build(dtype, torch.device("meta"), 1, linear=model.methods, ranks=model.ranks)
    sharing = model.ranks.dp_attention
    return Inputs(
        device,
        dtype,
        "zeros",
        block_size=config.block_size,
        batch_requests=config.max_batch_requests or BATCH_REQUESTS[device.type],
        batch_tokens=config.max_batch_tokens or BATCH_TOKENS[device.type],
        adapter_rank=config.max_adapter_rank if config.adapter_places else 0,
        adapter_places=config.adapter_places,
        cache_dtype=getattr(torch, EIGHT_BIT.get(config.kv_cache_dtype, ""), None),
        packed=() if model.spec.encoder is not None else packed_kinds(model.spec, on_meta),
        drafts=drafts,
        has_head=model.has_head,
        ranks=(model.ranks.rank, model.ranks.size),
        dp_attention=None if sharing is None else (sharing.ranks.rank, sharing.ranks.size),
    )


def inputs_of_draft(config: EngineConfig, dtype: torch.dtype, device: torch.device, draft: Stored) -> "Inputs":
    """The inputs of a draft model or head, whose cache is never in 8 bits, and which has no adapters."""
    config = dataclasses.replace(config, kv_cache_dtype="auto", adapters={}, max_adapters=None)
    return inputs_of(config, dtype, device, draft, drafts=True)
