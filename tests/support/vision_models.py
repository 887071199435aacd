"""Tiny random models that read images, their pictures, and what transformers makes of a prompt with images."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

SPECIAL = ["<unk>", "<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
TEMPLATE = """<s>{% for message in messages %}{{ message.role }}: {% if message.content is string -%}
{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %};{% endfor %}"""
EDGE, PATCH, MERGE = 140, 14, 2


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    generator = numpy.random.default_rng((seed, width, height))
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=numpy.uint8))


def make_mistral3(folder: Path) -> Path:
    """Save a Mistral 3 with an encoder of images into `folder`."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, MistralConfig, PixtralVisionConfig

    text = MistralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        sliding_window=None,
    )
    vision = PixtralVisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=EDGE,
        patch_size=PATCH,
    )
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=3, spatial_merge_size=MERGE)
    torch.manual_seed(0)
    model = Mistral3ForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 8 if parameter.dim() > 1 else parameter + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    settings = _processor().to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["what is in this picture and in that one"] * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _processor() -> Any:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    unit = PATCH * MERGE
    return PixtralImageProcessorPil(size={"longest_edge": EDGE}, patch_size={"height": unit, "width": unit})


def expected_pixels(image: Image.Image) -> Tensor:
    """The pixels of transformers' processor before they are normalized, uint8 `[channels, height, width]`."""
    found = _processor()(image, do_rescale=False, do_normalize=False, return_tensors="pt")
    pixels: Tensor = found["pixel_values"][0]
    return pixels.to(torch.uint8)


@functools.lru_cache(maxsize=2)
def _reference(folder: Path) -> Any:
    from transformers import Mistral3ForConditionalGeneration

    return Mistral3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def expected_logprobs(folder: Path, token_ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
    """Log-probabilities `[T, vocabulary]` of the token after each of `token_ids`."""
    processor = _processor()
    found = [processor(image, return_tensors="pt") for image in images]
    sizes = [tuple(map(int, each["image_sizes"][0])) for each in found]
    pixels = torch.zeros(len(images), 3, max(high for high, _ in sizes), max(wide for _, wide in sizes))
    for number, (each, (high, wide)) in enumerate(zip(found, sizes, strict=True)):
        pixels[number, :, :high, :wide] = each["pixel_values"][0]
    given = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)} if images else {}
    with torch.inference_mode():
        logits: Tensor = _reference(folder)(input_ids=torch.tensor([list(token_ids)]), **given).logits[0]
    return logits.log_softmax(-1)
