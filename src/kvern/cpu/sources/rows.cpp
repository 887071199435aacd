// Rows of numbers that are added, multiplied, widened, put side by side, normalised and activated.
#include <algorithm>
#include <cstring>

#include "activation.h"
#include "norm.h"
#include "replay.h"
#include "threads.h"

namespace kvern {
namespace {

constexpr int64_t NUMBERS_OF_JOB = 16384, ACTIVATIONS_OF_JOB = 4096, ROWS_OF_JOB = 8;

// x[i] = make(x[i], place i) in place, of any count.
template <class Number, class Make>
void for_all(void* x, int64_t count, const Make& make) {
    Number* numbers = static_cast<Number*>(x);
    parallel((count + NUMBERS_OF_JOB - 1) / NUMBERS_OF_JOB, [&](int64_t job) {
        const int64_t begin = job * NUMBERS_OF_JOB;
        for_each_vector(std::min(count - begin, NUMBERS_OF_JOB), [&](int64_t place, auto lanes) {
            Number* at = numbers + begin + place;
            store_some(at, make(load_some(at, lanes), begin + place, lanes), lanes);
        });
    });
}

template <class Number>
void add(void* x, const void* added, int64_t count) {
    const Number* numbers = static_cast<const Number*>(added);
    for_all<Number>(x, count, [&](Floats own, int64_t place, auto lanes) {
        return own + load_some(numbers + place, lanes);
    });
}

template <class Number>
void widen(const void* x, float* out, int64_t count) {
    const Number* numbers = static_cast<const Number*>(x);
    for_all<float>(out, count, [&](Floats, int64_t place, auto lanes) { return load_some(numbers + place, lanes); });
}

template <class Number>
void scale(void* x, float factor, int64_t count) {
    for_all<Number>(x, count, [&](Floats own, int64_t, auto) { return own * factor; });
}

template <class Number>
void norm_rows(void* hidden, const void* update, const NormWeights& weights, void* out, int64_t rows, int64_t width) {
    parallel_for_each(rows, ROWS_OF_JOB, [&](int64_t row) {
        Number* numbers = static_cast<Number*>(hidden) + row * width;
        if (update != nullptr) {
            const Number* added = static_cast<const Number*>(update) + row * width;
            for_each_vector(width, [&](int64_t first, auto count) {
                const Floats total = load_some(numbers + first, count) + load_some(added + first, count);
                store_some(numbers + first, total, count);
            });
        }
        norm_row(numbers, weights, static_cast<Number*>(out) + row * width, width);
    });
}

template <class Number, int32_t KIND>
void activate(const void* given, void* result, int64_t rows, int64_t width, bool is_gated) {
    const int64_t parts = (width + ACTIVATIONS_OF_JOB - 1) / ACTIVATIONS_OF_JOB;  // of a row
    const int64_t together = parts > 1 || width == 0 ? 1 : ACTIVATIONS_OF_JOB / width;  // rows of a job
    parallel((rows + together - 1) / together * parts, [&](int64_t job) {
        const int64_t begin = job % parts * ACTIVATIONS_OF_JOB;
        const int64_t end = begin + ACTIVATIONS_OF_JOB < width ? begin + ACTIVATIONS_OF_JOB : width;
        const int64_t first = job / parts * together;
        for (int64_t row = first; row < rows && row < first + together; ++row) {
            const Number* from = static_cast<const Number*>(given) + row * width * (is_gated ? 2 : 1);
            Number* to = static_cast<Number*>(result) + row * width;
            for_each_vector(end - begin, [&](int64_t place, auto count) {
                const int64_t column = begin + place;
                const Floats numbers = load_some(from + column, count);
                if (is_gated) {
                    store_some(to + column, gated<KIND>(numbers, load_some(from + width + column, count)), count);
                } else {
                    store_some(to + column, activated<KIND>(numbers), count);
                }
            });
        }
    });
}

template <class Number>
void activate_as(int32_t kind, const void* given, void* result, int64_t rows, int64_t width, bool gated) {
    constexpr void (*ways[])(const void*, void*, int64_t, int64_t, bool) = {
        activate<Number, SILU>, activate<Number, GELU>, activate<Number, GELU_TANH>, activate<Number, RELU>,
        activate<Number, RELU2>, activate<Number, CLAMPED_SWIGLU>, activate<Number, QUICK_GELU>,
    };
    ways[kind](given, result, rows, width, gated);
}

}  // namespace
}  // namespace kvern

// x[i] += added[i].
KVERN_EXPORT void kvern_add(void* x, const void* added, int64_t count, int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? add<float> : add<BFloat16>)(x, added, count);
}

// x[i] *= factor.
KVERN_EXPORT void kvern_scale(void* x, float factor, int64_t count, int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? scale<float> : scale<BFloat16>)(x, factor, count);
}

// out[i] = x[i], in float32.
KVERN_EXPORT void kvern_widen(const void* x, float* out, int64_t count, int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? widen<float> : widen<BFloat16>)(x, out, count);
}

// Rows [count, bytes], `from_stride` bytes apart, become parts of rows that are `to_stride` bytes apart.
KVERN_EXPORT void kvern_put_rows(const char* from, char* to, int64_t count, int64_t bytes, int64_t from_stride,
                                 int64_t to_stride) {
    kvern::parallel(count, [&](int64_t row) {
        std::memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(bytes));
    });
}

// hidden [rows, width] += update, if there is one; out is its norm, of the kind RMS or LAYER.
KVERN_EXPORT void kvern_norm(void* hidden, const void* update, const float* weight, const float* bias, void* out,
                             int64_t rows, int64_t width, float epsilon, int32_t kind, int32_t dtype) {
    using namespace kvern;
    const NormWeights weights{weight, bias, epsilon, kind};
    (dtype == FLOAT32 ? norm_rows<float> : norm_rows<BFloat16>)(hidden, update, weights, out, rows, width);
}

// out [rows, width] = activation(x [rows, width]); gated: activation(gate) * up of x [rows, gate and up of `width`].
KVERN_EXPORT void kvern_activation(const void* x, void* out, int64_t rows, int64_t width, int32_t kind, int32_t gated,
                                   int32_t dtype) {
    using namespace kvern;
    (dtype == FLOAT32 ? activate_as<float> : activate_as<BFloat16>)(kind, x, out, rows, width, gated != 0);
}

KVERN_REPLAYED(kvern_widen)
KVERN_REPLAYED(kvern_put_rows)
KVERN_REPLAYED(kvern_add)
KVERN_REPLAYED(kvern_scale)
KVERN_REPLAYED(kvern_norm)
KVERN_REPLAYED(kvern_activation)
