"""A picture and its answer on a CPU: kvern beside transformers with the same random weights, in turn, in one run.

Each engine lives in a process of its own, with as many threads, and they take turns, picture after picture, so that
whatever else the machine does hits all of them alike. Ratios are of medians over the rounds, of wall time and of
processor time, which other programs disturb less. Every picture is new. The cases are

    text     a prompt of text alone, as long as that with a picture, to its first token
    first    a prompt with a picture of 448 x 448, to its first token: what it takes beyond `text` is the encoder's
    answer   another such picture, to its 32nd token
    decode   text alone, to its 32nd token: what an encoder beside the model must not slow down
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDE, LENGTH, QUESTION = 448, 32, 16
IMAGE_ID, START_ID, END_ID, VOCABULARY = 5, 3, 4, 32000
ROWS_OF_IMAGE = (SIDE // 32) ** 2
CASES = {"text": (False, 1), "first": (True, 1), "answer": (True, LENGTH), "decode": (False, LENGTH)}
"""Whether there is a picture, and how many tokens are generated."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
ROPES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"mrope_section": [24, 20, 20]},
    "qwen3_5": {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
}
TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_5": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    },
}
"""Qwen3-0.6B's and Qwen3.5-0.8B's layers with a smaller vocabulary."""
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
}
KVERN: dict[str, dict[str, Any]] = {
    "kvern float32": {"dtype": "float32"},
    "kvern bfloat16": {"dtype": "bfloat16"},
    "kvern int8": {"dtype": "bfloat16", "quantization": "int8"},
    "kvern int8 float32": {"dtype": "float32", "quantization": "int8"},
    "kvern float32 without encoder": {"dtype": "float32"},
    "kvern bfloat16 without encoder": {"dtype": "bfloat16"},
}
"""Options of each engine of kvern's."""
ENGINES = ("transformers float32", "transformers bfloat16", *KVERN)
Answer = Callable[[bytes | None, list[int], int], list[int]]
"""From a file, a prompt and a number of tokens to these tokens, greedy."""


