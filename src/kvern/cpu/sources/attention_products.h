// Products of small matrices in registers, and how keys and values are laid out for them.
//
// A way of multiplying packs numbers into words of 32 bits: one float32, or, where the processor multiplies such, a pair
// of bfloat16. The order in which a sum is made is that of the words, whatever the number of rows.
#pragma once

#include "attention_ahead.h"
#include "math.h"
#include "registers.h"
#include "transpose.h"

namespace kvern {

constexpr int TILE = 64;  // keys that are packed at a time
constexpr int TILE_VECTORS = TILE / LANES;

// What fits into the registers: rows by vectors of sums; the fewest vectors, which make the values of a word.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 4, PART_VECTORS = 2;
#elif defined(__AVX__) || defined(__aarch64__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 1, PART_VECTORS = 1;
#else
constexpr int BLOCK_ROWS = 2, BLOCK_VECTORS = 1, PART_VECTORS = 1;
#endif
constexpr int OPERANDS = LANES / WIDTH;  // of a vector, and as many sums
constexpr int IN_PLACE_ROWS = 4;  // for which values are read where they lie; for more they are packed once

#if !defined(__AVX512F__)
__attribute__((always_inline)) inline Lanes power_of_two(Lanes x) {
    const Lanes least = -127.0f - Lanes{};
    return power_of_bounded<LaneWords>(least > x ? least : x);
}
#endif

struct FloatProduct {
    static constexpr int PER_WORD = 1, PER_VECTOR = LANES;
    using Operand = Lanes;

    static Operand operand(const uint32_t* from) { return load_as<Lanes>(from); }
    static Operand repeated(const uint32_t* from) { return load_as<float>(from) - Lanes{}; }
    static Lanes add(Lanes sum, Operand left, Operand right) { return sum + left * right; }

    // The first `count` numbers of a vector, 0 behind them.
    template <class Number>
    static Words vector(const Number* from, int64_t count) {
        return count > 0 ? (Words)load_some(from, count) : Words{};
    }
    // Operands of the values of a word's keys, [PER_WORD, PER_VECTOR], and sums with them in the order of the numbers.
    static void pair_values(const Words* rows, Operand* pairs) { std::memcpy(pairs, rows, sizeof *rows); }
    static void put_in_order(Floats*) {}
    static void store_weights(uint32_t* to, const Lanes* weights) { std::memcpy(to, weights, TILE * sizeof *to); }
};

#if defined(__AVX512BF16__)
// The codes of e4m3 without a sign, as bfloat16.
struct E4M3Table {
    BFloat16 numbers[128];

    E4M3Table() {
        E4M3 codes[128];
        for (int code = 0; code < 128; ++code) codes[code] = {static_cast<uint8_t>(code)};
        for (int code = 0; code < 128; code += LANES) store(numbers + code, load(codes + code));
    }
};

inline const E4M3Table FLOAT8_TABLE;

struct PairProduct {
    static constexpr int PER_WORD = 2, PER_VECTOR = 2 * LANES;
    using Operand = Words;

    static Operand operand(const uint32_t* from) { return (Words)_mm512_loadu_si512(from); }
    static Operand repeated(const uint32_t* from) { return (Words)_mm512_set1_epi32(static_cast<int>(*from)); }
    static Floats add(Floats sum, Operand left, Operand right) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
    }

    static Words vector(const BFloat16* from, int64_t count) {
        if (count >= PER_VECTOR) return (Words)_mm512_loadu_si512(from);
        return (Words)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }
    static Words vector(const E4M3* from, int64_t count) {
        const uint32_t there = count >= PER_VECTOR ? 0xffffffff : (1u << count) - 1;
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, from));
        const BFloat16* table = FLOAT8_TABLE.numbers;
        const __m512i low = _mm512_permutex2var_epi16(_mm512_loadu_si512(table), code, _mm512_loadu_si512(table + 32));
        const __m512i high =
            _mm512_permutex2var_epi16(_mm512_loadu_si512(table + 64), code, _mm512_loadu_si512(table + 96));
        const __mmask32 is_high = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x80)), 8);
        return (Words)_mm512_or_si512(_mm512_mask_blend_epi16(is_high, low, high), sign);
    }
    template <class Code>
    static Words vector(const Code* from, int64_t count) {
        const Floats first = load_some(from, count);
        const Floats second = count > LANES ? load_some(from + LANES, count - LANES) : Floats{};
        return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
    static void pair_values(const Words* rows, Operand* pairs) {
        constexpr __mmask32 ALL = 0xffffffff;
        pairs[0] = (Words)_mm512_maskz_unpacklo_epi16(ALL, (__m512i)rows[0], (__m512i)rows[1]);
        pairs[1] = (Words)_mm512_maskz_unpackhi_epi16(ALL, (__m512i)rows[0], (__m512i)rows[1]);
    }
    static void put_in_order(Floats* sums) {
        const __m512i low = (__m512i)sums[0], high = (__m512i)sums[1];
        sums[0] = (Floats)_mm512_permutex2var_epi64(low, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high);
        sums[1] = (Floats)_mm512_permutex2var_epi64(low, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), high);
    }
    static void store_weights(uint32_t* to, const Floats* weights) {
        for (int part = 0; part < TILE_VECTORS; part += 2) {
            const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)weights[part + 1], (__m512)weights[part]);
            std::memcpy(to + part / 2 * LANES, &pairs, sizeof pairs);
        }
    }
};
#endif

