// Copies between slots of a serving engine's cache and contiguous memory objects, many at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace lmcache {

// Where the items of a slot lie. One description serves paged KV in any order of its axes, raw
// blocks and state slots; strides are in bytes and may be negative. Item of slot `id` in segment i:
//   base[i] + (id / slots_per_block) * block_stride[i] + (id % slots_per_block) * slot_stride[i]
struct SlotLayout {
  const uint64_t* base;
  const uint64_t* item_bytes;
  const int64_t* slot_stride;
  const int64_t* block_stride;
  size_t num_segments;
  uint64_t slots_per_block;  // 1: raw blocks; the slot strides then say nothing
  uint64_t num_slots;        // ids are below it
  uint64_t parts_per_group;  // divides num_segments
};

// Memory objects and the slots of each, whose ids lie one object after the other. An object holds,
// without gaps: for each group of parts_per_group segments, for each of its ids in order, for each
// part, the part's item.
struct ObjectBatch {
  const uint64_t* addresses;
  const uint64_t* sizes;   // bytes
  const uint64_t* counts;  // ids
  const uint64_t* skips;   // leading ids of each object whose items are neither read nor written
  size_t num_objects;
  const int64_t* ids;  // those that are skipped are not looked at
  size_t num_ids;
};

enum class Direction { kGather, kScatter };  // slots to objects, objects to slots

// Checks the whole batch, then copies it over `num_threads` threads that share the bytes evenly.
// The arrays are read once, so a caller that changes them meanwhile can only harm its own contents.
//
// Returns what is wrong with the arguments, and nothing was copied; or an empty text.
std::string copy_blocks(Direction direction, const SlotLayout& layout, const ObjectBatch& batch,
                        unsigned num_threads);

}  // namespace lmcache
