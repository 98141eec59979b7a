#include "io/dcp/dcp_source.h"

#include <doctest/doctest.h>

#include <map>
#include <set>

#include "core/base/error.h"
#include "io/safetensors/reader.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

const fs::path kFixtures = fs::path(TESSERA_SOURCE_DIR) / "tests/io/dcp/fixtures";

std::unique_ptr<ShardedSource> open_fixture(const fs::path& dir) {
  return is_dcp(dir) ? open_dcp(dir) : open_dcp_safetensors(dir);
}

std::string read_raw(const TensorSource& source, const TensorInfo& tensor, std::int64_t begin,
                     std::int64_t end) {
  std::string bytes(static_cast<std::size_t>(end - begin) * dtype_size(tensor.dtype), '?');
  source.read(tensor.name, begin, end, bytes.data(), tensor.dtype);
  return bytes;
}

struct Whole {
  DType dtype;
  Shape shape;
  std::string bytes;
};

/// What PyTorch had in memory when it saved a fixture.
std::map<std::string, Whole> expected_tensors(const fs::path& dir) {
  std::map<std::string, Whole> expected;
  const SafetensorsReader file(dir / "expected.safetensors.golden");
  for (const SafetensorsEntry& entry : file.header().tensors) {
    if (!entry.dtype) continue;
    Whole whole{*entry.dtype, entry.shape, std::string(entry.end - entry.begin, '?')};
    file.file().read(entry.begin, whole.bytes.data(), whole.bytes.size());
    expected.emplace(entry.name, std::move(whole));
  }
  return expected;
}

TEST_CASE("what PyTorch sharded is read as it was in memory") {
  for (const char* name :
       {"fsdp-gpt2", "fsdp-wrapped", "torchtitan", "mixed", "dcp-safetensors", "lightning"}) {
    CAPTURE(name);
    const auto expected = expected_tensors(kFixtures / name);
    const auto source = open_fixture(kFixtures / name);
    CHECK(source->tensors().size() == expected.size());
    for (const TensorInfo& tensor : source->tensors()) {
      CAPTURE(tensor.name);
      REQUIRE(expected.contains(tensor.name));
      const Whole& whole = expected.at(tensor.name);
      CHECK(tensor.dtype == whole.dtype);
      CHECK(tensor.shape == whole.shape);
      CHECK(read_raw(*source, tensor, 0, numel(tensor.shape)) == whole.bytes);
    }
  }
}

TEST_CASE("parts and streams of sharded tensors are parts of the whole") {
  for (const char* name : {"mixed", "dcp-safetensors", "torchtitan"}) {
    CAPTURE(name);
    const auto expected = expected_tensors(kFixtures / name);
    const auto source = open_fixture(kFixtures / name);
    for (const TensorInfo& tensor : source->tensors()) {
      CAPTURE(tensor.name);
      const std::string& whole = expected.at(tensor.name).bytes;
      const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
      const std::int64_t size = numel(tensor.shape);
      bool same = true;
      for (std::int64_t begin = 0; begin <= size; ++begin) {
        for (std::int64_t end = begin; end <= size; end += 3) {
          same = same && read_raw(*source, tensor, begin, end) ==
                             whole.substr(static_cast<std::size_t>(begin * width),
                                          static_cast<std::size_t>((end - begin) * width));
        }
      }
      CHECK(same);
      for (const std::size_t buffer : {std::size_t{1}, std::size_t{24}, std::size_t{100000}}) {
        std::string streamed;
        std::int64_t at = 0;
        open_fixture(kFixtures / name)
            ->stream(tensor.name, buffer,
                     [&](std::int64_t begin, const void* data, std::int64_t n) {
                       CHECK(begin == at);
                       CHECK((n == 1 || static_cast<std::size_t>(n * width) <= buffer));
                       at += n;
                       streamed.append(static_cast<const char*>(data),
                                       static_cast<std::size_t>(n * width));
                     });
        CHECK(streamed == whole);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::io
