#include "io/checkpoint/verify.h"

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/checkpoint/section_source.h"

namespace tessera::io {
namespace {

bool is_io_error(const Error& error) { return dynamic_cast<const IoError*>(&error) != nullptr; }

class Verification {
 public:
  Verification(const fs::path& dir, const CheckpointIndex& index, const VerifyOptions& options)
      : dir_(dir), index_(index), options_(options), tensors_(options) {
    for (const Section& section : index.tensor_sections()) {
      const auto& source = sources_.emplace_back(
          std::make_unique<SectionSource>(dir, index, section, /*check_headers=*/false));
      for (const TensorInfo& info : source->tensors()) tensors_.add(*source, info.name);
    }
  }

  VerifyReport run() {
    for (const auto& [name, size] : index_.files) {
      if (wanted(name) && check_size(name, size)) check_header(name);
    }
    if (!options_.files) check_trainer();
    tensors_.read(absent_);
    return std::move(report_);
  }

 private:
  bool wanted(const std::string& file) const {
    return !options_.files || options_.files->contains(file);
  }

  void problem(const std::string& file, const std::string& tensor, const std::string& what,
               bool unread = false) {
    report_.problems.push_back({file, tensor, 0, 0, what, 0, 0, unread});
  }

  // Runs `check` and reports an error that it throws. @return false after an error
  template <typename Check>
  bool attempt(const std::string& file, Check&& check) {
    try {
      check();
      return true;
    } catch (const Error& error) {
      problem(file, "", error.what(), is_io_error(error));
      return false;
    }
  }

  // @return whether the file could be opened
  bool check_size(const std::string& name, std::int64_t size) {
    const bool opened = attempt(name, [&] {
      const std::string difference = compare_file(dir_ / name, size);
      if (!difference.empty()) problem(name, "", difference);
    });
    std::error_code gone;
    if (fs::is_regular_file(fs::symlink_status(dir_ / name, gone))) return opened;
    absent_.insert(name);
    return false;
  }

  // Compares the header with the index, because other programs read a shard from its header alone.
  void check_header(const std::string& name) {
    const std::size_t before = report_.problems.size();
    attempt(name, [&] {
      const File file = File::open(dir_ / name, Links::Refuse);
      compare_header(name, read_safetensors_header(file));
      // Also detects damage outside the list of tensors, as in the step or in the padding.
      if (report_.problems.size() == before) read_shard_header(file, name, index_);
    });
  }

  void compare_header(const std::string& file, const SafetensorsHeader& header) {
    const auto rank = header.metadata.find("rank");
    if (rank != header.metadata.end() && file.starts_with("rank-") &&
        !file.starts_with(fmt::format("rank-{:0>5}-", rank->second))) {
      problem(file, "", fmt::format("is the shard of rank {}: shards were swapped", rank->second));
      return;
    }
    std::map<std::string, const SafetensorsEntry*> entries;
    for (const SafetensorsEntry& entry : header.tensors) entries[entry.name] = &entry;
    std::map<std::string, std::int64_t> indexed;  // bytes of each tensor in chunks of this file
    for (const auto* const named : tensors_.chunks_in(file)) {
      const std::string& name = named->name;
      const DType dtype = named->tensor->record->dtype;
      const Chunk& chunk = named->chunk();
      const auto found = entries.find(name);
      if (found == entries.end()) {
        problem(file, name, "the file's own header does not list it");
        continue;
      }
      const SafetensorsEntry& entry = *found->second;
      if (entry.dtype != dtype) {
        problem(
            file, name,
            fmt::format("the file's own header says {}, the index {}", entry.stored_dtype, dtype));
      } else if (chunk.byte_begin < entry.begin || entry.end < chunk.byte_end) {
        problem(
            file, name,
            fmt::format("the file's own header puts it at bytes {} to {}, the index at {} to {}",
                        entry.begin, entry.end, chunk.byte_begin, chunk.byte_end));
      }
      indexed[name] += chunk.byte_end - chunk.byte_begin;
    }
    for (const SafetensorsEntry& entry : header.tensors) {
      const std::int64_t bytes = indexed[entry.name];
      if (bytes == entry.end - entry.begin) continue;
      problem(file, entry.name,
              fmt::format("the file has {} bytes of it, the index lists {}",
                          entry.end - entry.begin, bytes));
    }
  }

  void check_trainer() {
    if (!index_.trainer) return;
    const TrainerSection& trainer = *index_.trainer;
    attempt(trainer.file, [&] {
      const std::string text = read_file(dir_ / trainer.file, kMaxIndexBytes, Links::Refuse);
      if (static_cast<std::int64_t>(text.size()) != trainer.size) {
        problem(trainer.file, "",
                fmt::format("has {} bytes, but the index says {}: it was truncated or replaced",
                            text.size(), trainer.size));
      } else if (crc64(text.data(), text.size()) != trainer.crc64) {
        problem(trainer.file, "", "the checksum is wrong");
      }
    });
  }

  const fs::path& dir_;
  const CheckpointIndex& index_;
  const VerifyOptions& options_;
  std::vector<std::unique_ptr<SectionSource>> sources_;
  TensorVerification tensors_;
  VerifyReport& report_ = tensors_.report;
  std::set<std::string> absent_;  // files
};

}  // namespace

VerifyReport verify_checkpoint(const fs::path& dir, const CheckpointIndex& index,
                               const VerifyOptions& options) {
  return Verification(dir, index, options).run();
}

VerifyReport verify_checkpoint(const CheckpointReader& reader, const VerifyOptions& options) {
  return verify_checkpoint(reader.path(), reader.index(), options);
}

}  // namespace tessera::io
