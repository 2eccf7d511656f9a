// The long rings, few and hard to place: several ways are tried. Twin: megatron_hdp/planner/coarse.py.

#include "skyline.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace hdp {
namespace {

using Key = std::tuple<Wide, Wide, Int, Int, Int>;

struct Place {
    Key key;
    Int start = 0, size = 0, begin = 0, time = 0;
    Wide idle = 0;
};

// Smallest ring that ends within `room`, as an index of `times`; -1 if none does.
Int narrowest(const Ints &times, Int room) {
    if (times.front() <= room) {
        return 0;
    }
    if (times.back() > room) {
        return -1;
    }
    Int low = 0, high = static_cast<Int>(times.size()) - 1; // times fall but for padding: any size found is checked
    while (low < high) {
        const Int middle = (low + high) / 2;
        (times[middle] <= room ? high : low) = times[middle] <= room ? middle : middle + 1;
    }
    return low;
}

// Walk the skyline from one segment to the right or to the left, and weigh rings that begin (end) there.
class Walk {
  public:
    Walk(const Cost &cost, const std::vector<Segment> &segments, const Choices &ring, const Trial &trial)
        : cost_(cost), segments_(segments), ring_(ring), trial_(trial) {}

    Place best() {
        each_anchor([this](std::size_t anchor, int step) { within(anchor, step); });
        if (place_.size == 0) { // no place ends by the target: the one that ends first
            each_anchor([this](std::size_t anchor, int step) { soonest(anchor, step); });
        }
        return place_;
    }

  private:
    template <class Visit> void each_anchor(const Visit &visit) {
        for (std::size_t anchor = 0; anchor < segments_.size(); ++anchor) {
            visit(anchor, 1);
            visit(anchor, -1);
        }
    }

    // The lowest place from `anchor` on where some ring ends by the target.
    void within(std::size_t anchor, int step) {
        Int width = 0, height = -1, smallest = 0;
        Wide idle_before = 0;
        for (std::size_t at = anchor; at < segments_.size(); at += step) { // below 0 wraps to a large number
            const Segment &segment = segments_[at];
            if (segment.height > height) {
                idle_before += Wide{width} * (segment.height - height);
                height = segment.height;
                const Int k = narrowest(ring_.times, trial_.target - height);
                if (k < 0) {
                    return;
                }
                smallest = ring_.smallest + k;
            }
            if (place_.size > 0 && idle_before > std::get<0>(place_.key)) {
                return; // a place costs its idling at least
            }
            const Int before = width;
            width += segment.width;
            if (smallest <= width) {
                const auto weigh = [&](Int size) {
                    consider(anchor, step, size, height, idle_before + Wide{size - before} * (height - segment.height),
                             width - size, false);
                };
                weigh(smallest);
                const Int hiding = std::min(width, ring_.widest), widest = std::min(width, ring_.most());
                if (hiding > smallest) {
                    weigh(hiding);
                }
                if (widest > smallest && widest != hiding) {
                    weigh(widest);
                }
                return;
            }
            idle_before += Wide{segment.width} * (height - segment.height);
        }
    }

    void soonest(std::size_t anchor, int step) {
        Int width = 0, height = 0;
        Wide area = 0;
        for (std::size_t at = anchor; at < segments_.size(); at += step) {
            const Segment &segment = segments_[at];
            height = std::max(height, segment.height);
            if (place_.size > 0 && height + ring_.fastest > std::get<0>(place_.key)) {
                return;
            }
            const Int before = width;
            width += segment.width;
            if (ring_.smallest <= width) {
                const Int size = std::min(width, ring_.most());
                if (size > before) {
                    const Wide idle = Wide{height} * before - area + Wide{size - before} * (height - segment.height);
                    consider(anchor, step, size, height, idle, width - size, true);
                }
            }
            area += Wide{segment.width} * segment.height;
        }
    }

