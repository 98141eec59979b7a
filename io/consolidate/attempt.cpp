#include "io/consolidate/attempt.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/base/error.h"
#include "io/base/crc.h"

namespace tessera::io {
namespace {

constexpr std::string_view kMagic = "tessera-consolidate 2";
constexpr std::string_view kAnyVersion = "tessera-consolidate ";
constexpr std::size_t kMaxHeader = 200;                       // bytes; much more than needed
constexpr std::int64_t kMaxJournal = std::int64_t{64} << 20;  // bytes; much more than needed

std::string this_process() {
  std::array<char, 65> host{};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("{} {}", host.data(), ::getpid());
}

// Formats a line of the journal: words and their checksum, which detects a truncated line.
std::string make_line(const std::string& words) {
  return fmt::format("{} {:016x}\n", words, crc64(words.data(), words.size()));
}

std::optional<std::uint64_t> parse_hex(std::string_view word) {
  std::uint64_t value = 0;
  return parse_checksum(fmt::format("crc64:{}", word), value) ? std::optional(value) : std::nullopt;
}

/// Removes and returns the first word of a line.
std::string_view next_word(std::string_view& line) {
  const std::size_t end = line.find(' ');
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(end == std::string_view::npos ? line.size() : end + 1);
  return word;
}

/// The words of a line without its checksum; empty if the checksum is wrong.
std::string_view check_line(std::string_view line) {
  const std::size_t split = line.rfind(' ');
  if (split == std::string_view::npos) return {};
  const auto crc = parse_hex(line.substr(split + 1));
  return crc && *crc == crc64(line.data(), split) ? line.substr(0, split) : std::string_view{};
}

/// Parses "file NUMBER CRC", both hexadecimal; empty if malformed.
std::optional<FileRecord> parse_file(std::string_view words) {
  if (next_word(words) != "file") return std::nullopt;
  const auto file = parse_hex(next_word(words)), crc = parse_hex(next_word(words));
  if (!file || !crc || !words.empty()) return std::nullopt;
  return FileRecord{static_cast<std::size_t>(*file), *crc};
}

std::string read_all(const File& file) {
  const std::int64_t size = file.size();
  require<IoError>(size <= kMaxJournal, "{} has {} bytes, too many for a journal: remove it",
                   file.path().string(), size);
  std::string text(static_cast<std::size_t>(size), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

/// Host and process id of the last owner of the attempt, for messages.
std::string owner_in(const std::string& journal) {
  const std::size_t at = journal.rfind("owner ");
  if (at == std::string::npos) return "unknown";
  std::string_view line = std::string_view(journal).substr(at, journal.find('\n', at) - at);
  line = check_line(line);
  next_word(line);
  return line.empty() ? "unknown" : std::string(line);
}

/// Whether the journal starts with a complete header line of any version.
bool has_header(const std::string& journal) {
  const std::size_t end = journal.find('\n');
  return end != std::string::npos && end <= kMaxHeader &&
         check_line(std::string_view(journal).substr(0, end)).starts_with(kAnyVersion);
}

/// Whether the journal may be a truncated header line. The directory is created after the header.
bool is_cut_header(const std::string& journal) {
  const std::size_t n = std::min(journal.size(), kAnyVersion.size());
  return journal.size() <= kMaxHeader && journal.find('\n') == std::string::npos &&
         std::string_view(journal).substr(0, n) == kAnyVersion.substr(0, n);
}

std::string header_of(std::uint64_t identity) {
  return make_line(fmt::format("{} {:016x}", kMagic, identity));
}

bool same_file(const File& file, const fs::path& path) {
  struct stat open {
  }, named{};
  return ::fstat(file.descriptor(), &open) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open.st_dev == named.st_dev && open.st_ino == named.st_ino;
}

}  // namespace

fs::path attempt_path(const fs::path& out) {
  return out.parent_path() / (out.filename().string() + ".tmp");
}

fs::path journal_path(const fs::path& out) { return attempt_path(out).string() + ".journal"; }

bool is_attempt_of(const fs::path& out, std::uint64_t identity) {
  if (!is_there(journal_path(out))) return false;
  try {
    return read_file(journal_path(out), kMaxJournal).starts_with(header_of(identity));
  } catch (const Error&) {  // removed in the meantime
    return false;
  }
}

Attempt::Attempt(const fs::path& out, std::uint64_t identity)
    : out_(out), dir_(attempt_path(out)), journal_path_(journal_path(out)) {
  const bool is_new = lock();
  const std::string text = read_all(journal_);
  check_ours(text, is_new);
  take_up(text, identity);
  make_directories_durably(dir_);
}

// Throws if directory or journal are not of an export, so that no foreign files are removed.
void Attempt::check_ours(const std::string& text, bool is_new) {
  std::error_code error;
  const fs::file_type found = fs::symlink_status(dir_, error).type();
  const bool is_there = found != fs::file_type::not_found;
  if (is_new && is_there) {
    fs::remove(journal_path_, error);
    throw InvalidArgument(
        "{} exists, but {} does not, so it is not an unfinished export; move it away or remove it",
        dir_.string(), journal_path_.string());
  }
  require(has_header(text) || (!is_there && is_cut_header(text)),
          "{} is not the journal of an export; move it and {} away", journal_path_.string(),
          dir_.string());
  require(!is_there || found == fs::file_type::directory,
          "{} is not a directory, so it is not an unfinished export; move it and {} away",
          dir_.string(), journal_path_.string());
}

bool Attempt::lock() {
  // Retries if another process creates or removes the journal between two system calls.
  for (int left = 100;; --left) {
    std::error_code error;
    const bool existed = fs::exists(fs::symlink_status(journal_path_, error));
    try {
      journal_ = existed ? File::open_for_update(journal_path_) : File::create(journal_path_);
    } catch (const IoError&) {
      if (left == 0 || existed == fs::exists(fs::symlink_status(journal_path_, error))) throw;
      continue;
    }
    if (::flock(journal_.descriptor(), LOCK_EX | LOCK_NB) != 0) {
      require<AttemptBusy>(errno != EWOULDBLOCK,
                           "another process is writing {} (host and process id: {})", dir_.string(),
                           owner_in(read_all(journal_)));
      require(!existed,
              "{} exists, and this file system has no locks, so a process may still be writing; "
              "if none is, remove {} and {}",
              journal_path_.string(), dir_.string(), journal_path_.string());
    }
    if (same_file(journal_, journal_path_)) return !existed;
  }
}

void Attempt::take_up(const std::string& text, std::uint64_t identity) {
  const std::string header = header_of(identity);
  std::size_t valid = 0;
  if (text.starts_with(header)) {
    valid = header.size();
    for (;;) {
      const std::size_t end = text.find('\n', valid);
      if (end == std::string::npos) break;
      const std::string_view words = check_line(std::string_view(text).substr(valid, end - valid));
      if (words.empty()) break;
      if (const auto record = parse_file(words)) found_.push_back(*record);
      valid = end + 1;
    }
  } else {
    has_discarded_ = text.find("\nfile ") != std::string::npos;
    std::error_code error;
    fs::remove_all(dir_, error);
    require<IoError>(!error, "cannot remove {}, left by an earlier export: {}", dir_.string(),
                     error.message());
    sync_directory(out_.parent_path());
  }
  has_records_ = !found_.empty();
  // Removes the line that was being written when the last process ended.
  if (::ftruncate(journal_.descriptor(), static_cast<off_t>(valid)) != 0) {
    throw IoError("cannot write {}: {}", journal_path_.string(), std::strerror(errno));
  }
  std::string start = valid == 0 ? header : "";
  start += make_line("owner " + this_process());
  journal_.write_at(static_cast<std::int64_t>(valid), start.data(), start.size());
  journal_.sync();
  sync_directory(out_.parent_path());
}

void Attempt::record(const FileRecord& file) {
  const std::string line = make_line(fmt::format("file {:016x} {:016x}", file.file, file.crc64));
  journal_.write_at(journal_.size(), line.data(), line.size());
  journal_.sync();
  has_records_ = true;
}

void Attempt::commit(bool overwrite) {
  require(move_into_place(dir_, out_, overwrite),
          "{} was created during the export; it is unchanged, and the exported files are in {}",
          out_.string(), dir_.string());
  sync_directory(out_.parent_path());
  remove();
}

void Attempt::remove() noexcept {
  std::error_code error;
  fs::remove_all(dir_, error);
  // The journal identifies the directory, so it is removed last.
  if (!fs::exists(fs::symlink_status(dir_, error))) fs::remove(journal_path_, error);
}

}  // namespace tessera::io
