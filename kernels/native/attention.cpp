// Paged attention over the pages where they lie.
//
// Decodes are shared out by tokens: each thread takes an equal run of all sequences' tiles, and the
// few sequences that lie in two threads' runs are merged at the end. Prefills are handed out item
// by item, longest first, to whichever thread is free.
#include "attention.h"

#include <atomic>
#include <vector>

#include "decode.h"
#include "export.h"
#include "prefill.h"
#include "threads.h"

namespace {

// Multiplications for which a further thread pays: 8 decodes at context 50 (460,000) take 24 us on
// two threads of 2 Zen 4 cores, 37 on one.
constexpr std::int64_t GRAIN = 200'000;

thread_local Scratch own_scratch;
thread_local Scratch part_scratch;
thread_local Scratch begun_scratch;

// The sums that one thread made of a part of a sequence.
struct Part {
    std::int64_t sequence = -1;
    float* memory = nullptr;
};

// A thread's run of tiles begins in the middle of one sequence and ends in the middle of another.
struct ThreadParts {
    Part first, last;
};

std::int64_t count_tiles(const Attention& a) {
    std::int64_t tiles = 0;
    for (std::int64_t i = 0; i < a.num_decodes; ++i) tiles += DecodeSpan(a, i).tiles();
    return tiles;
}

template <class T>
void run_decodes(const Attention& a, std::int64_t first, std::int64_t last, ThreadParts& parts) {
    const Channels channels(a.head_dim);
    float* query = own_scratch.floats(a.heads * channels.padded() + DecodeState::size(a));
    float* memory = query + a.heads * channels.padded();
    std::int64_t tile = 0;  // of all sequences, the first of this one
    for (std::int64_t sequence = 0; sequence < a.num_decodes && tile < last; ++sequence) {
        const DecodeSpan span(a, sequence);
        const std::int64_t begin = std::max(first, tile), end = std::min(last, tile + span.tiles());
        if (begin < end) {
            const bool is_begun = begin == tile, is_ended = end == tile + span.tiles();
            Part part{sequence, memory};
            if (!is_begun)
                part.memory = (parts.first = {sequence, parts.first.memory}).memory;
            else if (!is_ended)
                part.memory = (parts.last = {sequence, parts.last.memory}).memory;
            const DecodeState state(part.memory, a);
            is_begun ? state.begin(a, sequence) : state.reset(a);
            decode_query(a, a.query_starts[sequence], channels, query);
            decode_tokens<T>(a, sequence, span.first + (begin - tile) * DECODE_TILE,
                             std::min(span.first + (end - tile) * DECODE_TILE, span.last), query,
                             state);
            if (is_begun && is_ended) decode_store(a, sequence, state);
        }
        tile += span.tiles();
    }
}

// Joins the parts of sequences that several threads worked on, in the order of their tokens.
void merge_decodes(const Attention& a, const std::vector<ThreadParts>& parts) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const Part& begun = parts[i].last;
        if (begun.sequence < 0) continue;
        const DecodeState state(begun.memory, a);
        for (std::size_t j = i + 1; j < parts.size(); ++j) {
            if (parts[j].first.sequence != begun.sequence) break;
            decode_merge(a, state, DecodeState(parts[j].first.memory, a));
        }
        decode_store(a, begun.sequence, state);
    }
}

// Lanes of an item: as many as registers hold, but enough items for all threads.
std::int64_t item_lanes(const Attention& a) {
    std::int64_t lanes = MAX_LANES;
    for (; lanes > LANES; lanes /= 2) {
        std::int64_t items = 0;
        for (std::int64_t i = a.num_decodes; i < a.sequences; ++i)
            items += (a.query_len(i) * a.group() + lanes - 1) / lanes * a.kv_heads;
        if (items >= 2 * omp_get_max_threads()) break;
    }
    return lanes;
}

