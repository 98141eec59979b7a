#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::io {

/// A finished (written and synced) output file.
struct FileRecord {
  std::size_t file = 0;     ///< index in the list of output files
  std::uint64_t crc64 = 0;  ///< of the whole file
};

/// Directory of an unfinished export to `out`: `<out>.tmp`.
fs::path attempt_path(const fs::path& out);
/// Journal of the attempt at `out`: `<out>.tmp.journal`.
fs::path journal_path(const fs::path& out);

/// Whether `<out>.tmp` is an attempt of this identity, by its journal.
bool is_attempt_of(const fs::path& out, std::uint64_t identity);

/// Thrown if another process holds the lock of an attempt.
class AttemptBusy : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// An unfinished export: the directory `<out>.tmp` and the journal `<out>.tmp.journal`, which lists
/// finished files and is locked by the running process. io/FORMAT.md defines both.
class Attempt {
 public:
  /// Continues an attempt of the same identity; removes one of another identity and starts anew.
  /// @param out       absolute; its parent exists
  /// @param identity  checksum of everything that determines the output
  /// @throws AttemptBusy if another process holds the lock; InvalidArgument if directory or journal
  ///         are not those of an attempt (both then stay unchanged); IoError
  Attempt(const fs::path& out, std::uint64_t identity);
  /// Keeps directory and journal, so that a later attempt can continue.
  ~Attempt() = default;
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  const fs::path& dir() const { return dir_; }
  /// Files finished by earlier processes, in the order of the journal.
  const std::vector<FileRecord>& found() const { return found_; }

  /// Whether finished files of an attempt with another identity were removed.
  bool has_discarded() const { return has_discarded_; }
  /// Whether any file is finished.
  bool has_records() const { return has_records_; }

  /// Durably records a synced file. @throws IoError
  void record(const FileRecord& file);
  /// Renames the directory to `out` and removes the journal.
  /// @param overwrite  replace an existing `out`
  /// @throws InvalidArgument if `out` exists and overwrite is false; IoError. Both change nothing
  void commit(bool overwrite);
  /// Removes directory and journal; ignores errors.
  void remove() noexcept;

 private:
  /// @return whether the journal is new
  bool lock();
  void check_ours(const std::string& text, bool is_new);
  void take_up(const std::string& text, std::uint64_t identity);
  fs::path out_, dir_, journal_path_;
  File journal_;  ///< locked while open
  std::vector<FileRecord> found_;
  bool has_records_ = false, has_discarded_ = false;
};

}  // namespace tessera::io
