// The norm of a row, by its root mean square or by its mean and variance.
#pragma once

#include "numbers.h"

namespace kvern {

// As `kvern.cpu.rows.NORMS` says them.
enum NormKind : int32_t { RMS = 1, LAYER = 2 };

// `weight` and `bias`, each as long as a row, may be null.
struct NormWeights {
    const float* weight;
    const float* bias;
    float epsilon;
    int32_t kind;
};

// out = (numbers - mean) / sqrt(mean((numbers - mean)^2) + epsilon) * weight + bias; RMS: without the means. `out` may
// be `numbers`.
template <class Number>
void norm_row(const Number* numbers, const NormWeights& weights, Number* out, int64_t width) {
    Floats mean{};
    if (weights.kind == LAYER) {
        for (int64_t first = 0; first < width; first += LANES) mean += load_some(numbers + first, width - first);
        mean = splat(sum(mean) / static_cast<float>(width));
    }
    Floats squares{};
    int64_t whole = 0;
    for (; whole + LANES <= width; whole += LANES) {
        const Floats centred = load(numbers + whole) - mean;
        squares += centred * centred;
    }
    if (whole < width) {
        const Floats centred = load_some(numbers + whole, width - whole) - mean;
        squares += first_of(centred * centred, width - whole);
    }
    const Floats scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + weights.epsilon));
    const auto finish = [&](auto weighted, auto biased) {
        for_each_vector(width, [&](int64_t first, auto count) {
            Floats normal = (load_some(numbers + first, count) - mean) * scale;
            if constexpr (weighted) normal *= load_some(weights.weight + first, count);
            if constexpr (biased) normal += load_some(weights.bias + first, count);
            store_some(out + first, normal, count);
        });
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (weights.weight != nullptr) {
        weights.bias != nullptr ? finish(yes, yes) : finish(yes, no);
    } else {
        weights.bias != nullptr ? finish(no, yes) : finish(no, no);
    }
}

}  // namespace kvern
