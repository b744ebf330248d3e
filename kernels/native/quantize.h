// Activations as signed bytes: x ≈ scale · q, |q| <= 127, one scale for a group of inputs of a row.
#pragma once
#include "simd.h"

#include <cmath>

namespace quantize {

struct Group {
    float scale;
    std::int32_t sum;  // of the bytes
};

template <class T> inline float largest(const T* x, std::int64_t count) {
    Vec most = {};
    std::int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        const Vec value = load(x + k);
        most = vmax(most, vmax(value, -value));
    }
    if (k < count) {
        const Vec value = load_part(x + k, static_cast<int>(count - k));
        most = vmax(most, vmax(value, -value));
    }
    float result = 0;
    for (int i = 0; i < LANES; ++i) result = most[i] > result ? most[i] : result;
    return result;
}

// Four bytes of x / scale, rounded to nearest even, at target[step * stride]; `count` inputs, the
// last step padded with zeros.
template <class T>
inline Group write_bytes(const T* x, std::int64_t count, std::int32_t* target,
                         std::int64_t stride) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float most = largest(x, count), inverse = most > 0 ? 127.0f / most : 0.0f;
    IntVec total = {};
    for (std::int64_t k = 0; k < count; k += LANES) {
        const int width = static_cast<int>(count - k < LANES ? count - k : LANES);
        const Vec value = width == LANES ? load(x + k) : load_part(x + k, width);
        const IntVec whole = (IntVec)(value * splat(inverse) + splat(ROUND)) - 0x4b400000;
        total += whole;
        typedef std::int8_t Narrow __attribute__((vector_size(LANES)));
        const Narrow narrow = __builtin_convertvector(whole, Narrow);
        std::int32_t fours[LANES / 4];
        std::memcpy(fours, &narrow, sizeof fours);
        for (int i = 0; i * 4 < width; ++i) target[(k / 4 + i) * stride] = fours[i];
    }
    std::int32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += total[i];
    return {most / 127.0f, sum};
}

}  // namespace quantize
