// Ways to copy files while their checksums are verified, on the disk of a directory:
//
//   tessera_copy_bench DIR [--size 4GiB] [--jobs 8] [--rounds 3] [--warm]
//
//   buffered          read, checksum, write through the page cache; one sync at the end
//   buffered, early   the same, and each piece is sent to the disk at once (sync_file_range)
//   copy_file_range   the system copies; the copy is read again to verify it, from the page cache
//   direct            read and written past the page cache (O_DIRECT); cached pages are read there
//
// They take turns, on 4 files whose ranges lie at odd offsets, as tensors do; each ends with a
// sync. Before each, the source is dropped from the page cache, or with --warm read. Prints for
// each way the median, the median of its ratio to "direct" in the same round, and each round. Needs
// twice the size on the disk, and removes it.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/base/direct_file.h"
#include "io/base/parallel.h"
#include "io/base/size.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kPiece = std::int64_t{4} << 20;  // bytes
constexpr std::int64_t kHeader = 1208;  // bytes before the data of a source file, as in a shard
constexpr int kFiles = 4;

enum class Way { Buffered, Early, CopyFileRange, Direct };
constexpr std::pair<Way, const char*> kWays[] = {{Way::Buffered, "buffered"},
                                                 {Way::Early, "buffered, early"},
                                                 {Way::CopyFileRange, "copy_file_range"},
                                                 {Way::Direct, "direct"}};

struct Options {
  fs::path dir;
  std::int64_t size = std::int64_t{4} << 30;
  int jobs = 8, rounds = 3;
  bool warm = false;
};

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options), per_file_(options.size / kFiles / kPiece * kPiece) {
    require(per_file_ > 0, "--size must be at least {} bytes", kFiles * kPiece);
    const AlignedBuffer piece(kPiece);
    for (std::int64_t i = 0; i < kPiece; i += 8) {
      const std::uint64_t value = static_cast<std::uint64_t>(i + 1) * 0x9E3779B97F4A7C15ULL;
      std::memcpy(piece.data() + i, &value, 8);
    }
    for (int i = 0; i < kFiles; ++i) {
      sources_.push_back(options.dir / fmt::format("copy-bench-{}", i));
      File file = File::create(sources_.back());
      file.write(piece.data(), kHeader);
      for (std::int64_t at = 0; at < per_file_; at += kPiece) file.write(piece.data(), kPiece);
      file.finish();
    }
  }
  ~Bench() {
    std::error_code error;
    for (const fs::path& source : sources_) fs::remove(source, error);
    fs::remove(target_, error);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  /// @return bytes a second
  double run(Way way) {
    std::error_code error;
    fs::remove(target_, error);
    prepare_cache();
    const auto start = std::chrono::steady_clock::now();
    const bool direct = way == Way::Direct;
    std::vector<std::unique_ptr<DirectFile>> in;
    for (const fs::path& source : sources_) {
      in.push_back(std::make_unique<DirectFile>(File::open(source), direct));
    }
    DirectFile out(create_sized_file(target_, per_file_ * kFiles), direct);
    std::atomic<std::uint64_t> sum{0};  // of all checksums, so that none is left out
    const auto pieces = static_cast<std::size_t>(per_file_ / kPiece) * kFiles;
    parallel_for_each(pieces, options_.jobs, [&](std::size_t i) {
      thread_local const AlignedBuffer block(kPiece), scratch(kPiece + 2 * kDirectAlignment);
      const auto to = static_cast<std::int64_t>(i) * kPiece;
      const DirectFile& source = *in[static_cast<std::size_t>(to / per_file_)];
      const std::int64_t from = kHeader + to % per_file_;
      if (way == Way::CopyFileRange) copy_range(source.file(), from, out.file(), to);
      const char* data = source.read(from, kPiece, scratch, block.data());
      sum += crc64(data, kPiece);
      if (way == Way::CopyFileRange) return;
      if (data != block.data()) std::memcpy(block.data(), data, kPiece);
      if (way == Way::Buffered) {
        write_lazily(out.file(), to, block.data());
      } else {
        out.write(to, block.data(), kPiece);
      }
    });
    out.sync();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    require<InternalError>(sum != 0, "no checksum was made");
    return static_cast<double>(per_file_ * kFiles) / time.count();
  }

 private:
  void prepare_cache() const {
    ::sync();
    const AlignedBuffer piece(kPiece);
    for (const fs::path& source : sources_) {
      const File file = File::open(source);
      if (!options_.warm) ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
      for (std::int64_t at = 0; options_.warm && at < per_file_; at += kPiece) {
        file.read(at, piece.data(), kPiece);
      }
    }
  }

  static void copy_range(const File& in, off64_t from, const File& out, off64_t to) {
    for (std::int64_t left = kPiece; left > 0;) {
      const ssize_t n = ::copy_file_range(in.descriptor(), &from, out.descriptor(), &to,
                                          static_cast<std::size_t>(left), 0);
      require<IoError>(n > 0, "copy_file_range: {}", std::strerror(errno));
      left -= n;
    }
  }

  static void write_lazily(const File& out, std::int64_t offset, const char* data) {
    for (std::int64_t done = 0; done < kPiece;) {
      const ssize_t n = ::pwrite(out.descriptor(), data + done,
                                 static_cast<std::size_t>(kPiece - done), offset + done);
      require<IoError>(n > 0, "pwrite: {}", std::strerror(errno));
      done += n;
    }
  }

  Options options_;
  std::int64_t per_file_;
  std::vector<fs::path> sources_;
  fs::path target_ = options_.dir / "copy-bench-target";
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const auto value = [&]() -> std::string {
      require(i + 1 < argc, "{} wants a value", word);
      return argv[++i];
    };
    if (word == "--size") {
      options.size = parse_bytes(value());
    } else if (word == "--jobs") {
      options.jobs = std::stoi(value());
    } else if (word == "--rounds") {
      options.rounds = std::stoi(value());
    } else if (word == "--warm") {
      options.warm = true;
    } else {
      options.dir = word;
    }
  }
  require(!options.dir.empty(),
          "usage: tessera_copy_bench DIR [--size 4GiB] [--jobs 8] [--rounds "
          "3] [--warm]");
  return options;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void run(const Options& options) {
  Bench bench(options);
  std::vector<std::vector<double>> rates(std::size(kWays));
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < rates.size(); ++i) rates[i].push_back(bench.run(kWays[i].first));
  }
  const std::vector<double>& direct = rates[static_cast<std::size_t>(Way::Direct)];
  for (std::size_t i = 0; i < rates.size(); ++i) {
    std::vector<double> ratios;
    for (std::size_t r = 0; r < direct.size(); ++r) ratios.push_back(rates[i][r] / direct[r]);
    fmt::print("{:<16} {:>8.0f} MB/s  {:.2f} of direct ", kWays[i].second, median(rates[i]) * 1e-6,
               median(ratios));
    for (const double rate : rates[i]) fmt::print(" {:.0f}", rate * 1e-6);
    fmt::print("\n");
  }
}

}  // namespace
}  // namespace tessera::io

int main(int argc, char** argv) {
  try {
    tessera::io::run(tessera::io::parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tessera_copy_bench: {}\n", error.what());
    return 1;
  }
}
