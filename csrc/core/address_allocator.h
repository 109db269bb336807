// Byte ranges of one pool: a doubly linked list in address order plus an index of the free ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace lmcache {

class Block;

// One range [offset, offset + size). Neighbours tile the pool; two free ranges never touch.
//
//   state     meaning                            who may leave it
//   free      listed in the free index           AddressAllocator::allocate
//   taken     handed out                         AddressAllocator::release
struct Extent {
  uint64_t offset = 0;
  uint64_t size = 0;
  bool free = true;
  Extent* prev = nullptr;
  Extent* next = nullptr;
  Block* owner = nullptr;  // set by the pool for extents that belong to a memory object
  uint64_t plan = 0;       // the eviction plan that last named this extent a candidate
};

// Best-fit allocator with coalescing. Requests well above the mean live size are placed at the high
// end of a range and the others at the low end, so that large objects keep each other's company.
// Not synchronised: the owner's lock guards every member.
class AddressAllocator {
 public:
  AddressAllocator(uint64_t capacity_bytes, uint64_t align_bytes);
  AddressAllocator(const AddressAllocator&) = delete;
  AddressAllocator& operator=(const AddressAllocator&) = delete;

  uint64_t aligned(uint64_t nbytes) const;
  // Returns null when no free range is large enough. `nbytes` must be aligned and positive.
  Extent* allocate(uint64_t nbytes);
  // The same from a free range that the caller names.
  Extent* allocate_from(Extent* range, uint64_t nbytes);
  void release(Extent* extent);
  // Adds bytes at the end of the address space.
  void grow(uint64_t nbytes);

  uint64_t capacity_bytes() const { return capacity_; }
  uint64_t align_bytes() const { return align_; }
  uint64_t taken_bytes() const { return taken_bytes_; }
  uint64_t free_bytes() const { return capacity_ - taken_bytes_; }
  uint64_t num_taken() const { return num_taken_; }
  uint64_t largest_free_bytes() const { return free_.empty() ? 0 : free_.rbegin()->first.first; }
  // How many extents of `nbytes` fit into free ranges, counted up to `enough`.
  uint64_t num_fitting(uint64_t nbytes, uint64_t enough) const;
  Extent* first() const { return head_; }

  // Empty when every invariant holds, else one line per violation.
  std::vector<std::string> check() const;

 private:
  using FreeKey = std::pair<uint64_t, uint64_t>;  // (size, offset)

  Extent* new_extent(uint64_t offset, uint64_t size, bool free);
  void list_free(Extent* extent);
  void unlist_free(Extent* extent);
  void absorb_next(Extent* extent);
  bool is_large(uint64_t nbytes) const;

  uint64_t capacity_;
  uint64_t align_;
  uint64_t taken_bytes_ = 0;
  uint64_t num_taken_ = 0;
  Extent* head_ = nullptr;
  Extent* tail_ = nullptr;
  std::deque<Extent> storage_;
  std::vector<Extent*> spare_;
  std::set<std::pair<FreeKey, Extent*>> free_;
};

}  // namespace lmcache
