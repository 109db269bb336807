#include "core/chunk_head.h"

#include <cstring>

namespace lmcache {

namespace {

constexpr char kMagic[8] = {'L', 'M', 'C', 'K', 'C', 'H', 'N', 'K'};
constexpr uint32_t kVersion = 1;

uint64_t head_sum(const char* head, uint64_t head_bytes) {
  Checksum checksum;
  checksum.add(head, head_bytes);
  return checksum.sum ^ (checksum.product * 0x9E3779B97F4A7C15);
}

}  // namespace

uint64_t chunk_head_bytes(uint64_t key_bytes, uint64_t layout_bytes) {
  const uint64_t needed = sizeof(ChunkHeadStart) + key_bytes + layout_bytes;
  return (needed + kHeadUnit - 1) / kHeadUnit * kHeadUnit;
}

void fill_head(char* head, const std::string& key, const std::string& layout, uint64_t nbytes,
               const Checksum& checksum) {
  ChunkHeadStart start{};
  std::memcpy(start.magic, kMagic, sizeof kMagic);
  start.version = kVersion;
  start.head_bytes = static_cast<uint32_t>(chunk_head_bytes(key.size(), layout.size()));
  start.nbytes = nbytes;
  start.chunk_sum = checksum.sum;
  start.chunk_product = checksum.product;
  start.key_bytes = static_cast<uint32_t>(key.size());
  start.layout_bytes = static_cast<uint32_t>(layout.size());
  std::memcpy(head, &start, sizeof start);
  std::memcpy(head + sizeof start, key.data(), key.size());
  std::memcpy(head + sizeof start + key.size(), layout.data(), layout.size());
  start.head_sum = head_sum(head, start.head_bytes);
  std::memcpy(head, &start, sizeof start);
}

int check_start(const ChunkHeadStart& start, uint64_t file_bytes) {
  if (std::memcmp(start.magic, kMagic, sizeof kMagic) != 0) return kFileForeign;
  if (start.version != kVersion) return kFileForeign;
  if (start.head_bytes != chunk_head_bytes(start.key_bytes, start.layout_bytes)) {
    return kFileAltered;
  }
  if (start.head_bytes > file_bytes || file_bytes - start.head_bytes != start.nbytes) {
    return kFileShort;
  }
  return kFileGood;
}

int check_head(char* head, const ChunkHeadStart& start) {
  ChunkHeadStart unsummed = start;
  unsummed.head_sum = 0;
  std::memcpy(head, &unsummed, sizeof unsummed);
  return head_sum(head, start.head_bytes) == start.head_sum ? kFileGood : kFileAltered;
}

}  // namespace lmcache
