#include "io/torch/torch_archive.h"

#include <doctest/doctest.h>

#include <vector>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/source/open_sharded.h"
#include "tests/io/dcp/bytes.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace tessera::test::pickled;

/// A torch.save archive with one tensor.
struct Saved {
  std::string dtype = "float32";  ///< of an UntypedStorage
  std::int64_t offset = 0;
  std::vector<std::int64_t> shape = {2, 3}, strides = {3, 1};
  std::string data = std::string(24, 'x');
  std::string metadata = {};  ///< of the tensor; empty: none

  /// The call that makes the tensor.
  std::string rebuilt() const {
    const auto numbers = [](const std::vector<std::int64_t>& values) {
      std::vector<std::string> items;
      for (const std::int64_t value : values) items.push_back(integer(value));
      return tuple(items);
    };
    const std::string storage =
        tuple({text("storage"), global("torch.storage", "UntypedStorage"), text("0"), text("cpu"),
               integer(static_cast<std::int64_t>(data.size()))}) +
        "Q";
    std::vector<std::string> args = {storage,
                                     integer(offset),
                                     numbers(shape),
                                     numbers(strides),
                                     "\x89",
                                     call(global("collections", "OrderedDict"), {}),
                                     global("torch", dtype)};
    if (!metadata.empty()) args.push_back(metadata);
    return call(global("torch._utils", "_rebuild_tensor_v3"), args);
  }
  std::string bytes() const { return bytes_with(rebuilt()); }
  /// An archive of another value.
  std::string bytes_with(const std::string& value) const {
    ZipFile file;
    const auto add = [&](const char* name, const std::string& content) {
      file.parts.push_back({name, content, crc32(content.data(), content.size())});
    };
    add("archive/data.pkl", program(value));
    add("archive/data/0", data);
    return file.bytes();
  }
};

TorchTensor read(const Saved& saved) {
  const std::string bytes = saved.bytes();
  return read_torch_tensor(ByteRange(bytes, "x"));
}

TEST_CASE("unsupported dtypes are carried by a supported one of the same width") {
  struct Row {
    const char* dtype;
    DType carrier;
    std::int64_t width;
  };
  for (const Row& row :
       {Row{"float32", DType::F32, 4}, Row{"uint16", DType::U16, 2}, Row{"uint32", DType::I32, 4},
        Row{"uint64", DType::I64, 8}, Row{"complex64", DType::I64, 8},
        Row{"float8_e4m3fn", DType::U8, 1}, Row{"float8_e5m2", DType::U8, 1}}) {
    CAPTURE(row.dtype);
    const TorchTensor tensor = read(
        {.dtype = row.dtype, .data = std::string(static_cast<std::size_t>(6 * row.width), 'x')});
    CHECK(tensor.dtype == row.dtype);
    CHECK(tensor.carrier == row.carrier);
    CHECK(tensor.storage_end - tensor.storage_begin == 6 * row.width);
  }
  CHECK_THROWS_HOLDING(Unsupported, "a tensor of complex128, which tessera does not read",
                       read({.dtype = "complex128", .data = std::string(96, 'x')}));
}

TEST_CASE("elements may be strided within the storage, but not exceed it") {
  CHECK(read({}).strides == Strides{3, 1});
  CHECK(read({.strides = {1, 2}}).strides == Strides{1, 2});
  CHECK(read({.shape = {0, 3}, .strides = {1, 1000}}).shape == Shape{0, 3});
  for (const auto& strides : std::vector<std::vector<std::int64_t>>{
           {1, 3}, {4, 1}, {std::int64_t{1} << 62, 1}, {1, std::int64_t{1} << 62}}) {
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "exceeds the 24 bytes of data/0",
                         read({.strides = strides}));
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "a size or stride of -1", read({.strides = {-1, 1}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "6 elements of float32 from element 1 exceed the 24",
                       read({.offset = 1, .strides = {1, 2}}));
}

TEST_CASE("lazily conjugated or negated tensors are refused") {
  CHECK(read({.metadata = "}"}).shape == Shape{2, 3});
  for (const char* bit : {"conj", "neg"}) {
    CHECK_THROWS_HOLDING(Unsupported, "save its .resolve_conj().resolve_neg()",
                         read({.metadata = dict({{text(bit), "\x88"}})}));
  }
}

// A state dict of two tensors in one storage, and a number.
std::string state_dict(const std::string& prefix = "") {
  std::vector<float> values = {0, 1, 2, 3, 4, 5};
  const Saved all{.shape = {3, 2},
                  .strides = {1, 3},
                  .data = std::string(reinterpret_cast<const char*>(values.data()), 24)};
  Saved part = all;
  part.offset = 3;
  part.shape = {2};
  part.strides = {1};
  return all.bytes_with(dict({{text(prefix + "all"), all.rebuilt()},
                              {text("step"), integer(7)},
                              {text(prefix + "part"), part.rebuilt()}}));
}

std::vector<float> values_of(const TensorSource& source, const std::string& name, std::size_t n) {
  std::vector<float> values(n);
  source.read(name, 0, static_cast<std::int64_t>(n), values.data(), DType::F32);
  return values;
}

TEST_CASE("pytorch_model.bin, whole and in several files, is a model's directory") {
  const TempDir dir;
  dir.write("pytorch_model.bin", state_dict());
  const auto source = open_sharded(dir.path());
  REQUIRE(source != nullptr);
  CHECK(values_of(*source, "all", 6) == std::vector<float>{0, 3, 1, 4, 2, 5});
  CHECK(values_of(*source, "part", 2) == std::vector<float>{3, 4});
  CHECK(source->objects() == std::vector<std::string>{"step"});

  const TempDir parts;
  parts.write("a.bin", state_dict("a."));
  parts.write("b.bin", state_dict("b."));
  const auto index = [&](const std::string& file) {
    parts.write("pytorch_model.bin.index.json",
                R"({"weight_map": {"a.all": "a.bin", "b.part": ")" + file + R"("}})");
  };
  index("b.bin");
  CHECK(values_of(*open_sharded(parts.path()), "b.part", 2) == std::vector<float>{3, 4});
  index("a.bin");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "b.part is not in a.bin", open_sharded(parts.path()));
  index("../b.bin");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "not a plain file name", open_sharded(parts.path()));
}

TEST_CASE("other contents of pytorch_model.bin are refused") {
  const TempDir dir;
  const auto refuses = [&](const std::string& content, const std::string& why) {
    dir.write("pytorch_model.bin", content);
    CHECK_THROWS_HOLDING(Unsupported, why, open_sharded(dir.path()));
  };
  refuses("\x80\x02\x8a", "PyTorch before 1.6 wrote it");
  refuses(std::string("\x40\0\0\0\0\0\0\0{\"w\": {}}", 18), "is a safetensors file under the name");
  refuses(Saved().bytes(), "expected a dict of tensors");
  refuses(Saved().bytes_with(dict({{integer(1), Saved().rebuilt()}})), "a key is an integer");
}

TEST_CASE("objects in pytorch_model.bin are left out, not executed") {
  const TempDir dir;
  dir.write(
      "pytorch_model.bin",
      Saved().bytes_with(dict({{text("a"), Saved().rebuilt()},
                               {text("x"), call(global("os", "system"), {text("exit 1")})}})));
  CHECK(open_sharded(dir.path())->objects() == std::vector<std::string>{"x"});
}

}  // namespace
}  // namespace tessera::io
