#include <algorithm>
#include <deque>
#include <unordered_set>

#include "bind/ledger.h"
#include "bind/lock_guard.h"
#include "bind/sequences.h"

namespace lmcache {

PyObject* g_lock_is_held = nullptr;

namespace {

using Table = KeyTable<Entry*>;

// What touch answers per key.
enum class Answer : char { kAbsent = 0, kMoved = 1, kResident = 2 };

// Key -> memory object for one pool, with the order in which they leave, and the only code that
// adds or removes one: table, order, pool and ledger change in one step. The table is guarded by
// the interpreter's lock, the order by the pool's mutex.
class HotIndex {
 public:
  HotIndex(std::shared_ptr<Pool> pool, const std::string& policy, std::shared_ptr<Ledger> ledger,
           size_t page, nb::object lock)
      : pool_(std::move(pool)),
        order_(kind_from(policy)),
        ledger_(std::move(ledger)),
        page_(page),
        lock_(lock) {}
  HotIndex(const HotIndex&) = delete;
  HotIndex& operator=(const HotIndex&) = delete;
  ~HotIndex() { drop_all(); }

  size_t size() const { return table_.size(); }

  bool contains(nb::handle key) const {
    return is_key(key.ptr()) && table_.find(key.ptr()) != table_.end();
  }

  nb::object peek(nb::handle key) const {
    Entry* entry = find(key);
    return entry ? nb::borrow(static_cast<PyObject*>(entry->value)) : nb::object(nb::none());
  }

  // Reports to another ledger from now on, beginning with what is resident.
  void attach(std::shared_ptr<Ledger> ledger, size_t page) {
    ledger_ = std::move(ledger);
    page_ = page;
    for (const auto& [key, entry] : table_) ledger_->stored(page_, key, value_of(entry));
  }

  bool insert(nb::handle key, nb::handle block, bool cold) {
    if (find(key)) return false;
    PyBlock& listed = checked(block);
    add(key, block, listed, cold);
    ledger_->stored(page_, key.ptr(), block);
    return true;
  }

  // Lists blocks, given head first; the head ends youngest, cold ones leave tail first. A resident
  // key of the same size and dtypes is used again, unless `cold`; of others, it is replaced. Takes
  // the lock; lists nothing while `takes_puts` is false.
  void put(nb::tuple keys, nb::tuple blocks, bool cold, bool holds_lock) {
    const KeySequence sequence(keys);
    const BlockSequence values(blocks, sequence.size());
    std::vector<std::pair<nb::object, nb::object>> replaced;  // dropped after the lock
    const LockGuard guard(lock_, holds_lock);
    if (!takes_puts) return;
    const uint64_t batch = pool_->next_batch(order_);
    for (size_t n = 0; n < sequence.size(); ++n) {
      const size_t i = cold ? n : sequence.size() - 1 - n;
      Entry* entry = lookup(sequence[i]);
      if (!entry) {
        add(sequence[i], values[i], checked(values[i]), cold);
        ledger_->stored(page_, sequence[i], values[i]);
      } else if (!same_contents(entry, values[i])) {
        replaced.push_back(replace(entry, sequence[i], values[i], cold));
      } else if (!cold) {
        pool_->use(order_, entry, Pool::Use::kUse, batch);
      }
    }
  }

  // Positions of the blocks that cannot be listed as they are: of another pool, listed under
  // another key, or given a second time.
  nb::list positions_to_copy(nb::handle keys, nb::handle blocks) const {
    const KeySequence sequence(keys);
    const BlockSequence values(blocks, sequence.size());
    std::vector<size_t> positions;
    std::unordered_set<PyObject*> given;
    for (size_t i = 0; i < sequence.size(); ++i) {
      if (sequence.size() > 1 && !given.insert(values[i].ptr()).second) {
        positions.push_back(i);
        continue;
      }
      Block& block = nb::inst_ptr<PyBlock>(values[i])->core;
      if (&block.pool() == pool_.get() && !pool_->cached(block)) continue;
      Entry* entry = lookup(sequence[i]);
      if (!entry || value_of(entry).ptr() != values[i].ptr()) positions.push_back(i);
    }
    nb::list result;
    for (size_t i : positions) result.append(i);
    return result;
  }

