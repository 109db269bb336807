#include "core/eviction_plan.h"

namespace lmcache {

namespace {
bool joins(const Extent* extent, uint64_t plan) {
  return extent && (extent->free || extent->plan == plan);
}
}  // namespace

EvictionPlan::EvictionPlan(Pool& pool, EvictionOrder& order, uint64_t nbytes, uint64_t count)
    : pool_(pool),
      order_(order),
      nbytes_(nbytes),
      slack_bytes_(pool.addresses_.capacity_bytes() / pool.slack_divisor_),
      plan_(++pool.plan_) {
  if (count == 1) {
    plan_one();
  } else {
    plan_many(count);
  }
}

// Adds candidates, coldest first, until `enough(extent)` of the newest says so.
template <typename Enough>
void EvictionPlan::walk(Enough enough) {
  VictimCursor cursor(order_);
  while (Entry* entry = cursor.next()) {
    Block* block = entry->block;
    if (block->held()) {
      order_.park(entry);
      continue;
    }
    candidates_.push_back(entry);
    candidate_bytes_ += block->size_bytes_;
    block->extent_->plan = plan_;
    if (enough(block->extent_)) return;
  }
}

void EvictionPlan::plan_one() {
  walk([&](Extent* extent) {
    consider_windows_with(extent);
    if (!window_first_) return false;
    if (window_cost_ <= nbytes_ + nbytes_ / 16) return true;
    // Past this point every further window would leave more than the slack behind.
    return candidate_bytes_ > slack_bytes_ + window_cost_;
  });
  found_ = window_first_ != nullptr;
  if (found_) collect_window();
}

void EvictionPlan::plan_many(uint64_t count) {
  uint64_t places = pool_.addresses_.num_fitting(nbytes_, count);
  walk([&](Extent* extent) {
    places += new_places_with(extent);
    return places >= count;
  });
  found_ = places >= count;
  if (found_) collect_runs();
}

void EvictionPlan::consider_windows_with(Extent* extent) {
  // Leftmost start from which windows that reach `extent` are still short of the size asked for.
  Extent* first = extent;
  uint64_t before = 0;
  while (before < nbytes_ && joins(first->prev, plan_)) {
    first = first->prev;
    before += first->size;
  }
  Extent* last = first;
  uint64_t bytes = first->size;
  uint64_t cost = first->free ? 0 : first->size;
  bool reached = first == extent;
  while (true) {
    while (bytes < nbytes_ || !reached) {
      if (!joins(last->next, plan_)) return;
      last = last->next;
      bytes += last->size;
      cost += last->free ? 0 : last->size;
      reached = reached || last == extent;
    }
    const bool within_slack = candidate_bytes_ - cost <= slack_bytes_;
    if (!window_first_ || (cost < window_cost_ && within_slack)) {
      window_first_ = first;
      window_last_ = last;
      window_cost_ = cost;
      window_seen_bytes_ = candidate_bytes_;
    }
    if (first == extent) return;
    bytes -= first->size;
    cost -= first->free ? 0 : first->size;
    first = first->next;
  }
}

// How many more extents the run around `extent` holds now that it is a candidate.
uint64_t EvictionPlan::new_places_with(Extent* extent) const {
  uint64_t before = 0, after = 0;
  for (Extent* e = extent->prev; joins(e, plan_); e = e->prev) before += e->size;
  for (Extent* e = extent->next; joins(e, plan_); e = e->next) after += e->size;
  return (before + extent->size + after) / nbytes_ - before / nbytes_ - after / nbytes_;
}

void EvictionPlan::take_run(Extent* first, Extent* last) {
  for (Extent* e = first;; e = e->next) {
    if (!e->free) {
      victims_.push_back(e->owner->entry_);
      victim_bytes_ += e->size;
      e->plan = 0;  // taken; see take_colder_along
    }
    if (e == last) return;
  }
}

void EvictionPlan::collect_window() {
  take_run(window_first_, window_last_);
  take_colder_along(window_seen_bytes_);
}

// Every run that holds an extent goes as a whole: its members are all among the coldest.
void EvictionPlan::collect_runs() {
  for (Entry* entry : candidates_) {
    Extent* first = entry->block->extent_;
    if (first->plan != plan_) continue;
    Extent* last = first;
    uint64_t bytes = first->size;
    for (; joins(first->prev, plan_); bytes += first->size) first = first->prev;
    for (; joins(last->next, plan_); bytes += last->size) last = last->next;
    if (bytes >= nbytes_) take_run(first, last);
  }
  take_colder_along(candidate_bytes_);
}

void EvictionPlan::take_colder_along(uint64_t seen_bytes) {
  uint64_t left_behind = seen_bytes - victim_bytes_;
  for (Entry* entry : candidates_) {
    if (left_behind <= slack_bytes_) return;
    if (entry->block->extent_->plan != plan_) continue;
    victims_.push_back(entry);
    left_behind -= entry->block->size_bytes_;
  }
}

}  // namespace lmcache
