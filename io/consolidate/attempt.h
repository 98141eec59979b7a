#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "io/base/file.h"

namespace tessera::io {

/// A block of an output file that was written and synced.
struct BlockRecord {
  std::size_t file = 0;                ///< which of the output's files
  std::int64_t block = 0;              ///< which of its blocks
  std::uint64_t crc64 = 0;             ///< of the block as written
  std::vector<std::uint64_t> sources;  ///< checksum of each range of checksummed bytes in it
};

/// Where an export to `out` is made: `<out>.tmp`.
fs::path attempt_path(const fs::path& out);

/// An export that is being made: the directory `<out>.tmp`, and the journal `<out>.tmp.journal`
/// beside it, whose lock says that a process is at it and whose lines say which blocks are done.
/// io/FORMAT.md defines both.
class Attempt {
 public:
  /// Takes up what an attempt of the same identity left, removes what another left, or begins.
  /// @param out       absolute; its parent exists
  /// @param identity  of all that decides what is written
  /// @throws InvalidArgument if another process is at it, or directory or journal are not known to
  ///         be an attempt's: those stay as they are; IoError
  Attempt(const fs::path& out, std::uint64_t identity);
  /// Leaves everything as it is, for the next attempt to take up.
  ~Attempt() = default;
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  const fs::path& dir() const { return dir_; }
  /// What the attempt that was taken up had done, in the order in which it was.
  const std::vector<BlockRecord>& found() const { return found_; }

  /// Whether blocks that an attempt of another identity had recorded were removed.
  bool has_discarded() const { return has_discarded_; }
  /// Whether there is anything to go on with.
  bool has_records() const { return has_records_; }

  /// Notes blocks whose data is synced, durably. @throws IoError
  void record(const std::vector<BlockRecord>& blocks);
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
  std::vector<BlockRecord> found_;
  bool has_records_ = false, has_discarded_ = false;
};

}  // namespace tessera::io
