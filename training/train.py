"""Trains the embedded model: a Llama of its own in plain PyTorch, on text that the generator makes while it trains.

    python -m training.train --size 12m --steps 4000 --tokenizer src/kvern/embedded/kvern-12m \\
        --checkpoint build/12m.pt --export src/kvern/embedded/kvern-12m

Batch number i is a pure function of (seed, i), so a run that is stopped and started again with the same arguments
continues from its checkpoint to the same weights. Shapes: B rows, T tokens a row, D hidden, H heads, K key-value heads.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.draw import Draw
from training.text import stream
from training.tokenizer import ASSISTANT_ID, BEGIN_ID, END_ID, PAD_ID, VOCABULARY, document

CONTEXT = 2048
LAST_SPECIAL_ID = ASSISTANT_ID + 1
PROMPT_WEIGHT = 0.05  # of the loss on tokens that the assistant does not say


@dataclass(frozen=True)
class Size:
    """The shape of a model and how it is trained; a batch is `rows` x `length` tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    rows: int = 64
    length: int = CONTEXT
    rate: float = 3e-3
    head_dim: int = 64


SIZES = {
    "12m": Size(hidden=384, layers=7, heads=6, kv_heads=2, inner=1024),
    "1m": Size(hidden=128, layers=3, heads=2, kv_heads=1, inner=384, rate=5e-3),
    "tiny": Size(hidden=64, layers=2, heads=2, kv_heads=1, inner=128, rows=2, length=512, head_dim=32),
}


# --- data ---------------------------------------------------------------------------------------------------------


@cache
def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def pack(folder: Path, seed: int, index: int, rows: int, length: int) -> np.ndarray:
    """Batch number `index`: uint16 [rows, length + 1], whole documents packed behind one another and then padding."""
    tokenizer = load_tokenizer(folder)
    documents = stream(Draw(f"{seed}/{index}"))
    batch = np.full((rows, length + 1), PAD_ID, dtype=np.uint16)
    row = used = 0
    while True:
        texts = [document(next(documents)) for _ in range(64)]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            if len(ids) > length + 1:
                continue
            if used + len(ids) > length + 1:
                row, used = row + 1, 0
                if row == rows:
                    return batch
            batch[row, used : used + len(ids)] = ids
            used += len(ids)


def weigh(tokens: Tensor) -> Tensor:
    """Loss weight of each token, float32 [B, T]: 1 for what the assistant says and raw text, less for the rest, 0 for padding.

    The assistant speaks from behind `<|assistant|>` up to and with `<|end|>`.
    """
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    before = F.pad(tokens, (1, 0), value=PAD_ID)[:, :-1]
    start = torch.where(before <= LAST_SPECIAL_ID, position, 0).cummax(1).values
    opened = before.gather(1, start)  # the special token that a token's turn began behind
    raw = (opened == BEGIN_ID) & ((tokens > LAST_SPECIAL_ID) | (tokens == END_ID))
    spoken = (opened == ASSISTANT_ID) | raw
    weight = torch.where(spoken, 1.0, PROMPT_WEIGHT)
    return weight.masked_fill((tokens == PAD_ID) | (tokens == BEGIN_ID), 0.0)


def batches(folder: Path, size: Size, seed: int, first: int, last: int, workers: int) -> Iterator[Tensor]:
    """Batches `first` to `last` - 1 as int64 [B, T + 1], made by `workers` processes, or by this one if there are none."""
    if not workers:
        for index in range(first, last):
            yield torch.from_numpy(pack(folder, seed, index, size.rows, size.length).astype(np.int64))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers inherit it; each is one core's worth of work already
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        upcoming = iter(range(first, last))
        while True:
            for index in upcoming:
                waiting.append(pool.submit(pack, folder, seed, index, size.rows, size.length))
                if len(waiting) >= 4 * workers:
                    break
            if not waiting:
                return
            yield torch.from_numpy(waiting.popleft().result().astype(np.int64))


# --- model: parameter names are those of Hugging Face's Llama -----------------------------------------------------


