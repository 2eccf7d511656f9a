// The integers of csrc/cost.hpp for arrays, so that tests can hold them against megatron_hdp/cost/model.py.

#include <utility>
#include <vector>

#include "arrays.hpp"
#include "cost.hpp"

namespace {

// Arrays of equal size; phase is 0 forward, 1 backward, 2 total.
Int64Array cost_picoseconds(Int64View arguments, Int64View lengths, Int64View rings, Int64View tiers, int phase) {
    const hdp::Cost cost = hdp::Cost::from(arguments);
    if (rings.shape(0) != lengths.shape(0) || tiers.shape(0) != lengths.shape(0)) {
        throw std::invalid_argument("lengths, rings and tiers must have one size");
    }
    std::vector<std::int64_t> result(lengths.shape(0));
    for (std::size_t i = 0; i < result.size(); ++i) {
        result[i] = cost.picoseconds(lengths(i), rings(i), static_cast<int>(tiers(i)), static_cast<hdp::Phase>(phase));
    }
    return to_numpy(std::move(result));
}

// piece_tokens, tier (for rings from `starts`) one after the other, then the constants of the three phases.
Int64Array cost_plain(Int64View arguments, Int64View lengths, Int64View starts, Int64View rings) {
    const hdp::Cost cost = hdp::Cost::from(arguments);
    if (rings.shape(0) != lengths.shape(0) || starts.shape(0) != lengths.shape(0)) {
        throw std::invalid_argument("lengths, starts and rings must have one size");
    }
    std::vector<std::int64_t> result;
    for (std::size_t i = 0; i < lengths.shape(0); ++i) {
        result.push_back(cost.piece_tokens(lengths(i), rings(i)));
    }
    for (std::size_t i = 0; i < lengths.shape(0); ++i) {
        result.push_back(cost.tier(starts(i), rings(i)));
    }
    for (const auto phase : {hdp::Phase::forward, hdp::Phase::backward, hdp::Phase::total}) {
        result.push_back(cost.microbatch_picoseconds(phase));
    }
    return to_numpy(std::move(result));
}

} // namespace

void bind_cost(nb::module_ &module) {
    module.def("cost_picoseconds", &cost_picoseconds, nb::arg("arguments"), nb::arg("lengths"), nb::arg("rings"),
               nb::arg("tiers"), nb::arg("phase"));
    module.def("cost_plain", &cost_plain, nb::arg("arguments"), nb::arg("lengths"), nb::arg("starts"),
               nb::arg("rings"));
}
