#include "io/pump/read_parts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

constexpr int kThreads = 3;

// Parts that a rank of another world size reads, with their destinations.
struct Share {
  std::vector<ReadPart> parts;
  std::vector<const float*> expected;  // by part
  std::vector<std::vector<float>> memory;

  Share(const CheckpointReader& reader, const SampleModel& model, int rank, int world) {
    const SaveRequest request = make_request(model, "", rank, {.world_size = world});
    for (const auto& [section, list] : request.parts) {
      if (!reader.has(section)) continue;
      for (const TensorPart& part : list) {
        memory.emplace_back(static_cast<std::size_t>(part.end - part.begin), -1.0F);
        parts.push_back({&reader.source(section), part.name, part.begin, part.end, DType::F32});
        expected.push_back(static_cast<const float*>(part.data));
      }
    }
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].data = memory[i].data();
  }
  bool is_right() const {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!std::equal(memory[i].begin(), memory[i].end(), expected[i])) return false;
    }
    return true;
  }
};

SampleModel one_large_tensor() {
  SampleModel model = make_sample_model();
  model.tensors.resize(1);
  SampleModel::Tensor& tensor = model.tensors[0];
  tensor.shape = {1100, 4096};  // 17 MiB: more than one read of a thread
  tensor.weight.resize(1100UL * 4096);
  for (std::size_t i = 0; i < tensor.weight.size(); ++i) {
    tensor.weight[i] = static_cast<float>(i % 100'003);
  }
  return model;
}

TEST_CASE("a checkpoint of four ranks is loaded by any number of ranks, each its shard") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path path = save(model, dir.path(), {.world_size = 4});
  std::int64_t total = 0;
  for (const auto& tensor : model.tensors) total += 3 * 4 * numel(tensor.shape);
  for (const int world : {1, 2, 3, 4, 8}) {
    CAPTURE(world);
    std::int64_t wanted = 0;
    for (int rank = 0; rank < world; ++rank) {
      const auto reader = CheckpointReader::open(path);  // as in another process
      Share share(reader, model, rank, world);
      const ReadReport report = read_parts(share.parts, {.threads = kThreads});
      CHECK(share.is_right());
      wanted += report.wanted_bytes;
      CHECK(report.read_bytes >= report.wanted_bytes);
      if (world == 1 || world == 4) CHECK(report.read_bytes == report.wanted_bytes);
      CHECK(report.read_bytes <= total);
    }
    CHECK(wanted == total);
  }
}

TEST_CASE("a rank reads its parts only, plus the rest of a chunk at each end") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  constexpr std::int64_t kChunk = 64;
  const fs::path path = save(model, dir.path(), {.world_size = 4, .chunk_bytes = kChunk});
  for (const int world : {1, 2, 3, 5, 8}) {
    CAPTURE(world);
    for (int rank = 0; rank < world; ++rank) {
      const auto reader = CheckpointReader::open(path);
      Share share(reader, model, rank, world);
      const ReadReport report = read_parts(share.parts, {.threads = kThreads});
      CHECK(share.is_right());
      std::int64_t bound = 0;
      for (const ReadPart& part : share.parts) {
        const Shape shape = part.source->record(part.name)->shape;
        const int cut = (part.begin > 0 ? 1 : 0) + (part.end < numel(shape) ? 1 : 0);
        bound += 4 * (part.end - part.begin) + cut * (kChunk - 4);
      }
      CHECK(report.read_bytes <= bound);
    }
  }
}

TEST_CASE("values are converted while reading, to memory and to a sink") {
  TempDir dir;
  const SampleModel model = one_large_tensor();
  const auto reader =
      CheckpointReader::open(save(model, dir.path(), {.world_size = 2, .optimizer = false}));
  const TensorSource& source = reader.source(kModelSection);
  const auto& tensor = model.tensors[0];
  const std::int64_t begin = 12'345, end = numel(tensor.shape) - 77;
  const auto size = static_cast<std::size_t>(end - begin);
  std::vector<float> plain(size), sunk(size);
  std::vector<BFloat16> rounded(size), rounded_sunk(size);
  std::atomic<std::int64_t> received = 0;
  const auto into = [&](auto& memory) {
    return [&memory, &received, begin](std::int64_t at, const void* values, std::int64_t n) {
      received += n;
      std::memcpy(memory.data() + (at - begin), values,
                  static_cast<std::size_t>(n) * sizeof(memory[0]));
    };
  };
  const auto load = [&](DType dtype, void* data, auto sink) {
    return read_parts(
        std::vector<ReadPart>{{&source, tensor.name, begin, end, dtype, data, std::move(sink)}},
        {.threads = kThreads});
  };
  const ReadReport report = load(DType::F32, plain.data(), nullptr);
  CHECK(report.wanted_bytes == 4 * (end - begin));
  load(DType::BF16, rounded.data(), nullptr);
  load(DType::F32, nullptr, into(sunk));
  load(DType::BF16, nullptr, into(rounded_sunk));
  CHECK(received == 2 * (end - begin));
  bool right = true;
  for (std::size_t i = 0; i < size; ++i) {
    const float value = tensor.weight[i + static_cast<std::size_t>(begin)];
    const auto bf16 = static_cast<float>(BFloat16(value));
    right = right && plain[i] == value && sunk[i] == value &&
            static_cast<float>(rounded[i]) == bf16 && static_cast<float>(rounded_sunk[i]) == bf16;
  }
  CHECK(right);
}

