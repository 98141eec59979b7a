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

/// An export that is being made: the directory `<out>.tmp`, and the journal `<out>.tmp.journal`
/// beside it, whose lock says that a process is at it and whose lines say which blocks are done.
/// io/FORMAT.md defines both.
class Attempt {
 public:
  /// Takes up what an attempt of the same identity left, removes what another left, or begins.
  /// @param out       absolute; its parent exists
  /// @param identity  of all that decides what is written
  /// @throws InvalidArgument if another process is at it or `<out>.tmp` is not known to be an
  ///         attempt; IoError
  Attempt(const fs::path& out, std::uint64_t identity);
  /// Leaves everything as it is, for the next attempt to take up.
  ~Attempt() = default;
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  const fs::path& dir() const { return dir_; }
  /// What the attempt that was taken up had done, in the order in which it was.
  const std::vector<BlockRecord>& found() const { return found_; }

  /// Notes blocks whose data is synced, durably. @throws IoError
  void record(const std::vector<BlockRecord>& blocks);
  /// Puts the directory in the place of `out` by one rename (what was there is swapped out and
  /// removed), and removes the journal. @throws IoError, and all is as it was
  void commit();
  /// Removes directory and journal, as far as that is possible.
  void remove() noexcept;

 private:
  void lock();
  void read_journal(std::uint64_t identity);
  fs::path out_, dir_, journal_path_;
  File journal_;  ///< locked as long as it is open
  std::vector<BlockRecord> found_;
};

}  // namespace tessera::io
