"""Fills a model from a folder: configuration, checks on names and shapes, then each tensor streamed into place."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from kvern.cpu.cores import processes_here, total_memory
from kvern.errors import ConfigError, CorruptCheckpoint, ModelNotFound
from kvern.io.files import read_object
from kvern.io.sockets import MOST_PROCESSES
from kvern.layers.build import Build
from kvern.layers.linear_format import INT8_HEAD, LinearFormat, LinearMethods, linear_methods
from kvern.layers.linear_method import ANY
from kvern.layers.unquantized import Unquantized
from kvern.models.checkpoint import StoredTensor, open_map, read_headers
from kvern.models.decoder import Decoder
from kvern.models.embedder import spec_of_folder
from kvern.models.registry import KEY
from kvern.models.spec_file import with_file
from kvern.models.weighted import TensorTarget, WeightedModel
from kvern.plugins import imported
from kvern.ranks.ranks import ALONE, Ranks
from kvern.spec.model import ModelSpec, Rename

if TYPE_CHECKING:
    from kvern.models.encoder import Encoder
    from kvern.models.share import WholeExperts

Model = TypeVar("Model", bound=WeightedModel)

DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
}
# Buffers that older checkpoints carry and that follow from the configuration.
HARMLESS = (
    r"rotary_emb\.inv_freq$",
    r"attention\.(masked_)?bias$",
    r"rotary_emb\.(cos|sin)_cached$",
    # Scales of keys and values, which `models/cache_scales.py` reads, and of queries and weights, which stay plain.
    r"self_attn\.(attn\.|[qkv]_proj\.|qkv_proj\.)?(q|k|v|kv|prob)_scale$",
    r"self_attn\.[qkv]_proj\.output_scale$",
)
WITHOUT_HEAD = Rename(r"^(?=(embed_tokens|layers|norm)\.)", "model.")
"""Adds "model." to the names of models that were saved without their output layer, such as embedding models."""
SHOWN = 5
QUANTIZATION_NAME = "hf_quant_config.json"
"""The file in which Model Optimizer describes its quantization."""


def read_config(folder: Path, *, described: bool = True) -> dict[str, Any]:
    """The `config.json` of a model folder, with a `quantization_config` from its `text_config` or from another file.

    `described`: with the description beside it. Raises ModelNotFound if there is no config.json, CorruptCheckpoint if
    it is not a JSON object, UnsupportedModel if the description was made for another one.
    """
    try:
        config = read_object(folder / "config.json")
        config.pop(KEY, None)  # only a file beside it tells for which config.json it was made
        if described:
            config = with_file(folder, config)
        text = config.get("text_config")
        if isinstance(text, dict) and "quantization_config" in text:
            config.setdefault("quantization_config", text["quantization_config"])
        if "quantization_config" not in config and os.path.lexists(folder / QUANTIZATION_NAME):
            config["quantization_config"] = {"quant_method": "modelopt", **read_object(folder / QUANTIZATION_NAME)}
        return config
    except FileNotFoundError:
        raise ModelNotFound(
            f"{folder / 'config.json'} does not exist; a model folder has config.json beside its *.safetensors files"
        ) from None


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load_model` and `load_encoder`.

    dtype          "auto": the checkpoint's
    max_model_len  the longest sequence in tokens; None: as many as the model has positions for
    load_format    "dummy": random weights of a fixed seed, and no weight file is read
    kernels        as `deterministic`, that of `Build`
    unquantized    the format of plain weights; None: PyTorch multiplies them
    quantization   the format that plain weights are converted to while they are loaded, "fp8", "int8" or "int4"; None:
                   they stay plain
    int8_head      a plain output layer is converted to INT8, and the embeddings if they are the same matrix
    ranks          the ranks that share the model, of which this one loads its part
    whole_experts  the experts that each rank has; None: each rank has a part of each expert
    stored         the tensors in the place of those of the folder's files; None: those
    """

    dtype: str = "auto"
    device: torch.device | str = "cpu"
    max_model_len: int | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    kernels: frozenset[str] = frozenset()
    unquantized: LinearFormat | None = None
    deterministic: bool = False
    quantization: str | None = None
    int8_head: bool = False
    ranks: Ranks = ALONE
    whole_experts: "WholeExperts | None" = None
    stored: Sequence[StoredTensor] | None = None

    def tensors(self, folder: Path) -> list[StoredTensor] | None:
        """The tensors to load; None: there are none, weights are random."""
        if self.load_format == "dummy":
            return None
        return read_headers(folder) if self.stored is None else list(self.stored)


