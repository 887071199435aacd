"""Tiny random models that read pictures of one size, cut or cropped from an image, and their inputs in transformers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TEXT = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
VIT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 8,
}
SMALL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
IDEFICS = [*SMALL, "<image>", "<fake_token_around_image>"]
SMOLVLM = [*IDEFICS, "<global-img>", *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))]
SQUARE = {"height": 32, "width": 32}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
SETTINGS = ("max_image_size", "do_image_splitting", "crop_size", "image_grid_pinpoints", "max_patches")
"""The names of settings that these families read beside those of others."""
LLAVA = [*SMALL, "<image>"]
INTERNVL = [*SMALL, "<IMG_CONTEXT>", "<img>", "</img>"]
MEAN: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.4, 0.6]}


def idefics3() -> Any:
    """Its patches leave pixels over at the edges of tiles."""
    return _idefics("idefics3", 36)


def smolvlm() -> Any:
    return _idefics("smolvlm", 32)


def _idefics(kind: str, side: int) -> Any:
    from transformers import AutoConfig

    vision = {**VIT, "hidden_act": "gelu_pytorch_tanh", "image_size": side}
    return AutoConfig.for_model(
        kind, text_config=TEXT, vision_config=vision, image_token_id=3, tie_word_embeddings=False, pad_token_id=0
    )


def smolvlm_processor(edge: int = 96, tile: int = 32) -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(size={"longest_edge": edge}, max_image_size={"longest_edge": tile}, **MEAN)


def idefics_processor() -> Any:
    """Fewer tiles: the place of each is many tokens."""
    return smolvlm_processor(72, 36)


def llava() -> Any:
    return _llava("llava", {"model_type": "clip_vision_model", **VIT})


def llava_siglip() -> Any:
    text = TEXT | {"model_type": "qwen2"}
    vision = {"model_type": "siglip_vision_model", **VIT}
    return _llava("llava", vision, text, vision_feature_select_strategy="full", vision_feature_layer=-1)


def llava_next() -> Any:
    text = TEXT | {"model_type": "mistral", "sliding_window": None}
    return _llava("llava_next", {"model_type": "clip_vision_model", **VIT}, text, image_grid_pinpoints=PINPOINTS)


def _llava(kind: str, vision: dict[str, Any], text: dict[str, Any] = TEXT, **settings: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_index=3, **settings)


def llava_processor() -> Any:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    return LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, **MEAN)


def siglip_processor() -> Any:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size=SQUARE, **MEAN)


def llava_next_processor() -> Any:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    return LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN
    )


def internvl() -> Any:
    from transformers import AutoConfig

    vision = {**VIT, "image_size": [32, 32], "patch_size": [8, 8], "attention_bias": True, "use_qk_norm": True}
    text = TEXT | {"model_type": "qwen2"}
    return AutoConfig.for_model(
        "internvl", text_config=text, vision_config=vision, image_token_id=3, tie_word_embeddings=False
    )


def internvl_processor(most: int = 6) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    return GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=most, **MEAN)


def piece_inputs(found: Sequence[Any]) -> dict[str, Tensor]:
    """All pieces of all images behind each other."""
    return {"pixel_values": torch.cat([each["pixel_values"] for each in found])}


def sized_inputs(found: Sequence[Any]) -> dict[str, Tensor]:
    """The pieces of each image, as many as of that with the most, and the sizes of the images."""
    pieces = [each["pixel_values"][0] for each in found]
    most = max(map(len, pieces))
    padded = torch.stack([torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 0, 0, most - len(each))) for each in pieces])
    return {"pixel_values": padded, "image_sizes": torch.cat([each["image_sizes"] for each in found])}


def tile_inputs(found: Sequence[Any]) -> dict[str, Tensor]:
    """All tiles of all images behind each other in one row."""
    return {name: torch.cat([each[name] for each in found], 1) for name in ("pixel_values", "pixel_attention_mask")}


def in_one_row(found: Any) -> Tensor:
    """The pieces of an image, `[pieces, channels, height, width]`."""
    pixels: Tensor = found["pixel_values"]
    return pixels if pixels.dim() == 4 else pixels[0]
