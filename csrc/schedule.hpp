// Order of operations of one column on one stage. Twin: megatron_hdp/planner/schedule.py.

#pragma once

#include <algorithm>
#include <cstdint>

constexpr int FORWARD = 0;

struct Position {
    int phase;
    std::int64_t k; // the k-th op of its phase
};

// What a stage runs at position p, 0 .. 2 total - 1, when `ahead` forward ops come before its first pair.
inline Position position(std::int64_t p, std::int64_t ahead, std::int64_t total) {
    if (p < ahead) {
        return {FORWARD, p};
    }
    if (p >= 2 * total - ahead) {
        return {1, p - total};
    }
    const std::int64_t paired = p - ahead;
    return paired % 2 == 0 ? Position{FORWARD, ahead + paired / 2} : Position{1, paired / 2};
}

inline std::int64_t warmup(std::int64_t count, std::int64_t stage, std::int64_t stages, std::int64_t virtual_stages) {
    if (virtual_stages == 1) {
        return std::min(stages - stage - 1, count);
    }
    return std::min(2 * (stages - stage - 1) + (virtual_stages - 1) * stages, count * virtual_stages);
}
