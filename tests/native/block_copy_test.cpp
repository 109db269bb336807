// Copies between slots and memory objects: against a byte-by-byte copy, with guards all around; the
// runs a plan makes; the pieces of all alignments. Run under the address and the thread sanitizer.
#include "core/block_copy.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "core/block_plan.h"
#include "core/piece_copy.h"

using namespace lmcache;

namespace {

using Bytes = std::vector<char>;

Bytes random_bytes(size_t size, Numbers& numbers) {
  Bytes bytes(size);
  for (char& byte : bytes) byte = static_cast<char>(numbers.next());
  return bytes;
}

// Every alignment of both sides, and sizes around those of a line and of the least that is
// streamed.
void pieces_of_all_alignments() {
  Numbers numbers(1);
  const Bytes source = random_bytes(4096, numbers);
  for (const bool stream : {false, true}) {
    for (size_t from = 0; from < 64; ++from) {
      for (size_t to = 0; to < 64; ++to) {
        const size_t size = 1 + numbers.below(numbers.below(2) ? 130 : 700);
        Bytes target(2048, 'g'), expected(2048, 'g');
        std::vector<Piece> pieces;
        for (const size_t at : {to, to + size + from % 3}) {
          pieces.push_back({target.data() + at, source.data() + from + at, size});
          std::memcpy(expected.data() + at, source.data() + from + at, size);
        }
        copy_pieces(pieces.data(), pieces.size(), pieces.size(), stream);
        finish_streaming();
        CHECK(target == expected);
      }
    }
  }
}

struct Case {
  std::vector<uint64_t> base, item_bytes, addresses, sizes, counts, skips;
  std::vector<int64_t> slot_stride, block_stride, ids;
  uint64_t slots_per_block = 1, num_slots = 0, parts_per_group = 1;
  Bytes device, objects;

