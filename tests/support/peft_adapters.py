"""LoRA adapters of random weights, made and merged by PEFT: the reference that kvern is compared with.

adapter = make_adapter(model_folder, tmp_path / "one", seed=1, r=4, target_modules=["q_proj", "down_proj"])
expected = merge(model_folder, adapter, tmp_path / "merged")      # the checkpoint of the changed model
"""

import copy
import functools
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.support.families import model_class

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


@functools.cache
def _model(folder: Path) -> Any:
    from transformers import AutoConfig

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)


def make_adapter(model: Path, folder: Path, seed: int, **options: Any) -> Path:
    """Save an adapter that changes answers much; `options` are those of PEFT's LoraConfig. Returns the folder."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": EVERYTHING} | options
    adapted = get_peft_model(copy.deepcopy(_model(model)), LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Save the model with the adapter's changes in its own weights. Returns the folder."""
    from peft import PeftModel

    PeftModel.from_pretrained(copy.deepcopy(_model(model)), adapter).merge_and_unload().save_pretrained(folder)
    for file in model.iterdir():
        if not (folder / file.name).exists() and "safetensors" not in file.name:
            shutil.copy(file, folder)
    return folder
