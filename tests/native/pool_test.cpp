// A pool under random use: exact books, feasibility, the slack of the eviction plan.
#include "core/pool.h"

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

constexpr uint64_t kAlign = 4096;

struct Cached {
  Entry entry;
  std::unique_ptr<Block> block;
};

class Cache {
 public:
  Cache(uint64_t capacity, PolicyKind kind)
      : pool_(std::make_shared<Pool>(capacity, kAlign)), order_(kind) {}
  ~Cache() {
    for (auto& [entry, cached] : cached_) pool_->uncache(order_, entry);
  }

  // Returns the entries evicted, or nothing and `stored` false.
  std::vector<Entry*> put(uint64_t nbytes, bool& stored) {
    Allocation made = pool_->allocate(nbytes, 1, &order_);
    stored = !made.extents.empty();
    for (Entry* victim : made.victims) {
      evicted_bytes_ += sizes_[victim];
      gone_.push_back(std::move(cached_[victim]));
      cached_.erase(victim);
    }
    if (!stored) return made.victims;
    auto cached = std::make_unique<Cached>();
    cached->block = std::make_unique<Block>(pool_);
    pool_->adopt(*cached->block, made.extents[0], nbytes);
    Entry* entry = &cached->entry;
    pool_->cache(order_, entry, *cached->block, false);
    pool_->ref_down(*cached->block);
    sizes_[entry] = (nbytes + kAlign - 1) / kAlign * kAlign;
    cached_[entry] = std::move(cached);
    return made.victims;
  }

  Pool& pool() { return *pool_; }
  EvictionOrder& order() { return order_; }
  std::map<Entry*, std::unique_ptr<Cached>>& cached() { return cached_; }
  std::map<Entry*, uint64_t>& sizes() { return sizes_; }
  uint64_t take_evicted_bytes() { return std::exchange(evicted_bytes_, 0); }

 private:
  std::shared_ptr<Pool> pool_;
  EvictionOrder order_;
  std::map<Entry*, std::unique_ptr<Cached>> cached_;
  std::map<Entry*, uint64_t> sizes_;
  std::vector<std::unique_ptr<Cached>> gone_;
  uint64_t evicted_bytes_ = 0;
};

// Whatever is evicted, at most capacity / 32 bytes of colder evictable entries stay.
void random_use(uint64_t seed, bool hold) {
  constexpr uint64_t kCapacity = 1024 * kAlign;
  Cache cache(kCapacity, PolicyKind::kLru);
  Numbers numbers(seed);
  std::vector<Entry*> held;
  for (int step = 0; step < 5000; ++step) {
    const uint64_t nbytes = kAlign * (numbers.below(10) ? 1 + numbers.below(3) : 40);
    std::vector<Entry*> order = cache.order().unparked();
    std::vector<Entry*> before;
    for (Entry* e : order) {
      if (cache.pool().can_evict(*cache.cached()[e]->block)) before.push_back(e);
    }
    uint64_t evictable = 0;
    for (Entry* e : before) evictable += cache.sizes()[e];
    const PoolGauges gauges = cache.pool().gauges(&cache.order());
    bool stored = false;
    std::vector<Entry*> victims = cache.put(nbytes, stored);
    if (!stored) {
      CHECK(victims.empty());
      CHECK(hold || gauges.free_bytes + evictable < nbytes);
    }
    if (!victims.empty()) {
      uint64_t left_behind = 0, seen = 0;
      for (Entry* e : before) {
        const bool is_victim = std::count(victims.begin(), victims.end(), e) > 0;
        if (is_victim && ++seen == victims.size()) break;
        if (!is_victim) left_behind += cache.sizes()[e];
      }
      CHECK(left_behind <= kCapacity / 32);
    }
    if (hold && numbers.below(4) == 0 && !cache.cached().empty()) {
      auto at = cache.cached().begin();
      std::advance(at, numbers.below(cache.cached().size()));
      numbers.below(2) ? cache.pool().pin(*at->second->block)
                       : cache.pool().ref_up(*at->second->block);
      held.push_back(at->first);
    }
    if (held.size() > 60) {
      const size_t at = numbers.below(held.size());
      Block& block = *cache.cached()[held[at]]->block;
      if (cache.pool().pins(block) > 0) {
        cache.pool().unpin(block);
      } else {
        cache.pool().ref_down(block);
      }
      held[at] = held.back();
      held.pop_back();
    }
    for (Entry* e : held) CHECK(cache.cached().count(e));  // held entries are never evicted
    if (step % 50 == 0) CHECK(cache.pool().check(&cache.order()).empty());
  }
}

// 63:1 sizes, as images among chunks: the pool stays full and one image flushes nothing.
void mixed_sizes() {
  constexpr uint64_t kImage = 63 * kAlign, kCapacity = 1200 * kImage;
  Cache cache(kCapacity, PolicyKind::kLru);
  Numbers numbers(42);
  std::vector<double> ratios;
  double fill = 0;
  int samples = 0;
  for (int step = 0; step < 400000; ++step) {
    const uint64_t nbytes = step % 17 == 16 ? kImage : kAlign;
    cache.take_evicted_bytes();
    bool stored = false;
    cache.put(nbytes, stored);
    CHECK(stored);
    if (step < 200000) continue;
    ratios.push_back(double(cache.take_evicted_bytes()) / nbytes);
    fill += 1.0 - double(cache.pool().gauges(nullptr).free_bytes) / kCapacity;
    ++samples;
    if (numbers.below(3) == 0) {  // a prefix used again
      auto at = cache.cached().lower_bound(nullptr);
      std::advance(at, numbers.below(8));
      cache.pool().use(cache.order(), at->first, Pool::Use::kUse,
                       cache.pool().next_batch(cache.order()));
    }
  }
  std::sort(ratios.begin(), ratios.end());
  const double p99 = ratios[ratios.size() * 99 / 100];
  std::printf("mixed sizes: mean fill %.4f, p99 bytes evicted per byte %.2f\n", fill / samples,
              p99);
  CHECK(fill / samples >= 0.98);
  CHECK(p99 <= 1.5);
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    random_use(seed, false);
    random_use(seed, true);
  }
  mixed_sizes();
  return 0;
}
