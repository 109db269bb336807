// Which entries must leave so that one extent of a given size becomes free.
#pragma once

#include <cstdint>
#include <vector>

#include "core/pool.h"

namespace lmcache {

// Walks the order from its victims' end and joins candidates that are neighbours in memory, with
// the free ranges between them, into runs. It stops at the first window that costs at most
// 1 + 1/16 of the bytes asked for; else at the cheapest one within the slack; else at the first
// window there is, and then takes colder entries along until no more than the slack is left behind.
//
// Slack: an entry may be evicted while colder evictable entries of at most capacity / 32 bytes
// stay.
//
// Nothing is changed but the parking of held entries, so a plan without a window evicts nothing.
class EvictionPlan {
 public:
  EvictionPlan(Pool& pool, EvictionOrder& order, uint64_t nbytes);

  bool found() const { return window_first_ != nullptr; }
  const std::vector<Entry*>& victims() const { return victims_; }

 private:
  void walk();
  void consider_windows_with(Extent* extent);
  bool good_enough() const { return found() && window_cost_ <= nbytes_ + nbytes_ / 16; }
  void collect();

  Pool& pool_;
  EvictionOrder& order_;
  const uint64_t nbytes_;
  const uint64_t slack_bytes_;
  const uint64_t plan_;
  std::vector<Entry*> candidates_;  // coldest first
  uint64_t candidate_bytes_ = 0;
  Extent* window_first_ = nullptr;
  Extent* window_last_ = nullptr;
  uint64_t window_cost_ = 0;
  uint64_t window_seen_bytes_ = 0;  // candidate bytes when the window was found
  std::vector<Entry*> victims_;
};

}  // namespace lmcache