def rotary(length: int, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, float32 [T, head_dim] each."""
    frequency = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.arange(length).float()[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Applies the rotary embedding to x [B, H, T, head_dim], halves as pairs."""
    left, right = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat((-right, left), dim=-1) * sine).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.hidden, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Any) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.size.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        if isinstance(mask, Tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            from torch.nn.attention.flex_attention import flex_attention

            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.inner, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.inner, bias=False)
        self.down_proj = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(size), MLP(size)
        self.input_layernorm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden, eps=1e-5)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Llama(nn.Module):
    cosine: Tensor
    sine: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(VOCABULARY, size.hidden)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        cosine, sine = rotary(CONTEXT, size.head_dim)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                depth = math.sqrt(2 * size.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor, mask: Any) -> Tensor:
        """Logits [B, T, vocabulary] of token ids [B, T]; `mask` says which earlier tokens each token sees."""
        x = self.embed_tokens(tokens)
        cosine, sine = self.cosine[: tokens.shape[1]], self.sine[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cosine, sine, mask)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def document_mask(tokens: Tensor, compiled: bool) -> Any:
    """Causal attention within each document. Compiled: a flex-attention mask; else bool [B, 1, T, T]."""
    number = (tokens == BEGIN_ID).cumsum(1)
    if not compiled:
        return (number[:, None, :, None] == number[:, None, None, :]).tril()
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (number[b, q] == number[b, k])

    batch, length = tokens.shape
    return create_block_mask(visible, batch, None, length, length, device=str(tokens.device))


# --- training -----------------------------------------------------------------------------------------------------


def optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [parameter for parameter in model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def scale(step: int, steps: int, warmup: int = 100) -> float:
    """Learning rate of a step as a share of the highest: linear warm-up, then a cosine down to one hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def save_checkpoint(path: Path, model: Llama, optimizer: list[torch.optim.Optimizer], step: int) -> None:
    """Writes beside the file first, so that an interruption leaves the old checkpoint whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizer], "step": step}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(
    size: Size, steps: int, folder: Path, checkpoint: Path, *, seed: int, workers: int, device: str,
    compiled: bool, stop_at: int | None = None, save_every: int = 500,
) -> Llama:  # fmt: skip
    """Trains to step `steps`, or only to `stop_at` of them, starting from `checkpoint` if it exists."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = Llama(size).to(device)
    optimizer = optimizers(model, size.rate)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for one, saved in zip(optimizer, state["optimizers"], strict=True):
            one.load_state_dict(saved)
        step = state["step"]
    last = steps if stop_at is None else min(stop_at, steps)

    def loss_of(tokens: Tensor, mask: Any, weight: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            logits = model(tokens[:, :-1], mask)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum()

    run = torch.compile(loss_of) if compiled else loss_of
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
               TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns) as progress:
        bar = progress.add_task("train", total=last, completed=step, loss=math.nan, rate=0.0)
        for batch in batches(folder, size, seed, step, last, workers):
            tokens = batch.to(device)
            for one in optimizer:
                for group in one.param_groups:
                    group["lr"] = size.rate * scale(step, steps)
            loss = run(tokens, document_mask(tokens[:, :-1], compiled), weigh(tokens)[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for one in optimizer:
                one.step()
                one.zero_grad()
            step += 1
            progress.update(bar, completed=step)
            if step % 20 == 0 or step == last:
                speed = (progress.tasks[0].speed or 0.0) * size.rows * size.length
                progress.update(bar, loss=loss.item(), rate=speed)
            if step % save_every == 0 or step == last:
                save_checkpoint(checkpoint, model, optimizer, step)
            if step % 200 == 0 and not progress.console.is_terminal:
                progress.console.print(f"step {step} loss {loss.item():.4f} {speed:,.0f} tokens/s")
    return model


# --- export -------------------------------------------------------------------------------------------------------


def hf_config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": size.hidden,
        "intermediate_size": size.inner, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, "bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID,
        "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip


def export(model: Llama, tokenizer: Path, folder: Path, shard_bytes: int = 8_000_000) -> None:
    """Writes the model as Hugging Face does: config, generation config, tokenizer, bf16 shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        if filled + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1]["model." + name] = tensor
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    generation = {"bos_token_id": BEGIN_ID, "eos_token_id": [END_ID], "pad_token_id": PAD_ID, "do_sample": False}
    files = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
        "config.json": hf_config(model.size),
        "generation_config.json": generation,
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / file).resolve() != (folder / file).resolve():
            shutil.copyfile(tokenizer / file, folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an embedded model.")
    parser.add_argument("--size", choices=SIZES, default="12m")
    parser.add_argument("--tiny", action="store_const", dest="size", const="tiny", help="the same as --size tiny")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--stop-at", type=int, help="stop here; a later run with the same arguments goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--export", type=Path, help="folder to write the finished model to")
    parser.add_argument("--workers", type=int, default=0, help="processes that make text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    model = train(
        SIZES[arguments.size], arguments.steps, arguments.tokenizer, arguments.checkpoint, seed=arguments.seed, workers=arguments.workers,
        device=arguments.device, compiled=arguments.device != "cpu", stop_at=arguments.stop_at,
    )  # fmt: skip
    if arguments.export:
        export(model, arguments.tokenizer, arguments.export)


if __name__ == "__main__":
    main()
