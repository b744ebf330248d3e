// Prefills: many query tokens of one sequence, with or without cached tokens before them.
//
// A "lane" is one query token's head. The lanes of one KV head stand next to each other in vectors,
// so that scores, softmax and sums of values are computed for 16 (8, 4) of them at once, and keys
// and values are broadcast. Everything is transposed: scores [keys, lanes], values [channels, lanes].
#pragma once
#include "attention.h"
#include "decode.h"

constexpr int PREFILL_TILE = 64;  // keys
// Keys, or channels, whose sums are held in registers: 4 * 4 vectors of 32, 85 % of a Zen 4 core's
// multiplications.
constexpr int ROWS_AT_ONCE = 4;
constexpr int MAX_LANE_VECTORS = LANES == 16 ? 4 : 2;
constexpr int MAX_LANES = MAX_LANE_VECTORS * LANES;

// Lanes [first, first + count) of one KV head: lane = token * group + head. The tokens are those of
// a sequence or, to look at shared tokens, the query rows of all sequences in its group.
struct PrefillItem {
    std::int64_t sequence, kv_head, first, count;
    const std::int32_t* rows = nullptr;
};

// scores [ROWS_AT_ONCE, W vectors] = keys [ROWS_AT_ONCE, head_dim] . query [head_dim, W vectors]
template <int W>
void prefill_scores(const float* const* keys, const float* query, std::int64_t head_dim,
                    float* scores) {
    Vec sums[ROWS_AT_ONCE][W] = {};
    for (std::int64_t channel = 0; channel < head_dim; ++channel) {
        Vec lanes[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) lanes[w] = load(query + (channel * W + w) * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < ROWS_AT_ONCE; ++i)
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) sums[i][w] += lanes[w] * keys[i][channel];
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS_AT_ONCE; ++i)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) store(scores + (i * W + w) * LANES, sums[i][w]);
}

// out [R, W vectors] = out * keep + values [count, channel .. channel + R] . weights [count, W vectors]
template <int W, int R>
void prefill_values(const float* const* values, std::int64_t channel, const float* weights,
                    std::int64_t count, const Vec* keep, float* out) {
    Vec sums[R][W];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) sums[i][w] = load(out + (i * W + w) * LANES) * keep[w];
    for (std::int64_t token = 0; token < count; ++token) {
        const float* value = values[token] + channel;
        Vec lanes[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) lanes[w] = load(weights + (token * W + w) * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) sums[i][w] += lanes[w] * value[i];
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) store(out + (i * W + w) * LANES, sums[i][w]);
}

// Addresses of float32 rows: the cache's own where it holds float32, else widened into `buffer`.
inline void widen_rows(const float* const* rows, std::int64_t offset, std::int64_t count,
                       std::int64_t, float*, const float** out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = rows[i] + offset;
}
template <class T>
void widen_rows(const T* const* rows, std::int64_t offset, std::int64_t count,
                std::int64_t head_dim, float* buffer, const float** out) {
    const Channels channels(head_dim);
    for (std::int64_t i = 0; i < count; ++i) {
        out[i] = buffer;
        for (std::int64_t vector = 0; vector < channels.count; ++vector)
            store_channels(buffer, load_channels(rows[i] + offset, vector, channels), vector,
                           channels);
        buffer += head_dim;
    }
}

