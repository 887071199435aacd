// Numbers in one register of the processor. Longer vectors that a loop goes on with stay in memory.
#pragma once

#include "numbers.h"

namespace kvern {
namespace {  // another library in the process, of another processor's instructions, has its own

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

using Lanes = float __attribute__((vector_size(REGISTER)));
using LaneBits = int32_t __attribute__((vector_size(REGISTER)));
using LaneWords = uint32_t __attribute__((vector_size(REGISTER)));

constexpr int WIDTH = REGISTER / sizeof(float);

template <class To, class Number>
To load_as(const Number* from) {
    To numbers;
    std::memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

}  // namespace
}  // namespace kvern
