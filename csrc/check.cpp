// Every invariant of a plan, checked at the cost of one walk over its pieces; twin: megatron_hdp/planner/check.py, which
// also says what is wrong.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "graph.hpp"

namespace {

using std::int64_t;

enum Verdict { SOUND = 0, BROKEN = 1, UNDECIDED = 2 };

constexpr int64_t LIMIT = int64_t{1} << 31; // numbers below it cannot overflow here

struct Settings {
    int64_t num_ranks, capacity, pad_multiple, stages, virtual_stages, expert_group;
};

bool rises(const Int64View &offsets, int64_t total) {
    const std::size_t size = offsets.shape(0);
    if (size == 0 || offsets(0) != 0 || offsets(size - 1) != total) {
        return false;
    }
    for (std::size_t i = 1; i < size; ++i) {
        if (offsets(i) < offsets(i - 1)) {
            return false;
        }
    }
    return true;
}

// Tokens of a piece that stay on the device after offload, rounded up.
int64_t held_tokens(int64_t length, int64_t ring, int64_t pad_multiple, double offload) {
    const int64_t unit = ring * pad_multiple;
    const int64_t tokens = (length + unit - 1) / unit * pad_multiple;
    return tokens - static_cast<int64_t>(std::floor(static_cast<double>(tokens) * offload));
}

// Local sequences have no exchange but the first, "ring"; groups that swap rows for heads (exchange 2) tile their ring.
bool exchange_fits(int64_t exchange, int64_t head_ranks, int64_t ring) {
    if (exchange == 2) {
        return head_ranks > 1 && ring % head_ranks == 0;
    }
    return head_ranks == 1 && (exchange == 0 || (exchange == 1 && ring > 1));
}

bool counts_fit(const Columns &columns, const Settings &settings) {
    if (settings.expert_group < 1 || settings.num_ranks % settings.expert_group) {
        return false;
    }
    int64_t count = 0;
    for (int64_t r = 0; r < columns.num_ranks; ++r) {
        const int64_t mine = columns.rank_offsets[r + 1] - columns.rank_offsets[r];
        if (mine < 1 || (settings.virtual_stages > 1 && mine % settings.stages) ||
            (r % settings.expert_group && mine != count)) {
            return false;
        }
        count = mine;
    }
    return true;
}

// Walks all pieces in order: each sequence comes once to each rank of its ring, ascending inside a micro-batch, and no
// micro-batch holds more than the capacity. Ranks ascend along the walk, so the next rank of a ring is known.
// Also finds whether every ring has one slot.
bool pieces_fit(const Columns &columns, const Settings &settings, const int64_t *ring_start,
                const std::vector<int64_t> &held, bool &same_slots) {
    std::vector<int64_t> next(ring_start, ring_start + columns.num_sequences);
    std::vector<int64_t> slot_of(static_cast<std::size_t>(settings.stages > 1 ? columns.num_sequences : 0), -1);
    same_slots = true;
    for (int64_t r = 0; r < columns.num_ranks; ++r) {
        for (int64_t m = columns.rank_offsets[r]; m < columns.rank_offsets[r + 1]; ++m) {
            int64_t before = -1, tokens = 0;
            for (int64_t i = columns.microbatch_offsets[m]; i < columns.microbatch_offsets[m + 1]; ++i) {
                const int64_t s = columns.piece_sequence[i];
                if (s <= before || s >= columns.num_sequences || next[s] != r) {
                    return false;
                }
                before = s;
                tokens += held[s];
                ++next[s];
                if (settings.stages > 1) {
                    const int64_t slot = m - columns.rank_offsets[r];
                    same_slots = same_slots && (slot_of[s] < 0 || slot_of[s] == slot);
                    slot_of[s] = slot;
                }
            }
            if (tokens > settings.capacity) {
                return false;
            }
        }
    }
    for (int64_t s = 0; s < columns.num_sequences; ++s) {
        if (next[s] != ring_start[s] + columns.ring_size[s]) {
            return false;
        }
    }
    return true;
}

// Without a pipeline: would all ranks come to their end?
bool all_end(const Columns &columns) {
    const Groups groups = find_groups(columns);
    const std::vector<int64_t> nothing(static_cast<std::size_t>(columns.num_microbatches), 0);
    return !groups.tied &&
           !ends_without_pipeline(columns, groups, nothing.data(), nothing.data()).empty();
}

// SOUND, BROKEN, or UNDECIDED: a pipeline whose rings have different slots on their ranks, or numbers out of range.
int check(int64_t num_ranks, int64_t capacity, int64_t pad_multiple, Int64View lengths, Int64View ring_start,
          Int64View ring_size, Float64View offload, Int64View rank_offsets, Int64View microbatch_offsets,
          Int64View piece_sequence, Int64View exchange, Int64View head_ranks, int64_t stages, int64_t virtual_stages,
          int64_t expert_group) {
    nb::gil_scoped_release unlocked;
    const Settings settings{num_ranks, capacity, pad_multiple, stages, virtual_stages, expert_group};
    const std::size_t num = lengths.shape(0);
    if (num_ranks < 1 || capacity < 1 || pad_multiple < 2 || pad_multiple % 2 || ring_start.shape(0) != num ||
        ring_size.shape(0) != num || offload.shape(0) != num || exchange.shape(0) != num ||
        head_ranks.shape(0) != num || microbatch_offsets.shape(0) == 0 ||
        rank_offsets.shape(0) != static_cast<std::size_t>(num_ranks) + 1) {
        return BROKEN;
    }
    if (num_ranks >= LIMIT || pad_multiple >= LIMIT || stages < 1 || virtual_stages < 1) {
        return UNDECIDED;
    }
    const int64_t num_microbatches = static_cast<int64_t>(microbatch_offsets.shape(0)) - 1;
    if (!rises(rank_offsets, num_microbatches) ||
        !rises(microbatch_offsets, static_cast<int64_t>(piece_sequence.shape(0)))) {
        return BROKEN;
    }
    std::vector<int64_t> held(num);
    for (std::size_t s = 0; s < num; ++s) {
        if (lengths(s) < 1 || ring_size(s) < 1 || ring_size(s) > num_ranks || ring_start(s) < 0 ||
            ring_start(s) > num_ranks - ring_size(s) || !(offload(s) >= 0 && offload(s) <= 1) || // a NaN is wrong too
            !exchange_fits(exchange(s), head_ranks(s), ring_size(s))) {
            return BROKEN;
        }
        if (lengths(s) >= LIMIT) {
            return UNDECIDED;
        }
        held[s] = held_tokens(lengths(s), ring_size(s), pad_multiple, offload(s));
    }
    const Columns columns{num_ranks,
                          num_microbatches,
                          static_cast<int64_t>(num),
                          rank_offsets.data(),
                          microbatch_offsets.data(),
                          piece_sequence.data(),
                          ring_size.data()};
    bool same_slots = true;
    // That no rank meets more than four others along rings needs no look at the plan: neighbours are two ranks apart.
    if (!counts_fit(columns, settings) || !pieces_fit(columns, settings, ring_start.data(), held, same_slots)) {
        return BROKEN;
    }
    if (stages > 1) {
        return same_slots ? SOUND : UNDECIDED;
    }
    return all_end(columns) ? SOUND : BROKEN;
}

// When each node ends, -1 if it never runs; twin: run_python of planner/graph.py.
Int64Array run_graph(Int64View queue_offsets, Int64View queue_nodes, Int64View edge_from, Int64View edge_to,
                     Int64View duration) {
    const int64_t num = static_cast<int64_t>(duration.shape(0));
    const auto require = [&](const Int64View &nodes) {
        for (std::size_t i = 0; i < nodes.shape(0); ++i) {
            if (nodes(i) < 0 || nodes(i) >= num) {
                throw std::invalid_argument("node " + std::to_string(nodes(i)) + " is not in the graph");
            }
        }
    };
    require(queue_nodes), require(edge_from), require(edge_to);
    if (edge_from.shape(0) != edge_to.shape(0) || !rises(queue_offsets, static_cast<int64_t>(queue_nodes.shape(0)))) {
        throw std::invalid_argument("edges or queues of the graph do not fit together");
    }
    std::vector<int64_t> ended(static_cast<std::size_t>(num), -1);
    {
        nb::gil_scoped_release unlocked;
        std::vector<int64_t> waits(static_cast<std::size_t>(num), 0), ready_at(waits), ready;
        std::vector<int64_t> first(static_cast<std::size_t>(num) + 1, 0); // into later
        std::vector<bool> head(queue_nodes.shape(0) + 1, false);
        for (std::size_t q = 0; q < queue_offsets.shape(0); ++q) {
            head[queue_offsets(q)] = true;
        }
        const auto each_link = [&](auto &&visit) { // who hears of a node's end: next nodes of its queues, and edges
            for (std::size_t i = 1; i < queue_nodes.shape(0); ++i) {
                if (!head[i]) {
                    visit(queue_nodes(i - 1), queue_nodes(i));
                }
            }
            for (std::size_t e = 0; e < edge_from.shape(0); ++e) {
                visit(edge_from(e), edge_to(e));
            }
        };
        each_link([&](int64_t from, int64_t to) { ++first[from + 1], ++waits[to]; });
        for (int64_t node = 0; node < num; ++node) {
            first[node + 1] += first[node];
        }
        std::vector<int64_t> later(static_cast<std::size_t>(first[num])), at(first);
        each_link([&](int64_t from, int64_t to) { later[at[from]++] = to; });
        std::vector<bool> queued(static_cast<std::size_t>(num), false);
        for (std::size_t i = 0; i < queue_nodes.shape(0); ++i) {
            const int64_t node = queue_nodes(i);
            if (head[i] && waits[node] == 0 && !queued[node]) {
                queued[node] = true;
                ready.push_back(node);
            }
        }
        while (!ready.empty()) {
            const int64_t node = ready.back();
            ready.pop_back();
            ended[node] = ready_at[node] + duration(node);
            for (int64_t i = first[node]; i < first[node + 1]; ++i) {
                ready_at[later[i]] = std::max(ready_at[later[i]], ended[node]);
                if (--waits[later[i]] == 0) {
                    ready.push_back(later[i]);
                }
            }
        }
    }
    return to_numpy(std::move(ended));
}

} // namespace

void bind_check(nb::module_ &module) {
    module.def("check", &check, nb::arg("num_ranks"), nb::arg("capacity"), nb::arg("pad_multiple"), nb::arg("lengths"),
               nb::arg("ring_start"), nb::arg("ring_size"), nb::arg("offload"), nb::arg("rank_offsets"),
               nb::arg("microbatch_offsets"), nb::arg("piece_sequence"), nb::arg("exchange"), nb::arg("head_ranks"),
               nb::arg("stages"), nb::arg("virtual_stages"), nb::arg("expert_group"));
    module.def("run_graph", &run_graph, nb::arg("queue_offsets"), nb::arg("queue_nodes"), nb::arg("edge_from"),
               nb::arg("edge_to"), nb::arg("duration"));
}
