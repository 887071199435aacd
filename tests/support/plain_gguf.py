"""A small GGUF file, made without the package that writes them: a random Llama in Q8_0, with a byte-level tokenizer."""

import struct
from pathlib import Path

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, INNER, HEADS, KV_HEADS, LAYERS, BLOCK = 64, 96, 4, 2, 2, 32
F32, Q8_0, ALIGNMENT = 0, 8, 32
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: str | int | float | list[str]) -> bytes:
    match value:
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case list():
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
        case int():
            return struct.pack("<II", UINT32, value)
    return struct.pack("<If", FLOAT32, value)


def _shapes(tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors, rows first."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (tokens, WIDTH), "output_norm.weight": (WIDTH,)}
    layer = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (WIDTH // HEADS * KV_HEADS, WIDTH),
        "attn_v": (WIDTH // HEADS * KV_HEADS, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    for index in range(LAYERS):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def write_plain_gguf(file: Path) -> Path:
    """Write the file, always the same one; its path."""
    tokens = [*sorted(ByteLevel.alphabet()), "<s>", "</s>"]
    values: dict[str, str | int | float | list[str]] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    generator, infos, data, shapes = np.random.default_rng(0), b"", b"", _shapes(len(tokens))
    for name, shape in shapes.items():
        kind = Q8_0 if len(shape) == 2 else F32
        infos += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        if kind == F32:
            data += np.ones(shape, np.float32).tobytes()
        else:
            blocks = np.zeros(shape[0] * shape[1] // BLOCK, [("scale", "<f2"), ("codes", "i1", BLOCK)])
            blocks["scale"], blocks["codes"] = 0.002, generator.integers(-127, 128, (len(blocks), BLOCK))
            data += blocks.tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    head += b"".join(_string(key) + _value(value) for key, value in values.items()) + infos
    file.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return file
