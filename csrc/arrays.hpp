// Arrays that cross the border between numpy and C++.

#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

using Int64View = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Float64View = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64Array = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

inline Int64Array to_numpy(std::vector<std::int64_t> &&values) {
    auto *owned = new std::vector<std::int64_t>(std::move(values));
    nb::capsule owner(owned, [](void *p) noexcept { delete static_cast<std::vector<std::int64_t> *>(p); });
    return Int64Array(owned->data(), {owned->size()}, owner);
}
