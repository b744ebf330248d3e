// Products with the weight as it is: float32, bfloat16 or float16, summed in float32. x has the
// weight's type, or is float32.
#include "export.h"
#include "matmul.h"

#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using namespace matmul;

// One input of LANES outputs at a time, widened to float32.
template <class X, class W> struct Widened {
    static constexpr int TILE = LANES == 8 ? 6 : LANES == 16 ? 14 : 12;
    static constexpr int STEP = 1;
    using Value = float;

    static Value value(const X* x, std::int64_t) {
        if constexpr (std::is_same_v<X, float>) return *x;
        X first[LANES] = {x[0]};
        return load(first)[0];
    }
    static Vec factors(const W* weight) { return load(weight); }
    static Vec dot(Vec sum, Vec factors, Value x) { return sum + factors * splat(x); }
};

#if defined(__AVX512BF16__)
// Two inputs of 16 outputs at a time: twice the rate of float32.
struct Pairs {
    static constexpr int TILE = 14;
    static constexpr int STEP = 2;
    using Value = std::uint32_t;

    static Value value(const BFloat16* x, std::int64_t left) {
        return x[0].bits | (left > 1 ? static_cast<Value>(x[1].bits) << 16 : 0);
    }
    static __m512bh factors(const BFloat16* weight) {
        return (__m512bh)_mm512_loadu_si512(weight);
    }
    static Vec dot(Vec sum, __m512bh factors, Value x) {
        const __m512i pairs = _mm512_set1_epi32(static_cast<int>(x));
        return (Vec)_mm512_dpbf16_ps((__m512)sum, factors, (__m512bh)pairs);
    }
};
#endif

template <class X, class W> struct KernelOf { using type = Widened<X, W>; };
#if defined(__AVX512BF16__)
template <> struct KernelOf<BFloat16, BFloat16> { using type = Pairs; };
#endif
template <class X, class W> using Kernel = typename KernelOf<X, W>::type;

// Calls body(X{}, W{}) with the element types of x and of the weight.
template <class Body> void with_types(std::int32_t x, std::int32_t weight, const Body& body) {
    with_dtype(weight, [&](auto element) {
        if (x == weight) body(element, element);
        else body(float{}, element);
    });
}

template <class X, class W>
void linear(const X* x, std::int64_t x_stride, const W* weight, const Shape& shape,
            const Output<X>& output) {
    using K = Kernel<X, W>;
    const std::int64_t steps = ceil_div(shape.inputs, K::STEP);
    auto* interleaved = scratch<typename K::Value>(shape.rows * steps);
    run<K::TILE>(
        shape,
        [&](std::int64_t first, int rows) {
            auto* target = interleaved + first * steps;
            for (int row = 0; row < rows; ++row) {
                const X* from = x + (first + row) * x_stride;
                for (std::int64_t step = 0; step < steps; ++step) {
                    const std::int64_t k = step * K::STEP;
                    target[step * rows + row] = K::value(from + k, shape.inputs - k);
                }
            }
        },
        [&](auto rows, std::int64_t first, std::int64_t panel) {
            constexpr int ROWS = decltype(rows)::value;
            const W* from = weight + panel * steps * PANEL * K::STEP;
            const auto* value = interleaved + first * steps;
            Vec sums[ROWS][2] = {};
            for (std::int64_t step = 0; step < steps; ++step) {
                const auto low = K::factors(from), high = K::factors(from + LANES * K::STEP);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; ++row) {
                    sums[row][0] = K::dot(sums[row][0], low, value[row]);
                    sums[row][1] = K::dot(sums[row][1], high, value[row]);
                }
                from += PANEL * K::STEP;
                value += ROWS;
            }
            write_tile(sums, panel, shape.outputs, [&](int row, std::int64_t column, Vec sum, int n) {
                output.write(first + row, column, sum, n);
            });
        });
}

template <int STEP, class W>
void pack(const W* weight, std::int64_t outputs, std::int64_t inputs, W* packed) {
    const std::int64_t steps = ceil_div(inputs, STEP);
    parallel_range(panel_count(outputs), 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first * PANEL; i < last * PANEL; ++i) {
            W* target = packed + i / PANEL * PANEL * steps * STEP + i % PANEL * STEP;
            for (std::int64_t k = 0; k < steps * STEP; ++k)
                target[k / STEP * PANEL * STEP + k % STEP] =
                    i < outputs && k < inputs ? weight[i * inputs + k] : W{};
        }
    });
}

}  // namespace

// Stores the shape [panels, steps, panel, step] of a packed weight.
extern "C" void inferq_float_layout(std::int64_t outputs, std::int64_t inputs,
                                    std::int32_t x_dtype, std::int32_t dtype,
                                    std::int64_t* shape) {
    with_types(x_dtype, dtype, [&](auto x, auto element) {
        constexpr int STEP = Kernel<decltype(x), decltype(element)>::STEP;
        shape[0] = panel_count(outputs);
        shape[1] = ceil_div(inputs, STEP);
        shape[2] = PANEL;
        shape[3] = STEP;
    });
}
INFERQ_EXPORT(inferq_float_layout)

// weight [outputs, inputs], contiguous.
extern "C" void inferq_float_pack(const void* weight, std::int64_t outputs, std::int64_t inputs,
                                  std::int32_t x_dtype, std::int32_t dtype, void* packed) {
    with_types(x_dtype, dtype, [&](auto x, auto element) {
        using W = decltype(element);
        constexpr int STEP = Kernel<decltype(x), W>::STEP;
        pack<STEP>(static_cast<const W*>(weight), outputs, inputs, static_cast<W*>(packed));
    });
}
INFERQ_EXPORT(inferq_float_pack)

extern "C" void inferq_float_linear(const void* x, std::int64_t x_stride, const void* weight,
                                    const float* bias, void* out, std::int64_t rows,
                                    std::int64_t inputs, std::int64_t outputs,
                                    std::int32_t x_dtype, std::int32_t dtype) {
    with_types(x_dtype, dtype, [&](auto value, auto element) {
        using X = decltype(value);
        using W = decltype(element);
        const Output<X> output{static_cast<X*>(out), bias, outputs};
        linear(static_cast<const X*>(x), x_stride, static_cast<const W*>(weight),
               {rows, inputs, outputs}, output);
    });
}
INFERQ_EXPORT(inferq_float_linear)
