#include "sand.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "packing.hpp"

namespace hdp {
namespace {

constexpr std::array<Int, 12> exchange_shifts = {0, 1, 3, 7, 15, 31, 63, 127, 0, 5, 11, 23};
constexpr int most_idle = 2;          // rounds without an exchange before giving up
constexpr std::size_t few_items = 16; // a rank, on average, for fitting them anew
constexpr int most_fits = 4;
constexpr Int fit_share = 128;        // 1 / 128 over the goal is worth fitting, 1 / 512 is not
constexpr Int fitted_share = 512;

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

// What ranks run after their last ring: sequences may change places there. Indices of sequences, longest first.
struct Tails {
    std::vector<Ints> items;
    Ints all; // of all ranks
    Ints ends, loads, turns; // of the last ring, with the tail; number of rings
};

Tails tails_of(const Placement &placed, const Locals &locals, Int num_ranks, const Spread &spread) {
    const std::size_t n = static_cast<std::size_t>(num_ranks);
    Tails tails{std::vector<Ints>(n), {}, Ints(n, 0), {}, Ints(n, 0)};
    for (std::size_t i = 0; i < placed.ring.size(); ++i) {
        for (Int rank = placed.start[i]; rank < placed.start[i] + placed.size[i]; ++rank) {
            tails.ends[rank] = placed.begin[i] + placed.time[i];
            ++tails.turns[rank];
        }
    }
    for (std::size_t rank = 0; rank < placed.reserve.size(); ++rank) {
        tails.ends[rank] += placed.reserve[rank];
    }
    tails.loads = tails.ends;
    for (std::size_t item = 0; item < locals.time.size(); ++item) {
        const Int rank = spread.rank[item];
        if (spread.turn[item] == tails.turns[rank]) {
            tails.items[rank].push_back(static_cast<Int>(item));
            tails.all.push_back(static_cast<Int>(item));
            tails.loads[rank] += locals.time[item];
        }
    }
    return tails;
}

// Ranks by rising load, ties by rank.
Ints by_load(const Ints &loads) {
    Ints order(loads.size());
    std::iota(order.begin(), order.end(), Int{0});
    std::sort(order.begin(), order.end(), [&](Int a, Int b) {
        return std::pair(loads[a], a) < std::pair(loads[b], b);
    });
    return order;
}

// Exchange a sequence of `high` for a shorter one of `low`, or for none, so that both end as close as can be.
bool exchange(const Ints &times, Tails &tails, Int high, Int low) {
    Ints &more = tails.items[high], &less = tails.items[low];
    const Int gap = tails.loads[high] - tails.loads[low];
    Int best = gap; // what is left of the gap
    std::size_t give = more.size(), take = 0, from = 0;
    for (std::size_t a = 0; a < more.size() && best > 0; ++a) {
        const Int wanted = 2 * times[more[a]] - gap; // twice the time to take in return
        while (from < less.size() && 2 * times[less[from]] > wanted) {
            ++from;
        }
        for (std::size_t b = from - (from > 0); b <= std::min(from, less.size()); ++b) {
            const Int left = std::abs(wanted - (b < less.size() ? 2 * times[less[b]] : 0));
            if (left < best) {
                best = left;
                give = a;
                take = b;
            }
        }
    }
    if (give == more.size()) {
        return false;
    }
    const auto move = [&](Ints &source, std::size_t at, Ints &target, Int from_rank, Int to_rank) {
        const Int item = source[at];
        source.erase(source.begin() + static_cast<std::ptrdiff_t>(at));
        target.insert(std::lower_bound(target.begin(), target.end(), item), item);
        tails.loads[from_rank] -= times[item];
        tails.loads[to_rank] += times[item];
    };
    const bool back = take < less.size();
    const Int returned = back ? less[take] : 0;
    move(more, give, less, high, low);
    if (back) {
        move(less, static_cast<std::size_t>(std::lower_bound(less.begin(), less.end(), returned) - less.begin()), more,
             low, high);
    }
    return true;
}

// Ranks over the goal exchange with the least loaded ones, each round with others.
void exchange_tails(const Ints &times, Int goal, Tails &tails) {
    int idle = 0;
    for (const Int shift : exchange_shifts) {
        const Ints order = by_load(tails.loads);
        const Int n = static_cast<Int>(order.size()), half = n / 2;
        bool moved = false;
        Int k = 0;
        for (; k < half && tails.loads[order[n - 1 - k]] > goal; ++k) {
            moved |= exchange(times, tails, order[n - 1 - k], order[(k + shift) % half]);
        }
        idle = moved ? 0 : idle + 1;
        if (k == 0 || idle == most_idle) {
            return;
        }
    }
}

// Rooms in a row, of which the first that holds something is sought.
class Rooms {
  public:
    explicit Rooms(const Ints &rooms) {
        while (leaves_ < rooms.size()) {
            leaves_ *= 2;
        }
        most_.assign(2 * leaves_, -1);
        std::copy(rooms.begin(), rooms.end(), most_.begin() + static_cast<std::ptrdiff_t>(leaves_));
        for (std::size_t node = leaves_ - 1; node > 0; --node) {
            most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
        }
    }
    // The first room that holds `size`, which becomes that much smaller; -1 if none does.
    Int take(Int size) {
        if (most_[1] < size) {
            return -1;
        }
        std::size_t node = 1;
        while (node < leaves_) {
            node = 2 * node + (most_[2 * node] < size);
        }
        const Int room = static_cast<Int>(node - leaves_);
        most_[node] -= size;
        for (node /= 2; node > 0; node /= 2) {
            const Int most = std::max(most_[2 * node], most_[2 * node + 1]);
            if (most == most_[node]) {
                break;
            }
            most_[node] = most;
        }
        return room;
    }

