"""What the estimates of `kvern plan` say of an engine's workloads, to be held against what is measured."""

from collections.abc import Sequence
from dataclasses import replace

from kvern.bench.workloads import Workload as Measured
from kvern.engine.engine import Engine
from kvern.planning.choice import model_of
from kvern.planning.estimate import Split, Workload, estimate
from kvern.planning.hardware import this_machine

ENOUGH = 1e15
"""Bytes of memory: the engine that is asked about has its room already."""


def predicted_seconds(engine: Engine, workloads: Sequence[Measured]) -> list[float]:
    """Of each workload on this machine, from the mean lengths of its requests, without drafts and cached prompts.

    Raises ConfigError for a GPU of which nobody told how fast it is.
    """
    model, card = model_of(engine.config, engine.folder), replace(this_machine()[0], memory=ENOUGH)
    split, found = Split(engine.config.tensor_parallel_size, 1), []
    for workload in workloads:
        count, tokens = len(workload.prompts), sum(workload.lengths)
        prompt = max(sum(map(len, workload.prompts)) // count, 1)
        found.append(tokens / estimate(model, card, split, Workload(count, prompt, max(tokens // count, 1))).rate)
    return found
