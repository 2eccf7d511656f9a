// When each rank is done where a ring has the same slot on all its ranks.
//
// All ranks then run the same operations in the same order as far as they go, so that the operations of the rank that
// has most need to be put in order only once, and each is a sweep over ranks. Ranks that run together are neighbours.

#include "lockstep.hpp"

#include <algorithm>

#include "schedule.hpp"

namespace hdp {
namespace {

// Neighbouring ranks that have a slot; if `tied` they start it together.
struct Run {
    Int first, end;
    bool tied;
};

struct Runs {
    std::vector<Run> runs;
    std::vector<std::size_t> first; // of each slot, into runs; [num_slots + 1]
};

void raise(Int *values, const Run &run) {
    std::fill(values + run.first, values + run.end, *std::max_element(values + run.first, values + run.end));
}

// The runs of every slot; raises the times of tied ones.
Runs find_runs(Grid &grid) {
    Runs result;
    for (Int slot = 0; slot < grid.num_slots; ++slot) {
        result.first.push_back(result.runs.size());
        const std::size_t row = static_cast<std::size_t>(slot * grid.num_ranks);
        const char *is_tied = grid.is_tied.data() + row;
        bool open = false; // the last run is untied and ends at this rank
        for (Int rank = 0; rank < grid.num_ranks;) {
            if (is_tied[rank]) {
                Int end = rank + 1;
                while (is_tied[end - 1]) {
                    ++end;
                }
                result.runs.push_back({rank, end, true});
                raise(grid.forward.data() + row, result.runs.back());
                raise(grid.backward.data() + row, result.runs.back());
                rank = end;
                open = false;
                continue;
            }
            const bool present = grid.counts[rank] > slot;
            if (present && open) {
                ++result.runs.back().end;
            } else if (present) {
                result.runs.push_back({rank, rank + 1, false});
            }
            open = present;
            ++rank;
        }
    }
    result.first.push_back(result.runs.size());
    return result;
}

struct Op {
    Int stage, slot;
    int phase;
};

// The operations of a column of `count` micro-batches on all its stages, each after those that it waits for.
std::vector<Op> ordered_ops(Int count, const Layout &layout) {
    const Int stages = layout.stages, parts = layout.virtual_stages, places = stages * parts, total = count * parts;
    Ints turn(static_cast<std::size_t>(stages), 0);
    Ints done(static_cast<std::size_t>(count), 0); // operations of each micro-batch: they are a chain of 2 x places
    std::vector<Op> ops;
    ops.reserve(static_cast<std::size_t>(2 * count * places));
    for (std::size_t before = 0; ops.size() < ops.capacity(); before = ops.size()) {
        for (Int stage = 0; stage < stages; ++stage) {
            const Int ahead = warmup(count, stage, stages, parts);
            for (; turn[stage] < 2 * total; ++turn[stage]) {
                const Position at = position(turn[stage], ahead, total);
                const Int rest = at.k % places, slot = at.k / places * stages + rest % stages;
                const Int place = (at.phase == FORWARD ? rest / stages : parts - 1 - rest / stages) * stages + stage;
                if (done[slot] != (at.phase == FORWARD ? place : 2 * places - 1 - place)) {
                    break;
                }
                ++done[slot];
                ops.push_back({stage, slot, at.phase});
            }
        }
        if (ops.size() == before) {
            break;
        }
    }
    return ops;
}

// One operation on all ranks that have it: `free` is when their stage is free, `ready` when their micro-batch is there.
void run_op(Int *free, Int *ready, const Int *time, const Run *run, const Run *end) {
    for (; run < end; ++run) {
        if (run->tied) {
            Int start = 0;
            for (Int rank = run->first; rank < run->end; ++rank) {
                start = std::max(start, std::max(free[rank], ready[rank]));
            }
            const Int done = start + time[run->first];
            std::fill(free + run->first, free + run->end, done);
            std::fill(ready + run->first, ready + run->end, done);
            continue;
        }
        for (Int rank = run->first; rank < run->end; ++rank) {
            free[rank] = ready[rank] = std::max(free[rank], ready[rank]) + time[rank];
        }
    }
}

} // namespace

Ints lockstep_ends(Grid &grid, const Layout &layout) {
    const Runs runs = find_runs(grid);
    const Int num_ranks = grid.num_ranks;
    Ints free(static_cast<std::size_t>(layout.stages * num_ranks), 0);
    if (layout.stages == 1) { // a micro-batch's forward and backward are one
        Ints ready(static_cast<std::size_t>(num_ranks), 0);
        for (std::size_t i = 0; i < grid.forward.size(); ++i) {
            grid.forward[i] += grid.backward[i];
        }
        for (Int slot = 0; slot < grid.num_slots; ++slot) {
            run_op(free.data(), ready.data(), grid.forward.data() + slot * num_ranks, &runs.runs[runs.first[slot]],
                   runs.runs.data() + runs.first[slot + 1]);
        }
        return free;
    }
    for (Ints *times : {&grid.forward, &grid.backward}) {
        for (Int &time : *times) {
            time /= layout.virtual_stages;
        }
    }
    Ints ready(grid.forward.size(), 0);
    for (const Op &op : ordered_ops(grid.num_slots, layout)) {
        const Int row = op.slot * num_ranks;
        run_op(free.data() + op.stage * num_ranks, ready.data() + row,
               (op.phase == FORWARD ? grid.forward : grid.backward).data() + row,
               runs.runs.data() + runs.first[op.slot], runs.runs.data() + runs.first[op.slot + 1]);
    }
    Ints ends(free.begin(), free.begin() + num_ranks);
    for (Int stage = 1; stage < layout.stages; ++stage) {
        for (Int rank = 0; rank < num_ranks; ++rank) {
            ends[rank] = std::max(ends[rank], free[stage * num_ranks + rank]);
        }
    }
    return ends;
}

} // namespace hdp
