// Root mean square normalisation, with or without an addition before it.
#include "export.h"

#include <cmath>

#include "simd.h"
#include "threads.h"

namespace {

// Elements for which waking a second thread pays.
constexpr std::int64_t GRAIN = 16384;

// Calls step(i, count) for each vector of a row: LANES elements, or what is left at its end.
template <class Step> void for_vectors(std::int64_t size, const Step& step) {
    std::int64_t i = 0;
    for (; i + LANES <= size; i += LANES) step(i, LANES);
    if (i < size) step(i, static_cast<int>(size - i));
}

template <class T> Vec load_up_to(const T* p, int count) {
    return count == LANES ? load(p) : load_part(p, count);
}
template <class T> void store_up_to(T* p, Vec x, int count) {
    if (count == LANES)
        store(p, x);
    else
        store_part(p, x, count);
}

template <class T, class W>
void norm_row(const T* x, T* residual, const W* weight, T* out, std::int64_t size, float eps) {
    Vec squares = {};
    for_vectors(size, [&](std::int64_t i, int count) {
        Vec value = load_up_to(x + i, count);
        if (residual != nullptr) {
            store_up_to(residual + i, value + load_up_to(residual + i, count), count);
            value = load_up_to(residual + i, count);  // as its type rounds it
        }
        squares += value * value;
    });
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
    const T* values = residual != nullptr ? residual : x;
    for_vectors(size, [&](std::int64_t i, int count) {
        const Vec scaled = load_up_to(values + i, count) * scale;
        store_up_to(out + i, scaled * load_up_to(weight + i, count), count);
    });
}

}  // namespace

// x [rows, heads, size] by strides, out the same but contiguous, weight [size]. With a residual
// (heads must be 1), it becomes x + residual, and that is normalised.
extern "C" void inferq_rms_norm(const void* x, void* residual, const void* weight, void* out,
                                std::int64_t rows, std::int64_t heads, std::int64_t size,
                                std::int64_t row_stride, std::int64_t head_stride,
                                std::int64_t residual_stride, float eps, std::int32_t dtype,
                                std::int32_t weight_dtype) {
    auto norm = [&](auto element, auto weight_element) {
        using T = decltype(element);
        using W = decltype(weight_element);
        const std::int64_t grain = (GRAIN + size - 1) / size;
        parallel_range(rows * heads, grain, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; ++i) {
                const std::int64_t row = i / heads, head = i % heads;
                T* sums = residual ? static_cast<T*>(residual) + row * residual_stride : nullptr;
                norm_row(static_cast<const T*>(x) + row * row_stride + head * head_stride, sums,
                         static_cast<const W*>(weight), static_cast<T*>(out) + i * size, size, eps);
            }
        });
    };
    with_dtype(dtype, [&](auto element) {
        with_dtype(weight_dtype, [&](auto weight_element) { norm(element, weight_element); });
    });
}
INFERQ_EXPORT(inferq_rms_norm)
