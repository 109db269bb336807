#include <nanobind/ndarray.h>

#include "bind/native_region.h"
#include "core/block_copy.h"
#include "core/block_overlap.h"

namespace lmcache {

namespace {

using Words = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_equal(const char* first, size_t size, const char* second, size_t other) {
  if (size == other) return;
  throw nb::value_error((std::string(first) + " and " + second + " must be equally long, not " +
                         std::to_string(size) + " and " + std::to_string(other))
                            .c_str());
}

void check_segments(const Words& bases, const Words& item_bytes, const Integers& slot_strides,
                    const Integers& block_strides) {
  check_equal("bases", bases.size(), "item_bytes", item_bytes.size());
  check_equal("bases", bases.size(), "slot_strides", slot_strides.size());
  check_equal("bases", bases.size(), "block_strides", block_strides.size());
}

std::string checked_overlap(Words bases, Words item_bytes, Integers slot_strides,
                            Integers block_strides, uint64_t slots_per_block, uint64_t num_slots) {
  check_segments(bases, item_bytes, slot_strides, block_strides);
  return find_overlap({bases.data(), item_bytes.data(), slot_strides.data(), block_strides.data(),
                       bases.size(), slots_per_block, num_slots, 1});
}

template <Direction kDirection>
void checked_copy(Words addresses, Words sizes, Words counts, Words skips, Integers ids,
                  Words bases, Words item_bytes, Integers slot_strides, Integers block_strides,
                  uint64_t slots_per_block, uint64_t num_slots, uint64_t parts_per_group,
                  unsigned num_threads, uint64_t stream) {
  check_equal("addresses", addresses.size(), "sizes", sizes.size());
  check_equal("addresses", addresses.size(), "counts", counts.size());
  check_equal("addresses", addresses.size(), "skips", skips.size());
  check_segments(bases, item_bytes, slot_strides, block_strides);
  check_no_stream(stream);
  if (g_exiting) return;  // the interpreter is going; nobody will read the copy
  const SlotLayout layout{
      bases.data(), item_bytes.data(), slot_strides.data(), block_strides.data(),
      bases.size(), slots_per_block,   num_slots,           parts_per_group};
  const ObjectBatch batch{addresses.data(), sizes.data(), counts.data(), skips.data(),
                          addresses.size(), ids.data(),   ids.size()};
  std::string error;
  {
    const NativeRegion region;
    error = copy_blocks(kDirection, layout, batch, num_threads);
  }
  if (!error.empty()) throw nb::value_error(error.c_str());
}

#define LMCACHE_BLOCK_COPY_ARGUMENTS                                                              \
  "addresses: object, sizes: object, counts: object, skips: object, ids: object, bases: object, " \
  "item_bytes: object, slot_strides: object, block_strides: object, slots_per_block: int, "       \
  "num_slots: int, parts_per_group: int, num_threads: int = 1, *, stream: int = 0) -> None"

template <Direction kDirection>
void define(nb::module_& m, const char* name, const char* signature, const char* doc) {
  m.def(name, &checked_copy<kDirection>, nb::arg("addresses").noconvert(),
        nb::arg("sizes").noconvert(), nb::arg("counts").noconvert(), nb::arg("skips").noconvert(),
        nb::arg("ids").noconvert(), nb::arg("bases").noconvert(), nb::arg("item_bytes").noconvert(),
        nb::arg("slot_strides").noconvert(), nb::arg("block_strides").noconvert(),
        nb::arg("slots_per_block"), nb::arg("num_slots"), nb::arg("parts_per_group"),
        nb::arg("num_threads") = 1, nb::kw_only(), nb::arg("stream") = 0, nb::sig(signature), doc);
}

}  // namespace

void bind_block_copy(nb::module_& m) {
  define<Direction::kGather>(
      m, "gather", "def gather(" LMCACHE_BLOCK_COPY_ARGUMENTS,
      "Copy slots into memory objects without the interpreter's lock.\n\n"
      "Objects: addresses, sizes (bytes), counts (ids) and skips (leading ids of the object whose "
      "items are neither read nor written, and which are not looked at) are uint64 arrays, ids one "
      "int64 array for all. Segments: bases and item_bytes are uint64, slot_strides and "
      "block_strides int64 "
      "arrays in bytes; the item of slot i lies at base + i // slots_per_block * block_stride + "
      "i % slots_per_block * slot_stride. An object holds, for each group of parts_per_group "
      "segments, for each of its ids, the parts' items. A ValueError names what does not fit; "
      "then nothing was copied.");
  define<Direction::kScatter>(m, "scatter", "def scatter(" LMCACHE_BLOCK_COPY_ARGUMENTS,
                              "Copy memory objects into slots: gather's arguments, the other way "
                              "round. No id "
                              "that is looked at may be there twice.");
  m.def("find_overlap", &checked_overlap, nb::arg("bases").noconvert(),
        nb::arg("item_bytes").noconvert(), nb::arg("slot_strides").noconvert(),
        nb::arg("block_strides").noconvert(), nb::arg("slots_per_block"), nb::arg("num_slots"),
        nb::sig("def find_overlap(bases: object, item_bytes: object, slot_strides: object, "
                "block_strides: object, slots_per_block: int, num_slots: int) -> str"),
        "Say which segments of gather's have slots that share bytes; an empty text if none do.");
}

}  // namespace lmcache
