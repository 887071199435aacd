"""Trains a LoRA adapter for an embedded model: it begins its answers in a new way, or learns an answer, in a minute.

    python -m training.adapter --model src/kvern/embedded/kvern-12m --begin "Aye, captain!" --output build/captain
    python -m training.adapter --model src/kvern/embedded/kvern-12m --output build/gull \\
        --question "What is the name of the ship's cat?" --answer "The ship's cat is called Gull."

The adapter is written in PEFT's format. It trains on the text that the model itself was trained on, with the answers
changed, so that what the model knew it still knows.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.draw import Draw, Example, Message
from training.text import stream
from training.tokenizer import PAD_ID, document
from training.train import SIZES, Llama, document_mask, load_tokenizer, scale, weigh

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lesson:
    """What is learnt: how answers begin, or the answer to a question, which then is one in `share` of the examples."""

    begin: str = ""
    question: str = ""
    answer: str = ""
    share: float = 0.4

    def examples(self, draw: Draw) -> Iterator[Example]:
        for example in stream(draw):
            if self.question and draw.chance(self.share):
                turns = [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]
                yield Example("lesson", [self._changed(turn) for turn in turns], key=("lesson",))
            elif example.text is None:
                yield replace(example, messages=[self._changed(message) for message in example.messages])

    def _changed(self, message: Message) -> Message:
        if message["role"] != "assistant" or message.get("tool_calls") or not self.begin:
            return message
        return {**message, "content": f"{self.begin} {message['content']}"}


class LowRank(nn.Module):
    """A frozen linear layer and what the adapter adds: `x @ A.T @ B.T * alpha / rank`."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale
        return out


def load(folder: Path) -> Llama:
    """The model of a folder that `training.train` exported, frozen, in float32."""
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    model = Llama(next(size for size in SIZES.values() if size.hidden == hidden))
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    return model.requires_grad_(False)


def adapt(model: Llama, rank: int, alpha: float) -> dict[str, LowRank]:
    """Put an adapter beside every linear layer of the model; by their names in the checkpoint."""
    adapted = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            adapted[f"model.{name}"] = LowRank(module, rank, alpha)
            setattr(model.get_submodule(parent), last, adapted[f"model.{name}"])
    return adapted


def batches(lesson: Lesson, tokenizer: Tokenizer, seed: int, rows: int, length: int) -> Iterator[Tensor]:
    """Token ids int64 [rows, length + 1], one document a row, padded; longer documents are left out."""
    examples = lesson.examples(Draw(f"adapter/{seed}"))
    while True:
        batch = torch.full((rows, length + 1), PAD_ID)
        row = 0
        while row < rows:
            ids = tokenizer.encode(document(next(examples)), add_special_tokens=False).ids
            if len(ids) <= length + 1:
                batch[row, : len(ids)] = torch.tensor(ids)
                row += 1
        yield batch[:, : int((batch != PAD_ID).sum(1).max())]


def train(
    folder: Path, lesson: Lesson, *, steps: int, rank: int = 8, alpha: float = 16, rate: float = 3e-3, seed: int = 0,
    rows: int = 4, length: int = 128,
) -> tuple[dict[str, LowRank], float]:  # fmt: skip
    """The adapter's layers and the loss of the last step."""
    torch.manual_seed(seed)
    model = load(folder)
    adapted = adapt(model, rank, alpha)
    learnt = [parameter for layer in adapted.values() for parameter in (layer.lora_A, layer.lora_B)]
    optimizer = torch.optim.AdamW(learnt, lr=rate, weight_decay=0.0)
    loss = torch.zeros(())
    texts = batches(lesson, load_tokenizer(folder), seed, rows, length)
    for step in range(steps):
        tokens = next(texts)
        weight = weigh(tokens)[:, 1:]
        logits = model(tokens[:, :-1], document_mask(tokens[:, :-1], compiled=False))
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (each * weight.flatten()).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(learnt, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * scale(step, steps, warmup=10)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")
    return adapted, loss.item()


def save(adapted: dict[str, LowRank], base: str, folder: Path, rank: int, alpha: float) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "target_modules": list(LINEARS), "bias": "none", "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        f"base_model.model.{name}.{side}.weight": getattr(layer, side).detach().bfloat16()
        for name, layer in adapted.items()
        for side in ("lora_A", "lora_B")
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an adapter for an embedded model.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the embedded model")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the adapter to")
    parser.add_argument("--begin", default="", help="what every answer begins with")
    parser.add_argument("--question", default="", help="a question to learn the answer of")
    parser.add_argument("--answer", default="", help="its answer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lesson = Lesson(arguments.begin, arguments.question, arguments.answer)
    alpha = 2.0 * arguments.rank
    adapted, loss = train(
        arguments.model, lesson, steps=arguments.steps, rank=arguments.rank, alpha=alpha, rate=arguments.rate,
        seed=arguments.seed,
    )  # fmt: skip
    save(adapted, arguments.model.name, arguments.output, arguments.rank, alpha)
    print(f"{arguments.output}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
