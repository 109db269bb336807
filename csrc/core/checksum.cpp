#include "core/checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lmcache {

namespace {

constexpr uint64_t kKeyStep = 0x9E3779B97F4A7C15;
constexpr size_t kGroupWords = 32;  // what the fast ways take at once
constexpr size_t kGroupBytes = 8 * kGroupWords;

struct Sums {
  uint64_t sum = 0;
  uint64_t product = 0;
};

uint64_t word_at(const char* bytes, size_t nbytes = 8) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, nbytes);
  return word;
}

void add_word(Sums& sums, uint64_t word, uint64_t key) {
  const uint64_t mixed = word ^ key;
  sums.sum += word;
  sums.product += (mixed & 0xFFFFFFFF) * (mixed >> 32);
}

Sums sums_plain(const char* bytes, size_t num_words, uint64_t key) {
  Sums sums;
  for (size_t i = 0; i < num_words; ++i, key += kKeyStep)
    add_word(sums, word_at(bytes + 8 * i), key);
  return sums;
}

#if defined(__x86_64__)

#pragma GCC diagnostic push
// g++ 12 takes the deliberately undefined values of its own intrinsics for a fault of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Both take whole groups of words; the lanes' sums add up to the plain ones. Four vectors at a time
// are what keeps the multipliers busy.
__attribute__((target("avx512f"))) Sums sums_avx512(const char* bytes, size_t num_groups,
                                                    uint64_t key) {
  __m512i keys[4];
  const __m512i lanes =
      _mm512_setr_epi64(0, static_cast<long long>(kKeyStep), static_cast<long long>(2 * kKeyStep),
                        static_cast<long long>(3 * kKeyStep), static_cast<long long>(4 * kKeyStep),
                        static_cast<long long>(5 * kKeyStep), static_cast<long long>(6 * kKeyStep),
                        static_cast<long long>(7 * kKeyStep));
  keys[0] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(key)), lanes);
  const __m512i next = _mm512_set1_epi64(static_cast<long long>(8 * kKeyStep));
  for (int q = 1; q < 4; ++q) keys[q] = _mm512_add_epi64(keys[q - 1], next);
  const __m512i step = _mm512_set1_epi64(static_cast<long long>(32 * kKeyStep));
  __m512i sum[4], product[4];
  for (int q = 0; q < 4; ++q) sum[q] = product[q] = _mm512_setzero_si512();
  for (size_t g = 0; g < num_groups; ++g, bytes += kGroupBytes) {
    for (int q = 0; q < 4; ++q) {
      const __m512i words = _mm512_loadu_si512(bytes + 64 * q);
      const __m512i mixed = _mm512_xor_si512(words, keys[q]);
      sum[q] = _mm512_add_epi64(sum[q], words);
      product[q] =
          _mm512_add_epi64(product[q], _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32)));
      keys[q] = _mm512_add_epi64(keys[q], step);
    }
  }
  Sums sums;
  alignas(64) uint64_t out[8];
  for (int q = 0; q < 4; ++q) {
    _mm512_store_si512(out, sum[q]);
    for (uint64_t lane : out) sums.sum += lane;
    _mm512_store_si512(out, product[q]);
    for (uint64_t lane : out) sums.product += lane;
  }
  return sums;
}

__attribute__((target("avx2"))) Sums sums_avx2(const char* bytes, size_t num_groups, uint64_t key) {
  __m256i keys[4];
  const __m256i lanes =
      _mm256_setr_epi64x(0, static_cast<long long>(kKeyStep), static_cast<long long>(2 * kKeyStep),
                         static_cast<long long>(3 * kKeyStep));
  keys[0] = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(key)), lanes);
  const __m256i next = _mm256_set1_epi64x(static_cast<long long>(4 * kKeyStep));
  for (int q = 1; q < 4; ++q) keys[q] = _mm256_add_epi64(keys[q - 1], next);
  const __m256i step = _mm256_set1_epi64x(static_cast<long long>(16 * kKeyStep));
  __m256i sum[4], product[4];
  for (int q = 0; q < 4; ++q) sum[q] = product[q] = _mm256_setzero_si256();
  for (size_t half = 0; half < 2 * num_groups; ++half, bytes += kGroupBytes / 2) {
    for (int q = 0; q < 4; ++q) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 32 * q));
      const __m256i mixed = _mm256_xor_si256(words, keys[q]);
      sum[q] = _mm256_add_epi64(sum[q], words);
      product[q] =
          _mm256_add_epi64(product[q], _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32)));
      keys[q] = _mm256_add_epi64(keys[q], step);
    }
  }
  Sums sums;
  alignas(32) uint64_t out[4];
  for (int q = 0; q < 4; ++q) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out), sum[q]);
    for (uint64_t lane : out) sums.sum += lane;
    _mm256_store_si256(reinterpret_cast<__m256i*>(out), product[q]);
    for (uint64_t lane : out) sums.product += lane;
  }
  return sums;
}

#pragma GCC diagnostic pop
#endif

Instructions fastest() {
  if (has_instructions(Instructions::kAvx512)) return Instructions::kAvx512;
  return has_instructions(Instructions::kAvx2) ? Instructions::kAvx2 : Instructions::kPlain;
}

Sums sums_of_groups(Instructions which, const char* bytes, size_t num_groups, uint64_t key) {
#if defined(__x86_64__)
  if (which == Instructions::kAvx512) return sums_avx512(bytes, num_groups, key);
  if (which == Instructions::kAvx2) return sums_avx2(bytes, num_groups, key);
#endif
  static_cast<void>(which);
  return sums_plain(bytes, num_groups * kGroupWords, key);
}

}  // namespace

bool has_instructions(Instructions which) {
#if defined(__x86_64__)
  if (which == Instructions::kAvx512) return __builtin_cpu_supports("avx512f");
  if (which == Instructions::kAvx2) return __builtin_cpu_supports("avx2");
#endif
  return which == Instructions::kPlain;
}

void Checksum::add(const void* bytes, size_t nbytes) {
  static const Instructions which = fastest();
  add_with(which, bytes, nbytes);
}

void Checksum::add_with(Instructions which, const void* bytes, size_t nbytes) {
  const char* at = static_cast<const char*>(bytes);
  uint64_t key = (num_words + 1) * kKeyStep;
  const size_t num_groups = nbytes / kGroupBytes;
  Sums sums = sums_of_groups(which, at, num_groups, key);
  key += num_groups * kGroupWords * kKeyStep;
  size_t left = nbytes - num_groups * kGroupBytes;
  for (at += num_groups * kGroupBytes; left > 0; key += kKeyStep) {
    const size_t taken = left < 8 ? left : 8;
    add_word(sums, word_at(at, taken), key);
    at += taken;
    left -= taken;
  }
  sum += sums.sum;
  product += sums.product;
  num_words += (nbytes + 7) / 8;
}

}  // namespace lmcache
