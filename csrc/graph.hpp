// Rings as rendezvous: which micro-batches must run together, and when each would end. Twins: planner/graph.py, span.py.

#pragma once

#include <cstdint>
#include <vector>

// Columns of a plan; pointers into numpy's arrays.
struct Columns {
    std::int64_t num_ranks;
    std::int64_t num_microbatches;
    std::int64_t num_sequences;
    const std::int64_t *rank_offsets;       // [num_ranks + 1]
    const std::int64_t *microbatch_offsets; // [num_microbatches + 1]
    const std::int64_t *piece_sequence;     // [microbatch_offsets[num_microbatches]]
    const std::int64_t *ring_size;          // [num_sequences]
};

// Micro-batches linked by shared rings, directly or through others, are one group.
struct Groups {
    std::int32_t count = 0;
    std::vector<std::int32_t> group;   // [num_microbatches], numbered in order of their first micro-batch
    std::vector<std::int32_t> rank;    // [num_microbatches]
    std::vector<std::int32_t> first;   // [count + 1], into members
    std::vector<std::int32_t> members; // [num_microbatches], micro-batches of group 0, of group 1, ...; each ascending
    bool tied = false;                 // two micro-batches of one rank in one group: it could never start

    std::int32_t size(std::int32_t g) const { return first[g + 1] - first[g]; }
};

Groups find_groups(const Columns &columns);

// Times per group, [count]: largest of its members.
std::vector<std::int64_t> group_maximum(const Groups &groups, const std::int64_t *values);

// When each rank is done, picoseconds [num_ranks]; empty if ranks would wait for each other forever.
std::vector<std::int64_t> ends_without_pipeline(const Columns &columns, const Groups &groups,
                                                const std::int64_t *forward, const std::int64_t *backward);
std::vector<std::int64_t> ends_with_pipeline(const Columns &columns, const Groups &groups, const std::int64_t *forward,
                                             const std::int64_t *backward, std::int64_t stages,
                                             std::int64_t virtual_stages);
