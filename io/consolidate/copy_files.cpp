#include "io/consolidate/copy_files.h"

#include <sys/stat.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"

namespace tessera::io {
namespace {

OutputFile output_file(const ExportFile& file) {
  OutputFile output{file.name, file.preamble, file.size, {}, file.literals};
  for (const ExportPart& each : file.parts) {
    const ExportTensor& tensor = *each.tensor;
    OutputPart& part = output.parts.emplace_back(OutputPart{
        tensor.source, tensor.source_name, each.begin, each.end, tensor.written, each.offset});
    part.swap = tensor.swap;
    part.encoding = tensor.encoding;
    part.stored = tensor.stored_encoding;
    part.crc32_at = each.crc32_at;
  }
  return output;
}

// Removes all but tensor files of an earlier attempt, because this export may not write the others.
void remove_other_files(const fs::path& dir, const std::vector<ExportFile>& files) {
  std::set<std::string> names;
  for (const ExportFile& file : files) names.insert(file.name);
  for (const fs::path& path : list_directory(dir)) {
    if (!names.contains(path.filename().string())) fs::remove_all(path);
  }
}

/// Indices of the files that the attempt has recorded and that are intact.
std::set<std::size_t> find_finished(const Attempt& attempt, const std::vector<ExportFile>& files,
                                    const WriteOptions& options) {
  std::map<std::size_t, std::uint64_t> recorded;
  for (const FileRecord& record : attempt.found()) recorded[record.file] = record.crc64;
  std::set<std::size_t> finished;
  for (const auto& [number, crc] : recorded) {
    if (number >= files.size()) continue;
    const fs::path path = attempt.dir() / files[number].name;
    std::error_code error;
    const bool is_whole =
        fs::is_regular_file(fs::symlink_status(path, error)) &&
        static_cast<std::int64_t>(fs::file_size(path, error)) == files[number].size;
    if (is_whole && sum_file(path, options) == crc) finished.insert(number);
  }
  return finished;
}

}  // namespace

std::uint64_t copy_identity(const std::vector<ExportFile>& files, bool is_shared) {
  std::uint64_t identity = 0;
  const auto add = [&](const std::string& text) {
    identity = crc64(text.data(), text.size(), identity);
  };
  std::set<std::pair<const TensorSource*, std::string>> unchecked;
  for (const ExportFile& file : files) {
    add(fmt::format("file {} {}\n{}\n", file.name, file.size, file.preamble));
    for (const Literal& literal : file.literals)
      add(fmt::format("literal {}\n{}\n", literal.offset, literal.bytes));
    for (const ExportPart& part : file.parts) {
      const ExportTensor* const tensor = part.tensor;
      add(fmt::format("tensor {} {} {} {} {} {}\n", tensor->name, tensor->source_name,
                      tensor->stored, tensor->written, part.begin, part.end));
      if (tensor->swap)
        add(fmt::format("swap {} {} {}\n", tensor->swap->rows, tensor->swap->columns,
                        tensor->swap->inner));
      const auto record = tensor->source->record(tensor->source_name);
      if (record->addend)
        add(fmt::format("plus {:016x} {}\n", record->addend->checksum(), record->addend_begin));
      for (const Chunk& chunk : record->chunks) {
        add(fmt::format("{} {} {} {} {}", chunk.file, chunk.byte_begin, chunk.byte_end, chunk.begin,
                        chunk.end));
        if (chunk.zstd) add(fmt::format(" zstd {}", chunk.zstd->range.offset));
        if (chunk.box) add(fmt::format(" {} {}", chunk.box->offsets, chunk.box->shape));
        if (chunk.storage && chunk.storage->strides)
          add(fmt::format(" {}", *chunk.storage->strides));
        const bool has_checksum = chunk.checksum != Checksum::None;
        add(has_checksum ? fmt::format(" {:016x}\n", chunk.crc64) : "\n");
        if (!has_checksum) unchecked.insert({tensor->source, chunk.file});
      }
    }
  }
  std::set<std::string> stats;  // sorted, because `unchecked` is in the order of addresses
  for (const auto& [source, name] : unchecked) {
    const File file = source->open_file(name);
    struct stat status {};
    require<IoError>(::fstat(file.descriptor(), &status) == 0, "cannot stat {}",
                     file.path().string());
    const std::string where = is_shared
                                  ? name
                                  : fmt::format("{} {} {}", fs::absolute(file.path()).string(),
                                                status.st_dev, status.st_ino);
    stats.insert(fmt::format("{} {} {}.{}\n", where, status.st_size, status.st_mtim.tv_sec,
                             status.st_mtim.tv_nsec));
  }
  for (const std::string& text : stats) add(text);
  return identity;
}

bool copy_files(Attempt& attempt, const std::vector<ExportFile>& files, const WriteOptions& options,
                const std::function<bool(std::int64_t, bool)>& wrote) {
  remove_other_files(attempt.dir(), files);
  const std::set<std::size_t> finished = find_finished(attempt, files, options);
  std::vector<OutputFile> outputs;
  std::vector<std::size_t> left;
  for (std::size_t i = 0; i < files.size(); ++i) {
    outputs.push_back(output_file(files[i]));
    if (!finished.contains(i)) {
      left.push_back(i);
    } else if (wrote && !wrote(files[i].size, true)) {
      return false;
    }
  }
  WriteOptions write = options;
  if (wrote) write.wrote = [&](std::int64_t bytes) { return wrote(bytes, false); };
  write.finished = [&](std::size_t file, std::uint64_t crc) { attempt.record({file, crc}); };
  return write_files(attempt.dir(), outputs, left, write);
}

}  // namespace tessera::io
