// What the matrix products share: out [M, N] = x [M, K] · weightᵀ (+ bias).
//
// A weight is packed once into panels of PANEL outputs, [panel][step][2][LANES][inputs of a step]:
// a thread reads its panels as one stream. A tile is up to Kernel::TILE rows of x times one panel,
// summed in registers over all inputs, so that a row's result does not depend on the other rows.
// Each thread interleaves the rows of its tiles, [step][row], for itself: rows that another core has
// just written cost as much as the products of a small weight. float32, 2 Zen 4 cores, 576 outputs
// and inputs, GFLOP/s by rows when one thread did it for all: 16: 129, 32: 153, 64: 168; each for
// itself: 168, 210, 218.
#pragma once
#include "simd.h"
#include "threads.h"

#include <memory>

namespace matmul {

constexpr int PANEL = 2 * LANES;
// Multiply-adds for which waking a second thread pays.
constexpr std::int64_t GRAIN = 1 << 17;
// Rows for each thread from which rows are shared out rather than panels: with fewer, reading all
// of the weight holds a thread up.
constexpr std::int64_t ROWS_OF_A_THREAD = 28;
// Interleaved rows that stay in a core's second cache beside two panels.
constexpr std::int64_t CHUNK_BYTES = 384 << 10;
constexpr std::int64_t FEWEST_CHUNK_ROWS = 16;

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

// Rows of `row_bytes` each that are interleaved at once.
inline std::int64_t chunk_rows(const Shape& shape, std::int64_t row_bytes) {
    return std::min(shape.rows, std::max(FEWEST_CHUNK_ROWS, CHUNK_BYTES / row_bytes));
}

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

// Which rows and panels a thread multiplies.
struct Share {
    std::int64_t first_row, last_row, first_panel, last_panel;

    // Rows are shared out where there are enough of them: a thread then finds in its own cache what
    // operations on rows left there. A few rows go to all threads, each with panels of its own.
    Share(const Shape& shape, int thread, int threads)
        : first_row(0), last_row(shape.rows), first_panel(0),
          last_panel(panel_count(shape.outputs)) {
        const bool is_by_rows = shape.rows >= threads * ROWS_OF_A_THREAD;
        std::int64_t& first = is_by_rows ? first_row : first_panel;
        std::int64_t& last = is_by_rows ? last_row : last_panel;
        first = last * thread / threads;
        last = last * (thread + 1) / threads;
    }
};

// Where a tile lies.
struct Place {
    std::int64_t row;    // of x and out
    std::int64_t begin;  // among the rows that the thread has interleaved
    std::int64_t of;     // as many as those are
};

// Calls interleave(place, rows) for every tile of `chunk` rows at most, then tile(place, rows,
// panel) for all of them and every panel; `rows` of the latter is an integral_constant.
template <int MOST, class Interleave, class Tile>
void run(const Shape& shape, std::int64_t chunk, const Interleave& interleave, const Tile& tile) {
    const std::int64_t panels = panel_count(shape.outputs);
    const std::int64_t products = shape.rows * shape.inputs * PANEL;
    parallel(threads_for(panels, ceil_div(GRAIN, products)), [&](int thread, int threads) {
        const Share share(shape, thread, threads);
        const std::int64_t rows = share.last_row - share.first_row;
        const Tiles chunks(rows, static_cast<int>(chunk));
        for (std::int64_t c = 0; c < chunks.count; ++c) {
            const std::int64_t row = share.first_row + chunks.first(c);
            const Tiles tiles(chunks.size(c), MOST);
            const auto place = [&](std::int64_t i) {
                return Place{row + tiles.first(i), tiles.first(i), tiles.rows};
            };
            for (std::int64_t i = 0; i < tiles.count; ++i) interleave(place(i), tiles.size(i));
            for (std::int64_t panel = share.first_panel; panel < share.last_panel; ++panel)
                for (std::int64_t i = 0; i < tiles.count; ++i)
                    with_rows<MOST>(tiles.size(i),
                                    [&](auto size) { tile(place(i), size, panel); });
        }
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
