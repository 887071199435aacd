"""Drafts behind a step of a device, and who waits for them.

one stage         sampled --> result; then drafts, which stay on the device: the next step tells what they took
several stages    sampled, drafts --> result: the first stage goes on with these, too, and has them from the host
"""

import torch

from kvern.device.device_batch import DeviceRows
from kvern.drafting.device.drafter import ComputedStep, GuardedDrafter
from kvern.drafting.verification import guessed_drafts
from kvern.ranks.stages import Stage
from kvern.runner.result import Interval, PendingStep


def draft_behind(
    step: PendingStep, computed: ComputedStep, drafter: GuardedDrafter, rows: DeviceRows, stage: Stage
) -> Interval | None:
    """Have a drafter that is asked guess behind a step, without waiting for the device.

    Returns when the device did it, if that is for the next step to tell: a step's own result does where it has drafts.
    """
    begun = _now(rows.device)
    drafter.draft(computed)
    ended = _now(rows.device)
    interval = None if begun is None or ended is None else (begun, ended)
    guessed = guessed_drafts(rows, computed.scheduled) if stage.count > 1 else None
    if guessed is None:
        return interval
    step.add_drafts(guessed, interval)
    return None


def _now(device: torch.device) -> torch.cuda.Event | None:
    """When a GPU comes here with what it was asked for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
