#include "io/checkpoint/reshard.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <ctime>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "core/base/error.h"
#include "io/base/crc64.h"
#include "io/base/parallel.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/piece_reader.h"
#include "io/checkpoint/shard.h"
#include "io/hf/gpt2.h"
#include "io/safetensors/writer.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMinBuffer = std::int64_t{64} << 10;
constexpr std::int64_t kMaxBuffer = std::int64_t{16} << 20;
// Reading a part of a tensor that is stored in boxes takes as much beside the buffer.
constexpr std::int64_t kBoxScratch = std::int64_t{1} << 20;

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

// "h.3" of "h.3.ln_1.weight", "model.layers.3" of "model.layers.3.mlp.up_proj.weight": a name up to
// its first number. Without one: the root.
std::string unit_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const bool number =
        end > begin && std::all_of(name.begin() + static_cast<std::ptrdiff_t>(begin),
                                   name.begin() + static_cast<std::ptrdiff_t>(end),
                                   [](char c) { return c >= '0' && c <= '9'; });
    if (number) return name.substr(0, end);
    begin = end + 1;
  }
  return "root";
}

// The order in which a model registers its tensors; empty if it is not known.
std::vector<TensorInfo> known_order(const Json& config) {
  try {
    return gpt2_tensors(config);
  } catch (const InvalidArgument&) {
    return {};  // another architecture, or settings that do not tell
  }
}

// Letters, digits and '-', so that it may stand in a run id.
std::string host_name() {
  std::array<char, 65> buffer{};
  if (::gethostname(buffer.data(), buffer.size() - 1) != 0) return "host";
  std::string name = buffer.data();
  for (char& c : name) {
    if (!is_run_id(std::string_view(&c, 1))) c = '-';
  }
  return name;
}

/// What one rank owns of a tensor, and where it goes.
struct Part {
  Section section;
  const std::string* name;
  const TensorRecord* tensor;         // of the source
  std::int64_t begin, end;            // elements
  std::int64_t offset = 0;            // byte in the shard
  std::vector<std::uint64_t> crcs{};  // by chunk

  std::int64_t width() const { return static_cast<std::int64_t>(dtype_size(tensor->dtype)); }
};

/// A shard that is written by several threads.
struct Output {
  std::string name, preamble;
  std::int64_t size = 0;
  std::vector<Part> parts;  // in order of their bytes
  std::mutex mutex;
  std::optional<File> file{};  // guarded by mutex; while pieces of it are copied
  std::size_t left = 0;        // guarded by mutex; pieces that are not copied yet
};

/// Elements that one thread copies at once: pieces of chunks, of the source's and of the new ones.
struct Piece {
  Output* output;
  Part* part;
  std::vector<PieceSum> sums;

  std::int64_t bytes() const { return (sums.back().end - sums.front().begin) * part->width(); }
};

class Reshard {
 public:
  Reshard(const CheckpointReader& source, const fs::path& dir, const ReshardOptions& options)
      : source_(source),
        index_(source.index()),
        dir_(dir),
        options_(options),
        prefix_(fmt::format("{}.reshard-{}-", checkpoint_name(index_.step), host_name())),
        attempt_(dir / fmt::format("{}{}.tmp", prefix_, ::getpid())),
        target_(dir / checkpoint_name(index_.step)) {}

  ReshardReport run() {
    const auto start = std::chrono::steady_clock::now();
    require(options_.world_size >= 1 && options_.world_size <= kMaxWorldSize,
            "world size {}: expected 1 to {}", options_.world_size, kMaxWorldSize);
    require(options_.jobs >= 1, "{} jobs: expected 1 at least", options_.jobs);
    require(options_.memory >= options_.jobs * kMinBuffer,
            "memory for {} jobs is {} bytes; at least {} are needed", options_.jobs,
            options_.memory, options_.jobs * kMinBuffer);
    std::error_code error;
    require(options_.overwrite || !fs::exists(target_, error),
            "{} exists; choose another directory, or say --overwrite", target_.string());
    const fs::path from = fs::weakly_canonical(fs::absolute(source_.path())),
                   to = fs::weakly_canonical(fs::absolute(dir_));
    require(std::mismatch(from.begin(), from.end(), to.begin(), to.end()).first != from.end(),
            "{} lies in the source {}; choose another directory", dir_.string(),
            source_.path().string());
    plan();
    chunk_bytes_ = chunk_bytes_of(total_, options_.chunk_bytes);
    check_space();
    make_directories_durably(dir_);
    remove_leftovers();
    try {
      fs::create_directory(attempt_, error);
      require<IoError>(!error, "cannot make {}: {}", attempt_.string(), error.message());
      sync_directory(dir_);
      // What would end it last is looked at first.
      if (index_.trainer) trainer_json_ = source_.trainer_json();
      if (fs::exists(target_, error)) {
        require<IoError>(can_exchange_in(attempt_),
                         "this file system cannot swap {} for another directory in one step, as "
                         "--overwrite does; move it away, and repeat without --overwrite",
                         target_.string());
      }
      copy();
      write_index();
      commit();
    } catch (...) {
      if (!renamed_) fs::remove_all(attempt_, error);
      throw;
    }
    ReshardReport report;
    report.path = target_;
    for (const auto& output : outputs_) report.bytes += output->size;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (index_.model) report.digest = CheckpointReader::open(target_).digest();
    return report;
  }

