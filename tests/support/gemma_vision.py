"""Tiny random models of Gemma that read images, and what transformers makes of their images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GEMMA4 = ["<pad>", "<eos>", "<bos>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>"]
MOST_TOKENS = 12
"""The most tokens of an image of Gemma 4, fewer than are published."""
WINDOW = 8
"""The window of some layers, narrower than an image."""


def gemma4(text: dict[str, Any], **own: Any) -> Any:
    """Gemma 4 with what is its `own` in the language model, clipped products and standardized rows."""
    from transformers import Gemma4Config, Gemma4TextConfig, Gemma4VisionConfig

    given = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": text["vocab_size"],
        "hidden_size_per_layer_input": 0,
    }
    vision = Gemma4VisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        patch_size=4,
        position_embedding_size=3 * MOST_TOKENS,
        use_clipped_linears=True,
        standardize=True,
    )
    ids = {"image_token_id": 5, "video_token_id": 6, "audio_token_id": 7, "boi_token_id": 3, "eoi_token_id": 4}
    return Gemma4Config(text_config=Gemma4TextConfig(**text | given | own), vision_config=vision, **ids)


GEMMA3 = ["<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
PATCH, SIDE = 8, 64


def gemma3(text: dict[str, Any]) -> Any:
    """Gemma 3 with 16 tokens for each image."""
    from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

    given = {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
    }
    vision = SiglipVisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    ids = {"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5}
    return Gemma3Config(
        text_config=Gemma3TextConfig(**text | given), vision_config=vision, mm_tokens_per_image=16, **ids
    )


def gemma3_processor() -> Any:
    """The image processor."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})


def gemma4_processor() -> Any:
    """The image processor, which knows larger images alone."""
    from transformers.models.gemma4 import image_processing_pil_gemma4 as module

    module._SUPPORTED_SOFT_TOKENS = (MOST_TOKENS,)
    return module.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=MOST_TOKENS)


def set_constants(model: torch.nn.Module) -> None:
    """Give matrices, bounds and standards that are constant numbers that change results."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.min() == parameter.max():
            parameter.normal_(std=0.2)
    for name, buffer in model.named_buffers():
        kind = name.rpartition(".")[2]
        if kind.endswith(("_min", "_max")):
            buffer.copy_((-1) ** kind.endswith("min") * (0.5 + torch.rand(())))
        elif kind in ("std_bias", "std_scale"):
            buffer.copy_(0.5 + torch.rand_like(buffer))


def gemma4_pixels(found: Any) -> Tensor:
    """The pixels `[channels, height, width]` of a processor's patches."""
    positions = found["image_position_ids"][0]
    real = positions[:, 0] >= 0
    columns, rows = (positions.max(0).values + 1).tolist()
    patches = found["pixel_values"][0][real]
    side = int((patches.shape[1] // 3) ** 0.5)
    squares = patches.view(rows, columns, side, side, 3)
    return squares.permute(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)


def gemma4_inputs(found: Sequence[Any]) -> dict[str, Tensor]:
    """The arguments of transformers' model for images."""
    return {name: torch.cat([each[name] for each in found]) for name in ("pixel_values", "image_position_ids")}
