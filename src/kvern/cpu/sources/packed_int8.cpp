// Packed weights times activations that are rounded to INT8 first, in runs of a row with a scale each: a run's sums are
// of integers, which are exact, and runs are summed in one order, so that a row's results are the same bits beside any
// others.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-ch")  // a loop whose test is copied before it is given twice as many registers as it needs
#endif

#include <limits>

#include "byte_products.h"
#include "packed_tile.h"
#include "replay.h"
#include "scratch.h"
#include "tiles.h"

namespace kvern {
namespace {

constexpr float LARGEST = 127.0f, SMALLEST_SCALE = 1e-12f;
#if defined(__AVX512VNNI__)
constexpr int TILE_ROWS = 4, TILE_BLOCKS = 4, TILE_ROWS_OF_ONE_RUN = 6;
#else
constexpr int TILE_ROWS = 4, TILE_BLOCKS = 1, TILE_ROWS_OF_ONE_RUN = 4;
#endif
constexpr int SECOND_LEVEL = 2;  // the cache
constexpr int64_t RUN = 32;  // the length of a run that there is a loop of its own for

// A run as codes, and the scale that they are multiplied by; returns the codes' sum. `left`: numbers up to the row's
// end, behind which are zeros.
template <class Number>
int32_t round_run(const Number* x, int8_t* codes, float* scale, int64_t left, const Rounding& how) {
    const int64_t count = left < how.run ? left : how.run;
    Floats sizes = splat(SMALLEST_SCALE * LARGEST), finite{};
    for (int64_t first = 0; first < count; first += LANES) {
        const Floats numbers = load_some(x + first, count - first);
        sizes = larger(sizes, larger(-numbers, numbers));  // `absolute` would make a longer chain
        finite += numbers * 0.0f;
    }
    const float most = largest(sizes);
    const float used = how.fixed > 0 ? how.fixed : (how.limit > 0 && most > how.limit ? how.limit : most) / LARGEST;
    *scale = any(~are_numbers(finite)) ? std::numeric_limits<float>::quiet_NaN() : used;
    Integers total{};
    for (int64_t first = 0; first < how.run; first += LANES) {
        Floats numbers = load_some(x + first, first < count ? count - first : 0) / used;
        numbers = larger(splat(-LARGEST), smaller(numbers, splat(LARGEST)));
        const Integers whole = __builtin_convertvector((numbers + 12582912.0f) - 12582912.0f, Integers);
        total += whole;
        const Bytes narrow = narrowed(whole);
        std::memcpy(codes + first, &narrow, how.run - first < LANES ? how.run - first : LANES);
    }
    int32_t all = 0;
    for (int lane = 0; lane < LANES; ++lane) all += total[lane];
    return all;
}

// Of each eight the even ones first, as the low halves of bytes stand for them, and then the odd ones.
inline void even_ones_first(int8_t* codes, int64_t count) {
    for (int64_t first = 0; first < count; first += 8) {
        uint64_t eight, found = 0;
        std::memcpy(&eight, codes + first, sizeof eight);
        for (int odd = 0; odd < 2; ++odd) {
            uint64_t four = eight >> 8 * odd & 0x00ff00ff00ff00ff;
            four = (four | four >> 8) & 0x0000ffff0000ffff;
            found |= ((four | four >> 16) & 0xffffffff) << 32 * odd;
        }
        std::memcpy(codes + first, &found, sizeof found);
    }
}

struct Rounded {
    const int8_t* codes;   // [rows, width]
    const float* scale;    // [rows, runs]
    const int32_t* start;  // [rows, runs]: what the weights' OFFSET adds to the sums, taken away; the codes' sums where
                           // `sums_have_zeros`
    const float* sums;     // [rows, groups], of a matrix with zeros
    int64_t width, run;
};

template <bool WIDE, bool ZEROS, class Number, int ROWS, int BLOCKS>
void multiply_tile(const KvernGroups& of, const Rounded& given, const Factors& factors, const Number* bias, Number* out,
                   int64_t outputs, int64_t row, int64_t block) {
    constexpr int64_t IN_WORD = WIDE ? STEP : 2 * STEP;
    const int64_t groups = of.inputs / of.group, runs = of.inputs / given.run, line = of.inputs / IN_WORD * WORD;
    const Table table = WIDE ? Table{} : table_of(static_cast<const int8_t*>(of.numbers));
    Floats total[ROWS][BLOCKS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) total[r][b] = Floats{};
    }
    const uint8_t* codes = of.codes + block * line;
    const int8_t* x = given.codes + row * given.width;
    // A single row waits for memory: the blocks behind these are asked for, in the order in which they lie.
    const uint8_t* next = codes + BLOCKS * line;
    const float* scale = factors.scale_of(block);
    const uint8_t* zero = static_cast<const uint8_t*>(of.zero) + (ZEROS ? block * groups * LANES : 0);
    for (int64_t group = 0, run = 0; group < groups; ++group, scale += LANES) {
        for (const int64_t last = (group + 1) * of.group / given.run; run < last; ++run) {
            Sums sums[ROWS][BLOCKS];
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
                Sums zeros;
                if constexpr (ZEROS) zeros = added(load_codes(zero + b * groups * LANES), start(OFFSET));
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const int32_t number = given.start[(row + r) * runs + run];
                    if constexpr (ZEROS) {
                        sums[r][b] = less(start(0), zeros, number);
                    } else {
                        sums[r][b] = start(number);
                    }
                }
            }
            const auto add_part = [&](auto part) {
                Weights weights[BLOCKS];
#pragma GCC unroll 8
                for (int b = 0; b < BLOCKS; ++b) {
                    if constexpr (ROWS == 1 && part == 0) __builtin_prefetch(next + b * WORD, 0, SECOND_LEVEL);
                    if constexpr (WIDE) {
                        weights[b] = weights_of(codes + b * line);
                    } else {
                        weights[b] = weights_of<part>(codes + b * line, table);
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const Inputs four = inputs_of(x + r * given.width + part * STEP);
#pragma GCC unroll 8
                    for (int b = 0; b < BLOCKS; ++b) sums[r][b] = add_products(sums[r][b], weights[b], four);
                }
            };
            const auto add_word = [&] {
                add_part(std::integral_constant<int, 0>());
                if constexpr (!WIDE) add_part(std::integral_constant<int, 1>());
                codes += WORD, x += IN_WORD, next += BLOCKS * WORD;
            };
            if (given.run == RUN) {
#pragma GCC unroll 8
                for (int64_t word = 0; word < RUN / IN_WORD; ++word) add_word();
            } else {
                for (int64_t word = 0; word < given.run / IN_WORD; ++word) add_word();
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const float of_run = given.scale[(row + r) * runs + run];
#pragma GCC unroll 8
                for (int b = 0; b < BLOCKS; ++b) {
                    total[r][b] += to_floats(sums[r][b]) * (load(scale + b * groups * LANES) * of_run);
                }
            }
            if constexpr (ZEROS) zero += LANES;
        }
    }
    if constexpr (ZEROS) return finish_tile(of, total, bias, out, outputs, row, block);
    // Apart from the loop above, which needs all registers.
    const float* offset = factors.offset_of(block);
    for (int64_t group = 0; of.zero != nullptr && group < groups; ++group, offset += LANES) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) {
                total[r][b] -= given.sums[(row + r) * groups + group] * load(offset + b * groups * LANES);
            }
        }
    }
    finish_tile(of, total, bias, out, outputs, row, block);
}

