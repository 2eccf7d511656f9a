// Balance without pipeline stages. Twin: megatron_hdp/planner/dp.py, which explains the method.

#include "arrays.hpp"
#include "sand.hpp"
#include "skyline.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

namespace hdp {
namespace {

constexpr std::size_t most_coarse = 64;
constexpr Int coarse_share = 16; // coarse rings last at least 1 / 16 of the bound, or take 1 / 8 of the pool
constexpr Int coarse_width = 8;
constexpr std::array<Int, 6> slack = {0, 4, 10, 20, 41, 82};                      // of 1024, over the bound
constexpr std::array<std::array<Int, 2>, 6> ways = {{{0, 20}, {2, 0}, {1, 20}, {0, 0}, {0, 102}, {2, 102}}};
constexpr int most_finished = 3; // candidates that are planned to their end
constexpr Int near = 512;        // 1 / 512 over the bound is good enough

// Rings to place, coarse ones (with times by size) first.
struct Task {
    std::vector<Choices> rings;
    Ints ring_sequence;
    std::size_t num_coarse = 0;
    Wide fine_work = 0;
    Locals locals;
    Wide local_work = 0;
};

// Sequences by falling length, ties by rising index: a stable radix sort, since comparing would take most of a plan.
void sort_longest_first(Ints &sequences, const Int64View &lengths) {
    constexpr int bits = 11;
    constexpr std::size_t digits = std::size_t{1} << bits;
    Int longest = 0;
    for (const Int sequence : sequences) {
        longest = std::max(longest, lengths(sequence));
    }
    Ints sorted(sequences.size());
    std::vector<std::size_t> next(digits);
    for (int shift = 0; longest >> shift > 0; shift += bits) {
        const auto digit = [&](Int sequence) { return digits - 1 - (lengths(sequence) >> shift & (digits - 1)); };
        std::fill(next.begin(), next.end(), 0);
        for (const Int sequence : sequences) {
            ++next[digit(sequence)];
        }
        std::size_t place = 0;
        for (std::size_t &count : next) {
            place += count;
            count = place - count;
        }
        for (const Int sequence : sequences) {
            sorted[next[digit(sequence)]++] = sequence;
        }
        sequences.swap(sorted);
    }
}

// Which rings are coarse, and the work of the others.
void choose_coarse(const Cost &cost, Task &task, Int num_ranks, Int bound) {
    bool coarse = true;
    for (Choices &ring : task.rings) {
        const Int time = best_time(cost, ring.length, ring.smallest);
        coarse = coarse && task.num_coarse < most_coarse &&
                 (Wide{time} * coarse_share >= bound || ring.smallest * coarse_width >= num_ranks);
        if (coarse) {
            ring.times = times_by_size(cost, ring.length, ring.smallest, ring.widest, num_ranks, bound);
            ++task.num_coarse;
        } else {
            task.fine_work += Wide{time} * ring.smallest;
        }
    }
}

Task read(const Cost &cost, const Int64View &lengths, const Int64View &smallest, const Int64View &widest, Int num_ranks,
          Int capacity, Int bound) {
    Task task;
    std::vector<std::tuple<Int, Int, Int>> rings; // (-smallest, -length, sequence)
    Ints locals;
    for (Int i = 0; i < static_cast<Int>(lengths.shape(0)); ++i) {
        if (smallest(i) > 1) {
            rings.emplace_back(-smallest(i), -lengths(i), i);
        } else {
            locals.push_back(i);
        }
    }
    std::sort(rings.begin(), rings.end());
    sort_longest_first(locals, lengths);
    for (const auto &[size, length, sequence] : rings) {
        task.ring_sequence.push_back(sequence);
        task.rings.push_back({-length, -size, std::min(num_ranks, widest(sequence)), {}});
    }
    choose_coarse(cost, task, num_ranks, bound);
    const Int constant = cost.microbatch_picoseconds();
    Int tokens = 0, time = 0;
    for (const Int sequence : locals) {
        if (cost.piece_tokens(lengths(sequence), 1) != tokens) {
            tokens = cost.piece_tokens(lengths(sequence), 1);
            time = cost.picoseconds(lengths(sequence), 1, inside_node) + constant * tokens / capacity;
        }
        task.locals.tokens.push_back(tokens);
        task.locals.time.push_back(time);
        task.local_work += time;
    }
    task.locals.sequence = std::move(locals);
    return task;
}

// What a coarse placement promises: its end, or the mean of all work and of waiting that no local sequence fills.
Int promise(const Task &task, const Coarse &coarse, Int num_ranks) {
    const Wide rest = task.fine_work + std::max<Wide>(task.local_work, coarse.idle) - coarse.idle;
    return std::max(coarse.end, static_cast<Int>((coarse.area + rest) / num_ranks));
}

std::vector<std::tuple<Int, std::size_t, Trial>> trials(const Cost &cost, const Task &task, Int num_ranks, Int bound) {
    std::vector<std::tuple<Int, std::size_t, Trial>> found;
    for (const Int extra : slack) {
        for (const auto &way : ways) {
            const Trial trial{bound + static_cast<Int>(Wide{bound} * extra / 1024), way[0], way[1]};
            const Int value = promise(task, place_coarse(cost, task.rings, num_ranks, trial), num_ranks);
            found.emplace_back(value, found.size(), trial);
            if (value <= bound + bound / near || task.num_coarse == 0) {
                return found;
            }
        }
    }
    return found;
}

Columns plan_dp(const Cost &cost, const Task &task, Int num_sequences, Int num_ranks, Int capacity, Int bound) {
    auto found = trials(cost, task, num_ranks, bound);
    std::sort(found.begin(), found.end(),
              [](const auto &a, const auto &b) { return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b)); });
    Int best_span = std::numeric_limits<Int>::max();
    Placement placed;
    Spread spread;
    for (std::size_t i = 0; i < found.size() && i < most_finished; ++i) {
        if (std::get<0>(found[i]) >= best_span) {
            break;
        }
        const Trial &trial = std::get<2>(found[i]);
        Coarse coarse = place_coarse(cost, task.rings, num_ranks, trial);
        place_fine(cost, task.rings, task.num_coarse, trial.target, coarse);
        Spread candidate = spread_locals(coarse.placed, task.locals, num_ranks);
        if (candidate.span < best_span) {
            best_span = candidate.span;
            placed = std::move(coarse.placed);
            spread = std::move(candidate);
        }
        if (best_span <= bound + bound / near) {
            break;
        }
    }
    return build_columns(task.ring_sequence, placed, task.locals, spread, num_sequences, num_ranks, capacity);
}

