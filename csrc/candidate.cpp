// Candidates for a pipeline's plan: what is where, and when each rank is done. Twin: megatron_hdp/planner/candidate.py.

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "lockstep.hpp"
#include "packs.hpp"

namespace hdp {
namespace {

using Int64Table = nb::ndarray<const Int, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Rings of one half of the pipeline; row 0 is where both halves meet.
struct Half {
    Ints start, size, row, forward, backward; // times of the whole micro-batch
    const Int *depth;                         // rows that each rank's rings reach, [num_ranks]
    const Int *height;                        // when each rank has run its rings, [num_ranks]
};

// Local micro-batches, rank by rank, longest first.
struct Packs {
    std::vector<std::size_t> first; // of each rank, [num_ranks + 1]
    Ints forward, backward;
};

// All that candidates have in common.
struct Task {
    Half front, back;
    const Int *tokens, *forward, *backward; // of local sequences, longest first
    std::size_t num_locals;
    Int constants[2]; // of every micro-batch, forward and backward
    Int num_ranks, capacity;
    Layout layout;
};

// Packs of every rank. `rank`: of each local sequence.
Packs make_packs(const Task &task, const Ints &rank, const Ints &rooms) {
    const Ints bin = pack_bins(rank.data(), task.tokens, task.num_locals, task.num_ranks, task.capacity, rooms);
    std::vector<std::size_t> first(static_cast<std::size_t>(task.num_ranks) + 1, 0); // of each rank's bins
    for (std::size_t i = 0; i < bin.size(); ++i) {
        first[rank[i] + 1] = std::max(first[rank[i] + 1], static_cast<std::size_t>(bin[i]) + 1);
    }
    std::partial_sum(first.begin(), first.end(), first.begin());
    Ints forward(first.back(), task.constants[0]), backward(first.back(), task.constants[1]);
    std::vector<char> used(first.back(), 0);
    for (std::size_t i = 0; i < bin.size(); ++i) {
        const std::size_t at = first[rank[i]] + static_cast<std::size_t>(bin[i]);
        forward[at] += task.forward[i];
        backward[at] += task.backward[i];
        used[at] = 1;
    }
    Packs packs;
    packs.first.push_back(0);
    std::vector<std::pair<Int, std::size_t>> order; // minus the time, bin
    for (Int r = 0; r < task.num_ranks; ++r) {
        order.clear();
        for (std::size_t at = first[r]; at < first[r + 1]; ++at) {
            if (used[at]) {
                order.emplace_back(-(forward[at] + backward[at]), at);
            }
        }
        std::sort(order.begin(), order.end());
        for (const auto &pack : order) {
            packs.forward.push_back(forward[pack.second]);
            packs.backward.push_back(backward[pack.second]);
        }
        packs.first.push_back(packs.forward.size());
    }
    return packs;
}

// Which packs run in front: longest first to the side that has less of what it needs.
std::vector<char> deal_packs(const Task &task, const Packs &packs, Int lead) {
    std::vector<char> in_front(packs.forward.size(), 0);
    const Int highest = *std::max_element(task.front.height, task.front.height + task.num_ranks);
    for (Int r = 0; r < task.num_ranks; ++r) {
        Int total = 0;
        for (std::size_t i = packs.first[r]; i < packs.first[r + 1]; ++i) {
            total += packs.forward[i] + packs.backward[i];
        }
        const Int gap = std::min(highest - task.front.height[r], total), rest = total - gap;
        const Int want_front = gap + rest / 1024 * lead + rest % 1024 * lead / 1024, want_back = total - want_front;
        Wide here = 0, there = 0;
        for (std::size_t i = packs.first[r]; i < packs.first[r + 1]; ++i) {
            const Int work = packs.forward[i] + packs.backward[i];
            if (want_front > 0 && (2 * here + work) * want_back <= (2 * there + work) * want_front) {
                in_front[i] = 1;
                here += work;
            } else {
                there += work;
            }
        }
    }
    return in_front;
}

// Slot of every pack, and the slot of the back half's row 0.
std::pair<Ints, Int> place_packs(const Task &task, const Packs &packs, const std::vector<char> &in_front) {
    Int middle = 0;
    for (Int r = 0; r < task.num_ranks; ++r) {
        const auto number = std::count(in_front.begin() + static_cast<std::ptrdiff_t>(packs.first[r]),
                                       in_front.begin() + static_cast<std::ptrdiff_t>(packs.first[r + 1]), 1);
        middle = std::max(middle, task.front.depth[r] + static_cast<Int>(number));
    }
    Ints slot(in_front.size());
    for (Int r = 0; r < task.num_ranks; ++r) {
        Int ahead = middle - 1 - task.front.depth[r], behind = middle + task.back.depth[r];
        for (std::size_t i = packs.first[r]; i < packs.first[r + 1]; ++i) {
            slot[i] = in_front[i] ? ahead-- : behind++;
        }
    }
    return {std::move(slot), middle};
}

// Visit the rings with their slots.
template <class Visit> void each_ring(const Task &task, Int middle, const Visit &visit) {
    for (std::size_t i = 0; i < task.front.start.size(); ++i) {
        visit(task.front, i, middle - 1 - task.front.row[i]);
    }
    for (std::size_t i = 0; i < task.back.start.size(); ++i) {
        visit(task.back, i, middle + task.back.row[i]);
    }
}

// Micro-batches of every rank: at least one, and what the layout demands.
Ints count_slots(const Task &task, const Packs &packs, const Ints &slot, Int middle) {
    Ints counts(static_cast<std::size_t>(task.num_ranks), 1);
    each_ring(task, middle, [&](const Half &half, std::size_t i, Int at) {
        for (Int r = half.start[i]; r < half.start[i] + half.size[i]; ++r) {
            counts[r] = std::max(counts[r], at + 1);
        }
    });
    const Int multiple = task.layout.count_multiple(), group = task.layout.expert_group;
    for (Int r = 0; r < task.num_ranks; ++r) {
        for (std::size_t i = packs.first[r]; i < packs.first[r + 1]; ++i) {
            counts[r] = std::max(counts[r], slot[i] + 1);
        }
        counts[r] = (counts[r] + multiple - 1) / multiple * multiple;
    }
    for (Int r = 0; r < task.num_ranks; r += group) {
        const auto first = counts.begin() + r, end = first + group;
        std::fill(first, end, *std::max_element(first, end));
    }
    return counts;
}

// When each rank is done with `lead` of 1024 of the packs that are free to choose in front.
Ints time_candidate(const Task &task, const Packs &packs, Int lead) {
    const auto [slot, middle] = place_packs(task, packs, deal_packs(task, packs, lead));
    Grid grid;
    grid.num_ranks = task.num_ranks;
    grid.counts = count_slots(task, packs, slot, middle);
    grid.num_slots = *std::max_element(grid.counts.begin(), grid.counts.end());
    const std::size_t cells = static_cast<std::size_t>(grid.num_slots * task.num_ranks);
    grid.forward.assign(cells, task.constants[0]);
    grid.backward.assign(cells, task.constants[1]);
    grid.is_tied.assign(cells, 0);
    each_ring(task, middle, [&](const Half &half, std::size_t i, Int at) {
        const Int first = at * task.num_ranks + half.start[i], size = half.size[i];
        std::fill_n(grid.forward.begin() + first, size, half.forward[i]);
        std::fill_n(grid.backward.begin() + first, size, half.backward[i]);
        std::fill_n(grid.is_tied.begin() + first, size - 1, 1);
    });
    const Int group = task.layout.expert_group;
    for (Int r = 0; r < task.num_ranks; ++r) {
        for (std::size_t i = packs.first[r]; i < packs.first[r + 1]; ++i) {
            grid.forward[slot[i] * task.num_ranks + r] = packs.forward[i];
            grid.backward[slot[i] * task.num_ranks + r] = packs.backward[i];
        }
        for (Int s = 0; (r + 1) % group != 0 && s < grid.counts[r]; ++s) {
            grid.is_tied[s * task.num_ranks + r] = 1;
        }
    }
    return lockstep_ends(grid, task.layout);
}

// From tables of start, size, row and length of each ring, and of depth and height of each rank.
Half read_half(const Cost &cost, const Int64Table &rings, const Int64Table &ranks, Int num_ranks) {
    if (rings.shape(0) != 4 || ranks.shape(0) != 2 || ranks.shape(1) != static_cast<std::size_t>(num_ranks)) {
        throw std::invalid_argument("a half has rows start, size, row, length of rings and depth, height of ranks");
    }
    const std::size_t number = rings.shape(1);
    const auto column = [&](std::size_t k) { return Ints(rings.data() + k * number, rings.data() + (k + 1) * number); };
    Half half{column(0), column(1), column(2), {}, {}, ranks.data(), ranks.data() + num_ranks};
    for (std::size_t i = 0; i < number; ++i) {
        const Int start = half.start[i], size = half.size[i];
        bool inside = start >= 0 && size > 0 && start + size <= num_ranks && half.row[i] >= 0;
        for (Int r = start; inside && r < start + size; ++r) {
            inside = half.row[i] < half.depth[r];
        }
        if (!inside) {
            throw std::invalid_argument("ring " + std::to_string(i) + " of " + std::to_string(size) +
                                        " ranks is not inside the pool and its depths");
        }
        const int tier = cost.tier(start, size);
        const auto time = [&](Phase phase) {
            return cost.microbatch_picoseconds(phase) + cost.picoseconds(rings(3, i), size, tier, phase);
        };
        half.forward.push_back(time(Phase::forward));
        half.backward.push_back(time(Phase::backward));
    }
    return half;
}

void require(const Int64Table &locals, const Int64View &rooms, const Int64View &offsets, const Int64View &leads,
             Int num_ranks, const Layout &layout) {
    bool good = num_ranks > 0 && locals.shape(0) == 3 && offsets.shape(0) == leads.shape(0) + 1 && offsets(0) == 0 &&
                offsets(leads.shape(0)) == static_cast<Int>(rooms.shape(0));
    for (std::size_t i = 0; good && i < leads.shape(0); ++i) {
        good = offsets(i) <= offsets(i + 1) && leads(i) >= 0 && leads(i) <= 1024;
    }
    for (std::size_t i = 0; good && i < locals.shape(1); ++i) {
        good = locals(0, i) > 0;
    }
    if (!good) {
        throw std::invalid_argument("locals have rows tokens, forward, backward; each end has rooms and a lead in 1024");
    }
    if (layout.stages < 1 || layout.virtual_stages < 1 || layout.expert_group < 1 || num_ranks % layout.expert_group) {
        throw std::invalid_argument("stages and parts are at least 1, expert groups divide the pool");
    }
}

// What bubbles take from each rank with each of several ends, and the spans; ends after the first whose span is at most
// `enough` are not tried. See candidate_times in megatron_hdp/planner/candidate_times.py.
nb::tuple candidate_times(Int64View arguments, Int64Table front_rings, Int64Table front_ranks, Int64Table back_rings,
                          Int64Table back_ranks, Int64Table locals, Int64View lost, Int capacity, Int stages,
                          Int virtual_stages, Int expert_group, Int64View rooms, Int64View room_offsets,
                          Int64View leads, Int enough) {
    const Cost cost = Cost::from(arguments);
    const Int num_ranks = static_cast<Int>(lost.shape(0));
    const std::size_t num_locals = locals.shape(1);
    require(locals, rooms, room_offsets, leads, num_ranks, {stages, virtual_stages, expert_group});
    const Task task{read_half(cost, front_rings, front_ranks, num_ranks),
                    read_half(cost, back_rings, back_ranks, num_ranks),
                    locals.data(), locals.data() + num_locals, locals.data() + 2 * num_locals, num_locals,
                    {cost.microbatch_picoseconds(Phase::forward), cost.microbatch_picoseconds(Phase::backward)},
                    num_ranks, capacity, {stages, virtual_stages, expert_group}};
    Ints spans, found;
    {
        nb::gil_scoped_release unlocked;
        Ints work(num_locals), load(static_cast<std::size_t>(num_ranks)), expected(load.size());
        for (std::size_t i = 0; i < num_locals; ++i) {
            work[i] = task.forward[i] + task.backward[i];
        }
        for (Int r = 0; r < num_ranks; ++r) {
            load[r] = task.front.height[r] + task.back.height[r];
            expected[r] = load[r] + lost(r);
        }
        const Ints rank = spread_work(work.data(), num_locals, expected);
        for (std::size_t i = 0; i < num_locals; ++i) {
            load[rank[i]] += work[i];
        }
        Packs packs;
        Ints before;
        for (std::size_t k = 0; k < leads.shape(0) && (spans.empty() || spans.back() > enough); ++k) {
            const Ints own(rooms.data() + room_offsets(k), rooms.data() + room_offsets(k + 1));
            if (k == 0 || own != before) {
                packs = make_packs(task, rank, own);
            }
            before = own;
            const Ints ends = time_candidate(task, packs, leads(k));
            spans.push_back(*std::max_element(ends.begin(), ends.end()));
            for (Int r = 0; r < num_ranks; ++r) {
                found.push_back(ends[r] - load[r]);
            }
        }
    }
    return nb::make_tuple(to_numpy(std::move(spans)), to_numpy(std::move(found)));
}

// Row of every ring, in the order of placing, then the rows that each rank's rings reach and when they end.
nb::tuple stack_rings(Int64View start, Int64View size, Int64View end, Int num_ranks) {
    Ints row(start.shape(0)), depth(static_cast<std::size_t>(std::max<Int>(num_ranks, 0)), 0), height(depth.size(), 0);
    if (size.shape(0) != row.size() || end.shape(0) != row.size()) {
        throw std::invalid_argument("start, size and end are of different rings");
    }
    for (std::size_t i = 0; i < row.size(); ++i) {
        if (start(i) < 0 || size(i) < 1 || start(i) + size(i) > num_ranks) {
            throw std::invalid_argument("ring " + std::to_string(i) + " is not inside the pool");
        }
        const auto first = depth.begin() + start(i), last = first + size(i);
        row[i] = *std::max_element(first, last);
        std::fill(first, last, row[i] + 1);
        std::fill_n(height.begin() + start(i), size(i), end(i));
    }
    return nb::make_tuple(to_numpy(std::move(row)), to_numpy(std::move(depth)), to_numpy(std::move(height)));
}

} // namespace
} // namespace hdp

void bind_candidate(nb::module_ &module) {
    module.def("candidate_times", &hdp::candidate_times, nb::arg("arguments"), nb::arg("front_rings"),
               nb::arg("front_ranks"), nb::arg("back_rings"), nb::arg("back_ranks"), nb::arg("locals"),
               nb::arg("lost"), nb::arg("capacity"), nb::arg("stages"), nb::arg("virtual_stages"),
               nb::arg("expert_group"), nb::arg("rooms"), nb::arg("room_offsets"), nb::arg("leads"),
               nb::arg("enough"));
    module.def("stack_rings", &hdp::stack_rings, nb::arg("start"), nb::arg("size"), nb::arg("end"),
               nb::arg("num_ranks"));
}
