// Products of tiles: 16 rows of 64 bytes, as AMX multiplies them, or the same with vectors, bit for bit.
//
// sums [rows, 16] += left [rows, 4 * depth bytes] times right [depth, 16, 4 bytes]. Bytes are summed as integers.
// Of bfloat16 each sum is made as Intel describes `tdpbf16ps`: the even numbers of the tile are added up from zero, the
// odd ones likewise, each by a fused product and sum; both are added, and then to what was there. Numbers too small to
// be normal are 0. So a row's sums are the same bits by either form, whatever rows are beside it.
#pragma once

#include <algorithm>
#include <utility>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define KVERN_TILES
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(KVERN_EMULATED_TILES)
#define KVERN_TILES
#endif

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace kvern {
namespace {  // another library in the process, of another processor's instructions, has its own

constexpr int TILE_HEIGHT = 16, TILE_DEPTH = 16, TILE_BYTES = 64;
constexpr int FEW_ROWS = 4;  // vectors multiply them as fast as memory gives weights

// Tiles by number: four of sums, then those of the left, then those of the right: one and three, or two and two.
constexpr int SUM_TILES = 4;

// Of rows of tiles on the left, the first and the second, which is 0 if there is one alone; and the depth.
struct TileSizes {
    int first, second, depth;

    bool operator!=(const TileSizes& other) const {
        return first != other.first || second != other.second || depth != other.depth;
    }
    int rows_of(int tile) const {
        if (tile < SUM_TILES) return second > 0 && tile >= SUM_TILES / 2 ? second : first;
        return tile == SUM_TILES ? first : tile == SUM_TILES + 1 && second > 0 ? second : depth;
    }
    bool is_left(int tile) const { return tile == SUM_TILES || (tile == SUM_TILES + 1 && second > 0); }
};

// Tiles of the left and of the right are read where they are, when they are multiplied.
class VectorTiles {
public:
    // Numbers that are too small count as 0 meanwhile.
    class Mode {
#if defined(__SSE2__)
    public:
        Mode() { _mm_setcsr(kept_ | 0x8040); }
        ~Mode() { _mm_setcsr(kept_); }

    private:
        const unsigned kept_ = _mm_getcsr();
#endif
    };

    void configure(TileSizes sizes) { sizes_ = sizes; }

    template <int TILE>
    void zero() {
        std::memset(sums_[TILE], 0, sizeof sums_[TILE]);
    }
    template <int TILE>
    void load(const void* from, int64_t stride) {
        if constexpr (TILE >= SUM_TILES) {
            factor_[TILE - SUM_TILES] = {static_cast<const char*>(from), stride};
        } else {
            for (int row = 0; row < sizes_.rows_of(TILE); ++row) {
                std::memcpy(sums_[TILE] + row, static_cast<const char*>(from) + row * stride, TILE_BYTES);
            }
        }
    }
    template <int TILE>
    void store(void* to, int64_t stride) const {
        for (int row = 0; row < sizes_.rows_of(TILE); ++row) {
            std::memcpy(static_cast<char*>(to) + row * stride, sums_[TILE] + row, TILE_BYTES);
        }
    }
    template <bool BYTES, int SUM, int LEFT, int RIGHT>
    void add_product() {
        add<BYTES>(sizes_.rows_of(SUM), sums_[SUM], factor_[LEFT - SUM_TILES], factor_[RIGHT - SUM_TILES]);
    }

private:
    struct Factor {
        const char* at;
        int64_t stride;
    };

    template <bool BYTES>
    __attribute__((noinline)) void add(int rows, Floats* sums, Factor left, Factor right) const {
        add_rows<BYTES, FEW_ROWS>(0, rows, sums, left, right);
    }

    template <bool BYTES, int ROWS>
    void add_rows(int row, int rows, Floats* sums, Factor left, Factor right) const {
        for (; rows >= ROWS; row += ROWS, rows -= ROWS) {
            const Factor some{left.at + row * left.stride, left.stride};
            BYTES ? add_bytes<ROWS>(sums + row, some, right) : add_bfloat16<ROWS>(sums + row, some, right);
        }
        if constexpr (ROWS > 1) {
            if (rows > 0) add_rows<BYTES, ROWS - 1>(row, rows, sums, left, right);
        }
    }

    template <int ROWS>
    void add_bfloat16(Floats* sums, Factor left, Factor right) const {
        alignas(64) float inputs[2][ROWS][LANES];
        Floats part[2][ROWS] = {};
        for (int row = 0; row < ROWS; ++row) {
            Words pairs{};
            std::memcpy(&pairs, left.at + row * left.stride, 4 * sizes_.depth);
            store_lanes(inputs[0][row], (Floats)(pairs << 16));
            store_lanes(inputs[1][row], (Floats)(pairs & 0xffff0000));
        }
        for (int step = 0; step < sizes_.depth; ++step) {
            Words pairs;
            std::memcpy(&pairs, right.at + step * right.stride, sizeof pairs);
            const Floats even = (Floats)(pairs << 16), odd = (Floats)(pairs & 0xffff0000);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row) {
                part[0][row] += even * inputs[0][row][step];
                part[1][row] += odd * inputs[1][row][step];
            }
        }
        for (int row = 0; row < ROWS; ++row) sums[row] += part[0][row] + part[1][row];
    }
    static void store_lanes(float* to, Floats numbers) { std::memcpy(to, &numbers, sizeof numbers); }

    template <int ROWS>
    void add_bytes(Floats* sums, Factor left, Factor right) const {
        for (int row = 0; row < ROWS; ++row) {
            Integers sum = (Integers)sums[row];  // the same bits
            for (int step = 0; step < sizes_.depth; ++step) {
                Words four;
                std::memcpy(&four, right.at + step * right.stride, sizeof four);
                for (int at = 0; at < 4; ++at) {
                    const auto number = static_cast<int8_t>(left.at[row * left.stride + 4 * step + at]);
                    sum += ((Integers)(four << (24 - 8 * at)) >> 24) * number;
                }
            }
            sums[row] = (Floats)sum;
        }
    }

    TileSizes sizes_{};
    Floats sums_[SUM_TILES][TILE_HEIGHT];
    Factor factor_[8 - SUM_TILES];
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Instructions as text: the functions of compilers take numbers of tiles as text alone.
class HardwareTiles {
public:
    struct Mode {};

    HardwareTiles() = default;
    HardwareTiles(const HardwareTiles&) = delete;
    HardwareTiles& operator=(const HardwareTiles&) = delete;
    ~HardwareTiles() {  // for the thread's next use by another library, and since a switch of threads keeps tiles in use
        if (sizes_.first > 0) asm volatile("tilerelease");
    }

    // Asks Linux, once for the process, for the memory that a switch of threads needs; false: it refuses.
    static bool permitted() {
#if defined(__linux__)
        constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
        return granted;
#else
        return false;
#endif
    }

    void configure(TileSizes sizes) {
        if (!(sizes != sizes_)) return;
        sizes_ = sizes;
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } all{1, 0, {}, {}, {}};
        for (int tile = 0; tile < 8; ++tile) {
            all.rows[tile] = static_cast<uint8_t>(sizes.rows_of(tile));
            all.bytes[tile] = static_cast<uint16_t>(sizes.is_left(tile) ? 4 * sizes.depth : TILE_BYTES);
        }
        asm volatile("ldtilecfg %0" : : "m"(all));
    }
    template <int TILE>
    void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
    }
    template <int TILE>
    void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE>
    void store(void* to, int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    template <bool BYTES, int SUM, int LEFT, int RIGHT>
    void add_product() {
        if constexpr (BYTES) {
            asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(LEFT), "i"(RIGHT));
        } else {
            asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(LEFT), "i"(RIGHT));
        }
    }

