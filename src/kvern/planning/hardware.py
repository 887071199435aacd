"""Properties of cards: memory, bandwidth, compute rate, and links to each other."""

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory, cpu_threads
from kvern.cpu.ready import working_groups
from kvern.errors import ConfigError
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.unquantized import Unquantized
from kvern.runner.kernel_choice import CPU_DTYPES
from kvern.runner.plan import Layout

NVLINK, PCIE = 250e9, 20e9
"""Bytes per second from one card to another during an all-reduce."""
NVLINK_DELAY, PCIE_DELAY = 4e-6, 30e-6
"""Seconds of an empty all-reduce."""

ALIKE = 0.8
"""The least ratio of free memory between cards of one kind for which they are planned for as equal."""

READ_BYTES, WIDTH = 2**28, 512
"""Bytes that a CPU reads, and rows and columns of the matrices that it multiplies: one without instructions for 16
bits and without kernels takes 0.2 seconds."""
QUICK_BYTES, QUICK_WIDTH = 2**24, 256
"""Sizes for a measurement that an engine waits for."""
REPETITIONS = 5
ENOUGH_SECONDS = 0.5


@dataclass(frozen=True)
class Reached:
    """The constants of steps on a device, for all models and for formats of weights.

    Shares of its bandwidth at which weights (`read`) and `keys` and values are read, and of its rate at which products
    (`computed`) and the attention of prompts (`attended`) are. `passes`: how often inputs and outputs of products are
    read and written, by these and by norms, activations and rotations. `late`: the share of the shorter of reading and
    computing a product that does not overlap with the longer. `several`: the overhead of a product of several rows,
    whose norms and activations are launches of their own, beside that of one row; `quantized`: what quantized weights
    add, whose activations are rounded or arranged. `unpacked`: instructions that make a number of a weight of less than
    8 bits.
    """

    read: float
    keys: float
    computed: float
    attended: float
    passes: float = 0.0
    late: float = 0.0
    several: float = 1.0
    quantized: float = 0.0
    unpacked: float = 0.0


GPU = Reached(0.9, 0.76, 0.7, 0.64, passes=3.5, late=0.25, several=1.5, quantized=0.5, unpacked=6.1)
"""Measured on an H200: docs/notes/gpu.md and quantized.md have kernels one by one."""
HOST = Reached(0.9, 0.9, 0.65, 0.65)
"""A CPU, which is measured with products as its layers compute them."""


@dataclass(frozen=True)
class Card:
    """One device: bytes of memory, bandwidth in bytes per second, operations per second in 16 bits and in 8 bits.

    `instructions`: per second, those of each thread counted. `link`: bytes per second to another card; `delay`: seconds
    of an empty all-reduce. `overhead`: seconds that a product of one row takes besides reading weights: to begin and
    end, and for the small launches before the next.
    """

    name: str
    memory: float
    bandwidth: float
    rate: float
    rate_8bit: float
    instructions: float = 33.5e12
    link: float = NVLINK
    delay: float = NVLINK_DELAY
    overhead: float = 4.5e-6
    host: bool = False

    @property
    def reached(self) -> Reached:
        """The constants of steps on it."""
        return HOST if self.host else GPU


def _card(name: str, gigabytes: float, *tera: float, link: float = NVLINK) -> Card:
    delay = NVLINK_DELAY if link == NVLINK else PCIE_DELAY
    bandwidth, rate, eight, instructions = (1e12 * each for each in tera)
    return Card(name, gigabytes * 1e9, bandwidth, rate, eight, instructions, link, delay)


CARDS = {
    card.name: card
    for card in (
        _card("a100", 85, 2.04, 312, 312, 19.5),
        _card("a100-40gb", 42, 1.56, 312, 312, 19.5),
        _card("h100", 85, 3.35, 989, 1979, 33.5),
        _card("h100-pcie", 85, 2.04, 756, 1513, 25.6, link=PCIE),
        _card("h200", 150, 4.8, 989, 1979, 33.5),
        _card("b200", 191, 8.0, 2250, 4500, 37.5),
        _card("l4", 24, 0.30, 121, 242, 15.1, link=PCIE),
        _card("l40s", 48, 0.86, 362, 733, 45.8, link=PCIE),
        _card("a10g", 24, 0.60, 125, 125, 15.6, link=PCIE),
        _card("rtx-3090", 25, 0.94, 71, 71, 17.8, link=PCIE),
        _card("rtx-4090", 25, 1.01, 165, 330, 41.3, link=PCIE),
        _card("rtx-5090", 34, 1.79, 210, 419, 52.4, link=PCIE),
    )
}
"""Cards by name, from the makers' data sheets: the memory that programs see, bandwidth, dense operations in 16 and 8
bits, instructions."""


def parse_hardware(text: str) -> list[Card]:
    """Returns the cards of "h200", "2x h200" or "2xh200". Raises ConfigError."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?([a-z][a-z0-9-]*)\s*", text.lower())
    name = found[2] if found else ""
    if found is None or name not in CARDS or not 1 <= int(found[1] or 1) <= 64:
        raise ConfigError(
            f"hardware {text!r:.60} is unknown: give a number of cards, 64 at most, and one of {', '.join(CARDS)}, "
            'as in "2x h200"'
        )
    return [CARDS[name]] * int(found[1] or 1)


def same_hardware(one: str, other: str) -> bool:
    """Tells whether two texts name the same cards, which may have no name for `parse_hardware`."""
    with contextlib.suppress(ConfigError):
        return one == other or parse_hardware(one) == parse_hardware(other)
    return False


def kind_of_gpu(name: str) -> Card | None:
    """Returns the card that a GPU is by its driver's name; None for one of unknown speed."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    matching = [card for card in CARDS.values() if set(card.name.split("-")) <= words]
    return max(matching, key=lambda card: len(card.name), default=None)


