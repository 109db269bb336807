#include "bind/bindings.h"

NB_MODULE(_native, m) {
  namespace nb = nanobind;
  // Caches live as long as the process does, so objects alive at exit are no fault.
  nb::set_leak_warnings(false);
  m.doc() =
      "Native core of lmcache: keys, pools, the hot index, eviction orders, batched copies, chunk "
      "files.";
  lmcache::bind_key(m);
  lmcache::bind_pool(m);
  lmcache::bind_ledger(m);
  lmcache::bind_index(m);
  lmcache::bind_order(m);
  lmcache::bind_copy(m);
  lmcache::bind_tokens(m);
  lmcache::bind_block_copy(m);
  lmcache::bind_chunk_file(m);
}