private:
    TileSizes sizes_{};
};
#endif

// Where the tiles of a factor are: bytes from a row of a tile to the next, from a tile to the one that is multiplied
// after it, and to the one beside it.
struct TileSource {
    const char* at;
    int64_t row, next, beside;

    TileSource moved(int64_t tiles, int64_t beside_it) const {
        return {at + tiles * next + beside_it * beside, row, next, beside};
    }
};

struct TileSums {
    char* at;  // float or int32_t
    int64_t row;
    bool continues;  // they are added to
};

template <int... NUMBERS, class Body>
void each(std::integer_sequence<int, NUMBERS...>, const Body& body) {
    (body(std::integral_constant<int, NUMBERS>()), ...);
}

// LEFTS times RIGHTS tiles of sums, of so many tiles along the sum.
template <bool BYTES, int LEFTS, int RIGHTS, class Tiles>
void multiply_block(Tiles& tiles, TileSource left, TileSource right, int64_t count, TileSums sums) {
    static_assert(LEFTS * RIGHTS <= SUM_TILES);
    constexpr int ROW = SUM_TILES / LEFTS;  // numbers from a row of tiles of sums to the next
    constexpr auto lefts = std::make_integer_sequence<int, LEFTS>();
    constexpr auto rights = std::make_integer_sequence<int, RIGHTS>();
    const auto each_sum = [&](const auto& body) {
        each(lefts, [&](auto l) {
            each(rights, [&](auto r) {
                body(std::integral_constant<int, l * ROW + r>(), sums.at + l * TILE_HEIGHT * sums.row + r * TILE_BYTES);
            });
        });
    };
    each_sum([&](auto tile, char* at) {
        sums.continues ? tiles.template load<tile>(at, sums.row) : tiles.template zero<tile>();
    });
    for (; count > 0; --count, left.at += left.next, right.at += right.next) {
        each(lefts, [&](auto l) { tiles.template load<SUM_TILES + l>(left.at + l * left.beside, left.row); });
        each(rights, [&](auto r) {
            constexpr int RIGHT = SUM_TILES + LEFTS + r % (SUM_TILES - LEFTS);
            tiles.template load<RIGHT>(right.at + r * right.beside, right.row);
            each(lefts, [&](auto l) {
                tiles.template add_product<BYTES, l * ROW + r, SUM_TILES + l, RIGHT>();
            });
        });
    }
    each_sum([&](auto tile, char* at) { tiles.template store<tile>(at, sums.row); });
}