std::vector<PrefillItem> prefill_items(const Attention& a) {
    std::vector<PrefillItem> items;
    const std::int64_t size = item_lanes(a);
    for (std::int64_t i = a.num_decodes; i < a.sequences; ++i) {
        const std::int64_t lanes = a.query_len(i) * a.group();
        if (a.seq_lens[i] <= 0) continue;
        for (std::int64_t first = (lanes - 1) / size * size; first >= 0; first -= size)
            for (std::int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
                items.push_back({i, kv_head, first, std::min(size, lanes - first)});
    }
    return items;
}

// The query rows of each group side by side, to look at what its sequences share.
struct SharedWork {
    std::vector<std::int32_t> rows;
    std::vector<PrefillItem> items;

    explicit SharedWork(const Attention& a) {
        if (a.shared == nullptr) return;
        rows.reserve(a.query_starts[a.sequences]);  // items point into it
        for (std::int64_t i = 0; i < a.sequences; ++i)
            if (a.leaders[i] == i && a.shared[i] > 0) add(a, i);
    }

  private:
    void add(const Attention& a, std::int64_t leader) {
        const std::size_t begin = rows.size();
        for (std::int64_t i = leader; i < a.sequences; ++i)
            if (a.leaders[i] == leader)
                for (std::int32_t row = a.query_starts[i]; row < a.query_starts[i + 1]; ++row)
                    rows.push_back(row);
        const std::int64_t lanes = (rows.size() - begin) * a.group();
        const std::int64_t vectors = (lanes + LANES - 1) / LANES;
        std::int64_t pieces = (vectors + MAX_LANE_VECTORS - 1) / MAX_LANE_VECTORS;
        while (pieces < vectors && pieces * a.kv_heads < 2 * omp_get_max_threads()) ++pieces;
        const std::int64_t size = (vectors + pieces - 1) / pieces * LANES;
        for (std::int64_t first = 0; first < lanes; first += size)
            for (std::int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
                items.push_back({leader, kv_head, first, std::min(size, lanes - first),
                                 rows.data() + begin});
    }
};

// Rows of sequences without tokens are all zero bits in every dtype.
void clear_padding(const Attention& a) {
    const std::int64_t row_bytes = a.heads * a.head_dim * (a.query_dtype == 0 ? 4 : 2);
    for (std::int64_t i = 0; i < a.sequences; ++i)
        if (a.seq_lens[i] <= 0)
            std::memset(static_cast<char*>(a.out) + a.query_starts[i] * row_bytes, 0,
                        a.query_len(i) * row_bytes);
}

std::int64_t multiplications(const Attention& a) {
    std::int64_t pairs = 0;  // of query tokens and keys
    for (std::int64_t i = 0; i < a.sequences; ++i)
        pairs += a.query_len(i) * std::min<std::int64_t>(a.seq_lens[i], a.window);
    return 2 * pairs * a.heads * a.head_dim;
}

template <class T>
void run_items(const Attention& a, const std::vector<PrefillItem>& items,
               std::atomic<std::size_t>& next) {
    for (std::size_t i; (i = next.fetch_add(1)) < items.size();)
        run_prefill<T>(a, items[i], own_scratch);
}

template <class T> void attend(const Attention& a) {
    clear_padding(a);
    const int wanted = threads_for(multiplications(a), GRAIN);
    const SharedWork shared(a);
    if (!shared.items.empty()) {
        std::atomic<std::size_t> next{0};
        parallel(wanted, [&](int, int) { run_items<T>(a, shared.items, next); });
    }
    const std::int64_t tiles = count_tiles(a), state_size = DecodeState::size(a);
    const std::vector<PrefillItem> items = prefill_items(a);
    std::vector<ThreadParts> parts(wanted);
    float* memory = part_scratch.floats(2 * wanted * state_size);
    for (ThreadParts& own : parts) {
        own.first.memory = memory;
        own.last.memory = memory + state_size;
        memory += 2 * state_size;
    }
    std::atomic<std::size_t> next_item{0};
    parallel(wanted, [&](int thread, int threads) {
        run_decodes<T>(a, tiles * thread / threads, tiles * (thread + 1) / threads, parts[thread]);
        run_items<T>(a, items, next_item);
    });
    merge_decodes(a, parts);
}

}  // namespace

// query_starts, seq_lens, block_tables: int32 on the host. Strides in elements; window at least 1,
// soft_cap 0 for none. `out` is contiguous. leaders, shared: from inferq_shared_prefixes, or null.
extern "C" void inferq_attend(
    const void* query, void* out, const void* cache, const std::int32_t* query_starts,
    const std::int32_t* seq_lens, const std::int32_t* block_tables, const std::int32_t* leaders,
    const std::int32_t* shared, std::int64_t table_stride, std::int64_t sequences,
    std::int64_t num_decodes, std::int64_t query_row, std::int64_t query_head, std::int64_t heads,
    std::int64_t head_dim, std::int64_t block_stride, std::int64_t part_stride,
    std::int64_t token_stride, std::int64_t head_stride, std::int64_t kv_heads,
    std::int64_t block_size, std::int64_t window, float scale, float soft_cap,
    std::int32_t query_dtype, std::int32_t cache_dtype) {
    Attention a{query,        out,          cache,       query_row,    query_head, block_stride,
                part_stride,  token_stride, head_stride, query_starts, seq_lens,   block_tables,
                table_stride, sequences,    num_decodes, heads,        kv_heads,   head_dim,
                block_size,   window,       scale,       soft_cap,     query_dtype};
    // Each member of a group must see all that it shares.
    const bool is_windowed = std::any_of(seq_lens, seq_lens + sequences,
                                         [&](std::int32_t length) { return length > window; });
    const bool is_shared = shared != nullptr && std::any_of(shared, shared + sequences,
                                                            [](std::int32_t n) { return n > 0; });
    if (is_shared && !is_windowed) {
        a.leaders = leaders;
        a.shared = shared;
        a.begun_size = DecodeState::size(a);
        a.begun = begun_scratch.floats(query_starts[sequences] * a.begun_size);
    }
    with_dtype(cache_dtype, [&](auto element) { attend<decltype(element)>(a); });
}
INFERQ_EXPORT(inferq_attend)
