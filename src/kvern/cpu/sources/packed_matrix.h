// Weights of four or eight bits with scales for groups of a row's inputs.
//
// Codes are words of four bytes, of 16 outputs side by side. A word is eight numbers of four bits, the low ones of a
// byte first, or four of eight.
#pragma once

#include "codes.h"

// A matrix as Python describes it (kvern/cpu/packed.py: Groups). An output's number for a code is
// (number - zero) * scale * outer, or number * scale * outer - zero * outer_zero where that is; times the factor.
struct KvernGroups {
    const uint8_t* codes;     // [blocks, words, 16, 4]
    const void* scale;        // [blocks, groups, 16]
    const void* zero;         // the same, or null
    const void* outer;        // [blocks, groups / outer_groups, 16] float16, or null
    const void* outer_zero;   // the same
    const float* factor;      // [blocks, 16], or null
    const int32_t* order;     // [inputs], or null: the activation that a column multiplies
    const void* numbers;      // [16] int8: times `step` they are what codes of four bits stand for. Where rows stay as
                              // they are float32, and of codes of eight [2, 16], their low and their high halves
    int64_t inputs, group, outer_groups;
    int64_t run;              // so many activations are rounded to INT8 with a scale of their own; 0: none are
    float step;
    int32_t wide;             // a code has a byte
    int32_t scale_kind, zero_kind;
};

namespace kvern {

constexpr int64_t STEP = 4;             // bytes of an output that stand together
constexpr int64_t WORD = LANES * STEP;  // bytes of 16 outputs that do

// Numbers of scales and zeros, beside those of `Dtype`.
enum Kind : int32_t { FLOAT16_KIND = 2, E8M0_KIND = 3, E4M3_KIND = 4, UINT8_KIND = 5, INT8_KIND = 6 };

inline Floats load_half(const void* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#else
    const Integers bits = __builtin_convertvector(halves, Integers);
    return (Floats)((Integers)((Floats)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

inline Floats load_power(const void* from) {
    const Integers bits = load_widened<Bytes>(from);
    return (Floats)choose(bits < 1, Integers{} + 0x00400000, bits << 23);
}

template <class Load>
void convert(const void* from, int64_t size, int64_t first, int64_t count, const float* times, float* to,
             const Load& load_lanes) {
    const char* numbers = static_cast<const char*>(from) + first * size;
#pragma GCC unroll 4
    for (int64_t at = 0; at < count; at += LANES) {
        const Floats found = load_lanes(numbers + at * size);
        store(to + at, times == nullptr ? found : found * load(times + at));
    }
}

// So many numbers of a kind as float32, times others, if there are any.
inline void convert(const void* from, int32_t kind, int64_t first, int64_t count, const float* times, float* to) {
    const auto as = [&](int64_t size, const auto& load_lanes) {
        convert(from, size, first, count, times, to, load_lanes);
    };
    switch (kind) {
        case FLOAT32: return as(4, [](const void* at) { return load(static_cast<const float*>(at)); });
        case BFLOAT16: return as(2, [](const void* at) { return load(static_cast<const BFloat16*>(at)); });
        case FLOAT16_KIND: return as(2, load_half);
        case E8M0_KIND: return as(1, load_power);
        case E4M3_KIND: return as(1, [](const void* at) { return load(static_cast<const E4M3*>(at)); });
        case UINT8_KIND:
            return as(1, [](const void* at) { return __builtin_convertvector(load_widened<Bytes>(at), Floats); });
        default: return as(1, [](const void* at) { return load(static_cast<const Int8*>(at)); });
    }
}

// Whether zeros are parts of sums of integers: they are codes of four bits, one for each run.
inline bool sums_have_zeros(const KvernGroups& of) {
    const bool whole = of.zero != nullptr && of.zero_kind == UINT8_KIND && of.outer_zero == nullptr;
    return whole && !of.wide && of.run == of.group && of.step == 1;
}

// A row's activations in the order of the columns.
template <class Number>
const Number* ordered(const KvernGroups& of, const Number* x, Number* into) {
    if (of.order == nullptr) return x;
    for (int64_t column = 0; column < of.inputs; ++column) into[column] = x[of.order[column]];
    return into;
}

// How rows of so many activations are rounded: the scale of a run is `fixed` if that is above 0, else that of its
// largest number, or of `limit`, if that is above 0 and less.
struct Rounding {
    int64_t inputs, run;
    float fixed, limit;
};

// out [rows, outputs] = x [rows, inputs], rounded to INT8, times the matrix, plus bias, if there is one.
void multiply_rounded(const KvernGroups& of, const Rounding& how, const void* x, const void* bias, void* out,
                      int64_t rows, int64_t outputs, int32_t dtype);

}  // namespace kvern
