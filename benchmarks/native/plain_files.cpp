// What plain file I/O takes for a batch of chunks: the system calls that csrc/core/chunk_file.cpp
// makes, in its pieces and on as many threads, without its checksums, without looking at heads, and
// without waiting for files ahead. A shared library for sides/plain_files.py, so that both sides
// run in one process on one memory.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

namespace {

// As the Python side lays it out.
struct Batch {
  int32_t directory_fd;
  int32_t is_direct;
  int32_t reuses_files;   // write into the files of `old_number` on, instead of into new ones
  uint64_t first_number;  // of the names
  uint64_t old_number;
  uint64_t count;
  const uint64_t* addresses;  // of the chunks' bytes
  uint64_t chunk_bytes;
  char* heads;  // `count` of them, aligned for O_DIRECT
  uint64_t head_bytes;
  uint64_t piece_bytes;
  uint64_t num_threads;
};

std::string name_of(uint64_t number) {
  char name[64];
  std::snprintf(name, sizeof name, "%032llx-%016llx.pt", 0ull,
                static_cast<unsigned long long>(number));
  return name;
}

template <typename Call>
bool move_all(Call call, int fd, std::vector<iovec> buffers, uint64_t offset) {
  size_t first = 0;
  while (first < buffers.size()) {
    const ssize_t moved = call(fd, buffers.data() + first, static_cast<int>(buffers.size() - first),
                               static_cast<off_t>(offset));
    if (moved <= 0) return false;
    offset += static_cast<uint64_t>(moved);
    size_t left = static_cast<size_t>(moved);
    for (; first < buffers.size() && left >= buffers[first].iov_len; ++first) {
      left -= buffers[first].iov_len;
    }
    if (first < buffers.size()) {
      buffers[first].iov_base = static_cast<char*>(buffers[first].iov_base) + left;
      buffers[first].iov_len -= left;
    }
  }
  return true;
}

// Moves one chunk: all pieces but the first, then that with the head, or in order.
template <typename Call>
bool move_chunk(Call call, int fd, const Batch& batch, uint64_t i, bool is_first_last) {
  char* bytes = reinterpret_cast<char*>(batch.addresses[i]);
  char* head = batch.heads + i * batch.head_bytes;
  const uint64_t start = std::min(batch.piece_bytes, batch.chunk_bytes);
  const auto first = [&] {
    return move_all(call, fd, {{head, batch.head_bytes}, {bytes, start}}, 0);
  };
  if (!is_first_last && !first()) return false;
  for (uint64_t done = start; done < batch.chunk_bytes;) {
    const uint64_t taken = std::min(batch.piece_bytes, batch.chunk_bytes - done);
    if (!move_all(call, fd, {{bytes + done, taken}}, batch.head_bytes + done)) return false;
    done += taken;
  }
  return !is_first_last || first();
}

bool write_one(const Batch& batch, uint64_t i) {
  const std::string name = name_of(batch.first_number + i), temporary = name + ".tmp";
  const int direct = batch.is_direct ? O_DIRECT : 0, directory = batch.directory_fd;
  if (batch.reuses_files) {
    const std::string old = name_of(batch.old_number + i);
    if (renameat(directory, old.c_str(), directory, temporary.c_str()) != 0) return false;
  }
  const int fd = openat(directory, temporary.c_str(),
                        O_WRONLY | O_CLOEXEC | direct | (batch.reuses_files ? 0 : O_CREAT), 0644);
  if (fd < 0) return false;
  struct stat found;
  if (batch.reuses_files && fstat(fd, &found) != 0) return false;
  const bool is_written = move_chunk(pwritev, fd, batch, i, true);
  if (close(fd) != 0 || !is_written) return false;
  return renameat(directory, temporary.c_str(), directory, name.c_str()) == 0;
}

bool read_one(const Batch& batch, uint64_t i) {
  const int direct = batch.is_direct ? O_DIRECT : 0;
  const std::string name = name_of(batch.first_number + i);
  const int fd = openat(batch.directory_fd, name.c_str(), O_RDONLY | O_CLOEXEC | direct);
  if (fd < 0) return false;
  struct stat found;
  const bool is_read = fstat(fd, &found) == 0 && move_chunk(preadv, fd, batch, i, false);
  return close(fd) == 0 && is_read;
}

template <typename One>
int on_threads(const Batch& batch, One one) {
  std::atomic<uint64_t> next{0};
  std::atomic<int> failed{0};
  const auto loop = [&] {
    for (uint64_t i = next++; i < batch.count; i = next++) {
      errno = 0;
      if (!one(batch, i)) failed = errno ? errno : EIO;
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t t = 1; t < batch.num_threads; ++t) threads.emplace_back(loop);
  loop();
  for (std::thread& thread : threads) thread.join();
  return failed;
}

}  // namespace

// All return 0 or an errno.
extern "C" {

int plain_write(const Batch* batch) { return on_threads(*batch, write_one); }

int plain_read(const Batch* batch) { return on_threads(*batch, read_one); }

int plain_remove(const Batch* batch) {
  for (uint64_t i = 0; i < batch->count; ++i) {
    const std::string name = name_of(batch->first_number + i);
    if (unlinkat(batch->directory_fd, name.c_str(), 0) != 0) return errno;
  }
  return 0;
}
}
