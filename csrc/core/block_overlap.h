// Whether the items of a layout share bytes, over all slots and segments.
#pragma once

#include <string>

#include "core/block_copy.h"

namespace lmcache {

// Exact for every stride. Costs O(pairs of segments whose spans meet); where two of those differ in
// their strides, each item of one is looked up in the other.
//
// Returns which segments overlap; or an empty text. The layout must lie in the address space.
std::string find_overlap(const SlotLayout& layout);

}  // namespace lmcache
