// Copies a list of pieces that lie anywhere, at the pace of one long memcpy.
#pragma once

#include <cstddef>

namespace lmcache {

struct Piece {
  char* target;
  const char* source;
  size_t size;
};

// How many pieces beyond the one being copied `copy_pieces` looks at.
constexpr size_t kPiecesAhead = 16;

// Copies the first `count` pieces. `num_known` >= count pieces are there to be looked at, so that
// the sources of those that come later are on their way.
//
// Streamed (for batches of kStreamBytes or more): the stores go past the cache, and other threads
// see them after `finish_streaming` by the thread that copied.
void copy_pieces(const Piece* pieces, size_t count, size_t num_known, bool stream);
void finish_streaming();

// A core's share of the last cache is about this, so nobody finds a larger batch there afterwards.
// A constant, because the size that the C library reports may be that of all cores of the machine
// (393 MB in a virtual machine whose cores share 32 MiB).
constexpr size_t kStreamBytes = size_t{4} << 20;

}  // namespace lmcache
