// What `copy_blocks` made of its arguments: checked, and in the order of the objects' bytes.
#pragma once

#include <string>
#include <vector>

#include "core/block_copy.h"

namespace lmcache {

// One segment with bytes in it.
struct Part {
  uint64_t base;
  uint64_t bytes;
  int64_t step;  // from one id to the next inside a run
  int64_t block_stride;
};

// The parts that alternate in an object.
struct Group {
  size_t first_part, end_part;
  uint64_t bytes_before;  // per id, of the groups before it
  uint64_t bytes;         // per id
  bool is_linear;         // a run may cross the border of a block
};

// Consecutive ids of one object.
struct Run {
  uint64_t position;  // of its first id among the object's
  uint64_t length;
  int64_t block, slot;  // of its first id
};

// The same as `copy_blocks` got them, to find ids that are there twice.
struct IdRange {
  int64_t first_id;
  uint64_t length;
  size_t index;  // of its first id in the batch
};

struct ObjectPlan {
  uint64_t address;
  uint64_t count;                         // ids
  uint64_t bytes_before;                  // of the objects before it
  size_t first_run, end_run;              // in `runs`
  size_t first_inner_run, end_inner_run;  // in `inner_runs`
};

class BlockPlan {
 public:
  // Reads and checks everything; `error` is empty if it may be carried out.
  BlockPlan(Direction direction, const SlotLayout& layout, const ObjectBatch& batch);

  std::string error;
  std::vector<Part> parts;
  std::vector<Group> groups;
  std::vector<ObjectPlan> objects;
  std::vector<Run> runs;        // for linear groups
  std::vector<Run> inner_runs;  // for the others: none crosses the border of a block
  uint64_t total_bytes = 0;

 private:
  bool read_layout(const SlotLayout& layout, bool is_used);
  bool check_part(size_t index, const Part& part);
  bool read_objects(const ObjectBatch& batch);
  // The ids [begin, end) of the object whose ids begin at `first`.
  bool read_ids(const ObjectBatch& batch, size_t first, size_t begin, size_t end);
  void add_range(const IdRange& range, uint64_t position);
  bool check_objects_apart();
  bool check_ids_differ();
  bool fail(std::string text);

  const Direction direction_;
  const uint64_t slots_per_block_, num_slots_;
  int64_t last_block_ = 0, last_slot_ = 0;  // the last there is, and the last of a block
  uint64_t item_bytes_ = 0;                 // of all segments
  bool any_inner_ = false;
  bool rising_ = true;  // ids rise strictly over the whole batch
  std::vector<IdRange> ranges_;
};

}  // namespace lmcache
