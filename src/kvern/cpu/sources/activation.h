// The activation functions of MLPs.
#pragma once

#include "math.h"

namespace kvern {

// As `kvern.cpu.rows.ACTIVATIONS` says them.
enum Activation : int32_t { NO_ACTIVATION = -1, SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, CLAMPED_SWIGLU = 5,
                            QUICK_GELU = 6 };

template <int32_t KIND>
Floats activated(Floats x) {
    if constexpr (KIND == SILU) return x / (1.0f + exp(-x));
    if constexpr (KIND == GELU) return x * normal_share(x);
    if constexpr (KIND == GELU_TANH) return x / (1.0f + exp(x * (-1.59576912f - 0.0713548163f * x * x)));
    if constexpr (KIND == QUICK_GELU) return x / (1.0f + exp(x * -1.702f));
    const Floats positive = larger(x, Floats{});
    return KIND == RELU ? positive : positive * positive;
}

// What goes on to the product with down. A clamped SwiGLU is one of gate and up together, see `MoeSpec`.
template <int32_t KIND>
Floats gated(Floats gate, Floats up) {
    if constexpr (KIND != CLAMPED_SWIGLU) return activated<KIND>(gate) * up;
    const Floats limit = splat(7.0f);
    gate = smaller(gate, limit);
    return gate / (1.0f + exp(gate * -1.702f)) * (larger(smaller(up, limit), -limit) + 1.0f);
}

inline Floats activated(int32_t kind, Floats x) {
    switch (kind) {
        case SILU: return activated<SILU>(x);
        case GELU: return activated<GELU>(x);
        case GELU_TANH: return activated<GELU_TANH>(x);
        case RELU: return activated<RELU>(x);
        case QUICK_GELU: return activated<QUICK_GELU>(x);
        default: return activated<RELU2>(x);
    }
}

}  // namespace kvern
