"""Recovery of the requests of an engine that has ended: they go on, but for the one that ended it."""

import logging
import time
from collections.abc import Callable

from kvern.errors import RequestFailed
from kvern.observe.metrics import Refusals
from kvern.serving.probation import Probation
from kvern.serving.supervisor import LONG_LIFE, Death
from kvern.serving.workload import Generation, Workload, generation_id

logger = logging.getLogger("kvern")

TRIAL_SECONDS = 30.0
"""Seconds of computing after which no request is on trial any more."""
JUST_BEGUN_SECONDS = 1.0


class Recovery:
    """Ends the request that ends engines; the others go on with the next one, as far as `probation` lets them.

    `has_other`: whether another engine could take requests now.
    """

    def __init__(
        self, workload: Workload, probation: Probation, refusals: Refusals, has_other: Callable[[], bool]
    ) -> None:
        self._workload = workload
        self._probation = probation
        self._refusals = refusals
        self._has_other = has_other
        self._heard = 0.0
        self._unexplained = 0
        """Deaths since a request was found guilty, or an engine lived long."""

    def heard(self) -> None:
        """The engine lives: those on trial are innocent after some time of it, since a search is silent to its end."""
        self._heard = time.monotonic()
        if self._probation.active and self._heard > self._workload.begun_at + TRIAL_SECONDS:
            for name in self._probation.on_trial:
                self._workload.clear(self._workload.running[name])

    def died(self, death: Death) -> bool:
        """Find out which request ends engines, and end that one; whether the death taught something."""
        if death.lived > LONG_LIFE:
            self._unexplained = 0
        running = self._workload.running
        outside = death.cause == "outside"
        names = dict.fromkeys([*map(generation_id, death.running), *self._just_begun()])
        suspects = [generation for name in names if (generation := running.get(name)) is not None]
        suspects.sort(key=lambda generation: (generation.progress, -generation.asked))
        logger.warning("%s; %d requests go on with another", death.reason, len(running))
        there = bool(suspects)
        if not self._probation.active and (outside or (death.cause == "silence" and self._has_other())):
            suspects = self._not_spared(suspects)
        guilty = self._probation.died([generation.output.request_id for generation in suspects], death.cause)
        if guilty is not None:
            self._unexplained = 0
            message = f"request {guilty} was alone when the engine died and is not tried again: {death.reason}"
            logger.warning("%s", message)
            self._refusals.count("crash")
            self._workload.end(running[guilty], RequestFailed(message))
        return there

    def _not_spared(self, suspects: list[Generation]) -> list[Generation]:
        """Returns the requests that stay suspected when the engine was killed, which may have come from outside.

        Requests of a killed engine continue in the next one. If that is killed before a request got on, the request is
        tried.
        """
        staying = [generation for generation in suspects if generation.spared]
        for generation in suspects:
            generation.spared = True
        return staying

    def _just_begun(self) -> list[str]:
        """Returns requests that may have ended the engine before their first step: those on trial, and the latest.

        The latest count only if no cause was found at the last deaths; those in its last steps are more suspicious.
        """
        running = self._workload.running
        if self._probation.active:
            return [name for name in self._probation.on_trial if running[name].begun]
        self._unexplained += 1
        if self._unexplained <= 1:
            return []
        late = self._heard - JUST_BEGUN_SECONDS
        return [name for name, one in running.items() if not one.progress and one.begun_at > late]
