// Where the tensors that left a device lie in one block of host memory. Twin: megatron_hdp/offload/allocator.py.

#include "arena.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#if !defined(_WIN32)
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

namespace nb = nanobind;

namespace hdp {

namespace {

std::int64_t rounded_up(std::int64_t bytes) { return (bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment; }

} // namespace

Arena::Arena(std::int64_t bytes) : bytes_(bytes / alignment * alignment) {
    if (bytes < alignment) {
        throw std::invalid_argument("an arena needs at least " + std::to_string(alignment) + " bytes, not " +
                                    std::to_string(bytes));
    }
    insert_free(0, bytes_);
}

std::optional<std::int64_t> Arena::allocate(std::int64_t bytes) {
    if (bytes < 1) {
        throw std::invalid_argument("cannot hand out " + std::to_string(bytes) + " bytes, must be at least 1");
    }
    if (bytes > bytes_) { // also keeps the rounding from overflowing
        return std::nullopt;
    }
    const std::int64_t wanted = rounded_up(bytes);
    const auto found = by_size_.lower_bound({wanted, 0});
    if (found == by_size_.end()) {
        return std::nullopt;
    }
    const auto [size, offset] = *found;
    by_size_.erase(found);
    free_.erase(offset);
    if (size > wanted) {
        insert_free(offset + wanted, size - wanted);
    }
    used_.emplace(offset, wanted);
    in_use_ += wanted;
    high_water_ = std::max(high_water_, in_use_);
    return offset;
}

void Arena::free(std::int64_t offset) {
    const auto found = used_.find(offset);
    if (found == used_.end()) {
        throw std::invalid_argument("nothing is handed out at offset " + std::to_string(offset));
    }
    std::int64_t size = found->second;
    used_.erase(found);
    in_use_ -= size;
    auto after = free_.lower_bound(offset);
    if (after != free_.end() && after->first == offset + size) {
        size += after->second;
        by_size_.erase({after->second, after->first});
        after = free_.erase(after);
    }
    if (after != free_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            offset = before->first;
            size += before->second;
            by_size_.erase({before->second, before->first});
            free_.erase(before);
        }
    }
    insert_free(offset, size);
}

void Arena::insert_free(std::int64_t offset, std::int64_t size) {
    free_.emplace(offset, size);
    by_size_.emplace(size, offset);
}

#if defined(_WIN32)

HostMemory::HostMemory(std::size_t) { throw std::runtime_error("this platform has no mmap"); }
HostMemory::~HostMemory() = default;
void HostMemory::prefer_own_node() {}
void HostMemory::touch() {}

#else

HostMemory::HostMemory(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page;
    void *data = size_ < bytes ? MAP_FAILED
                               : mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        throw std::runtime_error("mmap of " + std::to_string(bytes) + " bytes failed: " + std::strerror(errno));
    }
    data_ = static_cast<std::uint8_t *>(data);
#if defined(MADV_HUGEPAGE)
    madvise(data_, size_, MADV_HUGEPAGE); // fewer pages to fault in and to pin; refusal costs only time
#endif
    prefer_own_node();
    try {
        touch();
    } catch (...) {
        munmap(data_, size_);
        throw;
    }
}

HostMemory::~HostMemory() { munmap(data_, size_); }

void HostMemory::prefer_own_node() {
#if defined(__linux__) && defined(SYS_getcpu) && defined(SYS_mbind)
    constexpr int preferred = 1; // MPOL_PREFERRED of <numaif.h>, which comes with libnuma only
    constexpr unsigned long bits = 8 * sizeof(unsigned long);
    unsigned cpu = 0;
    unsigned node = 0;
    if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0) {
        return;
    }
    std::vector<unsigned long> mask(node / bits + 1, 0);
    mask[node / bits] |= 1UL << (node % bits);
    // The kernel looks at one bit less than it is told.
    if (syscall(SYS_mbind, data_, size_, preferred, mask.data(), mask.size() * bits + 1, 0) == 0) {
        node_ = static_cast<int>(node);
    }
#endif
}

// Writes to every page, so that memory that is not there shows now.
void HostMemory::touch() {
#if defined(MADV_POPULATE_WRITE)
    if (madvise(data_, size_, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    if (errno != EINVAL) { // EINVAL: a kernel before 5.14
        throw std::runtime_error("the kernel could not provide " + std::to_string(size_) +
                                 " bytes of memory: " + std::strerror(errno));
    }
#endif
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (std::size_t i = 0; i < size_; i += page) {
        static_cast<volatile std::uint8_t *>(data_)[i] = 0;
    }
}

#endif

} // namespace hdp

namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

// The mapping lives until the last array of it is gone.
Bytes host_bytes(const std::shared_ptr<hdp::HostMemory> &memory) {
    auto *kept = new std::shared_ptr<hdp::HostMemory>(memory);
    nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::shared_ptr<hdp::HostMemory> *>(p); });
    return Bytes(memory->data(), {memory->size()}, owner);
}

nb::tuple host_memory(std::int64_t bytes) {
    if (bytes < 1) {
        throw std::invalid_argument("cannot map " + std::to_string(bytes) + " bytes, must be at least 1");
    }
    std::shared_ptr<hdp::HostMemory> memory;
    {
        nb::gil_scoped_release unlocked;
        memory = std::make_shared<hdp::HostMemory>(static_cast<std::size_t>(bytes));
    }
    return nb::make_tuple(host_bytes(memory), memory->node());
}

} // namespace

void bind_arena(nb::module_ &module) {
    nb::set_leak_warnings(false); // an arena may live as long as the process: no leak to tell the user of
    nb::class_<hdp::Arena>(module, "Arena")
        .def(nb::init<std::int64_t>(), nb::arg("bytes"))
        .def("allocate", &hdp::Arena::allocate, nb::arg("bytes"))
        .def("free", &hdp::Arena::free, nb::arg("offset"))
        .def("reset_high_water", &hdp::Arena::reset_high_water)
        .def_prop_ro("bytes", &hdp::Arena::bytes)
        .def_prop_ro("bytes_in_use", &hdp::Arena::bytes_in_use)
        .def_prop_ro("high_water", &hdp::Arena::high_water)
        .def_prop_ro("largest_free", &hdp::Arena::largest_free);
    module.def("host_memory", &host_memory, nb::arg("bytes"));
}
