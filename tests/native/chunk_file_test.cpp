// Chunk files: written, read, spoiled, written over; what is told of faults; the order in which
// they appear. Run under the address and the thread sanitizer.
#include "core/chunk_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "check.h"

using namespace lmcache;

namespace {

using Names = std::vector<std::string>;

const std::atomic<bool> kGo{false};

// Bytes at an address that O_DIRECT takes.
class Buffer {
 public:
  Buffer(size_t size, uint64_t seed)
      : bytes_(static_cast<char*>(std::aligned_alloc(4096, up(size)))) {
    Numbers numbers(seed);
    for (size_t i = 0; i < up(size); ++i) bytes_.get()[i] = static_cast<char>(numbers.next());
  }
  char* at(size_t offset = 0) const { return bytes_.get() + offset; }

 private:
  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };
  static size_t up(size_t size) { return (size / 4096 + 1) * 4096; }
  std::unique_ptr<char, Free> bytes_;
};

// A directory that goes with its files.
class Directory {
 public:
  Directory() {
    const char* root = std::getenv("TMPDIR");
    path = std::string(root ? root : "/tmp") + "/chunk-files-XXXXXX";
    CHECK(mkdtemp(path.data()) != nullptr);
    fd = open(path.c_str(), O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0);
  }
  ~Directory() {
    for (const std::string& name : names()) unlinkat(fd, name.c_str(), 0);
    close(fd);
    rmdir(path.c_str());
  }
  Names names() const {
    Names found;
    DIR* entries = opendir(path.c_str());
    if (entries == nullptr) return found;  // it was removed
    while (const dirent* entry = readdir(entries)) {
      if (entry->d_name[0] != '.') found.push_back(entry->d_name);
    }
    closedir(entries);
    std::sort(found.begin(), found.end());
    return found;
  }
  struct stat of(const std::string& name) const {
    struct stat found;
    CHECK(fstatat(fd, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0);
    return found;
  }
  uint64_t size_of(const std::string& name) const {
    return static_cast<uint64_t>(of(name).st_size);
  }
  void resize(const std::string& name, uint64_t size) const {
    CHECK(truncate((path + "/" + name).c_str(), static_cast<off_t>(size)) == 0);
  }
  void flip(const std::string& name, uint64_t offset, int bit) const {
    const int file = openat(fd, name.c_str(), O_RDWR);
    char byte = 0;
    CHECK(pread(file, &byte, 1, static_cast<off_t>(offset)) == 1);
    byte = static_cast<char>(byte ^ (1 << bit));
    CHECK(pwrite(file, &byte, 1, static_cast<off_t>(offset)) == 1);
    close(file);
  }

