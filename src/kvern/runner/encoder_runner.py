"""Steps of an encoder: texts and images in, what the model makes of each out; nothing outlives a step."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path

import torch

from kvern.attention.bidirectional import CompiledTexts, TorchAttend
from kvern.config import EngineConfig
from kvern.cpu.cores import cpu_threads
from kvern.device.text_batch import TextBatch, build_text_batch
from kvern.device.transfer import fetch
from kvern.errors import ConfigError
from kvern.images.settings import settings_of
from kvern.layers.linear_format import LinearMethods
from kvern.layers.step_context import Attend
from kvern.layers.unquantized import Unquantized
from kvern.models.encoder import Encoder
from kvern.models.loader import LoadOptions, choose_dtype, load_encoder, read_config
from kvern.models.vision import load_vision
from kvern.request.request import PromptInput
from kvern.runner.asleep import MemoryAsleep, memory_asleep
from kvern.runner.device import refuse, resolve_device
from kvern.runner.gpu_checks import check_dtype, check_weights_fit
from kvern.runner.kernel_choice import settle_threads, usable_kernels
from kvern.runner.loaded_model import Stored
from kvern.runner.memory import MARGIN_BYTES, DeviceMemory
from kvern.runner.pictures import Picture, PictureEncoder
from kvern.runner.plan import CPU_KERNELS, Layout, Plan, ProbedDevice, agree, resolve_max_model_len
from kvern.runner.startup import Startup
from kvern.spec.model import ModelSpec
from kvern.spec.vision import VisionSpec

logger = logging.getLogger("kvern")


Input = PromptInput | Picture
"""A text, or an image that was decoded."""


class PendingTexts:
    """The result of a step of texts and images, which the device may still compute."""

    def __init__(self, found: torch.Tensor, order: Sequence[int]) -> None:
        """`found` [S, ...] float32, a row of each input; `order` are the inputs' places in the step."""
        self._found, self._order = fetch(found), order
        self._done: torch.cuda.Event | None = None
        if found.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def result(self) -> list[bytes]:
        """Wait for the device. Of each input its embedding, or its head's scores: float32, little-endian."""
        if self._done is not None:
            self._done.synchronize()
        results = dict(zip(self._order, self._found.numpy(), strict=True))
        return [results[index].astype("<f4").tobytes() for index in range(len(results))]


