#include "io/consolidate/copy_files.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <random>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/crc64.h"
#include "io/base/direct_file.h"
#include "io/checkpoint/box.h"
#include "io/safetensors/reader.h"
#include "io/zip/crc32.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

/// Tensors cut into boxes, one after the other in one file each.
class BoxedSource : public TensorSource {
 public:
  explicit BoxedSource(fs::path dir, bool checksums = true, bool is_crc32 = false)
      : dir_(std::move(dir)), checksums_(checksums), is_crc32_(is_crc32) {
    fs::create_directories(dir_);
  }

  /// @param cuts  for each dim, into how many parts it is cut (the last ones may be smaller)
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
    TensorLayout layout{{}, checksums_, is_crc32_};
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
      chunk.crc64 = is_crc32_ ? crc32(file.data() + begin, file.size() - begin)
                              : crc64(file.data() + begin, file.size() - begin);
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

  /// Cuts a tensor that lies in one box into chunks of so many elements, as checkpoints have them.
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
  void read(const std::string&, std::int64_t, std::int64_t, void*, DType) const override {
    throw InternalError("ranges of bytes are known");
  }
  void stream(const std::string&, std::size_t, const Sink&) const override {
    throw InternalError("ranges of bytes are known");
  }
  std::optional<TensorLayout> layout(const std::string& name) const override {
    return layouts_.at(name);
  }
  File open_file(const std::string& name) const override {
    ++opened;
    return File::open(dir_ / name);
  }
  mutable std::atomic<int> opened = 0;

 private:
  fs::path dir_;
  bool checksums_, is_crc32_;
  std::mt19937 random_{7};
  std::vector<TensorInfo> tensors_;
  std::map<std::string, TensorLayout> layouts_;
  std::map<std::string, std::string> contents_;
};

struct Fixture {
  TempDir dir;
  fs::path out = dir.path() / "out";
  BoxedSource source{dir.path() / "source"};
  CopyOptions options{.memory = 128 << 10, .jobs = 1};  // blocks of 64 KiB

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
      const SafetensorsEntry* entry = reader.header().find(tensor.name);
      REQUIRE(entry != nullptr);
      reader.file().read(entry->begin, found.data(), found.size());
      CHECK(found == expected);
    }
  }
  std::uint64_t identity(const std::vector<ExportFile>& files) const {
    return copy_identity(files, copy_grain(options).block);
  }
};

