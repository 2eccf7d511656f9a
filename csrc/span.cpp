// When is each rank of a plan done? Twin: megatron_hdp/planner/span.py.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "graph.hpp"

namespace {

// Offsets rise from 0 to `total`, so that what they cut can be indexed.
void require_offsets(const char *name, const Int64View &offsets, std::size_t total) {
    const std::size_t size = offsets.shape(0);
    bool good = size > 0 && offsets(0) == 0 && offsets(size - 1) == static_cast<std::int64_t>(total);
    for (std::size_t i = 1; good && i < size; ++i) {
        good = offsets(i - 1) <= offsets(i);
    }
    if (!good) {
        throw std::invalid_argument(std::string(name) + " must rise from 0 to " + std::to_string(total));
    }
}

// Picoseconds [num_ranks], or an empty array if ranks would wait for each other forever or counts do not fit the
// interleaved schedule; the twin says why.
Int64Array rank_ends(Int64View rank_offsets, Int64View microbatch_offsets, Int64View piece_sequence,
                     Int64View ring_size, Int64View forward, Int64View backward, std::int64_t stages,
                     std::int64_t virtual_stages) {
    if (stages < 1 || virtual_stages < 1) {
        throw std::invalid_argument("stages and virtual_stages must be at least 1");
    }
    require_offsets("rank_offsets", rank_offsets, forward.shape(0));
    require_offsets("microbatch_offsets", microbatch_offsets, piece_sequence.shape(0));
    if (backward.shape(0) != forward.shape(0) || microbatch_offsets.shape(0) != forward.shape(0) + 1) {
        throw std::invalid_argument("forward, backward and microbatch_offsets are of different micro-batches");
    }
    for (std::size_t i = 0; i < piece_sequence.shape(0); ++i) {
        if (piece_sequence(i) < 0 || piece_sequence(i) >= static_cast<std::int64_t>(ring_size.shape(0))) {
            throw std::invalid_argument("piece " + std::to_string(i) + " is of no sequence");
        }
    }
    const Columns columns{static_cast<std::int64_t>(rank_offsets.shape(0)) - 1,
                          static_cast<std::int64_t>(forward.shape(0)),
                          static_cast<std::int64_t>(ring_size.shape(0)),
                          rank_offsets.data(),
                          microbatch_offsets.data(),
                          piece_sequence.data(),
                          ring_size.data()};
    std::vector<std::int64_t> ends;
    {
        nb::gil_scoped_release unlocked;
        bool even = true;
        for (std::int64_t r = 0; virtual_stages > 1 && r < columns.num_ranks; ++r) {
            even = even && (columns.rank_offsets[r + 1] - columns.rank_offsets[r]) % stages == 0;
        }
        const Groups groups = even ? find_groups(columns) : Groups{};
        if (even && !groups.tied) {
            ends = stages == 1 ? ends_without_pipeline(columns, groups, forward.data(), backward.data())
                               : ends_with_pipeline(columns, groups, forward.data(), backward.data(), stages,
                                                    virtual_stages);
        }
    }
    return to_numpy(std::move(ends));
}

} // namespace

void bind_span(nb::module_ &module) {
    module.def("rank_ends", &rank_ends, nb::arg("rank_offsets"), nb::arg("microbatch_offsets"),
               nb::arg("piece_sequence"), nb::arg("ring_size"), nb::arg("forward"), nb::arg("backward"),
               nb::arg("stages"), nb::arg("virtual_stages"));
}