def load_model(folder: Path, options: LoadOptions = LoadOptions()) -> Decoder:
    """Build the model of a folder and load its weights.

    Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint, or ConfigError for an unknown dtype.
    """
    ranks, is_dummy = options.ranks, options.load_format == "dummy"
    config = read_config(folder)
    whole = spec_of_folder(folder, config)
    share = share_of_ranks(whole, ranks, options.whole_experts)
    stored = options.tensors(folder) or []
    spec = share
    if ranks.stage.layers is not None:
        from kvern.models.stages import part_of_stage, tensors_of_stage

        spec = part_of_stage(share, ranks.stage)
    online = options.quantization, options.int8_head
    linear = stored_methods(config, spec, stored, options.unquantized, *online)
    if ranks.stage.layers is not None:
        names = (llama_name(tensor.name, (*spec.renames, *linear.renames))[0] for tensor in stored)
        stored = tensors_of_stage(stored, names, whole, ranks.stage)
    dtype = choose_dtype(options.dtype, spec, None if is_dummy else folder)
    build = _build(spec, options, dtype, linear)
    all_stages = None
    if ranks.stage.count > 1 and build.device.type == "cpu":
        all_stages = outline_of(share, replace(build, ranks=Ranks(ranks.rank, ranks.size))).weight_bytes * ranks.size
    return filled_model(Decoder, spec, build, folder, None if is_dummy else stored, all_stages)


def share_of_ranks(whole: ModelSpec, ranks: Ranks, whole_experts: "WholeExperts | None" = None) -> ModelSpec:
    """The share of a model that each of the ranks has. Raises ConfigError."""
    if ranks.sharing_experts == 1 and whole_experts is None:
        return whole
    from kvern.models.share import share_of

    return share_of(whole, ranks.sharing_experts, whole_experts, dp_attention=ranks.dp_attention is not None)


def load_encoder(folder: Path, spec: ModelSpec, options: LoadOptions) -> "Encoder":
    """Build the encoder that `spec` describes and load its weights from `folder`; as `load_model`."""
    from kvern.models.encoder import Encoder

    stored = None if options.load_format == "dummy" else read_headers(folder)
    linear = stored_methods(read_config(folder), spec, stored or [], quantization=options.quantization)
    dtype = choose_dtype(options.dtype, spec, None if stored is None else folder)
    return filled_model(Encoder, spec, _build(spec, options, dtype, linear), folder, stored)


def _build(spec: ModelSpec, options: LoadOptions, dtype: torch.dtype, linear: LinearMethods) -> Build:
    return Build(
        dtype,
        torch.device(options.device),
        options.max_model_len or spec.max_position_embeddings,
        options.kernels,
        options.deterministic,
        ranks=options.ranks,
        linear=linear,
    )


def filled_model(
    make: Callable[[ModelSpec, Build], Model],
    spec: ModelSpec,
    build: Build,
    folder: Path,
    stored: list[StoredTensor] | None,
    all_stages: int | None = None,
) -> Model:
    """The model, with the tensors that are stored in the folder, None: with random weights.

    `all_stages`: bytes of weights that the ranks of all stages have together, where it is one of several.
    """
    outline = _checked_outline(make, spec, build, folder, stored)
    if build.device.type == "cpu":
        check_memory(outline.weight_bytes, spec, build, all_stages)
    model = make(spec, build)
    if stored is None:
        fill_random(model)
    else:
        _load(model, folder, stored)
    model.finish()
    return model.eval()


