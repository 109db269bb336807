#include "core/block_copy.h"

#include <algorithm>
#include <array>
#include <system_error>
#include <thread>
#include <vector>

#include "core/block_plan.h"
#include "core/piece_copy.h"

namespace lmcache {

namespace {

constexpr uint64_t kBytesWorthAThread = 1 << 20;

// Joins pieces that continue each other on both sides, and copies them a few at a time.
class PieceQueue {
 public:
  explicit PieceQueue(bool stream) : stream_(stream) {}

  void add(char* target, const char* source, size_t size) {
    if (count_ > 0) {
      Piece& last = pieces_[count_ - 1];
      if (last.target + last.size == target && last.source + last.size == source) {
        last.size += size;
        return;
      }
      if (count_ == pieces_.size()) copy_all_but(kPiecesAhead);
    }
    pieces_[count_++] = {target, source, size};
  }

  void finish() {
    copy_all_but(0);
    if (stream_) finish_streaming();
  }

 private:
  void copy_all_but(size_t kept) {
    copy_pieces(pieces_.data(), count_ - kept, count_, stream_);
    std::copy(pieces_.begin() + (count_ - kept), pieces_.begin() + count_, pieces_.begin());
    count_ = kept;
  }

  const bool stream_;
  size_t count_ = 0;
  std::array<Piece, 64> pieces_;
};

// Copies the bytes [begin, end) of the batch seen as one long string of its objects.
template <Direction kDirection>
class Worker {
 public:
  Worker(const BlockPlan& plan, uint64_t begin, uint64_t end, bool stream)
      : plan_(plan), begin_(begin), end_(end), queue_(stream) {}

  void work() {
    for (const ObjectPlan& object : plan_.objects) {
      for (const Group& group : plan_.groups) {
        const uint64_t at = object.bytes_before + object.count * group.bytes_before;
        if (at >= end_ || at + object.count * group.bytes <= begin_) continue;
        copy_group(object, group, at);
      }
    }
    queue_.finish();
  }

 private:
  // `at` is where the group begins in the string of bytes.
  void copy_group(const ObjectPlan& object, const Group& group, uint64_t at) {
    const std::vector<Run>& runs = group.is_linear ? plan_.runs : plan_.inner_runs;
    const size_t first = group.is_linear ? object.first_run : object.first_inner_run;
    const size_t last = group.is_linear ? object.end_run : object.end_inner_run;
    const uint64_t into_object = object.address - object.bytes_before;
    for (size_t i = first; i < last; ++i) {
      const uint64_t run_at = at + runs[i].position * group.bytes;
      if (run_at >= end_) break;
      if (run_at + runs[i].length * group.bytes > begin_) {
        copy_run(runs[i], group, run_at, into_object + run_at);
      }
    }
  }

  void copy_run(const Run& run, const Group& group, uint64_t at, uint64_t object_address) {
    const Part* parts = plan_.parts.data();
    const Part& only = parts[group.first_part];
    if (group.end_part - group.first_part == 1 && only.step == static_cast<int64_t>(only.bytes)) {
      add(at, object_address, address_of(only, run, 0), run.length * only.bytes);
      return;
    }
    const uint64_t skipped = at < begin_ ? (begin_ - at) / group.bytes : 0;
    const uint64_t wanted = std::min(run.length, (end_ - at + group.bytes - 1) / group.bytes);
    for (uint64_t j = skipped; j < wanted; ++j) {
      uint64_t offset = j * group.bytes;
      for (size_t p = group.first_part; p < group.end_part; ++p) {
        add(at + offset, object_address + offset, address_of(parts[p], run, j), parts[p].bytes);
        offset += parts[p].bytes;
      }
    }
  }

  // Unsigned, because an address may go below a base and wraps back; the plan checked the result.
  static uint64_t address_of(const Part& part, const Run& run, uint64_t index) {
    const int64_t slot_step = part.step;
    return part.base + static_cast<uint64_t>(run.block) * static_cast<uint64_t>(part.block_stride) +
           (static_cast<uint64_t>(run.slot) + index) * static_cast<uint64_t>(slot_step);
  }

  void add(uint64_t at, uint64_t object, uint64_t slot, uint64_t size) {
    const uint64_t from = std::max(at, begin_), to = std::min(at + size, end_);
    if (from >= to) return;
    char* in_object = reinterpret_cast<char*>(object + (from - at));
    char* in_slot = reinterpret_cast<char*>(slot + (from - at));
    if (kDirection == Direction::kGather) {
      queue_.add(in_object, in_slot, to - from);
    } else {
      queue_.add(in_slot, in_object, to - from);
    }
  }

  const BlockPlan& plan_;
  const uint64_t begin_, end_;
  PieceQueue queue_;
};

template <Direction kDirection>
void carry_out(const BlockPlan& plan, unsigned num_threads) {
  const uint64_t total = plan.total_bytes;
  const bool stream = total >= kStreamBytes;
  const uint64_t useful = std::max<uint64_t>(1, total / kBytesWorthAThread);
  const uint64_t num_workers = std::min<uint64_t>(std::max(1u, num_threads), useful);
  const uint64_t share = (total + num_workers - 1) / num_workers;
  const auto work = [&plan, share, total, stream](uint64_t index) {
    const uint64_t begin = std::min(total, index * share);
    Worker<kDirection>(plan, begin, std::min(total, begin + share), stream).work();
  };
  std::vector<std::thread> threads;
  threads.reserve(num_workers - 1);
  uint64_t given = 1;  // share 0 is this thread's
  try {
    for (; given < num_workers; ++given) threads.emplace_back(work, given);
  } catch (const std::system_error&) {
    // no more threads to be had: this one does what is left
  }
  work(0);
  for (; given < num_workers; ++given) work(given);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

std::string copy_blocks(Direction direction, const SlotLayout& layout, const ObjectBatch& batch,
                        unsigned num_threads) {
  const BlockPlan plan(direction, layout, batch);
  if (!plan.error.empty() || plan.total_bytes == 0) return plan.error;
  if (direction == Direction::kGather) {
    carry_out<Direction::kGather>(plan, num_threads);
  } else {
    carry_out<Direction::kScatter>(plan, num_threads);
  }
  return {};
}

}  // namespace lmcache
