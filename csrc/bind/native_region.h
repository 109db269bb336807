// Work without the interpreter's lock that ends before the interpreter does.
//
// A thread that asks for the lock of an interpreter being finalised is ended on the spot, and
// unwinding it through C++ would end the process. So each such region is counted, an exit handler
// waits for all of them, and none begins after that.
#pragma once

#include <atomic>

#include "bind/bindings.h"

namespace lmcache {

extern std::atomic<int> g_native_regions;  // threads that are in one, or about to leave it
extern std::atomic<bool> g_exiting;        // set once, by the exit handler

class NativeRegion {
 public:
  NativeRegion() = default;
  NativeRegion(const NativeRegion&) = delete;
  NativeRegion& operator=(const NativeRegion&) = delete;

 private:
  struct Counted {
    Counted() { ++g_native_regions; }
    ~Counted() { --g_native_regions; }
  };
  Counted counted_;  // goes down last: by then the interpreter's lock is held again
  nb::gil_scoped_release unlocked_;
};

}  // namespace lmcache
