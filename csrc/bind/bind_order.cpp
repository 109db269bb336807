#include <deque>

#include "bind/bindings.h"

namespace lmcache {

namespace {

// The eviction order over small integers, for orders whose keys and bytes live elsewhere.
// Guarded by the interpreter's lock.
class HandleOrder {
 public:
  explicit HandleOrder(const std::string& policy) : order_(kind_from(policy)) {}

  uint64_t insert(bool cold) {
    uint64_t handle;
    if (spare_.empty()) {
      handle = entries_.size();
      entries_.emplace_back();
    } else {
      handle = spare_.back();
      spare_.pop_back();
      entries_[handle] = Entry{};
    }
    entries_[handle].key = reinterpret_cast<void*>(handle);
    order_.insert(&entries_[handle], cold);
    return handle;
  }

  void remove(uint64_t handle) {
    order_.remove(&listed(handle));
    spare_.push_back(handle);
  }
  bool use(uint64_t handle) { return order_.use(&listed(handle), order_.next_batch()); }
  bool hit(uint64_t handle) { return order_.hit(&listed(handle), order_.next_batch()); }
  bool demote(uint64_t handle) { return order_.demote(&listed(handle), order_.next_batch()); }

  std::vector<uint64_t> first_victims(size_t count) {
    std::vector<uint64_t> handles;
    VictimCursor cursor(order_);
    while (handles.size() < count) {
      Entry* entry = cursor.next();
      if (!entry) break;
      handles.push_back(reinterpret_cast<uint64_t>(entry->key));
    }
    return handles;
  }

  size_t size() const { return order_.size(); }
  std::vector<std::string> check() const { return order_.check(); }

 private:
  Entry& listed(uint64_t handle) {
    if (handle >= entries_.size() || entries_[handle].order != &order_) {
      throw nb::key_error(("no entry " + std::to_string(handle)).c_str());
    }
    return entries_[handle];
  }

  EvictionOrder order_;
  std::deque<Entry> entries_;
  std::vector<uint64_t> spare_;
};

// Address arithmetic alone, for callers that keep their own memory. Guarded by the interpreter's
// lock.
class AddressRanges {
 public:
  AddressRanges(uint64_t capacity_bytes, uint64_t align_bytes)
      : addresses_(capacity_bytes, align_bytes) {}

  nb::object allocate(uint64_t nbytes) {
    Extent* extent = addresses_.allocate(addresses_.aligned(nbytes));
    if (!extent) return nb::none();
    taken_[extent->offset] = extent;
    return nb::cast(std::pair<uint64_t, uint64_t>(extent->offset, extent->size));
  }
  bool free(uint64_t offset) {
    auto found = taken_.find(offset);
    if (found == taken_.end()) return false;
    addresses_.release(found->second);
    taken_.erase(found);
    return true;
  }
  uint64_t size_at(uint64_t offset) const {
    auto found = taken_.find(offset);
    return found == taken_.end() ? 0 : found->second->size;
  }
  void grow(uint64_t nbytes) { addresses_.grow(nbytes); }
  uint64_t capacity() const { return addresses_.capacity_bytes(); }
  uint64_t free_bytes() const { return addresses_.free_bytes(); }
  uint64_t aligned(uint64_t nbytes) const { return addresses_.aligned(nbytes); }
  std::vector<std::string> check() const { return addresses_.check(); }

 private:
  AddressAllocator addresses_;
  std::map<uint64_t, Extent*> taken_;
};

}  // namespace

PolicyKind kind_from(const std::string& name) {
  if (name == "LRU") return PolicyKind::kLru;
  if (name == "LFU") return PolicyKind::kLfu;
  if (name == "FIFO") return PolicyKind::kFifo;
  if (name == "MRU") return PolicyKind::kMru;
  throw nb::value_error(("unknown policy '" + name + "'; use LRU, LFU, FIFO or MRU").c_str());
}

void bind_order(nb::module_& m) {
  nb::class_<HandleOrder>(m, "HandleOrder", "An eviction order over integer handles.")
      .def(nb::init<const std::string&>(), nb::arg("policy"))
      .def("__len__", &HandleOrder::size)
      .def("insert", &HandleOrder::insert, nb::arg("cold") = false)
      .def("remove", &HandleOrder::remove, nb::arg("handle"))
      .def("use", &HandleOrder::use, nb::arg("handle"))
      .def("hit", &HandleOrder::hit, nb::arg("handle"))
      .def("demote", &HandleOrder::demote, nb::arg("handle"))
      .def("first_victims", &HandleOrder::first_victims, nb::arg("count"))
      .def("check_integrity", &HandleOrder::check);
  nb::class_<AddressRanges>(m, "AddressRanges", "Best-fit address arithmetic with coalescing.")
      .def(nb::init<uint64_t, uint64_t>(), nb::arg("capacity_bytes"), nb::arg("align_bytes"))
      .def("allocate", &AddressRanges::allocate, nb::arg("nbytes"),
           "(offset, size), or None when no range is large enough.")
      .def("free", &AddressRanges::free, nb::arg("offset"))
      .def("size_at", &AddressRanges::size_at, nb::arg("offset"))
      .def("grow", &AddressRanges::grow, nb::arg("nbytes"))
      .def("aligned", &AddressRanges::aligned, nb::arg("nbytes"))
      .def_prop_ro("capacity_bytes", &AddressRanges::capacity)
      .def_prop_ro("free_bytes", &AddressRanges::free_bytes)
      .def("check_integrity", &AddressRanges::check);
}

}  // namespace lmcache
