#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace tessera::io {

namespace fs = std::filesystem;

/// Whether a symbolic link in a path's last component is followed or refused.
enum class Links { Follow, Refuse };

/// Identity and size of a file, to detect that a path now names another file.
struct FileIdentity {
  std::uint64_t device = 0, inode = 0;
  std::int64_t size = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

/// A regular file, open for reading or writing. Move-only; the destructor closes without reporting.
/// Threads may read concurrently.
class File {
 public:
  /// Never blocks.
  /// @throws IoError if it cannot be opened, CorruptCheckpoint if it is not a regular file (a
  ///         directory, FIFO, device or refused link)
  static File open(const fs::path& path, Links links = Links::Follow);
  /// A new file. @throws IoError, also if the path exists
  static File create(const fs::path& path);
  /// An existing file, for reading and writing. @throws as open
  static File open_for_update(const fs::path& path);
  /// Opens the same file for direct I/O (O_DIRECT); an empty File if unsupported.
  File reopen_direct() const;

  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  ~File();

  const fs::path& path() const { return path_; }
  int descriptor() const { return fd_; }
  /// Current size in bytes, from fstat.
  std::int64_t size() const;
  FileIdentity identity() const;

  /// Reads exactly `bytes` from `offset`.
  /// @throws IoError on an I/O error, CorruptCheckpoint if the file ends earlier
  void read(std::int64_t offset, void* data, std::size_t bytes) const;
  /// Asks the operating system to read a range into the page cache. Speeds up reads in random
  /// order, for which read-ahead does not work.
  void prefetch(std::int64_t offset, std::int64_t bytes) const noexcept;
  /// Appends to a new file. @throws IoError; for a full disk, it names the bytes needed and free
  void write(const void* data, std::size_t bytes) {
    write_at(written_, data, bytes);
    written_ += static_cast<std::int64_t>(bytes);
  }
  /// Writes at an offset; threads may write disjoint ranges. @throws IoError
  void write_at(std::int64_t offset, const void* data, std::size_t bytes);
  /// Asks the operating system to start writing a range to disk, which shortens the final sync.
  void start_writeback(std::int64_t offset, std::int64_t bytes) noexcept;
  /// Syncs data to disk. After a failure the file must be rewritten, because the operating
  /// system may have dropped the data. @throws IoError
  void sync();
  /// Syncs and closes. @throws IoError
  void finish();

 private:
  static File open(const fs::path& path, Links links, int access);
  File(fs::path path, int fd) : path_(std::move(path)), fd_(fd) {}
  fs::path path_;
  int fd_ = -1;
  std::int64_t written_ = 0;  // bytes appended
};

/// @throws as File::open and File::read; CorruptCheckpoint if it is longer than max_bytes
std::string read_file(const fs::path& path, std::int64_t max_bytes, Links links = Links::Follow);

/// Checks that a rename to `path` would replace a regular file or nothing.
/// @throws IoError if it is a directory, device or link
void require_replaceable(const fs::path& path);

/// Writes `<name>.tmp`, syncs it, renames it over `path`, syncs the directory.
/// @throws IoError; `path` is then unchanged, and `<name>.tmp` removed
void write_file_atomically(const fs::path& path, std::string_view content);

/// Syncs a directory's entries to disk. @throws IoError
void sync_directory(const fs::path& path);

/// Creates a directory and its missing parents, and syncs the parent of each new one.
/// @throws IoError
void make_directories_durably(const fs::path& path);

/// Renames; sync_directory of the parent makes it durable. @throws IoError
void rename_path(const fs::path& from, const fs::path& to);

/// Renames without replacing. @return false if `to` exists; file systems without RENAME_NOREPLACE
/// may replace an empty directory. @throws IoError
bool rename_to_new(const fs::path& from, const fs::path& to);

/// Swaps two paths atomically; sync_directory of the parent makes it durable.
/// @throws IoError, also if the file system does not support it
void exchange_paths(const fs::path& a, const fs::path& b);

/// Checks that exchange_paths works in `dir` by swapping two empty directories.
/// @param target  directory that the caller will replace, for the message
/// @throws IoError, with advice on --overwrite
void require_exchange(const fs::path& dir, const fs::path& target);

/// Renames a new directory to `target`, or, if `overwrite` is set, swaps it with an existing one;
/// sync_directory of the parent makes it durable.
/// @return false if `target` exists and overwrite is not set. @throws IoError
bool move_into_place(const fs::path& made, const fs::path& target, bool overwrite);

/// Bytes free for this user on the file system of path (or its nearest existing parent);
/// -1 if unknown.
std::int64_t free_bytes(const fs::path& path);

/// Checks that `bytes` are free for `path` on the file system of its parent. @throws IoError
void require_space(const fs::path& path, std::int64_t bytes);

/// Creates a file of `size` bytes, with its space reserved where the file system supports it.
/// @throws IoError; for a full disk, it names the bytes needed and free
File create_sized_file(const fs::path& path, std::int64_t size);

/// Whether a path exists; false if unknown.
bool is_there(const fs::path& path);

/// Paths of the entries of a directory, sorted. @throws IoError
std::vector<fs::path> list_directory(const fs::path& dir);
/// As above, but sets `error` instead of throwing; returns the entries read before the error.
std::vector<fs::path> list_directory(const fs::path& dir, std::error_code& error);

/// Whether a text is the name of a file in the same directory: 1 to 255 bytes without '/' and NUL,
/// other than "." and "..".
bool is_plain_name(std::string_view text);

}  // namespace tessera::io