// All of a row is one run: registers hold no sums of earlier ones, and there is room for more rows. A single row goes
// block by block, since a processor reads ahead along one stream of bytes; its sums are of integers, in any order.
template <class Number, int ROWS, int BLOCKS>
void multiply_tile_of_one_run(const KvernGroups& of, const Rounded& given, const Factors& factors, const Number* bias,
                              Number* out, int64_t outputs, int64_t row, int64_t block) {
    constexpr int CHAINS = ROWS * BLOCKS == 1 ? 4 : 1;
    const int64_t line = of.inputs * LANES;
    Sums sums[CHAINS][ROWS][BLOCKS];
#pragma GCC unroll 8
    for (int c = 0; c < CHAINS; ++c) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) sums[c][r][b] = start(c == 0 ? given.start[row + r] : 0);
        }
    }
    const uint8_t* codes = of.codes + block * line;
    const int8_t* x = given.codes + row * given.width;
    const auto add_word = [&](Sums(&to)[ROWS][BLOCKS]) {
        Weights weights[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) weights[b] = weights_of(codes + b * line);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const Inputs four = inputs_of(x + r * given.width);
#pragma GCC unroll 8
            for (int b = 0; b < BLOCKS; ++b) to[r][b] = add_products(to[r][b], weights[b], four);
        }
        codes += WORD, x += STEP;
    };
    int64_t words = of.inputs / STEP;
    for (; words >= CHAINS; words -= CHAINS) {
#pragma GCC unroll 8
        for (int c = 0; c < CHAINS; ++c) add_word(sums[c]);
    }
    for (; words > 0; --words) add_word(sums[0]);
    Floats total[ROWS][BLOCKS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; ++b) {
            Sums all = sums[0][r][b];
            for (int c = 1; c < CHAINS; ++c) all = added(all, sums[c][r][b]);
            // As a sum: a product could be rounded together with the bias, in tiles of some sizes and not in others.
            total[r][b] = Floats{};
            total[r][b] += to_floats(all) * (load(factors.scale_of(block + b)) * given.scale[row + r]);
        }
    }
    finish_tile(of, total, bias, out, outputs, row, block);
}

