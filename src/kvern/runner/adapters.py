"""The adapters as a runner sees them: what to load before a step, and which of its rows use which."""

from collections.abc import Sequence

from kvern.adapters.bank import AdapterBank
from kvern.adapters.store import AdapterStore
from kvern.device.input_batch import InputBatch
from kvern.device.rows import BatchRows
from kvern.layers.step_context import StepAdapters


class Adapters:
    """Brings adapters from the host's memory to the device's."""

    def __init__(self, bank: AdapterBank, store: AdapterStore) -> None:
        self.bank = bank
        self._store = store

    def load(self, loads: Sequence[tuple[int, int]]) -> None:
        """(index, key) of what the step needs."""
        for adapter_index, key in loads:
            self.bank.load(adapter_index, self._store[key])

    def select(self, rows: BatchRows, batch: InputBatch, sampled_alone: bool) -> StepAdapters:
        """The adapter of each token of a step, and of each token that is sampled from."""
        sampled = self.indices(rows, batch.sample_slots) if sampled_alone else None
        return self.bank.select(self.indices(rows, batch.slots), batch.counts, sampled)

    def indices(self, rows: BatchRows, slots: Sequence[int]) -> list[int]:
        """Indices of the adapters of the requests in these rows of the batch; -1: a request uses none."""
        return [rows.request(slot).adapter_index for slot in slots]
