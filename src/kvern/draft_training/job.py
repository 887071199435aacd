"""A training run of an EAGLE-3 draft head: the model's states of rows of text, steps of the head, and its acceptance.

The head runs over whole rows of text, and several of its own steps at a time:

  step 0, position t:  the model's states of token t, and token t + 1               ->  drafts token t + 2
  step 1, position t:  the output of step 0 at position t - 1, and token t + 1      ->  drafts token t + 2
  step j, position t:  the output of step j - 1 at position t - 1, and token t + 1  ->  drafts token t + 2

So step j drafts like a head that has drafted j tokens already (training-time test, Li et al. 2025,
https://arxiv.org/abs/2503.01840, section 3.2): it attends to keys of step 0 up to position t - j, and to keys of steps
1 to j at the positions after. Shapes: N rows of L tokens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from kvern.errors import ConfigError
from kvern.layers.states import new_states
from kvern.models.decoder import Decoder, LayerInputs
from kvern.quantize.blocks import LayersAttend
from kvern.quantize.writer import Writer
from kvern.spec.model import MlpSpec, ModelSpec


@dataclass(frozen=True)
class HeadSize:
    """Sizes of a head. `entries` states of the model are its input; it scores `drafted` tokens."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    entries: int
    drafted: int
    epsilon: float
    theta: float


