"""Metrics of what an engine's seconds were spent on."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern.request.events import CAUSES, EngineStatistics


class EngineTime(Collector):
    """The seconds of an engine by cause, summed over its restarts."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: Sequence[float] = ()
        self._now: Sequence[float] = ()

    def hear(self, statistics: EngineStatistics) -> None:
        """Takes the statistics of the running engine."""
        self._now = statistics.seconds

    def restarted(self) -> None:
        """Keeps the seconds of an engine that was replaced."""
        self._earlier, self._now = self._sums(), ()

    def collect(self) -> Iterator[Metric]:
        """Yields a counter with the label `cause`, of those causes that there were."""
        seconds = CounterMetricFamily(
            "kvern:engine_seconds", "Seconds of the engine, each of one cause.", labels=[*self._labels, "cause"]
        )
        for cause, spent in zip(CAUSES, self._sums(), strict=False):
            if spent:
                seconds.add_metric([*self._labels.values(), cause], spent)
        yield seconds

    def _sums(self) -> list[float]:
        return [before + now for before, now in zip_longest(self._earlier, self._now, fillvalue=0.0)]
