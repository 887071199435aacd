"""How evenly the experts of a mixture are used."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class ExpertTokens(Collector):
    """Tokens of each expert of each layer, over all engines that followed one another."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._earlier: list[list[int]] = []
        self._now: Sequence[Sequence[int]] = []

    def count(self, tokens: Sequence[Sequence[int]]) -> None:
        """What each expert of each layer has had in the engine that runs."""
        self._now = tokens

    def restarted(self) -> None:
        """Another engine begins at nothing."""
        if self._now:
            self._earlier = self.sums()
            self._now = [[0] * len(layer) for layer in self._now]

    def sums(self) -> list[list[int]]:
        """What each expert of each layer has had in all engines."""
        if not self._earlier:
            return [list(layer) for layer in self._now]
        pairs = zip(self._earlier, self._now, strict=True)
        return [[before + now for before, now in zip(*layers, strict=True)] for layers in pairs]

    def collect(self) -> Iterator[Metric]:
        """One counter, with the labels `layer` and `expert`, both from 0 on; nothing before any was told."""
        if not self._now:
            return
        names, values = [*self._labels, "layer", "expert"], list(self._labels.values())
        family = CounterMetricFamily("kvern:expert_tokens", "Tokens that an expert has had.", labels=names)
        for layer, experts in enumerate(self.sums()):
            for expert, count in enumerate(experts):
                family.add_metric([*values, str(layer), str(expert)], count)
        yield family


def busiest_rows(tokens: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
    """For a closing table: how much more than its share the busiest expert of a layer had; none without experts."""
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