  SlotLayout layout() const {
    return {base.data(), item_bytes.data(), slot_stride.data(), block_stride.data(),
            base.size(), slots_per_block,   num_slots,          parts_per_group};
  }
  ObjectBatch batch() const {
    return {addresses.data(), sizes.data(), counts.data(), skips.data(),
            addresses.size(), ids.data(),   ids.size()};
  }
};

// Segments with gaps, some of them backwards; ids in runs of up to 6, each once.
Case random_case(Numbers& numbers, uint64_t largest_item) {
  Case made;
  const uint64_t slots_per_block[] = {1, 3, 16};
  made.slots_per_block = slots_per_block[numbers.below(3)];
  const uint64_t num_blocks = 4 + numbers.below(12);
  made.num_slots = num_blocks * made.slots_per_block;
  const size_t num_segments = 2 * (1 + numbers.below(3));
  const uint64_t parts[] = {1, 2, num_segments};
  made.parts_per_group = parts[numbers.below(3)];
  uint64_t device_bytes = 0, item_total = 0;
  for (size_t i = 0; i < num_segments; ++i) {
    const uint64_t bytes = 1 + numbers.below(largest_item);
    const int64_t step = bytes + (numbers.below(2) ? 0 : numbers.below(9));
    const int64_t block = step * made.slots_per_block + (numbers.below(2) ? 0 : numbers.below(9));
    const uint64_t begin = device_bytes + numbers.below(3);
    const bool backwards = numbers.below(3) == 0;
    device_bytes = begin + block * num_blocks;
    made.base.push_back(backwards ? device_bytes - step : begin);
    made.item_bytes.push_back(bytes);
    made.slot_stride.push_back(backwards ? -step : step);
    made.block_stride.push_back(backwards ? -block : block);
    item_total += bytes;
  }
  std::vector<int64_t> runs;
  for (uint64_t first = 0; first < made.num_slots; first += 6) runs.push_back(first);
  for (size_t i = runs.size(); i > 1; --i) std::swap(runs[i - 1], runs[numbers.below(i)]);
  for (const int64_t first : runs) {
    for (uint64_t id = first; id < std::min<uint64_t>(first + 6, made.num_slots); ++id) {
      if (numbers.below(8) > 0) made.ids.push_back(id);
    }
  }
  uint64_t object_bytes = 0;
  for (uint64_t left = made.ids.size(); left > 0;) {
    const uint64_t count = std::min<uint64_t>(left, numbers.below(20));
    object_bytes += numbers.below(3);
    made.addresses.push_back(object_bytes);
    made.counts.push_back(count);
    made.skips.push_back(0);
    made.sizes.push_back(count * item_total);
    object_bytes += count * item_total;
    left -= count;
  }
  made.device = random_bytes(device_bytes, numbers);
  made.objects = random_bytes(object_bytes + 1, numbers);
  for (uint64_t& base : made.base) base += reinterpret_cast<uint64_t>(made.device.data());
  for (uint64_t& at : made.addresses) at += reinterpret_cast<uint64_t>(made.objects.data());
  return made;
}

// The definition, item by item; calls copy(object, slot, bytes).
template <typename Copy>
void each_item(const Case& c, Copy copy) {
  size_t first = 0;
  for (size_t m = 0; m < c.addresses.size(); ++m) {
    char* object = reinterpret_cast<char*>(c.addresses[m]);
    for (size_t group = 0; group < c.base.size(); group += c.parts_per_group) {
      for (size_t j = first; j < first + c.counts[m]; ++j) {
        for (size_t i = group; i < group + c.parts_per_group; ++i) {
          const int64_t block = c.ids[j] / static_cast<int64_t>(c.slots_per_block);
          const int64_t slot = c.ids[j] % static_cast<int64_t>(c.slots_per_block);
          if (j - first >= c.skips[m]) {
            copy(object,
                 reinterpret_cast<char*>(c.base[i] + block * c.block_stride[i] +
                                         slot * c.slot_stride[i]),
                 c.item_bytes[i]);
          }
          object += c.item_bytes[i];
        }
      }
    }
    first += c.counts[m];
  }
}

void both_directions(uint64_t seed, uint64_t largest_item, unsigned num_threads) {
  Numbers numbers(seed);
  Case c = random_case(numbers, largest_item);
  const Bytes device = c.device, objects = c.objects;
  each_item(c, [](char* object, char* slot, size_t size) { std::memcpy(object, slot, size); });
  const Bytes gathered = c.objects;
  std::copy(objects.begin(), objects.end(), c.objects.begin());
  CHECK(copy_blocks(Direction::kGather, c.layout(), c.batch(), num_threads).empty());
  CHECK(c.objects == gathered && c.device == device);

  size_t first = 0;
  for (size_t m = 0; m < c.counts.size(); first += c.counts[m++]) {
    c.skips[m] = numbers.below(2) ? 0 : numbers.below(c.counts[m] + 1);
    std::fill_n(c.ids.begin() + first, c.skips[m], -1);
  }
  std::copy(objects.begin(), objects.end(), c.objects.begin());
  each_item(c, [](char* object, char* slot, size_t size) { std::memcpy(slot, object, size); });
  const Bytes scattered = c.device;
  std::copy(device.begin(), device.end(), c.device.begin());
  CHECK(copy_blocks(Direction::kScatter, c.layout(), c.batch(), num_threads).empty());
  CHECK(c.device == scattered && c.objects == objects);
}

// One object of the given ids over one segment of 8 bytes an item.
BlockPlan plan_of(std::vector<int64_t> ids, uint64_t slots_per_block, int64_t block_stride,
                  Direction direction = Direction::kScatter) {
  const uint64_t base = 4096, item = 8, address = 1 << 20, size = 8 * ids.size(),
                 count = ids.size(), skip = 0;
  const int64_t slot_stride = 8;
  return BlockPlan(direction,
                   {&base, &item, &slot_stride, &block_stride, 1, slots_per_block, 64, 1},
                   {&address, &size, &count, &skip, 1, ids.data(), ids.size()});
}

void runs_are_as_long_as_memory_allows() {
  const std::vector<int64_t> ids = {2, 3, 4, 5, 6, 20, 21, 40, 22, 9};
  const BlockPlan linear = plan_of(ids, 4, 32), gapped = plan_of(ids, 4, 40);
  CHECK(linear.error.empty() && gapped.error.empty());
  CHECK(linear.runs.size() == 5 && linear.inner_runs.empty());
  CHECK(linear.runs[0].length == 5 && linear.runs[1].position == 5 && linear.runs[3].position == 8);
  CHECK(gapped.inner_runs.size() == 6);
  CHECK(gapped.inner_runs[0].length == 2 && gapped.inner_runs[1].length == 3);
  CHECK(gapped.inner_runs[1].block == 1 && gapped.inner_runs[1].slot == 0);
  const BlockPlan raw = plan_of({5, 6, 7}, 1, -8);
  CHECK(raw.runs.size() == 1 && raw.runs[0].length == 3);
}

void what_is_wrong_is_said() {
  CHECK(plan_of({1, 64}, 4, 32).error.find("ids[1] is 64") == 0);
  CHECK(plan_of({62, 63, 64}, 4, 32).error.find("ids[2] is 64") == 0);
  CHECK(plan_of({1, INT64_MIN}, 4, 32).error.find("ids[1] is -9") == 0);
  CHECK(plan_of({1, -1}, 4, 32, Direction::kScatter).error.find("ids[1] is -1") == 0);
  CHECK(plan_of({5, 6, 7, 6}, 4, 32).error.find("ids[3] is 6, as ids[1]") == 0);
  CHECK(plan_of({5, 6, 7, 6}, 4, 32, Direction::kGather).error.empty());
  CHECK(plan_of({1}, 4, -1024).error.find("segment 0") == 0);
  CHECK(plan_of({1}, 1, 0).error.find("segment 0") == 0);
}

}  // namespace

int main() {
  pieces_of_all_alignments();
  runs_are_as_long_as_memory_allows();
  what_is_wrong_is_said();
  for (uint64_t seed = 1; seed <= 300; ++seed) both_directions(seed, 100, 1);
  // Large enough for threads, which share objects, groups, runs and items; then for streaming, too,
  // whose stores the thread sanitizer does not see.
  for (uint64_t seed = 1; seed <= 24; ++seed) both_directions(seed, 12 << 10, 3);
  for (uint64_t seed = 1; seed <= 6; ++seed) both_directions(seed, 100 << 10, 1 + seed % 4);
  return 0;
}
