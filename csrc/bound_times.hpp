// Least times of sequences on rings of any size; twin and what proofs use of them: megatron_hdp/planner/bound_times.py.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cost.hpp"

namespace hdp {

__extension__ using Wide = __int128; // sums of rank-time and cost times length squared leave int64

class RingTimes {
  public:
    RingTimes(const Cost &given, std::int64_t ranks, std::int64_t parts)
        : cost_(given), ranks_(ranks), parts_(parts), trim_(2 * (parts - 1)),
          passes_{1, given.recompute ? 2 : 1, given.recompute ? 3 : 2} {
        // A ring that fits a node may lie in one, or not: it is charged the better of both kinds of links.
        if (ranks_ > cost_.ranks_per_node) {
            for (std::int64_t *pair : {cost_.latency, cost_.kv_time, cost_.both_time, cost_.gradient_time}) {
                pair[0] = std::min(pair[0], pair[1]);
            }
        }
        const std::int64_t forward = cost_.sequence[0] >> cost_.fraction_bits;
        const std::int64_t backward =
            (cost_.sequence[1] >> cost_.fraction_bits) + (cost_.recompute ? forward : 0);
        per_sequence_[0] = forward;
        per_sequence_[1] = backward;
        per_sequence_[2] = forward + backward;
    }

    // Least rank-time of a sequence on rings of at least `ring`: of forward, of backward and of both.
    struct RankTime {
        Wide forward, backward, total;
    };

    RankTime rank_time(std::int64_t length, std::int64_t ring) const {
        const std::int64_t forward = at_most(length, ring, ring, Phase::forward);
        const std::int64_t backward = at_most(length, ring, ring, Phase::backward);
        Wide ahead = 0, behind = 0; // passes on the next ring
        if (ring > 1 && ring < ranks_) {
            ahead = unpadded(length, ring + 1, 0);
            behind = unpadded(length, ring + 1, 1) + (cost_.recompute ? ahead : 0);
        }
        return {from(forward, ahead, ring, Phase::forward), from(backward, behind, ring, Phase::backward),
                std::max<Wide>(from(forward + backward, ahead + behind, ring, Phase::total), 0)};
    }

    const Cost &cost() const { return cost_; }
    std::int64_t ranks() const { return ranks_; }
    std::int64_t parts() const { return parts_; }
    std::int64_t trim() const { return trim_; } // what rounding a stage's time down to parts can take from a micro-batch

    int tier(std::int64_t ring) const { return ring > cost_.ranks_per_node ? across_nodes : inside_node; }

    // At most the time of a piece on any ring of steps .. shares ranks. The time itself where steps == shares, but for
    // windows: for them it is compute alone, shared out evenly.
    std::int64_t at_most(std::int64_t length, std::int64_t shares, std::int64_t steps, Phase phase) const {
        if (cost_.window == 0) {
            return cost_.tokens_picoseconds(cost_.piece_tokens(length, shares), steps, tier(steps), phase);
        }
        if (shares == 1) {
            return cost_.picoseconds(length, 1, inside_node, phase);
        }
        const auto pass = [&](int direction) {
            const std::int64_t compute = cost_.scaled(cost_.first_area(length) / shares, cost_.attention[direction]);
            return std::max<std::int64_t>(compute - shares, 0) +
                   cost_.scaled(length / shares, cost_.linear[direction]) +
                   (cost_.sequence[direction] >> cost_.fraction_bits);
        };
        const std::int64_t forward = pass(0), again = cost_.recompute ? forward : 0;
        return phase == Phase::forward ? forward : pass(1) + again + (phase == Phase::total ? forward : 0);
    }

  private:
    std::int64_t lost(std::int64_t ring, Phase phase) const {
        return passes_[static_cast<int>(phase)] * (2 * ring + 4) + trim_;
    }

    Wide from(std::int64_t piece, Wide following, std::int64_t ring, Phase phase) const {
        const Wide at_once = Wide{ring} * (piece - trim_);
        if (ring == ranks_) {
            return at_once;
        }
        const std::int64_t next = ring + 1, each = per_sequence_[static_cast<int>(phase)];
        const Wide ideal = ring == 1 ? Wide{piece} + each : following >> cost_.fraction_bits;
        const Wide slack = std::min(-Wide{next} * lost(next, phase),
                                    Wide{each} * (ranks_ - next) - Wide{ranks_} * lost(ranks_, phase));
        return std::min(at_once, ideal + slack);
    }

    // One pass of a ring of at least 2 whose pieces are exactly length / ring, in 2^-fraction_bits picoseconds.
    Wide unpadded(std::int64_t length, std::int64_t ring, int direction) const {
        const Wide s = length, d = ring;
        const int links = tier(ring);
        const Wide wait = cost_.latency[links], kv = cost_.kv_time[links], both = cost_.both_time[links],
                   gradient = cost_.gradient_time[links];
        const Wide area = Wide{cost_.first_area(length)} * cost_.attention[direction];
        const Wide rest = cost_.linear[direction] * s + cost_.sequence[direction] * d;
        if (cost_.window != 0) {
            return area + rest;
        }
        const Wide home = direction == 0 ? 0 : wait * d + gradient * s;
        const auto excess = [&](Wide per_token) {
            return std::max<Wide>(wait * d * d + per_token * s * d - area, 0);
        };
        const Wide waits =
            direction == 0 ? (d - 1) * excess(kv) : excess(kv) + (d - 2) * excess(both) + excess(gradient);
        return area + (waits == 0 ? 0 : waits / d) + home + rest; // rings that hide wait for nothing
    }

    Cost cost_;
    std::int64_t ranks_, parts_, trim_;
    std::int64_t passes_[3]; // over the stage: forward, backward, both
    std::int64_t per_sequence_[3] = {};
};

} // namespace hdp
