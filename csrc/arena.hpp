// Where the tensors that left a device lie in one block of host memory. Twin: megatron_hdp/offload/allocator.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

namespace hdp {

// Hands out bytes of one block by best fit: the smallest free block that is large enough, the lowest of equals. Nothing
// grows, and nothing is kept by shape. Every call takes O(log n) for n blocks; equal calls give equal offsets.
class Arena {
  public:
    // Two cache lines and more, so that no two tensors share one, and the largest payload of a PCIe packet.
    static constexpr std::int64_t alignment = 256;

    explicit Arena(std::int64_t bytes);

    // Offset of `bytes` bytes, a multiple of `alignment`; nothing if no free block is that large.
    std::optional<std::int64_t> allocate(std::int64_t bytes);
    // Gives back what `allocate` handed out at `offset`, merged with free neighbours.
    void free(std::int64_t offset);

    std::int64_t bytes() const { return bytes_; }
    // Bytes handed out, each rounded up to `alignment`.
    std::int64_t bytes_in_use() const { return in_use_; }
    std::int64_t high_water() const { return high_water_; }
    std::int64_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
    void reset_high_water() { high_water_ = in_use_; }

  private:
    void insert_free(std::int64_t offset, std::int64_t size);

    std::int64_t bytes_;
    std::int64_t in_use_ = 0;
    std::int64_t high_water_ = 0;
    std::map<std::int64_t, std::int64_t> used_;                    // offset to size
    std::map<std::int64_t, std::int64_t> free_;                    // offset to size
    std::set<std::pair<std::int64_t, std::int64_t>> by_size_;      // (size, offset) of the same blocks
};

// A private mapping of zeroed, touched pages, on the NUMA node of the CPU that made it where the kernel agrees.
class HostMemory {
  public:
    explicit HostMemory(std::size_t bytes);
    ~HostMemory();
    HostMemory(const HostMemory &) = delete;
    HostMemory &operator=(const HostMemory &) = delete;

    std::uint8_t *data() const { return data_; }
    std::size_t size() const { return size_; }
    // The preferred node, or -1 if the kernel knows none or refused.
    int node() const { return node_; }

  private:
    void prefer_own_node();
    void touch();

    std::uint8_t *data_ = nullptr;
    std::size_t size_ = 0;
    int node_ = -1;
};

} // namespace hdp
