// Hash tables over keys. Comparing keys compares ints, bytes, strings and tuples of them, so a
// look-up runs no Python code.
#pragma once

#include <tsl/robin_map.h>

#include "bind/bindings.h"

namespace lmcache {

struct KeyHash {
  size_t operator()(PyObject* key) const {
    return static_cast<size_t>(nb::inst_ptr<KeyCore>(key)->hash);
  }
};

struct KeyEqual {
  bool operator()(PyObject* a, PyObject* b) const { return keys_equal(a, b); }
};

template <typename Value>
using KeyTable = tsl::robin_map<PyObject*, Value, KeyHash, KeyEqual,
                                std::allocator<std::pair<PyObject*, Value>>, true>;

// A key whose constructor ran.
inline bool is_key(PyObject* object) {
  return PyObject_TypeCheck(object, key_type()) && nb::inst_ready(object);
}

// A memory object whose constructor ran.
inline bool is_block(nb::handle object) {
  return nb::isinstance<PyBlock>(object) && nb::inst_ready(object);
}

inline void require_key(nb::handle key) {
  if (is_key(key.ptr())) return;
  throw nb::type_error(
      (std::string("key is a ") + Py_TYPE(key.ptr())->tp_name + ", not a CacheEngineKey").c_str());
}

}  // namespace lmcache