def make_model(folder: Path, family: str) -> None:
    """Write the random checkpoint in bfloat16, and beside it one without what reads images."""
    if (folder / "text" / "config.json").exists():
        return
    import tokenizers
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    text = TEXT[family] | {"vocab_size": VOCABULARY, "rope_parameters": ROPE | ROPES[family]}
    taps = {"deepstack_visual_indexes": [8, 16, 24]} if family == "qwen3_vl" else {}
    ids = {"image_token_id": IMAGE_ID, "video_token_id": 6, "vision_start_token_id": START_ID}
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=VISION | taps, vision_end_token_id=END_ID, **ids
    )
    model: Any = AutoModelForImageTextToText
    model.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    settings = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "resample": 3}
    (folder / "preprocessor_config.json").write_text(
        json.dumps(settings | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    )
    words = {f"w{number}": number for number in range(VOCABULARY)}
    words |= {"<|image_pad|>": words.pop(f"w{IMAGE_ID}"), "<|vision_start|>": words.pop(f"w{START_ID}")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["<|image_pad|>", "<|vision_start|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    without = folder / "text"
    without.mkdir()
    for file in (*folder.glob("*.safetensors*"), folder / "tokenizer.json", folder / "config.json"):
        (without / file.name).symlink_to(file)


def picture(seed: int) -> bytes:
    """A PNG file of noise."""
    import numpy
    from PIL import Image

    stream = io.BytesIO()
    pixels = numpy.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def prompt(seed: int, has_picture: bool) -> list[int]:
    draw = random.Random(seed)
    words = [draw.randrange(100, VOCABULARY) for _ in range(ROWS_OF_IMAGE + QUESTION)]
    image = [IMAGE_ID] * ROWS_OF_IMAGE if has_picture else words[QUESTION:]
    return [words[0], START_ID, *image, END_ID, *words[1:QUESTION]]


def kvern_engine(folder: Path, threads: int, name: str) -> Answer:
    from kvern import LLM, PromptInput, SamplingParams

    where = folder / "text" if name.endswith("without encoder") else folder
    llm = LLM(str(where), threads=threads, max_model_len=1024, max_batch_requests=1, **KVERN[name])

    def answer(file: bytes | None, prompt: list[int], length: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        [output] = llm.generate(PromptInput(prompt, () if file is None else (file,)), params)
        return list(output.outputs[0].token_ids)

    return answer


def transformers_engine(folder: Path, threads: int, dtype: str) -> Answer:
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(threads)
    kind: Any = AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, patch_size=16)

    def answer(file: bytes | None, prompt: list[int], length: int) -> list[int]:
        ids = torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if file is not None:
            given |= processor(Image.open(io.BytesIO(file)).convert("RGB"), return_tensors="pt")
            given["mm_token_type_ids"] = (ids == IMAGE_ID).int()
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            found: list[int] = model.generate(**given, **options)[0, len(prompt) :].tolist()
        return found

    return answer


def serve(name: str, folder: Path, threads: int) -> None:
    """Answer a line of JSON with another: an engine's process."""
    kind, _, dtype = name.partition(" ")
    is_peer = kind == "transformers"
    answer = transformers_engine(folder, threads, dtype) if is_peer else kvern_engine(folder, threads, name)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case, seed = json.loads(line)
        has_picture, length = CASES[case]
        file, asked = picture(seed) if has_picture else None, prompt(seed, has_picture)
        wall, processor = time.perf_counter(), time.process_time()
        tokens = answer(file, asked, length)
        spent = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps({"wall": spent[0], "cpu": spent[1], "tokens": tokens}), flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, name, str(folder), str(threads)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONWARNINGS="ignore")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, case: str, seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, seed]) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = self._read()
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The seconds of all rounds by engine, case and clock, and how many tokens are as the first engine's."""
    make_model(arguments.model, arguments.family)
    engines = {name: Engine(name, arguments.model, arguments.threads) for name in arguments.engines}
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {}
    same: dict[str, list[bool]] = {name: [] for name in engines}
    try:
        for number in range(arguments.rounds + 1):
            for case in arguments.cases:
                seed = 100 * number + list(CASES).index(case)
                found = {
                    name: engine.ask(case, seed)
                    for name, engine in engines.items()
                    if not (CASES[case][0] and name.endswith("without encoder"))
                }
                first = next(iter(found.values()))["tokens"]
                for name, each in found.items():
                    same[name] += [a == b for a, b in zip(first, each["tokens"], strict=True)]
                    for clock in ("wall", "cpu") if number else ():
                        seconds.setdefault(case, {}).setdefault(name, {}).setdefault(clock, []).append(each[clock])
                    print(number, case, name, f"{each['wall']:.2f} s, cpu {each['cpu']:.2f} s", file=sys.stderr)
    finally:
        for engine in engines.values():
            engine.close()
    return {"seconds": seconds, "same": {name: statistics.mean(each) for name, each in same.items()}}


def show(figures: dict[str, Any]) -> None:
    for case, engines in figures["seconds"].items():
        base, *others = engines
        for clock in ("wall", "cpu"):
            first = statistics.median(engines[base][clock])
            print(f"{case:7} {clock:5} {base} {first:.3f} s")
            for name in others:
                each = engines[name][clock]
                pairs = [one / other for one, other in zip(engines[base][clock], each, strict=True)]
                median, spread = statistics.median(each), f"{min(pairs):.3f}-{max(pairs):.3f}"
                print(f"{case:7} {clock:5} {name} {median:.3f} s, {first / median:.3f} times as fast ({spread})")
    print("tokens as the first engine's:", ", ".join(f"{name} {share:.0%}" for name, share in figures["same"].items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the folder of the checkpoint, which is made")
    parser.add_argument("--family", choices=TEXT, default="qwen3_vl")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["transformers float32", "kvern float32"])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)


def run(arguments: argparse.Namespace) -> None:
    figures = measure(arguments)
    show(figures)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(vars(arguments) | figures, default=str, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ENGINES:
        serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_arguments(given)
        run(given.parse_args())
