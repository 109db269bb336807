// Python sequences of keys and of memory objects, checked before anything is changed.
#pragma once

#include <string>

#include "bind/key_table.h"

namespace lmcache {

// A borrowed view of a list or tuple of keys, checked before anything is changed.
class KeySequence {
 public:
  explicit KeySequence(nb::handle keys)
      : fast_(nb::steal(PySequence_Fast(keys.ptr(), "keys must be a sequence of CacheEngineKey"))) {
    if (!fast_.is_valid()) throw nb::python_error();
    items_ = PySequence_Fast_ITEMS(fast_.ptr());
    size_ = static_cast<size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()));
    const PyTypeObject* known = nullptr;  // keys of one batch are nearly always of one class
    for (size_t i = 0; i < size_; ++i) {
      if (Py_TYPE(items_[i]) == known && nb::inst_ready(items_[i])) continue;
      if (is_key(items_[i])) {
        known = Py_TYPE(items_[i]);
        continue;
      }
      throw nb::type_error(("keys[" + std::to_string(i) + "] is a " + Py_TYPE(items_[i])->tp_name +
                            ", not a CacheEngineKey")
                               .c_str());
    }
  }
  size_t size() const { return size_; }
  PyObject* operator[](size_t i) const { return items_[i]; }

 private:
  nb::object fast_;
  PyObject** items_;
  size_t size_;
};

// A borrowed view of a list or tuple of as many memory objects.
class BlockSequence {
 public:
  BlockSequence(nb::handle blocks, size_t size)
      : fast_(nb::steal(PySequence_Fast(blocks.ptr(), "memory objects must be a sequence"))) {
    if (!fast_.is_valid()) throw nb::python_error();
    items_ = PySequence_Fast_ITEMS(fast_.ptr());
    const size_t given = static_cast<size_t>(PySequence_Fast_GET_SIZE(fast_.ptr()));
    if (given != size) {
      throw nb::value_error((std::to_string(size) + " keys do not go with " +
                             std::to_string(given) + " memory objects")
                                .c_str());
    }
    for (size_t i = 0; i < given; ++i) {
      if (!is_block(items_[i])) {
        throw nb::type_error(
            (name_of(i) + " is a " + Py_TYPE(items_[i])->tp_name + ", not a MemoryObj").c_str());
      }
      Block& block = nb::inst_ptr<PyBlock>(items_[i])->core;
      if (block.pool().freed(block)) {
        throw nb::value_error((name_of(i) + " was released already").c_str());
      }
    }
  }
  nb::handle operator[](size_t i) const { return items_[i]; }

 private:
  static std::string name_of(size_t i) { return "memory_objs[" + std::to_string(i) + "]"; }

  nb::object fast_;
  PyObject** items_;
};

}  // namespace lmcache
