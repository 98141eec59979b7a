#include "io/consolidate/parts.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "core/base/error.h"
#include "io/base/crc.h"

namespace tessera::io {
namespace {

constexpr const char* kPartInfix = ".part-";

bool has_size(const fs::path& path, std::int64_t size) {
  std::error_code error;
  return fs::is_regular_file(fs::symlink_status(path, error)) &&
         static_cast<std::int64_t>(fs::file_size(path, error)) == size;
}

}  // namespace

ExportParts::ExportParts(const fs::path& out, const std::vector<ExportFile>& files,
                         const ExportShare& part, std::uint64_t identity)
    : out_(out), files_(files), part_(part), identity_(identity), part_of_(files.size()) {
  require(files.size() >= static_cast<std::size_t>(part.count),
          "the export has {} file{} of tensors, which cannot be divided into {} parts; give fewer "
          "parts, or a smaller --max-shard-size",
          files.size(), files.size() == 1 ? "" : "s", part.count);
  std::vector<std::size_t> order(files.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [&](std::size_t i) { return files[i].size; });
  std::vector<std::int64_t> bytes(static_cast<std::size_t>(part.count));
  for (const std::size_t i : order) {
    const auto least = std::ranges::min_element(bytes);
    *least += files[i].size;
    part_of_[i] = static_cast<int>(least - bytes.begin()) + 1;
  }
  require(is_done() || !is_there(dir()),
          "{} is there, but not with all of its files; remove it, and the same command writes them "
          "anew",
          dir().string());
}

fs::path ExportParts::dir_of(int number) const {
  return out_.parent_path() / fmt::format("{}{}{}-of-{}-{:016x}", out_.filename().string(),
                                          kPartInfix, number, part_.count, identity_);
}

std::vector<ExportFile> ExportParts::own_files() const {
  std::vector<ExportFile> own;
  for (std::size_t i = 0; i < files_.size(); ++i)
    if (part_of_[i] == part_.number) own.push_back(files_[i]);
  return own;
}

void ExportParts::check_others() const {
  const std::string any = out_.filename().string() + kPartInfix;
  std::set<std::string> ours;
  for (int k = 1; k <= part_.count; ++k) ours.insert(dir_of(k).filename().string());
  for (const fs::path& path : list_directory(out_.parent_path())) {
    const std::string name = path.filename().string();
    if (!name.starts_with(any)) continue;
    require(ours.contains(name.substr(0, name.find('.', any.size()))),
            "{} is a part of an export with other options or another number of parts, or from "
            "another or changed source; start all parts with the same options, or remove it",
            path.string());
  }
}

bool ExportParts::is_done(int number) const {
  const fs::path dir = dir_of(number), gathered = attempt_path(out_);
  const bool has_gathered = is_attempt_of(out_, identity_);
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (part_of_[i] != number) continue;
    const auto& [name, size] = std::pair(files_[i].name, files_[i].size);
    // In this order, because another process may be moving the file.
    if (!has_size(dir / name, size) && !(has_gathered && has_size(gathered / name, size)))
      return false;
  }
  return true;
}

std::vector<int> ExportParts::waiting() const {
  std::vector<int> waiting;
  for (int k = 1; k <= part_.count; ++k)
    if (!is_done(k)) waiting.push_back(k);
  return waiting;
}

void ExportParts::gather(const fs::path& attempt_dir) const {
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const fs::path to = attempt_dir / files_[i].name, from = dir_of(part_of_[i]) / files_[i].name;
    if (has_size(from, files_[i].size)) rename_path(from, to);
    require<CorruptCheckpoint>(has_size(to, files_[i].size),
                               "{} is missing, of part {}: nothing was committed; remove {}, and "
                               "repeat the command of that part",
                               from.string(), part_of_[i], dir_of(part_of_[i]).string());
  }
  sync_directory(attempt_dir);
  std::error_code ignored;
  for (int k = 1; k <= part_.count; ++k) {
    fs::remove(dir_of(k), ignored);
    fs::remove(journal_path(dir_of(k)), ignored);  // if a kill came before its removal
  }
}

}  // namespace tessera::io