  // Removes keys under the lock. Returns the memory objects of those that were there.
  nb::list remove(nb::tuple keys, uint8_t reason, bool holds_lock) {
    const KeySequence sequence(keys);
    const Removal why = removal_from(reason);
    Removed gone;
    {
      const LockGuard guard(lock_, holds_lock);
      for (size_t i = 0; i < sequence.size(); ++i) {
        if (Entry* entry = lookup(sequence[i])) take_out(entry, gone);
      }
      if (why == Removal::kCapacity) count_evicted(gone.size());
      report_removed(gone, why);
    }
    return values_of(gone);
  }

  // Removes everything, or everything that nobody holds, under the lock; with `stop_puts`, nothing
  // is listed any more. Returns the memory objects.
  nb::list clear(bool only_evictable, bool stop_puts, uint8_t reason, bool holds_lock) {
    const Removal why = removal_from(reason);
    Removed gone;
    {
      const LockGuard guard(lock_, holds_lock);
      if (stop_puts) takes_puts = false;
      const std::vector<Entry*> entries =
          only_evictable ? pool_->evictable(order_) : entries_in_table();
      for (Entry* entry : entries) take_out(entry, gone);
      report_removed(gone, why);
    }
    return values_of(gone);
  }

  nb::bytes use(nb::handle keys, Pool::Use kind) {
    const KeySequence sequence(keys);
    std::string answers(sequence.size(), static_cast<char>(Answer::kAbsent));
    const std::vector<Entry*> entries = find_all(sequence);
    pool_->locked([&] {
      const uint64_t batch = order_.next_batch();
      // Head first for a demotion, so that the tail leaves first; else the head ends youngest.
      for (size_t n = 0; n < entries.size(); ++n) {
        const size_t i = kind == Pool::Use::kDemote ? n : entries.size() - 1 - n;
        if (!entries[i]) continue;
        const bool moved = pool_->use_locked(order_, entries[i], kind, batch);
        answers[i] = static_cast<char>(moved ? Answer::kMoved : Answer::kResident);
      }
    });
    return nb::bytes(answers.data(), answers.size());
  }

  // Takes the lock, as the two below.
  nb::object get(nb::handle key, bool holds_lock) {
    require_key(key);
    const LockGuard guard(lock_, holds_lock);
    Entry* entry = find(key);
    if (!entry) return nb::none();
    pool_->locked([&] {
      pool_->ref_up_locked(*entry->block);
      pool_->use_locked(order_, entry, Pool::Use::kUse, order_.next_batch());
    });
    return nb::borrow(static_cast<PyObject*>(entry->value));
  }

  // With `into` the objects are in the caller's list before any interrupt can strike.
  nb::list get_many(nb::handle keys, bool holds_lock, nb::object into) {
    const KeySequence sequence(keys);
    std::vector<nb::object> found(sequence.size());
    {
      const LockGuard guard(lock_, holds_lock);
      const std::vector<Entry*> entries = find_all(sequence);
      pool_->locked([&] {
        const uint64_t batch = order_.next_batch();
        for (size_t i = entries.size(); i-- > 0;) {
          if (!entries[i]) continue;
          pool_->ref_up_locked(*entries[i]->block);
          pool_->use_locked(order_, entries[i], Pool::Use::kUse, batch);
        }
      });
      for (size_t i = 0; i < entries.size(); ++i) {
        found[i] = entries[i] ? nb::borrow(value_of(entries[i])) : nb::object(nb::none());
      }
    }
    return append_all(std::move(into), found);
  }

  static nb::list append_all(nb::object into, std::vector<nb::object>& objects) {
    nb::list result = into.is_none() ? nb::list() : nb::cast<nb::list>(into);
    for (nb::object& object : objects) result.append(std::move(object));
    return result;
  }

  size_t prefix_length(nb::handle keys) const {
    const KeySequence sequence(keys);
    size_t n = 0;
    while (n < sequence.size() && lookup(sequence[n])) ++n;
    return n;
  }

  // Protects the resident prefix, by a pin or by a reference each; moves nothing.
  template <bool kByPin>
  nb::list protect_prefix(nb::handle keys, nb::object into) {
    const KeySequence sequence(keys);
    std::vector<Entry*> entries;
    for (size_t i = 0; i < sequence.size(); ++i) {
      Entry* entry = lookup(sequence[i]);
      if (!entry) break;
      entries.push_back(entry);
    }
    pool_->locked([&] {
      for (Entry* entry : entries) {
        if (kByPin) {
          pool_->pin_locked(*entry->block);
        } else {
          pool_->ref_up_locked(*entry->block);
        }
      }
    });
    std::vector<nb::object> objects;
    for (Entry* e : entries) objects.push_back(nb::borrow(static_cast<PyObject*>(e->value)));
    return append_all(std::move(into), objects);
  }