TEST_CASE("a damaged chunk is detected by reads of any part; others are readable") {
  TempDir dir;
  const SampleModel model = one_large_tensor();
  // Chunks larger than one read of a thread.
  const fs::path path =
      save(model, dir.path(), {.world_size = 1, .optimizer = false, .chunk_bytes = 16 << 20});
  const auto& tensor = model.tensors[0];
  const Chunk damaged =
      CheckpointReader::open(path).tensors(kModelSection).at(tensor.name).chunks.back();
  flip_bit(path / damaged.file, damaged.byte_end - 3);
  const auto reader = CheckpointReader::open(path);
  std::vector<float> out(tensor.weight.size());
  const auto load = [&](std::int64_t begin, std::int64_t end) {
    read_parts(std::vector<ReadPart>{{&reader.source(kModelSection), tensor.name, begin, end,
                                      DType::F32, out.data()}},
               {.threads = kThreads});
  };
  const std::string place = fmt::format(
      "{}: tensor model/{}, elements {} to {} (bytes {} to {}): the checksum is wrong",
      damaged.file, tensor.name, damaged.begin, damaged.end, damaged.byte_begin, damaged.byte_end);
  const std::int64_t size = numel(tensor.shape);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, place, load(0, size));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, place, load(damaged.begin, damaged.begin + 1));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, place, load(size - 1, size));
  load(0, damaged.begin);
  CHECK(std::equal(out.begin(), out.begin() + damaged.begin, tensor.weight.begin()));
}

TEST_CASE("damage is reported with its section") {
  TempDir dir;
  const fs::path path = save(make_sample_model(), dir.path());
  const std::string name = "h.1.mlp.c_fc.weight";
  for (const Section& section : CheckpointReader::open(path).index().tensor_sections()) {
    const auto reader = CheckpointReader::open(path);
    const TensorRecord& tensor = reader.tensors(section).at(name);
    flip_bit(path / tensor.chunks[0].file, tensor.chunks[0].byte_begin);
    const std::int64_t size = numel(tensor.shape);
    std::vector<float> out(static_cast<std::size_t>(size));
    const std::string place = fmt::format("tensor {}/{}, elements 0 to", section.name(), name);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, place,
                         read_parts(std::vector<ReadPart>{{&reader.source(section), name, 0, size,
                                                           DType::F32, out.data()}},
                                    {}));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, place,
                         reader.read(section, name, 0, size, out.data(), DType::F32));
  }
}

TEST_CASE("a shard truncated after opening is an error that names it") {
  TempDir dir;
  const SampleModel model = make_sample_model();
  const fs::path path = save(model, dir.path());
  const auto reader = CheckpointReader::open(path);
  const char* const shard = "rank-00000-of-00001.safetensors";
  fs::resize_file(path / shard, fs::file_size(path / shard) - 4);
  Share share(reader, model, 0, 1);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, shard, read_parts(share.parts, {.threads = kThreads}));
}

TEST_CASE("parts are checked before anything is read") {
  TempDir dir;
  const auto reader = CheckpointReader::open(
      save(make_sample_model(), dir.path(), {.world_size = 1, .optimizer = false}));
  float out[8];
  const TensorSource* const model = &reader.source(kModelSection);
  const auto load = [&](const ReadPart& a, const ReadPart& b = {}) {
    std::vector<ReadPart> parts{a};
    if (!b.name.empty()) parts.push_back(b);
    read_parts(parts, {});
  };
  const std::string w = "wte.weight";
  CHECK_THROWS_HOLDING(InvalidArgument, "no tensor w", load({model, "w", 0, 1, DType::F32, out}));
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no optimizer state",
                       reader.source(Section{"exp_avg"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "elements 129 to 131 are outside",
                       load({model, w, 129, 131, DType::F32, out}));
  CHECK_THROWS_HOLDING(Unsupported, "does not convert", load({model, w, 0, 1, DType::I32, out}));
  CHECK_THROWS_HOLDING(InvalidArgument, "neither memory nor a sink",
                       load({model, w, 0, 1, DType::F32}));
  CHECK_THROWS_HOLDING(InvalidArgument, "elements 0 to 4 and 3 to 5 of tensor wte.weight overlap",
                       load({model, w, 3, 5, DType::F32, out}, {model, w, 0, 4, DType::F32, out}));
  load({model, w, 2, 2, DType::F32});
}

TEST_CASE("of verified chunks, rows far apart are read without the rows between") {
  TempDir dir;
  const SampleModel model = one_large_tensor();
  const auto reader = CheckpointReader::open(
      save(model, dir.path(), {.world_size = 1, .optimizer = false, .chunk_bytes = 1 << 25}));
  const auto& tensor = model.tensors[0];
  std::vector<float> out(3UL * 4096);
  std::vector<ReadPart> parts;
  const std::int64_t rows[] = {0, 1000, 1001};
  for (std::size_t i = 0; i < 3; ++i)
    parts.push_back({&reader.source(kModelSection), tensor.name, rows[i] * 4096,
                     (rows[i] + 1) * 4096, DType::F32, out.data() + i * 4096});
  ReadOptions options;
  options.is_verified = [](const std::string&, std::size_t) { return true; };
  const ReadReport report = read_parts(parts, options);
  CHECK(report.read_bytes == 3 * 4096 * 4);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(std::equal(out.begin() + static_cast<std::ptrdiff_t>(i * 4096),
                     out.begin() + static_cast<std::ptrdiff_t>((i + 1) * 4096),
                     tensor.weight.begin() + rows[i] * 4096));
  }
}

}  // namespace
}  // namespace tessera::io
