#include "io/checkpoint/reshard.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <map>
#include <numeric>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/shard.h"
#include "io/pump/write_files.h"

namespace tessera::io {
namespace {

// Elements of a weight for each value of its state tensor, a power of two.
std::int64_t block_of(std::int64_t elements, std::int64_t values) {
  std::int64_t block = 1;
  while (values * block < elements) block *= 2;
  return block;
}

// A parameter's unit: the path up to its first number, which is a block ("h.0"), else that of the
// module that has it ("wte"), else "root".
std::string unit_of(std::string_view name) {
  const auto is_number = [](std::string_view part) {
    return part.find_first_not_of("0123456789") == std::string_view::npos;
  };
  std::size_t begin = 0;
  for (std::size_t dot = 0; (dot = name.find('.', begin)) != std::string_view::npos;
       begin = dot + 1)
    if (dot > begin && is_number(name.substr(begin, dot - begin)))
      return std::string(name.substr(0, dot));
  return begin == 0 ? "root" : std::string(name.substr(0, begin - 1));
}

// Host name, with the characters that run ids do not allow replaced by '-'.
std::string host_name() {
  std::array<char, 65> buffer{};
  if (::gethostname(buffer.data(), buffer.size() - 1) != 0) return "host";
  std::string name = buffer.data();
  for (char& c : name) {
    if (!is_run_id(std::string_view(&c, 1))) c = '-';
  }
  return name;
}

class Reshard {
 public:
  Reshard(const ReshardSource& source, const fs::path& dir, const ReshardOptions& options)
      : source_(source),
        index_(source.index),
        dir_(dir),
        options_(options),
        prefix_(fmt::format("{}.reshard-{}-", checkpoint_name(index_.step), host_name())),
        attempt_(dir / fmt::format("{}{}.tmp", prefix_, ::getpid())),
        target_(dir / checkpoint_name(index_.step)),
        sections_(index_.tensor_sections()) {}

  ReshardReport run() {
    const auto start = std::chrono::steady_clock::now();
    require(options_.world_size >= 1 && options_.world_size <= kMaxWorldSize,
            "world size {}: expected 1 to {}", options_.world_size, kMaxWorldSize);
    require(options_.jobs >= 1, "{} jobs: expected at least 1", options_.jobs);
    require(options_.memory >= kLeastJobMemory, "memory is {} bytes; at least {} are needed",
            options_.memory, kLeastJobMemory);
    require(options_.overwrite || !is_there(target_),
            "{} exists; choose another directory, or use --overwrite", target_.string());
    const fs::path from = fs::weakly_canonical(fs::absolute(source_.path)),
                   to = fs::weakly_canonical(fs::absolute(dir_));
    require(std::mismatch(from.begin(), from.end(), to.begin(), to.end()).first != from.end(),
            "{} is inside the source {}; choose another directory", dir_.string(),
            source_.path.string());
    plan();
    chunk_bytes_ = chunk_bytes_of(total_, options_.chunk_bytes);
    require_space(target_, total_);
    make_directories_durably(dir_);
    remove_leftovers();
    std::error_code error;
    try {
      fs::create_directory(attempt_, error);
      require<IoError>(!error, "cannot make {}: {}", attempt_.string(), error.message());
      sync_directory(dir_);
      // Detects an error of the last step before the long copy.
      if (is_there(target_)) require_exchange(attempt_, target_);
      copy();
      write_index();
      commit();
    } catch (...) {
      if (!renamed_) fs::remove_all(attempt_, error);
      throw;
    }
    ReshardReport report;
    report.path = target_;
    for (const OutputFile& output : outputs_) report.bytes += output.size;
    report.seconds = seconds_since(start);
    if (index_.model) report.digest = CheckpointReader::open(target_).digest();
    return report;
  }

