// Local sequences between and after the rings, and the columns of the plan. Twin: megatron_hdp/planner/sand.py.

#pragma once

#include "skyline.hpp"

namespace hdp {

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
