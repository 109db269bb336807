// What threads share without the interpreter's lock: block counts, releases that wake waiting
// allocations, batched copies. Run under the thread sanitizer.
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/host_copy.h"
#include "core/pool.h"

using namespace lmcache;

namespace {

constexpr uint64_t kAlign = 4096;

void counts_add_up() {
  auto pool = std::make_shared<Pool>(64 * kAlign, kAlign);
  std::vector<std::unique_ptr<Block>> shared;
  for (int i = 0; i < 16; ++i) {
    Allocation made = pool->allocate(kAlign, 1, nullptr);
    shared.push_back(std::make_unique<Block>(pool));
    pool->adopt(*shared.back(), made.extents[0], kAlign);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      Numbers numbers(t + 1);
      for (int step = 0; step < 4000; ++step) {
        Block& block = *shared[numbers.below(shared.size())];
        pool->ref_up(block);
        pool->pin(block);
        Allocation made = pool->allocate(kAlign * (1 + numbers.below(4)), 1, nullptr);
        if (!made.extents.empty()) {
          Block own(pool);
          pool->adopt(own, made.extents[0], kAlign);
          CHECK(pool->ref_down(own));
        }
        pool->unpin(block);
        CHECK(!pool->ref_down(block));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& block : shared) CHECK(pool->refs(*block) == 1 && pool->pins(*block) == 0);
  CHECK(pool->gauges(nullptr).free_bytes == 48 * kAlign);
  CHECK(pool->check(nullptr).empty());
  for (auto& block : shared) CHECK(pool->ref_down(*block));
  CHECK(pool->gauges(nullptr).num_leaked == 0);
}

void a_release_wakes_a_waiting_allocation() {
  auto pool = std::make_shared<Pool>(kAlign, kAlign);
  for (int round = 0; round < 200; ++round) {
    Block held(pool);
    pool->adopt(held, pool->allocate(kAlign, 1, nullptr).extents[0], kAlign);
    std::atomic<bool> got{false};
    std::thread waiter([&] {
      while (true) {
        const uint64_t version = pool->version();
        Allocation made = pool->allocate(kAlign, 1, nullptr);
        if (!made.extents.empty()) {
          pool->abandon(made.extents[0]);
          got = true;
          return;
        }
        CHECK(pool->wait_for_release(version, 3600.0));  // a lost wake-up hangs the test
      }
    });
    // Every other round the release surely meets a waiter, else it may come first.
    while (round % 2 == 0 && pool->gauges(nullptr).num_waiting == 0) std::this_thread::yield();
    pool->ref_down(held);
    waiter.join();
    CHECK(got);
  }
  CHECK(!pool->wait_for_release(pool->version(), 0.0));
}

void copies_are_exact_for_any_number_of_threads() {
  Numbers numbers(7);
  for (unsigned num_threads : {1u, 2u, 5u}) {
    for (int round = 0; round < 20; ++round) {
      const size_t count = numbers.below(64);
      std::vector<std::vector<char>> from(count), to(count);
      std::vector<uint64_t> sources, targets, sizes;
      for (size_t i = 0; i < count; ++i) {
        const size_t size = numbers.below(5) ? numbers.below(5000) : numbers.below(400000);
        from[i].resize(size + 2);
        to[i].assign(size + 2, 0x5A);
        for (char& byte : from[i]) byte = static_cast<char>(numbers.next());
        sources.push_back(reinterpret_cast<uint64_t>(from[i].data()) + 1);
        targets.push_back(reinterpret_cast<uint64_t>(to[i].data()) + 1);
        sizes.push_back(size);
      }
      copy_batch(targets.data(), sources.data(), sizes.data(), count, num_threads);
      for (size_t i = 0; i < count; ++i) {
        CHECK(to[i].front() == 0x5A && to[i].back() == 0x5A);
        CHECK(std::memcmp(to[i].data() + 1, from[i].data() + 1, sizes[i]) == 0);
      }
    }
  }
}

}  // namespace

int main() {
  counts_add_up();
  a_release_wakes_a_waiting_allocation();
  copies_are_exact_for_any_number_of_threads();
  return 0;
}
