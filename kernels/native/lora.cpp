// What adapters add to a product: each row is multiplied with the matrices of its own only.
#include <algorithm>
#include <vector>

#include "export.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int ROWS = 4, RANKS = 4;

// Up to ROWS rows of one adapter.
struct Tile {
    std::int64_t rows[ROWS];
    int count;
    std::int64_t adapter;
};

// Rows without an adapter (0) are in no tile.
std::vector<Tile> tiles_of(const std::int64_t* adapters, std::int64_t rows, std::int64_t count) {
    std::vector<Tile> tiles;
    std::vector<std::int64_t> open(count + 1, -1);
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t adapter = adapters[row];
        if (adapter == 0) continue;
        if (open[adapter] < 0 || tiles[open[adapter]].count == ROWS) {
            open[adapter] = static_cast<std::int64_t>(tiles.size());
            tiles.push_back({{}, 0, adapter});
        }
        Tile& tile = tiles[open[adapter]];
        tile.rows[tile.count++] = row;
    }
    // An adapter's tiles follow each other: a thread finds its matrices in its cache.
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const Tile& a, const Tile& b) { return a.adapter < b.adapter; });
    return tiles;
}

// inner[row][rank] = x[row] · down[rank], for RANKS ranks, of which `ranks` are there.
template <class T>
void reduce(const T* const* x, int rows, const T* down, int ranks, std::int64_t inputs,
            float (*inner)[RANKS]) {
    Vec sums[ROWS][RANKS] = {};
    const T* weights[RANKS];
    for (int i = 0; i < RANKS; ++i) weights[i] = down + std::min(i, ranks - 1) * inputs;
    const auto step = [&](auto read, std::int64_t k) {
        Vec weight[RANKS];
        for (int i = 0; i < RANKS; ++i) weight[i] = read(weights[i] + k);
        for (int row = 0; row < ROWS; ++row) {
            const Vec value = read(x[std::min(row, rows - 1)] + k);
            for (int i = 0; i < RANKS; ++i) sums[row][i] += value * weight[i];
        }
    };
    std::int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) step([](const T* p) { return load(p); }, k);
    if (const int left = static_cast<int>(inputs - k))
        step([left](const T* p) { return load_part(p, left); }, k);
    for (int row = 0; row < ROWS; ++row)
        store_sums(inner[row], sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
}

// out[row] += inner[row] · up, up [ranks, size].
template <class T>
void expand(T* const* out, int rows, const float* inner, std::int64_t ranks, const T* up,
            std::int64_t size) {
    const auto step = [&](auto read, auto write, std::int64_t n) {
        Vec sums[ROWS];
        for (int row = 0; row < ROWS; ++row) sums[row] = read(out[std::min(row, rows - 1)] + n);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
            const Vec weight = read(up + rank * size + n);
            for (int row = 0; row < ROWS; ++row)
                sums[row] += weight * splat(inner[row * ranks + rank]);
        }
        for (int row = 0; row < rows; ++row) write(out[row] + n, sums[row]);
    };
    std::int64_t n = 0;
    for (; n + LANES <= size; n += LANES)
        step([](const T* p) { return load(p); }, [](T* p, Vec x) { store(p, x); }, n);
    if (const int left = static_cast<int>(size - n))
        step([left](const T* p) { return load_part(p, left); },
             [left](T* p, Vec x) { store_part(p, x, left); }, n);
}

}  // namespace

// out [rows, ·] += what each row's adapter makes of x [rows, inputs]. down is [parts · ranks,
// inputs], up the parts' [ranks, sizes[part]] one after the other. Adapter i, from 1 on, has the
// ranks from starts[i - 1] to starts[i]; its number stands in adapters [rows], 0 is none.
extern "C" void inferq_lora_add(void* out, std::int64_t out_stride, const void* x,
                                std::int64_t x_stride, const std::int64_t* adapters,
                                std::int64_t rows, const std::int64_t* starts, std::int64_t count,
                                const void* down, const void* up, std::int64_t inputs,
                                const std::int64_t* firsts, const std::int64_t* sizes,
                                std::int64_t parts, std::int32_t dtype) {
    const std::vector<Tile> tiles = tiles_of(adapters, rows, count);
    const std::int64_t all_ranks = starts[count];
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const T *x_data = static_cast<const T*>(x), *down_data = static_cast<const T*>(down);
        T* out_data = static_cast<T*>(out);
        parallel_range(tiles.size(), 1, [&](std::int64_t first, std::int64_t last) {
            std::vector<float> inner;
            for (std::int64_t index = first; index < last; ++index) {
                const Tile& tile = tiles[index];
                const T* from[ROWS];
                T* to[ROWS];
                const std::int64_t start = starts[tile.adapter - 1];
                const std::int64_t ranks = starts[tile.adapter] - start;
                inner.assign(ROWS * ranks, 0.0f);
                for (int row = 0; row < tile.count; ++row)
                    from[row] = x_data + tile.rows[row] * x_stride;
                const T* up_data = static_cast<const T*>(up);
                for (std::int64_t part = 0; part < parts; ++part) {
                    const T* weights = down_data + (part * all_ranks + start) * inputs;
                    for (std::int64_t rank = 0; rank < ranks; rank += RANKS) {
                        const int there = static_cast<int>(std::min<std::int64_t>(RANKS, ranks - rank));
                        float sums[ROWS][RANKS];
                        reduce(from, tile.count, weights + rank * inputs, there, inputs, sums);
                        for (int row = 0; row < ROWS; ++row)
                            std::copy_n(sums[row], there, &inner[row * ranks + rank]);
                    }
                    for (int row = 0; row < tile.count; ++row)
                        to[row] = out_data + tile.rows[row] * out_stride + firsts[part];
                    expand(to, tile.count, inner.data(), ranks, up_data + start * sizes[part],
                           sizes[part]);
                    up_data += all_ranks * sizes[part];
                }
            }
        });
    });
}
INFERQ_EXPORT(inferq_lora_add)
