"""Idefics 3 (https://arxiv.org/abs/2408.12637) and SmolVLM: SigLIP over tiles, and a language model like Llama's."""

from dataclasses import replace

from kvern.errors import UnsupportedModel
from kvern.models.families.llama import llama
from kvern.models.families.vit import Vit, clip_renames
from kvern.models.registry import Config
from kvern.models.text_parts import text_config, text_part
from kvern.spec.model import ModelSpec, Rename
from kvern.spec.vision import ImageTokens, MatrixSpec, VisionSpec

AROUND = "<fake_token_around_image>"


def idefics3(config: Config) -> ModelSpec:
    """The language model. Raises UnsupportedModel."""
    text = text_config(config, "llama")
    if text["model_type"] != "llama":
        raise UnsupportedModel(f"text_config's model_type is {text['model_type']!r:.60}: llama is supported")
    spec = text_part(config, llama(text), "vision_model", "connector")
    return replace(spec, renames=(Rename(r"^model\.text_model\.", "model."), *spec.renames))


def idefics3_vision(config: Config) -> VisionSpec:
    """The encoder of images. Raises UnsupportedModel."""
    vit = Vit.of(config["vision_config"], "idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm")
    renames = (
        *clip_renames("vision_model"),
        Rename(r"^model\.connector\.modality_projection\.proj\.", "model.projector.linear."),
    )
    return VisionSpec(
        vit.tower(vit.layers, renames, config.get("dtype") or config.get("torch_dtype")),
        vit.patch,
        None,
        MatrixSpec(int(config["text_config"].get("hidden_size", 4096)), int(config.get("scale_factor", 2))),
        ImageTokens(
            "<image>",
            "\n",
            AROUND,
            begin=f"{AROUND}<global-img>",
            tile=f"{AROUND}<row_{{row}}_col_{{column}}>",
            special=(AROUND,),
        ),
        int(config.get("image_token_id", 128257)),
        "kvern.images.idefics:idefics3",
        table=vit.patches,
        patch_bias=True,
        last_norm=True,
    )
