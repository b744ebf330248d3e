// Finds sequences whose first tokens lie in the same blocks, so that attention reads those once.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "export.h"

namespace {

// Lanes (query tokens' heads of one KV head) of a sequence that fill vectors without others: it
// gains nothing. Lanes of a group, and tokens, from which the group is worth its extra pass: decodes
// of SmolLM2's shape, 512 of 530 tokens shared, all layers on 2 Zen 4 cores, without and with it:
// 12 lanes 3.5 and 4.0 ms, 24 lanes 5.8 and 5.6, 96 lanes 20.7 and 12.9.
constexpr std::int64_t FULL_LANES = 16;
constexpr std::int64_t FEWEST_LANES = 24;
constexpr std::int64_t FEWEST_TOKENS = 64;

struct Tables {
    const std::int32_t *query_starts, *seq_lens, *block_tables;
    std::int64_t stride, sequences, block_size, group;

    std::int64_t query_len(std::int64_t i) const { return query_starts[i + 1] - query_starts[i]; }
    // Whole blocks before the step's own tokens.
    std::int64_t context_blocks(std::int64_t i) const {
        return std::max<std::int64_t>(0, seq_lens[i] - query_len(i)) / block_size;
    }
    // Whether its query heads leave lanes of a vector to others: full ones gain nothing.
    bool can_join(std::int64_t i) const {
        return query_len(i) * group < FULL_LANES && context_blocks(i) * block_size >= FEWEST_TOKENS;
    }
    std::int64_t common_blocks(std::int64_t i, std::int64_t j) const {
        const std::int64_t most = std::min(context_blocks(i), context_blocks(j));
        const std::int32_t *a = block_tables + i * stride, *b = block_tables + j * stride;
        return std::mismatch(a, a + most, b).first - a;
    }
};

struct Member {
    std::int64_t sequence, blocks;
};

// Makes a group of the first member and those that share most with it: the length that spares most.
void settle(const Tables& tables, std::vector<Member>& members, std::int32_t* leaders,
            std::int32_t* shared) {
    const std::int32_t leader = static_cast<std::int32_t>(members.front().sequence);
    std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) {
        return a.blocks != b.blocks ? a.blocks > b.blocks : a.sequence < b.sequence;
    });
    std::int64_t rows = 0, spared = 0, blocks = 0;
    for (const Member& member : members) {
        rows += tables.query_len(member.sequence);
        const bool is_worth = rows * tables.group >= FEWEST_LANES && &member != members.data() &&
                              member.blocks * tables.block_size >= FEWEST_TOKENS;
        if (is_worth && rows * member.blocks > spared) {
            spared = rows * member.blocks;
            blocks = member.blocks;
        }
    }
    if (blocks == 0) return;
    for (const Member& member : members)
        if (member.blocks >= blocks) {
            leaders[member.sequence] = leader;
            shared[member.sequence] = static_cast<std::int32_t>(blocks * tables.block_size);
        }
}

}  // namespace

// Stores for each sequence the first of its group, and how many tokens the group shares: whole
// blocks that all have before this step's tokens; itself and 0 where it is in none. `group` is the
// number of query heads to a KV head.
extern "C" void inferq_shared_prefixes(const std::int32_t* query_starts,
                                       const std::int32_t* seq_lens,
                                       const std::int32_t* block_tables, std::int64_t stride,
                                       std::int64_t sequences, std::int64_t block_size,
                                       std::int64_t group, std::int32_t* leaders,
                                       std::int32_t* shared) {
    const Tables tables{query_starts, seq_lens, block_tables, stride, sequences, block_size, group};
    for (std::int64_t i = 0; i < sequences; ++i) leaders[i] = static_cast<std::int32_t>(i);
    std::fill(shared, shared + sequences, 0);
    std::vector<Member> members;
    for (std::int64_t i = 0; i < sequences; ++i) {
        if (shared[i] > 0 || !tables.can_join(i)) continue;
        members.assign(1, {i, tables.context_blocks(i)});
        for (std::int64_t j = i + 1; j < sequences; ++j)
            if (shared[j] == 0 && tables.can_join(j))
                if (const std::int64_t common = tables.common_blocks(i, j))
                    members.push_back({j, common});
        if (members.size() > 1) settle(tables, members, leaders, shared);
    }
}
INFERQ_EXPORT(inferq_shared_prefixes)
