#include "core/pool.h"

#include <algorithm>
#include <chrono>

#include "core/eviction_plan.h"

namespace lmcache {

Block::~Block() {
  pool_->locked([&] {
    if (freed_) return;
    ++pool_->num_leaked_;
    if (pins_ > 0) --pool_->num_pinned_;
    pins_ = 0;
    pool_->free_locked(*this);
  });
}

Allocation Pool::allocate(uint64_t nbytes, uint64_t count, EvictionOrder* order) {
  Allocation result;
  std::lock_guard<std::mutex> guard(mutex_);
  nbytes = addresses_.aligned(nbytes);
  if (nbytes == 0 || count == 0 || nbytes > addresses_.capacity_bytes() / count) return result;
  if (!fits_without_eviction(nbytes, count)) {
    if (!order || addresses_.free_bytes() + evictable_bytes() < nbytes * count) return result;
    if (hopeless(nbytes)) return result;
    EvictionPlan plan(*this, *order, nbytes, count);
    if (!plan.found()) {
      if (count == 1) remember_hopeless(nbytes);
      return result;
    }
    result.victims = plan.victims();
    for (Entry* victim : result.victims) uncache_locked(*order, victim);
  }
  // Each takes one end of a free range, so none splits the room of the others.
  while (result.extents.size() < count) result.extents.push_back(addresses_.allocate(nbytes));
  return result;
}

bool Pool::fits_without_eviction(uint64_t nbytes, uint64_t count) const {
  return count == 1 ? addresses_.largest_free_bytes() >= nbytes
                    : addresses_.num_fitting(nbytes, count) >= count;
}

void Pool::adopt(Block& block, Extent* extent, uint64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  block.extent_ = extent;
  block.size_bytes_ = extent ? extent->size : nbytes;
  if (extent) extent->owner = &block;
  ++num_blocks_;
}

void Pool::abandon(Extent* extent) {
  std::lock_guard<std::mutex> guard(mutex_);
  addresses_.release(extent);
  notify_locked();
}

void Pool::ref_up_locked(Block& block) {
  const bool was_held = block.held();
  ++block.refs_;
  if (block.entry_ && !was_held && block.held()) held_bytes_ += block.size_bytes_;
}

void Pool::ref_up(Block& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  ref_up_locked(block);
}

bool Pool::ref_down(Block& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  // A reader cannot drop the reference of the cache that lists the block.
  if (block.refs_ <= (block.entry_ ? 1 : 0)) {
    ++num_underflow_;
    return false;
  }
  const bool was_held = block.held();
  --block.refs_;
  return release_locked(block, was_held);
}

void Pool::pin_locked(Block& block) {
  const bool was_held = block.held();
  if (block.pins_++ == 0) ++num_pinned_;
  if (block.entry_ && !was_held) held_bytes_ += block.size_bytes_;
}

void Pool::pin(Block& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (block.freed_) return;  // its bytes are somebody else's by now
  pin_locked(block);
}

bool Pool::unpin(Block& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (block.pins_ <= 0) {
    ++num_underflow_;
    return false;
  }
  const bool was_held = block.held();
  if (--block.pins_ == 0) --num_pinned_;
  return release_locked(block, was_held);
}

bool Pool::release_locked(Block& block, bool was_held) {
  if (block.entry_ && was_held && !block.held()) {
    held_bytes_ -= block.size_bytes_;
    if (block.entry_->place == Place::kParked) block.entry_->order->unpark(block.entry_);
    notify_locked();
  }
  if (block.refs_ > 0 || block.pins_ > 0 || block.freed_) return false;
  free_locked(block);
  return true;
}

void Pool::free_locked(Block& block) {
  block.freed_ = true;
  if (block.extent_) {
    addresses_.release(block.extent_);
    block.extent_ = nullptr;
  }
  --num_blocks_;
  notify_locked();
}

bool Pool::hopeless(uint64_t nbytes) const {
  return hopeless_version_ == version_ && nbytes >= hopeless_bytes_;
}

void Pool::remember_hopeless(uint64_t nbytes) {
  hopeless_version_ = version_;
  hopeless_bytes_ = nbytes;
}

void Pool::notify_locked() {
  ++version_;
  if (num_waiting_ > 0) released_.notify_all();
}

void Pool::invalidate(Block& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (block.freed_ || block.entry_) return;
  if (block.pins_ > 0) --num_pinned_;
  block.refs_ = block.pins_ = 0;
  free_locked(block);
}

bool Pool::can_evict(Block& block) {
  return locked([&] { return block.refs_ == 1 && block.pins_ == 0; });
}
int64_t Pool::refs(Block& block) {
  return locked([&] { return block.refs_; });
}
int64_t Pool::pins(Block& block) {
  return locked([&] { return block.pins_; });
}
bool Pool::freed(Block& block) {
  return locked([&] { return block.freed_; });
}
bool Pool::cached(Block& block) {
  return locked([&] { return block.entry_ != nullptr; });
}
uint64_t Pool::offset(Block& block) {
  return locked([&] { return block.extent_ ? block.extent_->offset : 0; });
}
uint64_t Pool::size_bytes(Block& block) {
  return locked([&] { return block.size_bytes_; });
}

void Pool::cache(EvictionOrder& order, Entry* entry, Block& block, bool cold) {
  std::lock_guard<std::mutex> guard(mutex_);
  entry->block = &block;
  block.entry_ = entry;
  ++block.refs_;
  cached_bytes_ += block.size_bytes_;
  if (block.held()) held_bytes_ += block.size_bytes_;
  order.insert(entry, cold);
  notify_locked();
}

void Pool::uncache(EvictionOrder& order, Entry* entry) {
  std::lock_guard<std::mutex> guard(mutex_);
  uncache_locked(order, entry);
}

void Pool::uncache_locked(EvictionOrder& order, Entry* entry) {
  Block& block = *entry->block;
  cached_bytes_ -= block.size_bytes_;
  if (block.held()) held_bytes_ -= block.size_bytes_;
  order.remove(entry);
  block.entry_ = nullptr;
  --block.refs_;
  if (block.refs_ <= 0 && block.pins_ <= 0) free_locked(block);
}

bool Pool::use_locked(EvictionOrder& order, Entry* entry, Use kind, uint64_t batch) {
  switch (kind) {
    case Use::kUse:
      return order.use(entry, batch);
    case Use::kHit:
      return order.hit(entry, batch);
    case Use::kDemote:
      return order.demote(entry, batch);
  }
  return false;
}

bool Pool::use(EvictionOrder& order, Entry* entry, Use kind, uint64_t batch) {
  std::lock_guard<std::mutex> guard(mutex_);
  return use_locked(order, entry, kind, batch);
}

uint64_t Pool::next_batch(EvictionOrder& order) {
  return locked([&] { return order.next_batch(); });
}

bool Pool::would_fit(uint64_t nbytes, EvictionOrder& order) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!has_addresses()) return true;  // its blocks own their memory: there is no limit
  nbytes = addresses_.aligned(nbytes);
  if (nbytes == 0) return false;
  if (addresses_.largest_free_bytes() >= nbytes) return true;
  if (addresses_.free_bytes() + evictable_bytes() < nbytes) return false;
  if (hopeless(nbytes)) return false;
  if (EvictionPlan(*this, order, nbytes, 1).found()) return true;
  remember_hopeless(nbytes);
  return false;
}

