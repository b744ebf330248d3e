// Rotary position embedding, half layout: channels i and i + half are turned by the row's angle i.
#include "export.h"
#include "simd.h"
#include "threads.h"

namespace {

// Elements for which waking a second thread pays.
constexpr std::int64_t GRAIN = 16384;

template <class T> void rotate(T* head, const float* cos, const float* sin, std::int64_t half) {
    std::int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Vec first = load(head + i), second = load(head + half + i);
        const Vec c = load(cos + i), s = load(sin + i);
        store(head + i, first * c - second * s);
        store(head + half + i, second * c + first * s);
    }
    if (const int rest = static_cast<int>(half - i)) {
        const Vec first = load_part(head + i, rest), second = load_part(head + half + i, rest);
        const Vec c = load_part(cos + i, rest), s = load_part(sin + i, rest);
        store_part(head + i, first * c - second * s, rest);
        store_part(head + half + i, second * c + first * s, rest);
    }
}

}  // namespace

// query, key [tokens, heads, head_dim] by strides, in place; cos, sin [tokens, half] by rows.
extern "C" void inferq_rotary(void* query, void* key, const float* cos, const float* sin,
                              std::int64_t tokens, std::int64_t half, std::int64_t angle_row,
                              std::int64_t heads, std::int64_t query_row, std::int64_t query_head,
                              std::int64_t kv_heads, std::int64_t key_row, std::int64_t key_head,
                              std::int32_t dtype) {
    with_dtype(dtype, [&](auto element) {
        using T = decltype(element);
        const std::int64_t row_size = 2 * half * (heads + kv_heads);
        parallel_range(tokens, (GRAIN + row_size - 1) / row_size, [&](auto first, auto last) {
            for (std::int64_t row = first; row < last; ++row) {
                const float *c = cos + row * angle_row, *s = sin + row * angle_row;
                T* queries = static_cast<T*>(query) + row * query_row;
                for (std::int64_t head = 0; head < heads; ++head)
                    rotate(queries + head * query_head, c, s, half);
                T* keys = static_cast<T*>(key) + row * key_row;
                for (std::int64_t head = 0; head < kv_heads; ++head)
                    rotate(keys + head * key_head, c, s, half);
            }
        });
    });
}
INFERQ_EXPORT(inferq_rotary)
