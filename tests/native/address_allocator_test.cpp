// Random allocations and releases against a byte map: no overlap, exact books, full coalescing.
#include "core/address_allocator.h"

#include <vector>

#include "check.h"

using lmcache::AddressAllocator;
using lmcache::Extent;

namespace {

constexpr uint64_t kAlign = 64;
constexpr uint64_t kUnits = 512;

void run(uint64_t seed) {
  AddressAllocator addresses(kUnits * kAlign, kAlign);
  std::vector<int> owner(kUnits, 0);
  std::vector<std::pair<Extent*, int>> live;
  Numbers numbers(seed);
  uint64_t taken = 0;
  int name = 0;
  for (int step = 0; step < 4000; ++step) {
    if (live.empty() || numbers.below(5) < 3) {
      const uint64_t nbytes =
          addresses.aligned(1 + numbers.below(numbers.below(8) ? 5 * kAlign : 90 * kAlign));
      Extent* extent = addresses.allocate(nbytes);
      if (!extent) {
        CHECK(addresses.largest_free_bytes() < nbytes);
        continue;
      }
      CHECK(extent->size == nbytes && extent->offset % kAlign == 0);
      ++name;
      for (uint64_t u = extent->offset / kAlign; u < (extent->offset + nbytes) / kAlign; ++u) {
        CHECK(owner[u] == 0);
        owner[u] = name;
      }
      live.push_back({extent, name});
      taken += nbytes;
    } else {
      const size_t at = numbers.below(live.size());
      for (int& unit : owner) unit = unit == live[at].second ? 0 : unit;
      taken -= live[at].first->size;
      addresses.release(live[at].first);
      live[at] = live.back();
      live.pop_back();
    }
    CHECK(addresses.taken_bytes() == taken && addresses.num_taken() == live.size());
    CHECK(addresses.check().empty());
  }
  for (auto& [extent, unused] : live) addresses.release(extent);
  CHECK(addresses.largest_free_bytes() == kUnits * kAlign);
  addresses.grow(10 * kAlign);
  CHECK(addresses.largest_free_bytes() == (kUnits + 10) * kAlign && addresses.check().empty());
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 20; ++seed) run(seed);
  return 0;
}
