#include "activation.h"
#include "linear_tile.h"
#include "replay.h"
#include "threads.h"

namespace kvern {
namespace {

template <class Number>
void pack(const void* plain, void* packed, Matrix matrix) {
    constexpr int INPUTS = INPUTS_OF_STEP<Number>;
    parallel(matrix.columns() / BLOCK, [&](int64_t block) {
        int64_t stride;
        Number* to = matrix.begin(static_cast<Number*>(packed), block * BLOCK, &stride);
        const Number* from = static_cast<const Number*>(plain) + matrix.output(block) * matrix.inputs;
        const int64_t count = matrix.count(block);
        for (int64_t input = 0; input < matrix.inputs; input += INPUTS, to += stride) {
            const size_t bytes = std::min<int64_t>(INPUTS, matrix.inputs - input) * sizeof(Number);
            Number numbers[BLOCK * INPUTS] = {};
            for (int64_t lane = 0; lane < count; ++lane) {
                std::memcpy(numbers + lane * INPUTS, from + lane * matrix.inputs + input, bytes);
            }
            std::memcpy(to, numbers, sizeof numbers);
        }
    });
}

template <class Number>
void unpack(const void* packed, const int64_t* ids, int64_t first, int64_t count, void* plain, Matrix matrix) {
    constexpr int INPUTS = INPUTS_OF_STEP<Number>;
    parallel(count, [&](int64_t row) {
        Number* to = static_cast<Number*>(plain) + row * matrix.inputs;
        const int64_t output = ids == nullptr ? row : ids[row] - first;
        if (output < 0 || output >= matrix.outputs) {
            std::memset(to, 0, matrix.inputs * sizeof(Number));
            return;
        }
        int64_t stride;
        const int64_t column = matrix.column(output);
        const Number* from = matrix.begin(static_cast<const Number*>(packed), column, &stride);
        for (int64_t input = 0; input < matrix.inputs; input += INPUTS, from += stride) {
            std::memcpy(to + input, from, std::min<int64_t>(INPUTS, matrix.inputs - input) * sizeof(Number));
        }
    });
}

constexpr int GROUPS = 4;              // whose weights a job's rows are multiplied with
constexpr int64_t JOBS_OF_THREAD = 4;  // at least, if the columns make so many

template <class Number>
void copy(const Number* from, Number* to, int64_t count) {
    std::memcpy(to, from, count * sizeof *to);
}
[[maybe_unused]] void copy(const BFloat16* from, float* to, int64_t count) {
    for (int64_t first = 0; first < count; first += LANES) {
        store_some(to + first, load_some(from + first, count - first), count - first);
    }
}

template <class Steps>
struct Product {
    using Number = typename Steps::Number;
    using Input = typename Steps::Input;
    static constexpr int PANEL = Panels<Steps>::ROWS;
    static constexpr int64_t CHUNK = Panels<Steps>::CHUNK;

    const Number* packed;
    const Number* x;
    const Number* bias;
    void* out;
    Matrix matrix;
    int64_t rows, x_stride, out_stride;  // numbers from one row to the next
    int32_t activation = NO_ACTIVATION;
    bool wide = false;  // results are float32, not as the weights
    int64_t heads = 1;  // matrices, each of inputs and outputs of its own in every row
    int64_t x_head = 0, out_head = 0;

    void run() const {
        if (rows == 0) return;
        const int64_t panels = (rows + PANEL - 1) / PANEL, all = matrix.columns();
        const int64_t panel = round_up((rows + panels - 1) / panels, panels > 1 ? Panels<Steps>::TOGETHER : 1);
        int64_t columns = GROUPS * GROUP;
        const int64_t enough = thread_count() > 1 ? JOBS_OF_THREAD * thread_count() : 1;
        while (columns > BLOCK << matrix.gated && heads * panels * all < enough * columns) columns /= 2;
        const int64_t jobs = panels * ((all + columns - 1) / columns);  // of a head
        parallel(heads * jobs, [&](int64_t job) {
            const int64_t first_row = job % panels * panel, column = job % jobs / panels * columns;
            const int64_t count = std::min(panel, rows - first_row), end = std::min(column + columns, all);
            const Product one = of_head(job / jobs);
            Panels<Steps> work;
            for (int64_t first = column; first < end; first += GROUP) {
                one.multiply(work, first_row, count, first, std::min<int64_t>(GROUP, end - first));
            }
        });
    }

private:
    Product of_head(int64_t head) const {
        Product one = *this;
        one.packed += head * matrix.columns() * round_up(matrix.inputs, INPUTS_OF_STEP<Number>);
        one.x += head * x_head;
        one.out = static_cast<char*>(out) + head * out_head * (wide ? sizeof(float) : sizeof(Number));
        return one;
    }

    void multiply(Panels<Steps>& work, int64_t first_row, int64_t count, int64_t column, int64_t columns) const {
        constexpr int INPUTS = INPUTS_OF_STEP<Number>;
        alignas(64) float sums[PANEL * GROUP];
        alignas(64) Input copied[PANEL * CHUNK];
        Slice<Number> slice{};
        const Number* weights = matrix.begin(packed, column, &slice.stride);
        for (int64_t first = 0; first < matrix.inputs; first += CHUNK) {
            const int64_t inputs = std::min(CHUNK, matrix.inputs - first);
            slice.steps = (inputs + INPUTS - 1) / INPUTS;
            slice.weights = weights + first / INPUTS * slice.stride;
            const Number* from = x + first_row * x_stride + first;
            if constexpr (sizeof(Input) == sizeof(Number)) {
                if (inputs % INPUTS == 0) {
                    work.multiply(from, x_stride, count, slice, columns, sums, first > 0);
                    continue;
                }
            }
            for (int64_t row = 0; row < count; ++row) {
                copy(from + row * x_stride, copied + row * CHUNK, inputs);
                if (inputs % INPUTS != 0) copied[row * CHUNK + inputs] = {};
            }
            work.multiply(copied, CHUNK, count, slice, columns, sums, first > 0);
        }
        if (wide) {
            finish(sums, static_cast<float*>(out), first_row, count, column, columns);
        } else {
            finish(sums, static_cast<Number*>(out), first_row, count, column, columns);
        }
    }