def _checked_outline(
    make: Callable[[ModelSpec, Build], Model],
    spec: ModelSpec,
    build: Build,
    folder: Path,
    stored: list[StoredTensor] | None,
) -> Model:
    """The model on the meta device, all of whose tensors are in the files. Raises CorruptCheckpoint."""
    if stored is not None and len(stored) < len(spec.layers):
        raise CorruptCheckpoint(
            f"weights in {folder} do not fit config.json: {len(stored)} tensors for {len(spec.layers)} layers"
        )
    outline = _outline(make, spec, build)
    if stored is not None:
        _assign(outline, folder, stored)
    return outline


def outline_of(spec: ModelSpec, build: Build) -> Decoder:
    """The model on the meta device, for its names, shapes and sizes."""
    return _outline(Decoder, spec, build)


def _outline(make: Callable[[ModelSpec, Build], Model], spec: ModelSpec, build: Build) -> Model:
    layers = tuple(replace(layer, rope=None) for layer in spec.layers)
    meta = Build(build.dtype, torch.device("meta"), 1, linear=build.linear, ranks=build.ranks)
    return make(replace(spec, layers=layers), meta)


def outline_model(
    folder: Path,
    dtype: str = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    quantization: str | None = None,
    *,
    int8_head: bool = False,
) -> Decoder:
    """The model of a folder on the meta device, with its file headers checked; no weight is read.

    Its formats are those of a CPU; `load_format` "dummy" needs no files except the configuration. `quantization`,
    `int8_head` and errors are those of `load_model`.
    """
    config, dummy = read_config(folder), load_format == "dummy"
    spec = spec_of_folder(folder, config)
    stored = [] if dummy else read_headers(folder)
    linear = stored_methods(config, spec, stored, quantization=quantization, int8_head=int8_head)
    build = Build(choose_dtype(dtype, spec, None if dummy else folder), torch.device("meta"), 1, linear=linear)
    return _checked_outline(Decoder, spec, build, folder, None if dummy else stored)


def check_fits(outline: WeightedModel, folder: Path, stored: list[StoredTensor]) -> None:
    """Raises CorruptCheckpoint with all tensors that are missing, unexpected or misshapen."""
    _assign(outline, folder, stored)


def load_weights(decoder: Decoder, folder: Path) -> None:
    """Fill `decoder` from the safetensors files in `folder`; all names and shapes are checked before data is read.

    Raises ModelNotFound or CorruptCheckpoint.
    """
    _load(decoder, folder, read_headers(folder))


def parse_dtype(name: str) -> torch.dtype:
    """A torch dtype from bfloat16/bf16, float16/fp16/half or float32/fp32/float; ConfigError for others."""
    if name.removeprefix("torch.") not in DTYPES:
        raise ConfigError(f"dtype {name!r:.60} is unknown; choose auto, bfloat16, float16 or float32")
    return DTYPES[name.removeprefix("torch.")]


def choose_dtype(name: str, spec: ModelSpec, folder: Path | None = None) -> torch.dtype:
    """The dtype of a name; for "auto" the configuration's, else that of the weights in `folder`, else bfloat16."""
    if name != "auto":
        return parse_dtype(name)
    if spec.dtype is not None:
        return parse_dtype(spec.dtype)
    stored = [] if folder is None else read_headers(folder)
    return next((tensor.dtype for tensor in stored if tensor.dtype in DTYPES.values()), torch.bfloat16)


@dataclass(frozen=True)
class _Assignment:
    """A stored tensor and its destination."""

    tensor: StoredTensor
    target: TensorTarget
    rename: Rename | None


def _load(model: WeightedModel, folder: Path, stored: list[StoredTensor]) -> None:
    assignments = _assign(model, folder, stored)
    with torch.no_grad():
        for file, group in groupby(assignments, key=lambda assignment: assignment.tensor.file):
            data = open_map(file)
            for assignment in group:
                _copy(model.spec, assignment, data)


