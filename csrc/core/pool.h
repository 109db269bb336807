// One pool of bytes with the memory objects carved from it and the eviction order over those that a
// cache keeps: the one lock that a release, a search for victims and a waiting allocation share.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/address_allocator.h"
#include "core/eviction_order.h"

namespace lmcache {

class Pool;

// The countable part of a memory object.
//
//   state    meaning                                          who may leave it
//   live     refs > 0 or pins > 0; its bytes are its own      Pool::ref_down, unpin, evict
//   cached   live, and an order lists it; one of the          Pool::uncache, allocate (as a victim)
//            references is the cache's
//   held     cached, with a pin or a reader's reference       the last ref_down or unpin
//   freed    the bytes went back to the pool                  nobody
//
// Guarded by the pool's mutex: every member but `pool`, which is set once.
class Block {
 public:
  explicit Block(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  Pool& pool() const { return *pool_; }
  const std::shared_ptr<Pool>& pool_ptr() const { return pool_; }

 private:
  friend class Pool;
  friend class EvictionPlan;

  bool held() const { return pins_ > 0 || refs_ > 1; }

  std::shared_ptr<Pool> pool_;
  int64_t refs_ = 1;
  int64_t pins_ = 0;
  uint64_t size_bytes_ = 0;
  Extent* extent_ = nullptr;  // null for bytes that are not the pool's
  Entry* entry_ = nullptr;    // non-null while an order lists it
  bool freed_ = false;
};

struct PoolGauges {
  uint64_t capacity_bytes, free_bytes, largest_free_bytes;
  uint64_t cached_bytes, held_bytes;  // held: cached and not evictable now
  uint64_t num_blocks, num_pinned, num_parked, num_cached;
  uint64_t num_leaked;     // blocks dropped while a reference was still counted
  uint64_t num_underflow;  // releases of what was already released
  uint64_t num_waiting;
};

struct Allocation {
  std::vector<Extent*> extents;  // as many as asked for, or none
  std::vector<Entry*> victims;   // already out of the order; their blocks are freed
};

// Guarded by `mutex_`, a leaf lock under which no other lock is taken and no foreign code runs:
// every member. A release may therefore come from anywhere, a finaliser included.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // `capacity_bytes` 0: a pool without addresses, whose blocks own their memory themselves.
  Pool(uint64_t capacity_bytes, uint64_t align_bytes, uint64_t slack_divisor = 32)
      : addresses_(capacity_bytes, align_bytes), slack_divisor_(slack_divisor) {}

  // --- blocks -------------------------------------------------------------------------------
  // Takes `count` extents from free bytes, else makes room by evicting from `order` (null: no
  // eviction). All or nothing: when no extent is given, nothing was evicted.
  Allocation allocate(uint64_t nbytes, uint64_t count, EvictionOrder* order);
  void adopt(Block& block, Extent* extent, uint64_t nbytes);  // gives the extent to its block
  void abandon(Extent* extent);                               // an extent that found no block
  void ref_up(Block& block);
  // Both return whether this call freed the block.
  bool ref_down(Block& block);
  bool unpin(Block& block);
  void pin(Block& block);
  void invalidate(Block& block);  // frees the bytes whatever is counted; not while cached
  bool can_evict(Block& block);
  int64_t refs(Block& block);
  int64_t pins(Block& block);
  bool freed(Block& block);
  bool cached(Block& block);
  uint64_t offset(Block& block);
  uint64_t size_bytes(Block& block);

  // --- the order ----------------------------------------------------------------------------
  void cache(EvictionOrder& order, Entry* entry, Block& block, bool cold);
  void uncache(EvictionOrder& order, Entry* entry);  // drops the cache's own reference
  enum class Use { kUse, kHit, kDemote };
  // Returns whether the order moved.
  bool use(EvictionOrder& order, Entry* entry, Use kind, uint64_t batch);
  uint64_t next_batch(EvictionOrder& order);
  bool would_fit(uint64_t nbytes, EvictionOrder& order);
  std::vector<Entry*> first_victims(EvictionOrder& order, size_t count);
  std::vector<Entry*> evictable(EvictionOrder& order);
  // Takes the coldest entries that nobody holds out of the order until they have `nbytes` between
  // them. Returns false, and takes none, when there are not as many bytes.
  bool take_coldest(EvictionOrder& order, uint64_t nbytes, std::vector<Entry*>& victims);

  // --- waiting and looking ------------------------------------------------------------------
  uint64_t version();
  // Waits until something was released after `version`, at most `seconds`. Returns whether it was.
  bool wait_for_release(uint64_t version, double seconds);
  PoolGauges gauges(const EvictionOrder* order);
  void grow(uint64_t nbytes);
  void wake_waiting();
  std::vector<std::string> check(const EvictionOrder* order);

  // Runs `work(order)` with the mutex held; `work` must run no foreign code.
  template <typename Work>
  auto locked(Work&& work) {
    std::lock_guard<std::mutex> guard(mutex_);
    return work();
  }
  // For callers inside `locked`.
  bool use_locked(EvictionOrder& order, Entry* entry, Use kind, uint64_t batch);
  void ref_up_locked(Block& block);
  void pin_locked(Block& block);

 private:
  friend class Block;
  friend class EvictionPlan;

  bool has_addresses() const { return addresses_.capacity_bytes() > 0; }
  uint64_t evictable_bytes() const { return cached_bytes_ - held_bytes_; }
  bool fits_without_eviction(uint64_t nbytes, uint64_t count) const;
  bool release_locked(Block& block, bool was_held);
  void free_locked(Block& block);
  void uncache_locked(EvictionOrder& order, Entry* entry);
  void notify_locked();
  bool hopeless(uint64_t nbytes) const;
  void remember_hopeless(uint64_t nbytes);

  std::mutex mutex_;
  std::condition_variable released_;
  AddressAllocator addresses_;
  const uint64_t slack_divisor_;
  uint64_t cached_bytes_ = 0;
  uint64_t held_bytes_ = 0;
  uint64_t num_blocks_ = 0;
  uint64_t num_pinned_ = 0;
  uint64_t num_leaked_ = 0;
  uint64_t num_underflow_ = 0;
  uint64_t version_ = 0;
  uint64_t num_waiting_ = 0;
  uint64_t plan_ = 0;
  // A request of at least this many bytes in all is known to find no room until `version_` moves.
  uint64_t hopeless_bytes_ = UINT64_MAX;
  uint64_t hopeless_version_ = 0;
};

}  // namespace lmcache