// sums [rows, 16 * columns] = left times right, of so many steps of 4 bytes; two rows of tiles by two of columns at a
// time, or one by four.
template <bool BYTES, class Tiles>
void multiply_tiles(Tiles& tiles, int64_t rows, int64_t columns, int64_t steps, TileSource left, TileSource right,
                    TileSums sums) {
    [[maybe_unused]] const typename Tiles::Mode mode{};
    const int64_t whole = steps / TILE_DEPTH;
    const auto add = [&](int64_t count, int depth) {
        for (int64_t row = 0; row < rows; row += 2 * TILE_HEIGHT) {
            const auto first = static_cast<int>(std::min<int64_t>(rows - row, TILE_HEIGHT));
            const auto second = static_cast<int>(std::min<int64_t>(rows - row - first, TILE_HEIGHT));
            tiles.configure({first, second, depth});
            const auto block = [&](auto lefts, auto rights, int64_t column) {
                const TileSums of{sums.at + row * sums.row + column * TILE_BYTES, sums.row, sums.continues};
                multiply_block<BYTES, lefts, rights>(tiles, left.moved(0, row / TILE_HEIGHT), right.moved(0, column),
                                                     count, of);
            };
            const std::integral_constant<int, 1> one;
            const std::integral_constant<int, 2> two;
            int64_t column = 0;
            if (second > 0) {
                for (; column + 2 <= columns; column += 2) block(two, two, column);
                if (column < columns) block(two, one, column);
            } else {
                for (; column + 4 <= columns; column += 4) block(one, std::integral_constant<int, 4>(), column);
                for (; column < columns; ++column) block(one, one, column);
            }
        }
    };
    if (whole > 0) {
        add(whole, TILE_DEPTH);
        left = left.moved(whole, 0), right = right.moved(whole, 0), sums.continues = true;
    }
    if (steps % TILE_DEPTH > 0) add(1, static_cast<int>(steps % TILE_DEPTH));
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Whether both forms give the same bits of a product of bfloat16: else few rows are multiplied by tiles, too.
inline bool forms_agree() {
    alignas(64) BFloat16 left[TILE_HEIGHT][2 * TILE_DEPTH], right[TILE_DEPTH][2 * TILE_HEIGHT];
    float sums[2][TILE_HEIGHT][LANES] = {};
    uint32_t state = 1;
    const auto fill = [&](BFloat16* numbers) {
        for (int at = 0; at < 2 * TILE_HEIGHT * TILE_DEPTH; ++at) {
            state = state * 1664525 + 1013904223;
            numbers[at] = from_float<BFloat16>(static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f);
        }
    };
    fill(left[0]), fill(right[0]);
    const auto multiply = [&](auto&& tiles, float* to) {
        const TileSource from{reinterpret_cast<const char*>(left), TILE_BYTES, 0, 0};
        const TileSource with{reinterpret_cast<const char*>(right), TILE_BYTES, 0, 0};
        for (int turn = 0; turn < 3; ++turn) {
            multiply_tiles<false>(tiles, TILE_HEIGHT, 1, TILE_DEPTH, from, with,
                                  {reinterpret_cast<char*>(to), TILE_BYTES, turn > 0});
        }
    };
    multiply(HardwareTiles(), sums[0][0]), multiply(VectorTiles(), sums[1][0]);
    return std::memcmp(sums[0], sums[1], sizeof sums[0]) == 0;
}

using Tiles = HardwareTiles;

// The most rows that vectors multiply.
inline int64_t rows_of_vectors() {
    static const int64_t rows = !Tiles::permitted() ? INT64_MAX : forms_agree() ? FEW_ROWS : 0;
    return rows;
}
#elif defined(KVERN_TILES)
using Tiles = VectorTiles;

inline int64_t rows_of_vectors() { return FEW_ROWS; }
#endif

}  // namespace
}  // namespace kvern