  // Returns `count` new blocks, evicting as little as needed, or None, evicting nothing.
  nb::object allocate(nb::handle cls, nb::handle spec, uint64_t nbytes, uint64_t count,
                      nb::handle parent, bool holds_lock) {
    std::vector<std::pair<nb::object, nb::object>> gone;  // dropped after the lock
    Allocation made;
    {
      const LockGuard guard(lock_, holds_lock);
      made = pool_->allocate(nbytes, count, &order_);
      for (Entry* victim : made.victims) gone.push_back(forget(victim));
      count_evicted(gone.size());
      report_removed(gone, Removal::kCapacity);
    }
    return make_blocks(cls, pool_, made.extents, nbytes, spec, parent);
  }

  // Evicts the coldest entries that nobody holds until `nbytes` of theirs are gone, under the lock.
  // Returns their blocks; None, evicting nothing, when there are not as many bytes.
  nb::object make_room(uint64_t nbytes, bool holds_lock) {
    Removed gone;
    {
      const LockGuard guard(lock_, holds_lock);
      std::vector<Entry*> victims;
      if (!pool_->take_coldest(order_, nbytes, victims)) return nb::none();
      for (Entry* victim : victims) gone.push_back(forget(victim));
      count_evicted(gone.size());
      report_removed(gone, Removal::kCapacity);
    }
    return values_of(gone);
  }
  uint64_t cached_bytes() { return pool_->gauges(nullptr).cached_bytes; }
  uint64_t num_evicted() const { return num_evicted_; }
  uint64_t num_evictions() const { return num_evictions_; }

  bool takes_puts = true;  // guarded by the lock

  bool would_fit(uint64_t nbytes) { return pool_->would_fit(nbytes, order_); }
  nb::list first_victims(size_t count) { return keys_of(pool_->first_victims(order_, count)); }

  // Every key, coldest first; parked ones stand where they will return to.
  nb::list keys() {
    std::vector<Entry*> all = entries_in_table();
    pool_->locked([&] { std::sort(all.begin(), all.end(), EvictionOrder::colder); });
    return keys_of(all);
  }

  nb::dict gauges() { return gauges_dict(pool_->gauges(&order_)); }

  std::vector<std::string> check_integrity() {
    std::vector<std::string> faults = pool_->check(&order_);
    if (table_.size() != order_.size()) faults.push_back("the table and the order differ in size");
    if (ledger_->page(page_).generations.size() != table_.size()) {
      faults.push_back("the ledger and the table differ in size");
    }
    for (const auto& [key, entry] : table_) {
      if (!ledger_->generation(page_, key)) faults.push_back("the ledger misses a resident key");
    }
    return faults;
  }

 private:
  Entry* lookup(PyObject* key) const {
    auto found = table_.find(key);
    return found == table_.end() ? nullptr : found->second;
  }

  // Looks up a batch in passes, so that its cache misses overlap: entries first, then the
  // neighbours whose links a move will change.
  std::vector<Entry*> find_all(const KeySequence& sequence) const {
    std::vector<Entry*> entries(sequence.size());
    for (size_t i = 0; i < sequence.size(); ++i) {
      entries[i] = lookup(sequence[i]);
      if (entries[i]) __builtin_prefetch(entries[i], 1);
    }
    for (Entry* entry : entries) {
      if (!entry) continue;
      __builtin_prefetch(entry->prev, 1);
      __builtin_prefetch(entry->next, 1);
    }
    return entries;
  }

  Entry* find(nb::handle key) const {
    require_key(key);
    return lookup(key.ptr());
  }

  static nb::handle value_of(const Entry* entry) { return static_cast<PyObject*>(entry->value); }

  std::vector<Entry*> entries_in_table() const {
    std::vector<Entry*> all;
    all.reserve(table_.size());
    for (const auto& [key, entry] : table_) all.push_back(entry);
    return all;
  }

  // The same size and dtypes. Objects of one shape share their description.
  static bool same_contents(const Entry* entry, nb::handle block) {
    const PyBlock& resident = *nb::inst_ptr<PyBlock>(value_of(entry));
    const PyBlock& given = *nb::inst_ptr<PyBlock>(block);
    if (&resident == &given) return true;
    if (resident.metadata.is_none() && given.metadata.is_none()) {
      if (resident.logical_bytes != given.logical_bytes) return false;
      if (resident.spec.is(given.spec)) return true;
    } else if (!value_of(entry).attr("get_size")().equal(block.attr("get_size")())) {
      return false;
    }
    return value_of(entry).attr("get_dtypes")().equal(block.attr("get_dtypes")());
  }

