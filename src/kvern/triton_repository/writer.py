"""The folders and files of a model repository."""

import json
from collections.abc import Mapping
from pathlib import Path

from kvern.errors import ConfigError
from kvern.io.files import reason

HERE = Path(__file__).parent
ENSEMBLE_INPUTS = {
    "text_input": ("STRING", "QUERY"),
    "max_tokens": ("INT32", "request_output_len"),
    "stream": ("BOOL", "streaming"),
    "temperature": ("FP32", "temperature"),
    "top_k": ("INT32", "runtime_top_k"),
    "top_p": ("FP32", "runtime_top_p"),
    "min_length": ("INT32", "min_length"),
    "repetition_penalty": ("FP32", "repetition_penalty"),
    "presence_penalty": ("FP32", "presence_penalty"),
    "frequency_penalty": ("FP32", "frequency_penalty"),
    "random_seed": ("UINT64", "random_seed"),
    "beam_width": ("INT32", "beam_width"),
    "length_penalty": ("FP32", "len_penalty"),
    "end_id": ("INT32", "end_id"),
    "pad_id": ("INT32", "pad_id"),
    "stop_words": ("STRING", "stop_words"),
    "bad_words": ("STRING", "bad_words"),
    "return_log_probs": ("BOOL", "return_log_probs"),
}
"""Inputs of the ensemble: their types, and the inputs of its steps that get them."""
ENSEMBLE_OUTPUTS = {
    "text_output": ("STRING", "[ -1 ]"),
    "sequence_length": ("INT32", "[ -1 ]"),
    "output_log_probs": ("FP32", "[ -1, -1 ]"),
    "cum_log_probs": ("FP32", "[ -1 ]"),
}
MANY = ("stop_words", "bad_words")
STEPS = ("preprocessing", "tensorrt_llm", "postprocessing")


def config(parameters: Mapping[str, str]) -> str:
    """Returns a config.pbtxt; `auto_complete_config` of the model adds inputs, outputs and the policy to it."""
    lines = ['backend: "python"', "instance_group [{ kind: KIND_MODEL count: 1 }]"]
    for name, value in parameters.items():
        text = json.dumps(value, ensure_ascii=False)
        lines.append(f'parameters {{ key: "{name}" value {{ string_value: {text} }} }}')
    return "\n".join(lines) + "\n"


def ensemble_config() -> str:
    """Returns the config.pbtxt of preprocessing, model and postprocessing, one after the other."""
    lines = ['platform: "ensemble"', "max_batch_size: 1"]
    for name, (kind, _) in ENSEMBLE_INPUTS.items():
        rest = "" if name in ("text_input", "max_tokens") else " optional: true"
        dims = "[ -1 ]" if name in MANY else "[ 1 ]"
        lines.append(f'input {{ name: "{name}" data_type: TYPE_{kind} dims: {dims}{rest} }}')
    for name, (kind, dims) in ENSEMBLE_OUTPUTS.items():
        lines.append(f'output {{ name: "{name}" data_type: TYPE_{kind} dims: {dims} }}')
    passed = {theirs: name for name, (_, theirs) in ENSEMBLE_INPUTS.items() if name != "text_input"}
    outputs = ("output_log_probs", "cum_log_probs")
    steps = [
        ("preprocessing", {"QUERY": "text_input"}, {"INPUT_ID": "_ids", "REQUEST_INPUT_LEN": "_length"}),
        (
            "tensorrt_llm",
            {"input_ids": "_ids", "input_lengths": "_length", **passed},
            {"output_ids": "_tokens", "sequence_length": "sequence_length", "text_output": "_text"}
            | {name: name for name in outputs},
        ),
        (
            "postprocessing",
            {"TOKENS_BATCH": "_tokens", "SEQUENCE_LENGTH": "sequence_length", "TEXT": "_text"},
            {"OUTPUT": "text_output"},
        ),
    ]
    lines.append("ensemble_scheduling {")
    for model, inputs, found in steps:
        lines.append(f'  step {{ model_name: "{model}" model_version: -1')
        lines += [f'    input_map {{ key: "{theirs}" value: "{ours}" }}' for theirs, ours in inputs.items()]
        lines += [f'    output_map {{ key: "{theirs}" value: "{ours}" }}' for theirs, ours in found.items()]
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def like_vllm(name: str, parameters: Mapping[str, str]) -> dict[str, str]:
    """Returns the files of one model by their paths: texts and conversations, as Triton's vLLM backend has them."""
    files = {f"{name}/1/{file}": _text(file) for file in ("model.py", "kvern_model.py")}
    return {f"{name}/config.pbtxt": config(parameters), **files}


def like_tensorrtllm(name: str, parameters: Mapping[str, str]) -> dict[str, str]:
    """Returns the files of four models by their paths: the ensemble `name` and its steps, as Triton's TensorRT-LLM
    backend has them. Raises ConfigError for the name of a step."""
    if name in STEPS:
        raise ConfigError(f"name is {name!r}: a step of the ensemble has this name; give the ensemble another --name")
    found = {f"{name}/config.pbtxt": ensemble_config(), f"{name}/1/README": "The steps do the work.\n"}
    for step in ("preprocessing", "postprocessing"):
        found[f"{step}/config.pbtxt"] = config({"step": step, **parameters})
        found[f"{step}/1/model.py"] = _text("text_step.py")
    found["tensorrt_llm/config.pbtxt"] = config(parameters)
    found["tensorrt_llm/1/model.py"] = _text("tokens_model.py")
    for step in STEPS:
        found[f"{step}/1/kvern_model.py"] = _text("kvern_model.py")
    return found


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def write(repository: Path, files: Mapping[str, str], overwrite: bool = False) -> list[Path]:
    """Writes the files of models and returns the models' folders. Raises ConfigError."""
    folders = list(dict.fromkeys(repository / name.partition("/")[0] for name in files))
    for folder in folders:
        if folder.exists() and not overwrite:
            raise ConfigError(f"{folder} exists: choose another --name or --out, or replace its files by --overwrite")
    for name, text in files.items():
        path = repository / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {reason(error)}") from error
    return folders
