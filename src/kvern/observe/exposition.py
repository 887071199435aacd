"""Metrics in Prometheus's text format: those of several engines or servers together, and those of a GPU."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvern.observe.metrics import KeyFigures, Metrics, ModelFigures, Refusals

GPU_FIGURES = {
    "gpu_memory_used_bytes": "GPU memory in use, by all processes.",
    "gpu_memory_total_bytes": "GPU memory in all.",
    "gpu_utilization": "Share of the last moments in which the GPU computed, 0 to 1.",
}


class MergedFamilies(Collector):
    """The metrics of several sources: each family once, with the samples of all. Each source adds its labels."""

    def __init__(self, sources: Iterable[tuple[Mapping[str, str], Iterable[Metric]]]) -> None:
        self._sources = list(sources)

    def collect(self) -> Iterator[Metric]:
        """Yields all families."""
        merged: dict[str, Metric] = {}
        for labels, families in self._sources:
            for family in families:
                samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
                known = merged.setdefault(family.name, family)
                known.samples = samples if known is family else [*known.samples, *samples]
        yield from merged.values()

    def text(self) -> bytes:
        """Returns the families in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def engines_text(metrics: Iterable[Metrics | Refusals | KeyFigures | ModelFigures]) -> bytes:
    """Returns the metrics of several engines in Prometheus's text format."""
    named = ((({} if one.engine_name is None else {"engine": one.engine_name}), one.registry) for one in metrics)
    return MergedFamilies((labels, list(registry.collect())) for labels, registry in named).text()


def servers_text(texts: Iterable[tuple[str, bytes]]) -> bytes:
    """Merges the metrics of several servers in Prometheus's text format; each has its name as the label `replica`."""
    return MergedFamilies(
        ({"replica": replica}, list(text_string_to_metric_families(text.decode()))) for replica, text in texts
    ).text()


class GpuCollector(Collector):
    """Metrics of a GPU, which are read from the driver at each collection."""

    def __init__(self, uuid: str, labels: Mapping[str, str]) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._driver = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yields memory in bytes, and the share of the last moments in which a kernel ran."""
        memory = self._driver.nvmlDeviceGetMemoryInfo(self._handle)
        busy = self._driver.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        for (name, text), value in zip(GPU_FIGURES.items(), (memory.used, memory.total, busy), strict=True):
            family = GaugeMetricFamily(f"kvern:{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
