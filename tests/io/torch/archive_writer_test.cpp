#include "io/torch/archive_writer.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <limits>

#include "core/base/error.h"
#include "io/pickle/pickle_writer.h"
#include "io/zip/zip.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

TEST_CASE("a pickle has the values that were written") {
  PickleWriter writer;
  const std::vector<std::int64_t> numbers{0,
                                          255,
                                          256,
                                          -1,
                                          std::numeric_limits<std::int32_t>::min(),
                                          std::int64_t{1} << 31,
                                          std::numeric_limits<std::int64_t>::min(),
                                          std::numeric_limits<std::int64_t>::max()};
  writer.begin_dict();
  writer.text("numbers");
  writer.begin_list();
  for (const std::int64_t number : numbers) writer.integer(number);
  writer.end_list();
  writer.text("others");
  writer.begin_tuple();
  writer.none();
  writer.boolean(true);
  writer.real(-0.5);
  writer.end_tuple();
  writer.text("texts");  // more than fit in short memo indices, each twice
  writer.begin_list();
  for (int i = 0; i < 600; ++i) writer.text(std::to_string(i % 300));
  writer.end_list();
  writer.end_dict();
  const std::string text = writer.finish();
  CHECK(text.find(std::string("G\xbf\xe0\0\0\0\0\0\0", 9)) != std::string::npos);
  const Pickle pickle(text, {}, "x");
  const auto found = pickle.root().find("numbers")->items();
  REQUIRE(found.size() == numbers.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) CHECK(found[i]->integer == numbers[i]);
  const auto others = pickle.root().find("others")->items();
  CHECK(others[0]->is(PickleKind::None));
  CHECK(others[1]->integer == 1);
  CHECK(others[2]->is(PickleKind::Float));
  const auto texts = pickle.root().find("texts")->items();
  REQUIRE(texts.size() == 600);
  for (int i = 0; i < 600; ++i)
    CHECK(texts[static_cast<std::size_t>(i)]->text() == std::to_string(i % 300));
}

TEST_CASE("an archive of over 4 GiB has sizes and offsets of 64 bits") {
  constexpr std::int64_t kLarge = (std::int64_t{5} << 30) + 3, kBegin = 640;
  PickleWriter pickle;
  const TorchDType& dtype = torch_from_safetensors("U8");
  pickle.begin_list();
  pickle_tensor(pickle, dtype, 1, {kLarge}, 0);
  pickle_tensor(pickle, dtype, 1, {5}, 1);
  pickle_tensor(pickle, torch_from_safetensors("F8_E4M3"), 1, {0, 4}, 2);
  pickle.end_list();
  ZipWriter zip = plan_torch_archive(kBegin, pickle.finish(), {{kLarge}, {5, "12345"}, {0}});
  REQUIRE(zip.data().size() == 1);
  CHECK((zip.data()[0].begin - kBegin) % 64 == 0);

  TempDir dir;
  File out = File::create(dir.path() / "x");
  for (const Literal& literal : zip.take_literals())
    out.write_at(literal.offset, literal.bytes.data(), literal.bytes.size());
  REQUIRE(::ftruncate(out.descriptor(), zip.end()) == 0);
  const std::uint32_t sum = 0x01020304;
  for (const std::int64_t at : zip.data()[0].crc32_at) out.write_at(at, &sum, sizeof(sum));

  const File file = File::open(dir.path() / "x");
  const ByteRange range(file, kBegin, zip.end() - kBegin);
  const TorchArchive archive(range, 1000);
  const auto items = archive.root().items();
  const TorchTensor large = archive.tensor(*items[0], "large");
  CHECK(large.shape == Shape{kLarge});
  CHECK(large.begin + kBegin == zip.data()[0].begin);
  CHECK(large.crc32 == sum);
  const TorchTensor small = archive.tensor(*items[1], "small");
  CHECK(small.begin > kLarge);
  CHECK(range.read(small.begin, 5) == "12345");
  CHECK(archive.tensor(*items[2], "none").dtype == "float8_e4m3fn");
  // The checksum behind the data, as in the directory.
  std::uint32_t behind = 0;
  file.read(zip.data()[0].begin + kLarge + 4, &behind, sizeof(behind));
  CHECK(behind == sum);
  CHECK_FALSE(is_torch_of_export(dir.path() / "x"));  // begins with zeros
}

}  // namespace
}  // namespace tessera::io
