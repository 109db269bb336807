// A 128-bit checksum of bytes in host memory, fast enough to ride along with file I/O.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmcache {

// What computes it; all give the same bits.
enum class Instructions { kPlain, kAvx2, kAvx512 };

// Whether this processor has them.
bool has_instructions(Instructions which);

// Over the little-endian 64-bit words w[i] of the bytes, the last one padded with zeros:
//
//   sum      = SUM w[i]                                   mod 2^64
//   product  = SUM low32(x[i]) * high32(x[i]),            mod 2^64
//              where x[i] = w[i] ^ (i + 1) * kKeyStep
//
// One flipped bit always changes `sum`; words that moved change `product`. Both are sums over the
// words, so pieces may be added in any order, and every machine gives the same bits. It guards
// against damage, not against an adversary. Bytes of unequal number may agree: keep the number too.
struct Checksum {
  uint64_t sum = 0;
  uint64_t product = 0;
  uint64_t num_words = 0;

  // Adds the next bytes; `nbytes` is a multiple of 8 in every call but the last.
  void add(const void* bytes, size_t nbytes);
  // The same with instructions that this processor has, instead of the fastest.
  void add_with(Instructions which, const void* bytes, size_t nbytes);

  bool operator==(const Checksum& other) const {
    return sum == other.sum && product == other.product;
  }
};

}  // namespace lmcache
