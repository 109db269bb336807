#include "core/block_plan.h"

#include <algorithm>
#include <limits>

namespace lmcache {

namespace {

using Wide = __int128;

uint64_t magnitude(int64_t stride) {
  return stride < 0 ? 0 - static_cast<uint64_t>(stride) : static_cast<uint64_t>(stride);
}

std::string item(const char* array, uint64_t index) {
  return std::string(array) + "[" + std::to_string(index) + "]";
}

}  // namespace

BlockPlan::BlockPlan(Direction direction, const SlotLayout& layout, const ObjectBatch& batch)
    : direction_(direction),
      slots_per_block_(layout.slots_per_block),
      num_slots_(layout.num_slots) {
  const bool fine = read_layout(layout, batch.num_ids > 0) && read_objects(batch);
  if (!fine) return;
  if (direction == Direction::kGather) {
    check_objects_apart();
  } else {
    check_ids_differ();
  }
}

bool BlockPlan::fail(std::string text) {
  error = std::move(text);
  return false;
}

bool BlockPlan::read_layout(const SlotLayout& layout, bool is_used) {
  const uint64_t num_parts = layout.parts_per_group;
  if (slots_per_block_ == 0) return fail("slots_per_block must be at least 1; raw blocks have 1");
  if (num_parts == 0 || layout.num_segments % num_parts != 0) {
    return fail("parts_per_group is " + std::to_string(num_parts) + ": it must divide the " +
                std::to_string(layout.num_segments) +
                " segments; use 1 for segment-major objects and their number for block-major ones");
  }
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  if (num_slots_ > kMost || slots_per_block_ > kMost) {
    return fail("num_slots and slots_per_block must be below 2**63; ids are int64");
  }
  if (num_slots_ > 0) {
    last_block_ = static_cast<int64_t>((num_slots_ - 1) / slots_per_block_);
    last_slot_ = static_cast<int64_t>(std::min(slots_per_block_, num_slots_)) - 1;
  }
  parts.reserve(layout.num_segments);
  groups.reserve(layout.num_segments / num_parts);
  for (size_t first = 0; first < layout.num_segments; first += num_parts) {
    Group group{parts.size(), parts.size(), item_bytes_, 0, true};
    for (size_t i = first; i < first + num_parts; ++i) {
      Part part{layout.base[i], layout.item_bytes[i], layout.slot_stride[i],
                layout.block_stride[i]};
      if (slots_per_block_ == 1) part.step = part.block_stride;
      if (part.bytes == 0) continue;
      if (is_used && !check_part(i, part)) return false;
      if (__builtin_add_overflow(item_bytes_, part.bytes, &item_bytes_)) {
        return fail(item("item_bytes", i) + ": the bytes of all segments do not fit into 64 bits");
      }
      group.is_linear &=
          slots_per_block_ == 1 || part.block_stride == Wide(part.step) * Wide(slots_per_block_);
      parts.push_back(part);
    }
    group.end_part = parts.size();
    group.bytes = item_bytes_ - group.bytes_before;
    any_inner_ |= !group.is_linear;
    if (group.bytes > 0) groups.push_back(group);
  }
  return true;
}

bool BlockPlan::check_part(size_t index, const Part& part) {
  if (part.base == 0)
    return fail(item("bases", index) + " is null; pass the address of its slot 0");
  int64_t over_blocks = 0, over_slots = 0;
  bool fits = !__builtin_mul_overflow(last_block_, part.block_stride, &over_blocks) &&
              !__builtin_mul_overflow(last_slot_, part.step, &over_slots);
  const Wide lowest =
      Wide(part.base) + std::min<int64_t>(over_blocks, 0) + std::min<int64_t>(over_slots, 0);
  const Wide end = Wide(part.base) + std::max<int64_t>(over_blocks, 0) +
                   std::max<int64_t>(over_slots, 0) + part.bytes;
  fits = fits && lowest > 0 && end <= Wide(std::numeric_limits<uint64_t>::max());
  if (!fits) {
    return fail("segment " + std::to_string(index) + ": " + std::to_string(num_slots_) +
                " slots with these strides leave the address space; check num_slots and strides");
  }
  const bool apart = (last_slot_ == 0 || magnitude(part.step) >= part.bytes) &&
                     (last_block_ == 0 || magnitude(part.block_stride) >= part.bytes);
  if (direction_ == Direction::kScatter && !apart) {
    return fail("segment " + std::to_string(index) + ": its stride is shorter than its " +
                std::to_string(part.bytes) + " bytes an item, so slots overlap; check the strides");
  }
  return true;
}

bool BlockPlan::read_objects(const ObjectBatch& batch) {
  ranges_.reserve(batch.num_ids / 8);
  size_t first = 0;
  for (size_t m = 0; m < batch.num_objects; ++m) {
    const uint64_t count = batch.counts[m], size = batch.sizes[m], address = batch.addresses[m];
    if (count > batch.num_ids - first) {
      return fail(item("counts", m) + ": the counts ask for more ids than the " +
                  std::to_string(batch.num_ids) + " given");
    }
    const uint64_t skip = batch.skips[m];
    if (skip > count) {
      return fail(item("skips", m) + " is " + std::to_string(skip) + ": the object has only " +
                  std::to_string(count) + " ids");
    }
    uint64_t wanted = 0;
    if (__builtin_mul_overflow(count, item_bytes_, &wanted) || wanted != size) {
      return fail(item("sizes", m) + " is " + std::to_string(size) + ", but " +
                  std::to_string(count) + " ids of " + std::to_string(item_bytes_) +
                  " bytes each take another size; pass an object made for these slots");
    }
    uint64_t end = 0;
    if (size > 0 && address == 0) {
      return fail(item("addresses", m) + " is null; pass the address of the object's first byte");
    }
    if (__builtin_add_overflow(address, size, &end) ||
        __builtin_add_overflow(total_bytes, size, &end)) {
      return fail(item("sizes", m) + ": the object leaves the address space; check its address");
    }
    objects.push_back({address, count, total_bytes, runs.size(), 0, inner_runs.size(), 0});
    if (!read_ids(batch, first, first + skip, first + count)) return false;
    objects.back().end_run = runs.size();
    objects.back().end_inner_run = inner_runs.size();
    total_bytes += size;
    first += count;
  }
  if (first == batch.num_ids) return true;
  return fail("the counts name " + std::to_string(first) + " ids, but " +
              std::to_string(batch.num_ids) + " were given; counts must add up to the ids");
}

bool BlockPlan::read_ids(const ObjectBatch& batch, size_t first, size_t begin, size_t end) {
  IdRange range{0, 0, begin};
  int64_t previous =
      ranges_.empty() ? -1 : ranges_.back().first_id + int64_t(ranges_.back().length) - 1;
  for (size_t i = begin; i < end; ++i) {
    // volatile: what was checked is what is used, even if somebody writes to the array meanwhile
    const int64_t id = const_cast<const volatile int64_t*>(batch.ids)[i];
    if (range.length > 0 && id == range.first_id + int64_t(range.length)) {
      if (uint64_t(id) < num_slots_) {
        ++range.length;
        continue;
      }
    }
    if (range.length > 0) {
      add_range(range, range.index - first);
      previous = range.first_id + int64_t(range.length) - 1;
    }
    range = {id, 1, i};
    if (id < 0 || uint64_t(id) >= num_slots_) {
      return fail(item("ids", i) + " is " + std::to_string(id) +
                  ": it must be at least 0 and below "
                  "num_slots, " +
                  std::to_string(num_slots_));
    }
    rising_ &= id > previous;
  }
  if (range.length > 0) add_range(range, range.index - first);
  return true;
}

void BlockPlan::add_range(const IdRange& range, uint64_t position) {
  ranges_.push_back(range);
  int64_t block = range.first_id / int64_t(slots_per_block_);
  int64_t slot = range.first_id % int64_t(slots_per_block_);
  runs.push_back({position, range.length, block, slot});
  if (!any_inner_) return;
  for (uint64_t left = range.length; left > 0; ++block, slot = 0) {
    const uint64_t length = std::min(left, slots_per_block_ - uint64_t(slot));
    inner_runs.push_back({position, length, block, slot});
    position += length;
    left -= length;
  }
}

bool BlockPlan::check_objects_apart() {
  std::vector<size_t> order;
  for (size_t m = 0; m < objects.size(); ++m) {
    if (objects[m].count > 0) order.push_back(m);
  }
  std::sort(order.begin(), order.end(),
            [this](size_t a, size_t b) { return objects[a].address < objects[b].address; });
  for (size_t i = 1; i < order.size(); ++i) {
    const ObjectPlan &low = objects[order[i - 1]], &high = objects[order[i]];
    if (low.address + low.count * item_bytes_ <= high.address) continue;
    return fail("objects " + std::to_string(std::min(order[i - 1], order[i])) + " and " +
                std::to_string(std::max(order[i - 1], order[i])) +
                " share bytes; gather each into memory of its own");
  }
  return true;
}

bool BlockPlan::check_ids_differ() {
  if (rising_) return true;
  std::sort(ranges_.begin(), ranges_.end(), [](const IdRange& a, const IdRange& b) {
    return a.first_id != b.first_id ? a.first_id < b.first_id : a.index < b.index;
  });
  for (size_t i = 1; i < ranges_.size(); ++i) {
    const IdRange &low = ranges_[i - 1], &high = ranges_[i];
    const uint64_t apart = high.first_id - low.first_id;
    if (apart >= low.length) continue;
    const size_t indices[] = {low.index + apart, high.index};
    return fail(item("ids", std::max(indices[0], indices[1])) + " is " +
                std::to_string(high.first_id) + ", as " +
                item("ids", std::min(indices[0], indices[1])) +
                "; a slot can be written once, so pass each id once");
  }
  return true;
}

}  // namespace lmcache