    template <class Result>
    void finish(const float* sums, Result* to, int64_t first_row, int64_t count, int64_t column,
                int64_t columns) const {
        const bool is_gated = activation != NO_ACTIVATION;
        const int64_t end = (column + columns) / BLOCK, together = is_gated ? 2 : 1;
        for (int64_t block = column / BLOCK; block < end; block += together, sums += together * BLOCK) {
            const Floats bias = bias_of(block), up_bias = is_gated ? bias_of(block + 1) : Floats{};
            Result* row = to + first_row * out_stride + matrix.output(block);
            for (int64_t index = 0; index < count; ++index, row += out_stride) {
                Floats result = load(sums + index * GROUP) + bias;
                if (is_gated) result = activated(activation, result) * (load(sums + index * GROUP + BLOCK) + up_bias);
                store_some(row, result, matrix.count(block));
            }
        }
    }

    Floats bias_of(int64_t block) const {
        return bias == nullptr ? Floats{} : load_some(bias + matrix.output(block), matrix.count(block));
    }
};

// run(steps) with those that multiply numbers of a dtype.
template <class Run>
void run_by(int32_t dtype, [[maybe_unused]] int64_t rows, const Run& run) {
    if (dtype == FLOAT32) return run(Float32Steps());
#if defined(KVERN_TILES)
    if (rows > rows_of_vectors()) return run(TileSteps<Tiles>());
    run(TileSteps<VectorTiles>());
#else
    run(BFloat16Steps());
#endif
}

}  // namespace
}  // namespace kvern

// packed = plain [outputs, inputs] in the order of `linear_layout.h`.
KVERN_EXPORT void kvern_pack_linear(const void* plain, void* packed, int64_t outputs, int64_t inputs, int32_t gated,
                                    int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? pack<float> : pack<BFloat16>)(plain, packed, Matrix{outputs, inputs, gated});
}

// plain [count, inputs] = the rows `ids` [count] of a matrix that was packed, whose rows are those from `first` on; zeros
// where it has none. Without ids its first ones.
KVERN_EXPORT void kvern_unpack_linear(const void* packed, const int64_t* ids, int64_t first, void* plain, int64_t count,
                                      int64_t outputs, int64_t inputs, int32_t gated, int32_t dtype) {
    using namespace kvern;
    const Matrix matrix{outputs, inputs, gated};
    (dtype == FLOAT32 ? unpack<float> : unpack<BFloat16>)(packed, ids, first, count, plain, matrix);
}

KVERN_REPLAYED(kvern_unpack_linear)

// out [rows, outputs] = x [rows, inputs] times the packed matrix, plus bias [outputs] if there is one. With an
// activation, of a matrix that was packed as gated: out [rows, outputs / 2] = activation(gate) * up.
KVERN_EXPORT void kvern_linear(const void* packed, const void* x, const void* bias, void* out, int64_t rows,
                               int64_t outputs, int64_t inputs, int32_t gated, int32_t activation, int32_t dtype,
                               int32_t out_dtype) {
    using namespace kvern;
    run_by(dtype, rows, [&](auto steps) {
        using Steps = decltype(steps);
        using Number = typename Steps::Number;
        const Matrix matrix{outputs, inputs, gated};
        Product<Steps>{static_cast<const Number*>(packed), static_cast<const Number*>(x),
                       static_cast<const Number*>(bias), out, matrix, rows, inputs,
                       activation == NO_ACTIVATION ? outputs : matrix.half(), activation, out_dtype == FLOAT32}
            .run();
    });
}

KVERN_REPLAYED(kvern_linear)

// Whether many rows of bfloat16 are multiplied by tiles.
KVERN_EXPORT void kvern_has_tiles(int32_t* has) {
#if defined(KVERN_TILES)
    *has = kvern::rows_of_vectors() != INT64_MAX;
#else
    *has = 0;
#endif
}

// out [rows, heads, outputs] = x [rows, heads, inputs], each head's times the matrix of its own, one packed behind the
// other; `x_stride` numbers from one row of x to the next, `x_head` from one head to the next.
KVERN_EXPORT void kvern_linear_heads(const void* packed, const void* x, void* out, int64_t rows, int64_t heads,
                                     int64_t outputs, int64_t inputs, int64_t x_stride, int64_t x_head, int32_t dtype) {
    using namespace kvern;
    run_by(dtype, rows, [&](auto steps) {
        using Steps = decltype(steps);
        using Number = typename Steps::Number;
        Product<Steps> product{static_cast<const Number*>(packed), static_cast<const Number*>(x), nullptr, out,
                               Matrix{outputs, inputs, 0}, rows, x_stride, heads * outputs};
        product.heads = heads, product.x_head = x_head, product.out_head = outputs;
        product.run();
    });
}

KVERN_REPLAYED(kvern_linear_heads)
