// Best fit into bins of equal capacity.

#pragma once

#include <cstdint>
#include <vector>

namespace hdp {

// Bin of every item by best fit; sizes must fall and fit into the capacity.
std::vector<std::int64_t> best_fit_sorted(const std::vector<std::int64_t> &sizes, std::int64_t capacity);

} // namespace hdp
