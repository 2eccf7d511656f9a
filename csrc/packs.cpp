// Local sequences onto ranks and into packs whose sizes ramp, for pipelines. Twins: megatron_hdp/planner/packs.py.

#include "arrays.hpp"
#include "sand.hpp"

#include <stdexcept>

namespace hdp {
namespace {

Ints to_vector(const Int64View &view) { return {view.data(), view.data() + view.shape(0)}; }

// Rank of every item by LPT: in the given order onto the least loaded rank.
Int64Array spread(Int64View work, Int64View loads) {
    if (loads.shape(0) == 0) {
        throw std::invalid_argument("no ranks to spread work over");
    }
    Loads heap(to_vector(loads));
    Ints rank(work.shape(0));
    for (std::size_t item = 0; item < rank.size(); ++item) {
        rank[item] = heap.least();
        heap.add(work(item));
    }
    return to_numpy(std::move(rank));
}

// Bin of every item inside its rank by best fit; items of a rank come by falling size. A rank has one bin of each of
// `rooms` from the start if its items fill them, and opens bins of `capacity`; an item larger than that has one alone.
Int64Array pack_ranks(Int64View rank, Int64View size, Int num_ranks, Int capacity, Int64View rooms) {
    const Ints wanted = to_vector(rooms);
    Int all_rooms = 0;
    for (const Int room : wanted) {
        all_rooms += room;
    }
    const std::size_t n = rank.shape(0);
    Ints total(static_cast<std::size_t>(num_ranks), 0), bin(n);
    for (std::size_t item = 0; item < n; ++item) {
        if (rank(item) < 0 || rank(item) >= num_ranks || size(item) < 1) {
            throw std::invalid_argument("item " + std::to_string(item) + " has rank " + std::to_string(rank(item)) +
                                        " and size " + std::to_string(size(item)));
        }
        total[rank(item)] += size(item);
    }
    std::vector<Ints> left(static_cast<std::size_t>(num_ranks));
    for (std::size_t r = 0; r < left.size(); ++r) {
        if (total[r] >= all_rooms) {
            left[r] = wanted;
        }
    }
    for (std::size_t item = 0; item < n; ++item) {
        Ints &open = left[rank(item)];
        std::size_t best = open.size();
        for (std::size_t b = 0; b < open.size(); ++b) {
            if (open[b] >= size(item) && (best == open.size() || open[b] < open[best])) {
                best = b;
            }
        }
        if (best == open.size()) {
            open.push_back(capacity);
        }
        open[best] -= size(item);
        bin[item] = static_cast<Int>(best);
    }
    return to_numpy(std::move(bin));
}

} // namespace
} // namespace hdp

void bind_packs(nb::module_ &module) {
    module.def("spread", &hdp::spread, nb::arg("work"), nb::arg("loads"));
    module.def("pack_ranks", &hdp::pack_ranks, nb::arg("rank"), nb::arg("size"), nb::arg("num_ranks"),
               nb::arg("capacity"), nb::arg("rooms"));
}