class EncoderRunner:
    """Runs steps of at most `most_texts` texts and `most_tokens` tokens through an encoder.

    `pictures` encodes images; None: the model reads none.
    """

    def __init__(
        self,
        encoder: Encoder,
        most_tokens: int,
        most_texts: int,
        pictures: PictureEncoder | None = None,
        cache_folder: Path = Path(),
    ) -> None:
        """`cache_folder`: where memory waits while the engine is asleep on a CPU."""
        self._encoder, self._device = encoder, encoder.build.device
        self._cache_folder = cache_folder
        self.pictures = pictures
        layers, build = encoder.spec.attentions, encoder.build
        self._attend: Callable[[TextBatch], Attend] = partial(TorchAttend, layers)
        if "texts" in build.kernels:
            from kvern.attention.texts import PackedTexts

            self._attend = partial(PackedTexts, layers, build.dtype)
        elif build.kernels:
            self._attend = CompiledTexts(layers, build.dtype, most_tokens, most_texts).attend

    @torch.inference_mode()
    def start(self, inputs: Sequence[Input]) -> PendingTexts:
        """Start computing; on a CPU it is done then."""
        texts = [(len(item), index, item) for index, item in enumerate(inputs) if isinstance(item, PromptInput)]
        texts.sort(key=itemgetter(0))  # neighbours of one length are faster
        pictures = [(index, item) for index, item in enumerate(inputs) if isinstance(item, Picture)]
        try:
            found = []
            if texts:
                batch = build_text_batch([text for _, _, text in texts], self._encoder.encoder, self._device)
                found.append(self._encoder.read(batch, self._attend(batch)))
            if pictures:
                assert self.pictures is not None, "the model reads no images"
                found.append(self.pictures.rows([picture for _, picture in pictures]))
            order = [index for _, index, _ in texts] + [index for index, _ in pictures]
            return PendingTexts(torch.cat(found) if len(found) > 1 else found[0], order)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise

    @cached_property
    def sleeping(self) -> MemoryAsleep:
        """The memory that goes while the engine is asleep."""
        return memory_asleep(self, DeviceMemory(self._device), self._cache_folder)

    def abandon(self) -> None:
        """Wait for the device behind a step that failed. Raises if the device is broken."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def start_encoder(
    config: EngineConfig, folder: Path, spec: ModelSpec, startup: Startup, vision: VisionSpec | None = None
) -> tuple[EncoderRunner, Layout]:
    """The runner of a configuration, with the model in `folder` loaded, and how large its steps may be.

    `vision`: the encoder of images that is used, too. Raises KvernError subclasses.
    """
    device = resolve_device(config)
    check_encoder(config, spec, device, quantized="quantization_config" in read_config(folder))
    resolve_max_model_len(config, spec)  # what is wrong with the options shows before kernels are compiled
    dtype = choose_dtype(config.dtype, spec, None if config.load_format == "dummy" else folder)
    memory, methods = DeviceMemory(device, config.gpu_memory_share), LinearMethods(Unquantized())
    gpu = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        check_dtype(dtype, device)
        check_weights_fit(spec, dtype, memory, methods)
    else:
        torch.set_num_threads(config.threads or cpu_threads())
    kernels, _ = usable_kernels(config, dtype, device, startup, Stored(spec, methods))
    if "texts" not in kernels and not kernels >= CPU_KERNELS:
        kernels = frozenset()  # the layers' kernels write keys and values for that of attention
    if all(layer.rope is None for layer in spec.layers):
        kernels -= {"rotary"}  # it stores keys and values elsewhere, which are read where they lie
    found = ProbedDevice(device.type, str(dtype).removeprefix("torch."), kernels, gpu)
    plan = agree([found], config, spec)
    with startup.stage("weights"):
        options = LoadOptions(
            dtype=plan.dtype,
            device=device,
            max_model_len=plan.max_model_len,
            load_format=config.load_format,
            kernels=kernels,
            deterministic=config.deterministic,
            quantization=config.quantization,
        )
        encoder = load_encoder(folder, spec, options)
        pictures = None if vision is None else _load_pictures(folder, vision, options)
    most_tokens, most_texts = plan.max_batch_tokens, plan.max_batch_requests
    longest = max(plan.max_model_len, encoder.encoder.padded)
    runner = EncoderRunner(encoder, max(most_tokens, longest), most_texts, pictures, config.cache_folder)
    if device.type == "cuda":
        with startup.stage("memory"):
            most_tokens = _fitting_tokens(runner, memory, plan.max_batch_tokens, longest)
        if config.enable_sleep:
            _ = runner.sleeping
    else:
        settle_threads(config, plan, encoder)
    return runner, _layout(config, plan, most_tokens)


def _load_pictures(folder: Path, vision: VisionSpec, options: LoadOptions) -> PictureEncoder:
    """The encoder of images. On a GPU PyTorch computes it: kernels of texts are not those of patches."""
    kernels = options.kernels if options.kernels >= CPU_KERNELS else frozenset[str]()
    tower = load_vision(folder, vision, replace(options, max_model_len=None, kernels=kernels))
    return PictureEncoder(tower, settings_of(folder, vision))


def check_encoder(config: EngineConfig, spec: ModelSpec, device: torch.device, *, quantized: bool = False) -> None:
    """Raise ConfigError for what kvern cannot do with an encoder, whose checkpoint may be quantized."""
    on_gpu = device.type != "cpu"
    refused = {
        "quantization on a GPU": (
            on_gpu and (quantized or config.quantization is not None),
            "there weights are plain: leave quantization out, or use device cpu",
        ),
        "deterministic on a GPU": (
            on_gpu and config.deterministic,
            "there a text's last bits depend on its step: leave deterministic off, or use device cpu",
        ),
        f"head_quantization {config.head_quantization}": (
            config.head_quantization == "int8",
            "it has no output layer: leave head_quantization out",
        ),
        f"proposer {config.proposer}": (config.proposer is not None, "nothing is generated: leave proposer out"),
        f"kv_tier {config.shown_kv_tier}": (bool(config.kv_tier), "there is no KV cache: leave kv_tier out"),
        f"kv_cache_dtype {config.kv_cache_dtype}": (
            config.kv_cache_dtype != "auto",
            "there is no KV cache: leave kv_cache_dtype auto",
        ),
        "adapters": (
            config.adapter_places > 0,
            "they are for models that generate: leave adapters and max_adapters out",
        ),
    }
    refuse(refused, f"{spec.model_type}, which is an encoder")


def _fitting_tokens(runner: EncoderRunner, memory: DeviceMemory, most: int, longest: int) -> int:
    """Returns how many tokens a step may have, `most` at most, by what the longest text takes of the GPU's memory.

    A patch of an image counts as a token. PyTorch keeps the memory of such a step for those to come. Raises ConfigError
    if the longest text, or an image, does not fit.
    """
    free, _ = memory.free_and_total()
    text = _taken(runner, [PromptInput([0] * longest)], memory.device)
    if text is None or text > free:
        raise ConfigError(
            f"a text of max_model_len {longest} tokens does not fit into the {free / 2**20:.0f} MiB of GPU memory that "
            "are left beside the weights: lower max_model_len, raise gpu_memory_share, or free memory"
        )
    estimate = max(0, free - MARGIN_BYTES) * longest // text
    if runner.pictures is not None:
        picture = runner.pictures.largest()
        taken = _taken(runner, [picture], memory.device)
        if taken is None or taken > free:
            raise ConfigError(
                f"an image does not fit into the {free / 2**20:.0f} MiB of GPU memory that are left beside the "
                "weights: raise gpu_memory_share, or free memory"
            )
        estimate = min(estimate, max(0, free - MARGIN_BYTES) * runner.pictures.patches(picture) // taken)
    fitting = largest_step(runner, longest, estimate, most)
    if fitting < most:
        logger.warning("steps have %d tokens, not %d: memory has no room for more", fitting, most)
    return fitting


def _taken(runner: EncoderRunner, inputs: Sequence[Input], device: torch.device) -> int | None:
    """Returns the most memory that a step takes while it runs; None: it does not run."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(torch.OutOfMemoryError):
        runner.start(inputs).result()
        return torch.cuda.max_memory_allocated(device) - before
    return None


