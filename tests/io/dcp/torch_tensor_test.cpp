#include "io/dcp/torch_tensor.h"

#include <doctest/doctest.h>

#include <vector>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "tests/io/dcp/bytes.h"
#include "tests/support/check_throws.h"

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

  std::string bytes() const {
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
    ZipFile file;
    const auto add = [&](const char* name, const std::string& content) {
      file.parts.push_back({name, content, crc32(content.data(), content.size())});
    };
    add("archive/data.pkl", program(call(global("torch._utils", "_rebuild_tensor_v3"), args)));
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

}  // namespace
}  // namespace tessera::io
