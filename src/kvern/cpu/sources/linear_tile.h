// Sums of a few rows times a few registers of columns, and of a panel of rows times up to GROUP columns.
//
// Columns are lanes of registers: each one's sum runs over the inputs in one order, whatever rows are beside it.
#pragma once

#include <array>
#include <utility>

#include "linear_layout.h"
#include "registers.h"
#include "tiles.h"

namespace kvern {
namespace {  // another library in the process, of another processor's instructions, has its own

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = 12;
#endif
// SUMS: registers that hold sums; what remains is for weights and inputs.

constexpr int TILE = 6;  // rows whose sums are in registers at a time

// How the inputs of a step are multiplied: in PARTS, one after another. Rows hold `Input`s.
struct Float32Steps {
    using Number = float;
    using Input = float;
    static constexpr int PARTS = 1;

    static Lanes weights(const float* from, int) { return load_as<Lanes>(from); }
    static Lanes input(const float* from, int) { return from[0] - Lanes{}; }
    static Lanes add_product(Lanes sum, Lanes input, Lanes weights) { return sum + input * weights; }
};

#if defined(KVERN_TILES)
template <class Tiles>
struct TileSteps {
    using Number = BFloat16;
    using Input = BFloat16;
};
#elif defined(__AVX512BF16__)
struct BFloat16Steps {
    using Number = BFloat16;
    using Input = BFloat16;
    static constexpr int PARTS = 1;

    static LaneBits weights(const BFloat16* from, int) { return load_as<LaneBits>(from); }
    static LaneBits input(const BFloat16* from, int) { return load_as<int32_t>(from) + LaneBits{}; }
    static Lanes add_product(Lanes sum, LaneBits input, LaneBits weights) {
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)input, (__m512bh)weights);
    }
};
#else
struct BFloat16Steps {
    using Number = BFloat16;
    using Input = float;
    static constexpr int PARTS = 2;

    static Lanes weights(const BFloat16* from, int part) {
        const LaneBits pairs = load_as<LaneBits>(from);
        return (Lanes)(part == 0 ? pairs << 16 : pairs & static_cast<int32_t>(0xffff0000));
    }
    static Lanes input(const float* from, int part) { return from[part] - Lanes{}; }
    static Lanes add_product(Lanes sum, Lanes input, Lanes weights) { return sum + input * weights; }
};
#endif

// Packed weights of columns of one group, and of the steps of a chunk.
template <class Number>
struct Slice {
    const Number* weights;
    int64_t stride;  // numbers from step to step
    int64_t steps;
};

// sums [ROWS, GROUP] = rows times REGISTERS registers of columns, or more than they were where this continues.
template <class Steps, int ROWS, int REGISTERS>
void multiply_tile(const typename Steps::Input* rows, int64_t row_stride, Slice<typename Steps::Number> slice,
                   float* sums, bool continues) {
    using Number = typename Steps::Number;
    constexpr int INPUTS = INPUTS_OF_STEP<Number>;
    Lanes sum[ROWS][REGISTERS] = {};
    if (continues) {
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
            for (int index = 0; index < REGISTERS; ++index) {
                sum[row][index] = load_as<Lanes>(sums + row * GROUP + index * WIDTH);
            }
        }
    }
    const Number* weights = slice.weights;
    for (int64_t step = 0; step < slice.steps; ++step, weights += slice.stride, rows += INPUTS) {
#pragma GCC unroll 2
        for (int part = 0; part < Steps::PARTS; ++part) {
            decltype(Steps::weights(weights, part)) held[REGISTERS];
#pragma GCC unroll 16
            for (int index = 0; index < REGISTERS; ++index) {
                held[index] = Steps::weights(weights + index * WIDTH * INPUTS, part);
            }
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                const auto input = Steps::input(rows + row * row_stride, part);
#pragma GCC unroll 16
                for (int index = 0; index < REGISTERS; ++index) {
                    sum[row][index] = Steps::add_product(sum[row][index], input, held[index]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
        for (int index = 0; index < REGISTERS; ++index) {
            const Lanes numbers = sum[row][index];
            std::memcpy(sums + row * GROUP + index * WIDTH, &numbers, sizeof numbers);
        }
    }
}

// All `registers` of a slice: as many at a time as there is room for the sums of so many rows.
template <class Steps, int ROWS, int REGISTERS = GROUP / WIDTH>
void multiply_rows(const typename Steps::Input* rows, int64_t row_stride, Slice<typename Steps::Number> slice,
                   int registers, float* sums, bool continues) {
    if constexpr (ROWS * REGISTERS <= SUMS) {
        for (; registers >= REGISTERS; registers -= REGISTERS) {
            multiply_tile<Steps, ROWS, REGISTERS>(rows, row_stride, slice, sums, continues);
            slice.weights += REGISTERS * WIDTH * INPUTS_OF_STEP<typename Steps::Number>;
            sums += REGISTERS * WIDTH;
        }
    }
    if constexpr (REGISTERS > 1) {
        if (registers > 0) {
            multiply_rows<Steps, ROWS, REGISTERS / 2>(rows, row_stride, slice, registers, sums, continues);
        }
    }
}

template <class Steps, size_t... ROWS>
constexpr auto by_rows(std::index_sequence<ROWS...>) {
    return std::array{multiply_rows<Steps, ROWS + 1>...};
}

// What multiplies the panels of a job.
template <class Steps>
struct Panels {
    static constexpr int TOGETHER = TILE;        // rows of a panel are a multiple, if there are several panels
    static constexpr int ROWS = 8 * TILE;        // at most
    static constexpr int64_t CHUNK = 1024;       // inputs after which the other rows of a panel have their turn

    // sums [count, GROUP] = rows times columns, as `multiply_tile`.
    void multiply(const typename Steps::Input* rows, int64_t row_stride, int64_t count,
                  Slice<typename Steps::Number> slice, int64_t columns, float* sums, bool continues) const {
        static constexpr auto BY_ROWS = by_rows<Steps>(std::make_index_sequence<TILE>());
        for (int64_t tiles = (count + TILE - 1) / TILE; tiles > 0; --tiles) {
            const int64_t taken = (count + tiles - 1) / tiles;
            BY_ROWS[taken - 1](rows, row_stride, slice, static_cast<int>(columns / WIDTH), sums, continues);
            rows += taken * row_stride, sums += taken * GROUP, count -= taken;
        }
    }
};

#if defined(KVERN_TILES)
// A group of packed columns is tiles as it is: rows of two inputs of sixteen columns.
template <class Tiles>
struct Panels<TileSteps<Tiles>> {
    static constexpr int TOGETHER = TILE_HEIGHT, ROWS = 4 * TILE_HEIGHT;
    static constexpr int64_t CHUNK = 512;  // of two rows of tiles are 32 KB, and stay in the first cache

    Tiles tiles;

    void multiply(const BFloat16* rows, int64_t row_stride, int64_t count, Slice<BFloat16> slice, int64_t columns,
                  float* sums, bool continues) {
        const int64_t row = row_stride * sizeof *rows, step = slice.stride * sizeof *rows;
        multiply_tiles<false>(tiles, count, columns / BLOCK, slice.steps,
                              {reinterpret_cast<const char*>(rows), row, TILE_BYTES, TILE_HEIGHT * row},
                              {reinterpret_cast<const char*>(slice.weights), step, TILE_DEPTH * step, TILE_BYTES},
                              {reinterpret_cast<char*>(sums), GROUP * sizeof *sums, continues});
    }
};
#endif

}  // namespace
}  // namespace kvern
