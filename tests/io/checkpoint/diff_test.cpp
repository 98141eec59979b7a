#include "io/checkpoint/diff.h"

#include <doctest/doctest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/safetensors/writer.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using Kind = TensorDifference::Kind;

std::vector<float>& weights(SampleModel& model, const std::string& name) {
  for (auto& tensor : model.tensors) {
    if (tensor.name == name) return tensor.weight;
  }
  throw std::runtime_error("no tensor " + name);
}

struct Saved {
  TempDir dir;
  CheckpointReader open(const SampleModel& model, const std::string& name,
                        const SaveOptions& options = {}) {
    return CheckpointReader::open(save(model, dir.path() / name, options));
  }
};

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST_CASE("the same content at another world size is equal, without reading data") {
  Saved saved;
  const SampleModel model = make_sample_model();
  const auto a = saved.open(model, "a", {.world_size = 4});
  const auto b = saved.open(model, "b", {.world_size = 3, .run_id = "other", .chunk_bytes = 64});
  // Damage is not detected either: verify is for that.
  const Chunk& chunk = a.tensors(kModelSection).at("wte.weight").chunks[0];
  flip_bit(a.path() / chunk.file, chunk.byte_begin);
  const DiffReport report = diff_checkpoints(a, b, {.optimizer = true});
  CHECK(report.equal());
  CHECK(report.compared == 3 * static_cast<std::int64_t>(model.tensors.size()));
  CHECK(report.bytes_read == 0);
}

TEST_CASE("differences are counted and measured") {
  Saved saved;
  SampleModel model = make_sample_model();
  const auto a = saved.open(model, "a", {.world_size = 4});
  auto& wte = weights(model, "wte.weight");
  const float at_7 = wte[7], at_100 = wte[100];
  wte[7] += 0.5F;
  wte[100] *= 3;
  wte[101] = -wte[101] * 3;  // maximum relative difference
  auto& bias = weights(model, "ln_f.bias");
  bias[2] = std::numeric_limits<float>::quiet_NaN();
  for (const int threads : {1, 4}) {
    CAPTURE(threads);
    const auto b =
        saved.open(model, "b" + std::to_string(threads), {.world_size = 3, .chunk_bytes = 64});
    std::int64_t progress = 0;
    const DiffReport report =
        diff_checkpoints(a, b, {.threads = threads, .progress = [&](auto done, auto total) {
                                  progress = done;
                                  CHECK(done <= total);
                                }});
    REQUIRE(report.differences.size() == 2);
    CHECK(report.bytes_read == 2 * 4 * (130 + 10));
    CHECK(progress == report.bytes_read);
    const TensorDifference& nan = report.differences[0];
    CHECK(nan.name == "model/ln_f.bias");
    CHECK(nan.count == 1);
    CHECK(nan.first == 2);
    CHECK(std::isinf(nan.max_absolute));
    CHECK(std::isinf(nan.max_relative));
    const TensorDifference& moved = report.differences[1];
    CHECK(moved.name == "model/wte.weight");
    CHECK(moved.kind == Kind::Values);
    CHECK(moved.elements == 130);
    CHECK(moved.count == 3);
    CHECK(moved.first == 7);
    CHECK(moved.max_element == 101);
    CHECK(moved.max_absolute == static_cast<double>(at_100 + 1) * 4);
    CHECK(moved.max_relative == doctest::Approx(4.0 / 3));
    CHECK(moved.a == static_cast<double>(at_100 + 1));

    const auto counted = [&](double absolute, double relative) {
      const DiffReport close = diff_checkpoints(a, b, {.absolute = absolute, .relative = relative});
      REQUIRE(close.differences.size() >= 1);  // the NaN always differs
      return close.differences.size() == 1 ? 0 : close.differences[1].count;
    };
    CHECK(counted(0.4, 0) == 3);
    CHECK(counted(0.5, 0) == 2);
    CHECK(counted(0, 0.5 / static_cast<double>(at_7)) == 2);
    CHECK(counted(0, 0.67) == 1);
    CHECK(counted(1e9, 0) == 0);
  }
}

TEST_CASE("exact comparison distinguishes zeros by sign, a tolerance does not") {
  TempDir dir;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto a =
      write_tensor(dir.path() / "a", DType::F32, {4}, bytes_of<float>({0.F, 1.F, nan, infinity}));
  const auto b =
      write_tensor(dir.path() / "b", DType::F32, {4}, bytes_of<float>({-0.F, 1.F, -nan, infinity}));
  const DiffReport exact = diff_checkpoints(a, b, {});
  REQUIRE(exact.differences.size() == 1);
  CHECK(exact.differences[0].count == 2);
  CHECK(exact.differences[0].max_absolute == 0);
  CHECK(exact.differences[0].max_relative == 0);
  CHECK(diff_checkpoints(a, b, {.absolute = 1e-30}).equal());
  const auto c =
      write_tensor(dir.path() / "c", DType::F32, {4}, bytes_of<float>({0.F, 1.F, nan, -infinity}));
  CHECK(diff_checkpoints(a, c, {.absolute = 1e30, .relative = 1}).differences.size() == 1);
}

