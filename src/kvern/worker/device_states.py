"""The states of a model's layers on a GPU: which row has which is on the device, where graphs read it."""

from itertools import chain

import torch

from kvern.device.device_batch import DeviceBatch
from kvern.device.state_runs import runs_of
from kvern.device.transfer import upload
from kvern.layers.device_states import DeviceStates
from kvern.model_spec import ModelSpec
from kvern.step import SchedulerOutput


class DeviceStateMemory:
    """`StateMemory` (`worker/state_memory.py`) for a runner that never waits for its device.

    There is a place more than the scheduler knows, the last: that of the row that pads batches, and of rows whose
    requests were given none.
    """

    def __init__(self, spec: ModelSpec, states: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        counts = {mixer: spec.recurrent.count(mixer) for mixer in spec.recurrent}
        stacked = {
            mixer: [
                torch.zeros(
                    count, states + 1, *tensor.shape, dtype=torch.float32 if tensor.exact else dtype, device=device
                )
                for tensor in mixer.states
            ]
            for mixer, count in counts.items()
        }
        self._stacked = list(chain.from_iterable(stacked.values()))  # of layers alike, copied by one launch
        parts = {mixer: zip(*tensors, strict=True) for mixer, tensors in stacked.items()}
        self._layers = [next(parts[mixer]) for mixer in spec.recurrent]
        self._padding = states
        self._of_row = torch.full((rows,), states, dtype=torch.int32, device=device)

    def prepare(self, output: SchedulerOutput) -> None:
        """Before a step: zero and copy states, in their order, and let rows that fork or join have theirs."""
        for source, target in output.state_copies:
            for stacked in self._stacked:
                if source < 0:
                    stacked[:, target].zero_()
                else:
                    stacked[:, target].copy_(stacked[:, source])
        changed = {fork.slot: fork.state_index for fork in output.forked}
        changed |= {request.slot: request.state_index for request in output.joined}
        if changed:
            states = [self._padding if state < 0 else state for state in changed.values()]
            slots, given = upload([*changed, *states], torch.int64, self._of_row.device).view(2, -1)
            self._of_row.index_copy_(0, slots, given.int())

    def plan(self, batch: DeviceBatch) -> DeviceStates:
        """Which tokens go on with which state."""
        states = self._of_row.index_select(0, batch.device_slots)
        decodes = batch.decodes
        runs = runs_of(states[decodes:], batch.counts[decodes:]) if decodes < len(states) else None
        return DeviceStates(self._layers, states[:decodes], runs)
