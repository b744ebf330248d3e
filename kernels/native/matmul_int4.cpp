// Products with 4-bit weights (0 to 15), a scale and a zero point for each group of inputs of an
// output, and activations quantized to int8 in the same groups:
// out = Σ over groups of x_scale · scale · Σ (q - zero) · x_q.
#include "bytes.h"
#include "export.h"
#include "matmul.h"
#include "quantize.h"

namespace {

using namespace matmul;

// A byte holds input k in its low and k + 4 in its high half.
constexpr int STEP = 8;
constexpr int BYTES = 4;

struct Weight {
    const std::uint8_t* bytes;  // [panel][group][step][2][LANES][BYTES]
    const float* scales;        // [panel][group][PANEL]
    const std::uint8_t* zeros;  // [panel][group][PANEL]
    std::int64_t groups, group_size;

    std::int64_t steps() const { return ceil_div(group_size, STEP); }
};

inline Vec load_zeros(const std::uint8_t* p) {
    typedef std::uint8_t Narrow __attribute__((vector_size(LANES)));
    Narrow zeros;
    std::memcpy(&zeros, p, sizeof zeros);
    return __builtin_convertvector(__builtin_convertvector(zeros, IntVec), Vec);
}

// The sums of one group, in integers.
template <int ROWS>
inline void sum_group(IntVec (&sums)[ROWS][2], const std::uint8_t* from, const bytes::Four* value,
                      std::int64_t steps) {
    for (std::int64_t step = 0; step < steps; ++step) {
        const auto first = bytes::load_bytes(from), second = bytes::load_bytes(from + LANES * BYTES);
        const auto low = bytes::low_nibbles(first), low2 = bytes::low_nibbles(second);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            sums[row][0] = bytes::dot_unsigned(sums[row][0], low, value[row]);
            sums[row][1] = bytes::dot_unsigned(sums[row][1], low2, value[row]);
        }
        const auto high = bytes::high_nibbles(first), high2 = bytes::high_nibbles(second);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            sums[row][0] = bytes::dot_unsigned(sums[row][0], high, value[ROWS + row]);
            sums[row][1] = bytes::dot_unsigned(sums[row][1], high2, value[ROWS + row]);
        }
        from += PANEL * BYTES;
        value += 2 * ROWS;
    }
}

template <class T>
void linear(const T* x, std::int64_t x_stride, const Weight& weight, const Shape& shape,
            const Output<T>& output) {
    const std::int64_t steps = weight.steps(), row_steps = steps * weight.groups;
    const std::int64_t chunk = chunk_rows(shape, row_steps * 2 * sizeof(bytes::Four));
    run<bytes::TILE>(
        shape, chunk,
        [&](const Place& place, int rows) {
            auto* interleaved =
                scratch<bytes::Four>(chunk * row_steps * 2) + place.begin * row_steps * 2;
            auto* parts =
                scratch<quantize::Group>(chunk * weight.groups) + place.begin * weight.groups;
            std::fill_n(interleaved, rows * row_steps * 2, 0);
            for (int row = 0; row < rows; ++row)
                for (std::int64_t group = 0; group < weight.groups; ++group)
                    parts[group * rows + row] = quantize::write_bytes(
                        x + (place.row + row) * x_stride + group * weight.group_size,
                        weight.group_size,
                        interleaved + group * steps * rows * 2 + row, rows);
        },
        [&](const Place& place, auto rows, std::int64_t panel) {
            constexpr int ROWS = decltype(rows)::value;
            const auto* interleaved =
                scratch<bytes::Four>(chunk * row_steps * 2) + place.begin * row_steps * 2;
            const auto* parts =
                scratch<quantize::Group>(chunk * weight.groups) + place.begin * weight.groups;
            Vec totals[ROWS][2] = {};
            for (std::int64_t group = 0; group < weight.groups; ++group) {
                const std::int64_t index = panel * weight.groups + group;
                IntVec sums[ROWS][2] = {};
                sum_group<ROWS>(sums, weight.bytes + index * steps * PANEL * BYTES,
                                interleaved + group * steps * ROWS * 2,
                                steps);
                const auto* part = parts + group * ROWS;
                for (int half = 0; half < 2; ++half) {
                    const std::int64_t at = index * PANEL + half * LANES;
                    const Vec scale = load(weight.scales + at), zero = load_zeros(weight.zeros + at);
                    for (int row = 0; row < ROWS; ++row) {
                        const Vec sum = __builtin_convertvector(sums[row][half], Vec) -
                                        zero * splat(static_cast<float>(part[row].sum));
                        totals[row][half] += sum * (scale * splat(part[row].scale));
                    }
                }
            }
            write_tile(totals, panel, shape.outputs,
                       [&](int row, std::int64_t column, Vec sum, int count) {
                           output.write(place.row + row, column, sum, count);
                       });
        });
}

}  // namespace