#if defined(KVERN_TILES)
// The same, bit for bit, by tiles: a block of codes is a column of them as it is.
template <class Number>
void multiply_by_tiles(const KvernGroups& of, const Rounded& given, const Number* bias, Number* out, int64_t rows,
                       int64_t outputs) {
    constexpr int64_t PANEL = 2 * TILE_HEIGHT;
    const int64_t blocks = (outputs + LANES - 1) / LANES, line = of.inputs * LANES;
    parallel((blocks + ROW_BLOCKS - 1) / ROW_BLOCKS, [&](int64_t job) {
        alignas(64) int32_t sums[PANEL][ROW_BLOCKS][LANES];
        const int64_t block = job * ROW_BLOCKS, many = std::min<int64_t>(ROW_BLOCKS, blocks - block);
        const Factors factors(of, block, many);
        const TileSource codes{reinterpret_cast<const char*>(of.codes + block * line), WORD, TILE_DEPTH * WORD, line};
        Tiles tiles;
        for (int64_t first = 0; first < rows; first += PANEL) {
            const int64_t count = std::min(PANEL, rows - first), width = given.width;
            const char* x = reinterpret_cast<const char*>(given.codes + first * width);
            multiply_tiles<true>(tiles, count, many, of.inputs / STEP, {x, width, TILE_BYTES, TILE_HEIGHT * width},
                                 codes, {reinterpret_cast<char*>(sums), sizeof sums[0], false});
            for (int64_t row = 0; row < count; ++row) {
                for (int64_t b = 0; b < many; ++b) {
                    Integers whole;
                    std::memcpy(&whole, sums[row][b], sizeof whole);
                    Floats total[1][1] = {};
                    total[0][0] += __builtin_convertvector(whole, Floats) *
                                   (load(factors.scale_of(block + b)) * given.scale[first + row]);
                    finish_tile(of, total, bias, out, outputs, first + row, block + b);
                }
            }
        }
    });
}
#endif

template <bool WIDE, class Number>
void multiply(const KvernGroups& of, const Rounding& how, const Number* x, const Number* bias, Number* out,
              int64_t rows, int64_t outputs) {
    const int64_t width = of.inputs, groups = width / of.group, runs = width / how.run, in_group = of.group / how.run;
    static thread_local Scratch scratch;
    int8_t* memory = scratch.reserve(rows * ((runs + groups) * sizeof(float) + runs * sizeof(int32_t) +
                                             (of.order == nullptr ? 0 : width) * sizeof(Number) + width));
    float* scale = reinterpret_cast<float*>(memory);
    float* sums = scale + rows * runs;
    int32_t* starts = reinterpret_cast<int32_t*>(sums + rows * groups);
    Number* sorted = reinterpret_cast<Number*>(starts + rows * runs);
    int8_t* codes = reinterpret_cast<int8_t*>(sorted + (of.order == nullptr ? 0 : rows * width));
    const bool of_zeros = sums_have_zeros(of);
    constexpr int64_t OF_JOB = 8;
    parallel((rows + OF_JOB - 1) / OF_JOB, [&](int64_t job) {
        for (int64_t row = job * OF_JOB; row < rows && row < (job + 1) * OF_JOB; ++row) {
            const Number* numbers = ordered(of, x + row * how.inputs, sorted + row * width);
            int8_t* rounded = codes + row * width;
            for (int64_t group = 0, run = 0; group < groups; ++group) {
                float in_all = 0;
                for (int64_t part = 0; part < in_group; ++part, ++run) {
                    const int64_t first = run * how.run, left = how.inputs - first;
                    float* used = scale + row * runs + run;
                    const int32_t sum = round_run(numbers + first, rounded + first, used, left, how);
                    starts[row * runs + run] = of_zeros ? sum : -OFFSET * sum;
                    in_all += *used * sum;
                    *used *= of.step;
                }
                sums[row * groups + group] = in_all;
            }
            if (!WIDE) even_ones_first(rounded, width);
        }
    });
    const Rounded given{codes, scale, starts, sums, width, how.run};
    if constexpr (WIDE) {
        if (runs == 1 && of.zero == nullptr) {
#if defined(KVERN_TILES)
            if (rows > std::max<int64_t>(rows_of_vectors(), FEW_ROWS)) {
                return multiply_by_tiles(of, given, bias, out, rows, outputs);
            }
#endif
            const auto tile = [&](const Factors& factors, auto many, auto blocks, int64_t row, int64_t block) {
                multiply_tile_of_one_run<Number, many, blocks>(of, given, factors, bias, out, outputs, row, block);
            };
            return for_each_tile<TILE_ROWS_OF_ONE_RUN, TILE_BLOCKS, 1>(of, rows, outputs, tile);
        }
    }
    const auto multiply_tiles_of = [&](auto zeros) {
        const auto tile = [&](const Factors& factors, auto many, auto blocks, int64_t row, int64_t block) {
            multiply_tile<WIDE, zeros, Number, many, blocks>(of, given, factors, bias, out, outputs, row, block);
        };
        for_each_tile<TILE_ROWS, TILE_BLOCKS, 1>(of, rows, outputs, tile);
    };
    if constexpr (!WIDE) {
        if (of_zeros) return multiply_tiles_of(std::true_type());
    }
    multiply_tiles_of(std::false_type());
}

