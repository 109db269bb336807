// Which tier holds which key, the numbering of events, and the rings that subscribers read.
//
// Everything here is guarded by the interpreter's lock: each public call is one step that runs no
// Python code between reading and changing. That makes it the leaf of the lock order, and legal
// anywhere, a finaliser included.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "bind/key_table.h"

namespace lmcache {

enum class EventKind : uint8_t { kStored, kRemoved, kLost, kClosed };
enum class Removal : uint8_t { kCapacity, kExplicit, kClear, kReplaced, kExpired, kError, kNone };

constexpr size_t kNumReasons = static_cast<size_t>(Removal::kNone);
Removal removal_from(uint8_t number);  // value_error when there is no such reason

struct EventRecord {
  uint64_t seq;
  EventKind kind;
  Removal reason;
  uint8_t tier;
  nb::object key;  // invalid for CLOSED
  uint64_t size_bytes;
  uint64_t generation;
  uint64_t still_in;  // bit i: page i holds the key
  double monotonic_s;
};

// The records one subscriber has not taken yet; a full ring drops its oldest and remembers which.
//
//   state    meaning                            who may leave it
//   open     records are appended               close
//   closed   what is left can be taken          nobody
//   inert    after a fork, in the child: empty  nobody
struct EventRing {
  uint64_t capacity;
  uint64_t tiers;  // bit i: records of page i are wanted
  uint8_t kinds;   // bit i: records of kind i are wanted
  std::vector<std::string> tier_names;
  bool any_tier;
  nb::object wake;  // called without arguments when an idle ring gets a record
  bool idle = false;
  bool closed = false;
  std::deque<EventRecord> records;
  uint64_t first_lost = 0, last_lost = 0, num_lost = 0, total_lost = 0;
};

struct LedgerPage {
  std::string name;
  nb::object name_object;
  KeyTable<uint64_t> generations;  // key -> seq of the event that stored this copy
  // Transitions so far, counted whether or not anybody subscribes.
  uint64_t num_stored = 0;
  std::array<uint64_t, kNumReasons> num_removed{};  // by reason
};

class Ledger {
 public:
  explicit Ledger(nb::object clock) : clock_(std::move(clock)) {}
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  ~Ledger();

  size_t register_page(const std::string& name);
  void stored(size_t page, PyObject* key, nb::handle copy);
  bool removed(size_t page, PyObject* key, nb::handle copy, Removal reason);
  void replaced(size_t page, PyObject* key, nb::handle old_copy, nb::handle new_copy);
  // Ends the residency of everything a page lists: its tier is closed and cannot report any more.
  void end_page(size_t page, Removal reason);
  void forget_page(size_t page);  // drops every key without an event: its tier reports anew

  uint64_t seq() const { return seq_; }
  uint64_t generation(size_t page, PyObject* key) const;  // 0: absent
  LedgerPage& page(size_t index) { return *pages_.at(index); }
  const LedgerPage& page(size_t index) const { return *pages_.at(index); }
  size_t num_pages() const { return pages_.size(); }
  nb::object name_of(size_t index) const { return pages_[index]->name_object; }

  std::shared_ptr<EventRing> subscribe(uint64_t capacity, nb::object tiers, uint8_t kinds,
                                       nb::object wake);
  void unsubscribe(EventRing* ring);
  void make_inert();
  void close();
  bool closed() const { return closed_; }
  size_t num_rings() const { return rings_.size(); }
  uint64_t num_lost() const { return num_lost_; }  // over all rings ever

 private:
  struct Stamp {
    uint64_t size_bytes;
    double monotonic_s;
  };
  // What may run Python code, and so must wait until every ring has the record.
  struct After {
    std::vector<nb::object> dropped;
    std::vector<nb::object> to_wake;
    ~After();
  };

  double now() const;
  Stamp stamp(nb::handle copy) const;
  void count_removal(size_t page, Removal reason);
  uint64_t mask_of(PyObject* key) const;
  uint64_t still_in(size_t page, PyObject* key, bool held) const;
  void put_generation(size_t page, PyObject* key);
  void record(const EventRecord& record, After& after);
  void append(EventRing& ring, const EventRecord& record, After& after);

  nb::object clock_;  // None: the machine's monotonic clock
  uint64_t seq_ = 0;
  uint64_t num_lost_ = 0;
  bool closed_ = false;
  std::vector<std::unique_ptr<LedgerPage>> pages_;
  std::vector<std::shared_ptr<EventRing>> rings_;
};

}  // namespace lmcache
