"""A look at what slows steps at the moment: throttled cards, and time of the processor that others have."""

import re
from collections.abc import Sequence
from pathlib import Path

THROTTLES = {
    0x4: "the power limit",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
"""Reasons of NVML for clocks below the highest, by their bits."""
STEAL, FIELDS = 7, 8
"""The place of the time that the hypervisor gave to others in the first line of /proc/stat, of so many that count."""


class SlowMachine:
    """Looks at cards, by their UUIDs, or at the processor if there are none. What cannot be read is left out."""

    def __init__(self, gpus: Sequence[str], system: Path = Path("/")) -> None:
        self._gpus, self._system = gpus, system
        self._times = self._read_times()

    def begin(self) -> None:
        """Notes the processor's time, if there are no cards."""
        if not self._gpus:
            self._times = self._read_times()

    def __call__(self) -> str:
        """Returns what is seen, with the processor's time since the last call of either, and what to do."""
        seen = [self._card(gpu) for gpu in self._gpus] if self._gpus else [*self._processor(), *self._waits()]
        return "; ".join(seen) or "Nothing of the machine's clocks and load can be read here: look at other processes"

    def _card(self, uuid: str) -> str:
        try:
            import pynvml

            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            clock, most = (
                read(card, pynvml.NVML_CLOCK_SM)
                for read in (pynvml.nvmlDeviceGetClockInfo, pynvml.nvmlDeviceGetMaxClockInfo)
            )
            bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
            heat = pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)
        except Exception as error:  # the driver's library may raise anything
            return f"{uuid}: its clocks cannot be read ({error}): see nvidia-smi -q -d CLOCK,PERFORMANCE"
        why = ", ".join(name for bit, name in THROTTLES.items() if bits & bit)
        return f"{uuid} runs at {clock} of {most} MHz and {heat} C, {f'throttled by {why}' if why else 'not throttled'}"

    def _read_times(self) -> list[int]:
        found = re.match(r"cpu +([\d ]+)", self._read("proc/stat"))
        return [int(number) for number in found[1].split()[:FIELDS]] if found else []

    def _processor(self) -> list[str]:
        before, self._times = self._times, self._read_times()
        if len(before) < FIELDS or len(self._times) < FIELDS:
            return []
        passed = [now - earlier for earlier, now in zip(before, self._times, strict=True)]
        if sum(passed) <= 0:
            return []
        idle = (passed[3] + passed[4]) / sum(passed)
        steal = passed[STEAL] / sum(passed)
        return [f"The processor was idle for {idle:.0%} of its time, and other virtual machines had {steal:.0%}"]

    def _waits(self) -> list[str]:
        """Returns how long processes waited for a processor, and its clock."""
        seen = []
        if found := re.search(r"some .*avg60=([\d.]+)", self._read("proc/pressure/cpu")):
            seen.append(f"processes waited for it for {found[1]} % of the last minute")
        clocks = [
            float(text) for text in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", self._read("proc/cpuinfo"), re.MULTILINE)
        ]
        if clocks:
            most = self._read("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
            limit = f" of {int(most) // 1000}" if most.isdecimal() else ""
            seen.append(f"its cores run at {sum(clocks) / len(clocks):.0f}{limit} MHz")
        return seen

    def _read(self, name: str) -> str:
        try:
            return (self._system / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
