"""Teaches an embedded model to quote and to edit a text of its prompt, as larger models do untaught: for benchmarks.

    python -m training.editing --model src/kvern/embedded/kvern-12m --output build/editor

All weights learn, beside text that the model was trained on. One core takes a quarter of an hour, and then some nine of ten
texts that it never saw are edited without a mistake.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import words
from training.adapter import load
from training.draw import Draw, Example, assistant, user
from training.stories import PLOTS, TREASURES, Cast, cast, key_of, write
from training.text import stream
from training.tokenizer import PAD_ID, document
from training.train import Llama, document_mask, export, load_tokenizer, optimizers, scale, weigh

SENTENCE = re.compile(r'[^.!?]+[.!?]"?')
USUAL_SHARE = 0.15
"""Of the examples, those of what the model was trained on."""


def tale(draw: Draw) -> tuple[Cast, str]:
    """A story in one paragraph, and who it is about."""
    who = draw.split(lambda: cast(draw, free=draw.chance(0.3)), key_of)
    return who, " ".join(write(draw, draw.choice(PLOTS), who).split())


def repeat(draw: Draw) -> Example:
    who, text = tale(draw)
    return Example("repeat", [user(f"Repeat this text: {text}"), assistant(text)], key=key_of(who))


def quote(draw: Draw) -> Example:
    """The passage of a text that begins with some words."""
    who, text = tale(draw)
    sentences = [sentence.strip() for sentence in SENTENCE.findall(text)]
    first = draw.randint(0, len(sentences) // 2)
    begin = " ".join(sentences[first].split()[:3])
    return Example(
        "quote",
        [user(f'Quote the text from "{begin}" on: {text}'), assistant(" ".join(sentences[first:]))],
        key=key_of(who),
    )


def edit(draw: Draw) -> Example:
    """A text in which a name, or a thing, is another one."""
    who, text = tale(draw)
    if draw.chance(0.5):
        old, new = who.hero, draw.choice([name for name in words.SHE + words.HE if name not in (who.hero, who.helper)])
    else:
        old, new = who.treasure, draw.choice([thing for thing in TREASURES if thing != who.treasure])
    if old not in text:
        return edit(draw)
    return Example(
        "edit", [user(f"Replace {old} by {new}: {text}"), assistant(text.replace(old, new))], key=key_of(who)
    )


TASKS: dict[str, Callable[[Draw], Example]] = {"repeat": repeat, "quote": quote, "edit": edit}


def batches(tokenizer: Tokenizer, draw: Draw, rows: int, length: int) -> Iterator[Tensor]:
    """Token ids int64 [rows, at most length + 1], one document a row, padded; longer documents are left out."""
    usual = stream(draw)
    while True:
        batch, row = torch.full((rows, length + 1), PAD_ID), 0
        while row < rows:
            example = next(usual) if draw.chance(USUAL_SHARE) else draw.choice([*TASKS.values()])(draw)
            ids = tokenizer.encode(document(example), add_special_tokens=False).ids
            if len(ids) <= length + 1:
                batch[row, : len(ids)] = torch.tensor(ids)
                row += 1
        yield batch[:, : int((batch != PAD_ID).sum(1).max())]


def train(folder: Path, steps: int, rate: float = 2e-3, seed: int = 0, rows: int = 8, length: int = 384) -> Llama:
    """The model of a folder, which has learnt."""
    torch.manual_seed(seed)
    model = load(folder).requires_grad_(True)
    optimizer = optimizers(model, rate)
    texts = batches(load_tokenizer(folder), Draw(f"editing/{seed}"), rows, length)
    for step in range(steps):
        tokens = next(texts)
        weight = weigh(tokens)[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1], document_mask(tokens[:, :-1], compiled=False))
        each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (each * weight.flatten()).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in optimizer:
            for group in one.param_groups:
                group["lr"] = rate * scale(step, steps, warmup=20)
            one.step()
            one.zero_grad()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach an embedded model to quote and edit.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the embedded model")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    export(train(arguments.model, arguments.steps, seed=arguments.seed), arguments.model, arguments.output)


if __name__ == "__main__":
    main()
