#include "linear_layout.h"
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
