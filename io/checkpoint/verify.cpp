#include "io/checkpoint/verify.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/base/parallel.h"
#include "io/checkpoint/open_files.h"
#include "io/checkpoint/shard_header.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kBuffer = std::int64_t{1} << 20;  // bytes; a thread's
constexpr std::int64_t kPiece = std::int64_t{16} << 20;  // bytes that a thread takes at once
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
  switch (dtype) {
    case DType::F64:
      return find_non_finite<std::uint64_t>(data, n, 0x7ff0000000000000ULL);
    case DType::F32:
      return find_non_finite<std::uint32_t>(data, n, 0x7f800000U);
    case DType::BF16:
      return find_non_finite<std::uint16_t>(data, n, 0x7f80U);
    case DType::F16:
      return find_non_finite<std::uint16_t>(data, n, 0x7c00U);
    default:
      return -1;
  }
}

struct NamedChunk {
  std::string name;  ///< with its section
  DType dtype;
  const Chunk* chunk;
  std::string error{};  ///< why it could not be read
  bool unread = false;  ///< for an error of the disk
};

/// A part of a chunk, and what was found there. Checksums of a chunk's parts combine to its own.
struct Piece {
  std::size_t chunk;
  std::int64_t begin, end;  // bytes of the file
  std::uint64_t crc = 0;
  std::int64_t non_finite = kNone;  // element, as the chunk counts
};