    void consider(std::size_t anchor, int step, Int size, Int height, Wide idle, Int left, bool late) {
        const Segment &segment = segments_[anchor];
        const Int start = step > 0 ? segment.start : segment.start + segment.width - size;
        const bool near = size <= cost_.ranks_per_node && cost_.tier(start, size) == across_nodes;
        const Int time = near ? time_at(cost_, ring_.length, size, start) : ring_.times[size - ring_.smallest];
        Key key;
        if (late) {
            key = {height + time, idle, left, size, start};
        } else {
            if (height + time > trial_.target) {
                return;
            }
            const Wide extra = std::max<Wide>(Wide{size} * time - ring_.work(), 0);
            const Wide score = idle + extra + left * (Wide{time} * trial_.share >> 10);
            key = trial_.tie == 0   ? Key{score, height, left, size, start}
                  : trial_.tie == 1 ? Key{score, -height, left, size, start}
                                    : Key{score, left, height, size, start};
        }
        if (place_.size == 0 || key < place_.key) {
            place_ = {key, start, size, height, time, idle};
        }
    }

    const Cost &cost_;
    const std::vector<Segment> &segments_;
    const Choices &ring_;
    const Trial &trial_;
    Place place_;
};

// Put `place` on top of the skyline; neighbours of equal height become one segment.
void raise(std::vector<Segment> &segments, const Place &place) {
    const Int end = place.start + place.size;
    const auto ends_after = [](Int rank, const Segment &segment) { return rank < segment.start + segment.width; };
    const auto first = std::upper_bound(segments.begin(), segments.end(), place.start, ends_after);
    const auto last = std::upper_bound(first, segments.end(), end - 1, ends_after);
    const Segment low = *first, high = *last;
    std::array<Segment, 3> parts;
    std::size_t count = 0;
    if (low.start < place.start) {
        parts[count++] = {low.start, place.start - low.start, low.height};
    }
    parts[count++] = {place.start, place.size, place.begin + place.time};
    if (high.start + high.width > end) {
        parts[count++] = {end, high.start + high.width - end, high.height};
    }
    const std::size_t at = static_cast<std::size_t>(first - segments.begin());
    const std::size_t covered = static_cast<std::size_t>(last - first) + 1, kept = std::min(covered, count);
    std::copy(parts.begin(), parts.begin() + kept, first);
    if (count > covered) {
        segments.insert(segments.begin() + at + kept, parts.begin() + kept, parts.begin() + count);
    } else {
        segments.erase(segments.begin() + at + kept, segments.begin() + at + covered);
    }
    const auto merge = [&](std::size_t index) { // with the segment to its right
        if (index + 1 < segments.size() && segments[index].height == segments[index + 1].height) {
            segments[index].width += segments[index + 1].width;
            segments.erase(segments.begin() + index + 1);
        }
    };
    const std::size_t own = at + (low.start < place.start);
    merge(own);
    if (own > 0) {
        merge(own - 1);
    }
}

} // namespace

// Up to the widest ring that hides its transfers; where that lasts longer than the target, up to the fastest ring.
void set_times(const Cost &cost, Choices &ring, Int num_ranks, Int target) {
    Int last = ring.widest, least = best_time(cost, ring.length, last);
    if (least > target) {
        for (Int size = last; size < num_ranks;) {
            size = std::min(num_ranks, size + std::max<Int>(1, size / 32));
            const Int time = best_time(cost, ring.length, size);
            if (time < least) {
                least = time;
                last = size;
            }
        }
    }
    ring.times.reserve(static_cast<std::size_t>(last - ring.smallest + 1));
    for (Int size = ring.smallest; size <= last; ++size) {
        ring.times.push_back(best_time(cost, ring.length, size));
    }
    ring.fastest = *std::min_element(ring.times.begin(), ring.times.end());
}

// Coarse rings in `order`, up to the first that ends at `give_up` or later.
Coarse place_coarse(const Cost &cost, const std::vector<Choices> &rings, const Ints &order, Int num_ranks,
                    const Trial &trial, Int give_up) {
    Coarse result;
    result.segments = {{0, num_ranks, 0}};
    for (const Int index : order) {
        const Place place = Walk(cost, result.segments, rings[index], trial).best();
        raise(result.segments, place);
        result.placed.ring.push_back(index);
        result.placed.start.push_back(place.start);
        result.placed.size.push_back(place.size);
        result.placed.begin.push_back(place.begin);
        result.placed.time.push_back(place.time);
        result.idle += place.idle;
        result.end = std::max(result.end, place.begin + place.time);
        if (result.end >= give_up) {
            return result;
        }
    }
    for (const Segment &segment : result.segments) {
        result.area += Wide{segment.width} * segment.height;
    }
    return result;
}

} // namespace hdp
