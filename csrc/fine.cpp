// The many shorter rings: the lowest segment takes the longest ring that it holds. Twin: megatron_hdp/planner/fine.py.

#include "skyline.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>

namespace hdp {
namespace {

constexpr Int wall = std::numeric_limits<Int>::max();

// Rings still to place, by smallest size and then length, both falling.
class Waiting {
  public:
    Waiting(const std::vector<Choices> &rings, std::size_t first) : rings_(rings), next_(rings.size() + 1) {
        for (std::size_t i = 0; i < next_.size(); ++i) {
            next_[i] = i < first ? first : i;
        }
        left_ = rings.size() - first;
    }
    bool empty() const { return left_ == 0; }

    // The first ring that needs at most `width` ranks; rings.size() if none does.
    std::size_t longest(Int width) {
        const auto fits = [](const Choices &ring, Int ranks) { return ring.smallest > ranks; };
        const auto found = std::lower_bound(rings_.begin(), rings_.end(), width, fits);
        return root(static_cast<std::size_t>(found - rings_.begin()));
    }

    void take(std::size_t ring) {
        next_[ring] = ring + 1;
        --left_;
    }

  private:
    std::size_t root(std::size_t i) {
        while (next_[i] != i) {
            next_[i] = next_[next_[i]];
            i = next_[i];
        }
        return i;
    }
    const std::vector<Choices> &rings_;
    std::vector<std::size_t> next_;
    std::size_t left_;
};

// The skyline as a linked list, with its lowest segment at hand.
class Hills {
  public:
    Hills(const std::vector<Segment> &segments) : segments_(segments) {
        const Int count = static_cast<Int>(segments.size());
        for (Int i = 0; i < count; ++i) {
            before_.push_back(i - 1);
            after_.push_back(i + 1 < count ? i + 1 : -1);
            push(i);
        }
    }

    Int lowest() {
        while (true) {
            const auto [height, start, index] = heap_.top();
            if (segments_[index].width > 0 && segments_[index].height == height && segments_[index].start == start) {
                return index;
            }
            heap_.pop();
        }
    }
    const Segment &operator[](Int index) const { return segments_[index]; }
    Int height(Int index) const { return index < 0 ? wall : segments_[index].height; }
    Int before(Int index) const { return before_[index]; }
    Int after(Int index) const { return after_[index]; }

    // Set the height of a whole segment and merge it with neighbours of that height.
    void raise(Int index, Int height) {
        segments_[index].height = height;
        for (const Int other : {before_[index], after_[index]}) {
            if (other >= 0 && segments_[other].height == height) {
                segments_[index].start = std::min(segments_[index].start, segments_[other].start);
                segments_[index].width += segments_[other].width;
                unlink(other);
            }
        }
        push(index);
    }

    // Cut `index` so that [start, start + size) is a segment of its own, and return that one.
    Int cut(Int index, Int start, Int size) {
        const Segment whole = segments_[index];
        if (start > whole.start) {
            insert_before(index, {whole.start, start - whole.start, whole.height});
        }
        const Int right = whole.start + whole.width - start - size;
        segments_[index] = {start, size, whole.height};
        if (right > 0) {
            insert_after(index, {start + size, right, whole.height});
        }
        return index;
    }

  private:
    using Entry = std::tuple<Int, Int, Int>;
    void push(Int index) { heap_.emplace(segments_[index].height, segments_[index].start, index); }
    void unlink(Int index) {
        segments_[index].width = 0;
        if (before_[index] >= 0) {
            after_[before_[index]] = after_[index];
        }
        if (after_[index] >= 0) {
            before_[after_[index]] = before_[index];
        }
    }
    Int add(const Segment &segment, Int before, Int after) {
        const Int index = static_cast<Int>(segments_.size());
        segments_.push_back(segment);
        before_.push_back(before);
        after_.push_back(after);
        if (before >= 0) {
            after_[before] = index;
        }
        if (after >= 0) {
            before_[after] = index;
        }
        push(index);
        return index;
    }
    void insert_before(Int index, const Segment &segment) { add(segment, before_[index], index); }
    void insert_after(Int index, const Segment &segment) { add(segment, index, after_[index]); }

    std::vector<Segment> segments_;
    Ints before_, after_;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> heap_;
};

// Where in a segment a ring lies: inside a node if it can, else beside the higher neighbour.
Int position(const Cost &cost, const Hills &hills, Int index, Int size) {
    const Segment &segment = hills[index];
    const Int left = segment.start, right = segment.start + segment.width - size;
    const bool left_first = hills.height(hills.before(index)) >= hills.height(hills.after(index));
    const Int first = left_first ? left : right, second = left_first ? right : left;
    if (size > cost.ranks_per_node || cost.tier(first, size) == inside_node) {
        return first;
    }
    if (cost.tier(second, size) == inside_node) {
        return second;
    }
    const Int node = (left + cost.ranks_per_node - 1) / cost.ranks_per_node * cost.ranks_per_node;
    return node <= right ? node : first;
}

// The smallest ring of at most `limit` ranks that ends within `room`; if none does, what `late` says.
Int size_within(const Cost &cost, const Choices &ring, Int limit, Int room, Late late) {
    Int low = ring.smallest, high = std::min(limit, ring.widest);
    if (high <= low || best_time(cost, ring.length, low) <= room) {
        return low;
    }
    if (best_time(cost, ring.length, high) > room) {
        return late == Late::widest ? high : low;
    }
    while (low < high) {
        const Int middle = (low + high) / 2;
        (best_time(cost, ring.length, middle) <= room ? high : low) =
            best_time(cost, ring.length, middle) <= room ? middle : middle + 1;
    }
    return low;
}

} // namespace

void place_fine(const Cost &cost, const std::vector<Choices> &rings, std::size_t first, Int target, Late late,
                Coarse &coarse) {
    Waiting waiting(rings, first);
    Hills hills(coarse.segments);
    while (!waiting.empty()) {
        const Int index = hills.lowest();
        const Segment segment = hills[index];
        const std::size_t ring = waiting.longest(segment.width);
        if (ring == rings.size()) { // too narrow for all: its ranks wait for a neighbour
            hills.raise(index, std::min(hills.height(hills.before(index)), hills.height(hills.after(index))));
            continue;
        }
        waiting.take(ring);
        const Int size = size_within(cost, rings[ring], segment.width, target - segment.height, late);
        const Int start = position(cost, hills, index, size);
        const Int time = time_at(cost, rings[ring].length, size, start);
        hills.raise(hills.cut(index, start, size), segment.height + time);
        coarse.placed.ring.push_back(static_cast<Int>(ring));
        coarse.placed.start.push_back(start);
        coarse.placed.size.push_back(size);
        coarse.placed.begin.push_back(segment.height);
        coarse.placed.time.push_back(time);
    }
}

} // namespace hdp
