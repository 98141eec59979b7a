#include <doctest/doctest.h>
#include <tessera/c_api.h>

#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/io/support.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

using Source = std::unique_ptr<tessera_source, decltype(&tessera_close)>;

Source open(const fs::path& path, std::vector<tessera_option> options = {}) {
  tessera_source* source = nullptr;
  const int status = tessera_open(path.c_str(), options.data(), options.size(), &source);
  CAPTURE(tessera_error_message());
  REQUIRE(status == TESSERA_OK);
  return {source, &tessera_close};
}

fs::path fixture(const char* name) { return source_path(name); }

// Elements [begin, end) of a row-major tensor.
std::string cut(const std::string& whole, const std::int64_t* shape,
                const std::vector<std::int64_t>& begin, const std::vector<std::int64_t>& end,
                std::size_t width) {
  std::string part;
  std::vector<std::int64_t> at = begin;
  if (begin.empty()) return whole;
  for (std::size_t i = 0; i < begin.size(); ++i)
    if (begin[i] == end[i]) return part;
  for (;;) {
    std::int64_t position = 0;
    for (std::size_t i = 0; i < at.size(); ++i) position = position * shape[i] + at[i];
    part += whole.substr(static_cast<std::size_t>(position) * width, width);
    std::size_t dim = at.size();
    while (dim > 0 && ++at[dim - 1] == end[dim - 1]) {
      at[dim - 1] = begin[dim - 1];
      --dim;
    }
    if (dim == 0) return part;
  }
}

TEST_CASE("slices of any source are those of its whole tensors") {
  const char* const fixtures[] = {"tests/io/dcp/fixtures/fsdp-gpt2", "tests/io/dcp/fixtures/mixed",
                                  "tests/io/dcp/fixtures/strided",
                                  "tests/io/dcp/fixtures/dcp-safetensors",
                                  "tests/io/deepspeed/fixtures/zero3"};
  for (const char* name : fixtures) {
    CAPTURE(name);
    const auto wholes = open(fixture(name));
    std::size_t slices = 0;
    for (const char* verify : {"chunks", "whole"}) {
      const auto source = open(fixture(name), {{"verify", verify}, {"jobs", "2"}});
      REQUIRE(tessera_tensor_count(source.get()) > 0);
      for (std::size_t t = 0; t < tessera_tensor_count(source.get()); ++t) {
        const std::size_t width = tessera_tensor_width(source.get(), t);
        const std::size_t dims = tessera_tensor_dims(source.get(), t);
        const std::int64_t* const shape = tessera_tensor_shape(source.get(), t);
        if (width == 0) continue;
        std::size_t bytes = width;
        for (std::size_t i = 0; i < dims; ++i) bytes *= static_cast<std::size_t>(shape[i]);
        std::string whole(bytes, '\0');
        REQUIRE(tessera_read(wholes.get(), t, nullptr, nullptr, nullptr, whole.data(), bytes) ==
                TESSERA_OK);
        for (std::int64_t seed = 0; seed < 6; ++seed) {
          std::vector<std::int64_t> begin, end;
          for (std::size_t i = 0; i < dims; ++i) {
            begin.push_back(shape[i] * (seed % 3) / 4);
            end.push_back(std::max(begin.back(), shape[i] - (seed + static_cast<int>(i)) % 4));
          }
          const std::string expected = cut(whole, shape, begin, end, width);
          std::string found(expected.size(), '\0');
          const int status = tessera_read(source.get(), t, begin.data(), end.data(), nullptr,
                                          found.data(), found.size());
          CAPTURE(tessera_error_message());
          CHECK(status == TESSERA_OK);
          CHECK(found == expected);
          ++slices;
        }
      }
    }
    CHECK(slices > 12);
  }
}

TEST_CASE("names, dtypes and values are those of the source") {
  const auto expected =
      tensors_of(fixture("tests/io/dcp/fixtures/torchtitan/expected.safetensors.golden"));
  const auto source = open(fixture("tests/io/dcp/fixtures/torchtitan"));
  CHECK(tessera_source_kind(source.get()) == std::string("PyTorch DCP"));
  for (const auto& item : expected) {
    const std::string &name = item.first, &value = item.second;
    CAPTURE(name);
    std::size_t index = 0;
    REQUIRE(tessera_find(source.get(), name.c_str(), &index) == TESSERA_OK);
    const std::string dtype = tessera_tensor_dtype(source.get(), index);
    const Shape shape(tessera_tensor_shape(source.get(), index),
                      tessera_tensor_dims(source.get(), index));
    const std::string title = fmt::format("{} {} ", dtype, shape);
    std::string read(value.size() - title.size(), '\0');
    CHECK(tessera_read(source.get(), index, nullptr, nullptr, nullptr, read.data(), read.size()) ==
          TESSERA_OK);
    CHECK(title + read == value);
  }
  CHECK(!expected.empty());

  const auto other = open(fixture("tests/io/dcp/fixtures/other-dtypes"));
  std::map<std::string, std::size_t> widths;
  for (std::size_t i = 0; i < tessera_tensor_count(other.get()); ++i)
    widths[tessera_tensor_dtype(other.get(), i)] = tessera_tensor_width(other.get(), i);
  CHECK(widths["F8_E4M3"] == 1);

  const auto gguf = open(fixture("tests/io/gguf/fixtures/llama.gguf"));
  CHECK(tessera_source_kind(gguf.get()) == std::string("GGUF file"));
  CHECK(tessera_tensor_count(gguf.get()) > 5);
}

