// Which entries must leave so that extents of a given size become free.
#pragma once

#include <cstdint>
#include <vector>

#include "core/pool.h"

namespace lmcache {

// Walks the order from its victims' end and joins candidates that are neighbours in memory, with
// the free ranges between them, into runs.
//
// For one extent it stops at the first window that costs at most 1 + 1/16 of the bytes asked for;
// else at the cheapest one within the slack; else at the first window there is. For several it
// stops when the runs hold as many. Then colder entries go along until no more than the slack is
// left behind.
//
// Slack: an entry may be evicted while colder evictable entries of at most capacity / 32 bytes
// stay.
//
// Nothing is changed but the parking of held entries, so a plan that finds nothing evicts nothing.
class EvictionPlan {
 public:
  EvictionPlan(Pool& pool, EvictionOrder& order, uint64_t nbytes, uint64_t count);

  bool found() const { return found_; }
  const std::vector<Entry*>& victims() const { return victims_; }

 private:
  template <typename Enough>
  void walk(Enough enough);
  void plan_one();
  void plan_many(uint64_t count);
  void consider_windows_with(Extent* extent);
  uint64_t new_places_with(Extent* extent) const;
  void take_run(Extent* first, Extent* last);
  void collect_window();
  void collect_runs();
  void take_colder_along(uint64_t seen_bytes);

  Pool& pool_;
  EvictionOrder& order_;
  const uint64_t nbytes_;
  const uint64_t slack_bytes_;
  const uint64_t plan_;
  bool found_ = false;
  std::vector<Entry*> candidates_;  // coldest first
  uint64_t candidate_bytes_ = 0;
  Extent* window_first_ = nullptr;
  Extent* window_last_ = nullptr;
  uint64_t window_cost_ = 0;
  uint64_t window_seen_bytes_ = 0;  // candidate bytes when the window was found
  uint64_t victim_bytes_ = 0;
  std::vector<Entry*> victims_;
};

}  // namespace lmcache
