// Longest paths over rings as rendezvous; twins: megatron_hdp/planner/graph.py and schedule.py.

#include "graph.hpp"
#include "schedule.hpp"

#include <algorithm>

namespace {

using std::int32_t;
using std::int64_t;

int32_t root_of(std::vector<int32_t> &parent, int32_t x) {
    while (parent[x] != x) {
        parent[x] = parent[parent[x]];
        x = parent[x];
    }
    return x;
}

// One run of the pipeline's graph. Node (g * places + place) * 2 + phase; the part `place` lies on stage place % stages.
class Pipeline {
  public:
    Pipeline(const Columns &columns, const Groups &groups, int64_t stages, int64_t virtual_stages)
        : columns_(columns), groups_(groups), stages_(stages), parts_(virtual_stages), places_(stages * virtual_stages),
          waits_(static_cast<std::size_t>(groups.count * places_ * 2)), ready_at_(waits_.size(), 0),
          turn_(static_cast<std::size_t>(columns.num_ranks * stages), 0), ends_(turn_.size(), 0) {
        for (int32_t g = 0; g < groups.count; ++g) {
            int32_t *waits = &waits_[static_cast<std::size_t>(g * places_ * 2)];
            for (int64_t i = 0; i < places_ * 2; ++i) {
                waits[i] = groups.size(g) + 1; // all members' stages, and the model part before
            }
            --waits[FORWARD]; // nothing comes before forward of the first part
        }
        int64_t most = 0;
        for (int64_t r = 0; r < columns.num_ranks; ++r) {
            most = std::max(most, columns.rank_offsets[r + 1] - columns.rank_offsets[r]);
        }
        slot_.resize(static_cast<std::size_t>(most * parts_));
        part_.resize(slot_.size());
        for (int64_t k = 0; k < most * parts_; ++k) {
            const int64_t rest = k % places_;
            slot_[k] = k / places_ * stages + rest % stages;
            part_[k] = rest / stages;
        }
    }

    std::vector<int64_t> run(const int64_t *forward, const int64_t *backward) {
        const std::vector<int64_t> duration[2] = {group_maximum(groups_, forward), group_maximum(groups_, backward)};
        for (int64_t q = 0; q < static_cast<int64_t>(turn_.size()); ++q) {
            arrive(q, 0);
        }
        std::size_t ran = 0;
        while (!ready_.empty()) {
            const int64_t node = ready_.back();
            ready_.pop_back();
            ++ran;
            const int phase = static_cast<int>(node & 1);
            const int64_t place = node / 2 % places_;
            const int64_t g = node / 2 / places_;
            const int64_t end = ready_at_[node] + duration[phase][g] / parts_;
            for (int32_t i = groups_.first[g]; i < groups_.first[g + 1]; ++i) {
                const int64_t q = groups_.rank[groups_.members[i]] * stages_ + place % stages_;
                ends_[q] = end;
                ++turn_[q];
                arrive(q, end);
            }
            if (phase == FORWARD) {
                reach(place + 1 < places_ ? node + 2 : node + 1, end);
            } else if (place > 0) {
                reach(node - 2, end);
            }
        }
        if (ran < waits_.size()) {
            return {};
        }
        std::vector<int64_t> result(static_cast<std::size_t>(columns_.num_ranks));
        for (int64_t r = 0; r < columns_.num_ranks; ++r) {
            result[r] = *std::max_element(&ends_[r * stages_], &ends_[r * stages_] + stages_);
        }
        return result;
    }

  private:
    // A stage of a rank comes to its next op.
    void arrive(int64_t q, int64_t time) {
        const int64_t r = q / stages_, stage = q % stages_;
        const int64_t count = columns_.rank_offsets[r + 1] - columns_.rank_offsets[r];
        const int64_t total = count * parts_;
        if (turn_[q] == 2 * total) {
            return;
        }
        const Position at = position(turn_[q], warmup(count, stage, stages_, parts_), total);
        const int64_t part = at.phase == FORWARD ? part_[at.k] : parts_ - 1 - part_[at.k];
        const int64_t g = groups_.group[columns_.rank_offsets[r] + slot_[at.k]];
        reach((g * places_ + part * stages_ + stage) * 2 + at.phase, time);
    }

    void reach(int64_t node, int64_t time) {
        ready_at_[node] = std::max(ready_at_[node], time);
        if (--waits_[node] == 0) {
            ready_.push_back(node);
        }
    }

    const Columns &columns_;
    const Groups &groups_;
    const int64_t stages_, parts_, places_;
    std::vector<int32_t> waits_;    // [nodes]
    std::vector<int64_t> ready_at_; // [nodes]
    std::vector<int64_t> turn_;     // [num_ranks * stages]
    std::vector<int64_t> ends_;     // [num_ranks * stages]
    std::vector<int64_t> slot_, part_;
    std::vector<int64_t> ready_;
};

} // namespace

