// Local sequences onto ranks and into packs whose sizes ramp. Twins: megatron_hdp/planner/packs.py.

#pragma once

#include <cstddef>

#include "skyline.hpp"

namespace hdp {

// Rank of each of `count` items by LPT: in the given order onto the least loaded rank, the lowest of equals.
Ints spread_work(const Int *work, std::size_t count, const Ints &loads);

// Bin of each of `count` items inside its rank by best fit; items of a rank come by falling size. A rank has one bin of
// each of `rooms` from the start if its items fill them, and opens bins of `capacity`; an item larger than that has one
// alone.
Ints pack_bins(const Int *rank, const Int *size, std::size_t count, Int num_ranks, Int capacity, const Ints &rooms);

} // namespace hdp