TEST_CASE("every dtype is compared by value") {
  TempDir dir;
  const auto check = [&](DType dtype, const std::string& x, const std::string& y, double absolute) {
    CAPTURE(dtype_name(dtype));
    const auto a = write_tensor(dir.path() / "a", dtype, {2}, x);
    const auto b = write_tensor(dir.path() / "b", dtype, {2}, y);
    const DiffReport report = diff_checkpoints(a, b, {});
    REQUIRE(report.differences.size() == 1);
    CHECK(report.differences[0].first == 1);
    CHECK(report.differences[0].count == 1);
    CHECK(report.differences[0].max_absolute == absolute);
  };
  check(DType::F64, bytes_of<double>({1, 2}), bytes_of<double>({1, 2.5}), 0.5);
  check(DType::F32, bytes_of<float>({1, 2}), bytes_of<float>({1, 2.5}), 0.5);
  check(DType::BF16, bytes_of<std::uint16_t>({0x3f80, 0x4000}),
        bytes_of<std::uint16_t>({0x3f80, 0x3f80}), 1);
  check(DType::F16, bytes_of<std::uint16_t>({0x3c00, 0x4000}),
        bytes_of<std::uint16_t>({0x3c00, 0x3c00}), 1);
  check(DType::I64, bytes_of<std::int64_t>({1, -7}), bytes_of<std::int64_t>({1, 7}), 14);
  check(DType::I32, bytes_of<std::int32_t>({1, -7}), bytes_of<std::int32_t>({1, 7}), 14);
  check(DType::I16, bytes_of<std::int16_t>({1, -7}), bytes_of<std::int16_t>({1, 7}), 14);
  check(DType::I8, bytes_of<std::int8_t>({1, -7}), bytes_of<std::int8_t>({1, 7}), 14);
  check(DType::U16, bytes_of<std::uint16_t>({1, 65535}), bytes_of<std::uint16_t>({1, 0}), 65535);
  check(DType::U8, bytes_of<std::uint8_t>({1, 255}), bytes_of<std::uint8_t>({1, 0}), 255);
  check(DType::Bool, bytes_of<std::uint8_t>({1, 1}), bytes_of<std::uint8_t>({1, 0}), 1);
}

TEST_CASE("boxed tensors are compared with whole ones") {
  TempDir dir;
  std::vector<float> values(6 * 5);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const auto a = write_tensor(dir.path() / "a", DType::F32, {6, 5}, bytes_of(values));
  const auto b = write_tensor(dir.path() / "b", DType::F32, {6, 5}, bytes_of(values), true);
  CHECK(diff_checkpoints(a, b, {}).equal());
  CHECK(diff_checkpoints(b, a, {}).bytes_read == 240);
  values[13] += 1;
  const auto c = write_tensor(dir.path() / "c", DType::F32, {6, 5}, bytes_of(values), true);
  REQUIRE(diff_checkpoints(b, c, {}).differences.size() == 1);
  CHECK(diff_checkpoints(b, c, {}).differences[0].first == 13);
}

TEST_CASE("missing tensors, and different shapes, dtypes and settings") {
  TempDir dir;
  const auto f32 = write_tensor(dir.path() / "f32", DType::F32, {2}, bytes_of<float>({1, 2}));
  const auto bf16 = write_tensor(dir.path() / "bf16", DType::BF16, {2},
                                 bytes_of<std::uint16_t>({0x3f80, 0x3f80}));
  const auto tall = write_tensor(dir.path() / "tall", DType::F32, {2, 1}, bytes_of<float>({1, 2}));
  DiffReport report = diff_checkpoints(f32, bf16, {});
  REQUIRE(report.differences.size() == 1);
  CHECK(report.differences[0].kind == Kind::Dtype);
  CHECK(report.differences[0].count == 1);
  CHECK(report.differences[0].max_absolute == 1);
  report = diff_checkpoints(f32, tall, {});
  REQUIRE(report.differences.size() == 1);
  CHECK(report.differences[0].kind == Kind::Shape);
  CHECK(report.differences[0].shape_b == Shape{2, 1});

  SampleModel model = make_sample_model();
  Saved saved;
  const auto a = saved.open(model, "a");
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no optimizer state",
                       diff_checkpoints(a, f32, {.optimizer = true}));
  Json config = Json::parse(model.config);
  config["dropout"] = 0.1;
  config["layer_norm_eps"] = 1e-6;
  config.erase("n_head");
  model.config = config.dump();
  model.tensors.pop_back();
  model.tensors[0].name = "renamed";
  const auto b = saved.open(model, "b");
  report = diff_checkpoints(a, b, {});
  REQUIRE(report.settings.size() == 3);
  CHECK(report.settings[0].key == "dropout");
  CHECK(report.settings[1].b == "1e-06");
  CHECK(report.settings[2].key == "n_head");
  CHECK(report.settings[2].b == "");
  REQUIRE(report.differences.size() == 3);
  CHECK(report.differences[0].kind == Kind::OnlyInA);
  CHECK(report.differences[0].name == "model/ln_f.bias");
  CHECK(report.differences[1].kind == Kind::OnlyInB);
  CHECK(report.differences[1].name == "model/renamed");
  CHECK(report.differences[2].name == "model/wte.weight");
}

TEST_CASE("damage is an error, not a difference") {
  Saved saved;
  SampleModel model = make_sample_model();
  const auto a = saved.open(model, "a", {.world_size = 2});
  weights(model, "wte.weight")[3] = 1;
  const auto b = saved.open(model, "b", {.world_size = 3});
  const Chunk& chunk = b.tensors(kModelSection).at("wte.weight").chunks.back();
  flip_bit(b.path() / chunk.file, chunk.byte_begin);
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       fmt::format("{}: tensor model/wte.weight, elements {} to {} (bytes",
                                   chunk.file, chunk.begin, chunk.end),
                       diff_checkpoints(a, b, {}));
}

}  // namespace
}  // namespace tessera::io
