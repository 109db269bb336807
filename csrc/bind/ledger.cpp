#include "bind/ledger.h"

#include <algorithm>
#include <chrono>

namespace lmcache {

namespace {

constexpr size_t kMaxPages = 63;

uint64_t size_of(nb::handle copy) {
  if (copy.is_none()) return 0;  // its tier is gone
  if (is_block(copy)) {
    const PyBlock& block = *nb::inst_ptr<PyBlock>(copy);
    if (block.metadata.is_none()) return block.logical_bytes;
  }
  return nb::cast<uint64_t>(copy.attr("get_size")());
}

}  // namespace

Removal removal_from(uint8_t number) {
  if (number >= kNumReasons) throw nb::value_error("there is no removal reason of that number");
  return static_cast<Removal>(number);
}

Ledger::~Ledger() {
  for (auto& page : pages_) {
    for (auto& [key, generation] : page->generations) Py_DECREF(key);
  }
}

size_t Ledger::register_page(const std::string& name) {
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i]->name == name) return i;
  }
  if (pages_.size() >= kMaxPages) throw nb::value_error("more than 63 local tiers");
  auto page = std::make_unique<LedgerPage>();
  page->name = name;
  page->name_object = nb::str(name.c_str());
  const size_t index = pages_.size();
  pages_.push_back(std::move(page));
  for (auto& ring : rings_) {
    const auto& wanted = ring->tier_names;
    if (ring->any_tier || std::find(wanted.begin(), wanted.end(), name) != wanted.end()) {
      ring->tiers |= uint64_t{1} << index;
    }
  }
  return index;
}

double Ledger::now() const {
  if (!clock_.is_none()) return nb::cast<double>(clock_());
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Ledger::Stamp Ledger::stamp(nb::handle copy) const {
  // Both may call Python, so they are read before anything changes.
  if (rings_.empty()) return {0, 0.0};
  const uint64_t size_bytes = size_of(copy);
  return {size_bytes, now()};
}

uint64_t Ledger::still_in(size_t page, PyObject* key, bool held) const {
  return (pages_.size() == 1 ? 0 : mask_of(key)) | (held ? uint64_t{1} << page : 0);
}

uint64_t Ledger::mask_of(PyObject* key) const {
  uint64_t mask = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i]->generations.count(key)) mask |= uint64_t{1} << i;
  }
  return mask;
}

uint64_t Ledger::generation(size_t page, PyObject* key) const {
  const auto& generations = pages_.at(page)->generations;
  auto found = generations.find(key);
  return found == generations.end() ? 0 : found->second;
}

void Ledger::stored(size_t page, PyObject* key, nb::handle copy) {
  const Stamp stamped = stamp(copy);
  After after;
  put_generation(page, key);
  if (!rings_.empty()) {
    record({seq_, EventKind::kStored, Removal::kNone, static_cast<uint8_t>(page), nb::borrow(key),
            stamped.size_bytes, seq_, still_in(page, key, true), stamped.monotonic_s},
           after);
  }
}

bool Ledger::removed(size_t page, PyObject* key, nb::handle copy, Removal reason) {
  auto& generations = pages_.at(page)->generations;
  if (!generations.count(key)) return false;
  const Stamp stamped = stamp(copy);
  After after;
  auto found = generations.find(key);
  if (found == generations.end()) return false;
  const uint64_t generation = found->second;
  nb::object owned = nb::steal(found->first);  // the table's reference, dropped at the end
  generations.erase(found);
  count_removal(page, reason);
  ++seq_;
  if (!rings_.empty()) {
    record(
        {seq_, EventKind::kRemoved, reason, static_cast<uint8_t>(page), owned, stamped.size_bytes,
         generation, still_in(page, owned.ptr(), false), stamped.monotonic_s},
        after);
  }
  return true;
}

void Ledger::replaced(size_t page, PyObject* key, nb::handle old_copy, nb::handle new_copy) {
  const Stamp old_stamp = stamp(old_copy), new_stamp = stamp(new_copy);
  After after;
  const uint64_t generation = this->generation(page, key);
  if (generation) {
    count_removal(page, Removal::kReplaced);
    ++seq_;
    // The key stays: its STORED follows in this very step.
    if (!rings_.empty()) {
      record({seq_, EventKind::kRemoved, Removal::kReplaced, static_cast<uint8_t>(page),
              nb::borrow(key), old_stamp.size_bytes, generation, still_in(page, key, true),
              old_stamp.monotonic_s},
             after);
    }
  }
  put_generation(page, key);
  if (!rings_.empty()) {
    record({seq_, EventKind::kStored, Removal::kNone, static_cast<uint8_t>(page), nb::borrow(key),
            new_stamp.size_bytes, seq_, still_in(page, key, true), new_stamp.monotonic_s},
           after);
  }
}

