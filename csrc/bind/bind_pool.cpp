#include <algorithm>
#include <chrono>
#include <thread>

#include "bind/native_region.h"

namespace lmcache {

std::atomic<int> g_native_regions{0};
std::atomic<bool> g_exiting{false};

namespace {

constexpr double kSignalCheckSeconds = 0.1;  // how long Ctrl-C may go unnoticed in a wait

bool released(PyBlock& self, nb::handle self_object, bool freed) {
  if (freed && self.tell_parent && !self.parent.is_none()) self.parent.attr("free")(self_object);
  return freed;
}

bool wait_for_release(Pool& pool, uint64_t version, double timeout_seconds) {
  while (timeout_seconds > 0 && !g_exiting) {
    const double slice = std::min(timeout_seconds, kSignalCheckSeconds);
    bool done;
    {
      const NativeRegion region;
      done = pool.wait_for_release(version, slice);
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    timeout_seconds -= slice;
  }
  return false;
}

// Called at exit, before the interpreter is finalised.
void leave_native_regions(double timeout_seconds) {
  g_exiting = true;
  const nb::gil_scoped_release unlocked;
  for (double waited = 0; g_native_regions > 0 && waited < timeout_seconds; waited += 0.001) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

nb::object allocate(const std::shared_ptr<Pool>& pool, nb::handle cls, nb::handle spec,
                    uint64_t nbytes, uint64_t count, nb::handle parent) {
  return make_blocks(cls, pool, pool->allocate(nbytes, count, nullptr).extents, nbytes, spec,
                     parent);
}

void bind_block(nb::module_& m) {
  nb::class_<PyBlock>(m, "Block", "Reference and pin counts of one memory object.")
      .def(
          "__init__",
          [](PyBlock* self, std::shared_ptr<Pool> pool, uint64_t nbytes, nb::object spec,
             nb::object parent, nb::object raw, int64_t refs, int64_t pins) {
            new (self) PyBlock(std::move(pool));
            self->spec = std::move(spec);
            self->metadata = nb::none();
            self->tell_parent = !parent.is_none();
            self->parent = std::move(parent);
            self->raw = std::move(raw);
            self->logical_bytes = nbytes;
            Pool& home = self->core.pool();
            home.adopt(self->core, nullptr, nbytes);
            for (int64_t i = 1; i < refs; ++i) home.ref_up(self->core);
            for (int64_t i = 0; i < pins; ++i) home.pin(self->core);
            if (refs < 1) home.ref_down(self->core);
          },
          nb::arg("pool"), nb::arg("nbytes"), nb::arg("spec").none(), nb::arg("parent").none(),
          nb::arg("raw").none(), nb::arg("refs") = 1, nb::arg("pins") = 0)
      .def("ref_count_up", [](PyBlock& b) { b.core.pool().ref_up(b.core); })
      .def("ref_count_down",
           [](nb::handle self) {
             PyBlock& b = *nb::inst_ptr<PyBlock>(self);
             released(b, self, b.core.pool().ref_down(b.core));
           })
      .def("invalidate", [](PyBlock& b) { b.core.pool().invalidate(b.core); })
      .def("get_ref_count", [](PyBlock& b) { return b.core.pool().refs(b.core); })
      .def("pin",
           [](PyBlock& b) {
             b.core.pool().pin(b.core);
             return true;
           })
      .def("unpin",
           [](nb::handle self) {
             PyBlock& b = *nb::inst_ptr<PyBlock>(self);
             released(b, self, b.core.pool().unpin(b.core));
             return true;
           })
      .def_prop_ro("pin_count", [](PyBlock& b) { return b.core.pool().pins(b.core); })
      .def_prop_ro("is_pinned", [](PyBlock& b) { return b.core.pool().pins(b.core) > 0; })
      .def_prop_ro("can_evict", [](PyBlock& b) { return b.core.pool().can_evict(b.core); })
      .def_prop_ro("_pool", [](PyBlock& b) { return b.core.pool_ptr(); })
      .def_prop_ro("_cached", [](PyBlock& b) { return b.core.pool().cached(b.core); })
      .def_prop_ro("_freed", [](PyBlock& b) { return b.core.pool().freed(b.core); })
      .def_prop_ro("_offset", [](PyBlock& b) { return b.core.pool().offset(b.core); })
      .def_prop_ro("_size_bytes", [](PyBlock& b) { return b.core.pool().size_bytes(b.core); })
      .def_rw("_logical_bytes", &PyBlock::logical_bytes)
      .def_rw("_spec", &PyBlock::spec, nb::arg().none())
      .def_rw("_metadata", &PyBlock::metadata, nb::arg().none())
      .def_rw("_parent", &PyBlock::parent, nb::arg().none())
      .def_rw("_raw", &PyBlock::raw, nb::arg().none());
}

// Takes the items out of the list, last first, and calls the method on each but None. One native
// step as long as the method is: no signal handler runs between an item's leaving and its call. A
// call that raises does not keep the others; the first error is raised in the end.
void call_each(nb::list items, nb::str method) {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  while (PyList_GET_SIZE(items.ptr()) > 0) {
    const Py_ssize_t last = PyList_GET_SIZE(items.ptr()) - 1;
    const nb::object item = nb::borrow(PyList_GET_ITEM(items.ptr(), last));
    if (PyList_SetSlice(items.ptr(), last, last + 1, nullptr) != 0) throw nb::python_error();
    if (item.is_none()) continue;
    const nb::object result = nb::steal(PyObject_CallMethodNoArgs(item.ptr(), method.ptr()));
    if (result.is_valid()) continue;
    if (type == nullptr) {
      PyErr_Fetch(&type, &value, &trace);
    } else {
      PyErr_Clear();
    }
  }
  if (type != nullptr) {
    PyErr_Restore(type, value, trace);
    throw nb::python_error();
  }
}

}  // namespace

nb::dict gauges_dict(const PoolGauges& g) {
  nb::dict d;
  d["capacity_bytes"] = g.capacity_bytes;
  d["free_bytes"] = g.free_bytes;
  d["largest_free_bytes"] = g.largest_free_bytes;
  d["cached_bytes"] = g.cached_bytes;
  d["held_bytes"] = g.held_bytes;
  d["num_blocks"] = g.num_blocks;
  d["num_pinned"] = g.num_pinned;
  d["num_parked"] = g.num_parked;
  d["num_cached"] = g.num_cached;
  d["num_leaked"] = g.num_leaked;
  d["num_underflow"] = g.num_underflow;
  d["num_waiting"] = g.num_waiting;
  return d;
}

nb::object make_blocks(nb::handle cls, const std::shared_ptr<Pool>& pool,
                       const std::vector<Extent*>& extents, uint64_t nbytes, nb::handle spec,
                       nb::handle parent) {
  if (extents.empty()) return nb::none();
  nb::list blocks;
  size_t num_adopted = 0;
  try {
    for (Extent* extent : extents) {
      nb::object block = nb::inst_alloc(cls);
      PyBlock* made = new (nb::inst_ptr<PyBlock>(block)) PyBlock(pool);
      made->spec = nb::borrow(spec);
      made->metadata = nb::none();
      made->parent = nb::borrow(parent);
      made->raw = nb::none();
      made->logical_bytes = nbytes;
      pool->adopt(made->core, extent, nbytes);
      ++num_adopted;
      nb::inst_mark_ready(block);
      blocks.append(std::move(block));
    }
  } catch (...) {  // no memory for an object: those that were made go with the list
    for (; num_adopted < extents.size(); ++num_adopted) pool->abandon(extents[num_adopted]);
    throw;
  }
  return std::move(blocks);
}

void bind_pool(nb::module_& m) {
  m.def("leave_native_regions", &leave_native_regions, nb::arg("timeout_seconds"),
        "At exit: let no thread be without the interpreter's lock any more.");
  m.def("call_each", &call_each, nb::arg("items"), nb::arg("method"),
        "Empty the list, calling a method of each item that is not None; last first.");
  nb::class_<Pool>(m, "Pool", "The bytes of one pool and the counts of what lives in it.")
      .def(nb::new_([](uint64_t capacity_bytes, uint64_t align_bytes) {
             if (align_bytes == 0) throw nb::value_error("align_bytes must be positive");
             return std::make_shared<Pool>(capacity_bytes, align_bytes);
           }),
           nb::arg("capacity_bytes"), nb::arg("align_bytes") = 4096)
      .def("allocate", &allocate, nb::arg("cls"), nb::arg("spec").none(), nb::arg("nbytes"),
           nb::arg("count"), nb::arg("parent").none(),
           "Take free bytes as `count` instances of `cls`, or return None and take nothing.")
      .def("grow", &Pool::grow, nb::arg("nbytes"))
      .def("wake_waiting", &Pool::wake_waiting, "Make every waiting allocation look again.")
      .def("gauges", [](Pool& pool) { return gauges_dict(pool.gauges(nullptr)); })
      .def_prop_ro("version", &Pool::version)
      .def("wait_for_release", &wait_for_release, nb::arg("version"), nb::arg("timeout_seconds"),
           "Wait, without the interpreter's lock, until something is released after `version`.")
      .def("check_integrity", [](Pool& pool) { return pool.check(nullptr); });
  bind_block(m);
}

}  // namespace lmcache
