// Local sequences between and after the rings, and the columns of the plan. Twin: megatron_hdp/planner/sand.py.

#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "skyline.hpp"

namespace hdp {

// Binary heap of (load, rank) whose least entry is replaced again and again.
class Loads {
  public:
    explicit Loads(const Ints &ends) {
        for (std::size_t rank = 0; rank < ends.size(); ++rank) {
            heap_.emplace_back(ends[rank], static_cast<Int>(rank));
        }
        std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    }
    Int least() const { return heap_.front().second; }
    void add(Int work) {
        const std::pair<Int, Int> entry{heap_.front().first + work, heap_.front().second};
        std::size_t hole = 0;
        for (std::size_t child = 1; child < heap_.size(); child = 2 * hole + 1) {
            child += child + 1 < heap_.size() && heap_[child + 1] < heap_[child];
            if (!(heap_[child] < entry)) {
                break;
            }
            heap_[hole] = heap_[child];
            hole = child;
        }
        heap_[hole] = entry;
    }
    Int most() const { return std::max_element(heap_.begin(), heap_.end())->first; }

  private:
    std::vector<std::pair<Int, Int>> heap_;
};

// Sequences that one rank holds alone, longest first.
struct Locals {
    Ints sequence, tokens, time;
};

// Columns of a plan, as in megatron_hdp/types.py.
struct Columns {
    Ints ring_start, ring_size, rank_offsets, microbatch_offsets, piece_sequence;
    Int span = 0; // time at which the last rank is done, constants of micro-batches spread over their tokens
};

// Where the local sequences run: before the `turn`-th ring of `rank`.
struct Spread {
    Ints rank, turn;
    Int span = 0;
};

Spread spread_locals(const Placement &placed, const Locals &locals, Int num_ranks);
Columns build_columns(const Ints &ring_sequence, const Placement &placed, const Locals &locals, const Spread &spread,
                      Int num_sequences, Int num_ranks, Int capacity);

} // namespace hdp
