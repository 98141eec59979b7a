#include "io/checkpoint/verify.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/checkpoint/section_source.h"
#include "io/pump/pump.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kBuffer = std::int64_t{1} << 20;  // bytes per thread
constexpr std::int64_t kBatch = std::int64_t{16} << 20;  // bytes per unit of work
constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

// Index of the first element whose exponent bits are all ones (infinity or NaN), or -1.
template <typename Bits>
std::int64_t find_non_finite(const void* data, std::int64_t n, Bits exponent) {
  const auto* at = static_cast<const char*>(data);
  for (std::int64_t i = 0; i < n; ++i, at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, at, sizeof(Bits));
    if ((bits & exponent) == exponent) return i;
  }
  return -1;
}

std::int64_t find_non_finite(DType dtype, const void* data, std::int64_t n) {
  if (dtype == DType::F64) return find_non_finite<std::uint64_t>(data, n, 0x7ff0000000000000ULL);
  if (dtype == DType::F32) return find_non_finite<std::uint32_t>(data, n, 0x7f800000U);
  if (dtype == DType::BF16) return find_non_finite<std::uint16_t>(data, n, 0x7f80U);
  return dtype == DType::F16 ? find_non_finite<std::uint16_t>(data, n, 0x7c00U) : -1;
}

bool is_io_error(const Error& error) { return dynamic_cast<const IoError*>(&error) != nullptr; }

struct NamedChunk {
  PumpTensor* tensor;
  std::size_t number;               ///< index of the chunk in its tensor
  std::string name;                 ///< section and name of the tensor
  std::string error{};              ///< why it could not be read
  bool unread = false;              ///< `error` is an I/O error
  bool wrong = false;               ///< the checksum is wrong
  std::int64_t non_finite = kNone;  ///< first non-finite element, counted like Chunk::begin

  const Chunk& chunk() const { return tensor->record->chunks[number]; }
};

class Verification {
 public:
  Verification(const fs::path& dir, const CheckpointIndex& index, const VerifyOptions& options)
      : dir_(dir), index_(index), options_(options) {
    for (const Section& section : index.tensor_sections()) {
      const auto& source = sources_.emplace_back(
          std::make_unique<SectionSource>(dir, index, section, /*check_headers=*/false));
      for (const TensorInfo& info : source->tensors()) add(*source, info.name);
    }
  }

  VerifyReport run() {
    for (const auto& [name, size] : index_.files) {
      if (wanted(name) && check_size(name, size)) check_header(name);
    }
    if (!options_.files) check_trainer();
    read_chunks();
    return std::move(report_);
  }