 private:
  void plan() {
    std::vector<std::vector<Part>> parts(static_cast<std::size_t>(options_.world_size));
    for (const ShardLayout& layout : shard_layouts(index_, options_.world_size)) {
      for (int rank = 0; rank < options_.world_size; ++rank) {
        for (const SlotRange& range : layout.ranges_of_rank(rank)) {
          const std::string& name = layout.slots()[static_cast<std::size_t>(range.slot)].name;
          for (const Section section : kSections) {
            const TensorMap* tensors = index_.tensors(section);
            if (!tensors) continue;
            const auto found = tensors->find(name);
            if (found == tensors->end()) continue;
            parts[static_cast<std::size_t>(rank)].push_back(
                {section, &found->first, &found->second, range.begin, range.end});
          }
        }
      }
    }
    const auto holds_boxes = [](const Part& part) { return is_boxed(*part.tensor); };
    if (std::ranges::any_of(parts, [&](const auto& of_rank) {
          return std::ranges::any_of(of_rank, holds_boxes);
        })) {
      scratch_ = kBoxScratch;
    }
    jobs_ = static_cast<int>(
        std::clamp<std::int64_t>(options_.memory / (kMinBuffer + scratch_), 1, options_.jobs));
    for (int rank = 0; rank < options_.world_size; ++rank) {
      plan_shard(rank, std::move(parts[static_cast<std::size_t>(rank)]));
    }
  }

  void plan_shard(int rank, std::vector<Part> parts) {
    std::vector<SafetensorsSpec> specs;
    std::map<std::string, Part*> by_name;
    for (Part& part : parts) {
      const std::string name = fmt::format("{}/{}", section_name(part.section), *part.name);
      specs.push_back({name, part.tensor->dtype, Shape{part.end - part.begin}});
      by_name[name] = &part;
    }
    SafetensorsPlan plan =
        plan_safetensors(specs, {{"step", std::to_string(index_.step)},
                                 {"run_id", index_.run_id},
                                 {"rank", std::to_string(rank)},
                                 {"world_size", std::to_string(options_.world_size)}});
    auto& output = outputs_.emplace_back(std::make_unique<Output>());
    output->name = shard_name(rank, options_.world_size);
    output->preamble = std::move(plan.preamble);
    output->size = plan.file_size;
    total_ += plan.file_size;
    for (const SafetensorsEntry& entry : plan.tensors) {
      Part& part = output->parts.emplace_back(*by_name.at(entry.name));
      part.offset = entry.begin;
    }
  }

  void check_space() const {
    const std::int64_t available = free_bytes(dir_);
    require<IoError>(available < 0 || available >= total_,
                     "cannot write {}: {} bytes needed, {} bytes free on that file system",
                     target_.string(), total_, available);
  }

  // What a killed process left. One of this host that runs, or of another host, stays.
  void remove_leftovers() const {
    std::error_code error;
    std::vector<fs::path> leftovers;
    fs::directory_iterator items(dir_, error);
    for (; !error && items != fs::directory_iterator(); items.increment(error)) {
      const std::string name = items->path().filename().string();
      if (!name.starts_with(prefix_) || !name.ends_with(".tmp")) continue;
      pid_t pid = 0;
      const char* const end = name.data() + name.size() - 4;
      const auto [stop, failure] = std::from_chars(name.data() + prefix_.size(), end, pid);
      if (failure != std::errc{} || stop != end || pid <= 0) continue;
      if (pid == ::getpid() || (::kill(pid, 0) != 0 && errno == ESRCH)) {
        leftovers.push_back(items->path());
      }
    }
    for (const fs::path& path : leftovers) fs::remove_all(path, error);
  }

