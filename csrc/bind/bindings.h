// What the binding files share: the Python-visible types and their registration functions.
//
// Locks: every function here runs with the interpreter's lock held unless it says otherwise, and
// runs no Python code between reading and changing a structure; the pool's mutex is never held
// while Python objects are made or dropped.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "core/pool.h"

namespace lmcache {

namespace nb = nanobind;

// The comparable part of a cache key. `context` is a tuple (model name, world size, worker id,
// dtype name, tags or None); keys are equal when type, context, chunk hash and layer are.
// Immutable.
struct KeyCore {
  nb::object context;
  nb::object chunk_hash;
  nb::object request_configs;
  int64_t layer_id;
  Py_hash_t hash;
};

// A memory object as Python holds it: the counted block, what describes its contents, and whoever
// wants to hear that it was freed. Guarded by the interpreter's lock (the block by its pool).
struct PyBlock {
  Block core;
  nb::object spec;      // immutable description, shared by all objects of one shape
  nb::object metadata;  // MemoryObjMetadata, made on demand
  nb::object parent;    // the allocator
  nb::object raw;       // flat uint8 tensor, made on demand
  bool tell_parent = false;
  uint64_t logical_bytes = 0;  // bytes of the contents

  explicit PyBlock(std::shared_ptr<Pool> pool) : core(std::move(pool)) {}
};

PyTypeObject* key_type();
bool keys_equal(PyObject* a, PyObject* b);

// Makes one instance of `cls`, a Python subclass of Block, per extent just taken from the pool;
// None when there is none.
nb::object make_blocks(nb::handle cls, const std::shared_ptr<Pool>& pool,
                       const std::vector<Extent*>& extents, uint64_t nbytes, nb::handle spec,
                       nb::handle parent);

PolicyKind kind_from(const std::string& name);
nb::dict gauges_dict(const PoolGauges& gauges);

// The copying calls have the arguments that GPU builds of them need.
inline void check_no_stream(uint64_t stream) {
  if (stream != 0) throw nb::value_error("stream must be 0: the CPU core has no streams");
}

void bind_key(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_index(nb::module_& m);
void bind_ledger(nb::module_& m);
void bind_order(nb::module_& m);
void bind_copy(nb::module_& m);
void bind_tokens(nb::module_& m);
void bind_block_copy(nb::module_& m);
void bind_chunk_file(nb::module_& m);

}  // namespace lmcache
