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

// Fetches the panel behind the present one into the second cache while this one is multiplied, each
// tile its share. Without it the first tile of every panel waits for memory: 3072 x 576 float32,
// GFLOP/s by rows, before and after: 16: 176, 210; 32: 200, 221; 64: 208, 220.
struct Ahead {
    const char* next;
    std::int64_t bytes;  // in a step

    Ahead(const void* panel, std::int64_t size, std::int64_t steps, const Place& place, int rows)
        : next(static_cast<const char*>(panel) + size + size * place.begin / place.of),
          // A tile that is alone leaves no time: the processor's own prefetching is as good.
          bytes(rows < place.of ? size * rows / place.of / steps : 0) {}

    void fetch(std::int64_t step) const {
        const char* line = next + step * bytes;
        if (bytes > 0) __builtin_prefetch(line, 0, SECOND_CACHE);
        if (bytes > CACHE_LINE) __builtin_prefetch(line + CACHE_LINE, 0, SECOND_CACHE);
    }

  private:
    static constexpr int SECOND_CACHE = 2, CACHE_LINE = 64;
};

// Interleaves rows of 32-bit words: target[step * rows + row] = word `step` of the row. `stride` is
// in bytes.
template <class Word>
void interleave_words(const char* x, std::int64_t stride, int rows, std::int64_t steps,
                      Word* target) {
    static_assert(sizeof(Word) == 4);
    std::int64_t done = 0;
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    // Four steps of four rows at a time; the last four rows may overlap those before them.
    for (; rows >= 4 && done + 4 <= steps; done += 4)
        for (int row = 0; row < rows; row += 4) {
            const int at = std::min(row, rows - 4);
            Quad in[4];
            for (int i = 0; i < 4; ++i)
                std::memcpy(&in[i], x + (at + i) * stride + done * 4, sizeof in[i]);
            const Quad low[] = {__builtin_shufflevector(in[0], in[1], 0, 4, 1, 5),
                                __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5)};
            const Quad high[] = {__builtin_shufflevector(in[0], in[1], 2, 6, 3, 7),
                                 __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7)};
            const Quad out[] = {__builtin_shufflevector(low[0], low[1], 0, 1, 4, 5),
                                __builtin_shufflevector(low[0], low[1], 2, 3, 6, 7),
                                __builtin_shufflevector(high[0], high[1], 0, 1, 4, 5),
                                __builtin_shufflevector(high[0], high[1], 2, 3, 6, 7)};
            for (int i = 0; i < 4; ++i)
                std::memcpy(target + (done + i) * rows + at, &out[i], sizeof out[i]);
        }
#endif
    for (int row = 0; row < rows; ++row)
        for (std::int64_t step = done; step < steps; ++step)
            std::memcpy(target + step * rows + row, x + row * stride + step * 4, 4);
}

template <class X, class W>
void linear(const X* x, std::int64_t x_stride, const W* weight, const Shape& shape,
            const Output<X>& output) {
    using K = Kernel<X, W>;
    using Value = typename K::Value;
    const std::int64_t steps = ceil_div(shape.inputs, K::STEP);
    const std::int64_t chunk = chunk_rows(shape, steps * sizeof(Value));
    run<K::TILE>(
        shape, chunk,
        [&](const Place& place, int rows) {
            Value* target = scratch<Value>(chunk * steps) + place.begin * steps;
            const X* tile = x + place.row * x_stride;
            if (sizeof(X) * K::STEP == sizeof(Value) && shape.inputs % K::STEP == 0) {
                interleave_words(reinterpret_cast<const char*>(tile), x_stride * sizeof(X), rows,
                                 steps, target);
                return;
            }
            for (int row = 0; row < rows; ++row)
                for (std::int64_t step = 0; step < steps; ++step) {
                    const std::int64_t k = step * K::STEP;
                    target[step * rows + row] =
                        K::value(tile + row * x_stride + k, shape.inputs - k);
                }
        },
        [&](const Place& place, auto rows, std::int64_t panel) {
            constexpr int ROWS = decltype(rows)::value;
            const std::int64_t panel_size = steps * PANEL * K::STEP;
            const W* from = weight + panel * panel_size;
            const Value* value = scratch<Value>(chunk * steps) + place.begin * steps;
            const Ahead ahead(from, panel_size * sizeof(W), steps, place, ROWS);
            Vec sums[ROWS][2] = {};
            for (std::int64_t step = 0; step < steps; ++step) {
                ahead.fetch(step);
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
                output.write(place.row + row, column, sum, n);
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