  private:
    std::size_t leaves_ = 1;
    Ints most_;
};

// Where few sequences follow the last ring: first fit decreasing for falling ends (MULTIFIT: Coffman, Garey and
// Johnson 1978), ranks with the latest rings first.
void fit_tails(const Ints &times, Int goal, Tails &tails) {
    Int most = *std::max_element(tails.loads.begin(), tails.loads.end()), low = goal;
    const Ints &all = tails.all;
    if (most <= goal + goal / fit_share || all.size() > few_items * tails.ends.size()) {
        return;
    }
    Ints order = by_load(tails.ends), rooms(order.size()), rank_of(all.size());
    std::reverse(order.begin(), order.end());
    for (int i = 0; i < most_fits && most > low + low / fitted_share; ++i) {
        const Int end = low + (most - low) / 2;
        for (std::size_t r = 0; r < order.size(); ++r) {
            rooms[r] = std::max<Int>(end - tails.ends[order[r]], 0);
        }
        Rooms open(rooms);
        bool fit = true;
        for (std::size_t k = 0; k < all.size() && fit; ++k) {
            rank_of[k] = open.take(times[all[k]]);
            fit = rank_of[k] >= 0;
        }
        if (!fit) {
            low = end + 1;
            continue;
        }
        tails.loads = tails.ends;
        for (Ints &own : tails.items) {
            own.clear();
        }
        for (std::size_t k = 0; k < all.size(); ++k) {
            const Int rank = order[rank_of[k]];
            tails.items[rank].push_back(all[k]);
            tails.loads[rank] += times[all[k]];
        }
        most = *std::max_element(tails.loads.begin(), tails.loads.end());
    }
}

// Ranks whose last ring is the last of all its ranks and takes longer than the `longest` pack after it of each.
std::vector<bool> ranks_that_end_with_ring(const Placement &placed, const Ints &longest) {
    const LastRings last = last_rings(placed, static_cast<Int>(longest.size()));
    std::vector<bool> result(longest.size(), false);
    for (std::size_t i = 0; i < placed.ring.size(); ++i) {
        const auto after = longest.begin() + placed.start[i];
        if (last.of_all[i] && *std::max_element(after, after + placed.size[i]) < placed.time[i]) {
            std::fill_n(result.begin() + placed.start[i], placed.size[i], true);
        }
    }
    return result;
}

// Time of each rank's first pack of those after its last ring, which is full and has the longest sequences.
Ints first_packs_at_end(const Locals &locals, const Spread &spread, const Groups &cells, const Groups &own,
                        Int capacity) {
    Ints result(own.offsets.size() - 1, 0), tail, tokens;
    for (std::size_t rank = 0; rank < result.size(); ++rank) {
        tail.clear();
        tokens.clear();
        for (Int i = own.offsets[rank]; i < own.offsets[rank + 1]; ++i) {
            const Int item = own.items[i];
            if (spread.turn[item] == cells.offsets[rank + 1] - cells.offsets[rank]) {
                tail.push_back(item);
                tokens.push_back(locals.tokens[item]);
            }
        }
        const Ints bin = best_fit_sorted(tokens, capacity);
        for (std::size_t i = 0; i < bin.size(); ++i) {
            result[rank] += bin[i] == 0 ? locals.time[tail[i]] : 0;
        }
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
    for (std::size_t rank = 0; rank < placed.reserve.size(); ++rank) {
        ends[rank] += placed.reserve[rank];
    }
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

// Level what ranks run after their last ring, down to `goal` if that can be.
void level_locals(const Placement &placed, const Locals &locals, Int num_ranks, Int goal, Spread &spread) {
    if (spread.span <= goal) {
        return;
    }
    Tails tails = tails_of(placed, locals, num_ranks, spread);
    goal = std::max(goal, *std::max_element(tails.ends.begin(), tails.ends.end()));
    if (!tails.all.empty()) {
        goal = std::max(goal, locals.time[tails.all.front()]);
    }
    exchange_tails(locals.time, goal, tails);
    fit_tails(locals.time, goal, tails);
    for (Int rank = 0; rank < num_ranks; ++rank) {
        for (const Int item : tails.items[rank]) {
            spread.rank[item] = rank;
            spread.turn[item] = tails.turns[rank];
        }
    }
    spread.span = *std::max_element(tails.loads.begin(), tails.loads.end());
}

// A rank runs, for every turn, its local packs and then the ring; what runs last is long, see planner/sand.py. Pieces
// of a micro-batch ascend by sequence.
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
    const std::vector<bool> ends_with_ring =
        ranks_that_end_with_ring(placed, first_packs_at_end(locals, spread, cells, own, capacity));
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
            const std::size_t turn = static_cast<std::size_t>(spread.turn[own.items[i]]);
            by_turn[turn - (turn == num_turns && ends_with_ring[rank])].push_back(own.items[i]);
        }
        for (std::size_t turn = 0; turn <= num_turns; ++turn) {
            tokens.clear();
            for (const Int item : by_turn[turn]) {
                tokens.push_back(locals.tokens[item]);
            }
            const Ints bin = best_fit_sorted(tokens, capacity);
            const std::size_t num_bins =
                bin.empty() ? 0 : static_cast<std::size_t>(*std::max_element(bin.begin(), bin.end())) + 1;
            bins.resize(std::max(bins.size(), num_bins));
            for (std::size_t i = 0; i < bin.size(); ++i) {
                bins[bin[i]].push_back(locals.sequence[by_turn[turn][i]]);
            }
            for (std::size_t k = 0; k < num_bins; ++k) {
                const std::size_t b = turn == num_turns ? (k + 1) % num_bins : k; // the first one last of all
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
