// Decodes: one query token per sequence, whose heads share the rows of their KV head.
//
// A sequence is walked in tiles of tokens, all KV heads of a tile one after the other, so that a
// page is read from front to back, and each row once for all query heads of its group.
#pragma once
#include <iterator>

#include "attention.h"

constexpr int DECODE_TILE = 64;  // tokens
constexpr int KEYS_AT_ONCE = 4;
// Query heads whose sums are held in registers: 4 keys * 4 heads of 32, or 4 * 2 of 16.
constexpr int HEADS_AT_ONCE = LANES == 16 ? 4 : 2;

// Tokens whose rows are on their way to the second cache while one is computed. 64 decodes at
// context 500, one layer, float32 in huge pages, 2 Zen 4 cores: 3.0 ms with 16 on their way to the
// first cache, which has too few buffers for misses; to the second 2.1 ms with 16, 1.7 to 2.1 with
// 32 and 48, 1.7 to 2.1 with 64, 2.5 with 128.
constexpr int LOOK_AHEAD = 32;
constexpr int SECOND_CACHE = 2;  // how __builtin_prefetch calls it

template <class T> void prefetch(const T* row, Channels channels) {
    for (std::size_t byte = 0; byte < channels.head_dim * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, SECOND_CACHE);
}

// The running softmax of one sequence: sums of exp(score - highest), plain and weighting values.
struct DecodeState {
    float* values;   // [heads, padded head_dim]
    float* highest;  // [heads]
    float* total;    // [heads]

    static std::int64_t size(const Attention& a) {
        return a.heads * (Channels(a.head_dim).padded() + 2 * LANES);
    }
    DecodeState(float* memory, const Attention& a)
        : values(memory),
          highest(memory + a.heads * Channels(a.head_dim).padded()),
          total(highest + a.heads) {}
    void reset(const Attention& a) const {
        std::fill(values, highest, 0.0f);
        std::fill(highest, highest + a.heads, -FLT_MAX);
        std::fill(total, total + a.heads, 0.0f);
    }
    // Goes on from what the row has seen of shared tokens, if there are any.
    void begin(const Attention& a, std::int64_t sequence) const {
        reset(a);
        if (a.num_shared(sequence) == 0) return;
        const DecodeState begun(a.begun + a.query_starts[sequence] * a.begun_size, a);
        std::copy(begun.values, begun.total + a.heads, values);
    }
};

// Where one decode's tokens begin, and its number of tiles.
struct DecodeSpan {
    std::int64_t first, last;
    DecodeSpan(const Attention& a, std::int64_t sequence)
        : first(std::max(a.num_shared(sequence), a.seq_lens[sequence] - a.window)),
          last(a.seq_lens[sequence]) {}
    std::int64_t tiles() const { return (last - first + DECODE_TILE - 1) / DECODE_TILE; }
};

