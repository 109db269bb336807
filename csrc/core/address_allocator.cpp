#include "core/address_allocator.h"

namespace lmcache {

namespace {
constexpr uint64_t kLargeFactor = 4;  // "large" is more than this many times the mean live size
}  // namespace

AddressAllocator::AddressAllocator(uint64_t capacity_bytes, uint64_t align_bytes)
    : capacity_(capacity_bytes / align_bytes * align_bytes), align_(align_bytes) {
  if (capacity_ > 0) {
    head_ = tail_ = new_extent(0, capacity_, true);
    list_free(head_);
  }
}

uint64_t AddressAllocator::aligned(uint64_t nbytes) const {
  return (nbytes + align_ - 1) / align_ * align_;
}

bool AddressAllocator::is_large(uint64_t nbytes) const {
  return num_taken_ > 0 && nbytes / kLargeFactor > taken_bytes_ / num_taken_;
}

Extent* AddressAllocator::allocate(uint64_t nbytes) {
  auto found = free_.lower_bound({{nbytes, 0}, nullptr});
  return found == free_.end() ? nullptr : allocate_from(found->second, nbytes);
}

uint64_t AddressAllocator::num_fitting(uint64_t nbytes, uint64_t enough) const {
  uint64_t fitting = 0;
  for (auto range = free_.lower_bound({{nbytes, 0}, nullptr});
       range != free_.end() && fitting < enough; ++range) {
    fitting += range->first.first / nbytes;
  }
  return fitting;
}

Extent* AddressAllocator::allocate_from(Extent* range, uint64_t nbytes) {
  unlist_free(range);
  Extent* taken = range;
  if (range->size > nbytes) {
    if (is_large(nbytes)) {
      taken = new_extent(range->offset + range->size - nbytes, nbytes, false);
      taken->prev = range;
      taken->next = range->next;
      (range->next ? range->next->prev : tail_) = taken;
      range->next = taken;
      range->size -= nbytes;
      list_free(range);
    } else {
      Extent* rest = new_extent(range->offset + nbytes, range->size - nbytes, true);
      rest->prev = range;
      rest->next = range->next;
      (range->next ? range->next->prev : tail_) = rest;
      range->next = rest;
      range->size = nbytes;
      list_free(rest);
    }
  }
  taken->free = false;
  taken_bytes_ += nbytes;
  ++num_taken_;
  return taken;
}

void AddressAllocator::release(Extent* extent) {
  taken_bytes_ -= extent->size;
  --num_taken_;
  extent->free = true;
  extent->owner = nullptr;
  if (extent->next && extent->next->free) {
    unlist_free(extent->next);
    absorb_next(extent);
  }
  if (extent->prev && extent->prev->free) {
    extent = extent->prev;
    unlist_free(extent);
    absorb_next(extent);
  }
  list_free(extent);
}

void AddressAllocator::grow(uint64_t nbytes) {
  nbytes = nbytes / align_ * align_;
  if (nbytes == 0) return;
  Extent* added = new_extent(capacity_, nbytes, false);
  added->prev = tail_;
  (tail_ ? tail_->next : head_) = added;
  tail_ = added;
  capacity_ += nbytes;
  taken_bytes_ += nbytes;
  ++num_taken_;
  release(added);
}

Extent* AddressAllocator::new_extent(uint64_t offset, uint64_t size, bool free) {
  Extent* extent;
  if (spare_.empty()) {
    extent = &storage_.emplace_back();
  } else {
    extent = spare_.back();
    spare_.pop_back();
    *extent = Extent{};
  }
  extent->offset = offset;
  extent->size = size;
  extent->free = free;
  return extent;
}

void AddressAllocator::list_free(Extent* extent) {
  free_.insert({{extent->size, extent->offset}, extent});
}

void AddressAllocator::unlist_free(Extent* extent) {
  free_.erase({{extent->size, extent->offset}, extent});
}

void AddressAllocator::absorb_next(Extent* extent) {
  Extent* gone = extent->next;
  extent->size += gone->size;
  extent->next = gone->next;
  (gone->next ? gone->next->prev : tail_) = extent;
  spare_.push_back(gone);
}

std::vector<std::string> AddressAllocator::check() const {
  std::vector<std::string> faults;
  uint64_t at = 0, taken = 0, count = 0, num_free = 0;
  bool previous_free = false;
  for (Extent* e = head_; e; e = e->next) {
    if (e->offset != at) faults.push_back("extents do not tile the pool at " + std::to_string(at));
    if (e->size == 0 || e->size % align_) {
      faults.push_back("extent of a bad size at " + std::to_string(at));
    }
    if (e->free && previous_free) {
      faults.push_back("two free extents touch at " + std::to_string(at));
    }
    if (e->free && !free_.count({{e->size, e->offset}, e})) {
      faults.push_back("free extent not listed at " + std::to_string(at));
    }
    previous_free = e->free;
    num_free += e->free;
    taken += e->free ? 0 : e->size;
    count += !e->free;
    at += e->size;
  }
  if (at != capacity_) faults.push_back("extents end at " + std::to_string(at));
  if (taken != taken_bytes_ || count != num_taken_) faults.push_back("taken bytes do not add up");
  if (num_free != free_.size()) faults.push_back("the free index lists extents that are not free");
  return faults;
}

}  // namespace lmcache
