#include "io/consolidate/copy_files.h"

#include <doctest/doctest.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/crc.h"
#include "io/pump/box.h"
#include "io/pump/chunk_sums.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

/// Tensors cut into boxes, one file per tensor.
class BoxedSource : public TensorSource {
 public:
  explicit BoxedSource(fs::path dir, Checksum checksum = Checksum::Crc64)
      : dir_(std::move(dir)), checksum_(checksum) {
    fs::create_directories(dir_);
  }

  /// @param cuts  number of parts along each dim (the last ones may be smaller)
  void add(const std::string& name, const Shape& shape, DType dtype, std::vector<std::int64_t> cuts,
           std::size_t header = 0) {
    const auto size = static_cast<std::size_t>(numel(shape));
    std::string data(size * dtype_size(dtype), '\0');
    std::vector<float> values(size);
    for (float& value : values) value = static_cast<float>(random_() % 100'000) / 64;
    if (dtype == DType::F32 || dtype == DType::BF16) {
      convert_elements(DType::F32, values.data(), dtype, data.data(), numel(shape));
    } else {
      for (char& c : data) c = static_cast<char>(random_());
    }
    TensorRecord layout{dtype, shape, {}};
    std::string file(header, '#');
    Shape part, index;
    for (int i = 0; i < shape.size(); ++i) {
      const std::int64_t n = cuts[static_cast<std::size_t>(i)];
      part.push_back((shape[i] + n - 1) / n);
      index.push_back(0);
    }
    for (bool more = true; more;) {
      Chunk chunk;
      chunk.file = name + ".bin";
      chunk.box = Box{};
      for (int i = 0; i < shape.size(); ++i) {
        const std::int64_t offset = index[i] * part[i];
        chunk.box->offsets.push_back(offset);
        chunk.box->shape.push_back(std::min(part[i], shape[i] - offset));
      }
      chunk.end = numel(chunk.box->shape);
      chunk.byte_begin = static_cast<std::int64_t>(file.size());
      for_each_run(chunk, shape, 0, numel(shape), [&](const ChunkRun& run) {
        const std::size_t width = dtype_size(dtype);
        file.append(data, static_cast<std::size_t>(run.in_tensor) * width,
                    static_cast<std::size_t>(run.n) * width);
      });
      chunk.byte_end = static_cast<std::int64_t>(file.size());
      const auto begin = static_cast<std::size_t>(chunk.byte_begin);
      chunk.checksum = checksum_;
      chunk.crc64 = checksum_of(checksum_, file.data() + begin, file.size() - begin);
      layout.chunks.push_back(chunk);
      more = false;
      for (int i = shape.size() - 1; i >= 0 && !more; --i) {
        more = ++index[i] * part[i] < shape[i];
        if (!more) index[i] = 0;
      }
    }
    write_text(dir_ / (name + ".bin"), file);
    tensors_.push_back({name, shape, dtype});
    layouts_[name] = layout;
    contents_[name] = data;
  }

  /// Cuts a single-box tensor into chunks of so many elements, as in checkpoints.
  void cut(const std::string& name, std::int64_t elements) {
    auto& chunks = layouts_.at(name).chunks;
    const Chunk whole = std::move(chunks.at(0));
    chunks.clear();
    const std::string& data = contents_.at(name);
    const std::int64_t width = (whole.byte_end - whole.byte_begin) / whole.end;
    for (std::int64_t begin = 0; begin < whole.end; begin += elements) {
      Chunk& chunk = chunks.emplace_back(whole);
      chunk.box.reset();
      chunk.begin = begin;
      chunk.end = std::min(begin + elements, whole.end);
      chunk.byte_begin = whole.byte_begin + chunk.begin * width;
      chunk.byte_end = whole.byte_begin + chunk.end * width;
      chunk.crc64 = crc64(data.data() + chunk.begin * width,
                          static_cast<std::size_t>(chunk.byte_end - chunk.byte_begin));
    }
  }

  const std::string& content(const std::string& name) const { return contents_.at(name); }
  std::vector<ExportTensor> exports(std::optional<DType> dtype = {}) const {
    std::vector<ExportTensor> all;
    for (const TensorInfo& info : tensors_) {
      const bool converts = dtype && can_convert(info.dtype, *dtype);
      all.push_back(
          {info.name, info.shape, info.dtype, converts ? *dtype : info.dtype, this, info.name});
    }
    return all;
  }

  const fs::path& path() const override { return dir_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    return std::make_shared<const TensorRecord>(layouts_.at(name));
  }
  File open_file(const std::string& name) const override {
    ++opened;
    return File::open(dir_ / name);
  }
  mutable std::atomic<int> opened = 0;

 private:
  fs::path dir_;
  Checksum checksum_;
  std::mt19937 random_{7};
  std::vector<TensorInfo> tensors_;
  std::map<std::string, TensorRecord> layouts_;
  std::map<std::string, std::string> contents_;
};

struct Fixture {
  TempDir dir;
  fs::path out = dir.path() / "out";
  BoxedSource source{dir.path() / "source"};
  WriteOptions options{.memory = 128 << 10, .jobs = 1};  // 64 KiB blocks

