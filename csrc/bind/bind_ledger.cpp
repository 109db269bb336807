#include <map>

#include "bind/ledger.h"

namespace lmcache {

namespace {

// What turns records into Python events: the event class (a named tuple) and the enum members.
struct EventWords {
  nb::object event_class;
  nb::list kinds;
  nb::list reasons;
  nb::object incarnation;
};

nb::object event_of(PyObject* cls, nb::tuple fields) {
  nb::object arguments = nb::make_tuple(std::move(fields));
  PyObject* made =
      PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(cls), arguments.ptr(), nullptr);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

class EventReader {
 public:
  EventReader(Ledger& ledger, std::shared_ptr<EventRing> ring, nb::object event_class,
              nb::list kinds, nb::list reasons, nb::object incarnation)
      : ledger_(ledger),
        ring_(std::move(ring)),
        words_{std::move(event_class), std::move(kinds), std::move(reasons),
               std::move(incarnation)},
        nobody_(nb::steal(PyFrozenSet_New(nullptr))) {}

  EventReader(const EventReader&) = delete;
  EventReader& operator=(const EventReader&) = delete;
  ~EventReader() { unsubscribe(); }  // nobody can take its events any more

  nb::list take(uint64_t max_events) {
    EventRing& ring = *ring_;
    const uint64_t first = ring.first_lost, last = ring.last_lost, lost = ring.num_lost;
    ring.first_lost = ring.last_lost = ring.num_lost = 0;
    if (lost && max_events != UINT64_MAX) --max_events;
    std::deque<EventRecord> records;
    if (max_events >= ring.records.size()) {
      records.swap(ring.records);
    } else {
      for (; max_events > 0; --max_events) {
        records.push_back(std::move(ring.records.front()));
        ring.records.pop_front();
      }
    }
    nb::list events;
    if (lost) {
      EventRecord notice{last, EventKind::kLost, Removal::kNone, 0, nb::object(), 0, 0, 0, 0};
      events.append(make(notice, first, last, lost));
    }
    for (const EventRecord& record : records) events.append(make(record, 0, 0, 0));
    return events;
  }

  bool closed() const { return ring_->closed; }
  uint64_t pending() const { return ring_->records.size() + (ring_->num_lost ? 1 : 0); }
  uint64_t lost() const { return ring_->total_lost; }
  nb::object oldest_monotonic_s() const {
    if (ring_->records.empty()) return nb::none();
    return nb::float_(ring_->records.front().monotonic_s);
  }
  // Returns whether the reader should wait for `wake`.
  bool wait_if_empty() {
    ring_->idle = ring_->records.empty() && !ring_->num_lost && !ring_->closed;
    return ring_->idle;
  }
  void unsubscribe() {
    ledger_.unsubscribe(ring_.get());
    ring_->closed = true;
    ring_->idle = false;
    ring_->num_lost = 0;
    std::deque<EventRecord> dropped;
    dropped.swap(ring_->records);
  }

 private:
  nb::object make(const EventRecord& r, uint64_t first, uint64_t last, uint64_t lost) {
    const bool has_key = r.key.is_valid();
    nb::object reason = r.reason == Removal::kNone
                            ? nb::object(nb::none())
                            : nb::object(words_.reasons[static_cast<size_t>(r.reason)]);
    return event_of(
        words_.event_class.ptr(),
        nb::make_tuple(r.seq, words_.incarnation, words_.kinds[static_cast<size_t>(r.kind)],
                       has_key ? r.key : nb::object(nb::none()),
                       has_key ? ledger_.name_of(r.tier) : nb::object(nb::none()), reason,
                       r.size_bytes, r.generation, names_of(r.still_in), r.monotonic_s, first, last,
                       lost));
  }

  nb::object names_of(uint64_t mask) {
    if (mask == 0) return nobody_;
    nb::object& names = names_[mask];
    if (!names.is_valid()) {
      nb::list held;
      for (size_t i = 0; i < ledger_.num_pages(); ++i) {
        if (mask >> i & 1) held.append(ledger_.name_of(i));
      }
      names = nb::steal(PyFrozenSet_New(held.ptr()));
    }
    return names;
  }

  Ledger& ledger_;
  std::shared_ptr<EventRing> ring_;
  EventWords words_;
  nb::object nobody_;
  std::map<uint64_t, nb::object> names_;
};

// Runs no Python code: pages taken one after the other are those of one moment.
std::vector<nb::object> keys_of_page(Ledger& ledger, size_t page) {
  std::vector<nb::object> keys;
  auto& generations = ledger.page(page).generations;
  keys.reserve(generations.size());
  for (auto& [key, generation] : generations) keys.push_back(nb::borrow(key));
  return keys;
}

// Making a list may run the collector, and so any finaliser.
nb::list list_of(std::vector<nb::object> keys) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(keys.size()));
  if (!list) throw nb::python_error();
  for (size_t i = 0; i < keys.size(); ++i) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), keys[i].release().ptr());
  }
  return nb::steal<nb::list>(list);
}

