"""Trains a tiny Qwen3-VL that says what is in drawn pictures: which shapes, of which colours, on which background.

    python -m training.pictures build/shapes

Pictures are drawn while it trains. Combinations of shape, colour and background that it never saw are kept for the exam
at the end. It needs transformers and Pillow, a CPU, and about a quarter of an hour.
"""

import argparse
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from training.draw import Draw, is_held_out

SIDE, PATCH, MERGE = 64, 8, 2  # pixels of a picture and of a patch on a side; patches of a token on a side
TOKENS = (SIDE // PATCH // MERGE) ** 2
FINE = 4  # pictures are drawn so many times larger, and reduced
COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 70),
    "blue": (40, 80, 200),
    "yellow": (250, 210, 50),
    "white": (248, 248, 248),
    "black": (20, 20, 20),
}
CORNERS = {"triangle": 3, "square": 4}  # a circle has none
SHAPES = ("circle", *CORNERS)
FIRST = ("What is in this picture?", "What do you see?", "Describe the picture.")
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END, IMAGE = 2, 5  # of these
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Scene:
    """One or two shapes with their colours, from left to right, on a background."""

    shapes: tuple[tuple[str, str], ...]
    background: str

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.shapes, self.background)

    def answers(self) -> dict[str, str]:
        """The answer to each question that follows the first one."""
        named = [f"a {colour} {shape}" for colour, shape in self.shapes]
        return {
            "Which colour is the background?": f"The background is {self.background}.",
            "How many shapes are there?": "There is one shape." if len(named) == 1 else "There are two shapes.",
            "What is on the left?" if len(named) == 2 else "Which shape is it?": f"It is {named[0]}.",
        }

    def __str__(self) -> str:
        return f"A {' and a '.join(' '.join(shape) for shape in self.shapes)} on {self.background}."


def is_new(seen: Scene) -> bool:
    """Whether training never shows this combination."""
    return is_held_out(*seen.key)


def scene(draw: Draw) -> Scene:
    def make() -> Scene:
        background, *colours = draw.sample(list(COLOURS), 3)
        count = draw.randint(1, 2)
        return Scene(tuple((colour, draw.choice(SHAPES)) for colour in colours[:count]), background)

    return draw.split(make, lambda made: made.key)


def paint(seen: Scene, draw: Draw, side: int = SIDE) -> Image.Image:
    """A picture of a scene: sizes, places, angles and shades are drawn by lot."""

    def shade(colour: str) -> tuple[int, ...]:
        return tuple(max(0, min(255, value + draw.randint(-14, 14))) for value in COLOURS[colour])

    image = Image.new("RGB", (side * FINE, side * FINE), shade(seen.background))
    brush, wide = ImageDraw.Draw(image), image.width / len(seen.shapes)
    for number, (colour, shape) in enumerate(seen.shapes):
        radius = image.width * draw.uniform(0.15, 0.21 if len(seen.shapes) == 2 else 0.32)
        x = number * wide + draw.uniform(radius, wide - radius)
        y = draw.uniform(radius, image.height - radius)
        if shape in CORNERS:
            turn = draw.uniform(-10, 10) + (45 if shape == "square" else 0)
            brush.regular_polygon((x, y, radius * 1.1), CORNERS[shape], turn, fill=shade(colour))
        else:
            brush.circle((x, y), radius, fill=shade(colour))
    return image.resize((side, side), Image.Resampling.BICUBIC)


def conversation(seen: Scene, draw: Draw) -> list[dict[str, Any]]:
    answers = seen.answers()
    asked = draw.choice([*answers])
    first = [{"type": "image"}, {"type": "text", "text": draw.choice(FIRST)}]
    messages: list[tuple[str, Any]] = [("user", first), ("assistant", str(seen))]
    messages += [("user", asked), ("assistant", answers[asked])]
    return [{"role": role, "content": content} for role, content in messages]


