// How little can overlap the longest sequence in a pipeline; twin and proof: megatron_hdp/planner/bound_window.py.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bound_times.hpp"

namespace hdp {

// One kind of sequence: how many, tokens that stay on devices, what is hidden of its rank-time where windows swallow all
// of it, its backward, its forward.
struct WindowKind {
    std::int64_t count, kept;
    Wide gains[3];
};

class Window {
  public:
    // `kinds` ascend by length.
    Window(const RingTimes &times, std::vector<WindowKind> &kinds, std::int64_t stages, std::int64_t capacity)
        : times_(times), kinds_(kinds), stages_(stages), capacity_(capacity) {
        const std::int64_t parts = times.parts(), turn = stages * parts;
        if (parts == 1) {
            rooms_[1] = rooms_[2] = stages - 1;
        } else {
            rooms_[0] = (stages - 1) * parts;
            rooms_[1] = turn + stages - 2;
            rooms_[2] = turn - 1;
            places_ = stages - 1;
        }
    }

    // The bound for the longest sequence, of `length`; `microbatches` have a constant each at least.
    std::int64_t operator()(std::int64_t length, std::int64_t ring, std::int64_t microbatches, std::int64_t constant) {
        Wide rest = Wide{microbatches} * constant;
        --kinds_.back().count; // the longest itself
        for (const WindowKind &kind : kinds_) {
            rest += kind.count * kind.gains[0];
        }
        const std::int64_t spent = times_.parts() == 1 ? 0 : 2 * (stages_ - 1) * constant, ranks = times_.ranks();
        std::vector<Wide> passed;
        for (std::int64_t d = ring; d <= ranks; ++d) {
            const std::int64_t piece = times_.at_most(length, d, d, Phase::total);
            passed.push_back(Wide{d} * (Wide{stages_} * (piece - times_.trim()) - spent) + rest);
        }
        Wide best = 0;
        std::int64_t low = ring, tuned = ranks, high = ranks;
        while (low <= high) {
            set_prices(Wide{tuned} * capacity_);
            const Wide each = capacity_ * price_of_room(), taken = gained();
            Wide least = 0;
            std::int64_t found = 0;
            for (std::int64_t d = ring; d <= ranks; ++d) {
                const Wide value = passed[static_cast<std::size_t>(d - ring)] * (Wide{1} << price_bits) - d * each - taken;
                if (d == ring || value < least) {
                    least = value;
                    found = d;
                }
            }
            const Wide unit = Wide{ranks} << price_bits;
            best = std::max(best, least > 0 ? (least + unit - 1) / unit : 0);
            if (found == tuned) {
                break;
            }
            (found < tuned ? high : low) = found < tuned ? tuned - 1 : tuned + 1;
            tuned = (low + high) / 2;
        }
        ++kinds_.back().count;
        return static_cast<std::int64_t>(best);
    }

  private:
    static constexpr int price_bits = 16;
    static constexpr Wide largest_price = Wide{1} << 62;

    // Prices at which the longest fill the windows of micro-batches of `tokens` in all.
    void set_prices(Wide tokens) {
        const WindowKind *edges[3] = {};
        int found = 0;
        const auto room = [&](int level) { return tokens * rooms_[level] / times_.parts(); };
        Wide left = room(0);
        for (std::size_t i = kinds_.size(); i-- > 0 && found < 3;) {
            left -= Wide{kinds_[i].count} * kinds_[i].kept;
            while (left < 0 && found < 3) { // this kind no longer fits
                edges[found++] = &kinds_[i];
                left += found < 3 ? room(found) : 0;
            }
        }
        std::fill(prices_, prices_ + 3, 0);
        Wide next = 0;
        for (int level = found; level-- > 0;) {
            const Wide *gains = edges[level]->gains;
            const Wide step = std::max<Wide>(gains[level] - (level < 2 ? gains[level + 1] : 0), 0);
            next = std::min(next + step * (Wide{1} << price_bits) / edges[level]->kept, largest_price);
            prices_[level] = next;
        }
    }

    // Of a window of micro-batches of one token, at the place in its turn where it is highest.
    Wide price_of_room() const {
        const Wide ends = std::max(rooms_[1] * prices_[1] + rooms_[2] * prices_[2],
                                   (rooms_[1] - places_) * prices_[1] + (rooms_[2] + places_) * prices_[2]);
        return (rooms_[0] * prices_[0] + ends + times_.parts() - 1) / times_.parts();
    }

    // What sequences gain in windows beyond the prices.
    Wide gained() const {
        Wide total = 0;
        for (const WindowKind &kind : kinds_) {
            Wide most = 0;
            for (int level = rooms_[0] > 0 ? 0 : 1; level < 3; ++level) {
                most = std::max(most, kind.gains[level] * (Wide{1} << price_bits) - prices_[level] * kind.kept);
            }
            total += kind.count * most;
        }
        return total;
    }

    const RingTimes &times_;
    std::vector<WindowKind> &kinds_;
    std::int64_t stages_, capacity_;
    std::int64_t rooms_[3] = {}; // micro-batches that one window swallows: mates, earlier, later; in model parts
    std::int64_t places_ = 0; // by how much the place in its turn moves room from earlier to later
    Wide prices_[3] = {}; // of a token, in 2^-price_bits picoseconds
};

} // namespace hdp
