#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// An output file that was written and synced.
struct FileRecord {
  std::size_t file = 0;     ///< number among the output's files
  std::uint64_t crc64 = 0;  ///< of all its bytes
};

/// Where an export to `out` is made: `<out>.tmp`.
fs::path attempt_path(const fs::path& out);

/// An unfinished export: the directory `<out>.tmp`, and the journal `<out>.tmp.journal`, whose lock
/// marks a running process and whose lines list finished files. io/FORMAT.md defines both.
class Attempt {
 public:
  /// Continues an attempt of the same identity, removes one of another, or begins.
  /// @param out       absolute; its parent exists
  /// @param identity  checksum of all that decides what is written
  /// @throws InvalidArgument if another process has it, or directory or journal are not an
  ///         attempt's: both then stay as they are; IoError
  Attempt(const fs::path& out, std::uint64_t identity);
  /// Leaves everything as it is, for the next attempt to continue.
  ~Attempt() = default;
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  const fs::path& dir() const { return dir_; }
  /// Files that an earlier process finished, in that order.
  const std::vector<FileRecord>& found() const { return found_; }

  /// Whether files that an attempt of another identity had finished were removed.
  bool has_discarded() const { return has_discarded_; }
  /// Whether any file is finished.
  bool has_records() const { return has_records_; }

  /// Records a file whose data is synced, durably. @throws IoError
  void record(const FileRecord& file);
  /// Whether commit(true) can replace what is there: tried with two empty directories.
  /// @throws IoError that says what to do, if this file system can't
  void check_exchange() const;
  /// Puts the directory in the place of `out` by one rename, and removes the journal.
  /// @param overwrite  what is there is swapped out and removed
  /// @throws InvalidArgument if something is there and is not to be replaced; IoError; and all is
  ///         as it was
  void commit(bool overwrite);
  /// Removes directory and journal, as far as that is possible.
  void remove() noexcept;

 private:
  /// @return whether the journal is new
  bool lock();
  void check_ours(const std::string& text, bool is_new);
  void take_up(const std::string& text, std::uint64_t identity);
  fs::path out_, dir_, journal_path_;
  File journal_;  ///< locked as long as it is open
  std::vector<FileRecord> found_;
  bool has_records_ = false, has_discarded_ = false;
};

}  // namespace tessera::io