  void add_all() {
    source.add("rows", {300, 500}, DType::F32, {3, 1}, 8);
    source.add("columns", {300, 500}, DType::F32, {1, 3}, 3);
    source.add("blocks", {7, 60, 100}, DType::F32, {2, 3, 4}, 1);
    source.add("runs", {101, 997}, DType::F32, {1, 1}, 4);
    source.cut("runs", 7'000);
    source.add("halves", {90'001}, DType::BF16, {2});
    source.add("bytes", {3, 1001}, DType::U8, {2, 5}, 5);
    source.add("longs", {10'000}, DType::I64, {1});
    source.add("one", {}, DType::F32, {});
    source.add("none", {0, 4}, DType::F32, {1, 1});
  }
  void check(const fs::path& path, std::optional<DType> dtype = {}) const {
    const SafetensorsReader reader(path);
    for (const ExportTensor& tensor : source.exports(dtype)) {
      INFO(tensor.name);
      std::string expected(static_cast<std::size_t>(tensor.bytes()), '\0'), found = expected;
      convert_elements(tensor.stored, source.content(tensor.name).data(), tensor.written,
                       expected.data(), numel(tensor.shape));
      const SafetensorsEntry* entry = reader.find(tensor.name);
      REQUIRE(entry != nullptr);
      reader.file().read(entry->begin, found.data(), found.size());
      CHECK(found == expected);
    }
  }
  std::uint64_t identity(const std::vector<ExportFile>& files) const {
    return copy_identity(files);
  }
};

TEST_CASE_FIXTURE(Fixture,
                  "boxes of any shape are assembled to whole tensors, in the requested dtype") {
  add_all();
  for (const bool direct : {true, false}) {
    for (const int jobs : {1, 4}) {
      for (const std::optional<DType> dtype :
           {std::optional<DType>(), std::optional(DType::BF16), std::optional(DType::F32)}) {
        options = {.memory = jobs * (128 << 10), .jobs = jobs, .direct_io = direct};
        const auto tensors = source.exports(dtype);
        const auto files = plan_tensor_files(tensors, "model", 1 << 30);
        Attempt attempt(out, identity(files));
        std::int64_t bytes = 0;
        CHECK(copy_files(attempt, files, options, [&](std::int64_t n, bool reused) {
          CHECK_FALSE(reused);
          bytes += n;
          return true;
        }));
        CHECK(bytes == files[0].size);
        check(attempt.dir() / "model.safetensors", dtype);
        attempt.remove();
      }
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "a flipped bit anywhere in the data is detected and named") {
  add_all();
  const auto tensors = source.exports(DType::BF16);
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  for (const ExportTensor& tensor : tensors) {
    const auto chunks = source.record(tensor.name)->chunks;
    const Chunk& chunk = chunks.back();
    if (chunk.byte_begin == chunk.byte_end) continue;
    for (const std::int64_t at : {chunk.byte_begin, chunk.byte_end - 1}) {
      flip_bit(source.path() / chunk.file, at);
      Attempt attempt(out, identity(files));
      CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor " + tensor.name + ", elements",
                           copy_files(attempt, files, options, nullptr));
      attempt.remove();
      flip_bit(source.path() / chunk.file, at);
    }
  }
  Attempt attempt(out, identity(files));
  CHECK(copy_files(attempt, files, options, nullptr));
}

TEST_CASE_FIXTURE(Fixture, "zip checksums are verified like tessera's") {
  BoxedSource zipped(dir.path() / "zipped", Checksum::Crc32);
  zipped.add("t", {300, 500}, DType::F32, {2, 3}, 1);
  const auto tensors = zipped.exports();
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  for (const bool damaged : {false, true}) {
    if (damaged) flip_bit(zipped.path() / "t.bin", 300'001);
    Attempt attempt(out, identity(files));
    if (damaged) {
      CHECK_THROWS_HOLDING(CorruptCheckpoint, "the checksum is wrong",
                           copy_files(attempt, files, options, nullptr));
    } else {
      CHECK(copy_files(attempt, files, options, nullptr));
    }
    attempt.remove();
  }
}

TEST_CASE_FIXTURE(Fixture, "a stopped or killed copy resumes at the first unfinished file") {
  add_all();
  const auto tensors = source.exports(DType::BF16);
  const auto files = plan_tensor_files(tensors, "model", 100'000);
  REQUIRE(files.size() > 4);
  std::int64_t total = 0, reused = 0;
  for (const ExportFile& file : files) total += file.size;
  for (int round = 0; reused < total / 2; ++round) {
    REQUIRE(round < 20);
    const bool kill = round % 2 == 1;
    const int status = in_child([&] {
      Attempt attempt(out, identity(files));
      std::int64_t made = 0;
      const bool whole = copy_files(attempt, files, options, [&](std::int64_t bytes, bool found) {
        if (!found) made += bytes;
        if (made > 450'000 && kill) ::raise(SIGKILL);
        return made <= 450'000;
      });
      return whole ? 1 : 0;
    });
    CHECK(WIFSIGNALED(status) == kill);
    Attempt attempt(out, identity(files));
    std::int64_t found = 0;
    CHECK_FALSE(copy_files(attempt, files, options, [&](std::int64_t bytes, bool was_there) {
      if (was_there) found += bytes;
      return was_there;
    }));
    CHECK(found >= reused);
    reused = found;
  }
  Attempt attempt(out, identity(files)), fresh(dir.path() / "fresh", identity(files));
  CHECK(copy_files(attempt, files, options, nullptr));
  CHECK(copy_files(fresh, files, options, nullptr));
  for (const ExportFile& file : files) {
    CHECK(read_text(fresh.dir() / file.name) == read_text(attempt.dir() / file.name));
  }
}

TEST_CASE_FIXTURE(Fixture, "files of a former attempt are verified before reuse") {
  add_all();
  const auto tensors = source.exports();
  const auto files = plan_tensor_files(tensors, "model", 600'000);
  REQUIRE(files.size() >= 3);
  std::int64_t total = 0;
  for (const ExportFile& file : files) total += file.size;
  const auto run = [&] {
    Attempt attempt(out, identity(files));
    std::int64_t reused = 0;
    CHECK(copy_files(attempt, files, options, [&](std::int64_t bytes, bool was_there) {
      reused += was_there ? bytes : 0;
      return true;
    }));
    return reused;
  };
  CHECK(run() == 0);
  CHECK(run() == total);
  const fs::path written = dir.path() / "out.tmp" / files[1].name;
  const std::string right = read_text(written);
  const std::int64_t size = files[1].size;
  for (const std::int64_t at : {std::int64_t{0}, size / 2, size - 1}) {
    flip_bit(written, at);
    CHECK(run() == total - size);
    CHECK(read_text(written) == right);
  }
  fs::resize_file(written, 100);
  CHECK(run() == total - size);
  fs::remove(written);
  CHECK(run() == total - size);
  fs::remove(written);
  fs::create_directory_symlink("..", written);
  CHECK(run() == total - size);
  CHECK(read_text(written) == right);
  write_text(dir.path() / "out.tmp" / "config.json", "{}");
  CHECK(run() == total);
  CHECK_FALSE(fs::exists(dir.path() / "out.tmp" / "config.json"));
}

TEST_CASE_FIXTURE(Fixture, "the identity covers everything that affects the output") {
  source.add("t", {100, 100}, DType::F32, {2, 2});
  const auto tensors = source.exports();
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  const std::uint64_t same = copy_identity(files);
  CHECK(copy_identity(files) == same);
  CHECK(copy_identity(plan_tensor_files(tensors, "optimizer", 1 << 30)) != same);
  CHECK(copy_identity(plan_tensor_files(tensors, "model", 1 << 30, {{"a", "b"}})) != same);
  const auto converted = source.exports(DType::BF16);
  CHECK(copy_identity(plan_tensor_files(converted, "model", 1 << 30)) != same);
  auto swapped = source.exports();
  std::set<std::uint64_t> identities{same};
  for (const std::int64_t rows : {2, 4, 100}) {
    swapped[0].swap = Swap{rows, 100 / rows, 100};
    CHECK(identities.insert(copy_identity(plan_tensor_files(swapped, "model", 1 << 30))).second);
  }

  BoxedSource other(dir.path() / "elsewhere");
  other.add("t", {100, 100}, DType::F32, {2, 2});
  const auto moved = other.exports();
  CHECK(copy_identity(plan_tensor_files(moved, "model", 1 << 30)) == same);  // a copy of the source
  BoxedSource differs(dir.path() / "differs");
  differs.add("u", {10}, DType::F32, {1});
  differs.add("t", {100, 100}, DType::F32, {2, 2});
  auto changed = differs.exports();
  changed.erase(changed.begin());
  CHECK(copy_identity(plan_tensor_files(changed, "model", 1 << 30)) != same);

  // Without checksums, a new modification time counts as a change.
  BoxedSource plain(dir.path() / "plain", Checksum::None);
  plain.add("t", {100, 100}, DType::F32, {2, 2});
  const auto unchecked = plain.exports();
  const auto plain_files = plan_tensor_files(unchecked, "model", 1 << 30);
  const std::uint64_t before = copy_identity(plain_files);
  CHECK(copy_identity(plain_files) == before);
  fs::last_write_time(plain.path() / "t.bin",
                      fs::last_write_time(plain.path() / "t.bin") + std::chrono::seconds(1));
  CHECK(copy_identity(plain_files) != before);
}

TEST_CASE_FIXTURE(Fixture, "chunks that leave a gap are an error, not stale memory") {
  source.add("t", {1000}, DType::F32, {4});
  class Gap : public BoxedSource {
   public:
    using BoxedSource::BoxedSource;
    std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
      TensorRecord all = *BoxedSource::record(name);
      all.chunks.erase(all.chunks.begin() + 1);
      return std::make_shared<const TensorRecord>(all);
    }
  } gap(dir.path() / "gap");
  gap.add("t", {1000}, DType::F32, {4});
  const auto tensors = gap.exports();
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  Attempt attempt(out, identity(files));
  CHECK_THROWS_HOLDING(InternalError, "do not cover", copy_files(attempt, files, options, nullptr));
}

}  // namespace
}  // namespace tessera::io
