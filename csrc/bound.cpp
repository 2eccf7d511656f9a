// A span below which no plan can be; twin and proofs: megatron_hdp/planner/bound.py. The twin looks at every ring size;
// here ranges of sizes are skipped that cannot hold the least.

#include "bound.hpp"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "bound_times.hpp"
#include "bound_window.hpp"

namespace hdp {
namespace {

constexpr std::int64_t offload_one = std::int64_t{1} << 20;
constexpr std::int64_t most_side_by_side = 8;
constexpr int tolerance_bits = 12;
constexpr std::size_t longest_tried = 4;
constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

std::int64_t ceil_div(Wide a, Wide b) { return static_cast<std::int64_t>((a + b - 1) / b); }

struct Known { // an item and what follows from it alone
    std::int64_t length, count, ring, freest_ring; // smallest ring; smallest with the most offload of the batch
    Wide work;
};

class Search : RingTimes {
  public:
    Search(const Cost &given, std::int64_t ranks, std::int64_t capacity, std::int64_t stages, std::int64_t parts)
        : RingTimes(given, ranks, stages > 1 ? parts : 1), cost_(cost()), ranks_(ranks), capacity_(capacity),
          stages_(stages), parts_(RingTimes::parts()), trim_(trim()),
          constant_(std::max<std::int64_t>(given.microbatch_picoseconds() - trim_, 0)) {}

    Bound operator()(const std::vector<BoundItem> &items) {
        Bound bound;
        prepare(items);
        const std::int64_t microbatches = std::max(ceil_div(ahead_[0].second, capacity_), ranks_ * (parts_ > 1 ? stages_ : 1));
        bound.work = ceil_div(ahead_[0].first + Wide{microbatches} * constant_, ranks_) + empty_ramp();
        for (std::size_t i = known_.size(); i-- > 0 && i + longest_tried >= known_.size();) {
            const std::int64_t piece = least(known_[i].length, known_[i].ring, ranks_, Phase::total);
            bound.longest = std::max(bound.longest, stages_ * (piece + constant_ - trim_));
        }
        if (stages_ > 1 && !known_.empty()) {
            bound.pipeline = threshold(known_.size(), [&](std::size_t i) {
                const Wide held = ceil_div(ahead_[i].second, capacity_);
                return ceil_div(ahead_[i].first + std::max<Wide>(held, ranks_) * constant_, ranks_);
            }, [&](std::size_t i) { return ramp(known_[i], 1); });
        }
        if (stages_ > 1 && !known_.empty()) {
            const Known &last = known_.back();
            bound.window = Window(*this, kinds_, stages_, capacity_)(last.length, last.ring, microbatches, constant_);
        }
        bound.picoseconds = std::max({bound.work, bound.longest, bound.pipeline, bound.window});
        for (std::int64_t side = 1; side <= most_side_by_side; ++side) {
            const std::int64_t ring = ranks_ / (side + 1) + 1;
            if (ranks_ / ring == side && ring > 1) {
                bound.crowded = std::max(bound.crowded, crowded(ring, side, bound.picoseconds));
            }
        }
        bound.picoseconds = std::max(bound.picoseconds, bound.crowded);
        return bound;
    }

  private:
    void prepare(const std::vector<BoundItem> &items) {
        std::int64_t most = 0;
        for (const BoundItem &item : items) {
            most = std::max(most, item.offload);
        }
        known_.reserve(items.size());
        kinds_.reserve(stages_ > 1 ? items.size() : 0);
        ahead_.assign(items.size() + 1, {0, 0});
        const std::int64_t freest = largest_piece(most);
        std::int64_t last_offload = most, piece = freest; // kept from item to item: divisions cost more than the rest
        for (const BoundItem &item : items) {
            if (item.offload != last_offload) {
                last_offload = item.offload;
                piece = largest_piece(item.offload);
            }
            const std::int64_t units = item.length / cost_.pad_multiple;
            const std::int64_t ring = units <= piece ? 1 : (units + piece - 1) / piece;
            if (ring > ranks_) {
                throw std::invalid_argument("a sequence of " + std::to_string(item.length) + " tokens needs " +
                                            std::to_string(ring) + " ranks of " + std::to_string(ranks_));
            }
            const std::int64_t freest_ring = units <= freest ? 1 : (units + freest - 1) / freest;
            const RankTime time = rank_time(item.length, ring);
            known_.push_back({item.length, item.count, ring, freest_ring, time.total});
            if (stages_ > 1) {
                const std::int64_t kept = static_cast<std::int64_t>(
                    Wide{item.length} * (offload_one - item.offload) / offload_one);
                kinds_.push_back({item.count, kept, {time.total, time.total - time.forward, time.total - time.backward}});
            }
        }
        for (std::size_t i = items.size(); i-- > 0;) {
            const Wide held = (Wide{items[i].length} * (offload_one - items[i].offload) + offload_one - 1) / offload_one;
            ahead_[i].first = ahead_[i + 1].first + known_[i].work * items[i].count;
            ahead_[i].second = ahead_[i + 1].second + held * items[i].count;
        }
    }

