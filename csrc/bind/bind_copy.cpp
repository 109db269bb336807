#include <nanobind/ndarray.h>
#include <sys/mman.h>

#include "bind/native_region.h"
#include "core/host_copy.h"

namespace lmcache {

namespace {

using Words = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void checked_copy_batch(Words targets, Words sources, Words sizes, unsigned num_threads,
                        uint64_t stream) {
  check_no_stream(stream);
  if (targets.size() != sources.size() || targets.size() != sizes.size()) {
    throw nb::value_error(("targets, sources and sizes must be equally long, not " +
                           std::to_string(targets.size()) + ", " + std::to_string(sources.size()) +
                           " and " + std::to_string(sizes.size()))
                              .c_str());
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes.data()[i] > 0 && (targets.data()[i] == 0 || sources.data()[i] == 0)) {
      throw nb::value_error(("item " + std::to_string(i) + " has a null address").c_str());
    }
  }
  if (g_exiting) return;  // the interpreter is going; nobody will read the copy
  const NativeRegion region;
  copy_batch(targets.data(), sources.data(), sizes.data(), sizes.size(), num_threads);
}

// Page-aligned zero pages, faulted in on first use, as huge pages where there are some.
struct HostPages {
  void* address;
  uint64_t size_bytes;

  explicit HostPages(uint64_t nbytes) : address(nullptr), size_bytes(nbytes) {
    if (nbytes == 0) throw nb::value_error("size_bytes must be positive");
    address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
      PyErr_Format(PyExc_MemoryError, "cannot map %llu bytes of host memory",
                   static_cast<unsigned long long>(nbytes));
      throw nb::python_error();
    }
#ifdef MADV_HUGEPAGE
    // Scattered copies of a few KiB spend a third of their time on page tables otherwise. Where the
    // kernel has no huge pages to give, nothing changes.
    madvise(address, nbytes, MADV_HUGEPAGE);
#endif
  }
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;
  ~HostPages() { munmap(address, size_bytes); }
};

int pages_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  HostPages* pages = nb::inst_ptr<HostPages>(self);
  return PyBuffer_FillInfo(view, self, pages->address, static_cast<Py_ssize_t>(pages->size_bytes),
                           0, flags);
}

PyType_Slot pages_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(pages_getbuffer)},
                             {0, nullptr}};

}  // namespace

void bind_copy(nb::module_& m) {
  m.def("copy_batch", &checked_copy_batch, nb::arg("targets").noconvert(),
        nb::arg("sources").noconvert(), nb::arg("sizes").noconvert(), nb::arg("num_threads") = 1,
        nb::kw_only(), nb::arg("stream") = 0,
        nb::sig("def copy_batch(targets: object, sources: object, sizes: object, "
                "num_threads: int = 1, *, stream: int = 0) -> None"),
        "Copy sizes[i] bytes from sources[i] to targets[i] (uint64 arrays of addresses) without "
        "the interpreter's lock. Pieces must not overlap.");
  nb::class_<HostPages>(m, "HostPages", nb::type_slots(pages_slots),
                        "Page-aligned zeroed host memory with the buffer protocol.")
      .def(nb::init<uint64_t>(), nb::arg("size_bytes"))
      .def_prop_ro("address", [](HostPages& p) { return reinterpret_cast<uint64_t>(p.address); })
      .def_ro("size_bytes", &HostPages::size_bytes);
}

}  // namespace lmcache
