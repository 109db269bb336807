// Copies between host buffers, many in one call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

// Copies `count` pieces, `sizes[i]` bytes from `sources[i]` to `targets[i]`, over `num_threads`
// threads that share the bytes evenly. Pieces must not overlap.
void copy_batch(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes,
                size_t count, unsigned num_threads);

}  // namespace lmcache