  // Puts `block` in the place of the resident one. Returns the old key and memory object.
  std::pair<nb::object, nb::object> replace(Entry* entry, nb::handle key, nb::handle block,
                                            bool cold) {
    PyBlock& listed = checked(block);
    pool_->uncache(order_, entry);
    auto old = forget(entry);
    add(key, block, listed, cold);
    ledger_->replaced(page_, key.ptr(), old.second, block);
    return old;
  }

  // What can be listed: a live block of this pool that no cache lists.
  PyBlock& checked(nb::handle block) const {
    if (!is_block(block)) throw nb::type_error("block must be a memory object");
    PyBlock& listed = *nb::inst_ptr<PyBlock>(block);
    if (&listed.core.pool() != pool_.get()) throw nb::value_error("block belongs to another pool");
    if (pool_->freed(listed.core)) throw nb::value_error("the memory object was released already");
    if (pool_->cached(listed.core)) {
      throw nb::value_error("the memory object is stored under another key");
    }
    return listed;
  }

  void add(nb::handle key, nb::handle block, PyBlock& listed, bool cold) {
    Entry* entry = new_entry();
    entry->key = key.inc_ref().ptr();
    entry->value = block.inc_ref().ptr();
    table_.emplace(key.ptr(), entry);
    pool_->cache(order_, entry, listed.core, cold);
  }

  Entry* new_entry() {
    if (spare_.empty()) return &storage_.emplace_back();
    Entry* entry = spare_.back();
    spare_.pop_back();
    *entry = Entry{};
    return entry;
  }

  // Takes an entry that has left the order out of the table; the caller gets its references.
  std::pair<nb::object, nb::object> forget(Entry* entry) {
    table_.erase(static_cast<PyObject*>(entry->key));
    nb::object key = nb::steal(static_cast<PyObject*>(entry->key));
    nb::object value = nb::steal(static_cast<PyObject*>(entry->value));
    spare_.push_back(entry);
    return {std::move(key), std::move(value)};
  }

  static nb::list keys_of(const std::vector<Entry*>& entries) {
    std::vector<nb::object> keys;
    keys.reserve(entries.size());
    for (Entry* e : entries) keys.push_back(nb::borrow(static_cast<PyObject*>(e->key)));
    nb::list result;
    for (nb::object& key : keys) result.append(std::move(key));
    return result;
  }

  using Removed = std::vector<std::pair<nb::object, nb::object>>;  // keys and memory objects

  void take_out(Entry* entry, Removed& gone) {
    pool_->uncache(order_, entry);
    gone.push_back(forget(entry));
  }

  static nb::list values_of(Removed& gone) {
    nb::list values;
    for (auto& [key, value] : gone) values.append(std::move(value));
    return values;
  }

  void count_evicted(size_t number) {
    num_evicted_ += number;
    if (number > 0) ++num_evictions_;
  }

  void report_removed(const Removed& gone, Removal reason) {
    for (const auto& [key, value] : gone) ledger_->removed(page_, key.ptr(), value, reason);
  }

  // At the end of life: no events, the ledger has seen the cache closed.
  void drop_all() {
    Removed gone;
    for (Entry* entry : entries_in_table()) take_out(entry, gone);
  }