// scores [G, DECODE_TILE] = query [G, padded] . keys
template <int G, class T>
void decode_scores(const float* query, const T* const* keys, std::int64_t head_offset,
                   std::int64_t count, Channels channels, float* scores) {
    for (std::int64_t token = 0; token < count; token += KEYS_AT_ONCE) {
        const T* rows[KEYS_AT_ONCE];
        for (int i = 0; i < KEYS_AT_ONCE; ++i)  // past the end: the last row again, to be dropped
            rows[i] = keys[std::min(token + i, count - 1)] + head_offset;
        for (int i = 0; i < KEYS_AT_ONCE; ++i)
            prefetch(keys[token + i + LOOK_AHEAD] + head_offset, channels);
        Vec sums[G][KEYS_AT_ONCE] = {};
        for (std::int64_t vector = 0; vector < channels.count; ++vector) {
            Vec key[KEYS_AT_ONCE];
#pragma GCC unroll 4
            for (int i = 0; i < KEYS_AT_ONCE; ++i)
                key[i] = load_channels(rows[i], vector, channels);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const Vec q = load(query + g * channels.padded() + vector * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < KEYS_AT_ONCE; ++i) sums[g][i] += q * key[i];
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
            store_sums(scores + g * DECODE_TILE + token, sums[g][0], sums[g][1], sums[g][2],
                       sums[g][3]);
    }
}

// Turns one head's scores into weights; returns what the sums so far are to be scaled by.
inline float decode_softmax(float* scores, std::int64_t count, float soft_cap, float& highest,
                            float& total) {
    const std::int64_t padded = (count + LANES - 1) / LANES * LANES;
    if (soft_cap != 0.0f)
        for (std::int64_t i = 0; i < padded; i += LANES)
            store(scores + i, cap_scores(load(scores + i), soft_cap));
    std::fill(scores + count, scores + padded, -INFINITY);
    Vec high = load(scores);
    for (std::int64_t i = LANES; i < padded; i += LANES) high = vmax(load(scores + i), high);
    float top = highest;
    for (int lane = 0; lane < LANES; ++lane) top = std::max(top, high[lane]);
    Vec sums = {};
    for (std::int64_t i = 0; i < padded; i += LANES) {
        const Vec weight = exp(load(scores + i) - top);
        store(scores + i, weight);
        sums += weight;
    }
    const float keep = exp(splat(highest - top))[0];
    total = total * keep + sum(sums);
    highest = top;
    return keep;
}

// values [G, V vectors] = values * keep + weights . rows
template <int G, int V, class T>
void decode_values(const float* weights, const float* keep, const T* const* keys,
                   std::int64_t value_offset, std::int64_t count, Channels channels,
                   std::int64_t vector, float* values) {
    Vec sums[G][V];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            sums[g][v] = load(values + g * channels.padded() + (vector + v) * LANES) * keep[g];
    for (std::int64_t token = 0; token < count; ++token) {
        const T* row = keys[token] + value_offset;
        prefetch(keys[token + LOOK_AHEAD] + value_offset, channels);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            const Vec value = load_channels(row, vector + v, channels);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) sums[g][v] += value * weights[g * DECODE_TILE + token];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            store(values + g * channels.padded() + (vector + v) * LANES, sums[g][v]);
}

// Adds a tile's tokens to the state of G heads that begin with `head`.
template <int G, class T>
void decode_heads(const Attention& a, const float* query, const T* const* keys, std::int64_t count,
                  std::int64_t head, Channels channels, DecodeState state) {
    float scores[G * DECODE_TILE], keep[G];
    const std::int64_t head_offset = head / a.group() * a.head_stride;
    decode_scores<G>(query + head * channels.padded(), keys, head_offset, count, channels, scores);
    for (int g = 0; g < G; ++g)
        keep[g] = decode_softmax(scores + g * DECODE_TILE, count, a.soft_cap,
                                 state.highest[head + g], state.total[head + g]);
    const std::int64_t value_offset = a.part_stride + head_offset;
    float* values = state.values + head * channels.padded();
    std::int64_t vector = 0;
    for (; vector + 4 <= channels.count; vector += 4)
        decode_values<G, 4>(scores, keep, keys, value_offset, count, channels, vector, values);
    for (; vector + 2 <= channels.count; vector += 2)
        decode_values<G, 2>(scores, keep, keys, value_offset, count, channels, vector, values);
    for (; vector < channels.count; ++vector)
        decode_values<G, 1>(scores, keep, keys, value_offset, count, channels, vector, values);
}

// Copies the query token's heads to float32 [heads, padded], scaled. Channels that the last vector
// shares with the one before count once: zero in the last.
inline void decode_query(const Attention& a, std::int64_t row, Channels channels, float* query) {
    with_dtype(a.query_dtype, [&](auto element) {
        using T = decltype(element);
        const T* source = static_cast<const T*>(a.query) + row * a.query_row;
        for (std::int64_t head = 0; head < a.heads; ++head) {
            float* target = query + head * channels.padded();
            for (std::int64_t vector = 0; vector < channels.count; ++vector)
                store(target + vector * LANES,
                      load_channels(source + head * a.query_head, vector, channels) * a.scale);
            if (!channels.is_small()) {
                const std::int64_t twice = channels.padded() - channels.head_dim;
                std::fill_n(target + channels.padded() - LANES, twice, 0.0f);
            }
        }
    });
}

// Fills [keys, end) with the rows that are read next, those of the sequences from `next` on; after
// the last one with the row before `keys` again.
template <class T>
void find_next(const Attention& a, std::int64_t next, const T** keys, const T** end) {
    const T* row = keys[-1];
    for (; next < a.num_decodes && keys < end; ++next) {
        const DecodeSpan span(a, next);
        const std::int64_t count = std::min<std::int64_t>(end - keys, span.last - span.first);
        if (count <= 0) continue;
        find_keys(a, next, span.first, count, keys);
        keys += count;
    }
    std::fill(keys, end, row);
}

// Adds tokens [first, last) of a sequence to its state.
template <class T>
void decode_tokens(const Attention& a, std::int64_t sequence, std::int64_t first,
                   std::int64_t last, const float* query, DecodeState state) {
    const Channels channels(a.head_dim);
    const std::int64_t group = a.group();
    for (std::int64_t token = first; token < last; token += DECODE_TILE) {
        const std::int64_t count = std::min<std::int64_t>(DECODE_TILE, last - token);
        const T* keys[DECODE_TILE + KEYS_AT_ONCE + LOOK_AHEAD];
        const std::int64_t ahead =
            std::min<std::int64_t>(count + LOOK_AHEAD + KEYS_AT_ONCE, last - token);
        find_keys(a, sequence, token, ahead, keys);
        find_next(a, sequence + 1, keys + ahead, std::end(keys));
        for (std::int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
            std::int64_t head = kv_head * group;
            const std::int64_t end = head + group;
            auto next = [&](auto heads) {
                constexpr int G = decltype(heads)::value;
                for (; head + G <= end; head += G)
                    decode_heads<G>(a, query, keys, count, head, channels, state);
            };
            if constexpr (HEADS_AT_ONCE == 4) {
                next(std::integral_constant<int, 4>{});
                next(std::integral_constant<int, 3>{});
            }
            next(std::integral_constant<int, 2>{});
            next(std::integral_constant<int, 1>{});
        }
    }
}

// Adds a part's sums to those of an earlier part of the same sequence.
inline void decode_merge(const Attention& a, DecodeState into, DecodeState part) {
    const std::int64_t padded = Channels(a.head_dim).padded();
    for (std::int64_t head = 0; head < a.heads; ++head) {
        const float top = std::max(into.highest[head], part.highest[head]);
        const float keep = exp(splat(into.highest[head] - top))[0];
        const float add = exp(splat(part.highest[head] - top))[0];
        into.highest[head] = top;
        into.total[head] = into.total[head] * keep + part.total[head] * add;
        for (std::int64_t i = head * padded; i < (head + 1) * padded; i += LANES)
            store(into.values + i, load(into.values + i) * keep + load(part.values + i) * add);
    }
}

inline void decode_store(const Attention& a, std::int64_t sequence, DecodeState state) {
    const Channels channels(a.head_dim);
    with_dtype(a.query_dtype, [&](auto element) {
        using T = decltype(element);
        T* row = static_cast<T*>(a.out) + a.query_starts[sequence] * a.heads * a.head_dim;
        for (std::int64_t head = 0; head < a.heads; ++head)
            for (std::int64_t vector = 0; vector < channels.count; ++vector)
                store_channels(row + head * a.head_dim,
                               load(state.values + head * channels.padded() + vector * LANES) /
                                   state.total[head],
                               vector, channels);
    });
}
