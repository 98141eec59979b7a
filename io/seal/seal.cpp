#include "io/seal/seal.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/base/open_files.h"
#include "io/base/parallel.h"
#include "io/checkpoint/index.h"
#include "io/source/find_sharded.h"

namespace tessera::io {
namespace {

constexpr const char* kSealName = "tessera.seal.json";
constexpr std::string_view kSealEnd = ".seal.json";
constexpr const char* kFormat = "tessera seal";
constexpr int kSealVersion = 1;
constexpr std::int64_t kSealBlock = std::int64_t{4} << 20;  // bytes, doubled above kMostBlocks
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 20;
constexpr std::int64_t kMaxSealBlock = std::int64_t{1} << 30;
constexpr std::int64_t kMaxSeal = std::int64_t{64} << 20;  // bytes of the file
constexpr std::int64_t kReadStep = std::int64_t{128} << 10;
constexpr int kMaxSealDepth = 32;             // of subdirectories
constexpr int kMaxSealDirectories = 1 << 16;  // visited; links may lead to one several times
constexpr std::size_t kListedProblems = 3;

// Without a slash at the end, and with a parent.
fs::path whole_path(const fs::path& path) {
  return fs::absolute(path / "").lexically_normal().parent_path();
}

bool is_dir(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool is_seal_name(const std::string& name) {
  return name.ends_with(kSealEnd) || name.ends_with(std::string(kSealEnd) + ".tmp");
}

struct stat examine(const fs::path& path) {
  struct stat status {};
  require<IoError>(::stat(path.c_str(), &status) == 0, "cannot examine {}: {}", path.string(),
                   std::generic_category().message(errno));
  return status;
}

// Appends the names of the files below `dir`, with `prefix` before each.
// @param around   device and inode of the directories that contain them
// @param visited  number of directories
void list_below(const fs::path& dir, const std::string& prefix,
                std::set<std::pair<dev_t, ino_t>>& around, int& visited,
                std::vector<std::string>& names) {
  require<Unsupported>(++visited <= kMaxSealDirectories,
                       "{}: more than {} directories, counting each link to one; seal its "
                       "subdirectories one by one",
                       dir.string(), kMaxSealDirectories);
  for (const fs::path& path : list_directory(dir)) {
    const std::string name = path.filename().string();
    if (is_seal_name(name)) continue;
    const struct stat status = examine(path);
    if (!S_ISDIR(status.st_mode)) {
      names.push_back(prefix + name);
      continue;
    }
    if (name.starts_with('.')) continue;
    const auto [at, is_new] = around.emplace(status.st_dev, status.st_ino);
    require<CorruptCheckpoint>(
        is_new && around.size() <= kMaxSealDepth,
        "{} is a directory that contains itself by a symbolic link, or too deep", path.string());
    list_below(path, prefix + name + "/", around, visited, names);
    around.erase(at);
  }
}

// Names of the files of a path, relative to `root`.
std::vector<std::string> list_files_of(const fs::path& path, const fs::path& root) {
  std::vector<std::string> names;
  const std::string below = path == root ? "" : path.filename().string();
  if (!is_dir(path)) return {below};
  const struct stat status = examine(path);
  std::set<std::pair<dev_t, ino_t>> around{{status.st_dev, status.st_ino}};
  int visited = 0;
  list_below(path, below.empty() ? "" : below + "/", around, visited, names);
  return names;
}

/// A block of a file.
struct SealTask {
  const std::string* file;
  std::size_t number;
  std::int64_t begin, end;  // bytes
};

void add_tasks(std::vector<SealTask>& tasks, const std::string& file, std::int64_t size,
               std::int64_t block) {
  std::size_t number = 0;
  for (std::int64_t begin = 0; begin < size; begin += block)
    tasks.push_back({&file, number++, begin, std::min(size, begin + block)});
}

// Computes the checksums of blocks on several threads.
// @param done  called with each of them, or with an error. Calls are serialized
template <typename F>
void sum_blocks(const fs::path& root, const std::vector<SealTask>& tasks,
                const SealOptions& options, F&& done) {
  OpenFiles files(root);
  std::int64_t total = 0, read = 0;
  for (const SealTask& task : tasks) total += task.end - task.begin;
  std::mutex mutex;  // guards read and calls of done
  parallel_for_each(tasks.size(), options.threads, [&](std::size_t i) {
    const SealTask& task = tasks[i];
    std::uint64_t crc = 0;
    std::exception_ptr error;
    try {
      const auto file = files.get(*task.file);
      std::vector<char> buffer(
          static_cast<std::size_t>(std::min(kReadStep, task.end - task.begin)));
      for (std::int64_t at = task.begin; at < task.end; at += kReadStep) {
        const auto n = static_cast<std::size_t>(std::min(kReadStep, task.end - at));
        file->read(at, buffer.data(), n);
        crc = crc64(buffer.data(), n, crc);
      }
    } catch (const Error&) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    done(task, crc, error);
    read += task.end - task.begin;
    if (options.progress) options.progress(read, total);
  });
}

std::string hex(std::uint64_t crc) { return fmt::format("{:016x}", crc); }

bool is_sealed_name(std::string_view name) {
  for (;;) {
    const std::size_t slash = name.find('/');
    if (!is_plain_name(name.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

Seal read_seal(const fs::path& file) {
  Seal seal = parse_seal(read_file(file, kMaxSeal), file.string());
  seal.file = file;
  seal.root = file.parent_path();
  return seal;
}

// The seal of a path, or the part of that of the directory around it. @param whole  see whole_path
std::optional<Seal> seal_at(const fs::path& whole) {
  std::optional<Seal> seal;
  if (const fs::path own = seal_path(whole); is_there(own)) {
    seal = read_seal(own);
  } else if (const fs::path around = whole.parent_path() / kSealName; is_there(around)) {
    seal = read_seal(around);
    const std::string name = whole.filename().string();
    std::erase_if(seal->files, [&](const auto& entry) {
      return entry.first != name && !entry.first.starts_with(name + "/");
    });
    if (seal->files.empty()) return std::nullopt;
  }
  if (seal) seal->target = whole;
  return seal;
}

void require_utf8(const std::string& name) {
  try {
    static_cast<void>(Json(name).dump());
  } catch (const Json::exception&) {
    throw Unsupported("{}: the name of a file is not UTF-8, so it cannot be recorded", name);
  }
}

std::string list_problems(const std::vector<VerifyProblem>& problems) {
  std::string text;
  for (std::size_t i = 0; i < std::min(problems.size(), kListedProblems); ++i)
    text += "\n  " + problems[i].str();
  if (problems.size() > kListedProblems)
    text += fmt::format("\n  and {} more, which `tessera checkpoint verify` lists",
                        problems.size() - kListedProblems);
  return text;
}

}  // namespace

std::string format_seal(const Seal& seal) {
  Json files = Json::object();
  for (const auto& [name, entry] : seal.files) {
    Json blocks = Json::array();
    for (const std::uint64_t crc : entry.blocks) blocks.push_back(hex(crc));
    files[name] = {{"size", entry.size}, {"blocks", std::move(blocks)}};
  }
  Json json{{"format", kFormat},
            {"version", kSealVersion},
            {"created", seal.created},
            {"block", seal.block},
            {"files", std::move(files)}};
  const std::string text = json.dump();
  json["checksum"] = format_checksum(crc64(text.data(), text.size()));
  return json.dump(1) + "\n";
}

Seal parse_seal(std::string_view content, const std::string& where) {
  Json json = parse_json(content, where);
  const JsonReader root(json, where);
  require<CorruptCheckpoint>(root.at("format").string() == kFormat, "{} is not a seal of tessera",
                             where);
  const std::int64_t version = root.at("version").integer(1);
  require<CorruptCheckpoint>(version == kSealVersion,
                             "{} has format version {}, and this tessera reads {}; use a newer one",
                             where, version, kSealVersion);
  const std::string checksum = root.at("checksum").string();
  json.erase("checksum");
  const std::string text = json.dump();
  require<CorruptCheckpoint>(
      checksum == format_checksum(crc64(text.data(), text.size())),
      "{}: its own checksum is wrong: it was damaged or edited; if the files are known to "
      "be right, remove it and seal them again",
      where);
  Seal seal;
  seal.created = root.at("created").string();
  seal.block = root.at("block").integer(1, kMaxSealBlock);
  const JsonReader files = root.at("files");
  for (const auto& [name, unused] : files.object().items()) {
    const JsonReader value = files.at(name);
    require<CorruptCheckpoint>(is_sealed_name(name), "{}: not a name of a file below its directory",
                               value.where());
    Seal::Entry& entry = seal.files[name];
    entry.size = value.at("size").integer();
    const JsonReader blocks = value.at("blocks");
    const auto expected =
        static_cast<std::size_t>(entry.size / seal.block + (entry.size % seal.block != 0 ? 1 : 0));
    require<CorruptCheckpoint>(blocks.array_size() == expected, "{} has {} entries, not {}",
                               blocks.where(), blocks.array_size(), expected);
    for (std::size_t i = 0; i < expected; ++i) {
      std::uint64_t crc = 0;
      require<CorruptCheckpoint>(parse_checksum("crc64:" + blocks.at(i).string(), crc),
                                 "{}: not 16 hexadecimal digits", blocks.at(i).where());
      entry.blocks.push_back(crc);
    }
  }
  return seal;
}

fs::path seal_path(const fs::path& path) {
  const fs::path whole = whole_path(path);
  return is_dir(whole) ? whole / kSealName : fs::path(whole.string() + std::string(kSealEnd));
}

Seal write_seal(const fs::path& path, bool overwrite, const SealOptions& options) {
  const fs::path whole = whole_path(path);
  Seal seal;
  seal.file = seal_path(path);
  seal.root = seal.file.parent_path();
  if (is_there(seal.file)) {
    require(overwrite,
            "{} exists: `tessera checkpoint verify` compares the files with it, and --overwrite "
            "replaces it if they are intact",
            seal.file.string());
    Seal former = read_seal(seal.file);
    former.target = whole;
    const SealReport report = check_seal(former, options);
    require<CorruptCheckpoint>(
        report.problems.empty(),
        "files differ from {}, which is not replaced; if they were changed on purpose, remove it "
        "and seal again:{}",
        seal.file.string(), list_problems(report.problems));
  }
  std::map<std::string, struct stat> before;
  std::int64_t total = 0;
  for (const std::string& name : list_files_of(whole, seal.root)) {
    const struct stat status = examine(seal.root / name);
    require<CorruptCheckpoint>(S_ISREG(status.st_mode), "{} is not a regular file",
                               (seal.root / name).string());
    require_utf8(name);
    before[name] = status;
    total += status.st_size;
  }
  require(!before.empty(), "{} contains no files to seal", path.string());
  for (seal.block = kSealBlock; total / seal.block > kMostBlocks;) seal.block *= 2;
  std::vector<SealTask> tasks;
  for (const auto& [name, status] : before) {
    const std::size_t first = tasks.size();
    add_tasks(tasks, name, status.st_size, seal.block);
    seal.files[name] = {status.st_size, std::vector<std::uint64_t>(tasks.size() - first)};
  }
  sum_blocks(seal.root, tasks, options,
             [&](const SealTask& task, std::uint64_t crc, const std::exception_ptr& error) {
               if (error) std::rethrow_exception(error);
               seal.files.at(*task.file).blocks[task.number] = crc;
             });
  for (const auto& [name, old] : before) {
    const struct stat now = examine(seal.root / name);
    require<IoError>(now.st_size == old.st_size && now.st_ino == old.st_ino &&
                         now.st_mtim.tv_sec == old.st_mtim.tv_sec &&
                         now.st_mtim.tv_nsec == old.st_mtim.tv_nsec,
                     "{} changed while it was sealed; seal it when nothing writes to it",
                     (seal.root / name).string());
  }
  seal.created = utc_now();
  const std::string text = format_seal(seal);
  require<Unsupported>(static_cast<std::int64_t>(text.size()) <= kMaxSeal,
                       "the seal of {} would have {} bytes, and at most {} are read; seal its "
                       "subdirectories one by one",
                       path.string(), text.size(), kMaxSeal);
  write_file_atomically(seal.file, text);
  return seal;
}

std::optional<Seal> find_seal(const fs::path& path) {
  std::error_code ignored;
  const fs::path whole = whole_path(path);
  for (const fs::path& each :
       {whole, fs::weakly_canonical(whole, ignored), whole_path(folder_of_run(whole))})
    if (auto seal = each.empty() ? std::nullopt : seal_at(each)) return seal;
  return std::nullopt;
}

SealReport check_seal(const Seal& seal, const SealOptions& options) {
  SealReport report;
  const auto problem = [&](const std::string& file, const std::string& what, bool unread = false) {
    report.problems.push_back({file, "", 0, 0, what, 0, 0, unread});
  };
  std::vector<SealTask> tasks;
  for (const auto& [name, entry] : seal.files) {
    std::error_code error;
    const fs::path file = seal.root / name;
    if (!fs::exists(file, error)) {
      problem(name, error ? error.message() : "is missing, but the seal lists it", bool(error));
      continue;
    }
    const auto size = fs::is_regular_file(file, error)
                          ? static_cast<std::int64_t>(fs::file_size(file, error))
                          : -1;
    if (size != entry.size) {
      problem(name, size < 0 ? "is no regular file"
                             : fmt::format("has {} bytes, and had {} when it was sealed on {}",
                                           size, entry.size, seal.created));
      continue;
    }
    add_tasks(tasks, name, entry.size, seal.block);
    report.bytes += entry.size;
  }
  std::vector<std::pair<const SealTask*, std::string>> bad;  // and the I/O error
  sum_blocks(seal.root, tasks, options,
             [&](const SealTask& task, std::uint64_t crc, const std::exception_ptr& error) {
               try {
                 if (error) std::rethrow_exception(error);
                 if (crc != seal.files.at(*task.file).blocks[task.number])
                   bad.emplace_back(&task, "");
               } catch (const Error& failure) {
                 bad.emplace_back(&task, failure.what());
               }
             });
  // In the order of the tasks, whose addresses ascend.
  std::ranges::sort(bad);
  for (std::size_t i = 0, n; i < bad.size(); i += n) {
    const SealTask& first = *bad[i].first;
    for (n = 1; i + n < bad.size() && bad[i + n].second == bad[i].second &&
                bad[i + n].first->file == first.file &&
                bad[i + n].first->begin == bad[i + n - 1].first->end;)
      ++n;
    const std::int64_t end = bad[i + n - 1].first->end;
    const bool unread = !bad[i].second.empty();
    problem(*first.file,
            unread ? bad[i].second
                   : fmt::format("bytes {} to {}: the checksum is not that of the seal: the data "
                                 "changed after {}",
                                 first.begin, end, seal.created),
            unread);
    report.problems.back().byte_begin = first.begin;
    report.problems.back().byte_end = end;
  }
  for (const std::string& name : list_files_of(seal.target, seal.root))
    if (!seal.files.contains(name)) report.additional.push_back(name);
  return report;
}

void require_seal_intact(const fs::path& path, const SealOptions& options) {
  const auto seal = find_seal(path);
  if (!seal) return;
  const SealReport report = check_seal(*seal, options);
  require<CorruptCheckpoint>(report.problems.empty(), "files differ from {}:{}",
                             seal->file.string(), list_problems(report.problems));
}

}  // namespace tessera::io
