"""Operands of Hopper's matrix units from GGUF's Q4_K and Q6_K, made in registers: `kernels/stream_blocks_hopper.py`.

A lane has codes of two rows, and of a half of a block of 256 inputs those of one run of 32: j is its number modulo 4.
Tensors `[OUTPUTS, 4, 4]` of words have a run's four words q last; in a word the codes p, and p + 4 beside them.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

BLOCK = 256
"""Inputs that share a d."""
WORDS = gl.constexpr(BLOCK // 16)
"""The words with four bits of each code of half a block."""

# Of a scale, $4: the pairs that pairs of 1024 + code and of 1024 + 16 * code are multiplied by, and what is added then.
_PAIRS = gl.constexpr(
    "{ .reg .b32 pair, by; mov.b32 by, 0x64006400; mad.lo.u32 pair, $4, 0x10001, by; sub.f16x2 $0, pair, by;"
    "mov.b32 by, 0xe400e400; mul.f16x2 $1, $0, by; mov.b32 by, 0x2c002c00; mul.f16x2 $2, $0, by;"
    "mov.b32 by, 0xd400d400; mul.f16x2 $3, $0, by; }"
)
# Of two integers, $2 and $3, below 1024: float16.
_INTEGERS = gl.constexpr(
    "{ .reg .b32 pair, by; mov.b32 by, 0x64006400; mad.lo.u32 pair, $3, 0x10000, $2; or.b32 pair, pair, by;"
    "sub.f16x2 pair, pair, by; mov.b32 {$0, $1}, pair; }"
)


@gluon.constexpr_function
def _assembly():
    """Returns assembly that turns a word of eight codes, $8, and the pairs of _PAIRS, $9 to $12, into numbers."""
    lines = ["{ .reg .b32 word, pair; mov.b32 word, $8;"]
    for place in range(4):
        if place == 2:
            lines.append("shr.b32 word, word, 8;")
        mask, by, added = (0x00F000F0, "$11", "$12") if place % 2 else (0x000F000F, "$9", "$10")
        lines.append(f"lop3.b32 pair, word, {mask:#x}, 0x64006400, 0xea; fma.rn.f16x2 pair, pair, {by}, {added};")
        lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, pair;")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _assembly_of_six():
    """Returns assembly for 64 + code, from words of four bits, $8, and of the other bits of even and odd inputs, $9,
    $10.

    $11 says which byte of those is the word's: once as it is, and once with its second half as the first. $12 and $13
    are what pairs are multiplied by and what is added.
    """
    lines = ["{ .reg .b32 even, odd, bits, word, pair; shr.b32 even, $9, 4; prmt.b32 even, $9, even, $11;"]
    lines.append("shr.b32 odd, $10, 4; prmt.b32 odd, $10, odd, $11;")
    for place, shift in enumerate(
        ("shl.b32 word, $8, 4;", "mov.b32 word, $8;", "shr.b32 word, $8, 4;", "shr.b32 word, $8, 8;")
    ):
        bits = "odd" if place % 2 else "even"
        lines.append(f"{shift} lop3.b32 pair, word, 0x00f000f0, 0x54005400, 0xea;")
        if place >= 2:
            lines.append(f"shr.b32 {bits}, {bits}, 2;")
        lines.append(f"lop3.b32 pair, {bits}, 0x03000300, pair, 0xea; fma.rn.f16x2 pair, pair, $12, $13;")
        lines.append(f"mov.b32 {{${2 * place}, ${2 * place + 1}}}, pair;")
    return " ".join([*lines, "}"])


# Of a scale, $2, in the lowest byte: the pairs that pairs of 64 + code are multiplied by, and what is added then.
_PAIRS_OF_SIX = gl.constexpr(
    "{ .reg .b32 pair, by; and.b32 pair, $2, 0xff; xor.b32 pair, pair, 0x80; mov.b32 by, 0x64006400;"
    "mad.lo.u32 pair, pair, 0x10001, by; mov.b32 by, 0x64806480; sub.f16x2 $0, pair, by;"
    "mov.b32 by, 0xd600d600; mul.f16x2 $1, $0, by; }"
)

NUMBER_REGISTERS_OF_SIX = gl.constexpr(",".join(["=h"] * 8) + ",r,r,r,r,r,r")
NUMBER_REGISTERS = gl.constexpr(",".join(["=h"] * 8) + ",r,r,r,r,r")


@gluon.constexpr_function
def words_layout(outputs: int):
    """[outputs, WORDS]: a lane has the four words of its run."""
    warps = [[16, 0], [32, 0], [64, 0], [128, 0]][: (outputs // 16).bit_length() - 1]
    registers, lanes = [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, 16])


@gluon.constexpr_function
def _scale_layout(outputs: int):
    """[outputs, 4]: a lane has the four words of the two rows of which it has codes."""
    warps = [[16, 0], [32, 0], [64, 0], [128, 0]][: (outputs // 16).bit_length() - 1]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], warps, [], [outputs, 4]
    )


@gluon.constexpr_function
def run_layout(outputs: int, words: int):
    """[outputs, 4 * words]: of the two rows of which a lane has codes, so many words or scales of its run."""
    warps = [[16, 0], [32, 0], [64, 0], [128, 0]][: (outputs // 16).bit_length() - 1]
    registers = [[0, 1], [8, 0]] if words == 2 else [[8, 0]]
    lanes = [[0, words], [0, 2 * words], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [outputs, 4 * words])


@gluon.constexpr_function
def gated_layout():
    """[64, 8] of four warps: a lane has the sums of gate and of up for the same output."""
    return gl.DistributedLinearLayout(
        [[32, 0], [0, 4]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 1], [0, 2]], [], [64, 8]
    )


@gluon.jit
def numbers_of_four(words, scale, layout: gl.constexpr):
    """Returns the operand [OUTPUTS, 128] from words [OUTPUTS, 4, 4] and the scales [OUTPUTS, 4, 1] of their runs."""
    pairs: gl.constexpr = _PAIRS
    assembly: gl.constexpr = _assembly()
    low, low_added, high, high_added = gl.inline_asm_elementwise(
        pairs, "=&r,=&r,=&r,=&r,r", [scale], (gl.int32,) * 4, is_pure=True, pack=1
    )
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        assembly, NUMBER_REGISTERS, [words, low, low_added, high, high_added], (gl.float16,) * 8, is_pure=True, pack=1
    )
    first, second = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    return _operand(gl.join(first, second), layout)


@gluon.jit
def _operand(numbers, layout: gl.constexpr):
    """Returns the result of the assembly for words, as an operand."""
    OUTPUTS: gl.constexpr = numbers.shape[0]
    every = gl.reshape(numbers, [OUTPUTS, 4, 4, 2, 2, 2])  # output, j, q, i, p & 1, p >> 1
    tile = gl.reshape(gl.permute(every, (0, 2, 5, 4, 1, 3)), [OUTPUTS, 128])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def numbers_of_six(words, bits, scale, layout: gl.constexpr):
    """Returns `_numbers` for words with further bits [OUTPUTS, 8], and two scales of each run in a byte [OUTPUTS,
    4]."""
    OUTPUTS: gl.constexpr = words.shape[0]
    pairs: gl.constexpr = _PAIRS_OF_SIX
    assembly: gl.constexpr = _assembly_of_six()
    runs: gl.constexpr = gl.SliceLayout(2, words.type.layout)
    even, odd = gl.split(gl.reshape(bits, [OUTPUTS, 4, 2]))
    even = gl.expand_dims(gl.convert_layout(even, runs), 2)
    odd = gl.expand_dims(gl.convert_layout(odd, runs), 2)
    scale = gl.expand_dims(gl.convert_layout(scale, runs), 2)
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, words.type.layout)))
    q = gl.expand_dims(gl.expand_dims(q, 0), 0)
    low, low_added = gl.inline_asm_elementwise(pairs, "=&r,=r,r", [scale], (gl.int32,) * 2, is_pure=True, pack=1)
    high, high_added = gl.inline_asm_elementwise(pairs, "=&r,=r,r", [scale >> 8], (gl.int32,) * 2, is_pure=True, pack=1)
    by, added = gl.where(q < 2, low, high), gl.where(q < 2, low_added, high_added)
    byte = 0x4000 + q * 0x1010
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        assembly,
        NUMBER_REGISTERS_OF_SIX,
        [words, even, odd, byte, by, added],
        (gl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    first, second = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    return _operand(gl.join(first, second), layout)


@gluon.jit
def minima_operand(first, second, layout: gl.constexpr):
    """Returns the operand [OUTPUTS, SUMS] of the minima [OUTPUTS, 4] of the runs j and of the four after them."""
    OUTPUTS: gl.constexpr = first.shape[0]
    integers: gl.constexpr = _INTEGERS
    a, b = gl.inline_asm_elementwise(integers, "=h,=h,r,r", [first, second], (gl.float16,) * 2, is_pure=True, pack=1)
    both = gl.reshape(gl.join(a, b), [OUTPUTS, 8])
    tile = gl.reshape(gl.permute(gl.join(both, both), (0, 2, 1)), [OUTPUTS, 16])
    return gl.convert_layout(tile, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def four_words(words):
    """Splits the words of each row: [OUTPUTS, 4] to four times [OUTPUTS]."""
    even, odd = gl.split(gl.reshape(words, [words.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def of_run(word, layout: gl.constexpr):
    """Returns byte j and above of each row's word: [OUTPUTS] to [OUTPUTS, 4]."""
    spread = gl.expand_dims(gl.convert_layout(word, gl.SliceLayout(1, layout)), 1)
    return spread >> (8 * gl.arange(0, 4, gl.SliceLayout(0, layout)))[None, :]


@gluon.jit
def scales_of_block(
    scale, block, outputs, blocks, OUTPUTS: gl.constexpr, WIDE: gl.constexpr, SIX: gl.constexpr, by_row: gl.constexpr
):
    """Returns the scales of a block for a program's rows: Q4_K's four words; Q6_K's d and the scales of both halves."""
    layout: gl.constexpr = run_layout(OUTPUTS, 1) if SIX else _scale_layout(OUTPUTS)
    block = gl.minimum(block, blocks - 1)
    line = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    line = gl.minimum(gl.program_id(0) * WIDE + line % WIDE, outputs - 1) + line // WIDE * outputs
    column = gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
    if SIX:
        begin = (line.to(gl.int64) * blocks + block) * 9
        pair = scale + begin[:, None] + column
        d = gl.convert_layout(gl.load(scale + begin), by_row)
        return d, gl.load(pair + 1).to(gl.int32), gl.load(pair + 5).to(gl.int32)
    else:
        place = scale + line.to(gl.int64)[:, None] * (blocks * 4) + column
        return (gl.load(place + block * 4),)