// (tier, stores, [removals by reason]) per page, of one moment.
nb::list transition_counts(const Ledger& ledger) {
  using Counts = std::pair<uint64_t, std::array<uint64_t, kNumReasons>>;
  std::vector<Counts> taken;
  for (size_t i = 0; i < ledger.num_pages(); ++i) {
    taken.emplace_back(ledger.page(i).num_stored, ledger.page(i).num_removed);
  }
  nb::list pages;
  for (size_t i = 0; i < taken.size(); ++i) {
    nb::list removed;
    for (uint64_t number : taken[i].second) removed.append(number);
    pages.append(nb::make_tuple(ledger.name_of(i), taken[i].first, removed));
  }
  return pages;
}

}  // namespace

void bind_ledger(nb::module_& m) {
  nb::class_<EventReader>(m, "EventReader", "One subscriber's end of its ring.")
      .def("take", &EventReader::take, nb::arg("max_events") = UINT64_MAX)
      .def("wait_if_empty", &EventReader::wait_if_empty)
      .def("unsubscribe", &EventReader::unsubscribe)
      .def_prop_ro("is_closed", &EventReader::closed)
      .def_prop_ro("num_pending", &EventReader::pending)
      .def_prop_ro("num_lost", &EventReader::lost)
      .def_prop_ro("oldest_monotonic_s", &EventReader::oldest_monotonic_s);
  nb::class_<Ledger>(m, "Ledger", "Residency of every local tier and the events about it.")
      .def(nb::init<nb::object>(), nb::arg("clock").none() = nb::none())
      .def("register_page", &Ledger::register_page, nb::arg("name"))
      .def(
          "stored",
          [](Ledger& self, size_t page, nb::handle key, nb::handle copy) {
            require_key(key);
            self.stored(page, key.ptr(), copy);
          },
          nb::arg("page"), nb::arg("key"), nb::arg("copy"))
      .def(
          "removed",
          [](Ledger& self, size_t page, nb::handle key, nb::handle copy, uint8_t reason) {
            require_key(key);
            return self.removed(page, key.ptr(), copy, removal_from(reason));
          },
          nb::arg("page"), nb::arg("key"), nb::arg("copy"), nb::arg("reason"))
      .def(
          "replaced",
          [](Ledger& self, size_t page, nb::handle key, nb::handle old_copy, nb::handle copy) {
            require_key(key);
            self.replaced(page, key.ptr(), old_copy, copy);
          },
          nb::arg("page"), nb::arg("key"), nb::arg("old_copy"), nb::arg("copy"))
      .def(
          "end_page",
          [](Ledger& self, size_t page, uint8_t reason) {
            self.end_page(page, removal_from(reason));
          },
          nb::arg("page"), nb::arg("reason"))
      .def("forget_page", &Ledger::forget_page, nb::arg("page"))
      .def(
          "generation",
          [](Ledger& self, size_t page, nb::handle key) {
            require_key(key);
            return self.generation(page, key.ptr());
          },
          nb::arg("page"), nb::arg("key"), "The event that stored the copy; 0 when absent.")
      .def("page_size",
           [](Ledger& self, size_t page) { return self.page(page).generations.size(); })
      .def(
          "page_keys", [](Ledger& self, size_t page) { return list_of(keys_of_page(self, page)); },
          nb::arg("page"))
      .def(
          "snapshot",
          [](Ledger& self) {
            const uint64_t seq = self.seq();
            std::vector<std::vector<nb::object>> taken;
            for (size_t i = 0; i < self.num_pages(); ++i) taken.push_back(keys_of_page(self, i));
            nb::list pages;
            for (size_t i = 0; i < taken.size(); ++i) {
              pages.append(nb::make_tuple(self.name_of(i), list_of(std::move(taken[i]))));
            }
            return nb::make_tuple(seq, pages);
          },
          "(seq, [(tier, keys)]) of one moment.")
      .def("transition_counts", &transition_counts,
           "(tier, stores, removals by reason) of every page, of one moment.")
      .def(
          "subscribe",
          [](Ledger& self, uint64_t capacity, nb::object tiers, uint8_t kinds, nb::object wake,
             nb::object event_class, nb::list kind_words, nb::list reason_words,
             nb::object incarnation) {
            auto ring = self.subscribe(capacity, std::move(tiers), kinds, std::move(wake));
            return std::make_unique<EventReader>(self, std::move(ring), std::move(event_class),
                                                 std::move(kind_words), std::move(reason_words),
                                                 std::move(incarnation));
          },
          nb::arg("capacity"), nb::arg("tiers").none(), nb::arg("kinds"), nb::arg("wake"),
          nb::arg("event_class"), nb::arg("kind_words"), nb::arg("reason_words"),
          nb::arg("incarnation"), nb::keep_alive<0, 1>())
      .def("make_inert", &Ledger::make_inert)
      .def("close", &Ledger::close)
      .def_prop_ro("seq", &Ledger::seq)
      .def_prop_ro("is_closed", &Ledger::closed)
      .def_prop_ro("num_subscribers", &Ledger::num_rings)
      .def_prop_ro("num_lost", &Ledger::num_lost, "Events dropped so far, over all readers ever.");
}

}  // namespace lmcache