std::vector<Entry*> Pool::first_victims(EvictionOrder& order, size_t count) {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<Entry*> victims;
  VictimCursor cursor(order);
  while (victims.size() < count) {
    Entry* entry = cursor.next();
    if (!entry) break;
    if (!entry->block->held()) victims.push_back(entry);
  }
  return victims;
}

std::vector<Entry*> Pool::evictable(EvictionOrder& order) {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<Entry*> all = order.unparked();
  all.erase(std::remove_if(all.begin(), all.end(), [](Entry* e) { return e->block->held(); }),
            all.end());
  return all;
}

bool Pool::take_coldest(EvictionOrder& order, uint64_t nbytes, std::vector<Entry*>& victims) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (evictable_bytes() < nbytes) return false;
  VictimCursor cursor(order);
  uint64_t taken = 0;
  while (taken < nbytes) {
    Entry* entry = cursor.next();
    if (!entry) break;
    if (entry->block->held()) {
      order.park(entry);  // out of the way of every later search
      continue;
    }
    victims.push_back(entry);
    taken += entry->block->size_bytes_;
  }
  for (Entry* victim : victims) uncache_locked(order, victim);
  return true;
}

uint64_t Pool::version() {
  return locked([&] { return version_; });
}

bool Pool::wait_for_release(uint64_t version, double seconds) {
  std::unique_lock<std::mutex> guard(mutex_);
  ++num_waiting_;
  const bool released = released_.wait_for(guard, std::chrono::duration<double>(seconds),
                                           [&] { return version_ != version; });
  --num_waiting_;
  return released;
}

PoolGauges Pool::gauges(const EvictionOrder* order) {
  std::lock_guard<std::mutex> guard(mutex_);
  return {addresses_.capacity_bytes(),
          addresses_.free_bytes(),
          addresses_.largest_free_bytes(),
          cached_bytes_,
          held_bytes_,
          num_blocks_,
          num_pinned_,
          order ? order->num_parked() : 0,
          order ? order->size() : 0,
          num_leaked_,
          num_underflow_,
          num_waiting_};
}

void Pool::wake_waiting() {
  std::lock_guard<std::mutex> guard(mutex_);
  notify_locked();
}

void Pool::grow(uint64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  addresses_.grow(nbytes);
  notify_locked();
}

std::vector<std::string> Pool::check(const EvictionOrder* order) {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<std::string> faults = addresses_.check();
  uint64_t cached = 0, held = 0, owned = 0;
  for (Extent* e = addresses_.first(); e; e = e->next) {
    if (e->free || !e->owner) continue;
    ++owned;
    const Block& block = *e->owner;
    if (block.extent_ != e) faults.push_back("a block and its extent disagree");
    if (block.refs_ <= 0 && block.pins_ <= 0) faults.push_back("a block nobody holds has bytes");
    if (!block.entry_) continue;
    cached += block.size_bytes_;
    if (block.held()) held += block.size_bytes_;
    if (block.entry_->place == Place::kParked && !block.held()) {
      faults.push_back("a parked entry is not held");
    }
  }
  if (has_addresses() && (cached != cached_bytes_ || held != held_bytes_)) {
    faults.push_back("cached or held bytes do not add up: " + std::to_string(cached) + " of " +
                     std::to_string(cached_bytes_) + ", " + std::to_string(held) + " of " +
                     std::to_string(held_bytes_));
  }
  if (has_addresses() && owned > num_blocks_) faults.push_back("more extents than blocks");
  if (order) {
    std::vector<std::string> more = order->check();
    faults.insert(faults.end(), more.begin(), more.end());
  }
  return faults;
}

}  // namespace lmcache
