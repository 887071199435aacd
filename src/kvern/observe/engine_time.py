"""Metrics of what an engine's seconds were spent on, and lines of the log when the verdict on them changes."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern.observe.verdict import Verdict, VerdictWatch
from kvern.request.events import CAUSES, EngineStatistics

logger = logging.getLogger("kvern.verdict")
LOG_SECONDS = 60.0
"""The engine's seconds between two lines."""


class EngineTime(Collector):
    """The seconds of an engine by cause, summed over its restarts, and the verdict on the last of them."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: Sequence[float] = ()
        self._now: Sequence[float] = ()
        self._watch = VerdictWatch()
        self._logged: tuple[str, float] | None = None
        """The cause in the last line of the log, and the engine's seconds until then."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the engine's last seconds; None: there is none yet."""
        return self._watch.verdict

    def hear(self, statistics: EngineStatistics, name: str | None) -> None:
        """Takes the statistics of the running engine, which has a `name` if there are several."""
        self._now = statistics.seconds
        self._watch.hear(statistics)
        verdict, seconds = self.verdict, sum(self._now)
        if verdict is None or verdict.cause == "idle":
            return
        if self._logged is None or (verdict.cause != self._logged[0] and seconds >= self._logged[1] + LOG_SECONDS):
            self._logged = verdict.cause, seconds
            logger.info("%s%s", "" if name is None else f"engine {name}: ", verdict)

    def restarted(self) -> None:
        """Keeps the seconds of an engine that was replaced."""
        self._earlier, self._now = self._sums(), ()
        self._logged = None
        self.forget()

    def forget(self) -> None:
        """Forgets the last seconds, which the verdict was about."""
        self._watch.forget()

    def collect(self) -> Iterator[Metric]:
        """Yields a counter with the label `cause`, of those causes that there were."""
        seconds = CounterMetricFamily(
            "kvern:engine_seconds", "Seconds of the engine, each of one cause.", labels=[*self._labels, "cause"]
        )
        for cause, spent in zip(CAUSES, self._sums(), strict=False):
            if spent:
                seconds.add_metric([*self._labels.values(), cause], spent)
        yield seconds
        verdicts = GaugeMetricFamily(
            "kvern:verdict", "1 for the cause of most of the last seconds.", labels=[*self._labels, "cause"]
        )
        if self.verdict is not None:
            for cause in CAUSES:
                verdicts.add_metric([*self._labels.values(), cause], float(cause == self.verdict.cause))
        yield verdicts

    def _sums(self) -> list[float]:
        return [before + now for before, now in zip_longest(self._earlier, self._now, fillvalue=0.0)]
