"""Tiny random encoders of texts and images into one space, and what transformers makes of both."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = 318, 319
NAFLEX: dict[str, Any] = {"patch_size": 8, "max_num_patches": 20}
LENGTHS = {"clip": 40, "siglip": 24, "siglip2": 24}
"""The most tokens of a text."""
_TEXT = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
_OF_KIND: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ({"projection_dim": 20}, {"projection_dim": 20}, {"projection_dim": 20}),
    "siglip": ({"projection_size": 32}, {}, {}),
    "siglip2": ({"projection_size": 32}, {"num_patches": 16}, {}),
}
"""Settings of texts, of images, and of the whole."""


def make_two_towers(kind: str, folder: Path, *, end: int = END, side: int = 32) -> Path:
    """Save a model into `folder`; `end` is the token that ends texts by its configuration.

    Pictures of CLIP and SigLIP have `side` pixels on a side.
    """
    from transformers import AutoConfig, AutoModel

    text, vision, whole = _OF_KIND[kind]
    vision = vision | {"image_size": side} if kind != "siglip2" else vision
    text = _TEXT | {"max_position_embeddings": LENGTHS[kind], "eos_token_id": end} | text
    config = AutoConfig.for_model(kind, text_config=text, vision_config=_VISION | vision, **whole)
    torch.manual_seed(0)
    kind_of_model: Any = AutoModel
    model = kind_of_model.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(noise * 0.3)
            else:
                strong = 3 if "position" in name or "in_proj" in name else 1
                parameter.copy_(noise * strong * parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    processor_of(kind, side).save_pretrained(folder)
    _save_tokenizer(kind, folder)
    return folder


def processor_of(kind: str, pixels: int = 32) -> Any:
    """The image processor of a kind, as transformers has it with Pillow."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    side: dict[str, Any] = {"height": pixels, "width": pixels}
    if kind == "clip":
        return CLIPImageProcessorPil(size={"shortest_edge": pixels + 3}, crop_size=side)
    return SiglipImageProcessorPil(size=side) if kind == "siglip" else Siglip2ImageProcessorPil(**NAFLEX)


def _save_tokenizer(kind: str, folder: Path) -> None:
    begin, end = "<|startoftext|>", "<|endoftext|>"
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BEGIN, initial_alphabet=alphabet, show_progress=False)
    result.train_from_iterator(["a photo of a cat, two dogs and the third bird", "of another photo"] * 4, trainer)
    filler = [f"<filler_{number}>" for number in range(BEGIN - result.get_vocab_size())]
    result.add_special_tokens([*filler, begin, end])
    template = f"{begin} $A {end}" if kind == "clip" else f"$A {end}"
    result.post_processor = processors.TemplateProcessing(template, None, [(begin, BEGIN), (end, END)])
    result.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "pad_token": end}))


@functools.lru_cache(maxsize=4)
def reference(folder: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def expected_image(folder: Path, image: Any) -> list[float]:
    """The normalized vector of one picture of Pillow."""
    model = reference(folder)
    processor = processor_of(model.config.model_type, getattr(model.config.vision_config, "image_size", 32))
    with torch.inference_mode():
        found = model.get_image_features(**processor(image, return_tensors="pt")).pooler_output[0]
    vector: list[float] = torch.nn.functional.normalize(found, dim=0).tolist()
    return vector


def expected_text(folder: Path, token_ids: Sequence[int]) -> list[float]:
    """The normalized vector of one text alone, padded if the model reads such."""
    model = reference(folder)
    padded = [*token_ids]
    if model.config.model_type != "clip":
        padded += [END] * (LENGTHS[model.config.model_type] - len(padded))
    with torch.inference_mode():
        found = model.get_text_features(torch.tensor([padded])).pooler_output[0]
    vector: list[float] = torch.nn.functional.normalize(found, dim=0).tolist()
    return vector