// What one item works on, in one thread's scratch.
template <int W> class Prefill {
  public:
    Prefill(const Attention& a, const PrefillItem& item, Scratch& scratch)
        : a_(a), item_(item), row_(a.query_starts[item.sequence]),
          position_(a.seq_lens[item.sequence] - a.query_len(item.sequence)) {
        const std::int64_t lanes = W * LANES;
        query_ = scratch.floats((a.head_dim * 2 + PREFILL_TILE) * lanes +
                                (PREFILL_TILE + 1) * a.head_dim);
        out_ = query_ + a.head_dim * lanes;
        weights_ = out_ + a.head_dim * lanes;
        widened_ = weights_ + PREFILL_TILE * lanes;
        zeros_ = widened_ + PREFILL_TILE * a.head_dim;
        std::fill_n(out_, a.head_dim * lanes, 0.0f);
        std::fill_n(zeros_, a.head_dim, 0.0f);
        for (int w = 0; w < W; ++w) {
            highest_[w] = splat(-FLT_MAX);
            total_[w] = Vec{};
            for (int lane = 0; lane < LANES; ++lane)
                positions_[w][lane] = static_cast<std::int32_t>(position(w * LANES + lane));
        }
    }

    template <class T> void run() {
        read_query();
        if (item_.rows != nullptr) {
            add_tiles<T>(0, a_.num_shared(item_.sequence));
            write_begun();
            return;
        }
        const std::int64_t shared = a_.num_shared(item_.sequence);
        if (shared > 0) read_begun();
        add_tiles<T>(std::max(shared, position(0) + 1 - a_.window), position(item_.count - 1) + 1);
        write_out();
    }

  private:
    std::int64_t row_of(std::int64_t lane) const {
        return item_.rows == nullptr ? row_ + token_of(lane) : item_.rows[token_of(lane)];
    }
    std::int64_t token_of(std::int64_t lane) const { return (item_.first + lane) / a_.group(); }
    std::int64_t head_of(std::int64_t lane) const {
        return item_.kv_head * a_.group() + (item_.first + lane) % a_.group();
    }
    std::int64_t position(std::int64_t lane) const {
        return position_ + token_of(std::min(lane, item_.count - 1));
    }

    void read_query() {
        constexpr std::int64_t lanes = W * LANES;
        with_dtype(a_.query_dtype, [&](auto element) {
            using T = decltype(element);
            const Channels channels(a_.head_dim);
            for (std::int64_t lane = 0; lane < lanes; ++lane) {
                float* column = query_ + lane;
                if (lane >= item_.count) {
                    for (std::int64_t i = 0; i < a_.head_dim; ++i) column[i * lanes] = 0.0f;
                    continue;
                }
                const T* row = static_cast<const T*>(a_.query) + row_of(lane) * a_.query_row +
                               head_of(lane) * a_.query_head;
                for (std::int64_t vector = 0; vector < channels.count; ++vector) {
                    const Vec x = load_channels(row, vector, channels) * a_.scale;
                    const std::int64_t base = channels.offset(vector);
                    const std::int64_t last = std::min<std::int64_t>(LANES, a_.head_dim - base);
                    for (std::int64_t i = 0; i < last; ++i) column[(base + i) * lanes] = x[i];
                }
            }
        });
    }

    template <class T> void add_tiles(std::int64_t first, std::int64_t last) {
        for (std::int64_t token = first; token < last; token += PREFILL_TILE)
            add_tile<T>(token, std::min<std::int64_t>(PREFILL_TILE, last - token));
    }

    template <class T> void add_tile(std::int64_t token, std::int64_t count) {
        const T* keys[PREFILL_TILE];
        const float* rows[PREFILL_TILE];
        const std::int64_t padded = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
        const std::int64_t offset = item_.kv_head * a_.head_stride;
        find_keys(a_, item_.sequence, token, count, keys);
        std::fill(rows + count, rows + padded, zeros_);
        widen_rows(keys, offset, count, a_.head_dim, widened_, rows);
        for (std::int64_t i = 0; i < padded; i += ROWS_AT_ONCE)
            prefill_scores<W>(rows + i, query_, a_.head_dim, weights_ + i * W * LANES);
        Vec keep[W];
        softmax(token, count, keep);
        widen_rows(keys, offset + a_.part_stride, count, a_.head_dim, widened_, rows);
        std::int64_t channel = 0;
        for (; channel + ROWS_AT_ONCE <= a_.head_dim; channel += ROWS_AT_ONCE)
            prefill_values<W, ROWS_AT_ONCE>(rows, channel, weights_, count, keep,
                                            out_ + channel * W * LANES);
        for (; channel < a_.head_dim; ++channel)
            prefill_values<W, 1>(rows, channel, weights_, count, keep,
                                 out_ + channel * W * LANES);
    }

    // Turns the tile's scores into weights; `keep` is what the sums so far are to be scaled by.
    void softmax(std::int64_t token, std::int64_t count, Vec* keep) {
        const bool is_masked =
            item_.rows == nullptr && (token + count - 1 > position(0) ||
                                      token <= position(item_.count - 1) - a_.window);
        for (int w = 0; w < W; ++w) {
            float* scores = weights_ + w * LANES;
            Vec top = highest_[w];
            for (std::int64_t i = 0; i < count; ++i) {
                Vec score = load(scores + i * W * LANES);
                if (a_.soft_cap != 0.0f) score = cap_scores(score, a_.soft_cap);
                if (is_masked) score = masked(score, token + i, positions_[w]);
                store(scores + i * W * LANES, score);
                top = vmax(score, top);
            }
            Vec sums = {};
            for (std::int64_t i = 0; i < count; ++i) {
                const Vec weight = exp(load(scores + i * W * LANES) - top);
                store(scores + i * W * LANES, weight);
                sums += weight;
            }
            keep[w] = exp(highest_[w] - top);
            highest_[w] = top;
            total_[w] = total_[w] * keep[w] + sums;
        }
    }

    Vec masked(Vec score, std::int64_t key, IntVec positions) const {
        const IntVec at = IntVec{} + static_cast<std::int32_t>(key);
        const IntVec width = IntVec{} + static_cast<std::int32_t>(a_.window);
        const IntVec is_visible = (at <= positions) & (positions - at < width);
        return select(is_visible, score, splat(-INFINITY));
    }

    void write_out() {
        constexpr std::int64_t lanes = W * LANES;
        float inverse[lanes];
        for (int w = 0; w < W; ++w) store(inverse + w * LANES, 1.0f / total_[w]);
        const Channels channels(a_.head_dim);
        with_dtype(a_.query_dtype, [&](auto element) {
            using T = decltype(element);
            for (std::int64_t lane = 0; lane < item_.count; ++lane) {
                T* row = static_cast<T*>(a_.out) +
                         (row_of(lane) * a_.heads + head_of(lane)) * a_.head_dim;
                for (std::int64_t vector = 0; vector < channels.count; ++vector)
                    store_channels(row, column(lane, vector, channels) * inverse[lane], vector,
                                   channels);
            }
        });
    }

    // One lane's sums in the channels of a vector.
    Vec column(std::int64_t lane, std::int64_t vector, Channels channels) const {
        const std::int64_t base = channels.offset(vector);
        const std::int64_t last = std::min<std::int64_t>(LANES, a_.head_dim - base);
        Vec x = {};
        for (std::int64_t i = 0; i < last; ++i) x[i] = out_[(base + i) * W * LANES + lane];
        return x;
    }

    // The running softmax of each lane, to and from the row that goes on with it.
    void write_begun() const {
        const Channels channels(a_.head_dim);
        for (std::int64_t lane = 0; lane < item_.count; ++lane) {
            const DecodeState state(a_.begun + row_of(lane) * a_.begun_size, a_);
            const std::int64_t head = head_of(lane);
            for (std::int64_t vector = 0; vector < channels.count; ++vector)
                store(state.values + head * channels.padded() + vector * LANES,
                      column(lane, vector, channels));
            state.highest[head] = highest_[lane / LANES][lane % LANES];
            state.total[head] = total_[lane / LANES][lane % LANES];
        }
    }
    void read_begun() {
        const Channels channels(a_.head_dim);
        for (std::int64_t lane = 0; lane < item_.count; ++lane) {
            const DecodeState state(a_.begun + row_of(lane) * a_.begun_size, a_);
            const std::int64_t head = head_of(lane);
            for (std::int64_t vector = 0; vector < channels.count; ++vector) {
                const Vec x = load(state.values + head * channels.padded() + vector * LANES);
                const std::int64_t base = channels.offset(vector);
                const std::int64_t last = std::min<std::int64_t>(LANES, a_.head_dim - base);
                for (std::int64_t i = 0; i < last; ++i)
                    out_[(base + i) * W * LANES + lane] = x[i];
            }
            highest_[lane / LANES][lane % LANES] = state.highest[head];
            total_[lane / LANES][lane % LANES] = state.total[head];
        }
    }

    const Attention& a_;
    const PrefillItem item_;
    const std::int64_t row_, position_;
    float *query_, *out_, *weights_, *widened_, *zeros_;
    Vec highest_[W], total_[W];
    IntVec positions_[W];
};

template <class T>
void run_prefill(const Attention& a, const PrefillItem& item, Scratch& scratch) {
    if (item.count <= LANES)
        Prefill<1>(a, item, scratch).template run<T>();
    else if (MAX_LANE_VECTORS == 2 || item.count <= 2 * LANES)
        Prefill<2>(a, item, scratch).template run<T>();
    else if (item.count <= 3 * LANES)
        Prefill<3>(a, item, scratch).template run<T>();
    else
        Prefill<MAX_LANE_VECTORS>(a, item, scratch).template run<T>();
}