 private:
  void plan() {
    const std::vector<ShardLayout> layouts =
        shard_layouts(index_, options_.world_size, options_.order);
    for (int rank = 0; rank < options_.world_size; ++rank) {
      std::vector<SafetensorsSpec> specs;
      std::vector<OutputPart> parts;
      for (const ShardLayout& layout : layouts) {
        for (const SlotRange& range : layout.ranges_of_rank(rank)) {
          const std::string& name = layout.slots()[static_cast<std::size_t>(range.slot)].name;
          for (const Section& section : sections_) {
            const auto tensor = index_.tensors(section)->find(name);
            if (tensor == index_.tensors(section)->end()) continue;
            const DType dtype = tensor->second.dtype;
            const std::int64_t block =
                block_of(layout.slots()[static_cast<std::size_t>(range.slot)].numel,
                         numel(tensor->second.shape));
            const std::int64_t begin = (range.begin + block - 1) / block,
                               end = (range.end + block - 1) / block;
            if (begin == end) continue;
            specs.push_back(
                {fmt::format("{}/{}", section.name(), name), dtype, Shape{end - begin}});
            parts.push_back({source_.tensors.at(section), name, begin, end, dtype});
          }
        }
      }
      SafetensorsPlan plan =
          plan_shard_file(specs, index_.step, index_.run_id, rank, options_.world_size);
      total_ += plan.file_size;
      OutputFile& output = outputs_.emplace_back(OutputFile{
          shard_name(rank, options_.world_size), std::move(plan.preamble), plan.file_size, {}});
      for (std::size_t i = 0; i < parts.size(); ++i) {
        output.parts.push_back(std::move(parts[plan.order[i]]));
        output.parts.back().offset = plan.tensors[i].begin;
      }
    }
  }

  // Removes unfinished output of processes of this host that no longer exist.
  void remove_leftovers() const {
    std::error_code error;
    for (const fs::path& path : list_directory(dir_, error)) {
      const std::string name = path.filename().string();
      if (!name.starts_with(prefix_) || !name.ends_with(".tmp")) continue;
      pid_t pid = 0;
      const char* const end = name.data() + name.size() - 4;
      const auto [stop, failure] = std::from_chars(name.data() + prefix_.size(), end, pid);
      if (failure != std::errc{} || stop != end || pid <= 0) continue;
      if (pid == ::getpid() || (::kill(pid, 0) != 0 && errno == ESRCH)) fs::remove_all(path, error);
    }
  }

