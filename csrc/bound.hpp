// A span below which no plan can be; twin and proofs: megatron_hdp/planner/bound.py.

#pragma once

#include <cstdint>
#include <vector>

#include "cost.hpp"

namespace hdp {

// All in picoseconds; `picoseconds` is the largest of the others.
struct Bound {
    std::int64_t picoseconds = 0;
    std::int64_t work = 0;
    std::int64_t longest = 0;
    std::int64_t pipeline = 0;
    std::int64_t crowded = 0;
    std::int64_t window = 0;
};

// One kind of sequence: they differ in nothing that a bound can see.
struct BoundItem {
    std::int64_t length = 0; // padded to pad_multiple
    std::int64_t offload = 0; // of 2^20; at least the plan's fraction
    std::int64_t count = 0;
};

// Bound for items that ascend by (length, offload).
Bound lower_bound(const std::vector<BoundItem> &items, std::int64_t num_ranks, std::int64_t capacity, const Cost &cost,
                  std::int64_t stages = 1, std::int64_t virtual_stages = 1);

// Bound for ascending lengths without offload.
Bound lower_bound(const std::vector<std::int64_t> &sorted_lengths, std::int64_t num_ranks, std::int64_t capacity,
                  const Cost &cost, std::int64_t stages = 1, std::int64_t virtual_stages = 1);

} // namespace hdp
