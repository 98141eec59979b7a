#include "io/pump/strided.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "tests/io/support.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

/// A file of consecutive 32-bit numbers from byte 12 on.
struct Numbers {
  TempDir dir;
  File file;
  explicit Numbers(std::uint32_t n) {
    std::string bytes(12, '?');
    for (std::uint32_t i = 0; i < n; ++i) {
      bytes.append(reinterpret_cast<const char*>(&i), sizeof(i));
    }
    write_text(dir.path() / "numbers", bytes);
    file = File::open(dir.path() / "numbers");
  }
  std::vector<std::uint32_t> read(const Shape& shape, const Strides& strides, std::int64_t first,
                                  std::int64_t last) const {
    std::vector<std::uint32_t> found(static_cast<std::size_t>(last - first) + 1, 77);
    const auto read_file = [&](std::int64_t offset, char* out, std::size_t bytes) {
      file.read(offset, out, bytes);
    };
    read_strided(read_file, {12, 4, shape, strides}, first, last,
                 reinterpret_cast<char*>(found.data()));
    CHECK(found.back() == 77);  // nothing is written beyond the range
    found.pop_back();
    return found;
  }
};

/// Reference: one element after the other.
std::vector<std::uint32_t> expected(const Shape& shape, const Strides& strides, std::int64_t first,
                                    std::int64_t last) {
  std::vector<std::uint32_t> values;
  for (std::int64_t i = first; i < last; ++i) {
    std::int64_t rest = i, at = 0;
    for (int d = shape.size() - 1; d >= 0; --d) {
      at += rest % shape[d] * strides[d];
      rest /= shape[d];
    }
    values.push_back(static_cast<std::uint32_t>(at));
  }
  return values;
}

struct Layout {
  Shape shape;
  Strides strides;
};

TEST_CASE("every range of a strided block is read in row-major order") {
  const Numbers numbers(400);
  for (const Layout& layout :
       {Layout{{}, {}}, Layout{{7}, {1}}, Layout{{7}, {5}}, Layout{{4, 5}, {5, 1}},
        Layout{{4, 5}, {1, 4}}, Layout{{2, 3, 4}, {1, 2, 6}}, Layout{{3, 1, 4, 2}, {2, 9, 6, 1}},
        Layout{{3, 4}, {0, 1}}, Layout{{2, 3, 3}, {30, 2, 100}}}) {
    const Shape& shape = layout.shape;
    const Strides& strides = layout.strides;
    CAPTURE(shape);
    CAPTURE(strides);
    for (std::int64_t first = 0; first <= numel(shape); ++first) {
      for (std::int64_t last = first; last <= numel(shape); ++last) {
        CHECK(numbers.read(shape, strides, first, last) == expected(shape, strides, first, last));
      }
    }
  }
}

TEST_CASE("strided blocks larger than one read") {
  const Numbers numbers(1'500'000);
  std::mt19937 random(5);
  for (const Layout& layout : {Layout{{1500, 1000}, {1, 1500}},        // transposed
                               Layout{{3, 500'000}, {1, 3}},           // rows longer than a window
                               Layout{{500'000, 3}, {1, 500'000}},     //
                               Layout{{100, 50, 300}, {50, 1, 5000}},  // permuted
                               Layout{{100, 50, 300}, {1, 30'000, 100}},
                               Layout{{50, 2, 10}, {20'000, 10'000, 5}}}) {  // with gaps
    const Shape& shape = layout.shape;
    const Strides& strides = layout.strides;
    CAPTURE(shape);
    CAPTURE(strides);
    const std::int64_t n = numel(shape);
    CHECK(numbers.read(shape, strides, 0, n) == expected(shape, strides, 0, n));
    for (int i = 0; i < 5; ++i) {
      const auto first = static_cast<std::int64_t>(random()) % n;
      const auto last = first + static_cast<std::int64_t>(random()) % (n - first);
      CHECK(numbers.read(shape, strides, first, last) == expected(shape, strides, first, last));
    }
  }
}

}  // namespace
}  // namespace tessera::io
