"""The clocks of a core, and what notes its steps."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvern.engine.pace import Pace
from kvern.engine.recorder import Recorder
from kvern.engine.step_watch import StepWatch

if TYPE_CHECKING:
    from kvern.engine.layer_seconds import LayerSeconds
    from kvern.planning.estimate import StepFactors


class CoreTiming(NamedTuple):
    """The clocks of a core, so that a simulation may have its own time."""

    pace: Pace | None = None
    """The seconds that steps with decodes should take; None: however long."""
    watch: StepWatch | None = None
    """A function that is called with the ids of a step's requests before the step begins."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, from any moment on."""
    sleep: Callable[[float], None] = time.sleep
    """Waits for so many seconds."""
    factors: "Callable[[], StepFactors | None]" = lambda: None
    """Makes, in an idle moment, the estimates of the parts of steps; None: nobody knows how fast this machine is."""
    recorder: Recorder | None = None
    """Makes the records that the last events of answers have; None: they have none."""
    layers: "LayerSeconds | None" = None
    """Adds up the times of the parts of steps that are measured; None: none is."""


DEFAULT_TIMING = CoreTiming()
