#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/base/file.h"
#include "io/pump/verify.h"

namespace tessera::io {

/// Sizes and checksums of files, kept next to them, for formats without checksums. io/FORMAT.md
/// specifies the file.
struct Seal {
  struct Entry {
    std::int64_t size = 0;              ///< bytes
    std::vector<std::uint64_t> blocks;  ///< CRC-64 of each block; the last one may be shorter
  };
  fs::path file;                       ///< tessera.seal.json or NAME.seal.json
  fs::path root;                       ///< directory that names are relative to
  fs::path target;                     ///< what was found to be sealed: a file or directory
  std::string created;                 ///< "2026-01-31T12:00:00Z"
  std::int64_t block = 0;              ///< bytes
  std::map<std::string, Entry> files;  ///< by name: "model.safetensors", "tokenizer/vocab.json"
};

/// Content of the file of a seal.
std::string format_seal(const Seal& seal);
/// Inverse of format_seal; `file` and `root` are empty. @param where  named in errors
/// @throws CorruptCheckpoint
Seal parse_seal(std::string_view content, const std::string& where);

struct SealOptions {
  int threads = 1;  ///< each takes 128 KiB of memory
  /// Called with the bytes read and the total. Calls are serialized.
  std::function<void(std::int64_t done, std::int64_t total)> progress{};
};

/// DIR/tessera.seal.json, or FILE.seal.json.
fs::path seal_path(const fs::path& path);

/// Reads all files of a directory, or one file, and writes their seal. Follows symbolic links, and
/// includes subdirectories, without those whose names begin with a dot, and without seals.
///
/// Commits the seal by one rename. An existing seal is replaced only if all of its files are intact.
/// @throws InvalidArgument if a seal exists and `overwrite` is not set, or there are no files;
///         CorruptCheckpoint naming files that differ from the existing seal, or an entry that is
///         no file; IoError, also for a file that changes meanwhile
Seal write_seal(const fs::path& path, bool overwrite, const SealOptions& options = {});

/// Reads the seal of a path: its own or, if it has none, its part of the seal of the directory that
/// contains it; else that of the file or directory that a link leads to, or of the folder of a run
/// that would be read. @return empty if there is none
/// @throws CorruptCheckpoint if the seal is damaged; IoError
std::optional<Seal> find_seal(const fs::path& path);

struct SealReport {
  /// Files that are missing or have another size, and ranges of bytes with wrong checksums.
  std::vector<VerifyProblem> problems;
  std::vector<std::string> additional;  ///< files that are not in the seal
  std::int64_t bytes = 0;               ///< read
};

/// Reads all files of the seal of a path, and continues after a problem.
/// @param seal  of find_seal
SealReport check_seal(const Seal& seal, const SealOptions& options = {});

/// Checks the seal of a path, if it has one. @throws CorruptCheckpoint naming files and bytes;
/// IoError
void require_seal_intact(const fs::path& path, const SealOptions& options = {});

}  // namespace tessera::io
