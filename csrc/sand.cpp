#include "sand.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "packing.hpp"

namespace hdp {
namespace {

// What idles before rings: (room, rank, turn of the ring that ends the gap).
using Gap = std::tuple<Int, Int, Int>;

// Items of every group in their order, as offsets into one list.
struct Groups {
    Ints offsets, items;
};

Groups group_by(const Ints &group, Int num_groups) {
    Groups result;
    result.offsets.assign(static_cast<std::size_t>(num_groups + 1), 0);
    for (const Int g : group) {
        ++result.offsets[g + 1];
    }
    std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
    Ints next(result.offsets.begin(), result.offsets.end() - 1);
    result.items.resize(group.size());
    for (std::size_t item = 0; item < group.size(); ++item) {
        result.items[next[group[item]]++] = static_cast<Int>(item);
    }
    return result;
}

} // namespace

// Longest first into the tightest gap that holds it, else onto the rank that is done soonest (LPT, Graham 1969).
Spread spread_locals(const Placement &placed, const Locals &locals, Int num_ranks) {
    Ints ends(static_cast<std::size_t>(num_ranks), 0), turns(static_cast<std::size_t>(num_ranks), 0);
    const Int least = locals.time.empty() ? 1 : locals.time.back();
    std::vector<Gap> found;
    for (std::size_t i = 0; i < placed.ring.size(); ++i) {
        for (Int rank = placed.start[i]; rank < placed.start[i] + placed.size[i]; ++rank) {
            const Int room = placed.begin[i] - ends[rank];
            if (room >= least) {
                found.emplace_back(room, rank, turns[rank]);
            }
            ends[rank] = placed.begin[i] + placed.time[i];
            ++turns[rank];
        }
    }
    std::set<Gap> gaps(found.begin(), found.end());
    Loads loads(ends);
    Spread result;
    result.rank.resize(locals.time.size());
    result.turn.resize(locals.time.size());
    for (std::size_t item = 0; item < locals.time.size(); ++item) {
        const Int work = locals.time[item];
        if (!gaps.empty()) {
            const auto gap = gaps.lower_bound({work, -1, -1});
            if (gap != gaps.end()) {
                const auto [room, rank, turn] = *gap;
                gaps.erase(gap);
                if (room - work >= least) {
                    gaps.emplace(room - work, rank, turn);
                }
                result.rank[item] = rank;
                result.turn[item] = turn;
                continue;
            }
        }
        const Int rank = loads.least();
        loads.add(work);
        result.rank[item] = rank;
        result.turn[item] = turns[rank];
    }
    result.span = loads.most();
    return result;
}

// A rank runs, for every turn, its local packs and then the ring. Pieces of a micro-batch ascend by sequence.
Columns build_columns(const Ints &ring_sequence, const Placement &placed, const Locals &locals, const Spread &spread,
                      Int num_sequences, Int num_ranks, Int capacity) {
    Columns plan;
    plan.span = spread.span;
    plan.ring_start.assign(static_cast<std::size_t>(num_sequences), 0);
    plan.ring_size.assign(static_cast<std::size_t>(num_sequences), 1);
    Ints cell_rank, cell_ring;
    for (std::size_t i = 0; i < placed.ring.size(); ++i) {
        const Int sequence = ring_sequence[placed.ring[i]];
        plan.ring_start[sequence] = placed.start[i];
        plan.ring_size[sequence] = placed.size[i];
        for (Int rank = placed.start[i]; rank < placed.start[i] + placed.size[i]; ++rank) {
            cell_rank.push_back(rank);
            cell_ring.push_back(sequence);
        }
    }
    const Groups cells = group_by(cell_rank, num_ranks), own = group_by(spread.rank, num_ranks);
    plan.rank_offsets.push_back(0);
    plan.microbatch_offsets.push_back(0);
    plan.piece_sequence.reserve(cell_rank.size() + locals.sequence.size());
    std::vector<Ints> by_turn, bins;
    Ints tokens;
    for (Int rank = 0; rank < num_ranks; ++rank) {
        const Int *cell = cells.items.data() + cells.offsets[rank];
        const std::size_t num_turns = static_cast<std::size_t>(cells.offsets[rank + 1] - cells.offsets[rank]);
        by_turn.resize(num_turns + 1);
        for (Ints &members : by_turn) {
            members.clear();
        }
        for (Int i = own.offsets[rank]; i < own.offsets[rank + 1]; ++i) {
            by_turn[spread.turn[own.items[i]]].push_back(own.items[i]);
        }
        for (std::size_t turn = 0; turn <= num_turns; ++turn) {
            tokens.clear();
            for (const Int item : by_turn[turn]) {
                tokens.push_back(locals.tokens[item]);
            }
            const Ints bin = best_fit_sorted(tokens, capacity);
            const std::size_t num_bins = bin.empty() ? 0 : static_cast<std::size_t>(*std::max_element(bin.begin(), bin.end())) + 1;
            bins.resize(std::max(bins.size(), num_bins));
            for (std::size_t i = 0; i < bin.size(); ++i) {
                bins[bin[i]].push_back(locals.sequence[by_turn[turn][i]]);
            }
            for (std::size_t b = 0; b < num_bins; ++b) {
                std::sort(bins[b].begin(), bins[b].end());
                plan.piece_sequence.insert(plan.piece_sequence.end(), bins[b].begin(), bins[b].end());
                plan.microbatch_offsets.push_back(static_cast<Int>(plan.piece_sequence.size()));
                for (const Int sequence : bins[b]) {
                    plan.ring_start[sequence] = rank;
                }
                bins[b].clear();
            }
            if (turn < num_turns) {
                plan.piece_sequence.push_back(cell_ring[cell[turn]]);
                plan.microbatch_offsets.push_back(static_cast<Int>(plan.piece_sequence.size()));
            }
        }
        if (static_cast<Int>(plan.microbatch_offsets.size()) - 1 == plan.rank_offsets.back()) { // at least one each
            plan.microbatch_offsets.push_back(static_cast<Int>(plan.piece_sequence.size()));
        }
        plan.rank_offsets.push_back(static_cast<Int>(plan.microbatch_offsets.size()) - 1);
    }
    return plan;
}

} // namespace hdp