  // In the order of the shards and of their bytes: threads that take pieces in this order work on
  // few shards at once, and write each forwards.
  std::vector<Piece> cut() {
    const std::int64_t buffer =
        std::clamp(options_.memory / jobs_ - scratch_, kMinBuffer, kMaxBuffer);
    std::map<const TensorRecord*, std::vector<std::int64_t>> all_ends;
    std::vector<Piece> pieces;
    for (const auto& output : outputs_) {
      for (Part& part : output->parts) {
        auto& ends = all_ends[part.tensor];
        if (ends.empty()) ends = PieceReader::ends(*part.tensor);
        const std::int64_t most = buffer / part.width(), chunk = chunk_bytes_ / part.width();
        auto next = std::upper_bound(ends.begin(), ends.end(), part.begin);
        std::int64_t full = part.begin;  // where the last piece has as much as it may
        for (std::int64_t begin = part.begin, end; begin < part.end; begin = end) {
          if (begin == full) {
            pieces.push_back({output.get(), &part, {}});
            ++output->left;
            full = std::min(begin + most, part.end);
          }
          while (next != ends.end() && *next <= begin) ++next;
          end = std::min(full, begin + chunk - (begin - part.begin) % chunk);
          if (next != ends.end()) end = std::min(end, *next);
          pieces.back().sums.push_back({begin, end});
        }
      }
    }
    return pieces;
  }

  File& open(Output& output) const {
    const std::lock_guard lock(output.mutex);
    if (!output.file) {
      output.file = File::create(attempt_ / output.name);
      output.file->write(output.preamble.data(), output.preamble.size());
    }
    return *output.file;
  }

  static void close_if_done(Output& output) {
    {
      const std::lock_guard lock(output.mutex);
      if (--output.left > 0) return;
    }
    output.file->finish();
    output.file.reset();
  }

  void copy() {
    std::vector<Piece> pieces = cut();
    for (const auto& output : outputs_) {
      if (output->left > 0) continue;
      open(*output).finish();
      output->file.reset();
    }
    PieceReader reader(source_);
    std::int64_t total = 0, done = 0;
    for (const Piece& piece : pieces) total += piece.bytes();
    std::mutex mutex;  // guards done
    parallel_for_each(pieces.size(), jobs_, [&](std::size_t i) {
      auto& [output, part, sums] = pieces[i];
      std::vector<char> buffer(static_cast<std::size_t>(pieces[i].bytes()));
      reader.read(part->section, *part->name, *part->tensor, sums, buffer.data());
      open(*output).write_at(part->offset + (sums.front().begin - part->begin) * part->width(),
                             buffer.data(), buffer.size());
      close_if_done(*output);
      const std::lock_guard lock(mutex);
      done += pieces[i].bytes();
      if (options_.progress) options_.progress(done, total);
    });
    sync_directory(attempt_);
    verify(reader, pieces);
  }

  // All that was read against the source's checksums; the same pieces give those of the new parts.
  void verify(const PieceReader& reader, const std::vector<Piece>& pieces) const {
    std::map<const TensorRecord*, std::vector<PieceSum>> sums;
    std::map<const TensorRecord*, const Part*> of;
    for (const Piece& piece : pieces) {
      Part& part = *piece.part;
      for (const PieceSum& sum : piece.sums) {
        const auto bytes = static_cast<std::uint64_t>((sum.end - sum.begin) * part.width());
        const std::int64_t chunk = (sum.begin - part.begin) * part.width() / chunk_bytes_;
        part.crcs.resize(static_cast<std::size_t>(chunk) + 1);
        part.crcs.back() = crc64_combine(part.crcs.back(), sum.crc64, bytes);
        sums[part.tensor].push_back(sum);
      }
      of[part.tensor] = &part;
    }
    for (auto& [tensor, list] : sums) {
      std::sort(list.begin(), list.end(),
                [](const PieceSum& a, const PieceSum& b) { return a.begin < b.begin; });
      const Part& part = *of.at(tensor);
      reader.verify(part.section, *part.name, *tensor, list);
    }
  }