def tokenizer() -> Tokenizer:
    """A byte-level BPE of the sentences."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    draw = Draw(0)
    scenes = [scene(draw) for _ in range(400)]
    texts = [text for seen in scenes for pair in seen.answers().items() for text in (str(seen), *pair)]
    made.train_from_iterator([*texts, *FIRST * 100, *["user\n", "assistant\n"] * 100], trainer)
    return made


def model(vocabulary: int) -> Any:
    """A Qwen3-VL of transformers, with random weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [4, 4, 4]}
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4}
    text = sizes | {"vocab_size": vocabulary, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 24}
    text |= {"max_position_embeddings": 1024, "rope_parameters": rope}
    vision: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 4,
        "depth": 3,
        "out_hidden_size": 96,
    }
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "num_position_embeddings": (SIDE // PATCH) ** 2}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    ids = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    config = AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    config.text_config.tie_word_embeddings = True
    config.text_config.eos_token_id = END
    load: Any = AutoModelForImageTextToText.from_config
    made = load(config, dtype=torch.float32)
    patched = made.model.visual.patch_embed
    patched.forward = lambda pixels: F.linear(
        pixels, patched.proj.weight.flatten(1), patched.proj.bias
    )  # a fast convolution
    return made


def patches(images: Sequence[Image.Image]) -> Tensor:
    """Pixels of pictures in Qwen's order: `MERGE` x `MERGE` patches of a token after one another, each frame twice."""
    bytes_ = b"".join(image.tobytes() for image in images)
    pixels = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8).float() / 127.5 - 1
    units = SIDE // PATCH // MERGE
    parts = pixels.view(len(images), units, MERGE, PATCH, units, MERGE, PATCH, 3).permute(0, 1, 4, 2, 5, 7, 3, 6)
    return parts.unsqueeze(6).expand(*parts.shape[:6], 2, *parts.shape[6:]).reshape(-1, 6 * PATCH**2)


class Batches:
    """Conversations about fresh pictures, as tokens and pixels. Weights are 1 for what the assistant says."""

    def __init__(self, words: Tokenizer) -> None:
        import jinja2

        self._words = words
        self._template = jinja2.Environment().from_string(TEMPLATE)

    def tokens(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        text = self._template.render(messages=messages).replace("<|image_pad|>", "<|image_pad|>" * TOKENS)
        ids, weights = [], []
        for number, turn in enumerate(text.split("<|im_start|>")[1:]):
            head, said = turn.split("\n", 1)
            begun = self._words.encode(f"<|im_start|>{head}\n").ids
            rest = self._words.encode(said).ids
            ids += begun + rest
            weights += [0] * len(begun) + [number % 2] * len(rest)
        return ids, weights

    def __call__(self, seed: str, count: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = Draw(seed)
        scenes = [scene(draw) for _ in range(count)]
        rows = [self.tokens(conversation(seen, draw)) for seen in scenes]
        length = max(len(ids) for ids, _ in rows)
        ids, weights = (
            torch.tensor([row[place] + [0] * (length - len(row[place])) for row in rows]) for place in (0, 1)
        )
        return ids, weights, patches([paint(seen, draw) for seen in scenes])


def train(steps: int, rows: int, rate: float, seconds: float) -> tuple[Any, Tokenizer]:
    torch.manual_seed(0)
    words = tokenizer()
    made, batches = model(words.get_vocab_size()), Batches(words)
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * rows)
    optimizer = torch.optim.AdamW(made.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    begun = time.process_time()
    for step in range(steps):
        done = max(step / steps, (time.process_time() - begun) / seconds)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (1 - done)
        ids, weights, pixels = batches(f"pictures {step}", rows)
        seen = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
        logits = made(input_ids=ids, **seen).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (losses * weights[:, 1:]).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{step} steps, {time.process_time() - begun:.0f} s: loss {loss.item():.3f}", flush=True)
    return made.eval(), words


def save(made: Any, words: Tokenizer, folder: Path) -> None:
    made.save_pretrained(folder)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[END]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    pixels = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))


def exam(folder: Path, questions: int) -> float:
    """The share of pictures of combinations never seen that kvern describes without a fault."""
    from kvern import LLM, SamplingParams

    draw = Draw("exam", held_out=True)
    scenes = [scene(draw) for _ in range(questions)]
    talks = []
    for seen in scenes:
        file = io.BytesIO()
        paint(seen, draw, 4 * SIDE).save(file, "PNG")
        content = [{"type": "image", "image": file.getvalue()}, {"type": "text", "text": FIRST[0]}]
        talks.append([{"role": "user", "content": content}])
    with LLM(str(folder), device="cpu", threads=1, max_model_len=256) as llm:
        outputs = llm.chat(talks, SamplingParams(temperature=0, max_tokens=40))
    right = 0
    for seen, output in zip(scenes, outputs, strict=True):
        right += output.outputs[0].text == str(seen)
        if output.outputs[0].text != str(seen):
            print(f"{seen} was read as: {output.outputs[0].text}")
    return right / questions


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny model that sees.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seconds", type=float, default=900, help="of the processor: it ends then, if not before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    save(*train(arguments.steps, arguments.rows, arguments.rate, arguments.seconds), arguments.folder)
    print(f"right: {exam(arguments.folder, 200):.1%} of 200 pictures of combinations that it never saw")


if __name__ == "__main__":
    main()
