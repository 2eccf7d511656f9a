// What ranks run last, and what that costs them where gradients are summed beside it. Twin: planner/frame.py.

#include <algorithm>
#include <cstddef>

#include "sand.hpp"

namespace hdp {

LastRings last_rings(const Placement &placed, Int num_ranks) {
    LastRings last{Ints(static_cast<std::size_t>(num_ranks), -1), std::vector<bool>(placed.ring.size())};
    for (std::size_t i = 0; i < placed.ring.size(); ++i) {
        std::fill_n(last.of_rank.begin() + placed.start[i], placed.size[i], static_cast<Int>(i));
    }
    for (std::size_t i = 0; i < placed.ring.size(); ++i) {
        const auto first = last.of_rank.begin() + placed.start[i];
        last.of_all[i] = std::count(first, first + placed.size[i], static_cast<Int>(i)) == placed.size[i];
    }
    return last;
}

// How much sooner than the others each rank should be done, because what it runs last is short; see planner/frame.py.
Ints reserves(const Placement &placed, Int num_ranks, Int target, Int least, const LastEnough &last) {
    if (last.time == 0) {
        return {};
    }
    const LastRings rings = last_rings(placed, num_ranks);
    Ints result(rings.of_rank.size());
    for (std::size_t rank = 0; rank < result.size(); ++rank) {
        const Int i = rings.of_rank[rank];
        Int room = target, longest = 0;
        if (i >= 0) {
            room -= placed.begin[i] + placed.time[i];
            longest = room < least || rings.of_all[i] ? placed.time[i] : 0;
        }
        if (room >= least) {
            longest = std::max(longest, std::min(room, last.time));
        }
        result[rank] = (std::max<Int>(last.time - longest, 0) >> 10) * last.share;
    }
    return result;
}

} // namespace hdp
