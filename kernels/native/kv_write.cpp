// Stores a step's keys and values at their slots in the paged cache.
#include "export.h"
#include "simd.h"
#include "threads.h"

namespace {

// Elements for which waking a second thread pays.
constexpr std::int64_t GRAIN = 32768;

template <class From, class To> void convert(const From* from, To* to, std::int64_t count) {
    if constexpr (std::is_same_v<From, To>) {
        std::memcpy(to, from, count * sizeof(To));
        return;
    }
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
    if (const int rest = static_cast<int>(count - i))
        store_part(to + i, load_part(from + i, rest), rest);
}

}  // namespace

// key, value [tokens, kv_heads, head_dim] by strides (rows of the two may differ; heads are dense);
// slots [tokens]: block * block_size + offset, negative ones are skipped. cache [blocks, 2,
// block_size, kv_heads, head_dim] by strides. All strides in elements.
extern "C" void inferq_write_kv(const void* key, const void* value, void* cache,
                                const std::int64_t* slots, std::int64_t tokens,
                                std::int64_t key_row, std::int64_t key_head,
                                std::int64_t value_row, std::int64_t value_head,
                                std::int64_t block_stride, std::int64_t part_stride,
                                std::int64_t token_stride, std::int64_t head_stride,
                                std::int64_t kv_heads, std::int64_t head_dim,
                                std::int64_t block_size, std::int32_t dtype,
                                std::int32_t cache_dtype) {
    auto write = [&](auto from, auto to) {
        using From = decltype(from);
        using To = decltype(to);
        const std::int64_t row_size = 2 * kv_heads * head_dim;
        parallel_range(tokens, (GRAIN + row_size - 1) / row_size, [&](auto first, auto last) {
            for (std::int64_t row = first; row < last; ++row) {
                if (slots[row] < 0) continue;
                To* keys = static_cast<To*>(cache) + slots[row] / block_size * block_stride +
                           slots[row] % block_size * token_stride;
                To* values = keys + part_stride;
                const From* key_heads = static_cast<const From*>(key) + row * key_row;
                const From* value_heads = static_cast<const From*>(value) + row * value_row;
                for (std::int64_t head = 0; head < kv_heads; ++head) {
                    convert(key_heads + head * key_head, keys + head * head_stride, head_dim);
                    convert(value_heads + head * value_head, values + head * head_stride, head_dim);
                }
            }
        });
    };
    with_dtype(dtype, [&](auto from) {
        with_dtype(cache_dtype, [&](auto to) { write(from, to); });
    });
}
INFERQ_EXPORT(inferq_write_kv)
