#include "io/gguf/header.h"

#include <doctest/doctest.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "io/gguf/writer.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

template <typename T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}
std::string text_of_file(std::string_view text) {
  return bytes_of(std::uint64_t{text.size()}) + std::string(text);
}
std::string begin_of(std::uint64_t tensors, std::uint64_t keys, std::uint32_t version = 3) {
  return "GGUF" + bytes_of(version) + bytes_of(tensors) + bytes_of(keys);
}
std::string u32_key(std::string_view key, std::uint32_t value) {
  return text_of_file(key) + bytes_of(std::uint32_t{4}) + bytes_of(value);
}
std::string tensor_of(std::string_view name, std::vector<std::uint64_t> sizes, std::uint32_t type,
                      std::uint64_t offset) {
  std::string text = text_of_file(name) + bytes_of(static_cast<std::uint32_t>(sizes.size()));
  for (const std::uint64_t size : sizes) text += bytes_of(size);
  return text + bytes_of(type) + bytes_of(offset);
}

struct Written {
  TempDir dir;
  GgufHeader read(const std::string& content) const {
    const fs::path path = dir.path() / "x.gguf";
    std::ofstream(path, std::ios::binary) << content;
    return read_gguf_header(File::open(path));
  }
  /// A file with these tensors and 512 bytes of data.
  GgufHeader read_tensors(const std::vector<std::string>& tensors, const std::string& keys = "",
                          std::uint64_t key_count = 0) const {
    std::string text = begin_of(tensors.size(), key_count) + keys;
    for (const std::string& tensor : tensors) text += tensor;
    text.resize((text.size() + 31) / 32 * 32 + 512, '\0');
    return read(text);
  }
};

TEST_CASE("a GGUF file that was laid out reads back") {
  GgufKeys keys;
  keys.add("general.architecture", "llama");
  keys.add("llama.block_count", std::uint32_t{7});
  keys.add("llama.rope.freq_base", 0.5F);
  keys.add("flag", true);
  keys.add("texts", std::vector<std::string>{"a", "", "caf\xc3\xa9"});
  keys.add("numbers", std::vector<float>{1, 2.5F});
  keys.add("ids", std::vector<std::int32_t>{-1, 3});
  keys.add("flags", std::vector<bool>{true, false});
  const GgufPlan plan =
      plan_gguf(keys, {{"matrix", {3, 64}, &gguf_elements_of(DType::F32, Encoding::Q8_0)},
                       {"vector", {5}, &gguf_elements_of(DType::F32, Encoding::Plain)},
                       {"half", {2, 1}, &gguf_elements_of(DType::F16, Encoding::Plain)}});
  std::string content = plan.preamble;
  content.resize(static_cast<std::size_t>(plan.file_size), '\0');
  const Written written;
  const GgufHeader header = written.read(content);
  CHECK(header.keys.at("general.architecture") == "llama");
  CHECK(header.keys.at("llama.block_count") == 7);
  CHECK(header.keys.at("llama.rope.freq_base") == 0.5);
  CHECK(header.keys.at("flag") == true);
  CHECK(header.keys.at("texts") == Json::array());
  const File file = File::open(written.dir.path() / "x.gguf");
  std::vector<std::string> texts;
  visit_gguf_strings(file, header, "texts",
                     [&](std::string_view text) { texts.emplace_back(text); });
  CHECK(texts == std::vector<std::string>{"a", "", "caf\xc3\xa9"});
  CHECK(read_gguf_numbers(file, header, "numbers", 2) == std::vector<double>{1.0, 2.5});
  CHECK(read_gguf_numbers(file, header, "ids", 2) == std::vector<double>{-1, 3});
  const auto visit = [&](const char* key) { visit_gguf_strings(file, header, key, {}); };
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "has no array flag", visit("flag"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "ids is no array of strings", visit("ids"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "ids has 2 values, not 3",
                       read_gguf_numbers(file, header, "ids", 3));
  for (const char* key : {"texts", "flags"})
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "is no array of numbers",
                         read_gguf_numbers(file, header, key, 2));
  REQUIRE(header.tensors.size() == 3);
  CHECK(header.tensors[0].shape == Shape{3, 64});
  CHECK(header.tensors[0].end - header.tensors[0].begin == 6 * 34);
  CHECK(header.tensors[1].begin == plan.begins[1]);
  CHECK(header.tensors[1].begin % 32 == 0);
  CHECK(header.tensors[2].elements->name == "F16");
  // Cut anywhere in the header, it is refused.
  for (std::size_t size = 0; size < plan.preamble.size() - 32; ++size)
    CHECK_THROWS_AS(written.read(content.substr(0, size)), CorruptCheckpoint);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "but the file has",
                       written.read(content.substr(0, content.size() - 32)));
}

TEST_CASE("a file of the gguf package reads") {
  const GgufHeader header =
      read_gguf_header(File::open(source_path("tests/io/gguf/fixtures/llama.gguf")));
  CHECK(header.keys.at("llama.attention.head_count_kv") == 2);
  CHECK(header.arrays.at("tokenizer.ggml.tokens").count == 32);
  CHECK(header.tensors.size() == 12);
}