def this_machine(config: EngineConfig, dtype: str) -> list[Card]:
    """Returns the GPUs of this machine, or its CPU with the measured rates of a model's products in `dtype`.

    Raises ConfigError for an unknown kind of GPU.
    """
    if not torch.cuda.is_available():
        return [measured_host(host_build(config, dtype))]
    cards = [_of_gpu(index) for index in range(torch.cuda.device_count())]
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(len(cards))]
    return linked(cards, uuids) if len(cards) > 1 else cards


def engine_card(config: EngineConfig, dtype: str, layout: Layout) -> Card | None:
    """Returns the device of an engine in this process, whose model computes in `dtype`: the CPU, or the current GPU;
    None for GPUs of unknown speed."""
    if not layout.gpus:
        return quickly_measured_host(host_build(config, dtype, layout.kernels))
    with contextlib.suppress(ConfigError):
        card = _of_gpu(torch.cuda.current_device())
        return card if len(layout.gpus) == 1 else linked([card], layout.gpus)[0]
    return None


def host_build(config: EngineConfig, dtype: str, kernels: frozenset[str] | None = None) -> BuildOptions:
    """Returns the options of an engine's layers on this CPU. `kernels`: those it uses; None: those that a start would
    find."""
    kind = getattr(torch, dtype)
    if kernels is None:
        has_kernels = config.cpu_kernels and kind in CPU_DTYPES
        threads = config.threads or cpu_threads()
        kernels = working_groups(config.cache_folder, threads) if has_kernels else frozenset()
    return BuildOptions(kind, torch.device("cpu"), 1, kernels, config.deterministic)


@cache
def quickly_measured_host(build: BuildOptions) -> Card:
    """Returns the CPU with rates that were measured in some 0.1 s."""
    return measured_host(build, QUICK_BYTES, QUICK_WIDTH)


def measured_host(build: BuildOptions, size: int = READ_BYTES, width: int = WIDTH) -> Card:
    """Returns the CPU with rates of the products of layers with such options.

    kvern's kernels may take a fortieth of the time that PyTorch takes for 16 bits on a CPU without instructions for
    them.
    """
    table, matrix = (_ones(outputs, width, build) for outputs in (size // (width * build.dtype.itemsize), width))
    rows = torch.ones(width, width, dtype=build.dtype)
    read = _seconds(lambda: table.multiply(rows[:1], None))
    rate = 2 * width**3 / _seconds(lambda: matrix.multiply(rows, None))
    speed = size / read
    return Card("CPU", float(available_memory()), speed, rate, rate, link=speed, delay=1e-4, host=True)


def _ones(outputs: int, inputs: int, build: BuildOptions) -> LinearMethod:
    """Returns a matrix of ones that is multiplied as a model's are."""
    method = Unquantized().linear(LinearShape(outputs, inputs, build.dtype, build.device), build)
    for parameter in method.parameters():
        parameter.fill_(1)
    method.finish()
    return method


def linked(cards: Sequence[Card], uuids: Sequence[str]) -> list[Card]:
    """Returns GPUs with the links that the driver reports: NVLink if it is between any two of them, else PCIe."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        is_nvlink = all(
            pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK
            for one, other in itertools.permutations(handles, 2)
        )
    except pynvml.NVMLError as error:
        raise ConfigError(f"the driver does not tell how GPUs are linked: {error}; give --hardware") from error
    link, delay = (NVLINK, NVLINK_DELAY) if is_nvlink else (PCIE, PCIE_DELAY)
    return [replace(card, link=link, delay=delay) for card in cards]


def check_alike(cards: Sequence[Card]) -> None:
    """Raises ConfigError, with the cards' names, if their kinds differ or one has far less memory than another."""
    memory = [card.memory for card in cards]
    if len({card.name for card in cards}) > 1 or min(memory) < ALIKE * max(memory):
        told = ", ".join(f"{number}: {card.name} with {card.memory / 1e9:.0f} GB" for number, card in enumerate(cards))
        raise ConfigError(f"GPUs differ ({told}): name like ones in CUDA_VISIBLE_DEVICES, or free their memory")


def names_of(cards: Sequence[Card]) -> str:
    """Returns the number and kind of equal cards, and their links."""
    least = min(cards, key=lambda card: card.memory)
    link = "" if len(cards) == 1 else f", linked by {'NVLink' if least.link == NVLINK else 'PCIe'}"
    return f"{len(cards)} x {least.name} of {least.memory / 1e9:.0f} GB{link}"


def _of_gpu(index: int) -> Card:
    name, memory = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)[0]
    kind = kind_of_gpu(name)
    if kind is None:
        raise ConfigError(f"nobody told how fast a {name} is: name one that is like it, as in --hardware h100")
    return replace(kind, memory=float(memory))


def _seconds(work: Callable[[], object]) -> float:
    """Returns the shortest time of `REPETITIONS`, or of as many as `ENOUGH_SECONDS` allow."""
    found: list[float] = []
    while len(found) < REPETITIONS and sum(found) < ENOUGH_SECONDS:
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return min(found)