def largest_step(runner: EncoderRunner, longest: int, estimate: int, most: int) -> int:
    """The tokens of a step that does run, `most` at most: the `estimate`, or fewer where that was too high.

    Texts have as many as `longest` tokens, and one such has run.
    """
    tokens = min(max(longest, estimate), most)
    while tokens > longest and not _runs(runner, tokens, longest):
        tokens = max(longest, tokens // 2)
    return tokens


def _runs(runner: EncoderRunner, tokens: int, longest: int) -> bool:
    """Returns whether memory has room for a step of so many tokens, in texts of as many as `longest`."""
    whole, rest = divmod(tokens, longest)
    texts = [PromptInput([0] * longest)] * whole + [PromptInput([0] * rest)] * bool(rest)
    with contextlib.suppress(torch.OutOfMemoryError):
        runner.start(texts).result()
        return True
    return False


def _layout(config: EngineConfig, plan: Plan, most_tokens: int) -> Layout:
    """Without a KV cache."""
    return Layout(
        max_model_len=plan.max_model_len,
        blocks=0,
        block_size=config.block_size,
        token_bytes=0,
        dtype=plan.dtype,
        max_batch_requests=plan.max_batch_requests,
        max_batch_tokens=most_tokens,
        depth=2 if plan.device == "cuda" and config.overlap else 1,
        attention={},
        device=plan.device,
        gpus=plan.gpus,
        kernels=plan.kernels,
    )