TEST_CASE("each malformed GGUF file has its own error") {
  const Written w;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the magic", w.read("GG"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "does not begin with GGUF", w.read("GGML\x03\0\0\0"));
  CHECK_THROWS_HOLDING(Unsupported, "version 1;", w.read(begin_of(0, 0, 1)));
  CHECK_THROWS_HOLDING(Unsupported, "big-endian", w.read(begin_of(0, 0, 0x03000000)));
  const auto wrapped = ~std::uint64_t{0};
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "do not fit", w.read(begin_of(wrapped, 0)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "do not fit", w.read(begin_of(0, wrapped / 12)));
  const auto key = [&](const std::string& text) {
    return w.read(begin_of(0, 1) + text + std::string(64, 0));
  };
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "a string of 18446744073709551615 bytes",
                       key(bytes_of(wrapped)));
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "k: a string of 4611686018427387904 bytes",
      key(text_of_file("k") + bytes_of(std::uint32_t{8}) + bytes_of(std::uint64_t{1} << 62)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "empty or contains a NUL", key(u32_key("", 1)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "unknown type 13",
                       key(text_of_file("k") + bytes_of(std::uint32_t{13})));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "boolean of value 2",
                       key(text_of_file("k") + bytes_of(std::uint32_t{7}) + '\2'));
  const std::string array = text_of_file("k") + bytes_of(std::uint32_t{9});
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "an array in an array",
                       key(array + bytes_of(std::uint32_t{9}) + bytes_of(std::uint64_t{1})));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "values, but at most",
                       key(array + bytes_of(std::uint32_t{4}) + bytes_of(wrapped / 2)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "k is there twice",
                       w.read(begin_of(0, 2) + u32_key("k", 1) + u32_key("k", 2)));
  for (const std::uint32_t alignment : {0U, 4U, 48U, 1U << 31}) {
    CAPTURE(alignment);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "general.alignment",
                         w.read(begin_of(0, 1) + u32_key("general.alignment", alignment)));
  }
  CHECK_THROWS_HOLDING(Unsupported, "one of 3 parts",
                       w.read(begin_of(0, 1) + u32_key("split.count", 3)));

  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the name of a tensor is empty",
                       w.read_tensors({tensor_of("", {1}, 0, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "has 5 dims",
                       w.read_tensors({tensor_of("t", {1, 1, 1, 1, 1}, 0, 0)}));
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "more than 2^63 elements",
      w.read_tensors({tensor_of("t", {std::uint64_t{1} << 33, std::uint64_t{1} << 33}, 0, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "more than 2^63 elements",
                       w.read_tensors({tensor_of("t", {wrapped}, 0, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "ends past 2^63",
                       w.read_tensors({tensor_of("t", {std::uint64_t{1} << 62}, 0, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "unknown type 4",
                       w.read_tensors({tensor_of("t", {1}, 4, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "no multiples of 32",
                       w.read_tensors({tensor_of("t", {33}, 8, 0)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "no multiple of its alignment",
                       w.read_tensors({tensor_of("t", {1}, 0, 4)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "but the file has",
                       w.read_tensors({tensor_of("t", {1}, 0, 1024)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "but the file has",
                       w.read_tensors({tensor_of("t", {1}, 0, INT64_MAX / 32 * 32)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "t is there twice",
                       w.read_tensors({tensor_of("t", {1}, 0, 0), tensor_of("t", {1}, 0, 32)}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "inside a",
                       w.read_tensors({tensor_of("a", {16}, 0, 0), tensor_of("b", {1}, 0, 32)}));
  CHECK(w.read_tensors({tensor_of("t", {4}, 0, 64)}, u32_key("general.alignment", 64), 1)
            .tensors.size() == 1);
}

TEST_CASE("a large header takes little memory") {
  const TempDir dir;
  const fs::path path = dir.path() / "x.gguf";
  const auto read = [&](const std::string& content, std::uintmax_t size) {
    std::ofstream(path, std::ios::binary) << content;
    fs::resize_file(path, size);
    return read_gguf_header(File::open(path));
  };
  const auto peak = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;  // KiB
  };
  const auto array_of = [](GgufType type, std::uint64_t count) {
    return begin_of(0, 1) + text_of_file("k") + bytes_of(GgufType::Array) + bytes_of(type) +
           bytes_of(count);
  };
  const auto before = peak();
  const std::uint64_t bytes = 60 << 20;
  CHECK(read(array_of(GgufType::I8, bytes), bytes + 64).arrays.at("k").count == bytes);
  CHECK(read(array_of(GgufType::String, bytes / 8), bytes + 64).arrays.at("k").count == bytes / 8);
#if !defined(__SANITIZE_ADDRESS__)  // which keeps freed memory
  CHECK(peak() - before < 32 << 10);
#else
  static_cast<void>(before);
#endif
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "k has 268000000 values, but at most",
                       read(array_of(GgufType::I8, 268'000'000), 268 << 20));
  for (const auto& [tensors, keys] : {std::pair(kMaxGgufEntries + 1, std::uint64_t{0}),
                                      std::pair(std::uint64_t{0}, kMaxGgufEntries + 1)})
    CHECK_THROWS_HOLDING(Unsupported, "at most 262144 of each are read",
                         read(begin_of(tensors, keys), 10 << 20));
}

}  // namespace
}  // namespace tessera::io
