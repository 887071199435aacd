// What products with packed weights have in common: they go by tiles of rows and of blocks of 16 outputs.
#pragma once

#include "packed_matrix.h"
#include "scratch.h"
#include "threads.h"

namespace kvern {

constexpr int ROW_BLOCKS = 4;  // of a single row: chains of sums that run beside each other

// Of a job's blocks, [blocks, groups, 16]: what sums of groups are multiplied by, and, of a matrix with zeros, what
// sums of activations take away.
class Factors {
public:
    Factors(const KvernGroups& of, int64_t first, int64_t blocks)
        : first_(first), width_(of.inputs / of.group * LANES) {
        static thread_local Scratch scratch;
        const int64_t begin = first * width_, count = blocks * width_;
        scale_ = scratch.array<float>(2 * count);
        offset_ = scale_ + count;
        convert(of.scale, of.scale_kind, begin, count, nullptr, scale_);
        if (of.outer != nullptr) multiply_outer(of.outer, of.outer_groups, begin, count, scale_);
        if (of.zero == nullptr || sums_have_zeros(of)) return;
        convert(of.zero, of.zero_kind, begin, count, of.outer_zero == nullptr ? scale_ : nullptr, offset_);
        if (of.outer_zero != nullptr) multiply_outer(of.outer_zero, of.outer_groups, begin, count, offset_);
    }
    const float* scale_of(int64_t block) const { return scale_ + (block - first_) * width_; }
    const float* offset_of(int64_t block) const { return offset_ + (block - first_) * width_; }

private:
    static void multiply_outer(const void* outer, int64_t groups, int64_t begin, int64_t count, float* numbers) {
        const uint16_t* halves = static_cast<const uint16_t*>(outer) + begin / groups;
        for (const float* end = numbers + count; numbers < end; halves += LANES) {
            const Floats factor = load_half(halves);
#pragma GCC unroll 4
            for (int64_t group = 0; group < groups; ++group, numbers += LANES) store(numbers, load(numbers) * factor);
        }
    }

    int64_t first_, width_;
    float *scale_, *offset_;
};

template <int ROWS, int BLOCKS, class Tile>
void for_each_row(int64_t row, int64_t rows, int64_t block, const Factors& factors, const Tile& tile) {
    for (; rows >= ROWS; row += ROWS, rows -= ROWS) {
        tile(factors, std::integral_constant<int, ROWS>(), std::integral_constant<int, BLOCKS>(), row, block);
    }
    if constexpr (ROWS > 1) {
        if (rows > 0) for_each_row<ROWS - 1, BLOCKS>(row, rows, block, factors, tile);
    }
}

// tile(factors, ROWS, BLOCKS, row, block) for all of a product, with constants of at most so many rows and blocks, by
// all threads; a single row has ALONE of them.
template <int ROWS, int BLOCKS, int ALONE = ROW_BLOCKS, class Tile>
void for_each_tile(const KvernGroups& of, int64_t rows, int64_t outputs, const Tile& tile) {
    const int64_t blocks = (outputs + LANES - 1) / LANES;
    parallel((blocks + ROW_BLOCKS - 1) / ROW_BLOCKS, [&](int64_t job) {
        int64_t block = job * ROW_BLOCKS;
        const int64_t last = block + ROW_BLOCKS < blocks ? block + ROW_BLOCKS : blocks;
        const Factors factors(of, block, last - block);
        for (; rows == 1 && block + ALONE <= last; block += ALONE) for_each_row<1, ALONE>(0, 1, block, factors, tile);
        for (; block + BLOCKS <= last; block += BLOCKS) for_each_row<ROWS, BLOCKS>(0, rows, block, factors, tile);
        for (; block < last; ++block) for_each_row<ROWS, 1>(0, rows, block, factors, tile);
    });
}

// The outputs of a tile, from its sums.
template <class Number, int ROWS, int BLOCKS>
void finish_tile(const KvernGroups& of, const Floats (&total)[ROWS][BLOCKS], const Number* bias, Number* out,
                 int64_t outputs, int64_t row, int64_t block) {
    Floats results[ROWS][BLOCKS];  // in memory: the loop that made the sums has all registers
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) results[r][b] = total[r][b];
    }
#pragma GCC unroll 1
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 1
        for (int b = 0; b < BLOCKS; ++b) {
            const int64_t output = (block + b) * LANES, count = outputs - output;
            Floats result = results[r][b];
            if (of.factor != nullptr) result *= load(of.factor + output);
            if (bias != nullptr) result += load_some(bias + output, count);
            store_some(out + (row + r) * outputs + output, result, count);
        }
    }
}

}  // namespace kvern