    // The largest piece of a sequence that offloads so much, in units of padding.
    std::int64_t largest_piece(std::int64_t offload) const {
        const std::int64_t tokens =
            offload >= offload_one ? unlimited / 2 : capacity_ * offload_one / (offload_one - offload);
        const std::int64_t units = tokens / cost_.pad_multiple;
        if (units < 1) {
            throw std::invalid_argument("a capacity of " + std::to_string(capacity_) +
                                        " tokens does not hold the smallest piece");
        }
        return units;
    }

    std::int64_t empty_ramp() const {
        return (stages_ - 1) * (cost_.microbatch_picoseconds(Phase::forward) / parts_ +
                                cost_.microbatch_picoseconds(Phase::backward) / parts_);
    }

    std::int64_t least(std::int64_t length, std::int64_t low, std::int64_t high, Phase phase) const {
        std::int64_t best = std::min(at_most(length, low, low, phase), at_most(length, high, high, phase));
        struct Range {
            std::int64_t low, high;
        };
        Range open[128];
        int num_open = 0;
        open[num_open++] = {low, high};
        while (num_open > 0) {
            const Range range = open[--num_open];
            if (range.high - range.low < 2 || at_most(length, range.high - 1, range.low + 1, phase) >= best) {
                continue;
            }
            const std::int64_t middle = (range.low + range.high) / 2;
            best = std::min(best, at_most(length, middle, middle, phase));
            open[num_open++] = {range.low, middle};
            open[num_open++] = {middle, range.high};
        }
        return best;
    }

    // Pipelines.

    std::int64_t ramp(const Known &item, std::int64_t ring) const {
        if (stages_ == 1) {
            return 0;
        }
        std::int64_t total = 0;
        for (const Phase phase : {Phase::forward, Phase::backward}) {
            const std::int64_t piece = least(item.length, std::max(item.freest_ring, ring), ranks_, phase);
            total += (piece + cost_.microbatch_picoseconds(phase)) / parts_;
        }
        return (stages_ - 1) * total;
    }

    // Largest value(i) + rise(i) but for 2^-tolerance_bits of it; value falls, rise rises.
    template <class Value, class Rise>
    std::int64_t threshold(std::size_t number, const Value &value, const Rise &rise) const {
        if (stages_ == 1) {
            return value(0);
        }
        struct Range {
            std::size_t low, high;
            std::int64_t high_rise;
        };
        const std::int64_t top = rise(number - 1);
        std::int64_t best = std::max(value(0) + rise(0), value(number - 1) + top);
        std::vector<Range> open{{0, number - 1, top}};
        while (!open.empty()) {
            const Range range = open.back();
            open.pop_back();
            if (range.high - range.low < 2 ||
                value(range.low + 1) + range.high_rise <= best + (best >> tolerance_bits)) {
                continue;
            }
            const std::size_t middle = (range.low + range.high) / 2;
            const std::int64_t middle_rise = rise(middle);
            best = std::max(best, value(middle) + middle_rise);
            open.push_back({range.low, middle, middle_rise});
            open.push_back({middle, range.high, range.high_rise});
        }
        return best;
    }

    // Sequences whose rings have at least `ring` ranks: each covers one of `side` ranks, `ring` apart.
    std::int64_t crowded(std::int64_t ring, std::int64_t side, std::int64_t found) const {
        std::vector<const Known *> wide;
        for (const Known &item : known_) {
            if (item.ring >= ring) {
                wide.push_back(&item);
            }
        }
        if (wide.empty()) {
            return 0;
        }
        Wide estimate = 0;
        for (const Known *item : wide) {
            const std::int64_t piece = at_most(item->length, item->ring, item->ring, Phase::total);
            estimate += Wide{item->ring / ring} * std::max<std::int64_t>(piece - trim_, 0) * item->count;
        }
        const std::int64_t highest = ceil_div(estimate + Wide{side} * constant_, side) + ramp(*wide.back(), ring);
        if (highest <= found) {
            return 0;
        }
        std::vector<Wide> ahead(wide.size() + 1, 0);
        for (std::size_t i = wide.size(); i-- > 0;) {
            ahead[i] = ahead[i + 1] + Wide{covering(*wide[i], ring)} * wide[i]->count;
        }
        return threshold(wide.size(), [&](std::size_t i) {
            return ceil_div(ahead[i] + Wide{side} * constant_, side);
        }, [&](std::size_t i) { return ramp(*wide[i], ring); });
    }

