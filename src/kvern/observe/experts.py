"""Counts of tokens for each expert of a mixture."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class ExpertTokens(Collector):
    """Tokens of each expert of each layer, summed over restarts of the engine."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: list[list[int]] = []
        self._now: Sequence[Sequence[int]] = []

    def count(self, tokens: Sequence[Sequence[int]]) -> None:
        """Sets the counts of the running engine, for each layer and expert."""
        self._now = tokens

    def restarted(self) -> None:
        """Keeps the counts of an engine that was replaced."""
        if self._now:
            self._earlier = self.sums()
            self._now = [[0] * len(layer) for layer in self._now]

    def sums(self) -> list[list[int]]:
        """Returns the counts of all engines, for each layer and expert."""
        if not self._earlier:
            return [list(layer) for layer in self._now]
        pairs = zip(self._earlier, self._now, strict=True)
        return [[before + now for before, now in zip(*layers, strict=True)] for layers in pairs]

    def collect(self) -> Iterator[Metric]:
        """Yields one counter with the labels `layer` and `expert`, both from 0; nothing before the first count."""
        if not self._now:
            return
        names, values = [*self._labels, "layer", "expert"], list(self._labels.values())
        family = CounterMetricFamily("kvern:expert_tokens", "Tokens that an expert has had.", labels=names)
        for layer, experts in enumerate(self.sums()):
            for expert, count in enumerate(experts):
                family.add_metric([*values, str(layer), str(expert)], count)
        yield family


def busiest_rows(tokens: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """Returns rows for a final table: the load of the busiest expert relative to an even share; none without
    experts."""
    used = {layer: experts for layer, experts in enumerate(tokens) if sum(experts)}
    if not used:
        return []
    shares = {layer: max(experts) * len(experts) / sum(experts) for layer, experts in used.items()}
    worst = max(shares, key=lambda layer: shares[layer])
    mean = sum(shares.values()) / len(shares)
    idle = sum(experts.count(0) for experts in map(list, used.values()))
    expert = list(used[worst]).index(max(used[worst]))
    return [
        (
            "busiest experts, of an even share",
            f"{mean:.2f} on average, {shares[worst]:.2f} of {expert} in layer {worst}",
        ),
        ("experts that nobody chose", f"{idle:,} of {sum(map(len, used.values())):,}"),
    ]
