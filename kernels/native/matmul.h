// What the matrix products share: out [M, N] = x [M, K] · weightᵀ (+ bias).
//
// A weight is packed once into panels of PANEL outputs, [panel][step][2][LANES][inputs of a step]:
// a thread reads its panels as one stream. A tile is up to Kernel::TILE rows of x times one panel,
// summed in registers over all inputs, so that a row's result does not depend on the other rows.
// The rows of a tile are interleaved, [step][row], once per call.
#pragma once
#include "simd.h"
#include "threads.h"

#include <memory>

namespace matmul {

constexpr int PANEL = 2 * LANES;
// Multiply-adds for which waking a second thread pays.
constexpr std::int64_t GRAIN = 1 << 17;
// Values of x for which waking a second thread to interleave them pays.
constexpr std::int64_t INTERLEAVE_GRAIN = 1 << 15;

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t panel_count(std::int64_t outputs) { return ceil_div(outputs, PANEL); }

struct Shape {
    std::int64_t rows, inputs, outputs;
};

// `rows` shared out over as few tiles of at most `most` rows as there can be, evenly.
struct Tiles {
    std::int64_t rows, count;
    Tiles(std::int64_t rows, int most) : rows(rows), count(ceil_div(rows, most)) {}
    std::int64_t first(std::int64_t index) const { return rows * index / count; }
    int size(std::int64_t index) const { return static_cast<int>(first(index + 1) - first(index)); }
};

// Where the sums go; `bias` is float32 or null.
template <class T> struct Output {
    T* out;
    const float* bias;
    std::int64_t stride;

    // Stores `count` <= LANES sums of one row.
    void write(std::int64_t row, std::int64_t column, Vec sums, int count) const {
        T* target = out + row * stride + column;
        if (count == LANES) {
            store(target, bias ? sums + load(bias + column) : sums);
        } else {
            if (bias) sums += load_part(bias + column, count);
            store_part(target, sums, count);
        }
    }
};

// Memory of the calling thread, kept for its next call.
template <class T> T* scratch(std::int64_t size) {
    thread_local std::unique_ptr<T[]> memory;
    thread_local std::int64_t capacity = 0;
    if (size > capacity) {
        memory.reset(new T[size]);
        capacity = size;
    }
    return memory.get();
}

// Calls body(std::integral_constant<int, rows>) for 1 <= rows <= MOST.
template <int MOST, class Body> inline void with_rows(int rows, const Body& body) {
    if constexpr (MOST > 0) {
        if (rows == MOST) body(std::integral_constant<int, MOST>{});
        else with_rows<MOST - 1>(rows, body);
    }
}

// Runs interleave(row, rows) for every tile, then tile(rows, row, panel) for every tile and panel;
// `rows` of the latter is an integral_constant.
template <int MOST, class Interleave, class Tile>
void run(const Shape& shape, const Interleave& interleave, const Tile& tile) {
    const Tiles tiles(shape.rows, MOST);
    parallel_range(tiles.count, ceil_div(INTERLEAVE_GRAIN, MOST * shape.inputs), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; ++i) interleave(tiles.first(i), tiles.size(i));
    });
    const std::int64_t products = shape.rows * shape.inputs * PANEL;
    parallel_range(panel_count(shape.outputs), ceil_div(GRAIN, products), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t panel = first; panel < last; ++panel)
            for (std::int64_t i = 0; i < tiles.count; ++i)
                with_rows<MOST>(tiles.size(i),
                                [&](auto rows) { tile(rows, tiles.first(i), panel); });
    });
}

// Calls write(row of the tile, column, sums, count) for the two halves of a panel's sums.
template <int ROWS, class Sums, class Write>
inline void write_tile(const Sums (&sums)[ROWS][2], std::int64_t panel, std::int64_t outputs,
                       const Write& write) {
    const std::int64_t column = panel * PANEL;
    const int left = static_cast<int>(std::min<std::int64_t>(PANEL, outputs - column));
    for (int row = 0; row < ROWS; ++row) {
        write(row, column, sums[row][0], std::min(left, LANES));
        if (left > LANES) write(row, column + LANES, sums[row][1], left - LANES);
    }
}

}  // namespace matmul