void Ledger::count_removal(size_t page, Removal reason) {
  ++pages_[page]->num_removed[static_cast<size_t>(reason)];
}

void Ledger::put_generation(size_t page, PyObject* key) {
  ++seq_;
  ++pages_.at(page)->num_stored;
  auto [at, added] = pages_.at(page)->generations.insert({key, seq_});
  if (added) {
    Py_INCREF(key);
  } else {
    at.value() = seq_;
  }
}

void Ledger::end_page(size_t page, Removal reason) {
  std::vector<nb::object> keys;
  for (auto& [key, generation] : pages_.at(page)->generations) keys.push_back(nb::borrow(key));
  for (nb::object& key : keys) removed(page, key.ptr(), nb::none(), reason);
}

void Ledger::forget_page(size_t page) {
  KeyTable<uint64_t> old;
  std::swap(old, pages_.at(page)->generations);
  for (auto& [key, generation] : old) Py_DECREF(key);
}

Ledger::After::~After() {
  // Waking is best effort, and a destructor must not throw: the reader's next look finds the
  // record.
  for (nb::object& wake : to_wake) {
    if (PyObject* result = PyObject_CallNoArgs(wake.ptr())) {
      Py_DECREF(result);
    } else {
      PyErr_WriteUnraisable(wake.ptr());
    }
  }
}

void Ledger::record(const EventRecord& record, After& after) {
  for (auto& ring : rings_) {
    if ((ring->tiers >> record.tier & 1) && (ring->kinds >> static_cast<int>(record.kind) & 1)) {
      append(*ring, record, after);
    }
  }
}

void Ledger::append(EventRing& ring, const EventRecord& record, After& after) {
  if (ring.records.size() >= ring.capacity) {
    EventRecord& oldest = ring.records.front();
    if (!ring.num_lost) ring.first_lost = oldest.seq;
    ring.last_lost = oldest.seq;
    ++ring.num_lost;
    ++ring.total_lost;
    ++num_lost_;
    after.dropped.push_back(std::move(oldest.key));
    ring.records.pop_front();
  }
  ring.records.push_back(record);
  if (ring.idle) {
    ring.idle = false;
    after.to_wake.push_back(ring.wake);
  }
}

std::shared_ptr<EventRing> Ledger::subscribe(uint64_t capacity, nb::object tiers, uint8_t kinds,
                                             nb::object wake) {
  auto ring = std::make_shared<EventRing>();
  ring->capacity = capacity;
  ring->kinds = kinds;
  ring->wake = std::move(wake);
  ring->any_tier = tiers.is_none();
  ring->tiers = 0;
  if (!ring->any_tier) {
    for (nb::handle name : tiers) ring->tier_names.push_back(nb::cast<std::string>(name));
  }
  for (size_t i = 0; i < pages_.size(); ++i) {
    const auto& wanted = ring->tier_names;
    if (ring->any_tier ||
        std::find(wanted.begin(), wanted.end(), pages_[i]->name) != wanted.end()) {
      ring->tiers |= uint64_t{1} << i;
    }
  }
  if (closed_) {
    ring->records.push_back(
        {++seq_, EventKind::kClosed, Removal::kNone, 0, nb::object(), 0, 0, 0, now()});
    ring->closed = true;
  } else {
    rings_.push_back(ring);
  }
  return ring;
}

void Ledger::unsubscribe(EventRing* ring) {
  rings_.erase(std::remove_if(rings_.begin(), rings_.end(),
                              [&](const auto& other) { return other.get() == ring; }),
               rings_.end());
}

void Ledger::make_inert() {
  std::vector<std::shared_ptr<EventRing>> rings;
  std::swap(rings, rings_);
  for (auto& ring : rings) {
    ring->closed = true;
    ring->num_lost = 0;
    ring->records.clear();
  }
}

void Ledger::close() {
  if (closed_) return;
  closed_ = true;
  const double at = now();
  After after;
  ++seq_;
  std::vector<std::shared_ptr<EventRing>> rings;
  std::swap(rings, rings_);
  for (auto& ring : rings) {
    ring->closed = true;
    append(*ring, {seq_, EventKind::kClosed, Removal::kNone, 0, nb::object(), 0, 0, 0, at}, after);
  }
}

}  // namespace lmcache
