"""Tiny random models that read images, their pictures, and what transformers makes of a prompt with images."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy
import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.support import gemma_vision
from tests.support import tiled_vision_models as tiled

TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.content is string -%}
{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %};{% endfor %}"""
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """One kind of model. `special` tokens begin the vocabulary, and `mark` stands for an image in a prompt.

    `written` is what the chat template writes for an image; `unit` the pixels on a side that a token covers.
    `longest_span`: the most tokens of an image that see each other.
    """

    config: Callable[[], Any]
    processor: Callable[[], Any]
    special: Sequence[str]
    mark: str
    written: str
    unit: int
    longest_span: int = 0
    inputs: Callable[[Sequence[Any]], dict[str, Tensor]] | None = None
    """What a model reads of processed images, if these are pieces of one size, which `in_one_row` finds."""

    @property
    def image_id(self) -> int:
        return self.special.index(self.mark)


def _mistral3() -> Any:
    from transformers import Mistral3Config, MistralConfig, PixtralVisionConfig

    text = MistralConfig(**TEXT, num_hidden_layers=2, head_dim=16, sliding_window=None)
    vision = PixtralVisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=140,
        patch_size=14,
    )
    return Mistral3Config(text_config=text, vision_config=vision, image_token_index=3, spatial_merge_size=2)


def _pixtral_processor() -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": 140}, patch_size={"height": 28, "width": 28})