class Verification {
 public:
  Verification(const fs::path& dir, const CheckpointIndex& index, const VerifyOptions& options)
      : dir_(dir), index_(index), options_(options) {
    for (const Section section : kSections) {
      const TensorMap* tensors = index.tensors(section);
      if (!tensors) continue;
      for (const auto& [name, tensor] : *tensors) {
        ++report_.tensors;
        const std::string full = fmt::format("{}/{}", section_name(section), name);
        for (const Chunk& chunk : tensor.chunks) {
          if (chunk.begin < chunk.end && wanted(chunk.file))
            chunks_.push_back({full, tensor.dtype, &chunk});
        }
      }
    }
    for (std::size_t i = 0; i < chunks_.size(); ++i) by_file_[chunks_[i].chunk->file].push_back(i);
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
  bool wanted(const std::string& file) const {
    return !options_.files || options_.files->contains(file);
  }

  void problem(const std::string& file, const std::string& tensor, const std::string& what,
               bool unread = false) {
    report_.problems.push_back({file, tensor, 0, 0, what, 0, 0, unread});
  }

  // False: there is nothing to read.
  bool check_size(const std::string& name, std::int64_t size) {
    const fs::path path = dir_ / name;
    std::error_code error;
    const fs::file_status status = fs::symlink_status(path, error);
    if (!fs::is_regular_file(status)) {
      const bool unread = status.type() == fs::file_type::none;
      problem(name, "",
              unread               ? fmt::format("cannot be looked at: {}", error.message())
              : fs::exists(status) ? "is not a regular file"
                                   : "is missing",
              unread);
      absent_.insert(name);
      return false;
    }
    const auto found = static_cast<std::int64_t>(fs::file_size(path, error));
    if (error) {
      problem(name, "", fmt::format("cannot be looked at: {}", error.message()), true);
    } else if (found != size) {
      problem(
          name, "",
          fmt::format("has {} bytes, but the index says {}: it was cut or replaced", found, size));
    }
    return true;
  }

  // Other tools read a shard by its own header: that must tell of the same tensors as the index.
  void check_header(const std::string& name) {
    const std::size_t before = report_.problems.size();
    try {
      const File file = File::open(dir_ / name, Links::Refuse);
      compare_header(name, read_safetensors_header(file));
      // Also finds what changes no tensor: a wrong step, a damaged byte of padding.
      if (report_.problems.size() == before) read_shard_header(file, name, index_);
    } catch (const IoError& error) {
      problem(name, "", error.what(), true);
    } catch (const Error& error) {
      problem(name, "", error.what());
    }
  }

  void compare_header(const std::string& file, const SafetensorsHeader& header) {
    const auto rank = header.metadata.find("rank");
    if (rank != header.metadata.end() && file.starts_with("rank-") &&
        !file.starts_with(fmt::format("rank-{:0>5}-", rank->second))) {
      problem(file, "", fmt::format("is of rank {}: shards were exchanged", rank->second));
      return;
    }
    std::map<std::string, const SafetensorsEntry*> entries;
    for (const SafetensorsEntry& entry : header.tensors) entries[entry.name] = &entry;
    std::map<std::string, std::int64_t> indexed;  // bytes of each entry that chunks lie in
    for (const std::size_t i : by_file_[file]) {
      const auto& [name, dtype, chunk, error, unread] = chunks_[i];
      const auto found = entries.find(name);
      if (found == entries.end()) {
        problem(file, name, "the file's own header does not list it");
        continue;
      }
      const SafetensorsEntry* const entry = found->second;
      if (entry->dtype != dtype) {
        problem(
            file, name,
            fmt::format("the file's own header says {}, the index {}", entry->stored_dtype, dtype));
      } else if (chunk->byte_begin < entry->begin || entry->end < chunk->byte_end) {
        problem(file, name,
                fmt::format("the file's own header puts it at bytes {} to {}, the index at {} to "
                            "{}",
                            entry->begin, entry->end, chunk->byte_begin, chunk->byte_end));
      }
      indexed[name] += chunk->byte_end - chunk->byte_begin;
    }
    for (const SafetensorsEntry& entry : header.tensors) {
      const std::int64_t bytes = indexed[entry.name];
      if (bytes == entry.end - entry.begin) continue;
      problem(file, entry.name,
              fmt::format("the file holds {} bytes of it, the index tells of {}",
                          entry.end - entry.begin, bytes));
    }
  }

  void check_trainer() {
    if (!index_.trainer) return;
    const TrainerSection& trainer = *index_.trainer;
    try {
      const std::string text = read_file(dir_ / trainer.file, kMaxIndexBytes, Links::Refuse);
      if (static_cast<std::int64_t>(text.size()) != trainer.size) {
        problem(trainer.file, "",
                fmt::format("has {} bytes, but the index says {}: it was cut or replaced",
                            text.size(), trainer.size));
      } else if (crc64(text.data(), text.size()) != trainer.crc64) {
        problem(trainer.file, "", "the checksum is wrong");
      }
    } catch (const IoError& error) {
      problem(trainer.file, "", error.what(), true);
    } catch (const Error& error) {
      problem(trainer.file, "", error.what());
    }
  }

  // In the order of the files, so that disks are read forwards.
  std::vector<Piece> cut() const {
    std::vector<Piece> pieces;
    for (const auto& [file, chunks] : by_file_) {
      if (absent_.contains(file)) continue;
      const std::size_t first = pieces.size();
      for (const std::size_t i : chunks) {
        const Chunk& chunk = *chunks_[i].chunk;
        for (std::int64_t at = chunk.byte_begin; at < chunk.byte_end; at += kPiece) {
          pieces.push_back({i, at, at + std::min(kPiece, chunk.byte_end - at)});
        }
      }
      std::sort(pieces.begin() + static_cast<std::ptrdiff_t>(first), pieces.end(),
                [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    }
    return pieces;
  }

  void read_piece(const File& file, Piece& piece, std::vector<char>& buffer) const {
    const auto& [name, dtype, chunk, error, unread] = chunks_[piece.chunk];
    const auto width = static_cast<std::int64_t>(dtype_size(dtype));
    for (std::int64_t at = piece.begin; at < piece.end;) {
      const std::int64_t n = std::min(piece.end - at, static_cast<std::int64_t>(buffer.size()));
      file.read(at, buffer.data(), static_cast<std::size_t>(n));
      piece.crc = crc64(buffer.data(), static_cast<std::size_t>(n), piece.crc);
      if (piece.non_finite == kNone) {
        const std::int64_t found = find_non_finite(dtype, buffer.data(), n / width);
        if (found >= 0) piece.non_finite = chunk->begin + (at - chunk->byte_begin) / width + found;
      }
      at += n;
    }
  }

  void read_chunks() {
    std::vector<Piece> pieces = cut();
    std::int64_t total = 0, done = 0;
    for (const Piece& piece : pieces) total += piece.end - piece.begin;
    std::mutex mutex;  // guards done, and the errors of chunks
    OpenFiles files(dir_);
    const auto joins = [&](std::size_t i) {
      return pieces[i - 1].end == pieces[i].begin &&
             chunks_[pieces[i - 1].chunk].chunk->file == chunks_[pieces[i].chunk].chunk->file;
    };
    const auto size = [&](std::size_t i) { return pieces[i].end - pieces[i].begin; };
    const std::vector<std::size_t> batches = cut_batches(pieces.size(), kPiece, joins, size);
    parallel_for_each(batches.size() - 1, options_.threads, [&](std::size_t b) {
      std::vector<char> buffer(static_cast<std::size_t>(kBuffer));
      for (std::size_t i = batches[b]; i < batches[b + 1]; ++i) {
        NamedChunk& chunk = chunks_[pieces[i].chunk];
        std::string error;
        bool unread = false;
        try {
          read_piece(*files.get(chunk.chunk->file), pieces[i], buffer);
        } catch (const IoError& failure) {
          error = failure.what();
          unread = true;
        } catch (const Error& failure) {
          error = failure.what();
        }
        const std::lock_guard lock(mutex);
        if (!error.empty() && (chunk.error.empty() || (chunk.unread && !unread))) {
          chunk.error = error;
          chunk.unread = unread;
        }
        done += size(i);
        if (options_.progress) options_.progress(done, total);
      }
    });
    report_.bytes = total;
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
      return std::tie(a.chunk, a.begin) < std::tie(b.chunk, b.begin);
    });
    for (std::size_t i = 0; i < pieces.size();) {
      const std::size_t chunk = pieces[i].chunk;
      std::uint64_t crc = 0;
      std::int64_t non_finite = kNone;
      for (; i < pieces.size() && pieces[i].chunk == chunk; ++i) {
        const auto bytes = static_cast<std::uint64_t>(pieces[i].end - pieces[i].begin);
        crc = crc64_combine(crc, pieces[i].crc, bytes);
        non_finite = std::min(non_finite, pieces[i].non_finite);
      }
      judge(chunks_[chunk], crc, non_finite);
    }
  }

  void judge(const NamedChunk& named, std::uint64_t crc, std::int64_t non_finite) {
    const Chunk& chunk = *named.chunk;
    const auto add = [&](std::int64_t begin, std::int64_t end, const std::string& what) {
      const auto width = static_cast<std::int64_t>(dtype_size(named.dtype));
      report_.problems.push_back({chunk.file, named.name, begin, end, what,
                                  chunk.byte_begin + (begin - chunk.begin) * width,
                                  chunk.byte_begin + (end - chunk.begin) * width, named.unread});
    };
    if (!named.error.empty()) {
      add(chunk.begin, chunk.end, named.error);
    } else if (crc != chunk.crc64) {
      add(chunk.begin, chunk.end, "the checksum is wrong");
    } else if (non_finite != kNone) {
      add(non_finite, non_finite + 1, "the value is not finite");
    }
  }

  const fs::path& dir_;
  const CheckpointIndex& index_;
  const VerifyOptions& options_;
  VerifyReport report_;
  std::vector<NamedChunk> chunks_;                           // in order of section, name, element
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
