// What decode.h and prefill.h share: one call's arguments, the cache's pages, softmax arithmetic.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "simd.h"

struct Attention {
    const void* query;  // [T, heads, head_dim] by strides
    void* out;          // [T, heads, head_dim], contiguous
    const void* cache;  // [blocks, 2, block_size, kv_heads, head_dim] by strides
    std::int64_t query_row, query_head;  // strides, all in elements
    std::int64_t block_stride, part_stride, token_stride, head_stride;
    const std::int32_t* query_starts;  // [sequences + 1]
    const std::int32_t* seq_lens;      // [sequences]
    const std::int32_t* block_tables;  // [sequences, table_stride]
    std::int64_t table_stride;
    std::int64_t sequences, num_decodes, heads, kv_heads, head_dim, block_size;
    std::int64_t window;  // tokens that a token sees, itself included
    float scale, soft_cap;  // soft_cap 0: none
    std::int32_t query_dtype;
    // Sequences whose first tokens lie in the same blocks: the first of each one's group, and how
    // many tokens its group shares, 0 for none; [sequences], null where nothing is shared.
    const std::int32_t* leaders = nullptr;
    const std::int32_t* shared = nullptr;
    // What each query row has seen of shared tokens: a DecodeState, `begun_size` floats per row.
    float* begun = nullptr;
    std::int64_t begun_size = 0;

    std::int64_t num_shared(std::int64_t sequence) const {
        return shared == nullptr ? 0 : shared[sequence];
    }
    std::int64_t group() const { return heads / kv_heads; }
    std::int64_t query_len(std::int64_t sequence) const {
        return query_starts[sequence + 1] - query_starts[sequence];
    }
};

// Memory of one thread that grows to what it needs once.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    float* floats(std::int64_t count) {
        if (count > size_) {
            std::free(memory_);
            size_ = (count + 1023) / 1024 * 1024;
            memory_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
            if (memory_ == nullptr) std::abort();
        }
        return memory_;
    }

  private:
    float* memory_ = nullptr;
    std::int64_t size_ = 0;
};

// A head's channels as `count` vectors. Where LANES does not divide head_dim, the last vector
// overlaps the one before it; heads smaller than one vector are padded with zeros.
struct Channels {
    std::int64_t head_dim, count;

    explicit Channels(std::int64_t head_dim)
        : head_dim(head_dim), count((head_dim + LANES - 1) / LANES) {}
    std::int64_t padded() const { return count * LANES; }
    std::int64_t offset(std::int64_t vector) const {
        return std::max<std::int64_t>(0, std::min(vector * LANES, head_dim - LANES));
    }
    bool is_small() const { return head_dim < LANES; }
};

template <class T> Vec load_channels(const T* row, std::int64_t vector, Channels channels) {
    if (channels.is_small()) return load_part(row, static_cast<int>(channels.head_dim));
    return load(row + channels.offset(vector));
}
template <class T> void store_channels(T* row, Vec x, std::int64_t vector, Channels channels) {
    if (channels.is_small())
        store_part(row, x, static_cast<int>(channels.head_dim));
    else
        store(row + channels.offset(vector), x);
}

// Addresses of the rows of tokens [first, first + count): the key of KV head 0, in the cache.
template <class T>
void find_keys(const Attention& a, std::int64_t sequence, std::int64_t first, std::int64_t count,
               const T** keys) {
    const std::int32_t* table = a.block_tables + sequence * a.table_stride;
    std::int64_t block = first / a.block_size, offset = first % a.block_size;
    const T* page = static_cast<const T*>(a.cache) + table[block] * a.block_stride;
    for (std::int64_t i = 0; i < count; ++i) {
        if (offset == a.block_size) {
            offset = 0;
            page = static_cast<const T*>(a.cache) + table[++block] * a.block_stride;
        }
        keys[i] = page + offset++ * a.token_stride;
    }
}

// tanh within 2e-7: by its series near zero, where 1 - 2 / (e^2x + 1) would cancel.
inline Vec vtanh(Vec x) {
    const Vec square = x * x;
    Vec series = square * (62.0f / 2835) - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = (series * square + 1.0f) * x;
    return select(square < splat(0.0625f), series, 1.0f - 2.0f / (exp(x + x) + 1.0f));
}

inline Vec cap_scores(Vec scores, float soft_cap) {
    return vtanh(scores / soft_cap) * soft_cap;
}
