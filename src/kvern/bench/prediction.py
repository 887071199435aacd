"""Estimates of `kvern plan` for workloads of an engine, to compare with measurements."""

from collections.abc import Sequence

from kvern.bench.workloads import Workload as Measured
from kvern.engine.engine import Engine
from kvern.errors import ConfigError
from kvern.planning.choice import model_of
from kvern.planning.estimate import Split, seconds_of
from kvern.planning.hardware import host_build, measured_host, this_machine
from kvern.runner.device import resolve_device


def predicted_seconds(engine: Engine, workloads: Sequence[Measured]) -> list[float]:
    """Returns the seconds of each workload on this machine, without drafts and cached prompts.

    Raises ConfigError for a GPU of unknown speed, and KvernError for a model that cannot be described.
    """
    config = engine.config
    if config.enable_dp_attention:
        raise ConfigError("estimates are of ranks that share all layers, not experts alone")
    model = model_of(config, engine.folder)
    if resolve_device(config).type == "cpu":
        card = measured_host(host_build(config, model.dtype, engine.layout.kernels))
    else:
        card = this_machine(config, model.dtype)[0]
    split = Split(config.tensor_parallel_size, 1, config.pipeline_parallel_size, config.enable_expert_parallel)
    return [
        seconds_of(
            model, card, split, list(zip(map(len, each.prompts), each.lengths, strict=True)), engine.max_batch_requests
        )
        for each in workloads
    ]