Groups find_groups(const Columns &columns) {
    const int64_t num = columns.num_microbatches;
    std::vector<int32_t> parent(static_cast<std::size_t>(num));
    std::vector<int32_t> holder(static_cast<std::size_t>(columns.num_sequences), -1); // first micro-batch of each ring
    for (int64_t m = 0; m < num; ++m) {
        parent[m] = static_cast<int32_t>(m);
        for (int64_t i = columns.microbatch_offsets[m]; i < columns.microbatch_offsets[m + 1]; ++i) {
            const int64_t s = columns.piece_sequence[i];
            if (columns.ring_size[s] < 2) {
                continue;
            }
            if (holder[s] < 0) {
                holder[s] = static_cast<int32_t>(m);
                continue;
            }
            const int32_t a = root_of(parent, holder[s]), b = root_of(parent, static_cast<int32_t>(m));
            parent[std::max(a, b)] = std::min(a, b);
        }
    }
    Groups result;
    result.group.resize(static_cast<std::size_t>(num));
    result.rank.resize(static_cast<std::size_t>(num));
    std::vector<int32_t> size;
    size.reserve(static_cast<std::size_t>(num));
    for (int64_t r = 0; r < columns.num_ranks; ++r) {
        for (int64_t m = columns.rank_offsets[r]; m < columns.rank_offsets[r + 1]; ++m) {
            const int32_t root = root_of(parent, static_cast<int32_t>(m));
            if (root == m) {
                size.push_back(0);
            }
            result.group[m] = root == m ? result.count++ : result.group[root];
            ++size[result.group[m]];
            result.rank[m] = static_cast<int32_t>(r);
        }
    }
    result.first.assign(size.size() + 1, 0);
    for (std::size_t g = 0; g < size.size(); ++g) {
        result.first[g + 1] = result.first[g] + size[g];
    }
    result.members.resize(static_cast<std::size_t>(num));
    std::vector<int32_t> at(result.first.begin(), result.first.end() - 1);
    for (int64_t m = 0; m < num; ++m) {
        const int32_t g = result.group[m];
        const int32_t i = at[g]++;
        result.members[i] = static_cast<int32_t>(m);
        result.tied = result.tied || (i > result.first[g] && result.rank[result.members[i - 1]] == result.rank[m]);
    }
    return result;
}

std::vector<int64_t> group_maximum(const Groups &groups, const int64_t *values) {
    std::vector<int64_t> result(static_cast<std::size_t>(groups.count), 0);
    for (std::size_t m = 0; m < groups.group.size(); ++m) {
        int64_t &largest = result[groups.group[m]];
        largest = std::max(largest, values[m]);
    }
    return result;
}

std::vector<int64_t> ends_without_pipeline(const Columns &columns, const Groups &groups, const int64_t *forward,
                                           const int64_t *backward) {
    const std::vector<int64_t> ahead = group_maximum(groups, forward), back = group_maximum(groups, backward);
    std::vector<int32_t> arrived(static_cast<std::size_t>(groups.count), 0);
    std::vector<int64_t> time(static_cast<std::size_t>(columns.num_ranks), 0);
    std::vector<int64_t> next(columns.rank_offsets, columns.rank_offsets + columns.num_ranks); // micro-batch of a rank
    std::vector<int32_t> ready;
    const auto advance = [&](int64_t r) {
        for (; next[r] < columns.rank_offsets[r + 1]; ++next[r]) {
            const int32_t g = groups.group[next[r]];
            if (groups.size(g) > 1) {
                if (++arrived[g] == groups.size(g)) {
                    ready.push_back(g);
                }
                return;
            }
            time[r] += ahead[g] + back[g];
        }
    };
    for (int64_t r = 0; r < columns.num_ranks; ++r) {
        advance(r);
    }
    while (!ready.empty()) {
        const int32_t g = ready.back();
        ready.pop_back();
        int64_t end = 0;
        for (int32_t i = groups.first[g]; i < groups.first[g + 1]; ++i) {
            end = std::max(end, time[groups.rank[groups.members[i]]]);
        }
        end += ahead[g] + back[g];
        for (int32_t i = groups.first[g]; i < groups.first[g + 1]; ++i) {
            const int32_t r = groups.rank[groups.members[i]];
            time[r] = end;
            ++next[r];
            advance(r);
        }
    }
    for (int64_t r = 0; r < columns.num_ranks; ++r) {
        if (next[r] < columns.rank_offsets[r + 1]) {
            return {};
        }
    }
    return time;
}

std::vector<int64_t> ends_with_pipeline(const Columns &columns, const Groups &groups, const int64_t *forward,
                                        const int64_t *backward, int64_t stages, int64_t virtual_stages) {
    return Pipeline(columns, groups, stages, virtual_stages).run(forward, backward);
}
