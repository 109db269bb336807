#include "core/chunk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "core/checksum.h"
#include "core/chunk_head.h"

namespace lmcache {

namespace {

constexpr uint64_t kPieceBytes = 256 << 10;  // what is checksummed while it is in the cache
constexpr uint64_t kDirectPieceBytes = 4 << 20;
constexpr uint64_t kBytesWorthAThread = 512 << 10;
constexpr int kAlways = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;  // a pipe must not keep us
const char kTemporary[] = ".tmp";

struct FreeAligned {
  void operator()(char* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<char, FreeAligned>;

AlignedBytes aligned_zeros(uint64_t nbytes) {
  char* bytes = static_cast<char*>(std::aligned_alloc(kHeadUnit, nbytes));
  if (bytes) std::memset(bytes, 0, nbytes);
  return AlignedBytes(bytes);
}

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }
  int close() {
    const int result = fd_ < 0 ? 0 : ::close(fd_);
    fd_ = -1;
    return result == 0 ? 0 : errno;
  }

 private:
  int fd_;
};

// Moves all bytes of up to two buffers; returns 0, an errno, or kFileShort at the end of the file.
template <typename Call>
int transfer(Call call, int fd, iovec* buffers, int count, uint64_t offset) {
  while (count > 0) {
    const ssize_t moved = call(fd, buffers, count, static_cast<off_t>(offset));
    if (moved < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (moved == 0) return kFileShort;
    offset += static_cast<uint64_t>(moved);
    size_t left = static_cast<size_t>(moved);
    while (count > 0 && left >= buffers->iov_len) {
      left -= buffers->iov_len;
      ++buffers;
      --count;
    }
    if (count > 0) {
      buffers->iov_base = static_cast<char*>(buffers->iov_base) + left;
      buffers->iov_len -= left;
    }
  }
  return 0;
}

int write_all(int fd, iovec* buffers, int count, uint64_t offset) {
  const int status = transfer(pwritev, fd, buffers, count, offset);
  return status == kFileShort ? EIO : status;
}

int read_all(int fd, iovec* buffers, int count, uint64_t offset) {
  return transfer(preadv, fd, buffers, count, offset);
}

int file_bytes_of(int fd, uint64_t& bytes) {
  struct stat found;
  if (fstat(fd, &found) != 0) return errno;
  if (!S_ISREG(found.st_mode)) return kFileForeign;
  bytes = static_cast<uint64_t>(found.st_size);
  return 0;
}

// Sees that a file that is written over will not be longer than `bytes`.
int cut_to(int fd, uint64_t bytes) {
  uint64_t found = 0;
  const int status = file_bytes_of(fd, found);
  if (status != 0 || found <= bytes) return status;
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}

// Runs `work(index)` for every index below `count`, in order of their begin, on several threads.
template <typename Work>
void run_parallel(size_t count, uint64_t nbytes, unsigned num_threads, Work work) {
  std::atomic<size_t> next{0};
  const auto loop = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  const uint64_t useful = std::max<uint64_t>(1, nbytes / kBytesWorthAThread);
  const uint64_t workers = std::min<uint64_t>({std::max(1u, num_threads), useful, count});
  std::vector<std::thread> threads;
  try {
    for (uint64_t w = 1; w < workers; ++w) threads.emplace_back(loop);
  } catch (...) {  // no more threads to be had: those there are do it all
  }
  loop();
  for (std::thread& thread : threads) thread.join();
}

template <typename Item>
uint64_t bytes_in(const std::vector<Item>& items) {
  uint64_t total = 0;
  for (const Item& item : items) total += item.nbytes;
  return total;
}

}  // namespace

ChunkFiles::ChunkFiles(int directory_fd, bool direct, unsigned num_threads)
    : directory_fd_(fcntl(directory_fd, F_DUPFD_CLOEXEC, 0)),
      direct_(direct),
      num_threads_(num_threads) {}

ChunkFiles::~ChunkFiles() {
  if (directory_fd_ >= 0) ::close(directory_fd_);
}

int ChunkFiles::open_file(const std::string& name, int flags, const void* bytes, uint64_t nbytes,
                          bool& is_direct) {
  const bool is_aligned =
      nbytes % kHeadUnit == 0 && reinterpret_cast<uintptr_t>(bytes) % kHeadUnit == 0;
  if (direct_ && is_aligned && is_direct) {
    const int fd = openat(directory_fd_, name.c_str(), flags | O_DIRECT | kAlways, 0644);
    if (fd >= 0 || errno != EINVAL) return fd;
  }
  is_direct = false;
  if (direct_) ++num_not_direct_;
  return openat(directory_fd_, name.c_str(), flags | kAlways, 0644);
}

int ChunkFiles::write_temporary(const ChunkWrite& chunk) {
  const std::string name = chunk.name + kTemporary;
  bool is_recycled = !chunk.recycled.empty();
  if (is_recycled &&
      renameat(directory_fd_, chunk.recycled.c_str(), directory_fd_, name.c_str()) != 0) {
    if (errno != ENOENT) return errno;
    is_recycled = false;
  }
  int status = write_file(name, chunk, is_recycled);
  if (status != 0 && is_recycled) {  // the old file may be at fault: not ours to write, say
    unlinkat(directory_fd_, name.c_str(), 0);
    status = write_file(name, chunk, false);
  }
  return status;
}

int ChunkFiles::write_file(const std::string& name, const ChunkWrite& chunk, bool is_recycled) {
  const uint64_t head_bytes = chunk_head_bytes(chunk.key.size(), chunk.layout.size());
  const AlignedBytes head = aligned_zeros(head_bytes);
  if (!head) return ENOMEM;
  int status = EINVAL;
  for (bool is_direct : {true, false}) {  // the second time where O_DIRECT opens but does not work
    const int flags = O_WRONLY | O_CREAT | (is_recycled ? 0 : O_TRUNC);
    File file(open_file(name, flags, chunk.bytes, chunk.nbytes, is_direct));
    if (file.fd() < 0) return errno;
    status = is_recycled ? cut_to(file.fd(), head_bytes + chunk.nbytes) : 0;
    if (status != 0) return status;
    const uint64_t piece_bytes = is_direct ? kDirectPieceBytes : kPieceBytes;
    Checksum checksum;
    uint64_t done = 0;
    // All pieces but the first: the head, which is written with it, must know their checksums.
    if (chunk.nbytes > piece_bytes) {
      Checksum later;
      later.num_words = piece_bytes / 8;
      for (done = piece_bytes; done < chunk.nbytes && status == 0;) {
        const uint64_t taken = std::min(piece_bytes, chunk.nbytes - done);
        later.add(chunk.bytes + done, taken);
        iovec piece{const_cast<char*>(chunk.bytes + done), taken};
        status = write_all(file.fd(), &piece, 1, head_bytes + done);
        done += taken;
      }
      checksum = later;
    }
    if (status == 0) {
      const uint64_t first = std::min(piece_bytes, chunk.nbytes);
      Checksum start;
      start.add(chunk.bytes, first);
      checksum.sum += start.sum;
      checksum.product += start.product;
      fill_head(head.get(), chunk.key, chunk.layout, chunk.nbytes, checksum);
      iovec buffers[2] = {{head.get(), head_bytes}, {const_cast<char*>(chunk.bytes), first}};
      status = write_all(file.fd(), buffers, first > 0 ? 2 : 1, 0);
    }
    const int closed = file.close();
    if (status == 0) status = closed;
    if (status != EINVAL || !is_direct) break;
  }
  return status;
}

void ChunkFiles::write(std::vector<ChunkWrite>& chunks, const std::atomic<bool>& stop) {
  std::mutex commit;
  std::vector<char> is_done(chunks.size(), 0);
  size_t next_to_commit = 0;
  run_parallel(chunks.size(), bytes_in(chunks), num_threads_, [&](size_t i) {
    ChunkWrite& chunk = chunks[i];
    if (!stop) chunk.status = write_temporary(chunk);
    std::lock_guard<std::mutex> guard(commit);
    is_done[i] = 1;
    for (; next_to_commit < chunks.size() && is_done[next_to_commit]; ++next_to_commit) {
      ChunkWrite& ready = chunks[next_to_commit];
      const std::string temporary = ready.name + kTemporary;
      if (ready.status == 0 &&
          renameat(directory_fd_, temporary.c_str(), directory_fd_, ready.name.c_str()) != 0) {
        ready.status = errno;
      }
      if (ready.status != 0) unlinkat(directory_fd_, temporary.c_str(), 0);
    }
  });
}

int ChunkFiles::read_one(ChunkRead& chunk) {
  const AlignedBytes head = aligned_zeros(chunk.head_bytes);
  if (!head) return ENOMEM;
  int status = EINVAL;
  ChunkHeadStart fixed;
  Checksum checksum;
  for (bool is_direct : {true, false}) {
    File file(open_file(chunk.name, O_RDONLY, chunk.bytes, chunk.nbytes, is_direct));
    if (file.fd() < 0) return errno;
    uint64_t file_bytes = 0;
    status = file_bytes_of(file.fd(), file_bytes);
    if (status == 0 && file_bytes != chunk.head_bytes + chunk.nbytes) return kFileShort;
    const uint64_t piece_bytes = is_direct ? kDirectPieceBytes : kPieceBytes;
    checksum = Checksum{};
    for (uint64_t done = 0; status == 0 && (done == 0 || done < chunk.nbytes);) {
      const uint64_t taken = std::min(piece_bytes, chunk.nbytes - done);
      iovec buffers[2] = {{head.get(), chunk.head_bytes}, {chunk.bytes + done, taken}};
      status = done == 0 ? read_all(file.fd(), buffers, taken > 0 ? 2 : 1, 0)
                         : read_all(file.fd(), buffers + 1, 1, chunk.head_bytes + done);
      if (status == 0) checksum.add(chunk.bytes + done, taken);
      done += taken;
      if (taken == 0) break;
    }
    if (status != EINVAL || !is_direct) break;
  }
  if (status != 0) return status;
  std::memcpy(&fixed, head.get(), sizeof fixed);
  status = check_start(fixed, chunk.head_bytes + chunk.nbytes);
  if (status == 0 && fixed.head_bytes != chunk.head_bytes) status = kFileAltered;
  if (status == 0) status = check_head(head.get(), fixed);
  if (status != 0) return status;
  if (fixed.key_bytes != chunk.key.size() ||
      std::memcmp(head.get() + sizeof fixed, chunk.key.data(), chunk.key.size()) != 0) {
    return kFileForeign;
  }
  const Checksum expected{fixed.chunk_sum, fixed.chunk_product, 0};
  return checksum == expected ? kFileGood : kFileAltered;
}

void ChunkFiles::read(std::vector<ChunkRead>& chunks, const std::atomic<bool>& stop) {
  run_parallel(chunks.size(), bytes_in(chunks), num_threads_, [&](size_t i) {
    if (!stop) chunks[i].status = read_one(chunks[i]);
  });
}

int ChunkFiles::read_head(ChunkHead& chunk) {
  File file(openat(directory_fd_, chunk.name.c_str(), O_RDONLY | kAlways));
  if (file.fd() < 0) return errno;
  uint64_t file_bytes = 0;
  int status = file_bytes_of(file.fd(), file_bytes);
  if (status != 0) return status;
  if (file_bytes < kHeadUnit) return kFileShort;
  AlignedBytes head = aligned_zeros(kHeadUnit);
  if (!head) return ENOMEM;
  iovec first{head.get(), kHeadUnit};
  status = read_all(file.fd(), &first, 1, 0);
  if (status != 0) return status;
  ChunkHeadStart fixed;
  std::memcpy(&fixed, head.get(), sizeof fixed);
  status = check_start(fixed, file_bytes);
  if (status != 0) return status;
  if (fixed.head_bytes > kHeadUnit) {
    head = aligned_zeros(fixed.head_bytes);
    if (!head) return ENOMEM;
    iovec whole{head.get(), fixed.head_bytes};
    status = read_all(file.fd(), &whole, 1, 0);
    if (status != 0) return status;
  }
  status = check_head(head.get(), fixed);
  if (status != 0) return status;
  chunk.key.assign(head.get() + sizeof fixed, fixed.key_bytes);
  chunk.layout.assign(head.get() + sizeof fixed + fixed.key_bytes, fixed.layout_bytes);
  chunk.head_bytes = fixed.head_bytes;
  chunk.nbytes = fixed.nbytes;
  return kFileGood;
}

void ChunkFiles::read_heads(std::vector<ChunkHead>& chunks, const std::atomic<bool>& stop) {
  for (ChunkHead& chunk : chunks) {
    if (!stop) chunk.status = read_head(chunk);
  }
}

std::vector<std::pair<size_t, int>> ChunkFiles::remove(const std::vector<std::string>& names) {
  std::vector<std::pair<size_t, int>> failed;
  for (size_t i = 0; i < names.size(); ++i) {
    if (unlinkat(directory_fd_, names[i].c_str(), 0) != 0 && errno != ENOENT) {
      failed.emplace_back(i, errno);
    }
  }
  return failed;
}

}  // namespace lmcache