def _copy(spec: ModelSpec, assignment: _Assignment, data: Any) -> None:
    rename = assignment.rename
    transform = rename.transform if rename else None
    whole = rename is not None and transform is not None and not rename.by_rows
    for first_row, rows in assignment.tensor.runs(data, whole=whole):
        rows = transform(rows, spec) if transform else rows
        wanted = assignment.target.shape
        if rows.shape[1:] != wanted[1:] or rows.dim() != len(wanted):  # a dimension of one entry is elsewhere, or not
            rows = rows.reshape(wanted if rows.numel() == math.prod(wanted) else (-1, *wanted[1:]))
        dtype = assignment.target.dtype
        if dtype is not None and dtype.itemsize == rows.dtype.itemsize == 1 and not dtype.is_floating_point:
            rows = rows.view(dtype)
        try:
            assignment.target.load(rows, first_row)
        except ValueError as error:
            tensor = assignment.tensor
            raise CorruptCheckpoint(f"{tensor.name} in {tensor.file}: {error}") from None


def llama_name(name: str, rules: tuple[Rename, ...]) -> tuple[str, Rename | None]:
    """Llama's name of a checkpoint tensor, and the rule that reshapes it, if any."""
    transforming = None
    for rule in (WITHOUT_HEAD, *rules):
        name, count = re.subn(rule.pattern, rule.replacement, name)
        if count and rule.transform:
            transforming = rule
    return name, transforming


def stored_methods(
    config: Mapping[str, Any],
    spec: ModelSpec,
    stored: list[StoredTensor],
    unquantized: LinearFormat | None = None,
    quantization: str | None = None,
    int8_head: bool = False,
) -> LinearMethods:
    """`linear_methods` of a checkpoint with these tensors, whose own names its configuration may use.

    `int8_head`: as of `LoadOptions`. Raises ConfigError if the output layer is stored quantized.
    """
    unquantized = unquantized or Unquantized()
    methods = linear_methods(config, unquantized, quantization)
    if int8_head:
        methods = imported(INT8_HEAD)(methods, unquantized, tied=spec.tie_word_embeddings)
    return replace(methods, names=_own_names(stored, spec))


def _own_names(stored: list[StoredTensor], spec: ModelSpec) -> dict[str, str]:
    """The checkpoint's names of layers, by Llama's names, where they differ."""
    names = ((llama_name(tensor.name, spec.renames)[0], tensor.name) for tensor in stored)
    paths = ((name.rpartition(".")[0], own.rpartition(".")[0]) for name, own in names)
    return {path: own for path, own in paths if path != own}