    // Least time that an item takes on all ranks that are `ring` apart together.
    std::int64_t covering(const Known &item, std::int64_t ring) const {
        std::int64_t best = unlimited;
        for (std::int64_t times = item.ring / ring; times <= ranks_ / ring; ++times) {
            const std::int64_t low = std::max(item.ring, times * ring), high = std::min(ranks_, (times + 1) * ring - 1);
            best = std::min(best, times * std::max<std::int64_t>(least(item.length, low, high, Phase::total) - trim_, 0));
        }
        return best;
    }

    const Cost cost_; // links as RingTimes takes them
    std::int64_t ranks_, capacity_, stages_, parts_, trim_, constant_;
    std::vector<Known> known_;
    std::vector<WindowKind> kinds_; // for pipelines
    std::vector<std::pair<Wide, Wide>> ahead_; // work and held tokens of this item and the longer ones
};

} // namespace

Bound lower_bound(const std::vector<BoundItem> &items, std::int64_t num_ranks, std::int64_t capacity, const Cost &cost,
                  std::int64_t stages, std::int64_t virtual_stages) {
    return Search(cost, num_ranks, capacity, stages, virtual_stages)(items);
}

Bound lower_bound(const std::vector<std::int64_t> &sorted_lengths, std::int64_t num_ranks, std::int64_t capacity,
                  const Cost &cost, std::int64_t stages, std::int64_t virtual_stages) {
    std::vector<BoundItem> items;
    for (const std::int64_t length : sorted_lengths) {
        const std::int64_t padded = cost.piece_tokens(length, 1);
        if (items.empty() || items.back().length != padded) {
            items.push_back({padded, 0, 0});
        }
        ++items.back().count;
    }
    return lower_bound(items, num_ranks, capacity, cost, stages, virtual_stages);
}

} // namespace hdp

namespace {

// Items of lengths in any order. Without offload the many short ones are counted, not sorted.
std::vector<hdp::BoundItem> items_of(Int64View lengths, Int64View offload, std::int64_t pad) {
    constexpr std::int64_t short_units = 1 << 14;
    const std::size_t n = lengths.shape(0);
    std::vector<hdp::BoundItem> items;
    std::vector<std::pair<std::int64_t, std::int64_t>> rest; // (units of padding, offload)
    if (offload.shape(0) == 0) {
        std::vector<std::int64_t> counts(short_units, 0);
        for (std::size_t i = 0; i < n; ++i) {
            const std::int64_t units = pad == 2 ? (lengths(i) + 1) / 2 : (lengths(i) + pad - 1) / pad;
            if (units < short_units) {
                ++counts[static_cast<std::size_t>(units)];
            } else {
                rest.emplace_back(units, 0);
            }
        }
        for (std::int64_t units = 0; units < short_units; ++units) {
            if (counts[static_cast<std::size_t>(units)] > 0) {
                items.push_back({units * pad, 0, counts[static_cast<std::size_t>(units)]});
            }
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            rest.emplace_back((lengths(i) + pad - 1) / pad, offload(i));
        }
    }
    std::sort(rest.begin(), rest.end());
    for (const auto &[units, share] : rest) {
        if (items.empty() || items.back().length != units * pad || items.back().offload != share) {
            items.push_back({units * pad, share, 0});
        }
        ++items.back().count;
    }
    return items;
}

Int64Array lower_bound(Int64View arguments, Int64View lengths, Int64View offload, std::int64_t num_ranks,
                       std::int64_t capacity, std::int64_t stages, std::int64_t virtual_stages) {
    const hdp::Cost cost = hdp::Cost::from(arguments);
    if (offload.shape(0) != 0 && offload.shape(0) != lengths.shape(0)) {
        throw std::invalid_argument("offload must have no or one number per sequence");
    }
    hdp::Bound bound;
    {
        nb::gil_scoped_release unlocked;
        bound = hdp::lower_bound(items_of(lengths, offload, cost.pad_multiple), num_ranks, capacity, cost, stages,
                                 virtual_stages);
    }
    return to_numpy({bound.picoseconds, bound.work, bound.longest, bound.pipeline, bound.crowded, bound.window});
}

} // namespace

void bind_bound(nb::module_ &module) {
    module.def("lower_bound", &lower_bound, nb::arg("arguments"), nb::arg("lengths"), nb::arg("offload"),
               nb::arg("num_ranks"), nb::arg("capacity"), nb::arg("stages"), nb::arg("virtual_stages"));
}