  void copy() {
    std::vector<std::size_t> all(outputs_.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    for (OutputFile& output : outputs_) {
      for (OutputPart& part : output.parts) part.sum_elements = chunk_bytes_ / part.width();
    }
    WriteOptions write{.memory = options_.memory, .jobs = options_.jobs};
    std::int64_t done = 0;
    write.wrote = [&](std::int64_t bytes) {
      done += bytes;
      if (options_.progress) options_.progress(done, total_);
      return true;
    };
    write_files(attempt_, outputs_, all, write);
    sync_directory(attempt_);
  }

  void write_index() const {
    CheckpointIndex index = index_;
    index.world_size = options_.world_size;
    index.created = utc_now();
    index.tessera_version = TESSERA_VERSION;
    index.files.clear();
    index.headers.clear();
    for (const Section& section : sections_) {
      for (auto& [name, tensor] : *index.tensors(section)) tensor.chunks.clear();
    }
    for (const OutputFile& output : outputs_) {
      index.files[output.name] = output.size;
      index.headers[output.name] = {static_cast<std::int64_t>(output.preamble.size()),
                                    crc64(output.preamble.data(), output.preamble.size())};
      for (const OutputPart& part : output.parts) {
        add_chunks(index.tensors(section_of(part))->at(part.source_name), output.name, part.offset,
                   part.begin, part.end, part.sum_elements, part.sums);
      }
    }
    if (index.trainer) {
      write_file_atomically(attempt_ / index.trainer->file, source_.trainer_json);
    }
    const std::string text = format_index(index);
    require<IoError>(static_cast<std::int64_t>(text.size()) <= kMaxIndexBytes,
                     "the index of {} ranks has {} bytes, but readers accept {}: use fewer ranks",
                     options_.world_size, text.size(), kMaxIndexBytes);
    check_result(parse_index(text, (attempt_ / "index.json").string()));
    write_file_atomically(attempt_ / "index.json", text);
  }

  Section section_of(const OutputPart& part) const {
    return *std::ranges::find_if(sections_, [&](const Section& section) {
      return source_.tensors.at(section) == part.source;
    });
  }

  // Checks that the checksum of each tensor is the same from its old and from its new chunks.
  void check_result(const CheckpointIndex& result) const {
    for (const Section& section : sections_) {
      for (const auto& [name, tensor] : *index_.tensors(section)) {
        if (tensor.chunks.empty()) continue;
        const auto before = tensor_checksum(tensor);
        require<InternalError>(
            !before || before == tensor_checksum(result.tensors(section)->at(name)),
            "{}/{} has another checksum after resharding", section.name(), name);
      }
    }
  }

  void commit() {
    require(move_into_place(attempt_, target_, options_.overwrite),
            "{} was created meanwhile; it is unchanged", target_.string());
    renamed_ = true;
    sync_directory(dir_);
    std::error_code ignored;
    fs::remove_all(attempt_, ignored);  // the replaced checkpoint
    try {
      const auto committed = find_checkpoints(dir_);
      if (!committed.empty() && committed.back().path.filename() == target_.filename()) {
        write_file_atomically(dir_ / "latest", target_.filename().string() + "\n");
      }
    } catch (const IoError&) {
      // Readers do not rely on `latest`.
    }
  }

  const ReshardSource& source_;
  const CheckpointIndex& index_;
  const fs::path dir_;
  const ReshardOptions& options_;
  const std::string prefix_;
  const fs::path attempt_, target_;
  const std::vector<Section> sections_;
  std::vector<OutputFile> outputs_;  // by rank
  std::int64_t total_ = 0;
  std::int64_t chunk_bytes_ = 0;
  bool renamed_ = false;
};

}  // namespace

ReshardSource::ReshardSource(const CheckpointReader& reader)
    : path(reader.path()),
      index(reader.index()),
      trainer_json(reader.index().trainer ? reader.trainer_json() : "") {
  for (const Section& section : index.tensor_sections()) tensors[section] = &reader.source(section);
}

ReshardSource::ReshardSource(fs::path path, std::string model_config, std::int64_t step,
                             const std::map<Section, const TensorSource*>& tensors)
    : path(std::move(path)), tensors(tensors) {
  index.step = step;
  index.run_id = kImport;
  index.model_config = std::move(model_config);
  for (const auto& [section, source] : tensors) {
    if (section.is_model())
      index.model.emplace();
    else if (!index.optimizer)
      index.optimizer.emplace().step = step;
    TensorMap& map = section.is_model() ? *index.model : index.optimizer->state[section.state];
    for (const TensorInfo& info : source->tensors())
      map[info.name] = TensorRecord{info.dtype, info.shape, {}};
  }
}

std::vector<ShardLayout> shard_layouts(const CheckpointIndex& index, int world_size,
                                       const std::vector<TensorInfo>& order) {
  std::map<std::string, Shape> left;  // tensors of all sections not yet added to a unit
  for (const Section& section : index.tensor_sections()) {
    for (const auto& [name, tensor] : *index.tensors(section)) left.emplace(name, tensor.shape);
  }
  std::vector<std::pair<std::string, std::vector<ShardLayout::Parameter>>> units;
  const auto add = [&](const std::string& name, const Shape& shape) {
    const std::string unit = unit_of(name);
    auto found = std::ranges::find(units, unit, [](const auto& u) { return u.first; });
    if (found == units.end()) found = units.insert(units.end(), {unit, {}});
    found->second.push_back({name, shape, false});
  };
  for (const TensorInfo& tensor : order) {
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

ReshardReport reshard_checkpoint(const ReshardSource& source, const fs::path& checkpoints_dir,
                                 const ReshardOptions& options) {
  return Reshard(source, checkpoints_dir, options).run();
}

}  // namespace tessera::io
