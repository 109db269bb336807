#include <nanobind/stl/tuple.h>

#include "bind/native_region.h"
#include "core/checksum.h"
#include "core/chunk_file.h"

namespace lmcache {

namespace {

std::string bytes_of(nb::handle object) {
  const nb::bytes bytes = nb::cast<nb::bytes>(object);
  return std::string(static_cast<const char*>(bytes.data()), bytes.size());
}

template <typename Item>
nb::list statuses_of(const std::vector<Item>& items) {
  nb::list statuses;
  for (const Item& item : items) statuses.append(item.status);
  return statuses;
}

void check_address(uint64_t address, uint64_t nbytes) {
  if (address == 0 && nbytes > 0) throw nb::value_error("a chunk has a null address");
}

nb::list write(ChunkFiles& files, nb::list jobs) {
  std::vector<ChunkWrite> chunks;
  for (nb::handle job : jobs) {
    auto [name, key, layout, address, nbytes, recycled] =
        nb::cast<std::tuple<std::string, nb::bytes, nb::bytes, uint64_t, uint64_t, std::string>>(
            job);
    check_address(address, nbytes);
    chunks.push_back({std::move(name), bytes_of(key), bytes_of(layout),
                      reinterpret_cast<const char*>(address), nbytes, std::move(recycled)});
  }
  if (!g_exiting) {
    const NativeRegion region;
    files.write(chunks, g_exiting);
  }
  return statuses_of(chunks);
}

nb::list read(ChunkFiles& files, nb::list jobs) {
  std::vector<ChunkRead> chunks;
  for (nb::handle job : jobs) {
    auto [name, key, head_bytes, address, nbytes] =
        nb::cast<std::tuple<std::string, nb::bytes, uint64_t, uint64_t, uint64_t>>(job);
    check_address(address, nbytes);
    chunks.push_back(
        {std::move(name), bytes_of(key), head_bytes, reinterpret_cast<char*>(address), nbytes});
  }
  if (!g_exiting) {
    const NativeRegion region;
    files.read(chunks, g_exiting);
  }
  return statuses_of(chunks);
}

// One (status, key, layout, head bytes, chunk bytes) per name.
nb::list read_heads(ChunkFiles& files, const std::vector<std::string>& names) {
  std::vector<ChunkHead> chunks(names.size());
  for (size_t i = 0; i < names.size(); ++i) chunks[i].name = names[i];
  if (!g_exiting) {
    const NativeRegion region;
    files.read_heads(chunks, g_exiting);
  }
  nb::list heads;
  for (const ChunkHead& chunk : chunks) {
    heads.append(nb::make_tuple(chunk.status, nb::bytes(chunk.key.data(), chunk.key.size()),
                                nb::bytes(chunk.layout.data(), chunk.layout.size()),
                                chunk.head_bytes, chunk.nbytes));
  }
  return heads;
}

std::vector<std::pair<size_t, int>> remove(ChunkFiles& files,
                                           const std::vector<std::string>& names) {
  if (g_exiting) return {};
  const NativeRegion region;
  return files.remove(names);
}

}  // namespace

void bind_chunk_file(nb::module_& m) {
  m.attr("FILE_GOOD") = kFileGood;
  m.attr("FILE_SHORT") = kFileShort;
  m.attr("FILE_ALTERED") = kFileAltered;
  m.attr("FILE_FOREIGN") = kFileForeign;
  m.attr("FILE_SKIPPED") = kFileSkipped;
  m.def("chunk_head_bytes", &chunk_head_bytes, nb::arg("key_bytes"), nb::arg("layout_bytes"),
        "Bytes of the head of a chunk file with such a key and layout.");
  m.def(
      "checksum",
      [](nb::bytes bytes) {
        Checksum checksum;
        checksum.add(bytes.data(), bytes.size());
        return nb::make_tuple(checksum.sum, checksum.product);
      },
      nb::arg("bytes"), "The two sums of a chunk file's checksum.");
  nb::class_<ChunkFiles>(m, "ChunkFiles", "The chunk files of one directory.")
      .def(nb::init<int, bool, unsigned>(), nb::arg("directory_fd"), nb::arg("direct"),
           nb::arg("num_threads"))
      .def("write", &write, nb::arg("jobs"),
           "Write (name, key, layout, address, nbytes, recycled) each; one status per job: 0 or an "
           "errno. Files appear whole, in the order given. `recycled` names a file to be written "
           "over, which is gone if the chunk is good, or is \"\". Without the interpreter's lock.")
      .def("read", &read, nb::arg("jobs"),
           "Read (name, key, head_bytes, address, nbytes) each; one status per job: FILE_*, or an "
           "errno. Without the interpreter's lock.")
      .def("read_heads", &read_heads, nb::arg("names"),
           "(status, key, layout, head_bytes, nbytes) per name.")
      .def("remove", &remove, nb::arg("names"),
           "Remove files; (position, errno) of those that could not be. One that is not there is "
           "no failure.")
      .def_prop_ro("num_not_direct", &ChunkFiles::num_not_direct,
                   "Files that went through the page cache although `direct` was asked for.");
}

}  // namespace lmcache
