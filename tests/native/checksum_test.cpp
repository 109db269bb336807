// The checksum of chunk files: against its definition, over all short lengths and splits, with all
// the instructions that the processor has.
#include "core/checksum.h"

#include <algorithm>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

std::vector<char> random_bytes(size_t size, uint64_t seed) {
  Numbers numbers(seed);
  std::vector<char> bytes(size);
  for (char& byte : bytes) byte = static_cast<char>(numbers.next());
  return bytes;
}

// As checksum.h defines it.
Checksum defined(const char* bytes, size_t nbytes) {
  Checksum sums;
  for (size_t i = 0; i * 8 < nbytes; ++i) {
    uint64_t word = 0;
    for (size_t b = 0; b < 8 && i * 8 + b < nbytes; ++b) {
      word |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i * 8 + b])) << (8 * b);
    }
    const uint64_t mixed = word ^ ((i + 1) * 0x9E3779B97F4A7C15);
    sums.sum += word;
    sums.product += (mixed & 0xFFFFFFFF) * (mixed >> 32);
  }
  return sums;
}

void sums_are_as_defined() {
  const std::vector<char> bytes = random_bytes(1024, 1);
  int num_ways = 0;
  for (const Instructions which :
       {Instructions::kPlain, Instructions::kAvx2, Instructions::kAvx512}) {
    if (!has_instructions(which)) continue;
    ++num_ways;
    for (size_t nbytes = 0; nbytes <= 600; ++nbytes) {
      const char* at = bytes.data() + nbytes % 67;  // no alignment is asked for
      const Checksum expected = defined(at, nbytes);
      for (size_t split = 0; split <= nbytes; split += 8) {
        Checksum pieces, later;
        pieces.add_with(which, at, split);
        pieces.add_with(which, at + split, nbytes - split);
        CHECK(pieces == expected);
        later.num_words = split / 8;  // the last piece first
        later.add_with(which, at + split, nbytes - split);
        Checksum first;
        first.add_with(which, at, split);
        first.sum += later.sum;
        first.product += later.product;
        CHECK(first == expected);
      }
      Checksum fastest;
      fastest.add(at, nbytes);
      CHECK(fastest == expected);
    }
  }
  CHECK(num_ways >= 1 && has_instructions(Instructions::kPlain));
}

void changes_change_the_sums() {
  std::vector<char> bytes = random_bytes(600, 2);
  const Checksum before = defined(bytes.data(), 600);
  for (size_t bit = 0; bit < 600 * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    Checksum flipped;
    flipped.add(bytes.data(), 600);
    CHECK(flipped.sum != before.sum);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  }
  for (size_t i = 0; i + 16 <= 600; i += 8) {
    std::swap_ranges(&bytes[i], &bytes[i + 8], &bytes[i + 8]);
    Checksum moved;
    moved.add(bytes.data(), 600);
    CHECK(moved.sum == before.sum && moved.product != before.product);
    std::swap_ranges(&bytes[i], &bytes[i + 8], &bytes[i + 8]);
  }
}

}  // namespace

int main() {
  sums_are_as_defined();
  changes_change_the_sums();
  return 0;
}