 private:
  void add(const TensorSource& source, const std::string& name) {
    ++report_.tensors;
    PumpTensor& tensor = *tensors_.emplace_back(std::make_unique<PumpTensor>(source, name));
    const std::size_t first = chunks_.size();
    for (std::size_t i = 0; i < tensor.record->chunks.size(); ++i) {
      const Chunk& chunk = tensor.record->chunks[i];
      if (chunk.begin == chunk.end || !wanted(chunk.file)) continue;
      by_file_[chunk.file].push_back(chunks_.size());
      chunks_.push_back({&tensor, i, source.title(name)});
    }
    // Searches from `first`, because the chunks of this tensor follow in ascending order.
    tensor.on_wrong = [this, first](std::size_t number) {
      auto at = chunks_.begin() + static_cast<std::ptrdiff_t>(first);
      while (at->number != number) ++at;
      at->wrong = true;
    };
  }

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
    for (const std::size_t i : by_file_[file]) {
      const std::string& name = chunks_[i].name;
      const DType dtype = chunks_[i].tensor->record->dtype;
      const Chunk& chunk = chunks_[i].chunk();
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

  void read_chunks() {
    std::vector<Slice> slices;  // one per chunk; empty if the file is absent
    for (const NamedChunk& named : chunks_) {
      const Chunk& chunk = named.chunk();
      const bool absent = absent_.contains(chunk.file);
      slices.push_back({named.tensor, named.number, chunk.begin, absent ? chunk.begin : chunk.end});
      report_.bytes += slices.back().bytes();
    }
    const std::vector<std::vector<SlicePiece>> batches = cut_batches(slices, kBatch);
    std::int64_t done = 0;
    std::mutex mutex;  // guards done and the results in chunks_
    // Uses the page cache, because it still has the data of a save that is read back.
    Pump pump({.threads = options_.threads, .block = kBuffer, .direct_io = false});
    pump.run(batches.size(), [&](std::size_t b, Pump::Lane& lane) {
      const std::vector<SlicePiece>& batch = batches[b];
      std::vector<std::pair<std::size_t, std::int64_t>> non_finite;  // chunk and element
      const auto read = [&](std::span<const SlicePiece> pieces) {
        lane.read(pieces, [&](const SlicePiece& piece, const Slice& part, const char* data) {
          const std::int64_t found =
              find_non_finite(part.tensor->record->dtype, data, part.to - part.from);
          if (found >= 0) non_finite.emplace_back(piece.of, part.from + found);
        });
      };
      try {
        read(batch);
      } catch (const Error& first) {
        // Reads the pieces one by one to find the failing chunks.
        bool found = false;
        const auto blame = [&](const SlicePiece& piece, const Error& error) {
          const bool unread = is_io_error(error);
          const std::lock_guard lock(mutex);
          NamedChunk& chunk = chunks_[piece.of];
          if (chunk.error.empty() || (chunk.unread && !unread)) {
            chunk.error = error.what();
            chunk.unread = unread;
          }
          found = true;
        };
        for (const SlicePiece& piece : batch) {
          try {
            read(std::span(&piece, 1));
          } catch (const Error& error) {
            blame(piece, error);
          }
        }
        if (!found) blame(batch[0], first);  // an I/O error that did not recur
      }
      const std::lock_guard lock(mutex);
      for (const auto& [chunk, element] : non_finite) {
        chunks_[chunk].non_finite = std::min(chunks_[chunk].non_finite, element);
      }
      for (const SlicePiece& piece : batch) {
        done += piece.slice.bytes();
        if (options_.progress) options_.progress(done, report_.bytes);
      }
    });
    for (const NamedChunk& chunk : chunks_) judge(chunk);
  }

  void judge(const NamedChunk& named) {
    const Chunk& chunk = named.chunk();
    const auto add = [&](std::int64_t begin, std::int64_t end, const std::string& what) {
      const std::int64_t width = named.tensor->record->width();
      report_.problems.push_back({chunk.file, named.name, begin, end, what,
                                  chunk.byte_begin + (begin - chunk.begin) * width,
                                  chunk.byte_begin + (end - chunk.begin) * width, named.unread});
    };
    if (!named.error.empty()) {
      add(chunk.begin, chunk.end, named.error);
    } else if (named.wrong) {
      add(chunk.begin, chunk.end, "the checksum is wrong");
    } else if (named.non_finite != kNone) {
      add(named.non_finite, named.non_finite + 1, "the value is not finite");
    }
  }

  const fs::path& dir_;
  const CheckpointIndex& index_;
  const VerifyOptions& options_;
  VerifyReport report_;
  std::vector<std::unique_ptr<SectionSource>> sources_;
  std::vector<std::unique_ptr<PumpTensor>> tensors_;
  std::vector<NamedChunk> chunks_;                           // by section, name, element
  std::map<std::string, std::vector<std::size_t>> by_file_;  // indices into chunks_
  std::set<std::string> absent_;                             // files
};

}  // namespace

std::string VerifyProblem::str() const {
  if (tensor.empty()) return fmt::format("{}: {}", file, what);
  if (byte_begin == byte_end) return fmt::format("{}: tensor {}: {}", file, tensor, what);
  return fmt::format("{}: tensor {}, elements {} to {} (bytes {} to {}): {}", file, tensor, begin,
                     end, byte_begin, byte_end, what);
}

VerifyReport verify_checkpoint(const fs::path& dir, const CheckpointIndex& index,
                               const VerifyOptions& options) {
  return Verification(dir, index, options).run();
}

VerifyReport verify_checkpoint(const CheckpointReader& reader, const VerifyOptions& options) {
  return verify_checkpoint(reader.path(), reader.index(), options);
}

}  // namespace tessera::io
