"""The types of a GGUF tensor's numbers: sizes of blocks in numbers and bytes. No torch is imported.

Names and numbers are those of ggml's `ggml_type` (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from typing import NamedTuple


class BlockType(NamedTuple):
    """`numbers` of a row, one after another, are stored in `size` bytes."""

    name: str
    numbers: int
    size: int


PLAIN = {0: BlockType("f32", 1, 4), 1: BlockType("f16", 1, 2), 30: BlockType("bf16", 1, 2)}
QUANTIZED = {
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    20: BlockType("iq4_nl", 32, 18),
    23: BlockType("iq4_xs", 256, 136),
    39: BlockType("mxfp4", 32, 17),
}
TYPES = PLAIN | QUANTIZED
BY_NAME = {item.name: item for item in TYPES.values()}
REFUSED = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that kvern cannot read."""
