#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <set>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/consolidate/copy_files.h"

namespace tessera::io {

std::uint64_t copy_identity(const std::vector<ExportFile>& files, std::int64_t block) {
  std::uint64_t identity = 0;
  const auto add = [&](const std::string& text) {
    identity = crc64(text.data(), text.size(), identity);
  };
  std::set<std::pair<const TensorSource*, std::string>> unchecked;
  add(fmt::format("block {}\n", block));
  for (const ExportFile& file : files) {
    add(fmt::format("file {} {}\n{}\n", file.name, file.plan.file_size, file.plan.preamble));
    for (const ExportTensor* tensor : file.tensors) {
      add(fmt::format("tensor {} {} {} {}\n", tensor->name, tensor->source_name, tensor->stored,
                      tensor->written));
      const auto layout = tensor->source->layout(tensor->source_name);
      if (!layout) {
        // Nothing tells whether the source is as it was: such an export is never gone on with.
        add(fmt::format("{} {}\n", ::getpid(),
                        std::chrono::system_clock::now().time_since_epoch().count()));
        continue;
      }
      for (const Chunk& chunk : layout->chunks) {
        add(fmt::format("{} {} {} {} {}", chunk.file, chunk.byte_begin, chunk.byte_end, chunk.begin,
                        chunk.end));
        if (chunk.box) add(fmt::format(" {} {}", chunk.box->offsets, chunk.box->shape));
        add(layout->has_checksums ? fmt::format(" {:016x}\n", chunk.crc64) : "\n");
        if (!layout->has_checksums) unchecked.insert({tensor->source, chunk.file});
      }
    }
  }
  for (const auto& [source, name] : unchecked) {
    const File file = source->open_file(name);
    struct stat status {};
    require<IoError>(::fstat(file.descriptor(), &status) == 0, "cannot stat {}",
                     file.path().string());
    add(fmt::format("{} {} {} {} {}.{}\n", fs::absolute(file.path()).string(), status.st_dev,
                    status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec));
  }
  return identity;
}

}  // namespace tessera::io
