#include "core/eviction_plan.h"

namespace lmcache {

namespace {
bool joins(const Extent* extent, uint64_t plan) {
  return extent && (extent->free || extent->plan == plan);
}
}  // namespace

EvictionPlan::EvictionPlan(Pool& pool, EvictionOrder& order, uint64_t nbytes)
    : pool_(pool),
      order_(order),
      nbytes_(nbytes),
      slack_bytes_(pool.addresses_.capacity_bytes() / pool.slack_divisor_),
      plan_(++pool.plan_) {
  walk();
  if (found()) collect();
}

void EvictionPlan::walk() {
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
    consider_windows_with(block->extent_);
    if (good_enough()) return;
    // Past this point every further window would leave more than the slack behind.
    if (found() && candidate_bytes_ > slack_bytes_ + window_cost_) return;
  }
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
    if (!found() || (cost < window_cost_ && within_slack)) {
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

void EvictionPlan::collect() {
  for (Extent* e = window_first_;; e = e->next) {
    if (!e->free) victims_.push_back(e->owner->entry_);
    if (e == window_last_) break;
  }
  uint64_t left_behind = window_seen_bytes_ - window_cost_;
  if (left_behind <= slack_bytes_) return;
  for (Extent* e = window_first_;; e = e->next) {
    e->plan = 0;  // so that the loop below does not take the window's members twice
    if (e == window_last_) break;
  }
  for (Entry* entry : candidates_) {
    if (left_behind <= slack_bytes_) return;
    if (entry->block->extent_->plan != plan_) continue;
    victims_.push_back(entry);
    left_behind -= entry->block->size_bytes_;
  }
}

}  // namespace lmcache
