// Local sequences onto ranks and into packs whose sizes ramp, for pipelines. Twins: megatron_hdp/planner/packs.py.

#include "packs.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "arrays.hpp"
#include "sand.hpp"

namespace hdp {
namespace {

using Key = std::uint64_t; // load and rank in one word, where they fit: one comparison orders both

// The tournament of `Loads` with keys of 64 bits, `bits` of them for the rank.
Ints spread_by_keys(const Int *work, std::size_t count, const Ints &loads, int bits) {
    const std::size_t leaves = std::size_t{1} << bits;
    std::vector<Key> winner(2 * leaves, std::numeric_limits<Key>::max()), losers(leaves);
    for (std::size_t rank = 0; rank < loads.size(); ++rank) {
        winner[leaves + rank] = (static_cast<Key>(loads[rank]) << bits) + rank;
    }
    for (std::size_t node = leaves - 1; node > 0; --node) {
        winner[node] = std::min(winner[2 * node], winner[2 * node + 1]);
        losers[node] = std::max(winner[2 * node], winner[2 * node + 1]);
    }
    Key least = winner[1];
    Ints ranks(count);
    for (std::size_t item = 0; item < count; ++item) {
        const std::size_t rank = least & (leaves - 1);
        ranks[item] = static_cast<Int>(rank);
        least += static_cast<Key>(work[item]) << bits;
        for (std::size_t node = (leaves + rank) / 2; node > 0; node /= 2) {
            const Key loser = losers[node];
            losers[node] = std::max(loser, least);
            least = std::min(loser, least);
        }
    }
    return ranks;
}

} // namespace

Ints spread_work(const Int *work, std::size_t count, const Ints &loads) {
    int bits = 0;
    while (std::size_t{1} << bits < loads.size()) {
        ++bits;
    }
    Wide all = 0, most = 0; // the least loaded rank has at most the mean, so none comes higher than these together
    bool negative = false;
    for (const Int load : loads) {
        all += load;
        most = std::max<Wide>(most, load);
        negative = negative || load < 0;
    }
    Wide longest = 0;
    for (std::size_t item = 0; item < count; ++item) {
        all += work[item];
        longest = std::max<Wide>(longest, work[item]);
        negative = negative || work[item] < 0;
    }
    if (!negative && all / static_cast<Wide>(loads.size()) + most + longest < Wide{1} << (63 - bits)) {
        return spread_by_keys(work, count, loads, bits);
    }
    Loads heap(loads);
    Ints ranks(count);
    for (std::size_t item = 0; item < count; ++item) {
        ranks[item] = heap.least();
        heap.add(work[item]);
    }
    return ranks;
}

Ints pack_bins(const Int *rank, const Int *size, std::size_t count, Int num_ranks, Int capacity, const Ints &rooms) {
    struct Open { // bins of a rank into which some item of it may still fit
        Ints room, bin;
        Int number = 0; // bins, closed ones counted
        Int total = 0, smallest = std::numeric_limits<Int>::max(); // of its items
    };
    Int all_rooms = 0;
    for (const Int room : rooms) {
        all_rooms += room;
    }
    std::vector<Open> open(static_cast<std::size_t>(num_ranks));
    for (std::size_t item = 0; item < count; ++item) {
        Open &of = open[rank[item]];
        of.total += size[item];
        of.smallest = std::min(of.smallest, size[item]);
    }
    for (Open &of : open) {
        if (of.total >= all_rooms) {
            of.room = rooms;
            for (; of.number < static_cast<Int>(rooms.size()); ++of.number) {
                of.bin.push_back(of.number);
            }
        }
    }
    Ints bins(count);
    for (std::size_t item = 0; item < count; ++item) {
        Open &of = open[rank[item]];
        const Int *room = of.room.data();
        const std::size_t number = of.room.size();
        std::size_t best = number;
        Key least = std::numeric_limits<Key>::max() / 2; // room that is left over; too little wraps to more than this
        for (std::size_t b = 0; b < number; ++b) {
            const Key left = static_cast<Key>(room[b]) - static_cast<Key>(size[item]);
            best = left < least ? b : best;
            least = left < least ? left : least;
        }
        if (best == number) {
            of.room.push_back(capacity);
            of.bin.push_back(of.number++);
        }
        bins[item] = of.bin[best];
        of.room[best] -= size[item];
        if (of.room[best] < of.smallest) {
            of.room.erase(of.room.begin() + static_cast<std::ptrdiff_t>(best));
            of.bin.erase(of.bin.begin() + static_cast<std::ptrdiff_t>(best));
        }
    }
    return bins;
}

namespace {

Int64Array spread(Int64View work, Int64View loads) {
    if (loads.shape(0) == 0) {
        throw std::invalid_argument("no ranks to spread work over");
    }
    return to_numpy(spread_work(work.data(), work.shape(0), {loads.data(), loads.data() + loads.shape(0)}));
}

Int64Array pack_ranks(Int64View rank, Int64View size, Int num_ranks, Int capacity, Int64View rooms) {
    if (rank.shape(0) != size.shape(0)) {
        throw std::invalid_argument("rank and size are of different items");
    }
    for (std::size_t item = 0; item < rank.shape(0); ++item) {
        if (rank(item) < 0 || rank(item) >= num_ranks || size(item) < 1) {
            throw std::invalid_argument("item " + std::to_string(item) + " has rank " + std::to_string(rank(item)) +
                                        " and size " + std::to_string(size(item)));
        }
    }
    return to_numpy(pack_bins(rank.data(), size.data(), rank.shape(0), num_ranks, capacity,
                              {rooms.data(), rooms.data() + rooms.shape(0)}));
}

} // namespace
} // namespace hdp

void bind_packs(nb::module_ &module) {
    module.def("spread", &hdp::spread, nb::arg("work"), nb::arg("loads"));
    module.def("pack_ranks", &hdp::pack_ranks, nb::arg("rank"), nb::arg("size"), nb::arg("num_ranks"),
               nb::arg("capacity"), nb::arg("rooms"));
}