  void write_index() const {
    CheckpointIndex index = index_;
    index.world_size = options_.world_size;
    index.created = now_utc();
    index.tessera_version = TESSERA_VERSION;
    index.files.clear();
    index.headers.clear();
    for (const Section section : kSections) {
      if (TensorMap* tensors = index.tensors(section)) {
        for (auto& [name, tensor] : *tensors) tensor.chunks.clear();
      }
    }
    for (const auto& output : outputs_) {
      index.files[output->name] = output->size;
      index.headers[output->name] = {static_cast<std::int64_t>(output->preamble.size()),
                                     crc64(output->preamble.data(), output->preamble.size())};
      for (const Part& part : output->parts) {
        const std::int64_t step = chunk_bytes_ / part.width();
        auto& chunks = index.tensors(part.section)->at(*part.name).chunks;
        std::int64_t begin = part.begin;
        for (const std::uint64_t crc : part.crcs) {
          Chunk& chunk = chunks.emplace_back();
          chunk.file = output->name;
          chunk.begin = begin;
          chunk.end = begin = std::min(begin + step, part.end);
          chunk.byte_begin = part.offset + (chunk.begin - part.begin) * part.width();
          chunk.byte_end = part.offset + (chunk.end - part.begin) * part.width();
          chunk.crc64 = crc;
        }
      }
    }
    if (index.trainer) {
      write_file_atomically(attempt_ / index.trainer->file, trainer_json_);
    }
    const std::string text = format_index(index);
    require<IoError>(static_cast<std::int64_t>(text.size()) <= kMaxIndexBytes,
                     "the index of {} ranks has {} bytes, and readers accept {}: choose fewer",
                     options_.world_size, text.size(), kMaxIndexBytes);
    check_result(parse_index(text, (attempt_ / "index.json").string()));
    write_file_atomically(attempt_ / "index.json", text);
  }

  // What is committed must cover every tensor, and be the same tensors: their checksums follow from
  // new chunks as from old ones.
  void check_result(const CheckpointIndex& result) const {
    for (const Section section : kSections) {
      const TensorMap* tensors = index_.tensors(section);
      if (!tensors) continue;
      for (const auto& [name, tensor] : *tensors) {
        const auto before = tensor_checksum(tensor);
        require<InternalError>(
            !before || before == tensor_checksum(result.tensors(section)->at(name)),
            "{}/{} has another checksum after resharding", section_name(section), name);
      }
    }
  }

  void commit() {
    std::error_code error;
    const bool replaces = options_.overwrite && fs::exists(target_, error);
    if (replaces) {
      exchange_paths(attempt_, target_);
    } else {
      require(rename_to_new(attempt_, target_), "{} was made meanwhile; it stays",
              target_.string());
    }
    renamed_ = true;
    sync_directory(dir_);
    if (replaces) fs::remove_all(attempt_, error);
    try {
      const auto committed = find_checkpoints(dir_);
      if (!committed.empty() && committed.back().path.filename() == target_.filename()) {
        write_file_atomically(dir_ / "latest", target_.filename().string() + "\n");
      }
    } catch (const IoError&) {
      // A hint that readers do not rely on.
    }
  }

  const CheckpointReader& source_;
  const CheckpointIndex& index_;
  const fs::path dir_;
  const ReshardOptions& options_;
  const std::string prefix_;
  const fs::path attempt_, target_;
  std::vector<std::unique_ptr<Output>> outputs_;  // by rank
  std::int64_t total_ = 0;
  std::int64_t chunk_bytes_ = 0;
  std::int64_t scratch_ = 0;  // bytes for each job beside its buffer
  int jobs_ = 1;
  std::string trainer_json_;
  bool renamed_ = false;
};

}  // namespace

std::vector<ShardLayout> shard_layouts(const CheckpointIndex& index, int world_size) {
  std::map<std::string, Shape> left;  // of any section
  for (const Section section : kSections) {
    const TensorMap* tensors = index.tensors(section);
    if (!tensors) continue;
    for (const auto& [name, tensor] : *tensors) left.emplace(name, tensor.shape);
  }
  std::vector<std::pair<std::string, std::vector<ShardLayout::Parameter>>> units;
  const auto add = [&](const std::string& name, const Shape& shape) {
    const std::string unit = unit_of(name);
    auto found = std::ranges::find(units, unit, [](const auto& u) { return u.first; });
    if (found == units.end()) found = units.insert(units.end(), {unit, {}});
    found->second.push_back({name, shape, false});
  };
  for (const TensorInfo& tensor : known_order(index.model_config)) {
    const auto found = left.find(tensor.name);
    if (found == left.end() || found->second != tensor.shape) continue;
    add(tensor.name, tensor.shape);
    left.erase(found);
  }
  for (const auto& [name, shape] : left) add(name, shape);
  std::vector<ShardLayout> layouts;
  for (const auto& [unit, parameters] : units) layouts.emplace_back(unit, parameters, world_size);
  return layouts;
}

ReshardReport reshard_checkpoint(const CheckpointReader& source, const fs::path& checkpoints_dir,
                                 const ReshardOptions& options) {
  return Reshard(source, checkpoints_dir, options).run();
}

}  // namespace tessera::io
