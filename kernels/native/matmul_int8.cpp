// Products with int8 weights, one scale per output, and activations quantized to int8 by groups.
#include "bytes.h"
#include "export.h"
#include "matmul.h"
#include "quantize.h"

namespace {

using namespace matmul;

constexpr int STEP = 4;
// Inputs of a row that share a scale: a row's few large values then coarsen only their neighbours.
constexpr int GROUP = 64;
constexpr int GROUP_STEPS = GROUP / STEP;

// The sums of one group, in integers.
template <int ROWS>
inline void sum_group(IntVec (&sums)[ROWS][2], const std::uint8_t* from, const bytes::Four* value,
                      std::int64_t steps) {
    for (std::int64_t step = 0; step < steps; ++step) {
        const auto low = bytes::load_bytes(from);
        const auto high = bytes::load_bytes(from + LANES * STEP);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            sums[row][0] = bytes::dot(sums[row][0], low, value[row]);
            sums[row][1] = bytes::dot(sums[row][1], high, value[row]);
        }
        from += PANEL * STEP;
        value += ROWS;
    }
}

template <class T>
void linear(const T* x, std::int64_t x_stride, const std::uint8_t* weight, const float* scales,
            const Shape& shape, const Output<T>& output) {
    const std::int64_t steps = ceil_div(shape.inputs, STEP), groups = ceil_div(shape.inputs, GROUP);
    const std::int64_t chunk = chunk_rows(shape, steps * sizeof(bytes::Four));
    run<bytes::TILE>(
        shape, chunk,
        [&](const Place& place, int rows) {
            auto* interleaved = scratch<bytes::Four>(chunk * steps) + place.begin * steps;
            auto* parts = scratch<quantize::Group>(chunk * groups) + place.begin * groups;
            for (int row = 0; row < rows; ++row)
                for (std::int64_t group = 0; group < groups; ++group)
                    parts[group * rows + row] = quantize::write_bytes(
                        x + (place.row + row) * x_stride + group * GROUP,
                        std::min<std::int64_t>(GROUP, shape.inputs - group * GROUP),
                        interleaved + group * GROUP_STEPS * rows + row, rows);
        },
        [&](const Place& place, auto rows, std::int64_t panel) {
            constexpr int ROWS = decltype(rows)::value;
            const std::uint8_t* from = weight + panel * steps * PANEL * STEP;
            const auto* value = scratch<bytes::Four>(chunk * steps) + place.begin * steps;
            const auto* part = scratch<quantize::Group>(chunk * groups) + place.begin * groups;
            Vec totals[ROWS][2] = {};
            for (std::int64_t step = 0; step < steps; step += GROUP_STEPS) {
                const std::int64_t count = std::min<std::int64_t>(GROUP_STEPS, steps - step);
                IntVec sums[ROWS][2] = {};
                sum_group<ROWS>(sums, from + step * PANEL * STEP, value + step * ROWS, count);
                for (int row = 0; row < ROWS; ++row, ++part)
                    for (int half = 0; half < 2; ++half) {
                        const IntVec exact = sums[row][half] - bytes::OFFSET * part->sum;
                        totals[row][half] +=
                            __builtin_convertvector(exact, Vec) * splat(part->scale);
                    }
            }
            write_tile(totals, panel, shape.outputs,
                       [&](int row, std::int64_t column, Vec sum, int count) {
                           output.write(place.row + row, column, sum * load(scales + column), count);
                       });
        });
}

}  // namespace

// Stores the shape [panels, steps, panel, step] of a packed weight, and what its bytes have added.
extern "C" void inferq_int8_layout(std::int64_t outputs, std::int64_t inputs, std::int64_t* shape,
                                   std::int64_t* offset) {
    shape[0] = panel_count(outputs);
    shape[1] = ceil_div(inputs, STEP);
    shape[2] = PANEL;
    shape[3] = STEP;
    *offset = bytes::OFFSET;
}
INFERQ_EXPORT(inferq_int8_layout)

// weight [outputs, inputs], contiguous, values in [-127, 127].
extern "C" void inferq_int8_pack(const std::int8_t* weight, std::int64_t outputs,
                                 std::int64_t inputs, std::uint8_t* packed) {
    const std::int64_t steps = ceil_div(inputs, STEP);
    parallel_range(panel_count(outputs), 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first * PANEL; i < last * PANEL; ++i) {
            std::uint8_t* target = packed + i / PANEL * PANEL * steps * STEP + i % PANEL * STEP;
            for (std::int64_t k = 0; k < steps * STEP; ++k) {
                const int value = i < outputs && k < inputs ? weight[i * inputs + k] : 0;
                target[k / STEP * PANEL * STEP + k % STEP] =
                    static_cast<std::uint8_t>(value + bytes::OFFSET);
            }
        }
    });
}
INFERQ_EXPORT(inferq_int8_pack)

// `scales` holds one for each output of whole panels.
extern "C" void inferq_int8_linear(const void* x, std::int64_t x_stride,
                                   const std::uint8_t* weight, const float* scales,
                                   const float* bias, void* out, std::int64_t rows,
                                   std::int64_t inputs, std::int64_t outputs,
                                   std::int32_t dtype) {
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const Output<T> output{static_cast<T*>(out), bias, outputs};
        linear(static_cast<const T*>(x), x_stride, weight, scales, {rows, inputs, outputs}, output);
    });
}
INFERQ_EXPORT(inferq_int8_linear)
