#pragma once

#include <cstdint>
#include <vector>

#include "io/consolidate/attempt.h"
#include "io/consolidate/consolidate.h"
#include "io/consolidate/tensor_files.h"

namespace tessera::io {

/// An export to `out` in N parts, by processes that share only the directory around it. Part K
/// writes its files into `<out>.part-K-of-N-IDENTITY`, an export of its own (see Attempt), whose
/// rename into place marks the part as done. Any process that finds all parts done moves their
/// files into `<out>.tmp`. io/FORMAT.md defines this.
class ExportParts {
 public:
  /// Divides the files, the largest first, each to the part with the fewest bytes.
  /// @param out       absolute
  /// @param files     of the whole export, which outlive this
  /// @param identity  checksum of everything that determines the output
  /// @throws InvalidArgument if there are fewer files than parts, or if the part's own directory is
  ///         there without all of its files
  ExportParts(const fs::path& out, const std::vector<ExportFile>& files, const ExportShare& part,
              std::uint64_t identity);

  std::uint64_t identity() const { return identity_; }
  /// Where this part's files are written.
  fs::path dir() const { return dir_of(part_.number); }
  std::vector<ExportFile> own_files() const;
  /// Throws if a part of another division, of other options or of another source is there.
  /// @throws InvalidArgument
  void check_others() const;
  bool is_done() const { return is_done(part_.number); }
  /// Numbers of the parts that are not done.
  std::vector<int> waiting() const;
  /// Moves the files of all parts, which are done, into an attempt's directory, and removes their
  /// directories. May be repeated. @throws IoError, CorruptCheckpoint if a file is missing
  void gather(const fs::path& attempt_dir) const;

 private:
  fs::path dir_of(int number) const;
  bool is_done(int number) const;
  const fs::path out_;
  const std::vector<ExportFile>& files_;
  const ExportShare part_;
  const std::uint64_t identity_;
  std::vector<int> part_of_;  // for each file, from 1
};

}  // namespace tessera::io
