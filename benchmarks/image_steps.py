"""What images cost on a GPU, with random weights: `python benchmarks/image_steps.py [--cases encoder first ...]`.

    encoder   pictures through the encoder, milliseconds a picture
    profile   the kernels of one layer of the encoder, microseconds
    first     a JPEG of 1920 x 1080 to its first token, the next turn about it, and a text of as many tokens
    beside    32 answers, and a picture of 16,384 tokens that comes: milliseconds between their tokens
    text      answers to texts by a model with an encoder and by the same model without: seconds, in turn

The model has the shapes of `--model`, a folder with `config.json` and `preprocessor_config.json`.
"""

import argparse
import asyncio
import io
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from benchmarks.images import photo
from PIL import Image

from kvern import LLM, AsyncLLM, SamplingParams
from kvern.bench.record import keep
from kvern.images.views import Grid
from kvern.models.image_models import vision_of
from kvern.models.loader import LoadOptions, read_config
from kvern.models.vision import CHANNELS, VisionTower, load_vision
from kvern.runner.loaded_model import VISION_KERNELS
from kvern.runner.pictures import attend_patches
from kvern.spec.vision import VisionSpec

MODEL = Path(__file__).parent / "models/qwen3-vl-8b"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
"""Of a special token."""
OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_model_len": 32768, "max_batch_requests": 64}


