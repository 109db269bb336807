// Holding a Python lock for one native step.
#pragma once

#include "bind/bindings.h"

namespace lmcache {

extern PyObject* g_lock_is_held;  // exception type, set once at import

// A Python lock's methods, bound once: looking them up makes an object, and that may start a
// garbage collection, whose finalisers must not run under the lock.
struct LockCalls {
  nb::object acquire;
  nb::object release;
  explicit LockCalls(const nb::object& lock)
      : acquire(lock.attr("acquire")), release(lock.attr("release")) {}
};

// Holds a Python lock for one native step. No bytecode runs between taking and giving it back, so a
// thread that loses the interpreter never holds it meanwhile. It never waits: where somebody else
// holds the lock it raises LockIsHeld, and the caller waits in Python, where a thread may end at
// exit.
class LockGuard {
 public:
  LockGuard(const LockCalls& lock, bool caller_holds_it) : lock_(lock), taken_(!caller_holds_it) {
    if (!taken_) return;
    nb::object got = nb::steal(PyObject_CallOneArg(lock_.acquire.ptr(), Py_False));
    if (!got.is_valid()) throw nb::python_error();
    if (got.ptr() == Py_True) return;
    PyErr_SetNone(g_lock_is_held);
    throw nb::python_error();
  }
  LockGuard(const LockGuard&) = delete;
  LockGuard& operator=(const LockGuard&) = delete;
  ~LockGuard() {
    if (!taken_) return;
    PyObject* type = nullptr;
    PyObject* value = nullptr;
    PyObject* trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    if (PyObject* result = PyObject_CallNoArgs(lock_.release.ptr())) {
      Py_DECREF(result);
    } else {
      PyErr_WriteUnraisable(lock_.release.ptr());
    }
    PyErr_Restore(type, value, trace);
  }

 private:
  const LockCalls& lock_;
  const bool taken_;
};

}  // namespace lmcache