  std::string path;
  int fd;
};

ChunkWrite write_of(const std::string& name, const Buffer& bytes, uint64_t nbytes,
                    const std::string& recycled = "") {
  return {name, "key of " + name, "layout of " + name, bytes.at(), nbytes, recycled};
}

int write_one(ChunkFiles& files, const ChunkWrite& chunk) {
  std::vector<ChunkWrite> chunks{chunk};
  files.write(chunks, kGo);
  return chunks[0].status;
}

// Reads what `write_of` wrote; compares the bytes of a good one.
int read_one(ChunkFiles& files, const std::string& name, const Buffer& expected, uint64_t nbytes,
             std::string key = "") {
  if (key.empty()) key = "key of " + name;
  const Buffer into(nbytes, 99);
  std::vector<ChunkRead> chunks{{name, key, kHeadUnit, into.at(), nbytes}};
  files.read(chunks, kGo);
  if (chunks[0].status == kFileGood) CHECK(std::memcmp(into.at(), expected.at(), nbytes) == 0);
  return chunks[0].status;
}

ChunkHead head_of(ChunkFiles& files, const std::string& name) {
  std::vector<ChunkHead> heads(1);
  heads[0].name = name;
  files.read_heads(heads, kGo);
  return heads[0];
}

void what_is_written_is_read(bool direct) {
  const Directory directory;
  const int fd = dup(directory.fd);
  ChunkFiles files(fd, direct, 3);
  close(fd);  // it has one of its own
  const Buffer bytes((9 << 20) + 5, 3);
  uint64_t num_not_direct = 0;
  for (const uint64_t nbytes : {0, 1, 8, 4095, 4096, 4097, 256 << 10, (256 << 10) + 4096,
                                (512 << 10) + 1, 4 << 20, (8 << 20) + 4096, (9 << 20) + 5}) {
    const std::string name = "c" + std::to_string(nbytes);
    CHECK(write_one(files, write_of(name, bytes, nbytes)) == kFileGood);
    CHECK(directory.size_of(name) == kHeadUnit + nbytes);
    CHECK(read_one(files, name, bytes, nbytes) == kFileGood);
    CHECK(read_one(files, name, bytes, nbytes, "kex of " + name) == kFileForeign);
    CHECK(read_one(files, name, bytes, nbytes, "key") == kFileForeign);
    CHECK(read_one(files, name, bytes, nbytes + 1) == kFileShort);
    const ChunkHead head = head_of(files, name);
    CHECK(head.status == kFileGood && head.key == "key of " + name);
    CHECK(head.layout == "layout of " + name && head.nbytes == nbytes);
    CHECK(head.head_bytes == kHeadUnit);
    // One write and four reads; another size is another alignment.
    if (direct) num_not_direct += nbytes % 4096 == 0 ? 1 : (nbytes + 1) % 4096 == 0 ? 4 : 5;
  }
  CHECK(files.num_not_direct() == num_not_direct || direct);
  CHECK(files.num_not_direct() >= num_not_direct);  // more where the file system has no O_DIRECT
  CHECK(directory.names().size() == 12);
  CHECK(files.remove(directory.names()).empty());
  CHECK(directory.names().empty());
}

void heads_may_be_long() {
  const Directory directory;
  ChunkFiles files(directory.fd, false, 1);
  const Buffer bytes(4096, 4);
  ChunkWrite chunk = write_of("long", bytes, 100);
  chunk.key.assign(5000, 'k');
  CHECK(chunk_head_bytes(chunk.key.size(), chunk.layout.size()) == 2 * kHeadUnit);
  CHECK(write_one(files, chunk) == kFileGood);
  const ChunkHead head = head_of(files, "long");
  CHECK(head.status == kFileGood && head.key == chunk.key && head.head_bytes == 2 * kHeadUnit);
  directory.flip("long", kHeadUnit + 10, 0);
  CHECK(head_of(files, "long").status == kFileAltered);
}

void spoiled_files_are_told() {
  const Directory directory;
  ChunkFiles files(directory.fd, false, 1);
  const Buffer bytes(10000, 5);
  CHECK(write_one(files, write_of("a", bytes, 10000)) == kFileGood);
  for (uint64_t offset = 0; offset < kHeadUnit; ++offset) {
    const int bit = static_cast<int>(offset % 8);
    directory.flip("a", offset, bit);
    const int status = read_one(files, "a", bytes, 10000);
    CHECK(status == kFileForeign || status == kFileAltered || status == kFileShort);
    CHECK(offset >= 12 || status == kFileForeign);  // the magic and the version
    CHECK(head_of(files, "a").status == status);
    directory.flip("a", offset, bit);
  }
  for (uint64_t offset = kHeadUnit; offset < kHeadUnit + 10000; offset += 101) {
    directory.flip("a", offset, 3);
    CHECK(read_one(files, "a", bytes, 10000) == kFileAltered);
    CHECK(head_of(files, "a").status == kFileGood);  // it says nothing of the chunk
    directory.flip("a", offset, 3);
  }
  CHECK(read_one(files, "a", bytes, 10000) == kFileGood);
  for (const uint64_t size : {kHeadUnit + 10001, kHeadUnit + 9999, kHeadUnit, kHeadUnit - 1, 0ul}) {
    directory.resize("a", size);
    CHECK(read_one(files, "a", bytes, 10000) == kFileShort);
    CHECK(head_of(files, "a").status == kFileShort);
  }
  CHECK(read_one(files, "gone", bytes, 1) == ENOENT && head_of(files, "gone").status == ENOENT);
}

void files_are_written_over() {
  const Directory directory;
  ChunkFiles files(directory.fd, false, 1);
  const Buffer old(20000, 6), bytes(20000, 7);
  for (const uint64_t old_bytes : {5000, 9000, 20000}) {  // shorter, as long, longer
    CHECK(write_one(files, write_of("old", old, old_bytes)) == kFileGood);
    const ino_t inode = directory.of("old").st_ino;
    CHECK(write_one(files, write_of("new", bytes, 9000, "old")) == kFileGood);
    CHECK(directory.names() == Names{"new"} && directory.of("new").st_ino == inode);
    CHECK(directory.size_of("new") == kHeadUnit + 9000);
    CHECK(read_one(files, "new", bytes, 9000) == kFileGood);
  }
  CHECK(write_one(files, write_of("more", bytes, 9000, "not there")) == kFileGood);
  CHECK(read_one(files, "more", bytes, 9000) == kFileGood);
  // One that cannot be opened: a new file takes its place, and what it points to is not touched.
  CHECK(symlinkat("more", directory.fd, "link") == 0);
  CHECK(write_one(files, write_of("last", old, 8000, "link")) == kFileGood);
  CHECK(S_ISREG(directory.of("last").st_mode) && directory.size_of("last") == kHeadUnit + 8000);
  CHECK(directory.names() == (Names{"last", "more", "new"}));
  CHECK(read_one(files, "more", bytes, 9000) == kFileGood);
  // What a killed process left under the temporary name is no part of the new file.
  CHECK(write_one(files, write_of("left.tmp", old, 20000)) == kFileGood);
  CHECK(write_one(files, write_of("left", bytes, 9000)) == kFileGood);
  CHECK(directory.size_of("left") == kHeadUnit + 9000 && files.remove({"left"}).empty());
  // One that cannot be renamed: nothing is written, and it stays.
  CHECK(write_one(files, write_of("none", bytes, 9000, "new/x")) == ENOTDIR);
  CHECK(directory.names() == (Names{"last", "more", "new"}));
}

void faults_of_the_directory_are_told() {
  Directory directory;
  ChunkFiles files(directory.fd, false, 2);
  const Buffer bytes(4096, 8);
  CHECK(mkdirat(directory.fd, "folder", 0755) == 0);
  const auto failed = files.remove({"none", "folder", "neither"});
  CHECK(failed.size() == 1 && failed[0].first == 1 && failed[0].second == EISDIR);
  CHECK(write_one(files, write_of("folder", bytes, 10)) != kFileGood);  // its name is taken
  CHECK(directory.names() == Names{"folder"});
  CHECK(unlinkat(directory.fd, "folder", AT_REMOVEDIR) == 0);
  CHECK(rmdir(directory.path.c_str()) == 0);
  CHECK(write_one(files, write_of("late", bytes, 10)) == ENOENT);
}

// The names that appeared in a directory, in their order.
Names arrivals(int watch) {
  alignas(inotify_event) char events[1 << 16];
  Names names;
  for (ssize_t got; (got = read(watch, events, sizeof events)) > 0;) {
    for (char* at = events; at < events + got;) {
      const auto* event = reinterpret_cast<const inotify_event*>(at);
      names.push_back(event->name);
      at += sizeof(inotify_event) + event->len;
    }
  }
  return names;
}

void files_appear_in_order() {
  const Directory directory;
  const int watch = inotify_init1(IN_NONBLOCK);
  CHECK(watch >= 0 && inotify_add_watch(watch, directory.path.c_str(), IN_MOVED_TO) >= 0);
  ChunkFiles files(directory.fd, false, 4);
  const Buffer bytes(3 << 20, 9);
  Numbers numbers(10);
  for (int round = 0; round < 20; ++round) {
    std::vector<ChunkWrite> chunks;
    Names expected;
    for (int i = 0; i < 24; ++i) {
      std::string name = std::to_string(round) + "-" + std::to_string(i);
      if (i % 7 == 3) {
        name = "nowhere/" + name;  // cannot be written; the others still are
      } else {
        expected.push_back(name);
      }
      chunks.push_back(write_of(name, bytes, numbers.below(3 << (i % 2 ? 20 : 10))));
    }
    files.write(chunks, kGo);
    for (int i = 0; i < 24; ++i) CHECK(chunks[i].status == (i % 7 == 3 ? ENOENT : kFileGood));
    CHECK(arrivals(watch) == expected);
    std::vector<ChunkRead> reads;
    std::vector<Buffer> into;
    for (const ChunkWrite& chunk : chunks) {
      into.emplace_back(chunk.nbytes, 11);
      reads.push_back({chunk.name, chunk.key, kHeadUnit, into.back().at(), chunk.nbytes});
    }
    files.read(reads, kGo);
    for (int i = 0; i < 24; ++i) {
      CHECK(reads[i].status == chunks[i].status);
      const bool is_same = std::memcmp(into[i].at(), bytes.at(), chunks[i].nbytes) == 0;
      CHECK(is_same || chunks[i].status != kFileGood);
    }
    CHECK(files.remove(expected).empty());
  }
  close(watch);
}

void nothing_begins_after_the_stop() {
  const Directory directory;
  ChunkFiles files(directory.fd, false, 3);
  const Buffer bytes(1 << 20, 12);
  std::vector<ChunkWrite> chunks;
  for (int i = 0; i < 64; ++i) chunks.push_back(write_of(std::to_string(i), bytes, 1 << 20));
  std::atomic<bool> stop{true};
  files.write(chunks, stop);
  for (const ChunkWrite& chunk : chunks) CHECK(chunk.status == kFileSkipped);
  CHECK(directory.names().empty());
  stop = false;
  std::thread stopper([&] {
    while (faccessat(directory.fd, "5", F_OK, 0) != 0) std::this_thread::yield();
    stop = true;
  });
  files.write(chunks, stop);
  stopper.join();
  size_t num_written = 0;  // what was begun is whole, and nothing behind it is there
  while (num_written < 64 && chunks[num_written].status == kFileGood) ++num_written;
  CHECK(num_written > 5 && directory.names().size() == num_written);
  for (size_t i = num_written; i < 64; ++i) CHECK(chunks[i].status == kFileSkipped);
  std::vector<ChunkRead> reads{{"0", "key of 0", kHeadUnit, bytes.at(), 1 << 20}};
  files.read(reads, stop);
  CHECK(reads[0].status == kFileSkipped);
}

}  // namespace

int main() {
  for (const bool direct : {false, true}) what_is_written_is_read(direct);
  heads_may_be_long();
  spoiled_files_are_told();
  files_are_written_over();
  faults_of_the_directory_are_told();
  files_appear_in_order();
  nothing_begins_after_the_stop();
  return 0;
}
