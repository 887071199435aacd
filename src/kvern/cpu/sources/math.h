// Functions of sixteen float32 numbers, to about 1e-7 of the result; what is no number stays none.
#pragma once

#include "numbers.h"

namespace kvern {

constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: the last bits of what is added to it are those of an integer

template <class Vector>
Vector polynomial(Vector, float last) {
    return last - Vector{};
}

// first + x * (second + x * (...)).
template <class Vector, class... Others>
Vector polynomial(Vector x, float first, Others... others) {
    return polynomial(x, others...) * x + first;
}

// 2^x for x from -127, which gives 0, to 127.
template <class Unsigned, class Vector>
__attribute__((always_inline)) inline Vector power_of_bounded(Vector x) {
    const Vector shifted = x + SHIFT;
    const Vector rest = x - (shifted - SHIFT);
    const Vector power = polynomial(rest, 1.0f, 6.9314718e-1f, 2.4022648e-1f, 5.5503324e-2f, 9.6184369e-3f,
                                    1.3398875e-3f, 1.5353362e-4f);
    return power * (Vector)(((Unsigned)shifted << 23) + (127u << 23));
}

// 2^x for x up to 127, to 1 unit in the last place; 0 below -126.5.
__attribute__((always_inline)) inline Floats power_of_two(Floats x) {
    return power_of_bounded<Words>(larger(x, splat(-127.0f)));
}

// e to the power of x - rest, where `rest` is what of an exponent did not fit into x; 0 below -87: numbers with fewer
// bits take some processors long.
inline Floats exp(Floats x, Floats rest = Floats{}) {
    x = larger(smaller(x, splat(89.0f)), splat(-87.5f));
    const Floats shifted = x * 1.44269504f + SHIFT;
    const Floats twos = shifted - SHIFT;
    const Floats r = (x - twos * 0.693145752f) - twos * 1.42860677e-6f - rest;
    const Floats result =
        polynomial(r, 1.0f, 1.0f, 0.4999999f, 0.1666642f, 0.041668225f, 0.008374824f, 0.0013836835f);
    // By the last bits of a number, whatever is above them; 2^128 is no number.
    return (result + result) * (Floats)(((Words)shifted << 23) + (126u << 23));
}

// The share of a normal distribution below x: (1 + erf(x / sqrt(2))) / 2.
inline Floats normal_share(Floats x) {
    const Floats far = smaller(absolute(x), splat(15.0f));  // the share is 0
    const Floats t = 1.0f / (1.0f + far * 0.282842712f);
    // exp(far^2 / 2) times the share below -far
    const Floats scaled = 0.5f * t * polynomial(t, 0.22564584f, 0.22624432f, 0.20330979f, 0.18782915f, 0.09281216f,
                                                0.0690936f, 0.10044582f, -0.14826214f, 0.04288153f);
    const Floats high = (Floats)((Integers)far & ~0xfff);  // its square is exact
    const Floats tail = scaled * exp(high * high * -0.5f, (far - high) * (far + high) * 0.5f);
    return choose(above(Floats{}, x), tail, 1.0f - tail);
}

}  // namespace kvern
