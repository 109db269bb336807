// Chunk files: one chunk of a cache each, with a checked head before its bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_head.h"

namespace lmcache {

struct ChunkWrite {
  std::string name;    // in the directory
  std::string key;     // the key's string form
  std::string layout;  // how the chunk is laid out; opaque here
  const char* bytes;
  uint64_t nbytes;
  std::string recycled;  // a file that nothing lists any more, to be written over; may be empty
  int status = kFileSkipped;
};

struct ChunkRead {
  std::string name;
  std::string key;
  uint64_t head_bytes;
  char* bytes;
  uint64_t nbytes;
  int status = kFileSkipped;
};

struct ChunkHead {
  std::string name;
  std::string key;
  std::string layout;
  uint64_t head_bytes = 0;
  uint64_t nbytes = 0;
  int status = kFileSkipped;
};

// The chunk files of one directory, named relative to it: whatever becomes of the path, nothing
// outside is reached.
//
// Threads: safe; each call works on its own files with threads of its own.
class ChunkFiles {
 public:
  // Keeps a duplicate of `directory_fd`. `direct`: bypass the page cache where sizes, addresses and
  // the file system allow it.
  ChunkFiles(int directory_fd, bool direct, unsigned num_threads);
  ~ChunkFiles();
  ChunkFiles(const ChunkFiles&) = delete;
  ChunkFiles& operator=(const ChunkFiles&) = delete;

  // Each file appears whole under its name or not at all, and in the order given: none before those
  // ahead of it that could be written. Stops beginning files once `stop` is set.
  //
  // A chunk is written into the blocks of its `recycled` file, if there is one, which spares the
  // file system most of its work. That file is gone if the chunk is good; else it may still be
  // there. Who reads it meanwhile finds it altered.
  void write(std::vector<ChunkWrite>& chunks, const std::atomic<bool>& stop);
  // Leaves what it likes in the bytes of a chunk that is not good.
  void read(std::vector<ChunkRead>& chunks, const std::atomic<bool>& stop);
  void read_heads(std::vector<ChunkHead>& chunks, const std::atomic<bool>& stop);
  // Returns position and errno of those that could not be removed, unless they were not there.
  std::vector<std::pair<size_t, int>> remove(const std::vector<std::string>& names);

  // Files that were read or written through the page cache although `direct` was asked for.
  uint64_t num_not_direct() const { return num_not_direct_; }

 private:
  int write_temporary(const ChunkWrite& chunk);
  int write_file(const std::string& name, const ChunkWrite& chunk, bool is_recycled);
  int read_one(ChunkRead& chunk);
  int read_head(ChunkHead& chunk);
  int open_file(const std::string& name, int flags, const void* bytes, uint64_t nbytes,
                bool& is_direct);

  const int directory_fd_;
  const bool direct_;
  const unsigned num_threads_;
  std::atomic<uint64_t> num_not_direct_{0};
};

}  // namespace lmcache
