// When each rank is done where a ring has the same slot on all its ranks. Same times as ends_with_pipeline of graph.hpp.

#pragma once

#include "skyline.hpp"

namespace hdp {

// What else the model is cut into, as planner/columns.py has it.
struct Layout {
    Int stages, virtual_stages, expert_group;
    Int count_multiple() const { return virtual_stages > 1 ? stages : 1; }
};

// Micro-batches by slot and rank.
struct Grid {
    Int num_ranks = 0;
    Int num_slots = 0;         // the largest of counts
    Ints counts;               // [num_ranks]
    Ints forward, backward;    // picoseconds of slot x num_ranks + rank
    std::vector<char> is_tied; // [slot x num_ranks + rank]: the rank runs this slot together with the next rank
};

// When each rank is done, picoseconds [num_ranks]. Times of ranks that run together are raised to their largest.
Ints lockstep_ends(Grid &grid, const Layout &layout);

} // namespace hdp
