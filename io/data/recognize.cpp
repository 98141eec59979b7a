#include "io/data/recognize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::io {
namespace {

using namespace std::string_view_literals;

struct Format {
  std::string_view magic;
  const char* name;
  const char* advice;
};

constexpr const char* kUnpack = "unpack it and give the files in it";
constexpr const char* kTokenize =
    "unpack it, or make token files of it with `tessera data tokenize`";
constexpr const char* kTokenizeParquet =
    "make token files of it with `tessera data tokenize`, which knows it by a name that ends in "
    ".parquet";
constexpr const char* kExtract = "extract its text into a .txt file";
constexpr const char* kConvert = "write its ids as uint16 into a .bin file";
constexpr Format kFormats[] = {
    {"\x1f\x8b\x08"sv, "a gzip file", kTokenize},
    {"\x28\xb5\x2f\xfd"sv, "a Zstandard file", kTokenize},
    {"\xfd"
     "7zXZ\0"sv,
     "an xz file", kUnpack},
    {"PK\x03\x04"sv, "a zip archive (.zip, .npz, .pt)", kUnpack},
    {"\x93NUMPY"sv, "a NumPy array (.npy)", kConvert},
    {"\x89HDF\r\n"sv, "an HDF5 file", kConvert},
    {"PAR1"sv, "a Parquet file", kTokenizeParquet},
    {"ARROW1"sv, "an Arrow file", kExtract},
    {"%PDF-"sv, "a PDF file", kExtract},
    {"SQLite format 3"sv, "an SQLite database", kExtract},
    {"\x7f"
     "ELF"sv,
     "a program (ELF)", "give text or token files"},
    {"\x89PNG\r\n"sv, "a PNG image", "give text or token files"},
    {"version https://git-lfs"sv, "a Git LFS pointer without the data", "fetch it (git lfs pull)"},
};

bool is_jsonl(const std::string& path, std::string_view head) {
  if (path.ends_with(".jsonl") || path.ends_with(".ndjson")) return true;
  const auto end = head.find('\n');
  return !path.ends_with(".txt") && end != head.npos && head.starts_with('{') &&
         nlohmann::json::accept(head.substr(0, end));
}

// Control characters that do not occur in text.
bool is_control(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 && (byte < '\t' || byte > '\r') && byte != 0x1b;
}

std::string inspect_text(const std::string& path, std::string_view head) {
  const auto controls = std::ranges::count_if(head, is_control);
  if (controls * 100 <= static_cast<std::ptrdiff_t>(head.size())) return {};
  return fmt::format("{}: {}% of its first {} bytes are control characters: binary data, not text?",
                     path, controls * 100 / static_cast<std::ptrdiff_t>(head.size()), head.size());
}

// Warns if two tokens are equal about as often as two uniformly drawn ids. The ratio (the index of
// coincidence) is 1 for noise, 4 for English characters, and far more for longer tokens.
template <typename T>
std::string inspect_ids(const std::string& path, std::string_view head) {
  constexpr double kNoise = 1.5, kEnoughPairs = 50;
  std::vector<T> ids(head.size() / sizeof(T));
  if (ids.empty()) return {};
  std::memcpy(ids.data(), head.data(), ids.size() * sizeof(T));
  std::ranges::sort(ids);
  const double vocabulary = 1.0 + static_cast<double>(ids.back());
  const auto size = static_cast<double>(ids.size());
  const double expected = size * (size - 1) / 2 / vocabulary;
  double pairs = 0;
  for (auto first = ids.begin(); first != ids.end();) {
    const auto last = std::upper_bound(first, ids.end(), *first);
    const auto n = static_cast<double>(last - first);
    pairs += n * (n - 1) / 2;
    first = last;
  }
  if (expected < kEnoughPairs || pairs > kNoise * expected) return {};
  return fmt::format(
      "{}: its first {} tokens are spread evenly over ids 0 to {}, like noise and unlike language; "
      "is it a token file?",
      path, ids.size(), ids.back());
}

}  // namespace

std::string inspect_data_file(const std::string& path, bool tokens) {
  std::string head;
  try {
    const File file = File::open(path);
    head.resize(static_cast<std::size_t>(
        std::min<std::int64_t>(file.size(), std::int64_t{kInspectedBytes})));
    file.read(0, head.data(), head.size());
  } catch (const Error&) {
    return {};
  }
  return inspect_data(path, head, tokens);
}

std::string inspect_data(const std::string& path, std::string_view head, bool tokens) {
  if (head.empty()) return {};
  const auto refuse = [&](const char* name, const char* advice) {
    throw IoError("{} is {}, not {}; {}", path, name, tokens ? "a token file" : "text", advice);
  };
  for (const Format& format : kFormats)
    if (head.starts_with(format.magic)) refuse(format.name, format.advice);
  if (head.starts_with("BZh") && head.find("1AY&SY") == 4) refuse("a bzip2 file", kUnpack);
  constexpr std::size_t kHeader = 1024;
  std::int32_t magic = 0;
  if (tokens) {
    if (head.size() < sizeof(magic)) return {};
    std::memcpy(&magic, head.data(), sizeof(magic));
    const bool has_header = magic >= 20240000 && magic <= 20249999;
    const auto ids = head.substr(has_header ? std::min(kHeader, head.size()) : 0);
    return magic == 20240801 ? inspect_ids<std::uint32_t>(path, ids)
                             : inspect_ids<std::uint16_t>(path, ids);
  }
  constexpr const char* kAsItIs =
      "extract its text into a .txt file, or rename it to .txt to train on it unchanged";
  if (is_jsonl(path, head))
    refuse("JSON with one object per line",
           "extract its text into a .txt file, rename it to .txt to train on it unchanged, or to "
           ".jsonl if its lines are conversations");
  if (path.ends_with(".csv") || path.ends_with(".tsv")) refuse("a table (CSV)", kAsItIs);
  return inspect_text(path, head);
}

}  // namespace tessera::io
