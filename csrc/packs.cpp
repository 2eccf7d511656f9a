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

struct Bin {
    Int room, number;
    bool operator<(const Bin &other) const {
        return room < other.room || (room == other.room && number < other.number);
    }
};

// The first of sorted bins that has `room`; halving without branches, which nobody could guess.
std::size_t first_with(const std::vector<Bin> &bins, Int room) {
    std::size_t at = 0;
    for (std::size_t left = bins.size(); left > 0;) {
        const std::size_t half = (left + 1) / 2;
        at += bins[at + half - 1].room < room ? half : 0;
        left -= half;
    }
    return at;
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
    struct Bins {
        std::vector<Bin> open; // those that some item may still fit in, sorted
        Int number = 0; // of all
        Int total = 0, smallest = std::numeric_limits<Int>::max(); // of the rank's items
    };
    std::vector<Bins> bins(static_cast<std::size_t>(num_ranks));
    for (std::size_t item = 0; item < count; ++item) {
        Bins &own = bins[rank[item]];
        own.total += size[item];
        own.smallest = std::min(own.smallest, size[item]);
    }
    Int all_rooms = 0;
    std::vector<Bin> first;
    for (const Int room : rooms) {
        all_rooms += room;
        first.push_back({room, static_cast<Int>(first.size())});
    }
    std::sort(first.begin(), first.end());
    for (Bins &own : bins) {
        if (own.total >= all_rooms) {
            own.open = first;
            own.number = static_cast<Int>(first.size());
        }
    }
    Ints result(count);
    for (std::size_t item = 0; item < count; ++item) {
        Bins &own = bins[rank[item]];
        std::size_t at = first_with(own.open, size[item]);
        if (at == own.open.size()) {
            own.open.push_back({capacity, own.number++});
        }
        Bin bin = own.open[at];
        result[item] = bin.number;
        bin.room -= size[item];
        if (bin.room < own.smallest) {
            own.open.erase(own.open.begin() + static_cast<std::ptrdiff_t>(at));
            continue;
        }
        for (; at > 0 && bin < own.open[at - 1]; --at) {
            own.open[at] = own.open[at - 1];
        }
        own.open[at] = bin;
    }
    return result;
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