template <class Number>
void multiply(const KvernGroups& of, const Rounding& how, const void* x, const void* bias, void* out, int64_t rows,
              int64_t outputs) {
    (of.wide ? multiply<true, Number> : multiply<false, Number>)(
        of, how, static_cast<const Number*>(x), static_cast<const Number*>(bias), static_cast<Number*>(out), rows,
        outputs);
}

template <class Number>
void copy_rows(const int8_t* codes, const float* scale, const int64_t* ids, int64_t first, void* out, int64_t rows,
               int64_t outputs, int64_t inputs) {
    const int64_t line = round_up(inputs, STEP) * LANES;
    parallel(rows, [&](int64_t row) {
        Number* to = static_cast<Number*>(out) + row * inputs;
        const int64_t output = ids[row] - first;
        if (output < 0 || output >= outputs) {
            std::memset(to, 0, inputs * sizeof(Number));
            return;
        }
        const int8_t* from = codes + output / LANES * line + output % LANES * STEP;
        for (int64_t input = 0; input < inputs; ++input) {
            to[input] = from_float<Number>(from[input / STEP * WORD + input % STEP] * scale[output]);
        }
    });
}

}  // namespace

void multiply_rounded(const KvernGroups& of, const Rounding& how, const void* x, const void* bias, void* out,
                      int64_t rows, int64_t outputs, int32_t dtype) {
    (dtype == FLOAT32 ? multiply<float> : multiply<BFloat16>)(of, how, x, bias, out, rows, outputs);
}

}  // namespace kvern

// INT8 weights with a scale for each output, times rows that have a scale each.
KVERN_EXPORT void kvern_multiply_int8(const void* x, const void* codes, const float* scale, const void* bias, void* out,
                                      int64_t rows, int64_t outputs, int64_t inputs, float fixed, float limit,
                                      int32_t dtype) {
    KvernGroups of{};
    of.codes = static_cast<const uint8_t*>(codes), of.scale = scale, of.scale_kind = kvern::FLOAT32;
    of.inputs = of.group = (inputs + kvern::STEP - 1) / kvern::STEP * kvern::STEP;
    of.step = 1, of.wide = true;
    kvern::multiply_rounded(of, {inputs, of.inputs, fixed, limit}, x, bias, out, rows, outputs, dtype);
}

KVERN_REPLAYED(kvern_multiply_int8)

// The rows `ids` of such weights, as numbers; of a matrix that has only the rows from `first` on the others are 0.
KVERN_EXPORT void kvern_int8_rows(const int8_t* codes, const float* scale, const int64_t* ids, int64_t first, void* out,
                                  int64_t rows, int64_t outputs, int64_t inputs, int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? copy_rows<float> : copy_rows<BFloat16>)(codes, scale, ids, first, out, rows, outputs, inputs);
}

KVERN_REPLAYED(kvern_int8_rows)
