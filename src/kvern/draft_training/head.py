"""The module of an EAGLE-3 draft head for training: over whole rows of text, and several of its own steps at a time.

  step 0, position t:  the model's states of token t, and token t + 1               ->  drafts token t + 2
  step 1, position t:  the output of step 0 at position t - 1, and token t + 1      ->  drafts token t + 2
  step j, position t:  the output of step j - 1 at position t - 1, and token t + 1  ->  drafts token t + 2

So step j drafts like a head that has drafted j tokens already (training-time test, Li et al. 2025,
https://arxiv.org/abs/2503.01840, section 3.2): it attends to keys of step 0 up to position t - j, and to keys of steps
1 to j at the positions after. Shapes: N rows of L tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
