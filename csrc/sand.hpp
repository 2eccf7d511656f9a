// Local sequences between and after the rings, and the columns of the plan. Twin: megatron_hdp/planner/sand.py.

#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "skyline.hpp"

namespace hdp {

// Loads of ranks, of which the least, the lowest rank of equals, is added to again and again: a tournament whose inner
// nodes keep the loser. The way from a rank to the root is known beforehand, so nothing waits for a guess.
class Loads {
  public:
    explicit Loads(const Ints &ends) {
        while (leaves_ < ends.size()) {
            leaves_ *= 2;
        }
        std::vector<Entry> winner(2 * leaves_, entry(std::numeric_limits<Int>::max(), 0));
        for (std::size_t rank = 0; rank < ends.size(); ++rank) {
            winner[leaves_ + rank] = entry(ends[rank], static_cast<Int>(rank));
        }
        losers_.resize(leaves_);
        for (std::size_t node = leaves_ - 1; node > 0; --node) {
            const Entry left = winner[2 * node], right = winner[2 * node + 1];
            winner[node] = std::min(left, right);
            losers_[node] = std::max(left, right);
        }
        least_ = winner[1];
        most_ = *std::max_element(ends.begin(), ends.end());
    }
    Int least() const { return static_cast<Int>(least_ & low_bits); }
    void add(Int work) {
        const std::size_t rank = static_cast<std::size_t>(least());
        least_ += Entry{work} << 64;
        most_ = std::max(most_, static_cast<Int>(least_ >> 64));
        for (std::size_t node = (leaves_ + rank) / 2; node > 0; node /= 2) {
            const Entry loser = losers_[node];
            losers_[node] = std::max(loser, least_);
            least_ = std::min(loser, least_);
        }
    }
    Int most() const { return most_; }

  private:
    using Entry = Wide; // load x 2^64 + rank: one comparison orders both
    static constexpr Entry low_bits = (Entry{1} << 63) - 1;
    static Entry entry(Int load, Int rank) { return (Entry{load} << 64) + rank; }

    std::size_t leaves_ = 1;
    std::vector<Entry> losers_;
    Entry least_;
    Int most_;
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

// The last ring of every rank, as index of its place (-1: none), and whether a ring is the last of all its ranks.
struct LastRings {
    Ints of_rank;
    std::vector<bool> of_all;
};

LastRings last_rings(const Placement &placed, Int num_ranks);
Ints reserves(const Placement &placed, Int num_ranks, Int target, Int least, const LastEnough &last);
Spread spread_locals(const Placement &placed, const Locals &locals, Int num_ranks);
void level_locals(const Placement &placed, const Locals &locals, Int num_ranks, Int goal, Spread &spread);
Columns build_columns(const Ints &ring_sequence, const Placement &placed, const Locals &locals, const Spread &spread,
                      Int num_sequences, Int num_ranks, Int capacity);

} // namespace hdp
