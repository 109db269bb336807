#include "core/block_overlap.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace lmcache {

namespace {

using Wide = __int128;

Wide floor_div(Wide number, Wide by) {  // by > 0
  return number >= 0 ? number / by : -((-number + by - 1) / by);
}

// Equal items at origin + i * stride, for 0 <= i < count, in two dimensions; the wider stride is
// the outer one. A stride is positive unless it stands for several items in one place.
struct Dimension {
  Wide stride;
  Wide count;
};

struct Grid {
  size_t segment;
  Wide origin;
  Wide bytes;
  Dimension outer, inner;

  Wide inner_span() const { return (inner.count - 1) * inner.stride + bytes; }
  Wide end() const { return origin + (outer.count - 1) * outer.stride + inner_span(); }
};

Grid grid_of(const SlotLayout& layout, size_t segment) {
  const Wide slots = layout.slots_per_block;
  const Wide blocks = (Wide(layout.num_slots) + slots - 1) / slots;
  Grid grid{segment,
            layout.base[segment],
            layout.item_bytes[segment],
            {layout.block_stride[segment], blocks},
            {layout.slot_stride[segment], slots}};
  for (Dimension* dimension : {&grid.outer, &grid.inner}) {
    if (dimension->count == 1) dimension->stride = 1;
    if (dimension->stride >= 0) continue;
    grid.origin += (dimension->count - 1) * dimension->stride;
    dimension->stride = -dimension->stride;
  }
  if (grid.outer.stride < grid.inner.stride) std::swap(grid.outer, grid.inner);
  return grid;
}

// How many items of the grid share bytes with [at, at + size).
Wide count_hits(const Grid& grid, Wide at, Wide size) {
  const Wide from = at - grid.origin, to = from + size;
  const Wide first = std::max<Wide>(0, floor_div(from - grid.inner_span(), grid.outer.stride) + 1);
  const Wide last = std::min(grid.outer.count - 1, floor_div(to - 1, grid.outer.stride));
  Wide hits = 0;
  for (Wide i = first; i <= last; ++i) {
    const Wide inner_from = from - i * grid.outer.stride, inner_to = to - i * grid.outer.stride;
    const Wide low = std::max<Wide>(0, floor_div(inner_from - grid.bytes, grid.inner.stride) + 1);
    const Wide high = std::min(grid.inner.count - 1, floor_div(inner_to - 1, grid.inner.stride));
    hits += std::max<Wide>(0, high - low + 1);
  }
  return hits;
}

// Where the items of a grid lie as seen from any of them.
Grid differences(const Grid& grid) {
  Grid made = grid;
  for (Dimension* dimension : {&made.outer, &made.inner}) {
    made.origin -= (dimension->count - 1) * dimension->stride;
    dimension->count = 2 * dimension->count - 1;
  }
  return made;
}

bool overlaps_itself(const Grid& grid) {
  if (grid.outer.stride == 0 || grid.inner.stride == 0) return true;
  return count_hits(differences(grid), grid.origin, grid.bytes) > 1;
}

bool overlap(const Grid& a, const Grid& b) {
  const bool alike = a.outer.stride == b.outer.stride && a.inner.stride == b.inner.stride &&
                     a.outer.count == b.outer.count && a.inner.count == b.inner.count;
  if (alike) return count_hits(differences(a), b.origin, b.bytes) > 0;
  for (Wide i = 0; i < a.outer.count; ++i) {
    for (Wide j = 0; j < a.inner.count; ++j) {
      const Wide at = a.origin + i * a.outer.stride + j * a.inner.stride;
      if (count_hits(b, at, a.bytes) > 0) return true;
    }
  }
  return false;
}

}  // namespace

std::string find_overlap(const SlotLayout& layout) {
  std::vector<Grid> grids;
  if (layout.num_slots == 0 || layout.slots_per_block == 0) return {};
  for (size_t i = 0; i < layout.num_segments; ++i) {
    if (layout.item_bytes[i] == 0) continue;
    grids.push_back(grid_of(layout, i));
    if (overlaps_itself(grids.back())) {
      return "the slots of segment " + std::to_string(i) + " overlap";
    }
  }
  std::sort(grids.begin(), grids.end(),
            [](const Grid& a, const Grid& b) { return a.origin < b.origin; });
  for (size_t i = 0; i < grids.size(); ++i) {
    for (size_t j = i + 1; j < grids.size() && grids[j].origin < grids[i].end(); ++j) {
      if (!overlap(grids[i], grids[j])) continue;
      const auto named = std::minmax(grids[i].segment, grids[j].segment);
      return "segments " + std::to_string(named.first) + " and " + std::to_string(named.second) +
             " share bytes";
    }
  }
  return {};
}

}  // namespace lmcache
