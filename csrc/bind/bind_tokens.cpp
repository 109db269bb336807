#include "bind/bindings.h"

namespace lmcache {

namespace {

// A list of boxed ints is read once, without building an argument tuple as struct.pack needs.
nb::bytes pack_int64(nb::handle numbers) {
  nb::object fast = nb::steal(PySequence_Fast(numbers.ptr(), "token ids must be a sequence"));
  if (!fast.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  PyObject* packed = PyBytes_FromStringAndSize(nullptr, count * 8);
  if (!packed) throw nb::python_error();
  nb::bytes result = nb::steal<nb::bytes>(packed);
  char* target = PyBytes_AS_STRING(packed);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i >= PySequence_Fast_GET_SIZE(fast.ptr())) {  // an __index__ may run any code
      PyErr_SetString(PyExc_ValueError, "the token ids changed while they were read");
      throw nb::python_error();
    }
    const long long value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.ptr(), i));
    if (value == -1 && PyErr_Occurred()) {
      const bool is_no_number =
          PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_OverflowError);
      if (!is_no_number) throw nb::python_error();
      PyErr_Clear();
      PyErr_Format(PyExc_ValueError, "token id %zd is not a whole number of 64 bits", i);
      throw nb::python_error();
    }
    for (int byte = 0; byte < 8; ++byte) {
      target[i * 8 + byte] =
          static_cast<char>(static_cast<unsigned long long>(value) >> (8 * byte));
    }
  }
  return result;
}

}  // namespace

void bind_tokens(nb::module_& m) {
  m.def("pack_int64", &pack_int64, nb::arg("numbers"),
        "The numbers as little-endian int64; ValueError names the position of one that is none.");
}

}  // namespace lmcache