def _assign(model: WeightedModel, folder: Path, stored: list[StoredTensor]) -> list[_Assignment]:
    """Pair stored tensors with their targets; CorruptCheckpoint lists all that are missing, unexpected or misshapen."""
    spec = model.spec
    renames = (*spec.renames, *model.build.linear.renames)
    names = {tensor.name: llama_name(tensor.name, renames) for tensor in stored}
    targets = model.tensor_targets({name for name, _ in names.values()})
    optional = {name for name, target in targets.items() if not target.needed}
    harmless = re.compile(
        "|".join((*HARMLESS, *spec.ignored, *((r"^lm_head\.(?!bias$)",) if spec.tie_word_embeddings else ())))
    )
    result: list[_Assignment] = []
    extra: list[str] = []
    twice: list[str] = []
    misshapen: list[str] = []
    mistyped: list[str] = []
    missing = dict(targets)
    for tensor in stored:
        name, rename = names[tensor.name]
        target = targets.get(name)
        if target is None:
            extra += [] if harmless.search(tensor.name) else [f"{tensor.name} {list(tensor.shape)}"]
            continue
        if missing.pop(name, None) is None:
            twice.append(f"{tensor.name}, as {name}")
            continue
        try:
            shape = _shape(tensor, rename, spec)
        except (RuntimeError, LookupError, ValueError):  # no shape that can be reordered
            shape = None
        if shape is None or not _fits(shape, target.shape):
            misshapen.append(
                f"{tensor.name} has {list(shape or tensor.shape)}, the configuration asks for {list(target.shape)}"
            )
        if target.dtype is not None and not _readable(tensor.dtype, target.dtype):
            found, wanted = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, target.dtype))
            mistyped.append(f"{tensor.name} is {found}, the configuration asks for {wanted}")
        result.append(_Assignment(tensor, target, rename))
    _report(
        folder,
        {
            "missing": [f"{name} {list(target.shape)}" for name, target in missing.items() if name not in optional],
            "misshapen": misshapen,
            "mistyped": mistyped,
            "unexpected": extra,
            "there twice": twice,
        },
    )
    return result


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """True if the shapes are equal except for dimensions of one entry, or where the checkpoint decides."""
    if shape == wanted:
        return True
    if any(length == ANY for length in wanted):
        return len(shape) == len(wanted) and all(
            found == length or (length == ANY and found > 0) for found, length in zip(shape, wanted, strict=True)
        )
    return [length for length in shape if length != 1] == [length for length in wanted if length != 1]


def _readable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True if a stored dtype can be read as another: both bytes, or both wider integers or floats.

    Floats of one byte are codes. Exponent-only types count as numbers and as bytes.
    """
    if stored == wanted:
        return True
    if "e8m0" in str(stored):
        return wanted == torch.uint8 or (wanted.is_floating_point and wanted.itemsize > 1)
    if stored.is_floating_point != wanted.is_floating_point or torch.bool in (stored, wanted):
        return False
    bytes_ = [dtype for dtype in (stored, wanted) if dtype.itemsize == 1]
    return not bytes_ or (len(bytes_) == 2 and not stored.is_floating_point)


def _shape(tensor: StoredTensor, rename: Rename | None, spec: ModelSpec) -> tuple[int, ...]:
    if rename is None or rename.transform is None:
        return tensor.shape
    return tuple(rename.transform(torch.empty(tensor.shape, device="meta"), spec).shape)


def _report(folder: Path, faults: Mapping[str, list[str]]) -> None:
    if any(faults.values()):
        raise CorruptCheckpoint(f"weights in {folder} do not fit config.json: {'; '.join(_summaries(faults))}")


def _summaries(faults: Mapping[str, list[str]]) -> Iterator[str]:
    for kind, names in faults.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield f"{len(names)} {kind}: {', '.join(names[:SHOWN])}{more}"


def fill_random(model: WeightedModel) -> None:
    """Fills in seeded random weights of small spread, and norms of one, for measurements of speed and memory."""
    with torch.no_grad():
        for index, module in enumerate(model.loadables()):
            module.fill_random(torch.Generator(model.build.device).manual_seed(index))


def check_memory(weight_bytes: int, spec: ModelSpec, build: Build, all_stages: int | None) -> None:
    """Raises ConfigError if the host's memory does not hold the weights of all ranks that may be there.

    `weight_bytes` are this rank's; `all_stages`, for pipeline stages, is the total of all stages.
    """
    here = processes_here(build.ranks.processes)
    weights = weight_bytes * here
    if all_stages is not None:
        weights = min(weights, all_stages)  # stages are uneven: what is too much is noticed by the fullest
    rotations = 4 * build.max_model_len * sum(rope.dim for rope in {layer.rope for layer in spec.layers} if rope)
    memory = total_memory()
    if weights + 2 * rotations > memory:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB, the positions {2 * rotations / 1e9:.1f} GB, and this "
            f"machine has {memory / 1e9:.1f} GB: use a smaller model, or lower max_model_len"
            + (", or have fewer ranks on a machine (docs/ray.md)" if MOST_PROCESSES in os.environ else "")
        )
