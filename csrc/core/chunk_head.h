// The head of a chunk file: which key the chunk is of, how it is laid out, and checksums.
//
// A file is a head, padded to a multiple of kHeadUnit bytes, and then the chunk. The head holds the
// checksums of itself and of the chunk, so that a short, altered or foreign file is told from a
// good one. Numbers are little-endian.
#pragma once

#include <cstdint>
#include <string>

#include "core/checksum.h"

namespace lmcache {

constexpr uint64_t kHeadUnit = 4096;  // also what O_DIRECT wants of sizes and addresses

// What became of one file; else a positive errno.
constexpr int kFileGood = 0;
constexpr int kFileShort = -1;    // shorter or longer than its head says
constexpr int kFileAltered = -2;  // a checksum does not fit
constexpr int kFileForeign = -3;  // another format, version or key
constexpr int kFileSkipped = -4;  // not begun: the process is ending

// The first bytes of a head; key and layout follow.
struct ChunkHeadStart {
  char magic[8];
  uint32_t version;
  uint32_t head_bytes;
  uint64_t nbytes;
  uint64_t chunk_sum, chunk_product;
  uint64_t head_sum;  // of the whole head with this field zero
  uint32_t key_bytes;
  uint32_t layout_bytes;
  uint64_t reserved;
};
static_assert(sizeof(ChunkHeadStart) == 64, "the head's first bytes are a format");

// Bytes of the head of a chunk with such a key and layout.
uint64_t chunk_head_bytes(uint64_t key_bytes, uint64_t layout_bytes);

// Fills a zeroed head; `checksum` is the chunk's.
void fill_head(char* head, const std::string& key, const std::string& layout, uint64_t nbytes,
               const Checksum& checksum);

// Whether the first bytes are those of a head of ours in a file of `file_bytes`.
int check_start(const ChunkHeadStart& start, uint64_t file_bytes);

// Whether a whole head is what was written; its checksum is zeroed.
int check_head(char* head, const ChunkHeadStart& start);

}  // namespace lmcache