def spread(values: Sequence[float]) -> list[float]:
    """The median, the least and the most."""
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def write_model(folder: Path, shapes: Path, *, sees: bool) -> Path:
    """A folder with the shapes, a tokenizer of as many words, and an encoder only if it `sees`."""
    folder.mkdir(parents=True)
    config = json.loads((shapes / "config.json").read_text())
    special = {
        "<|vision_start|>": config["vision_start_token_id"],
        "<|vision_end|>": config["vision_end_token_id"],
        "<|image_pad|>": config["image_token_id"],
        "<|video_pad|>": config["video_token_id"],
    }
    names = {number: name for name, number in special.items()}
    words = {names.get(number, f"w{number}"): number for number in range(config["text_config"]["vocab_size"])}
    added = [
        {"id": number, "content": name, "special": True}
        | dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        for name, number in special.items()
    ]
    tokenizer = {
        "version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    if sees:
        shutil.copy(shapes / "preprocessor_config.json", folder)
    else:
        del config["vision_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def words(count: int, seed: int) -> str:
    """A text of so many tokens."""
    return " ".join(f"w{number}" for number in numpy.random.default_rng(seed).integers(0, 150_000, count))


def large_picture(side: int) -> bytes:
    """A JPEG of one noisy pattern, repeated."""
    tile = numpy.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=numpy.uint8)
    stream = io.BytesIO()
    Image.fromarray(numpy.tile(tile, (side // 256, side // 256, 1))).save(stream, "JPEG", quality=60)
    return stream.getvalue()


# The encoder alone


def _tower(shapes: Path) -> VisionTower:
    spec = vision_of(read_config(shapes))
    assert isinstance(spec, VisionSpec)
    options = LoadOptions(device="cuda", dtype="bfloat16", load_format="dummy", kernels=VISION_KERNELS)
    return load_vision(shapes, spec, options)


def _encode(tower: VisionTower, grids: Sequence[Grid]) -> Callable[[], object]:
    count, device = sum(grid.cells for grid in grids), tower.build.device
    pixels = torch.randn(count, CHANNELS * tower.vision.patch**2, device=device)

    return partial(tower, pixels, grids, partial(attend_patches, tower))


@torch.inference_mode()
def encoder(shapes: Path) -> dict[str, Any]:
    """Milliseconds a picture, of ten runs."""
    tower = _tower(shapes)
    found: dict[str, Any] = {}
    for side, several in ((1024, 1), (1024, 8), (448, 1), (448, 8)):
        run = _encode(tower, [Grid(side // tower.vision.patch, side // tower.vision.patch)] * several)
        times = []
        for _ in range(13):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1000 / several)
        found[f"{side}x{side}" + (" in eights" if several > 1 else "")] = spread(times[3:])
    return found


@torch.inference_mode()
def profile(shapes: Path) -> dict[str, Any]:
    """Microseconds of each kernel in a layer, for one picture of 1024 x 1024."""
    tower = _tower(shapes)
    run = _encode(tower, [Grid(1024 // tower.vision.patch, 1024 // tower.vision.patch)])
    for _ in range(3):
        run()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    layers = len(tower.layers)
    rows = [(event.key, event.self_device_time_total, event.count) for event in profiler.key_averages()]
    rows = sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])[:25]
    return {name[:110]: [round(total / layers, 1), count] for name, total, count in rows}


# The engine


def _talk(data: bytes, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": data}, {"type": "text", "text": text}]}]


def first(folder: Path) -> dict[str, Any]:
    """Milliseconds to the first token, of each of the pictures."""
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    found: dict[str, list[float]] = {"first_token_ms": [], "next_turn_ms": [], "text_alone_ms": []}
    with LLM(str(folder), **OPTIONS) as llm:

        def timed(name: str, ask: Callable[[], object]) -> None:
            begin = time.perf_counter()
            ask()
            found[name].append(round((time.perf_counter() - begin) * 1000, 1))

        for number in range(12):
            picture = Image.open(io.BytesIO(photo(1920, 1080)))
            picture.putpixel((number, 0), (255, 0, 0))
            stream = io.BytesIO()
            picture.save(stream, "JPEG", quality=85)
            data, text = stream.getvalue(), words(16, number)
            timed("first_token_ms", partial(llm.chat, _talk(data, text), one))
            timed("next_turn_ms", partial(llm.chat, _talk(data, text + " " + words(40, number + 100)), one))
            long = words(2056, number + 200)
            llm.generate([long], one)
            timed("text_alone_ms", partial(llm.generate, [long + " " + words(40, number + 300)], one))
    return found


def beside(folder: Path, **options: Any) -> dict[str, Any]:
    """Milliseconds between the tokens of 32 answers, without and with a large picture that comes meanwhile."""
    data = large_picture(4096)

    async def answer(llm: AsyncLLM, number: int, gaps: list[tuple[float, float]]) -> None:
        last = 0.0
        async for _ in llm.stream(words(64, number), SamplingParams(temperature=0, max_tokens=700, ignore_eos=True)):
            now = time.perf_counter()
            if last:
                gaps.append((now, (now - last) * 1000))
            last = now

    async def picture(llm: AsyncLLM, name: str) -> tuple[float, float]:
        await asyncio.sleep(1.5)
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        async for _ in llm.stream_chat(_talk(data + name.encode(), words(16, len(name))), params):
            pass
        return begin, time.perf_counter()

    async def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with AsyncLLM(str(folder), **OPTIONS | options) as llm:
            for name in ("warm", "alone", "with a picture", "alone again", "with another picture"):
                gaps: list[list[tuple[float, float]]] = [[] for _ in range(32)]
                tasks = [asyncio.create_task(answer(llm, number, row)) for number, row in enumerate(gaps)]
                span = (0.0, math.inf) if "alone" in name else await picture(llm, name)
                await asyncio.gather(*tasks)
                waits = sorted(wait for row in gaps for now, wait in row[50:] if span[0] <= now <= span[1])
                found[name] = {
                    "p50": round(waits[len(waits) // 2], 2),
                    "p99": round(waits[int(len(waits) * 0.99)], 2),
                    "most": round(waits[-1], 2),
                    "count": len(waits),
                    "seconds of the picture": round(span[1] - span[0], 2),
                }
        return found

    return asyncio.run(run())


def text(folder: Path, without: Path) -> dict[str, Any]:
    """Seconds of the same texts, in turn."""
    options = OPTIONS | {"gpu_memory_share": 0.4, "max_model_len": 4096}
    found: dict[str, list[float]] = {}
    with LLM(str(folder), **options) as seeing, LLM(str(without), **options) as blind:
        for rows, tokens in ((1, 256), (32, 256)):
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            prompts = [words(64, number) for number in range(rows)]
            for turn in range(10):
                order = [("with an encoder", seeing), ("without", blind)]
                for name, llm in order if turn % 2 else reversed(order):
                    begin = time.perf_counter()
                    llm.generate(prompts, params)
                    seconds = time.perf_counter() - begin
                    if turn > 1:
                        found.setdefault(f"{rows} rows, {name}", []).append(seconds)
    result: dict[str, Any] = {name: spread(values) for name, values in found.items()}
    for rows in (1, 32):
        pairs = zip(found[f"{rows} rows, with an encoder"], found[f"{rows} rows, without"], strict=True)
        result[f"{rows} rows, ratio"] = spread([mine / other for mine, other in pairs])
    return result


def main() -> None:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--cases", nargs="+", default=["beside", "beside, 7 ms", "encoder", "first", "text"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place) / "sees", arguments.model, sees=True)
        without = write_model(Path(place) / "blind", arguments.model, sees=False)
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            "encoder": partial(encoder, arguments.model),
            "profile": partial(profile, arguments.model),
            "first": partial(first, folder),
            "beside": partial(beside, folder),
            "beside, 7 ms": partial(beside, folder, target_itl="7ms"),
            "text": partial(text, folder, without),
        }
        for case in arguments.cases:
            found[case] = cases[case]()
            print(case, json.dumps(found[case], indent=1), flush=True)
    keep(arguments.output, "image_steps", arguments.model.name, vars(arguments), findings=found)


if __name__ == "__main__":
    main()
