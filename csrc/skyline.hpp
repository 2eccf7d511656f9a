// Rings onto ranks: two kinds of list scheduling on a skyline; twins: megatron_hdp/planner/coarse.py and fine.py.
//
// The skyline is the time at which each rank has run the rings that it has so far, as segments of ranks of equal
// height. A ring starts at the highest segment that it covers: its ranks wait for each other.

#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cost.hpp"

namespace hdp {

using Int = std::int64_t;
using Ints = std::vector<Int>;
__extension__ using Wide = __int128; // rank-time of large pools leaves int64

struct Segment {
    Int start, width, height;
};

// A sequence that needs a ring, and how long its ring lasts by size.
struct Choices {
    Int length;
    Int smallest;   // ranks that its memory needs
    Int widest;     // widest ring that hides its transfers
    Ints times;     // of smallest + k ranks on the best links that such rings can have; only of coarse rings
    Int fastest = 0; // least of `times`
    Int most() const { return smallest + static_cast<Int>(times.size()) - 1; }
    Wide work() const { return Wide{smallest} * times[0]; }
};

// Rings in the order in which they were placed.
struct Placement {
    Ints ring; // index of the choices
    Ints start, size;
    Ints begin, time;
    Ints reserve; // how much sooner than the others each rank should be done; empty for none
};

// What ranks run last should take `time` or more; of that, `share` / 2^10 is backward. Twin: planner/frame.py.
struct LastEnough {
    Int time, share;
};

// One way to place coarse rings.
struct Trial {
    Int target; // all rings should end by this time
    Int tie;    // 0: low places first, 1: high ones, 2: those that the ring fills
    Int share;  // price of ranks left free beside a ring, of 1024
};

// Ranks of a fine ring that ends late with any size.
enum class Late { smallest, widest };

struct Coarse {
    Placement placed;
    std::vector<Segment> segments;
    Int end = 0;  // when the last ring ends
    Wide idle = 0; // rank-time of waiting below rings
    Wide area = 0; // rank-time of rings and waiting
};

// Time of a ring's micro-batch: `size` ranks on the best links that it can have, and from rank `start`.
inline Int best_time(const Cost &cost, Int length, Int size) {
    return cost.microbatch_picoseconds() +
           cost.picoseconds(length, size, size > cost.ranks_per_node ? across_nodes : inside_node);
}
inline Int time_at(const Cost &cost, Int length, Int size, Int start) {
    return cost.microbatch_picoseconds() + cost.picoseconds(length, size, cost.tier(start, size));
}

void set_times(const Cost &cost, Choices &ring, Int num_ranks, Int target);
Coarse place_coarse(const Cost &cost, const std::vector<Choices> &rings, const Ints &order, Int num_ranks,
                    const Trial &trial, Int give_up = std::numeric_limits<Int>::max());
void place_fine(const Cost &cost, const std::vector<Choices> &rings, std::size_t first, Int target, Late late,
                Coarse &coarse);

} // namespace hdp