// Stores the shape [panels, groups, steps, panel, bytes of a step] of a packed weight.
extern "C" void inferq_int4_layout(std::int64_t outputs, std::int64_t inputs,
                                   std::int64_t group_size, std::int64_t* shape) {
    shape[0] = panel_count(outputs);
    shape[1] = inputs / group_size;
    shape[2] = ceil_div(group_size, STEP);
    shape[3] = PANEL;
    shape[4] = BYTES;
}
INFERQ_EXPORT(inferq_int4_layout)

// weight [outputs, inputs] holds 0 to 15; scales and zeros [outputs, groups]; all contiguous.
extern "C" void inferq_int4_pack(const std::uint8_t* weight, const float* scales,
                                 const std::uint8_t* zeros, std::int64_t outputs,
                                 std::int64_t inputs, std::int64_t group_size,
                                 std::uint8_t* packed, float* packed_scales,
                                 std::uint8_t* packed_zeros) {
    const std::int64_t groups = inputs / group_size, steps = ceil_div(group_size, STEP);
    const std::int64_t group_bytes = steps * PANEL * BYTES;
    parallel_range(panel_count(outputs), 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first * PANEL; i < last * PANEL; ++i)
            for (std::int64_t group = 0; group < groups; ++group) {
                const bool exists = i < outputs;
                const std::int64_t index = i / PANEL * groups + group, lane = i % PANEL;
                packed_scales[index * PANEL + lane] = exists ? scales[i * groups + group] : 0.0f;
                packed_zeros[index * PANEL + lane] = exists ? zeros[i * groups + group] : 0;
                const std::uint8_t* from = weight + i * inputs + group * group_size;
                std::uint8_t* target = packed + index * group_bytes + lane * BYTES;
                const auto nibble = [&](std::int64_t k) {
                    return exists && k < group_size ? from[k] & 15 : 0;
                };
                for (std::int64_t step = 0; step < steps; ++step)
                    for (int j = 0; j < BYTES; ++j)
                        target[step * PANEL * BYTES + j] = static_cast<std::uint8_t>(
                            nibble(step * STEP + j) | nibble(step * STEP + BYTES + j) << 4);
            }
    });
}
INFERQ_EXPORT(inferq_int4_pack)

extern "C" void inferq_int4_linear(const void* x, std::int64_t x_stride,
                                   const std::uint8_t* weight, const float* scales,
                                   const std::uint8_t* zeros, const float* bias, void* out,
                                   std::int64_t rows, std::int64_t inputs, std::int64_t outputs,
                                   std::int64_t group_size, std::int32_t dtype) {
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const Output<T> output{static_cast<T*>(out), bias, outputs};
        linear(static_cast<const T*>(x), x_stride,
               Weight{weight, scales, zeros, inputs / group_size, group_size},
               {rows, inputs, outputs}, output);
    });
}
INFERQ_EXPORT(inferq_int4_linear)