nb::tuple plan_dp_arrays(Int64View lengths, Int64View smallest, Int64View widest, Int num_ranks, Int capacity,
                         Int64View arguments, Int bound) {
    const Cost cost = Cost::from(arguments);
    Columns plan;
    {
        nb::gil_scoped_release unlocked;
        const Task task = read(cost, lengths, smallest, widest, num_ranks, capacity, bound);
        plan = plan_dp(cost, task, static_cast<Int>(lengths.shape(0)), num_ranks, capacity, bound);
    }
    return nb::make_tuple(to_numpy(std::move(plan.ring_start)), to_numpy(std::move(plan.ring_size)),
                          to_numpy(std::move(plan.rank_offsets)), to_numpy(std::move(plan.microbatch_offsets)),
                          to_numpy(std::move(plan.piece_sequence)));
}

// Rings in the given order (by smallest size and then length, both falling) onto ranks that are free at once; the first
// `num_coarse` of them as coarse rings.
nb::tuple place_rings(Int64View lengths, Int64View smallest, Int64View widest, Int num_ranks, Int64View arguments,
                      Int num_coarse, Int target, Int tie, Int share) {
    const Cost cost = Cost::from(arguments);
    Coarse coarse;
    {
        nb::gil_scoped_release unlocked;
        Task task;
        for (std::size_t i = 0; i < lengths.shape(0); ++i) {
            task.rings.push_back({lengths(i), smallest(i), std::min(num_ranks, widest(i)), {}});
        }
        task.num_coarse = std::min(task.rings.size(), static_cast<std::size_t>(std::max<Int>(num_coarse, 0)));
        for (std::size_t i = 0; i < task.num_coarse; ++i) {
            Choices &ring = task.rings[i];
            ring.times = times_by_size(cost, ring.length, ring.smallest, ring.widest, num_ranks, target);
        }
        coarse = place_coarse(cost, task.rings, num_ranks, {target, tie, share});
        place_fine(cost, task.rings, task.num_coarse, target, coarse);
    }
    Placement &placed = coarse.placed;
    return nb::make_tuple(to_numpy(std::move(placed.ring)), to_numpy(std::move(placed.start)),
                          to_numpy(std::move(placed.size)), to_numpy(std::move(placed.begin)),
                          to_numpy(std::move(placed.time)));
}

} // namespace
} // namespace hdp

void bind_plan_dp(nb::module_ &module) {
    module.def("plan_dp", &hdp::plan_dp_arrays, nb::arg("lengths"), nb::arg("smallest"), nb::arg("widest"),
               nb::arg("num_ranks"), nb::arg("capacity"), nb::arg("cost"), nb::arg("bound"));
    module.def("place_rings", &hdp::place_rings, nb::arg("lengths"), nb::arg("smallest"), nb::arg("widest"),
               nb::arg("num_ranks"), nb::arg("cost"), nb::arg("num_coarse"), nb::arg("target"), nb::arg("tie"),
               nb::arg("share"));
}
