// What a piece costs its rank, in integer picoseconds: the same bits as megatron_hdp/cost/model.py, which is the
// authority and says why. Header only, no numpy, no Python: every part of the core may include it.
//
// Arguments are those of a valid plan (length and ring from 1 to max_length); under that condition, which Python checks
// once at the door, no sum or product here leaves int64.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace hdp {

enum class Phase : int { forward = 0, backward = 1, total = 2 };
enum Tier : int { inside_node = 0, across_nodes = 1 };

struct Cost {
    // The order of the numbers that megatron_hdp/cost/core.py writes.
    std::int64_t fraction_bits = 0;
    std::int64_t window = 0; // tokens that a query sees; 0 for full causal attention
    std::int64_t recompute = 0; // 1: the forward pass runs once more ahead of backward
    std::int64_t pad_multiple = 2;
    std::int64_t ranks_per_node = 1;
    std::int64_t max_length = 0;
    std::int64_t attention[2] = {}; // forward, backward; times are in 2^-fraction_bits picoseconds
    std::int64_t linear[2] = {};
    std::int64_t sequence[2] = {};
    std::int64_t microbatch[2] = {};
    std::int64_t ring_step[2] = {};
    std::int64_t latency[2] = {}; // per tier
    std::int64_t kv_time[2] = {};
    std::int64_t both_time[2] = {};
    std::int64_t gradient_time[2] = {};

    static constexpr std::size_t num_arguments = 24;

    // From any flat view with `operator()(i)` and `shape(0)`, as numpy hands one over.
    template <class View> static Cost from(const View &view) {
        if (static_cast<std::size_t>(view.shape(0)) != num_arguments) {
            throw std::invalid_argument("a cost has " + std::to_string(num_arguments) + " numbers, got " +
                                        std::to_string(view.shape(0)) + ": take them from core_arguments()");
        }
        Cost cost;
        std::size_t next = 0;
        for (std::int64_t *field : {&cost.fraction_bits, &cost.window, &cost.recompute, &cost.pad_multiple,
                                    &cost.ranks_per_node, &cost.max_length}) {
            *field = view(next++);
        }
        for (std::int64_t *pair : {cost.attention, cost.linear, cost.sequence, cost.microbatch, cost.ring_step, cost.latency,
                                   cost.kv_time, cost.both_time, cost.gradient_time}) {
            pair[0] = view(next++);
            pair[1] = view(next++);
        }
        return cost;
    }

    // Tokens that each rank of a ring holds, padding counted.
    std::int64_t piece_tokens(std::int64_t length, std::int64_t ring) const {
        const std::int64_t unit = ring * pad_multiple;
        return (length + unit - 1) / unit * pad_multiple;
    }

    // Slowest links of the ring of `ring` ranks from pool rank `start`.
    int tier(std::int64_t start, std::int64_t ring) const {
        return start / ranks_per_node != (start + ring - 1) / ranks_per_node ? across_nodes : inside_node;
    }

    // The constant of one micro-batch; its time is this plus the picoseconds of its pieces.
    std::int64_t microbatch_picoseconds(Phase phase = Phase::total) const {
        const std::int64_t forward = microbatch[0] >> fraction_bits;
        const std::int64_t backward = (microbatch[1] >> fraction_bits) + (recompute ? forward : 0);
        return phase == Phase::forward ? forward : phase == Phase::backward ? backward : forward + backward;
    }

    // Time of one rank's piece of a sequence of `length` real tokens through the stage.
    std::int64_t picoseconds(std::int64_t length, std::int64_t ring, int tier, Phase phase = Phase::total) const {
        const std::int64_t tokens = piece_tokens(length, ring), seen = ring < 2 ? tokens : length;
        return tokens_picoseconds(tokens, ring, tier, phase, window != 0 && window < seen);
    }

    // The same for a piece of `tokens`, padding counted, of a sequence that is longer than the window or not.
    std::int64_t tokens_picoseconds(std::int64_t tokens, std::int64_t ring, int tier, Phase phase,
                                    bool windowed = false) const {
        if (phase == Phase::backward && !recompute) {
            return pass(tokens, ring, tier, 1, windowed);
        }
        const std::int64_t forward = pass(tokens, ring, tier, 0, windowed);
        if (phase == Phase::forward) {
            return forward;
        }
        const std::int64_t repeats = (phase == Phase::total ? 1 : 0) + (recompute ? 1 : 0);
        return repeats * forward + pass(tokens, ring, tier, 1, windowed);
    }

    // floor(count * coefficient / 2^fraction_bits) without a product that leaves int64.
    std::int64_t scaled(std::int64_t count, std::int64_t coefficient) const {
        const std::int64_t fraction = count & ((std::int64_t{1} << fraction_bits) - 1);
        return (count >> fraction_bits) * coefficient + ((fraction * coefficient) >> fraction_bits);
    }

    // Twice the area of the mask of the first `tokens` of a sequence.
    std::int64_t first_area(std::int64_t tokens) const {
        const std::int64_t reach = window == 0 ? tokens : std::min(window, tokens);
        return reach * (2 * tokens - reach);
    }

  private:
    // One pass over the stage: 0 forward, 1 backward.
    std::int64_t pass(std::int64_t tokens, std::int64_t ring, int tier, int direction, bool windowed) const {
        return (windowed ? halo(tokens / 2, ring, tier, direction) : walk(tokens, ring, tier, direction)) +
               scaled(tokens, linear[direction]) + (sequence[direction] >> fraction_bits);
    }

    // Keys and values walk round the ring: equal steps, each beside a transfer.
    std::int64_t walk(std::int64_t tokens, std::int64_t ring, int tier, int direction) const {
        const std::int64_t step = scaled(tokens * tokens, attention[direction]);
        if (ring < 2) {
            return step;
        }
        const std::int64_t wait = latency[tier] >> fraction_bits;
        const std::int64_t kv = wait + scaled(tokens, kv_time[tier]);
        const std::int64_t both = direction == 0 ? kv : wait + scaled(tokens, both_time[tier]);
        const std::int64_t gradient = direction == 0 ? 0 : wait + scaled(tokens, gradient_time[tier]);
        return std::max(step, kv) + (ring - 2) * std::max(step, both) + std::max(step, gradient) + gradient +
               (ring - 1) * (ring_step[direction] >> fraction_bits);
    }

    // With a window keys and values come hop by hop beside the diagonal blocks; in backward gradients go back.
    std::int64_t halo(std::int64_t chunk, std::int64_t ring, int tier, int direction) const {
        const std::int64_t a = attention[direction], reach = std::min(window, chunk);
        const std::int64_t own = scaled(2 * (2 * chunk * reach - reach * reach), a);
        const std::int64_t end = std::min(ring + 1, window / chunk + 3); // behind the window all chunks are alike
        const std::int64_t total = scaled(first_area(end * chunk) - first_area((end - 2) * chunk), a);
        const std::int64_t most = 2 * ring - 2, back = std::min(window - 1, most * chunk);
        const std::int64_t rows = back + std::min(window - 1, most / 3 * chunk);
        const std::int64_t wait = (back + chunk - 1) / chunk * (latency[tier] >> fraction_bits);
        const std::int64_t fetch = wait + scaled(rows, kv_time[tier]);
        const std::int64_t home = direction == 0 ? 0 : wait + scaled(rows, gradient_time[tier]);
        return total + std::max<std::int64_t>(fetch - own, 0) + home + (back > 0 ? ring_step[direction] >> fraction_bits : 0);
    }
};

} // namespace hdp
