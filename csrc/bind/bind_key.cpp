#include "bind/bindings.h"

namespace lmcache {

namespace {

PyTypeObject* g_key_type = nullptr;  // set once at import

Py_hash_t mixed_hash(Py_hash_t context_hash, PyObject* chunk_hash, int64_t layer_id) {
  const Py_hash_t chunk = PyObject_Hash(chunk_hash);
  if (chunk == -1 && PyErr_Occurred()) throw nb::python_error();
  uint64_t h = static_cast<uint64_t>(chunk) ^ (static_cast<uint64_t>(layer_id + 1) << 48);
  h = (h ^ static_cast<uint64_t>(context_hash)) * 0x9E3779B97F4A7C15ull;
  h ^= h >> 32;
  const Py_hash_t mixed = static_cast<Py_hash_t>(h);
  return mixed == -1 ? -2 : mixed;
}

void construct(KeyCore* at, nb::handle context, Py_hash_t context_hash, nb::handle chunk_hash,
               int64_t layer_id, nb::handle request_configs) {
  const Py_hash_t hash = mixed_hash(context_hash, chunk_hash.ptr(), layer_id);
  new (at) KeyCore{nb::borrow(context), nb::borrow(chunk_hash), nb::borrow(request_configs),
                   layer_id, hash};
}

Py_hash_t key_hash(PyObject* self) { return nb::inst_ptr<KeyCore>(self)->hash; }

PyObject* key_richcompare(PyObject* a, PyObject* b, int op) {
  if ((op != Py_EQ && op != Py_NE) || !PyObject_TypeCheck(b, g_key_type)) Py_RETURN_NOTIMPLEMENTED;
  const bool equal = keys_equal(a, b);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(equal == (op == Py_EQ));
}

PyType_Slot key_slots[] = {{Py_tp_hash, reinterpret_cast<void*>(key_hash)},
                           {Py_tp_richcompare, reinterpret_cast<void*>(key_richcompare)},
                           {0, nullptr}};

nb::list make_keys(nb::handle cls, nb::handle context, nb::sequence chunk_hashes,
                   nb::handle request_configs) {
  const Py_hash_t context_hash = nb::hash(context);
  nb::list keys;
  for (nb::handle chunk_hash : chunk_hashes) {
    nb::object key = nb::inst_alloc(cls);
    construct(nb::inst_ptr<KeyCore>(key), context, context_hash, chunk_hash, -1, request_configs);
    nb::inst_mark_ready(key);
    keys.append(std::move(key));
  }
  return keys;
}

}  // namespace

PyTypeObject* key_type() { return g_key_type; }

bool keys_equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  const KeyCore* x = nb::inst_ptr<KeyCore>(a);
  const KeyCore* y = nb::inst_ptr<KeyCore>(b);
  if (x->hash != y->hash || x->layer_id != y->layer_id) return false;
  return PyObject_RichCompareBool(x->chunk_hash.ptr(), y->chunk_hash.ptr(), Py_EQ) == 1 &&
         PyObject_RichCompareBool(x->context.ptr(), y->context.ptr(), Py_EQ) == 1;
}

void bind_key(nb::module_& m) {
  nb::class_<KeyCore> key(m, "KeyCore", nb::type_slots(key_slots));
  key.def(
         "__init__",
         [](KeyCore* self, nb::tuple context, nb::object chunk_hash, int64_t layer_id,
            nb::object request_configs) {
           construct(self, context, nb::hash(context), chunk_hash, layer_id, request_configs);
         },
         nb::arg("context"), nb::arg("chunk_hash"), nb::arg("layer_id") = -1,
         nb::arg("request_configs") = nb::none())
      .def_ro("context", &KeyCore::context)
      .def_ro("chunk_hash", &KeyCore::chunk_hash)
      .def_ro("_layer_id", &KeyCore::layer_id)
      .def_ro("_request_configs", &KeyCore::request_configs);
  g_key_type = reinterpret_cast<PyTypeObject*>(key.ptr());
  m.def("make_keys", &make_keys, nb::arg("cls"), nb::arg("context"), nb::arg("chunk_hashes"),
        nb::arg("request_configs").none(), "Make one key per chunk hash, all with one context.");
}

}  // namespace lmcache
