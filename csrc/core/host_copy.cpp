#include "core/host_copy.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

namespace lmcache {

namespace {

constexpr uint64_t kBytesWorthAThread = 1 << 20;

// Copies the bytes [begin, end) of the batch seen as one long string of its pieces.
void copy_range(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes,
                size_t count, uint64_t begin, uint64_t end) {
  uint64_t at = 0;
  for (size_t i = 0; i < count && at < end; at += sizes[i++]) {
    const uint64_t from = std::max(begin, at), to = std::min(end, at + sizes[i]);
    if (from >= to) continue;
    std::memcpy(reinterpret_cast<char*>(targets[i]) + (from - at),
                reinterpret_cast<const char*>(sources[i]) + (from - at), to - from);
  }
}

}  // namespace

void copy_batch(const uint64_t* targets, const uint64_t* sources, const uint64_t* sizes,
                size_t count, unsigned num_threads) {
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) total += sizes[i];
  const uint64_t useful = std::max<uint64_t>(1, total / kBytesWorthAThread);
  const uint64_t workers = std::min<uint64_t>(std::max(1u, num_threads), useful);
  const uint64_t share = (total + workers - 1) / workers;
  std::vector<std::thread> threads;
  for (uint64_t w = 1; w < workers; ++w) {
    threads.emplace_back(copy_range, targets, sources, sizes, count, w * share,
                         std::min(total, (w + 1) * share));
  }
  copy_range(targets, sources, sizes, count, 0, std::min(total, share));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lmcache