  std::shared_ptr<Pool> pool_;
  EvictionOrder order_;
  std::shared_ptr<Ledger> ledger_;
  size_t page_;
  const LockCalls lock_;
  uint64_t num_evicted_ = 0;
  uint64_t num_evictions_ = 0;  // times that room was made, whatever number of entries it took
  Table table_;
  std::deque<Entry> storage_;
  std::vector<Entry*> spare_;
};

}  // namespace

void bind_index(nb::module_& m) {
  g_lock_is_held = PyErr_NewException("lmcache._native.LockIsHeld", nullptr, nullptr);
  m.attr("LockIsHeld") = nb::borrow(g_lock_is_held);
  m.def(
      "check_keys", [](nb::handle keys) { const KeySequence sequence(keys); }, nb::arg("keys"),
      "TypeError naming the first of them that is no cache key.");
  m.def(
      "check_pairs",
      [](nb::handle keys, nb::handle blocks) {
        const KeySequence sequence(keys);
        const BlockSequence values(blocks, sequence.size());
      },
      nb::arg("keys"), nb::arg("blocks"),
      "TypeError or ValueError unless there is one live memory object per cache key.");
  nb::class_<HotIndex>(m, "HotIndex", "Key to memory object, with the order in which they leave.")
      .def(nb::init<std::shared_ptr<Pool>, const std::string&, std::shared_ptr<Ledger>, size_t,
                    nb::object>(),
           nb::arg("pool"), nb::arg("policy"), nb::arg("ledger"), nb::arg("page"), nb::arg("lock"))
      .def("attach", &HotIndex::attach, nb::arg("ledger"), nb::arg("page"),
           "Report to another ledger from now on, beginning with what is resident.")
      .def("__len__", &HotIndex::size)
      .def("__contains__", &HotIndex::contains, nb::arg("key"))
      .def("peek", &HotIndex::peek, nb::arg("key"), "The memory object or None; moves nothing.")
      .def("insert", &HotIndex::insert, nb::arg("key"), nb::arg("block"), nb::arg("cold") = false,
           "Take a reference and list the block; False when the key is resident already.")
      .def("put", &HotIndex::put, nb::arg("keys"), nb::arg("blocks"), nb::arg("cold") = false,
           nb::arg("holds_lock") = false, "List blocks, given head first, under the lock.")
      .def_rw("takes_puts", &HotIndex::takes_puts)
      .def("positions_to_copy", &HotIndex::positions_to_copy, nb::arg("keys"), nb::arg("blocks"))
      .def("remove", &HotIndex::remove, nb::arg("keys"), nb::arg("reason"),
           nb::arg("holds_lock") = false,
           "Drop the cache's references under the lock; the memory objects of those that were "
           "there.")
      .def("clear", &HotIndex::clear, nb::arg("only_evictable"), nb::arg("stop_puts"),
           nb::arg("reason"), nb::arg("holds_lock") = false,
           "Remove what nobody holds, or everything, under the lock; the memory objects.")
      .def("get", &HotIndex::get, nb::arg("key"), nb::arg("holds_lock") = false,
           "The memory object with a reference; a use.")
      .def("get_many", &HotIndex::get_many, nb::arg("keys"), nb::arg("holds_lock") = false,
           nb::arg("into") = nb::none())
      .def(
          "touch", [](HotIndex& self, nb::handle k) { return self.use(k, Pool::Use::kUse); },
          nb::arg("keys"), "One byte per key: 0 absent, 1 moved, 2 resident but not moved.")
      .def(
          "hit", [](HotIndex& self, nb::handle k) { return self.use(k, Pool::Use::kHit); },
          nb::arg("keys"), "As touch, for a lookup: MRU moves too.")
      .def(
          "demote", [](HotIndex& self, nb::handle k) { return self.use(k, Pool::Use::kDemote); },
          nb::arg("keys"), "To the end where victims are taken; answers like touch.")
      .def("prefix_length", &HotIndex::prefix_length, nb::arg("keys"))
      .def("pin_prefix", &HotIndex::protect_prefix<true>, nb::arg("keys"),
           nb::arg("into") = nb::none(), "Pin the resident prefix; returns its memory objects.")
      .def("hold_prefix", &HotIndex::protect_prefix<false>, nb::arg("keys"),
           nb::arg("into") = nb::none(),
           "The memory objects of the resident prefix, each with a reference.")
      .def("allocate", &HotIndex::allocate, nb::arg("cls"), nb::arg("spec").none(),
           nb::arg("nbytes"), nb::arg("count"), nb::arg("parent").none(),
           nb::arg("holds_lock") = false,
           "`count` new blocks, evicting as little as needed; None evicts nothing.")
      .def("make_room", &HotIndex::make_room, nb::arg("nbytes"), nb::arg("holds_lock") = false,
           "Evict the coldest until `nbytes` of theirs are gone; None evicts nothing.")
      .def_prop_ro("cached_bytes", &HotIndex::cached_bytes, "Bytes of what is listed.")
      .def_prop_ro("num_evicted", &HotIndex::num_evicted)
      .def_prop_ro("num_evictions", &HotIndex::num_evictions, "Times that room was made.")
      .def("would_fit", &HotIndex::would_fit, nb::arg("nbytes"))
      .def("first_victims", &HotIndex::first_victims, nb::arg("count"))
      .def("keys", &HotIndex::keys)
      .def("gauges", &HotIndex::gauges)
      .def("check_integrity", &HotIndex::check_integrity);
}

}  // namespace lmcache
