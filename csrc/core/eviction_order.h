// The order in which entries of a cache leave it: LRU, LFU, FIFO or MRU over intrusive lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace lmcache {

class Block;
class EvictionOrder;

enum class PolicyKind { kLru, kLfu, kFifo, kMru };

// Where an entry stands in its order.
//
//   place      meaning                                        who may leave it
//   kNone      in no order                                    EvictionOrder::insert
//   kListed    in its bucket's list                           use, hit, demote, remove, park
//   kParked    was held when met at the victims' end; out of  use, hit, remove; unpark when
//   released
//              the way of every later search
//   kReturned  released unused; at the victims' end, in the   use, hit, demote, remove, park
//              place its label gives it
enum class Place : uint8_t { kNone, kListed, kParked, kReturned };

struct Bucket;

// One resident key. The owner fills `block`, `key` and `value`; the order owns the rest.
struct Entry {
  Entry* prev = nullptr;
  Entry* next = nullptr;
  Bucket* bucket = nullptr;
  int64_t label = 0;   // position among entries with equally many uses; smaller leaves first
  uint64_t uses = 0;   // LFU only: how often it was used; 0 for entries placed cold
  uint64_t batch = 0;  // the last batch that used or demoted this entry
  Place place = Place::kNone;
  EvictionOrder* order = nullptr;
  Block* block = nullptr;
  void* key = nullptr;
  void* value = nullptr;
};

struct Bucket {
  Entry ends;  // sentinel: ends.next is the coldest, ends.prev the youngest
  explicit Bucket(uint64_t uses) {
    ends.prev = ends.next = &ends;
    ends.uses = uses;
  }
  bool empty() const { return ends.next == &ends; }
};

// Pure ordering; knows nothing of keys or bytes. Every operation is O(1), but for LFU's search of a
// bucket and entries in kReturned (logarithmic). Not synchronised: the pool's mutex guards it.
class EvictionOrder {
 public:
  explicit EvictionOrder(PolicyKind kind) : kind_(kind) {}
  EvictionOrder(const EvictionOrder&) = delete;
  EvictionOrder& operator=(const EvictionOrder&) = delete;

  PolicyKind kind() const { return kind_; }
  size_t size() const { return size_; }
  size_t num_parked() const { return num_parked_; }
  // Numbers a batch of uses: within one, repeated uses of an entry count once.
  uint64_t next_batch() { return ++batch_; }

  void insert(Entry* entry, bool cold);
  void remove(Entry* entry);
  // A get or a touch. Returns whether the order moved (never under FIFO and MRU).
  bool use(Entry* entry, uint64_t batch);
  // A lookup's hit: as `use`, and under MRU it moves to the young end, the next victim.
  bool hit(Entry* entry, uint64_t batch);
  // To the victims' end, ahead of all others; once in a batch. Returns whether the order moves.
  bool demote(Entry* entry, uint64_t batch);
  void park(Entry* entry);
  // Back to the victims' end, in its old place relative to other entries.
  void unpark(Entry* entry);

  // Every entry that is not parked, coldest first (under MRU the coldest leaves last).
  std::vector<Entry*> unparked() const;
  static bool colder(const Entry* a, const Entry* b) { return Less{}(a, b); }
  std::vector<std::string> check() const;

 private:
  friend class VictimCursor;
  struct Less {
    bool operator()(const Entry* a, const Entry* b) const {
      return a->uses != b->uses ? a->uses < b->uses : a->label < b->label;
    }
  };

  bool ignores_placement() const { return kind_ == PolicyKind::kFifo || kind_ == PolicyKind::kMru; }
  void push_young(Entry* entry);
  void push_cold(Entry* entry);
  Bucket* bucket_for(uint64_t uses);
  void detach(Entry* entry, bool keep_bucket = false);
  bool move_young(Entry* entry, uint64_t batch);

  const PolicyKind kind_;
  int64_t young_label_ = 0;
  int64_t cold_label_ = 0;
  uint64_t batch_ = 0;
  size_t size_ = 0;
  size_t num_parked_ = 0;
  std::map<uint64_t, Bucket> buckets_;
  std::set<Entry*, Less> returned_;
};

// Walks the entries in the order in which they would leave, parked ones left out. The entry just
// given may be parked or left alone; nothing else may change during the walk.
class VictimCursor {
 public:
  explicit VictimCursor(EvictionOrder& order);
  Entry* next();  // null at the end

 private:
  Entry* peek_listed();
  Entry* peek_returned() const;

  EvictionOrder& order_;
  const bool from_young_;
  std::map<uint64_t, Bucket>::iterator bucket_;
  Entry* node_ = nullptr;
  Entry* last_returned_ = nullptr;  // parked or not, its label says where the walk stands
};

}  // namespace lmcache