TEST_CASE_FIXTURE(Fixture, "boxes of any shape become whole tensors, in the dtype asked for") {
  add_all();
  for (const bool direct : {true, false}) {
    for (const auto& [jobs, by] : std::vector<std::pair<int, CopyBy>>{
             {1, CopyBy::Program}, {4, CopyBy::Program}, {4, CopyBy::System}}) {
      for (const std::optional<DType> dtype :
           {std::optional<DType>(), std::optional(DType::BF16), std::optional(DType::F32)}) {
        options = {.memory = jobs * ((by == CopyBy::System ? 512 : 128) << 10),
                   .jobs = jobs,
                   .direct_io = direct,
                   .by = by};
        const auto tensors = source.exports(dtype);
        const auto files = plan_tensor_files(tensors, "model", 1 << 30);
        Attempt attempt(out, identity(files));
        std::int64_t bytes = 0;
        const CopyResult result =
            copy_files(attempt, files, options, [&](std::int64_t n, bool reused) {
              CHECK_FALSE(reused);
              bytes += n;
              return true;
            });
        CHECK(result.complete);
        CHECK((result.system_copied > 0) == (options.by == CopyBy::System && dtype != DType::BF16));
        CHECK(bytes == files[0].plan.file_size);
        check(attempt.dir() / "model.safetensors", dtype);
        attempt.remove();
      }
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "a flipped bit anywhere in the data is found, and named") {
  add_all();
  const auto tensors = source.exports(DType::BF16);
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  for (const ExportTensor& tensor : tensors) {
    const auto chunks = source.layout(tensor.name)->chunks;
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
  CHECK(copy_files(attempt, files, options, nullptr).complete);
}

TEST_CASE_FIXTURE(Fixture,
                  "what the system copies is verified; what it cannot, the program copies") {
  options = {.memory = 1 << 20, .jobs = 1, .by = CopyBy::System};
  const TempDir memory{TempDir::in_memory()};
  BoxedSource elsewhere(memory.path() / "source");
  const auto device_of = [](const fs::path& path) {
    struct stat about {};
    REQUIRE(::stat(path.c_str(), &about) == 0);
    return about.st_dev;
  };
  for (BoxedSource* from : {&source, &elsewhere}) {
    from->add("runs", {101, 997}, DType::F32, {1, 1}, 4);
    from->cut("runs", 7'000);
    const auto tensors = from->exports();
    const auto files = plan_tensor_files(tensors, "model", 1 << 30);
    Attempt attempt(out, identity(files));
    const CopyResult result = copy_files(attempt, files, options, nullptr);
    CHECK(result.complete);
    // Not from one kind of file system to another.
    const bool same = device_of(from->path()) == device_of(attempt.dir());
    CHECK((result.system_copied > 300'000) == same);
    const SafetensorsReader reader(attempt.dir() / "model.safetensors");
    const SafetensorsEntry& entry = reader.header().tensors.at(0);
    std::string data(static_cast<std::size_t>(entry.end - entry.begin), '\0');
    reader.file().read(entry.begin, data.data(), data.size());
    CHECK(data == from->content("runs"));
    attempt.remove();
  }
  const auto tensors = source.exports();
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  {
    // By itself, only while it is not this machine that copies.
    options = {.memory = 128 << 10, .jobs = 1, .by = CopyBy::Auto};
    Attempt attempt(out, identity(files));
    const CopyResult result = copy_files(attempt, files, options, nullptr);
    CHECK(result.complete);
    CHECK(result.system_copied > 0);
    const DirectFile written(File::open(attempt.dir() / "model.safetensors"));
    AlignedBuffer buffer(4096);
    written.file().read(0, buffer.data(), 4096);
    if (written.is_cached(0, 4096)) CHECK(result.system_copied <= 65536);
    attempt.remove();
  }
  {
    // Nothing would verify what it copies.
    options.by = CopyBy::System;
    BoxedSource unchecked(dir.path() / "unchecked", false);
    unchecked.add("runs", {101, 997}, DType::F32, {1, 1});
    unchecked.cut("runs", 101 * 997);
    const auto exports = unchecked.exports();
    const auto plan = plan_tensor_files(exports, "model", 1 << 30);
    Attempt attempt(out, identity(plan));
    CHECK(copy_files(attempt, plan, options, nullptr).system_copied == 0);
    attempt.remove();
  }
  options = {.memory = 1 << 20, .jobs = 1, .by = CopyBy::System};
  flip_bit(source.path() / "runs.bin", 200'000);
  Attempt attempt(out, identity(files));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor runs, elements 49000 to 56000",
                       copy_files(attempt, files, options, nullptr));
  attempt.remove();
}

TEST_CASE_FIXTURE(Fixture, "a zip archive's checksums are checked as ours are") {
  BoxedSource zipped(dir.path() / "zipped", true, true);
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
      CHECK(copy_files(attempt, files, options, nullptr).complete);
    }
    attempt.remove();
  }
}

TEST_CASE_FIXTURE(Fixture, "one that is stopped goes on where it was, wherever that is") {
  add_all();
  const auto tensors = source.exports();
  const auto files = plan_tensor_files(tensors, "model", 600'000);
  REQUIRE(files.size() > 3);
  std::int64_t total = 0;
  for (const ExportFile& file : files) total += file.plan.file_size;
  std::int64_t reused = 0;
  int rounds = 0;
  for (bool whole = false; !whole; ++rounds) {
    Attempt attempt(out, identity(files));
    std::int64_t found = 0, made = 0;
    whole = copy_files(attempt, files, options, [&](std::int64_t bytes, bool was_there) {
              (was_there ? found : made) += bytes;
              return made < 3 * 65536;
            }).complete;
    CHECK(found >= reused);
    reused = found + made;
    if (!whole) continue;
    CHECK(found + made == total);
    for (const ExportFile& file : files) {
      const SafetensorsReader reader(attempt.dir() / file.name);
      CHECK(reader.header().tensors.size() == file.tensors.size());
    }
    const auto again = plan_tensor_files(tensors, "model", 1 << 30);
    Attempt other(dir.path() / "other", identity(again));
    CHECK(copy_files(other, again, options, nullptr).complete);
    check(other.dir() / "model.safetensors");
    for (const ExportFile& file : files) {
      const SafetensorsReader reader(attempt.dir() / file.name);
      for (const SafetensorsEntry& entry : reader.header().tensors) {
        std::string data(static_cast<std::size_t>(entry.end - entry.begin), '\0');
        reader.file().read(entry.begin, data.data(), data.size());
        CHECK(data == source.content(entry.name));
      }
    }
  }
  CHECK(rounds > 5);
}

TEST_CASE_FIXTURE(Fixture, "one that is killed loses what was not recorded, and nothing else") {
  add_all();
  options = {.memory = 4 * (128 << 10), .jobs = 4, .bytes_per_record = 4 * 65536};
  const auto tensors = source.exports(DType::BF16);
  const auto files = plan_tensor_files(tensors, "model", 300'000);
  std::int64_t total = 0, reused = 0;
  for (const ExportFile& file : files) total += file.plan.file_size;
  for (int round = 0; reused < total / 2; ++round) {
    REQUIRE(round < 20);
    const pid_t child = ::fork();
    if (child == 0) {
      Attempt attempt(out, identity(files));
      int made = 0;
      copy_files(attempt, files, options, [&](std::int64_t, bool was_there) {
        made += !was_there;
        if (made == 7) ::kill(::getpid(), SIGKILL);
        return true;
      });
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!WIFSIGNALED(status)) {  // the parts that others of its threads made were the last
      REQUIRE(round > 0);
      break;
    }
    Attempt attempt(out, identity(files));
    reused = 0;
    const bool whole = copy_files(attempt, files, options, [&](std::int64_t bytes, bool was_there) {
                         if (was_there) reused += bytes;
                         return was_there;
                       }).complete;
    CHECK(whole == (reused == total));  // its threads may have recorded the last before it was gone
  }
  Attempt attempt(out, identity(files));
  CHECK(copy_files(attempt, files, options, nullptr).complete);
  for (const ExportFile& file : files) {
    Attempt fresh(dir.path() / "fresh", identity(files));
    CHECK(copy_files(fresh, files, options, nullptr).complete);
    CHECK(read_text(fresh.dir() / file.name) == read_text(attempt.dir() / file.name));
    fresh.remove();
  }
}

TEST_CASE_FIXTURE(Fixture, "nothing of what was written before is believed unread") {
  add_all();
  const auto tensors = source.exports();
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  const std::int64_t blocks = (files[0].plan.file_size + 65535) / 65536;
  const auto run = [&] {
    Attempt attempt(out, identity(files));
    std::int64_t reused = 0;
    CHECK(copy_files(attempt, files, options, [&](std::int64_t, bool was_there) {
            reused += was_there;
            return true;
          }).complete);
    check(attempt.dir() / "model.safetensors");
    return reused;
  };
  {
    Attempt attempt(out, identity(files));
    std::int64_t left = blocks;
    CHECK_FALSE(copy_files(attempt, files, options, [&](std::int64_t, bool) {
                  return --left > 0;
                }).complete);
  }
  const fs::path written = dir.path() / "out.tmp" / "model.safetensors";
  CHECK(run() == blocks);
  for (const std::int64_t at :
       {std::int64_t{0}, std::int64_t{3 * 65536 + 17}, files[0].plan.file_size - 1}) {
    flip_bit(written, at);
    CHECK(run() == blocks - 1);
  }
  fs::resize_file(written, 100);
  CHECK(run() == 0);
  fs::remove(written);
  CHECK(run() == 0);
  write_text(dir.path() / "out.tmp" / "config.json", "{}");
  CHECK(run() == blocks);
  CHECK_FALSE(fs::exists(dir.path() / "out.tmp" / "config.json"));

  // What was read before the stop counts towards the source's checksums, as what is read after it.
  { Attempt(out, identity(files)).remove(); }
  flip_bit(source.path() / "rows.bin", 8);
  const auto cut = [&](std::int64_t after) {
    Attempt attempt(out, identity(files));
    copy_files(attempt, files, options, [&](std::int64_t, bool) { return --after > 0; });
  };
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor rows, elements 0 to 50000", [&] {
    for (int round = 0; round < 100; ++round) cut(round + 1);
  }());
}

TEST_CASE_FIXTURE(Fixture, "what is written is decided by all that the identity covers") {
  source.add("t", {100, 100}, DType::F32, {2, 2});
  const auto tensors = source.exports();
  const auto files = plan_tensor_files(tensors, "model", 1 << 30);
  const std::uint64_t same = copy_identity(files, 65536);
  CHECK(copy_identity(files, 65536) == same);
  CHECK(copy_identity(files, 131072) != same);
  CHECK(copy_identity(plan_tensor_files(tensors, "optimizer", 1 << 30), 65536) != same);
  CHECK(copy_identity(plan_tensor_files(tensors, "model", 1 << 30, {{"a", "b"}}), 65536) != same);
  const auto converted = source.exports(DType::BF16);
  CHECK(copy_identity(plan_tensor_files(converted, "model", 1 << 30), 65536) != same);

  BoxedSource other(dir.path() / "elsewhere");
  other.add("t", {100, 100}, DType::F32, {2, 2});
  const auto moved = other.exports();
  CHECK(copy_identity(plan_tensor_files(moved, "model", 1 << 30), 65536) == same);  // a copy of it
  BoxedSource differs(dir.path() / "differs");
  differs.add("u", {10}, DType::F32, {1});
  differs.add("t", {100, 100}, DType::F32, {2, 2});  // other random numbers
  auto changed = differs.exports();
  changed.erase(changed.begin());
  CHECK(copy_identity(plan_tensor_files(changed, "model", 1 << 30), 65536) != same);

  // Without checksums, a file that was touched is another one.
  BoxedSource plain(dir.path() / "plain", false);
  plain.add("t", {100, 100}, DType::F32, {2, 2});
  const auto unchecked = plain.exports();
  const auto plain_files = plan_tensor_files(unchecked, "model", 1 << 30);
  const std::uint64_t before = copy_identity(plain_files, 65536);
  CHECK(copy_identity(plain_files, 65536) == before);
  fs::last_write_time(plain.path() / "t.bin",
                      fs::last_write_time(plain.path() / "t.bin") + std::chrono::seconds(1));
  CHECK(copy_identity(plain_files, 65536) != before);
}

TEST_CASE_FIXTURE(Fixture, "chunks that leave a gap are an error, not stale memory") {
  source.add("t", {1000}, DType::F32, {4});
  class Gap : public BoxedSource {
   public:
    using BoxedSource::BoxedSource;
    std::optional<TensorLayout> layout(const std::string& name) const override {
      auto layout = BoxedSource::layout(name);
      layout->chunks.erase(layout->chunks.begin() + 1);
      return layout;
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