def _qwen3_5() -> Any:
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "mrope_interleaved": True}
    text = TEXT | {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": rope | {"mrope_section": [4, 4, 4]},
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "depth": 2,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    return AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def _qwen3_vl(kind: str = "qwen3_vl", **experts: Any) -> Any:
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    text = TEXT | {"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope} | experts
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "depth": 3,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def _qwen3_vl_moe() -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    return _qwen3_vl("qwen3_vl_moe", **experts)


def _qwen2_vl() -> Any:
    vision = {"embed_dim": 48, "hidden_size": 64, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
    return _qwen2("qwen2_vl", vision)


def _qwen2_5_vl() -> Any:
    vision = {"hidden_size": 48, "out_hidden_size": 64, "intermediate_size": 80, "depth": 3, "num_heads": 3}
    return _qwen2("qwen2_5_vl", vision | {"window_size": 56, "fullatt_block_indexes": [1]})


def _qwen2(model_type: str, vision: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    rope = {"type": "mrope", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = TEXT | {"num_hidden_layers": 2, "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 2}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    return AutoConfig.for_model(model_type, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def _glm(model_type: str, text: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    vision = {"hidden_size": 48, "intermediate_size": 72, "depth": 2, "num_heads": 3, "out_hidden_size": 64}
    return AutoConfig.for_model(
        model_type,
        text_config=TEXT | {"num_hidden_layers": 2, "rope_parameters": rope} | text,
        vision_config=vision | {"image_size": 84},
        tie_word_embeddings=False,
        image_token_id=5,
        video_token_id=6,
    )


def _glm4v_moe() -> Any:
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
    return _glm("glm4v_moe", experts | {"first_k_dense_replace": 1, "head_dim": 16})


def _glm_processor() -> Any:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    return Glm4vImageProcessorPil(size={"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 168 * 168})


def _kimi_k25() -> Any:
    from transformers import AutoConfig

    latent = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 1}
    text = TEXT | latent | experts | {"topk_group": 1, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    vision = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
    return AutoConfig.for_model(
        "kimi_k25",
        text_config=text | {"model_type": "deepseek_v3", "num_key_value_heads": 4},
        vision_config=vision | {"pos_emb_height": 6, "pos_emb_width": 6},
        projection_hidden_size=48,
        tie_word_embeddings=False,
        image_token_id=5,
        video_token_id=6,
    )


class KimiProcessor:
    """What `Kimi_K25ImageProcessor` says that it does, by Pillow, which its own class does not use."""

    size: ClassVar = {"max_height": 10, "max_width": 10}
    max_patches = 80

    def to_dict(self) -> dict[str, Any]:
        colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
        return colours | {"size": self.size, "max_patches": self.max_patches}

    def __call__(
        self, image: Image.Image, do_rescale: bool = True, do_normalize: bool = True, return_tensors: str = "pt"
    ) -> dict[str, Tensor]:
        patches = max(image.height // 14, 1) * max(image.width // 14, 1)
        longest = self.size["max_height"] * 14
        scale = min(1.0, (self.max_patches / patches) ** 0.5, longest / image.height, longest / image.width)
        wide, high = (min(max(1, int(side * scale)), longest) for side in image.size)
        canvas = numpy.zeros(((high + 27) // 28 * 28, (wide + 27) // 28 * 28, 3), dtype=numpy.uint8)
        canvas[:high, :wide] = numpy.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
        pixels = torch.from_numpy(canvas).float().permute(2, 0, 1)
        pixels = (pixels / 255 - 0.5) / 0.5 if do_rescale and do_normalize else pixels
        squares = pixels.unflatten(2, (-1, 14)).unflatten(1, (-1, 14)).permute(1, 3, 0, 2, 4)
        grid = torch.tensor([[1, *squares.shape[:2]]])
        return {"pixel_values": squares.flatten(0, 1), "image_grid_thw": grid}


def _qwen_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 48 * 48, "longest_edge": 160 * 160}
    return Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def _qwen2_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 196 * 196})


QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|vid|>"]
GLM = ["<|endoftext|>", "<|user|>", "<|eos|>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"]
KIMI = ["[BOS]", "[PAD]", "[EOS]", "<|media_begin|>", "<|media_end|>", "<|media_pad|>", "<|vid|>", "<|media_content|>"]
FAMILIES = {
    "mistral3": Family(
        _mistral3,
        _pixtral_processor,
        ["<unk>", "<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "[IMG]",
        "[IMG]",
        28,
    ),
    "qwen3_vl": Family(
        _qwen3_vl, _qwen_processor, QWEN, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", 32
    ),
    "qwen3_vl_moe": Family(
        _qwen3_vl_moe, _qwen_processor, QWEN, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", 32
    ),
    "qwen3_5": Family(
        _qwen3_5, _qwen_processor, QWEN, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", 32
    ),
    "qwen2_vl": Family(
        _qwen2_vl, _qwen2_processor, QWEN, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", 28
    ),
    "gemma3": Family(
        partial(gemma_vision.gemma3, TEXT),
        gemma_vision.gemma3_processor,
        gemma_vision.GEMMA3,
        "<image_soft_token>",
        "<start_of_image>",
        16,
        16,
    ),
    "gemma4": Family(
        partial(gemma_vision.gemma4, TEXT, use_bidirectional_attention="vision"),
        gemma_vision.gemma4_processor,
        gemma_vision.GEMMA4,
        "<|image|>",
        "<|image|>",
        12,
        gemma_vision.MOST_TOKENS,
    ),
    "gemma4_e": Family(
        partial(gemma_vision.gemma4, TEXT, hidden_size_per_layer_input=16, num_kv_shared_layers=2),
        gemma_vision.gemma4_processor,
        gemma_vision.GEMMA4,
        "<|image|>",
        "<|image|>",
        12,
    ),
    "qwen2_5_vl": Family(
        _qwen2_5_vl, _qwen2_processor, QWEN, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", 28
    ),
    "glm4v": Family(
        lambda: _glm("glm4v", {}), _glm_processor, GLM, "<|image|>", "<|begin_of_image|><|image|><|end_of_image|>", 28
    ),
    "glm4v_moe": Family(
        _glm4v_moe, _glm_processor, GLM, "<|image|>", "<|begin_of_image|><|image|><|end_of_image|>", 28
    ),
    "kimi_k25": Family(
        _kimi_k25,
        KimiProcessor,
        KIMI,
        "<|media_pad|>",
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        28,
    ),
    "llava": Family(
        tiled.llava, tiled.llava_processor, tiled.LLAVA, "<image>", "<image>", 8, inputs=tiled.piece_inputs
    ),
    "llava_siglip": Family(
        tiled.llava_siglip, tiled.siglip_processor, tiled.LLAVA, "<image>", "<image>", 8, inputs=tiled.piece_inputs
    ),
    "llava_next": Family(
        tiled.llava_next, tiled.llava_next_processor, tiled.LLAVA, "<image>", "<image>", 8, inputs=tiled.sized_inputs
    ),
    "internvl": Family(
        tiled.internvl,
        tiled.internvl_processor,
        tiled.INTERNVL,
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        16,
        inputs=tiled.piece_inputs,
    ),
    "smolvlm": Family(
        tiled.smolvlm, tiled.smolvlm_processor, tiled.SMOLVLM, "<image>", "<image>", 16, inputs=tiled.tile_inputs
    ),
    "idefics3": Family(
        tiled.idefics3, tiled.idefics_processor, tiled.IDEFICS, "<image>", "<image>", 16, inputs=tiled.tile_inputs
    ),
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    generator = numpy.random.default_rng((seed, width, height))
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=numpy.uint8))


def make_vision_model(kind: str, folder: Path, family: Family | None = None) -> Path:
    """Save a model of a family, or of a changed one, into `folder`."""
    from transformers import AutoModelForImageTextToText

    family = family or FAMILIES[kind]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(family.config(), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1:
                parameter.mul_(6)
            elif not name.endswith(("A_log", "dt_bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
        gemma_vision.set_constants(model)
    model.save_pretrained(folder)
    settings = family.processor().to_dict()
    kept = {
        "size",
        "image_mean",
        "image_std",
        "resample",
        "max_patches",
        "max_soft_tokens",
        "pooling_kernel_size",
        *tiled.SETTINGS,
    }
    given = {name: settings[name] for name in sorted(kept) if settings.get(name) is not None}
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    _save_tokenizer(family, folder)
    return folder


def _save_tokenizer(family: Family, folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["what is in this picture and in that one"] * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": family.special[2]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", family.written))


def expected_pixels(kind: str, image: Image.Image) -> Tensor | list[Tensor]:
    """The pixels of transformers' processor before they are normalized, uint8 `[channels, height, width]`.

    A list of pieces: of a family that reads them.
    """
    found = FAMILIES[kind].processor()(image, do_rescale=False, do_normalize=False, return_tensors="pt")
    if FAMILIES[kind].inputs is not None:
        return list(tiled.in_one_row(found).to(torch.uint8))
    if kind in ("mistral3", "gemma3"):
        pixels: Tensor = found["pixel_values"][0]
    elif kind.startswith("gemma4"):
        pixels = gemma_vision.gemma4_pixels(found)
    elif kind == "kimi_k25":  # patches row by row: [rows, columns, channels, pixels]
        _, high, wide = found["image_grid_thw"][0].tolist()
        squares = found["pixel_values"].unflatten(0, (high, wide)).permute(2, 0, 3, 1, 4)
        pixels = squares.flatten(3).flatten(1, 2)
    else:  # patches in the order of tokens: [rows, columns, in a row, in a column, channels, frames, pixels]
        _, high, wide = found["image_grid_thw"][0].tolist()
        side = int((found["pixel_values"].shape[1] // 6) ** 0.5)
        blocks = found["pixel_values"].view(high // 2, wide // 2, 2, 2, 3, 2, side, side)[:, :, :, :, :, 0]
        pixels = blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, high * side, wide * side)
    return pixels.to(torch.uint8)


@functools.lru_cache(maxsize=4)
def _reference(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def expected_logprobs(kind: str, folder: Path, token_ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
    """Log-probabilities `[T, vocabulary]` of the token after each of `token_ids`."""
    family = FAMILIES[kind]
    processor, tokens = family.processor(), torch.tensor([list(token_ids)])
    found = [processor(image, return_tensors="pt") for image in images]
    given: dict[str, Tensor] = {}
    if family.inputs is not None and images:
        given = family.inputs(found)
    elif kind == "mistral3" and images:
        sizes = [tuple(map(int, each["image_sizes"][0])) for each in found]
        pixels = torch.zeros(len(images), 3, max(high for high, _ in sizes), max(wide for _, wide in sizes))
        for number, (each, (high, wide)) in enumerate(zip(found, sizes, strict=True)):
            pixels[number, :, :high, :wide] = each["pixel_values"][0]
        given = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
    elif kind == "gemma3" and images:
        pixels = torch.cat([torch.as_tensor(each["pixel_values"]) for each in found])
        given = {"pixel_values": pixels, "token_type_ids": (tokens == family.image_id).int()}
    elif kind.startswith("gemma4") and images:
        given = gemma_vision.gemma4_inputs(found)
        given["mm_token_type_ids"] = (tokens == family.image_id).int()
    elif images:
        given = {name: torch.cat([each[name] for each in found]) for name in ("pixel_values", "image_grid_thw")}
        given["mm_token_type_ids"] = (tokens == family.image_id).int()
    with torch.inference_mode():
        logits: Tensor = _reference(folder)(input_ids=tokens, **given).logits[0]
    return logits.log_softmax(-1)
