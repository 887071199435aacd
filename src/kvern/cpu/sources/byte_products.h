// Dot products of bytes: rounded activations times codes of eight bits, or of four by a table, summed as integers.
#pragma once

#include "packed_matrix.h"

namespace kvern {

// `Sums` are those of 16 outputs, `Inputs` hold four activations for each, `Weights` four numbers plus OFFSET of each.
#if defined(__AVX512VNNI__)
using Sums = __m512i;
using Inputs = __m512i;
using Weights = __m512i;
using Table = __m512i;
constexpr int32_t OFFSET = 128;  // the instruction takes one factor without a sign
inline Sums start(int32_t number) { return _mm512_set1_epi32(number); }
inline Inputs inputs_of(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}
inline __m512i with_offset(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-OFFSET)); }
inline Table table_of(const int8_t* numbers) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return with_offset(_mm512_maskz_broadcast_i32x4(0xffff, bytes));  // without a mask g++ 12 warns, see transpose.h
}
inline Weights weights_of(const uint8_t* codes) { return with_offset(_mm512_loadu_si512(codes)); }
inline __m512i look_up(Table table, __m512i bytes) {
#if defined(__AVX512VBMI__)
    return _mm512_maskz_permutexvar_epi8(~0ull, bytes, table);  // of 64, which are four times the same 16
#else
    return _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, _mm512_set1_epi8(15)));
#endif
}
template <int HALF>
Weights weights_of(const uint8_t* codes, Table table) {
    return look_up(table, _mm512_srli_epi16(_mm512_loadu_si512(codes), 4 * HALF));
}
inline Sums add_products(Sums sums, Weights weights, Inputs x) { return _mm512_dpbusd_epi32(sums, weights, x); }
inline Sums added(Sums one, Sums other) { return _mm512_add_epi32(one, other); }
inline Sums less(Sums sums, Sums one, int32_t times) {
    return _mm512_sub_epi32(sums, _mm512_mullo_epi32(one, _mm512_set1_epi32(times)));
}
inline Floats to_floats(Sums sums) { return __builtin_convertvector((Integers)sums, Floats); }
#elif defined(__AVX2__)
struct Sums {
    __m256i low, high;
};
using Inputs = __m256i;
using Weights = Sums;
using Table = __m256i;
constexpr int32_t OFFSET = 0;
inline Sums start(int32_t number) { return {_mm256_set1_epi32(number), _mm256_set1_epi32(number)}; }
inline Inputs inputs_of(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}
inline Table table_of(const int8_t* numbers) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
inline Weights weights_of(const uint8_t* codes) {
    const auto at = reinterpret_cast<const __m256i*>(codes);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline __m256i look_up(Table table, __m256i bytes) {
    return _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, _mm256_set1_epi8(15)));
}
template <int HALF>
Weights weights_of(const uint8_t* codes, Table table) {
    const Weights bytes = weights_of(codes);
    return {look_up(table, _mm256_srli_epi16(bytes.low, 4 * HALF)),
            look_up(table, _mm256_srli_epi16(bytes.high, 4 * HALF))};
}
// The instruction takes one factor without a sign: the activation has that of the product. Two products of 128 times
// 127 are a number of 16 bits.
inline __m256i add_products(__m256i sums, __m256i weights, Inputs x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Sums add_products(Sums sums, Weights weights, Inputs x) {
    return {add_products(sums.low, weights.low, x), add_products(sums.high, weights.high, x)};
}
inline Sums added(Sums one, Sums other) {
    return {_mm256_add_epi32(one.low, other.low), _mm256_add_epi32(one.high, other.high)};
}
inline Sums less(Sums sums, Sums one, int32_t times) {
    const __m256i factor = _mm256_set1_epi32(times);
    return {_mm256_sub_epi32(sums.low, _mm256_mullo_epi32(one.low, factor)),
            _mm256_sub_epi32(sums.high, _mm256_mullo_epi32(one.high, factor))};
}
inline Floats to_floats(Sums sums) {
    Integers whole;
    std::memcpy(&whole, &sums, sizeof whole);
    return __builtin_convertvector(whole, Floats);
}
#else
using Sums = Integers;
using Weights = Integers;  // the first of four numbers lowest
struct Inputs {
    int32_t numbers[STEP];
};
struct Table {
    int8_t numbers[16];
};
constexpr int32_t OFFSET = 0;
inline Sums start(int32_t number) { return Integers{} + number; }
inline Inputs inputs_of(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
inline Table table_of(const int8_t* numbers) {
    Table table;
    std::memcpy(table.numbers, numbers, sizeof table.numbers);
    return table;
}
inline Weights weights_of(const uint8_t* codes) {
    Integers four;
    std::memcpy(&four, codes, sizeof four);
    return four;
}
template <int HALF>
Weights weights_of(const uint8_t* codes, const Table& table) {
    int8_t found[WORD];
    for (int64_t at = 0; at < WORD; ++at) found[at] = table.numbers[codes[at] >> 4 * HALF & 15];
    Weights weights;
    std::memcpy(&weights, found, sizeof weights);
    return weights;
}
inline Sums add_products(Sums sums, Weights weights, Inputs x) {
    for (int at = 0; at < STEP; ++at) sums += ((Integers)((Words)weights << (24 - 8 * at)) >> 24) * x.numbers[at];
    return sums;
}
inline Sums added(Sums one, Sums other) { return one + other; }
inline Sums less(Sums sums, Sums one, int32_t times) { return sums - one * times; }
inline Floats to_floats(Sums sums) { return __builtin_convertvector(sums, Floats); }
#endif

// Sixteen codes of eight bits as `Sums`.
inline Sums load_codes(const uint8_t* from) {
    const Integers codes = load_widened<Bytes>(from);
    Sums found;
    std::memcpy(&found, &codes, sizeof found);
    return found;
}

}  // namespace kvern
