"""The parts of an engine's steps: which share of a step each takes, beside the least that it could take."""

from collections import deque
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern.request.layer_times import LayerTimes, StepTimes

RECENT = 32
"""The reports of a kind of step that a table is about."""


class StepParts(Collector):
    """The times of the parts of measured steps, summed over restarts of the engine."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: LayerTimes = {}
        self._seen: dict[str, deque[StepTimes]] = {}

    def hear(self, times: LayerTimes) -> None:
        """Takes all sums of the running engine."""
        for kind, now in times.items():
            seen = self._seen.setdefault(kind, deque([StepTimes()], RECENT + 1))
            if now.steps != seen[-1].steps:
                seen.append(now)

    def restarted(self) -> None:
        """Keeps the sums of an engine that was replaced."""
        self._earlier = self._sums()
        self._seen = {}

    def recent(self) -> list[dict[str, object]]:
        """Returns what a step of each kind took on average in the last reports, for /v1/engines."""
        return [told(kind, seen[-1].since(seen[0])) for kind, seen in sorted(self._seen.items()) if len(seen) > 1]

    def collect(self) -> Iterator[Metric]:
        """Yields counters of steps, and of seconds by `part`, all by kind of `step`; nothing before the first step."""
        sums = self._sums()
        if not sums:
            return
        names, labels = [*self._labels, "step"], [*self._labels.values()]
        steps = CounterMetricFamily("kvern:layer_steps", "Steps whose parts were measured.", labels=names)
        spent = CounterMetricFamily("kvern:layer_seconds", "Seconds of parts of these steps.", labels=[*names, "part"])
        least = CounterMetricFamily(
            "kvern:layer_bound_seconds",
            "The least seconds that these parts could take with the device's bandwidth and rate, if they are known.",
            labels=[*names, "part"],
        )
        for kind, times in sums.items():
            steps.add_metric([*labels, kind], times.steps)
            for part, (seconds, bound) in times.parts.items():
                spent.add_metric([*labels, kind, part], seconds)
                if bound:
                    least.add_metric([*labels, kind, part], bound)
        yield from (steps, spent, least)

    def _sums(self) -> LayerTimes:
        now = {kind: seen[-1] for kind, seen in self._seen.items()}
        kinds = sorted({*self._earlier, *now})
        nothing = StepTimes()
        return {kind: self._earlier.get(kind, nothing).plus(now.get(kind, nothing)) for kind in kinds}


def told(kind: str, times: StepTimes) -> dict[str, object]:
    """Returns the averages of a step as JSON has them, the longest part first."""
    steps = max(times.steps, 1)
    whole = sum(seconds for seconds, _ in times.parts.values())
    parts = sorted(times.parts.items(), key=lambda item: item[1][0], reverse=True)
    return {
        "step": kind,
        "measured": times.steps,
        "tokens": round(times.rows / steps, 1),
        "seconds": round(whole / steps, 7),
        "parts": [
            {
                "part": name,
                "seconds": round(seconds / steps, 7),
                "share": round(seconds / whole, 4) if whole else 0.0,
                "bound_seconds": round(least / steps, 7) if least else None,
            }
            for name, (seconds, least) in parts
        ],
        "layers": [round(seconds / steps, 7) for seconds in times.layers],
    }
