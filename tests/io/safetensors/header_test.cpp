// One error per malformation of a safetensors file.

#include "io/safetensors/header.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "core/base/error.h"
#include "io/safetensors/writer.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

std::string file_of(const std::string& json, std::size_t data_bytes) {
  const std::uint64_t length = json.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + json + std::string(data_bytes, '\1');
}

std::string length_only(std::uint64_t length, const std::string& rest) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + rest;
}

void refuse(const std::string& content, const char* reason) {
  TempDir dir;
  const std::string path = dir.write("bad.safetensors", content);
  CAPTURE(content.substr(0, 200));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, SafetensorsReader(path));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "bad.safetensors", SafetensorsReader(path));
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST_CASE("the length of the header") {
  for (std::size_t n = 0; n < 8; ++n) refuse(std::string(n, '\0'), "starts with 8 bytes of length");
  refuse(length_only(0, "{}"), "the header's length is 0");
  refuse(length_only(3, "{}"), "but only 2 follow");
  refuse(length_only(100'000'001, "{}"), "at most 100000000 are accepted");
  refuse(length_only(~std::uint64_t{0} - 7, "{}"), "at most 100000000 are accepted");
  refuse("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer");
}

TEST_CASE("the header's JSON") {
  refuse(file_of("[]", 0), "does not start with '{'");
  refuse(file_of(" {}", 0), "does not start with '{'");
  refuse(file_of("{\"x\"", 0), "not valid JSON");
  refuse(file_of("{} x", 0), "not valid JSON");
  refuse(file_of("{\"\xff\":1}", 0), "not valid JSON");
  refuse(file_of(R"({"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                 R"("x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
                 4),
         "duplicate key");
  std::string deep = "{\"x\":";
  for (int i = 0; i < 100'000; ++i) deep += '[';
  refuse(file_of(deep, 0), "nested deeper");
  refuse(file_of(R"({"__metadata__":{"a":1}})", 0), "__metadata__.a: expected a string");
  refuse(file_of(R"({"__metadata__":[]})", 0), "__metadata__: expected an object");
  refuse(file_of(R"({"x":7})", 0), "x: expected an object");
  refuse(file_of("{\"" + std::string(1'000'000, 'n') +
                     R"(":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})",
                 1),
         "a tensor name has 1000000 bytes");
  refuse(file_of(R"({"x\u0000":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1),
         "contains a NUL");
}

TEST_CASE("fields of a tensor") {
  refuse(file_of(R"({"x":{"shape":[],"data_offsets":[0,4]}})", 4), "\"dtype\" is missing");
  refuse(file_of(R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", 4), "\"shape\" is missing");
  refuse(file_of(R"({"x":{"dtype":"F32","shape":[]}})", 4), "\"data_offsets\" is missing");
  refuse(file_of(entry("\"F33\"", "[]", "[0,4]"), 4), "unknown dtype \"F33\"");
  refuse(file_of(entry("7", "[]", "[0,4]"), 4), "x.dtype: expected a string");
  refuse(file_of(entry("\"F32\"", "[]", "[0]"), 4), "expected [begin, end], found 1");
  refuse(file_of(entry("\"F32\"", "[]", "[0,4,8]"), 4), "expected [begin, end], found 3");
  refuse(file_of(entry("\"F32\"", "[]", "[4,0]"), 4), "begin 4 is past end 0");
  refuse(file_of(entry("\"F32\"", "[2]", "[0,8]"), 4), "the file holds 4 bytes of data");
  refuse(file_of(entry("\"F32\"", "[2]", "[0,4]"), 4), "takes 8 bytes, but data_offsets span 4");
  refuse(file_of(entry("\"F32\"", "[-1]", "[0,4]"), 4), "expected a whole number");
  refuse(file_of(entry("\"F32\"", "[1.5]", "[0,4]"), 4), "expected a whole number");
  refuse(file_of(entry("\"F32\"", "[18446744073709551616]", "[0,4]"), 4),
         "expected a whole number");
  refuse(file_of(entry("\"F32\"", "[9223372036854775808]", "[0,4]"), 4), "expected a whole number");
  refuse(file_of(entry("\"F32\"", "[1e400]", "[0,4]"), 4), "not valid JSON");
  refuse(file_of(entry("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0),
         "below 2^63");  // 2^64 wraps to 0
  refuse(file_of(entry("\"F32\"", "[4611686018427387904]", "[0,0]"), 0), "below 2^63");
  refuse(file_of(entry("\"F32\"", "[65536,65536]", "[0,0]"), 0),
         "takes 17179869184 bytes");  // 2^32 wraps to 0
  refuse(file_of(entry("\"F4\"", "[3]", "[0,1]"), 1), "no whole number of bytes");
  std::string dims = "[1";
  for (int i = 1; i < 1'000'000; ++i) dims += ",1";
  refuse(file_of(entry("\"U8\"", dims + "]", "[0,1]"), 1), "1000000 dims");
}

TEST_CASE("every byte belongs to exactly one tensor") {
  refuse(file_of(entry("\"F32\"", "[]", "[0,4]"), 5), "1 bytes follow the last tensor");
  refuse(file_of("{}", 1), "1 bytes follow the last tensor");
  refuse(file_of(entry("\"F32\"", "[]", "[4,8]"), 8), "belong to no tensor");
  refuse(file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                 R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                 3),
         "inside the tensor before it");
  refuse(file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                 R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                 5),
         "belong to no tensor");
}

TEST_CASE("unusual but valid files are read") {
  TempDir dir;
  const auto open = [&](const std::string& content) {
    return SafetensorsReader(dir.write("ok.safetensors", content)).header();
  };
  CHECK(open(file_of("{}", 0)).tensors.empty());
  CHECK(open(file_of("{}      ", 0)).tensors.empty());
  CHECK(open(file_of(entry("\"F32\"", "[0,9223372036854775807]", "[0,0]"), 0)).tensors.size() == 1);
  CHECK_FALSE(open(file_of(entry("\"F8_E4M3\"", "[3]", "[0,3]"), 3)).tensors[0].dtype.has_value());
  // A scalar at an odd offset: data need not be aligned.
  const std::string json = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("b":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})";
  std::string content = file_of(json, 1);
  const float value = 2.5F;
  content.append(reinterpret_cast<const char*>(&value), 4);
  float read = 0;
  SafetensorsReader(dir.write("odd.safetensors", content)).read("b", 0, 1, &read, DType::F32);
  CHECK(read == 2.5F);
}

TEST_CASE("a non-regular file is refused without blocking") {
  TempDir dir;
  REQUIRE(::mkfifo(dir.file("fifo").c_str(), 0600) == 0);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a FIFO", SafetensorsReader(dir.file("fifo")));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a directory", SafetensorsReader(dir.path()));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "is a device", SafetensorsReader("/dev/zero"));
  CHECK_THROWS_HOLDING(IoError, "cannot open", SafetensorsReader(dir.file("absent")));
  std::filesystem::create_symlink("/dev/null", dir.path() / "link");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "symbolic link",
                       File::open(dir.file("link"), Links::Refuse));
}