TEST_CASE("arguments that do not fit are refused") {
  tessera_source* none = nullptr;
  const TempDir dir;
  CHECK(tessera_open((dir.path() / "absent").c_str(), nullptr, 0, &none) == TESSERA_IO);
  CHECK(tessera_error_file() == (dir.path() / "absent").string());
  CHECK(tessera_open(dir.path().c_str(), nullptr, 0, &none) == TESSERA_INVALID_ARGUMENT);
  CHECK(tessera_open(nullptr, nullptr, 0, &none) == TESSERA_INVALID_ARGUMENT);
  const tessera_option unknown{"stop", "1"}, bad{"verify", "all"};
  CHECK(tessera_open(dir.path().c_str(), &unknown, 1, &none) == TESSERA_INVALID_ARGUMENT);
  CHECK(std::strstr(tessera_error_message(), "there are jobs, shards, step, verify") != nullptr);
  CHECK(tessera_open(dir.path().c_str(), &bad, 1, &none) == TESSERA_INVALID_ARGUMENT);
  CHECK(std::strstr(tessera_error_message(), "one of chunks, whole") != nullptr);
  CHECK(none == nullptr);

  const auto source = open(fixture("tests/io/dcp/fixtures/torchtitan"));
  std::vector<std::int64_t> begin(tessera_tensor_dims(source.get(), 0), 0), end = begin;
  REQUIRE(!begin.empty());
  float value = 0;
  begin[0] = -1;
  CHECK(tessera_read(source.get(), 0, begin.data(), end.data(), nullptr, &value, 0) ==
        TESSERA_INVALID_ARGUMENT);
  begin[0] = 0;
  end[0] = INT64_MAX;
  CHECK(tessera_read(source.get(), 0, begin.data(), end.data(), nullptr, &value, 0) ==
        TESSERA_INVALID_ARGUMENT);
  CHECK(tessera_read(source.get(), 0, begin.data(), nullptr, nullptr, &value, 0) ==
        TESSERA_INVALID_ARGUMENT);
  CHECK(tessera_read(source.get(), 0, begin.data(), begin.data(), "F8_E4M3", &value, 0) ==
        TESSERA_UNSUPPORTED);
  CHECK(tessera_read(source.get(), 1000, nullptr, nullptr, nullptr, &value, 4) ==
        TESSERA_INVALID_ARGUMENT);
}

TEST_CASE("damage is found with file and tensor, in a whole chunk or in the elements wanted") {
  const TempDir dir;
  const fs::path path = save(make_sample_model(), dir.path(), {.world_size = 2, .chunk_bytes = 64});
  const auto reader = io::CheckpointReader::open(path);
  const auto first = reader.tensors(io::kModelSection).begin();
  const std::string& name = first->first;
  const io::TensorRecord& record = first->second;
  const io::Chunk& chunk = record.chunks.front();
  {
    std::fstream file(path / chunk.file, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(chunk.byte_end - 1);
    file.put('\x55');
  }
  const auto read_first = [&](const char* verify, bool whole) {
    const auto source = open(path, {{"verify", verify}});
    std::size_t index = 0;
    REQUIRE(tessera_find(source.get(), name.c_str(), &index) == TESSERA_OK);
    std::vector<std::int64_t> begin(static_cast<std::size_t>(record.shape.size()), 0);
    std::vector<std::int64_t> end(begin.size(), 1);
    if (whole) end.assign(record.shape.begin(), record.shape.end());
    std::vector<float> out(whole ? static_cast<std::size_t>(numel(record.shape)) : 1);
    return tessera_read(source.get(), index, begin.data(), end.data(), nullptr, out.data(),
                        out.size() * sizeof(float));
  };
  CHECK(read_first("chunks", false) == TESSERA_CORRUPT);
  CHECK(tessera_error_file() == (path / chunk.file).string());
  CHECK(tessera_error_tensor() == name);
  CHECK(read_first("whole", false) == TESSERA_OK);
  CHECK(read_first("whole", true) == TESSERA_CORRUPT);

  std::vector<std::string> problems;
  const auto problem = [](void* user, const char*, const char* tensor, std::int64_t, std::int64_t,
                          const char*) {
    static_cast<std::vector<std::string>*>(user)->emplace_back(tensor);
  };
  CHECK(tessera_verify(dir.path().c_str(), nullptr, 0, problem, nullptr, nullptr, &problems) ==
        TESSERA_CORRUPT);
  CHECK(problems == std::vector<std::string>{name});
  CHECK(tessera_error_file() == (path / chunk.file).string());
  CHECK(tessera_error_tensor() == name);
  fs::resize_file(path / "index.json", 100);
  CHECK(tessera_verify(dir.path().c_str(), nullptr, 0, nullptr, nullptr, nullptr, nullptr) ==
        TESSERA_CORRUPT);
  fs::remove(path / "index.json");
  CHECK(tessera_verify(dir.path().c_str(), nullptr, 0, nullptr, nullptr, nullptr, nullptr) ==
        TESSERA_INVALID_ARGUMENT);
}

TEST_CASE("a verification stops when its callback says so") {
  const auto stop = [](void*, std::int64_t, std::int64_t) { return 1; };
  CHECK(tessera_verify(fixture("tests/io/dcp/fixtures/mixed").c_str(), nullptr, 0, nullptr, stop,
                       nullptr, nullptr) == TESSERA_STOPPED);
  std::string report;
  const auto keep = [](void* user, const char* text) { *static_cast<std::string*>(user) = text; };
  CHECK(tessera_verify(fixture("tests/io/dcp/fixtures/mixed").c_str(), nullptr, 0, nullptr, nullptr,
                       keep, &report) == TESSERA_OK);
  CHECK(report.find("\"problems\": 0") != std::string::npos);
}

}  // namespace
}  // namespace tessera::test