// Operands from words [depth, stride] that are packed.
template <class Product>
struct Packed {
    static constexpr int ROWS = BLOCK_ROWS;
    const uint32_t* words;
    int64_t stride;

    template <int COUNT>
    void operands(int64_t word, int64_t first, typename Product::Operand (&across)[COUNT]) const {
#pragma GCC unroll 16
        for (int index = 0; index < COUNT; ++index) {
            across[index] = Product::operand(words + word * stride + first + index * WIDTH);
        }
    }
};

// Operands from the `size` numbers of each value, `offset` behind where it lies.
template <class Product, class Number>
struct InPlace {
    static constexpr int ROWS = IN_PLACE_ROWS;
    const Number* const* values;
    int64_t offset, size;
    Ahead& ahead;

    template <int COUNT>
    void operands(int64_t word, int64_t first, typename Product::Operand (&across)[COUNT]) const {
        constexpr int VECTORS = COUNT / OPERANDS;
        for (int column = 0; column < VECTORS; column += Product::PER_WORD) {
            const int64_t number = first + column * LANES;
            Words rows[Product::PER_WORD];
            for (int row = 0; row < Product::PER_WORD; ++row) {
                rows[row] = Product::vector(values[word * Product::PER_WORD + row] + offset + number, size - number);
            }
            Product::pair_values(rows, across + column * OPERANDS);
        }
        ahead.read(VECTORS * LANES * Product::PER_WORD * sizeof(Number));
    }
};

// body(rows), of 1 to MOST, with the number as a constant.
template <int MOST, class Body>
void with_rows(int rows, const Body& body) {
    if constexpr (MOST == 1) {
        body(std::integral_constant<int, 1>());
    } else {
        rows == MOST ? body(std::integral_constant<int, MOST>()) : with_rows<MOST - 1>(rows, body);
    }
}

// sums [ROWS, VECTORS of them] = sums * decay [ROWS], or 0 without decay, + left [ROWS, depth] @ right [depth, VECTORS].
template <class Product, int ROWS, int VECTORS, class Right>
void multiply_block(const uint32_t* left, int64_t left_stride, const Right& right, int64_t first, float* sums,
                    int64_t sums_stride, int64_t depth, const float* decay) {
    constexpr int COUNT = VECTORS * OPERANDS;
    Lanes sum[ROWS][COUNT];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
        for (int index = 0; index < COUNT; ++index) {
            const float* old = sums + row * sums_stride + first + index * WIDTH;
            sum[row][index] = decay == nullptr ? Lanes{} : load_as<Lanes>(old) * decay[row];
        }
    }
    for (int64_t word = 0; word < depth; ++word) {
        typename Product::Operand across[COUNT];
        right.operands(word, first, across);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const typename Product::Operand own = Product::repeated(left + row * left_stride + word);
#pragma GCC unroll 16
            for (int index = 0; index < COUNT; ++index) {
                sum[row][index] = Product::add(sum[row][index], own, across[index]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
        for (int index = 0; index < COUNT; ++index) {
            std::memcpy(sums + row * sums_stride + first + index * WIDTH, &sum[row][index], REGISTER);
        }
    }
}

// The same for at most Right::ROWS rows and any number of vectors, rounded up to PART_VECTORS.
template <class Product, class Right>
void multiply(int rows, int64_t vectors, const uint32_t* left, int64_t left_stride, const Right& right, float* sums,
              int64_t sums_stride, int64_t depth, const float* decay) {
    with_rows<Right::ROWS>(rows, [&](auto count) {
        constexpr int ROWS = decltype(count)::value;
        int64_t first = 0;
        for (; first + BLOCK_VECTORS <= vectors; first += BLOCK_VECTORS) {
            multiply_block<Product, ROWS, BLOCK_VECTORS>(left, left_stride, right, first * LANES, sums, sums_stride, depth,
                                                         decay);
        }
        for (; first < vectors; first += PART_VECTORS) {
            multiply_block<Product, ROWS, PART_VECTORS>(left, left_stride, right, first * LANES, sums, sums_stride, depth,
                                                        decay);
        }
    });
}

}  // namespace kvern