TEST_CASE("a sparse terabyte is refused unread, and a file may shrink while open") {
  TempDir dir;
  const std::string path = dir.write("big.safetensors", length_only(2, "{}"));
  REQUIRE(::truncate(path.c_str(), std::int64_t{1} << 40) == 0);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "follow the last tensor", SafetensorsReader{path});

  const std::string small = dir.write("s.safetensors", file_of(entry("\"U8\"", "[9]", "[0,9]"), 9));
  const SafetensorsReader reader(small);
  REQUIRE(::truncate(small.c_str(), static_cast<off_t>(std::filesystem::file_size(small)) - 4) ==
          0);
  char data[9];
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "it was truncated",
                       reader.read("x", 0, 9, data, DType::U8));
}

TEST_CASE("a plan sorts tensors by alignment, then name") {
  const SafetensorsPlan plan = plan_safetensors({{"c", DType::U8, {3}},
                                                 {"b", DType::F32, {2}},
                                                 {"a", DType::BF16, {1}},
                                                 {"d", DType::F64, {1}}});
  std::string order;
  for (const SafetensorsEntry& tensor : plan.tensors) order += tensor.name;
  CHECK(order == "dbac");
  CHECK(plan.preamble.size() % 8 == 0);
  CHECK(plan.file_size == static_cast<std::int64_t>(plan.preamble.size()) + 8 + 8 + 2 + 3);
  TempDir dir;
  const SafetensorsReader reader(dir.write(
      "p.safetensors",
      plan.preamble +
          std::string(static_cast<std::size_t>(plan.file_size) - plan.preamble.size(), 'x')));
  CHECK(reader.header().metadata.at("format") == "pt");
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    CHECK(reader.header().tensors[i].name == plan.tensors[i].name);
    CHECK(reader.header().tensors[i].begin == plan.tensors[i].begin);
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "is duplicate",
                       plan_safetensors({{"a", DType::U8, {}}, {"a", DType::U8, {}}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "reserved",
                       plan_safetensors({{"__metadata__", DType::U8, {}}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "UTF-8", plan_safetensors({{"\xff", DType::U8, {}}}));
}

// Twenty minutes if parsing were quadratic.
TEST_CASE("a header of 200,000 tensors takes seconds") {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  const int n = 200'000;
  for (int i = 0; i < n; ++i) {
    json += fmt::format(R"(,"layer.{}":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}})", i, i,
                        i + 1);
  }
  json += '}';
  TempDir dir;
  const std::string path = dir.write("m.safetensors", file_of(json, n));
  const auto start = std::chrono::steady_clock::now();
  CHECK(read_safetensors_header(File::open(path)).tensors.size() == n);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
}

}  // namespace
}  // namespace tessera::io
