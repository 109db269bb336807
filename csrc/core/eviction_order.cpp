#include "core/eviction_order.h"

#include <algorithm>
#include <iterator>

namespace lmcache {

void EvictionOrder::insert(Entry* entry, bool cold) {
  entry->order = this;
  entry->batch = 0;
  ++size_;
  if (cold && !ignores_placement()) {
    entry->uses = 0;
    push_cold(entry);
  } else {
    entry->uses = kind_ == PolicyKind::kLfu ? 1 : 0;
    push_young(entry);
  }
}

void EvictionOrder::remove(Entry* entry) {
  detach(entry);
  entry->place = Place::kNone;
  entry->order = nullptr;
  --size_;
}

bool EvictionOrder::use(Entry* entry, uint64_t batch) {
  return ignores_placement() ? false : move_young(entry, batch);
}

bool EvictionOrder::hit(Entry* entry, uint64_t batch) {
  return kind_ == PolicyKind::kFifo ? false : move_young(entry, batch);
}

bool EvictionOrder::demote(Entry* entry, uint64_t batch) {
  if (ignores_placement()) return false;
  if (entry->batch == batch) return true;
  entry->batch = batch;
  const bool parked = entry->place == Place::kParked;
  detach(entry);
  entry->uses = 0;
  if (parked) {
    entry->label = --cold_label_;
    entry->place = Place::kParked;
    ++num_parked_;
  } else {
    push_cold(entry);
  }
  return true;
}

void EvictionOrder::park(Entry* entry) {
  detach(entry, /*keep_bucket=*/true);
  entry->place = Place::kParked;
  ++num_parked_;
}

void EvictionOrder::unpark(Entry* entry) {
  --num_parked_;
  entry->place = Place::kReturned;
  returned_.insert(entry);
}

bool EvictionOrder::move_young(Entry* entry, uint64_t batch) {
  const bool counted = entry->batch == batch;
  detach(entry);
  entry->batch = batch;
  if (kind_ == PolicyKind::kLfu && !counted) ++entry->uses;
  push_young(entry);
  return true;
}

void EvictionOrder::push_young(Entry* entry) {
  Bucket* bucket = bucket_for(entry->uses);
  entry->label = ++young_label_;
  entry->bucket = bucket;
  entry->place = Place::kListed;
  entry->prev = bucket->ends.prev;
  entry->next = &bucket->ends;
  entry->prev->next = entry;
  bucket->ends.prev = entry;
}

void EvictionOrder::push_cold(Entry* entry) {
  Bucket* bucket = bucket_for(entry->uses);
  entry->label = --cold_label_;
  entry->bucket = bucket;
  entry->place = Place::kListed;
  entry->next = bucket->ends.next;
  entry->prev = &bucket->ends;
  entry->next->prev = entry;
  bucket->ends.next = entry;
}

Bucket* EvictionOrder::bucket_for(uint64_t uses) {
  auto found = buckets_.lower_bound(uses);
  if (found == buckets_.end() || found->first != uses) {
    found = buckets_.try_emplace(found, uses, uses);
  }
  return &found->second;
}

void EvictionOrder::detach(Entry* entry, bool keep_bucket) {
  switch (entry->place) {
    case Place::kListed: {
      entry->prev->next = entry->next;
      entry->next->prev = entry->prev;
      Bucket* bucket = entry->bucket;
      entry->bucket = nullptr;
      if (!keep_bucket && bucket->empty() && kind_ == PolicyKind::kLfu) {
        buckets_.erase(bucket->ends.uses);
      }
      break;
    }
    case Place::kReturned:
      returned_.erase(entry);
      break;
    case Place::kParked:
      --num_parked_;
      break;
    case Place::kNone:
      break;
  }
}

std::vector<Entry*> EvictionOrder::unparked() const {
  std::vector<Entry*> listed;
  listed.reserve(size_);
  for (const auto& [uses, bucket] : buckets_) {
    for (Entry* e = bucket.ends.next; e != &bucket.ends; e = e->next) listed.push_back(e);
  }
  std::vector<Entry*> all;
  all.reserve(listed.size() + returned_.size());
  std::merge(listed.begin(), listed.end(), returned_.begin(), returned_.end(),
             std::back_inserter(all), Less{});
  return all;
}

std::vector<std::string> EvictionOrder::check() const {
  std::vector<std::string> faults;
  size_t listed = 0;
  for (const auto& [uses, bucket] : buckets_) {
    const Entry* before = nullptr;
    for (Entry* e = bucket.ends.next; e != &bucket.ends; e = e->next) {
      ++listed;
      if (e->place != Place::kListed || e->bucket != &bucket || e->uses != uses) {
        faults.push_back("an entry stands in a list that is not its own");
      }
      if (e->next->prev != e) faults.push_back("a list is not linked both ways");
      if (before && before->label >= e->label) faults.push_back("labels do not rise along a list");
      before = e;
    }
  }
  for (const Entry* e : returned_) {
    if (e->place != Place::kReturned) faults.push_back("a returned entry has another place");
  }
  if (listed + returned_.size() + num_parked_ != size_) {
    faults.push_back("listed " + std::to_string(listed) + " + returned " +
                     std::to_string(returned_.size()) + " + parked " + std::to_string(num_parked_) +
                     " is not " + std::to_string(size_));
  }
  return faults;
}

VictimCursor::VictimCursor(EvictionOrder& order)
    : order_(order), from_young_(order.kind_ == PolicyKind::kMru) {
  auto& buckets = order_.buckets_;
  while (!buckets.empty() && buckets.begin()->second.empty()) buckets.erase(buckets.begin());
  bucket_ = buckets.begin();
  if (bucket_ != buckets.end()) {
    Entry& ends = bucket_->second.ends;
    node_ = from_young_ ? ends.prev : ends.next;
  }
}

Entry* VictimCursor::peek_listed() {
  auto& buckets = order_.buckets_;
  // MRU has one bucket, so only the other policies step from one bucket to the next.
  while (bucket_ != buckets.end() && node_ == &bucket_->second.ends) {
    // A bucket that parking has emptied goes, or walks would meet it for ever.
    bucket_ = bucket_->second.empty() ? buckets.erase(bucket_) : std::next(bucket_);
    if (bucket_ != buckets.end()) {
      Entry& ends = bucket_->second.ends;
      node_ = from_young_ ? ends.prev : ends.next;
    }
  }
  return bucket_ == buckets.end() ? nullptr : node_;
}

Entry* VictimCursor::peek_returned() const {
  const auto& returned = order_.returned_;
  if (returned.empty()) return nullptr;
  if (from_young_) {
    auto end = last_returned_ ? returned.lower_bound(last_returned_) : returned.end();
    return end == returned.begin() ? nullptr : *std::prev(end);
  }
  auto next = last_returned_ ? returned.upper_bound(last_returned_) : returned.begin();
  return next == returned.end() ? nullptr : *next;
}

Entry* VictimCursor::next() {
  Entry* listed = peek_listed();
  Entry* returned = peek_returned();
  if (returned && (!listed || EvictionOrder::colder(returned, listed) != from_young_)) {
    last_returned_ = returned;
    return returned;
  }
  if (listed) node_ = from_young_ ? node_->prev : node_->next;
  return listed;
}

}  // namespace lmcache