class TrainedHead(nn.Module):
    """A head whose parameters have the names of EAGLE-3's checkpoints."""

    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.size = size
        self.fc = nn.Linear(size.entries * size.hidden, size.hidden, bias=False)
        self.midlayer = _Layer(size)
        self.norm = nn.RMSNorm(size.hidden, size.epsilon)
        self.lm_head = nn.Linear(size.hidden, size.drafted, bias=False)

    def forward(self, inputs: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Returns the scores `[N, L, drafted]` of each step; in step j the first j positions are invalid.

        inputs    [N, L, entries * hidden] the inputs of some layers of the model
        embedded  [N, L, hidden] embeddings of the token after each position
        """
        turn = rotations(inputs.shape[1], self.size.head_dim, self.size.theta, inputs.device)
        states, scores = self.fc(inputs), []
        kept: list[tuple[Tensor, Tensor]] = []
        for _ in range(steps):
            states = self.midlayer(embedded, states, kept, turn)
            scores.append(self.lm_head(self.norm(states)))
            states = moved(states, 1)
        return scores


class _Layer(nn.Module):
    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.hidden, size.epsilon)
        self.hidden_norm = nn.RMSNorm(size.hidden, size.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden, size.epsilon)
        self.self_attn, self.mlp = _Attention(size), _Mlp(size)

    def forward(self, embedded: Tensor, states: Tensor, kept: list[tuple[Tensor, Tensor]], turn: Tensor) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)
        states = states + self.self_attn(both, kept, turn)
        fed: Tensor = self.mlp(self.post_attention_layernorm(states))
        return states + fed


class _Mlp(nn.Module):
    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.width, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.width, bias=False)
        self.down_proj = nn.Linear(size.width, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Attention(nn.Module):
    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.size = size
        queries = size.heads * size.head_dim
        keys = size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(2 * size.hidden, queries, bias=False)
        self.k_proj = nn.Linear(2 * size.hidden, keys, bias=False)
        self.v_proj = nn.Linear(2 * size.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, size.hidden, bias=False)

    def forward(self, x: Tensor, kept: list[tuple[Tensor, Tensor]], turn: Tensor) -> Tensor:
        """Returns the output for `x [N, L, 2 * hidden]`; `kept` has keys and values `[N, heads, L, head_dim]` of
        earlier steps."""
        size, (rows, length, _) = self.size, x.shape

        def heads(projection: nn.Linear, count: int) -> Tensor:
            found: Tensor = projection(x)
            return found.view(rows, length, count, size.head_dim).transpose(1, 2)

        query = rotated(heads(self.q_proj, size.heads), turn)
        key, value = rotated(heads(self.k_proj, size.kv_heads), turn), heads(self.v_proj, size.kv_heads)
        group = size.heads // size.kv_heads
        kept.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        (keys, values), step = kept[0], len(kept) - 1
        unseen = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1 - step)
        scores = (query @ keys.transpose(-1, -2)).masked_fill(unseen, float("-inf"))
        own = [(moved(key, step - of, 2), moved(value, step - of, 2)) for of, (key, value) in enumerate(kept) if of]
        beside = [(query * key).sum(-1, keepdim=True) for key, _ in own]
        weights = (torch.cat((scores, *beside), -1).float() * size.head_dim**-0.5).softmax(-1).to(value.dtype)
        out = weights[..., :length] @ values
        for place, (_, value) in enumerate(own):
            out = out + weights[..., length + place, None] * value
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


def moved(x: Tensor, places: int, dim: int = 1) -> Tensor:
    """Returns the tensor with its entries shifted by `places` along a dimension, zeros first."""
    if not places:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, places))
    return torch.cat((zeros, x.narrow(dim, 0, x.shape[dim] - places)), dim)


def rotations(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Returns cosines and signed sines of each position, `[2, L, head_dim]` float32."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    cosine, sine = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Returns `x [N, heads, L, head_dim]` with the rotary embedding of its positions."""
    return (x * turn[0] + x.roll(x.shape[-1] // 2, -1) * turn[1]).to(x.dtype)


STEP_WEIGHT = 0.8
"""The weight of a step's loss relative to that of the step before."""
WARM_UP, LAST_RATE = 0.05, 0.1
"""The share of steps in which the learning rate grows, and the share of the rate that is left at the end."""
LARGEST_RATE, RATE_OF_SIZE = 1e-3, 0.4
"""Limits of the learning rate: a constant, and a factor that is divided by the hidden size."""
FIRST_SHARE = 0.1
"""The factor of random weights in matrices whose results are added to the hidden states."""
GRADIENT = 0.5
"""The limit of the gradients' norm."""

Progress = Callable[[int, int, float], None]
"""Takes the steps done, the tokens in them, and the loss of the last step."""


@dataclass(frozen=True)
class Settings:
    """`steps` of `batch_rows` rows each; `unrolled` is the number of the head's own steps in one training step."""

    steps: int
    batch_rows: int
    unrolled: int
    seed: int
    learning_rate: float | None = None


@dataclass(frozen=True)
class Result:
    """The result: `acceptance` of the first draft, of the second if the first is accepted, and so on."""

    loss: float
    acceptance: list[float]
    seconds: float

    @property
    def tokens_of_step(self) -> float:
        """The mean number of tokens of a step that verifies as many drafts as were measured."""
        chances = [math.prod(self.acceptance[: count + 1]) for count in range(len(self.acceptance))]
        return 1.0 + sum(chances)


def check_model(spec: ModelSpec) -> None:
    """Raises ConfigError for a model whose states cannot be computed over whole rows."""
    if spec.augmented or spec.attends_to_latents or any(layer.sinks for layer in spec.attentions):
        raise ConfigError(
            f"{spec.model_type} has latents, sinks or parts beside its blocks: heads are trained for models without"
        )


def entries_of(layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs a head reads: one near the first, the middle, and one near the last."""
    return min(2, layers), max(1, layers // 2), max(1, layers - 3)


def head_size(spec: ModelSpec, drafted: int) -> HeadSize:
    """Returns the sizes of a head with the model's hidden size and head dimension."""
    attending = spec.attending[-1]
    attention, mlp = attending.attention, attending.mlp
    heads = max(1, spec.hidden_size // attention.head_dim)
    kv_heads = attention.kv_heads if heads % attention.kv_heads == 0 else 1
    width = mlp.width if isinstance(mlp, MlpSpec) else 3 * spec.hidden_size
    theta = 10000.0 if attending.rope is None else attending.rope.theta
    entries = len(entries_of(len(spec.layers)))
    return HeadSize(
        spec.hidden_size, width, heads, kv_heads, attention.head_dim, entries, drafted, spec.norm.epsilon, theta
    )


def drafted_tokens(rows: Tensor, vocabulary: int, most: int) -> Tensor:
    """Returns the most frequent tokens of the text, sorted; all if there are no more than `most`."""
    counts = torch.bincount(rows.flatten(), minlength=vocabulary)
    return counts.topk(min(most, vocabulary)).indices.sort().values


class Training:
    """Training of a head for `decoder` on `rows [N, L]` of token ids."""

    def __init__(self, decoder: Decoder, rows: Tensor, drafted: Tensor, settings: Settings) -> None:
        self._decoder = decoder
        self._rows = rows
        self._settings = settings
        self._device = decoder.build.device
        self.drafted = drafted.to(self._device)
        self._entries = entries_of(len(decoder.spec.layers))
        self._attend = LayersAttend(decoder.spec, rows.shape[1])
        torch.manual_seed(settings.seed)
        self.head = TrainedHead(head_size(decoder.spec, len(drafted))).to(self._device)
        self._begin_as_the_model()

    @torch.no_grad()
    def _begin_as_the_model(self) -> None:
        """Initializes the head with the model's output layer and norm, on the state nearest to them."""
        size = self._decoder.spec.hidden_size
        dtype = self._decoder.build.dtype
        head = self.head
        unit = torch.eye(size, dtype=dtype, device=self._device)
        head.lm_head.weight.copy_(self._decoder.logits(unit)[:, self.drafted].t())
        if self._decoder.spec.norm.kind == "rms":
            head.norm.weight.copy_(self._decoder.norm(torch.ones(1, size, dtype=dtype, device=self._device))[0])
        head.fc.weight.zero_()
        head.fc.weight[:, -size:].fill_diagonal_(1.0)
        for last in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
            last.weight.mul_(FIRST_SHARE)

    @torch.inference_mode()
    def _states(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the inputs of the layers, the embeddings of the next tokens, and the model's scores for rows [n, L].

        Scores `[n, L, vocab]` at a position are for the token after the next.
        """
        count, length = rows.shape
        decoder, ids = self._decoder, rows.to(self._device)
        inputs = LayerInputs(self._entries, decoder.build)
        positions = torch.arange(length, device=self._device).repeat(count)
        memory = new_states(decoder.spec.recurrent, [length] * count, decoder.build.dtype, self._device)
        hidden = decoder(ids.flatten(), positions, self._attend, states=memory, inputs=inputs)
        following = ids.roll(-1, 1)
        embedded = decoder.embed_tokens(following.flatten()).view(count, length, -1).float()
        scores = decoder.logits(hidden).view(count, length, -1).roll(-1, 1)
        return inputs.rows().view(count, length, -1).float(), embedded, scores

    def run(self, progress: Progress) -> float:
        """Trains, and returns the last loss."""
        settings, parameters = self._settings, list(self.head.parameters())
        rate = settings.learning_rate or min(LARGEST_RATE, RATE_OF_SIZE / self._decoder.spec.hidden_size)
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, settings.steps))
        order, loss = torch.Generator().manual_seed(settings.seed), float("nan")
        shuffled = torch.empty(0, dtype=torch.int64)
        for step in range(settings.steps):
            if len(shuffled) < settings.batch_rows:
                shuffled = torch.cat((shuffled, torch.randperm(len(self._rows), generator=order)))
            chosen, shuffled = shuffled[: settings.batch_rows], shuffled[settings.batch_rows :]
            found = self._loss(self._rows[chosen])
            optimizer.zero_grad(set_to_none=True)
            found.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(parameters, GRADIENT)
            optimizer.step()
            schedule.step()
            loss = found.item()
            progress(step + 1, (step + 1) * settings.batch_rows * self._rows.shape[1], loss)
        return loss

    def _loss(self, rows: Tensor) -> Tensor:
        """Returns the cross-entropy between the head's steps and the model's distribution over the tokens that can be
        drafted."""
        inputs, embedded, scores = (part.clone() for part in self._states(rows))
        likely = torch.isin(scores.argmax(-1), self.drafted)
        wanted = scores[..., self.drafted].softmax(-1)
        losses = []
        for step, found in enumerate(self.head(inputs, embedded, self._settings.unrolled)):
            known = likely.clone()
            known[:, :step] = known[:, -2:] = False  # the text after the last tokens is unknown
            divergence = -(wanted * found.float().log_softmax(-1)).sum(-1)
            losses.append(STEP_WEIGHT**step * (divergence * known).sum() / known.sum().clamp(min=1))
        return torch.stack(losses).sum()

    def train(self, held_out: Tensor, progress: Progress) -> Result:
        """Trains, then measures the head on the rows `held_out`."""
        started = time.monotonic()
        loss = self.run(progress)
        acceptance = self.acceptance(held_out, self._settings.unrolled)
        return Result(loss, acceptance, time.monotonic() - started)

    @torch.inference_mode()
    def acceptance(self, rows: Tensor, count: int) -> list[float]:
        """Returns the share of first drafts, of second drafts after correct first ones, and so on, that match the
        text."""
        right, tried = torch.zeros(count), torch.zeros(count)
        for batch in torch.split(rows, self._settings.batch_rows):
            inputs, embedded, _ = self._states(batch)
            said = batch.to(self._device).roll(-2, 1)
            known = torch.ones_like(said, dtype=torch.bool)
            known[:, -2:] = False
            for step, found in enumerate(self.head(inputs, embedded, count)):
                tried[step] += known.sum().cpu()
                known = known & (self.drafted[found.argmax(-1)] == said)
                right[step] += known.sum().cpu()
                known = moved(known, 1)
                known[:, -2:] = False
        return (right / tried.clamp(min=1)).tolist()

    def write(self, writer: Writer, dtype: torch.dtype, source: Path) -> None:
        """Writes a folder in the format of EAGLE-3's checkpoints."""
        vocabulary = self._decoder.spec.vocab_size
        for name, tensor in self.head.state_dict().items():
            writer.add(name, tensor.to(dtype))
        drafted = self.drafted.cpu()
        writer.add("d2t", drafted - torch.arange(len(drafted)))
        writer.add("t2d", torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, drafted, True))
        writer.finish(self._config(dtype), None, source, "")

    def _config(self, dtype: torch.dtype) -> dict[str, Any]:
        size, spec = self.head.size, self._decoder.spec
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": spec.vocab_size,
            "draft_vocab_size": size.drafted,
            "hidden_size": size.hidden,
            "intermediate_size": size.width,
            "num_hidden_layers": 1,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": size.epsilon,
            "rope_theta": size.theta,
            "max_position_embeddings": spec.max_position_embeddings,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [entry - 1 for entry in self._entries],
                "use_aux_hidden_state": True,
            },
        }


def share_of_rate(step: int, steps: int) -> float:
    """Returns the share of the learning rate at a step: it grows, then falls along half a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
