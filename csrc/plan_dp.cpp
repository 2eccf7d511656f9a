// Balance without pipeline stages. Twin: megatron_hdp/planner/dp_python.py, which explains the method.

#include "arrays.hpp"
#include "sand.hpp"
#include "skyline.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace hdp {
namespace {

// How closely rings are looked at.
struct Look {
    std::size_t most_coarse;
    Int coarse_share; // coarse rings last at least 1 / coarse_share of the bound, or take 1 / 8 of the pool
    bool split;       // local sequences that are too long or too many for the bound get rings
};
constexpr Look first_look{64, 16, false}, second_look{256, 64, true};
constexpr Int coarse_width = 8;
constexpr std::array<Int, 6> slack = {0, 4, 10, 20, 41, 82}; // of 1024, over the bound
constexpr std::array<std::array<Int, 2>, 6> ways = {{{0, 20}, {2, 0}, {1, 20}, {0, 0}, {0, 102}, {2, 102}}};
constexpr Int most_rounds = 8;           // local sequences a rank, up to which too many are looked for
constexpr std::size_t most_finished = 3; // ways that are planned to their end
constexpr std::size_t most_climbs = 64;  // other orders of up to as many coarse rings, fewer of more
constexpr Int near = 512;                // 1 / 512 over the bound is good enough
constexpr Int far = 64;                  // 1 / 64 over the bound is worth another look

// Refuse what would never end or index outside.
void require(const Int64View &lengths, const Int64View &smallest, const Int64View &widest, Int num_ranks,
             const Cost &cost) {
    const std::size_t n = lengths.shape(0);
    if (smallest.shape(0) != n || widest.shape(0) != n || num_ranks < 1) {
        throw std::invalid_argument(std::to_string(n) + " lengths, " + std::to_string(smallest.shape(0)) +
                                    " smallest and " + std::to_string(widest.shape(0)) + " widest rings, " +
                                    std::to_string(num_ranks) +
                                    " ranks: there must be one of each per length, and at least one rank");
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (lengths(i) < 1 || lengths(i) > cost.max_length || smallest(i) < 1 || smallest(i) > num_ranks ||
            widest(i) < smallest(i)) {
            throw std::invalid_argument(
                "sequence " + std::to_string(i) + " of " + std::to_string(lengths(i)) + " tokens has rings of " +
                std::to_string(smallest(i)) + " to " + std::to_string(widest(i)) + " ranks: lengths must be in 1 .. " +
                std::to_string(cost.max_length) + ", smallest rings in 1 .. " + std::to_string(num_ranks) +
                " and not above widest ones");
        }
    }
}

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
void choose_coarse(const Cost &cost, Task &task, Int num_ranks, Int capacity, Int bound, const Look &look) {
    bool coarse = true;
    for (Choices &ring : task.rings) {
        const Int time = best_time(cost, ring.length, ring.smallest);
        coarse = coarse && task.num_coarse < look.most_coarse && (ring.length > capacity || ring.smallest > cost.ranks_per_node) &&
                 (Wide{time} * look.coarse_share >= bound || ring.smallest * coarse_width >= num_ranks);
        if (coarse) {
            set_times(cost, ring, num_ranks, bound);
            ++task.num_coarse;
        } else {
            task.fine_work += Wide{time} * ring.smallest;
        }
    }
}

// The widest ring of 2, 4, 8, .. ranks of a node whose rank-time is at most 1 / 8 above that of one rank; 1 for none.
Int cheap_ring(const Cost &cost, Int length, Int alone, Int num_ranks) {
    Int size = 1;
    for (Int twice = 2; twice <= std::min(num_ranks, cost.ranks_per_node); twice *= 2) {
        if (twice * best_time(cost, length, twice) <= alone + alone / 8) {
            size = twice;
        }
    }
    return size;
}

// Locals, longest first, that ranks have no room for: a rank runs at most k that take more than 1 / (k + 1) of the bound.
Int too_many(const Cost &cost, const Int64View &lengths, const Ints &locals, Int num_ranks, Int bound) {
    Int most = 0;
    for (Int k = 1; k <= most_rounds; ++k) {
        const auto long_enough = [&](Int sequence) {
            return (k + 1) * best_time(cost, lengths(sequence), 1) > bound;
        };
        const auto end = std::partition_point(locals.begin(), locals.end(), long_enough);
        most = std::max(most, static_cast<Int>(end - locals.begin()) - k * num_ranks);
    }
    return most;
}

// Move locals to the rings: those that would end after the bound, but sooner on two ranks, and the longest of those
// that ranks have no room for. Locals come longest first.
void split_locals(const Cost &cost, const Int64View &lengths, Int num_ranks, Int bound, Ints &locals,
                  std::vector<std::tuple<Int, Int, Int>> &rings) {
    const Int many = too_many(cost, lengths, locals, num_ranks, bound);
    Ints kept;
    for (Int i = 0; i < static_cast<Int>(locals.size()); ++i) {
        const Int length = lengths(locals[i]), alone = best_time(cost, length, 1);
        Int size = 1;
        if (alone > bound) {
            size = best_time(cost, length, 2) < alone ? 2 : 1;
        } else if (i < many) {
            size = cheap_ring(cost, length, alone, num_ranks);
        } else {
            kept.insert(kept.end(), locals.begin() + i, locals.end());
            break;
        }
        if (size > 1) {
            rings.emplace_back(-size, -length, locals[i]);
        } else {
            kept.push_back(locals[i]);
        }
    }
    locals.swap(kept);
}

Task read(const Cost &cost, const Int64View &lengths, const Int64View &smallest, const Int64View &widest, Int num_ranks,
          Int capacity, Int bound, const Look &look) {
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
    sort_longest_first(locals, lengths);
    if (look.split && num_ranks > 1) {
        split_locals(cost, lengths, num_ranks, bound, locals, rings);
    }
    std::sort(rings.begin(), rings.end());
    for (const auto &[size, length, sequence] : rings) {
        task.ring_sequence.push_back(sequence);
        task.rings.push_back({-length, -size, std::max(-size, std::min(num_ranks, widest(sequence))), {}, 0});
    }
    choose_coarse(cost, task, num_ranks, capacity, bound, look);
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

// A way to place coarse rings that was tried, and what it promises.
struct Tried {
    Int promise;
    Trial trial;
    Ints order;
};

struct Candidate {
    Int span = std::numeric_limits<Int>::max();
    Placement placed;
    Spread spread;
};

// What this order promises; if that is not below `give_up`, it may be any number that is not.
Int try_coarse(const Cost &cost, const Task &task, Int num_ranks, const Trial &trial, const Ints &order, Int give_up) {
    const Coarse coarse = place_coarse(cost, task.rings, order, num_ranks, trial, give_up);
    return coarse.end >= give_up ? coarse.end : promise(task, coarse, num_ranks);
}

// Keep the ways that promise most, those tried first where equal.
void keep_best(std::vector<Tried> &tried, Tried next) {
    const auto later = [](const Tried &a, const Tried &b) { return a.promise < b.promise; };
    tried.insert(std::upper_bound(tried.begin(), tried.end(), next, later), std::move(next));
    if (tried.size() > most_finished) {
        tried.pop_back();
    }
}

std::vector<Tried> try_ways(const Cost &cost, const Task &task, Int num_ranks, Int bound) {
    std::vector<Tried> tried;
    Ints order(task.num_coarse);
    std::iota(order.begin(), order.end(), Int{0});
    for (const Int extra : slack) {
        for (const auto &way : ways) {
            const Int give_up = tried.size() < most_finished ? std::numeric_limits<Int>::max() : tried.back().promise;
            const Trial trial{bound + static_cast<Int>(Wide{bound} * extra / 1024), way[0], way[1]};
            keep_best(tried, {try_coarse(cost, task, num_ranks, trial, order, give_up), trial, order});
            if (tried.front().promise <= bound + bound / near || task.num_coarse == 0) {
                return tried;
            }
        }
    }
    return tried;
}

// Hill climbing from the best way: move one ring to another place in the order, keep what is not worse.
void climb(const Cost &cost, const Task &task, Int num_ranks, Int bound, std::vector<Tried> &tried) {
    Tried best = tried.front();
    if (task.num_coarse < 2) {
        return;
    }
    std::uint64_t random = 88172645463325252u;
    const auto draw = [&] { // xorshift (Marsaglia 2003): the same on every rank
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return static_cast<std::ptrdiff_t>(random % task.num_coarse);
    };
    const std::size_t climbs = std::min(most_climbs, most_climbs * most_climbs / task.num_coarse);
    for (std::size_t i = 0; i < climbs && best.promise > bound + bound / far; ++i) {
        Ints order = best.order;
        const std::ptrdiff_t from = draw(), to = draw();
        const Int ring = order[from];
        order.erase(order.begin() + from);
        order.insert(order.begin() + to, ring);
        const Int promised = try_coarse(cost, task, num_ranks, best.trial, order, best.promise + 1);
        if (promised <= best.promise) {
            best.promise = promised;
            best.order = std::move(order);
        }
    }
    if (best.promise < tried.front().promise) {
        keep_best(tried, std::move(best));
    }
}

Candidate search(const Cost &cost, const Task &task, Int num_ranks, Int bound, const LastEnough &last) {
    std::vector<Tried> tried = try_ways(cost, task, num_ranks, bound);
    climb(cost, task, num_ranks, bound, tried);
    const bool fine = task.num_coarse < task.rings.size();
    Candidate best;
    for (const Tried &way : tried) {
        for (const Late late : {Late::smallest, Late::widest}) {
            const bool wanted = late == Late::smallest ? best.span > bound + bound / near
                                                       : fine && best.span > bound + bound / far;
            if (!wanted || way.promise >= best.span) {
                continue;
            }
            Coarse coarse = place_coarse(cost, task.rings, way.order, num_ranks, way.trial);
            place_fine(cost, task.rings, task.num_coarse, way.trial.target, late, coarse);
            const Int least = task.locals.time.empty() ? 1 : task.locals.time.back();
            coarse.placed.reserve = reserves(coarse.placed, num_ranks, bound, least, last);
            Spread spread = spread_locals(coarse.placed, task.locals, num_ranks);
            if (spread.span < best.span) {
                best = {spread.span, std::move(coarse.placed), std::move(spread)};
            }
        }
    }
    level_locals(best.placed, task.locals, num_ranks, bound + bound / near, best.spread);
    best.span = best.spread.span;
    return best;
}

Columns plan_dp(const Cost &cost, const Int64View &lengths, const Int64View &smallest, const Int64View &widest,
                Int num_ranks, Int capacity, Int bound, const LastEnough &last) {
    Task task = read(cost, lengths, smallest, widest, num_ranks, capacity, bound, first_look);
    Candidate best = search(cost, task, num_ranks, bound, last);
    if (best.span > bound + bound / far) {
        Task closer = read(cost, lengths, smallest, widest, num_ranks, capacity, bound, second_look);
        if (closer.num_coarse > task.num_coarse || closer.rings.size() > task.rings.size()) {
            Candidate other = search(cost, closer, num_ranks, bound, last);
            if (other.span < best.span) {
                task = std::move(closer);
                best = std::move(other);
            }
        }
    }
    return build_columns(task.ring_sequence, best.placed, task.locals, best.spread,
                         static_cast<Int>(lengths.shape(0)), num_ranks, capacity);
}

nb::tuple plan_dp_arrays(Int64View lengths, Int64View smallest, Int64View widest, Int num_ranks, Int capacity,
                         Int64View arguments, Int bound, Int last_time, Int last_share) {
    const Cost cost = Cost::from(arguments);
    require(lengths, smallest, widest, num_ranks, cost);
    if (capacity < 1) {
        throw std::invalid_argument("capacity is " + std::to_string(capacity) + ", must be at least 1");
    }
    Columns plan;
    {
        nb::gil_scoped_release unlocked;
        plan = plan_dp(cost, lengths, smallest, widest, num_ranks, capacity, bound, {last_time, last_share});
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
    require(lengths, smallest, widest, num_ranks, cost);
    for (std::size_t i = 1; i < smallest.shape(0); ++i) {
        if (smallest(i) > smallest(i - 1)) {
            throw std::invalid_argument("ring " + std::to_string(i) + " needs " + std::to_string(smallest(i)) +
                                        " ranks, the one before it " + std::to_string(smallest(i - 1)) +
                                        ": rings must come by falling smallest size");
        }
    }
    Coarse coarse;
    {
        nb::gil_scoped_release unlocked;
        Task task;
        for (std::size_t i = 0; i < lengths.shape(0); ++i) {
            task.rings.push_back({lengths(i), smallest(i), std::min(num_ranks, widest(i)), {}, 0});
        }
        task.num_coarse = std::min(task.rings.size(), static_cast<std::size_t>(std::max<Int>(num_coarse, 0)));
        for (std::size_t i = 0; i < task.num_coarse; ++i) {
            set_times(cost, task.rings[i], num_ranks, target);
        }
        Ints order(task.num_coarse);
        std::iota(order.begin(), order.end(), Int{0});
        coarse = place_coarse(cost, task.rings, order, num_ranks, {target, tie, share});
        place_fine(cost, task.rings, task.num_coarse, target, Late::smallest, coarse);
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
               nb::arg("num_ranks"), nb::arg("capacity"), nb::arg("cost"), nb::arg("bound"), nb::arg("last_time"),
               nb::arg("last_share"));
    module.def("place_rings", &hdp::place_rings, nb::arg("lengths"), nb::arg("smallest"), nb::arg("widest"),
               nb::arg("num_ranks"), nb::arg("cost"), nb::arg("num_coarse"), nb::arg("target"), nb::arg("tie"),
               nb::arg("share"));
}
