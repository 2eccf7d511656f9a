// Rings and packs in waves, all ranks side by side. Twin: megatron_hdp/planner/waves.py.

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"

namespace hdp {
namespace {

using Int = std::int64_t;
using Ints = std::vector<Int>;

// Which ranks are free in which wave, as many waves as are needed.
class Waves {
  public:
    explicit Waves(std::size_t num_ranks) : num_ranks_(num_ranks) {}

    bool free(std::size_t wave, std::size_t rank) const { return wave >= taken_.size() || !taken_[wave][rank]; }

    // First rank and wave of a ring: the first wave with a free block, there the block with the least work.
    std::pair<std::size_t, std::size_t> place(const Ints &loads, std::size_t size) {
        std::size_t &wave = from_[size]; // what is taken stays so, and waves before this one have no free block
        for (;; ++wave) {
            if (wave >= taken_.size()) {
                taken_.resize(wave + 1, std::vector<char>(num_ranks_, 0));
            }
            const std::vector<char> &row = taken_[wave];
            bool found = false;
            std::size_t best = 0;
            Int least = 0;
            for (std::size_t first = 0; first + size <= num_ranks_; first += size) {
                const auto begin = row.begin() + static_cast<std::ptrdiff_t>(first);
                if (std::find(begin, begin + static_cast<std::ptrdiff_t>(size), 1) !=
                    begin + static_cast<std::ptrdiff_t>(size)) {
                    continue;
                }
                const auto load = loads.begin() + static_cast<std::ptrdiff_t>(first);
                const Int most = *std::max_element(load, load + static_cast<std::ptrdiff_t>(size));
                if (!found || most < least) {
                    found = true;
                    best = first;
                    least = most;
                }
            }
            if (found) {
                std::fill_n(taken_[wave].begin() + static_cast<std::ptrdiff_t>(best), size, 1);
                return {best, wave};
            }
        }
    }

  private:
    std::size_t num_ranks_;
    std::vector<std::vector<char>> taken_;
    std::map<std::size_t, std::size_t> from_;
};

nb::tuple place_units(Int64View size, Int64View work, Int num_packs, Int num_ranks) {
    const Int units = static_cast<Int>(size.shape(0));
    if (work.shape(0) != size.shape(0) || num_packs < 0 || num_packs > units || num_ranks < 1) {
        throw std::invalid_argument("size and work are of different units, or there are no ranks");
    }
    for (Int unit = 0; unit < units; ++unit) {
        if (size(unit) < 1 || size(unit) > num_ranks || (unit < num_packs && size(unit) != 1)) {
            throw std::invalid_argument("unit " + std::to_string(unit) + " has " + std::to_string(size(unit)) +
                                        " ranks of " + std::to_string(num_ranks));
        }
    }
    const std::size_t ranks = static_cast<std::size_t>(num_ranks);
    Ints start(static_cast<std::size_t>(units)), wave(start.size()), loads(ranks, 0);
    Ints order(start.size());
    std::iota(order.begin(), order.end(), Int{0});
    std::stable_sort(order.begin(), order.begin() + num_packs, [&](Int a, Int b) { return work(a) > work(b); });
    std::stable_sort(order.begin() + num_packs, order.end(),
                     [&](Int a, Int b) { return std::pair(work(a), size(a)) > std::pair(work(b), size(b)); });

    Waves waves(ranks);
    std::size_t used = 0;
    for (auto unit = order.begin() + num_packs; unit != order.end(); ++unit) {
        const auto [first, at] = waves.place(loads, static_cast<std::size_t>(size(*unit)));
        start[*unit] = static_cast<Int>(first);
        wave[*unit] = static_cast<Int>(at);
        used = std::max(used, at + 1);
        const auto begin = loads.begin() + static_cast<std::ptrdiff_t>(first);
        const auto end = begin + static_cast<std::ptrdiff_t>(size(*unit));
        std::fill(begin, end, *std::max_element(begin, end) + work(*unit));
    }

    const Int cells = std::accumulate(size.data(), size.data() + units, Int{0});
    used = std::max(used, static_cast<std::size_t>((cells + num_ranks - 1) / num_ranks)); // a place for every pack
    using Load = std::pair<Int, Int>; // and its rank
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> heap;
    std::vector<std::size_t> next(ranks, 0); // free wave of each rank
    const auto advance = [&](std::size_t rank, std::size_t from) {
        for (next[rank] = from; next[rank] < used && !waves.free(next[rank], rank);) {
            ++next[rank];
        }
        return next[rank] < used;
    };
    for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (advance(rank, 0)) {
            heap.emplace(loads[rank], static_cast<Int>(rank));
        }
    }
    for (auto unit = order.begin(); unit != order.begin() + num_packs; ++unit) {
        const auto [load, rank] = heap.top();
        heap.pop();
        start[*unit] = rank;
        wave[*unit] = static_cast<Int>(next[rank]);
        if (advance(static_cast<std::size_t>(rank), next[rank] + 1)) {
            heap.emplace(load + work(*unit), rank);
        }
    }
    return nb::make_tuple(to_numpy(std::move(start)), to_numpy(std::move(wave)));
}

} // namespace
} // namespace hdp

void bind_waves(nb::module_ &module) {
    module.def("place_units", &hdp::place_units, nb::arg("size"), nb::arg("work"), nb::arg("num_packs"),
               nb::arg("num_ranks"));
}
