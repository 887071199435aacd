// Products of tiles beside sums that are made number by number, and of AMX where it is: prints what differs.
#include "tiles.h"

#include <cstdio>
#include <vector>

using namespace kvern;

namespace {

constexpr float GUARD = 12345.0f;

uint32_t state = 7;
uint32_t drawn() { return (state = state * 1664525 + 1013904223) >> 8; }

float flushed(float number) { return std::fabs(number) < 0x1p-126f ? std::copysign(0.0f, number) : number; }

// Mostly of like size; some far smaller, and some too small to be normal.
BFloat16 number(bool wide) {
    const float size = static_cast<float>(static_cast<int32_t>(drawn() % 2001) - 1000) / 500.0f;
    if (!wide || drawn() % 4 > 0) return from_float<BFloat16>(size);
    return {static_cast<uint16_t>(drawn() % 8 == 0 ? drawn() & 0x807f : (drawn() & 0x807f) | (90 + drawn() % 40) << 7)};
}

struct Case {
    int64_t rows, columns, steps;
    bool wide;
};

template <bool BYTES, class Tiles>
std::vector<float> product(Case of, const std::vector<char>& left, const std::vector<char>& right, bool twice) {
    std::vector<float> sums((of.rows + 1) * (of.columns + 1) * LANES, GUARD);
    const int64_t row = (of.columns + 1) * LANES * 4;
    Tiles tiles;
    for (int turn = 0; turn <= twice; ++turn) {
        multiply_tiles<BYTES>(tiles, of.rows, of.columns, of.steps, {left.data(), 4 * of.steps, TILE_BYTES, 64 * of.steps},
                              {right.data(), of.columns * TILE_BYTES, of.columns * TILE_BYTES * TILE_DEPTH, TILE_BYTES},
                              {reinterpret_cast<char*>(sums.data()), row, turn > 0});
    }
    return sums;
}

float sum_of_pairs(Case of, const BFloat16* left, const BFloat16* right, float sum) {
    for (int64_t first = 0; first < of.steps; first += TILE_DEPTH) {
        float part[2] = {};
        for (int64_t step = first; step < of.steps && step < first + TILE_DEPTH; ++step) {
            for (int odd = 0; odd < 2; ++odd) {
                const float one = flushed(to_float(left[2 * step + odd]));
                const float other = flushed(to_float(right[step * of.columns * 2 * LANES + odd]));
                part[odd] = flushed(std::fma(one, other, part[odd]));
            }
        }
        sum = flushed(sum + flushed(part[0] + part[1]));
    }
    return sum;
}

template <bool BYTES>
int faults(Case of) {
    std::vector<char> left(of.rows * of.steps * 4), right(of.steps * of.columns * TILE_BYTES);
    for (auto* bytes : {&left, &right}) {
        for (size_t at = 0; at < bytes->size(); at += 2) {
            const BFloat16 two = BYTES ? BFloat16{static_cast<uint16_t>(drawn())} : number(of.wide);
            std::memcpy(bytes->data() + at, &two, sizeof two);
        }
    }
    int found = 0;
    const std::vector<float> sums = product<BYTES, VectorTiles>(of, left, right, true);
    for (int64_t row = 0; row <= of.rows; ++row) {
        for (int64_t column = 0; column < (of.columns + 1) * LANES; ++column) {
            const float given = sums[row * (of.columns + 1) * LANES + column];
            float expected = GUARD;
            if (row < of.rows && column < of.columns * LANES) {
                const char *x = left.data() + row * of.steps * 4, *w = right.data() + 4 * column;
                if (BYTES) {
                    int32_t sum = 0;
                    for (int64_t at = 0; at < 4 * of.steps; ++at) {
                        const char code = w[at / 4 * of.columns * TILE_BYTES + at % 4];
                        sum += 2 * static_cast<int8_t>(x[at]) * static_cast<int8_t>(code);
                    }
                    std::memcpy(&expected, &sum, sizeof sum);
                } else {
                    const auto* numbers = reinterpret_cast<const BFloat16*>(x);
                    const auto* weights = reinterpret_cast<const BFloat16*>(w);
                    expected = sum_of_pairs(of, numbers, weights, sum_of_pairs(of, numbers, weights, 0.0f));
                    double exact = 0, size = 0;
                    for (int64_t at = 0; at < 2 * of.steps; ++at) {
                        const double weight = to_float(weights[at / 2 * of.columns * 2 * LANES + at % 2]);
                        const double part = 2 * static_cast<double>(to_float(numbers[at])) * weight;
                        exact += part, size += std::fabs(part);
                    }
                    found += !(std::fabs(given - exact) <= 1e-6 * size + 1e-36);
                }
            }
            found += std::memcmp(&given, &expected, sizeof given) != 0;
        }
    }
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (HardwareTiles::permitted()) {
        const std::vector<float> others = product<BYTES, HardwareTiles>(of, left, right, true);
        found += 1000000 * (std::memcmp(others.data(), sums.data(), sums.size() * sizeof(float)) != 0);
    }
#endif
    if (found > 0) {
        std::printf("%s: %ld rows, %ld columns, %ld steps: %d\n", BYTES ? "bytes" : of.wide ? "wide" : "bfloat16",
                    static_cast<long>(of.rows), static_cast<long>(of.columns), static_cast<long>(of.steps), found);
    }
    return found;
}

}  // namespace

int main() {
    int found = 0;
    for (const int64_t rows : {1, 2, 3, 5, 16, 17, 32, 39}) {
        for (const int64_t columns : {1, 2, 3, 4, 5}) {
            for (const int64_t steps : {1, 15, 16, 33}) {
                found += faults<false>({rows, columns, steps, false}) + faults<true>({rows, columns, steps, false});
#if defined(__SSE2__)  // on others vectors know numbers that are too small to be normal
                found += faults<false>({rows, columns, steps, true});
#endif
            }
        }
    }
    return found > 0;
}
