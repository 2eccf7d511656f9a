// Best fit decreasing; twin: megatron_hdp/planner/packing.py.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "packing.hpp"

namespace {

// Best fit decreasing, O(n log n): items from large to small (ties: lower index), each into the open bin that it fills
// most (ties: lower bin), else into a new bin. Bins 0 .. rooms.size - 1 are open from the start with those rooms.
Int64Array best_fit(Int64View sizes, std::int64_t capacity, Int64View rooms) {
    const std::size_t n = sizes.shape(0);
    for (std::size_t i = 0; i < n; ++i) {
        if (sizes(i) < 1 || sizes(i) > capacity) {
            throw std::invalid_argument("item " + std::to_string(i) + " has size " + std::to_string(sizes(i)) +
                                        ", which is not in 1 .. capacity " + std::to_string(capacity));
        }
    }
    std::vector<std::int64_t> bins(n);
    {
        nb::gil_scoped_release unlocked;
        std::vector<std::size_t> order(n);
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return sizes(a) > sizes(b); });

        std::set<std::pair<std::int64_t, std::int64_t>> open; // (room, bin)
        std::int64_t num_bins = static_cast<std::int64_t>(rooms.shape(0));
        for (std::int64_t bin = 0; bin < num_bins; ++bin) {
            open.emplace(rooms(static_cast<std::size_t>(bin)), bin);
        }
        for (const std::size_t item : order) {
            const std::int64_t size = sizes(item);
            const auto found = open.lower_bound({size, -1});
            const bool fresh = found == open.end();
            const std::int64_t room = (fresh ? capacity : found->first) - size;
            const std::int64_t bin = fresh ? num_bins++ : found->second;
            if (!fresh) {
                open.erase(found);
            }
            if (room > 0) {
                open.emplace(room, bin);
            }
            bins[item] = bin;
        }
    }
    return to_numpy(std::move(bins));
}

} // namespace

namespace hdp {

std::vector<std::int64_t> best_fit_sorted(const std::vector<std::int64_t> &sizes, std::int64_t capacity) {
    constexpr std::size_t few = 48; // up to here looking at every bin is faster than a tree
    std::vector<std::int64_t> bins(sizes.size()), rooms;
    std::set<std::pair<std::int64_t, std::int64_t>> open; // (room, bin), once bins are many
    for (std::size_t item = 0; item < sizes.size(); ++item) {
        std::int64_t bin = -1;
        if (rooms.size() < few) {
            for (std::size_t b = 0; b < rooms.size(); ++b) {
                if (rooms[b] >= sizes[item] && (bin < 0 || rooms[b] < rooms[bin])) {
                    bin = static_cast<std::int64_t>(b);
                }
            }
        } else {
            const auto found = open.lower_bound({sizes[item], -1});
            if (found != open.end()) {
                bin = found->second;
                open.erase(found);
            }
        }
        if (bin < 0) {
            bin = static_cast<std::int64_t>(rooms.size());
            rooms.push_back(capacity);
            if (rooms.size() == few) {
                for (std::size_t b = 0; b + 1 < few; ++b) {
                    open.emplace(rooms[b], static_cast<std::int64_t>(b));
                }
            }
        }
        rooms[bin] -= sizes[item];
        if (rooms.size() >= few) {
            open.emplace(rooms[bin], bin);
        }
        bins[item] = bin;
    }
    return bins;
}

} // namespace hdp

void bind_packing(nb::module_ &module) {
    module.def("best_fit", &best_fit, nb::arg("sizes"), nb::arg("capacity"), nb::arg("rooms"));
}
