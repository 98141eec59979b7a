#include "kernels/bit_hash.h"

#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

using kernels::bit_hash;

std::uint64_t hash_of(Context& context, const Buffer& x, std::uint64_t first = 0) {
  const Buffer hash(DType::I64, {1});
  bit_hash(context, {x.view(), hash.view(), first});
  std::uint64_t value = 0;
  std::memcpy(&value, hash.bytes().data(), sizeof(value));
  return value;
}

TEST_CASE("bit_hash sums the mixed words of a tensor") {
  for_each_context([](Context& context) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const std::int64_t n : kOddLengths) {
        const Buffer x(dtype, {n}, Buffer::normal(n, 3));
        std::vector<char> bytes = x.bytes();
        bytes.resize((bytes.size() + 7) / 8 * 8);
        std::uint64_t expected = 0;
        for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
          std::uint64_t word = 0;
          std::memcpy(&word, bytes.data() + 8 * i, 8);
          expected += kernels::mix_bits(word, 5 + i);
        }
        CHECK(hash_of(context, x, 5) == expected);
        const Buffer twice(DType::I64, {1});
        bit_hash(context, {x.view(), twice.view(), 5});
        bit_hash(context, {x.view(), twice.view(), 5, true});
        std::uint64_t sum = 0;
        std::memcpy(&sum, twice.bytes().data(), sizeof(sum));
        CHECK(sum == 2 * expected);
      }
    }
  });
}

TEST_CASE("bit_hash notices a swap, the sign of zero, and the last bit") {
  const auto context = Context::create();
  const Buffer x(DType::F32, {4}, {1, 2, 0, 4}), swapped(DType::F32, {4}, {2, 1, 0, 4}),
      negative(DType::F32, {4}, {1, 2, -0.0, 4}), next(DType::F32, {4}, {1, 2, 0, 4.0000005});
  for (const Buffer* other : {&swapped, &negative, &next})
    CHECK(hash_of(*context, *other) != hash_of(*context, x));
}

TEST_CASE("bit_hash reads words from addresses that are multiples of 4, and refuses others") {
  for_each_context([](Context& context) {
    const Buffer x(DType::F32, {1001}, Buffer::normal(1001, 1)), hash(DType::I64, {1});
    auto values = x.values();
    values.erase(values.begin());
    const Buffer aligned(DType::F32, {1000}, values);
    bit_hash(context, {x.view().narrow(0, 1, 1000), hash.view()});
    std::uint64_t got = 0;
    std::memcpy(&got, hash.bytes().data(), sizeof(got));
    CHECK(got == hash_of(context, aligned));
  });
  const auto context = Context::create();
  const Buffer half(DType::BF16, {4}), hash(DType::I64, {1});
  CHECK_THROWS_WITH_AS(bit_hash(*context, {half.view().narrow(0, 1, 2), hash.view()}),
                       "bit_hash: x must be aligned to 4 bytes", InvalidArgument);
}

}  // namespace
}  // namespace tessera::test
