#include "io/checkpoint/reader.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <vector>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/section_source.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kBuffer = std::int64_t{1} << 20;

std::string missing_section(const fs::path& path, const Section& section,
                            const CheckpointIndex& index) {
  if (section.is_model()) {
    return fmt::format("checkpoint {} has no model section", path.string());
  }
  if (index.optimizer && !index.optimizer->state.empty()) {
    std::vector<std::string> names;
    for (const auto& [name, tensors] : index.optimizer->state) names.push_back(name);
    return fmt::format(
        "checkpoint {} has no optimizer state {}: it was saved with another optimizer, which has "
        "{}; continue with that, or start from its weights with --model.init_from",
        path.string(), section.state, fmt::join(names, ", "));
  }
  std::string text = fmt::format(
      "checkpoint {} holds no optimizer state (it was saved with checkpoint.what=model); start "
      "from its weights with --model.init_from",
      path.string());
  try {
    const auto entries = find_checkpoints(fs::absolute(path).parent_path());
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      if (entry->step == index.step) continue;
      try {
        const std::string source = (entry->path / "index.json").string();
        if (parse_index(read_file(source, kMaxIndexBytes, Links::Refuse), source).optimizer) {
          return text + ", or resume from " + checkpoint_name(entry->step) + ", which has it";
        }
      } catch (const Error&) {
        continue;  // does not recommend a broken checkpoint
      }
    }
  } catch (const IoError&) {
    return text;
  }
  return text;
}

// A missing file is damage. If stat fails, throws IoError, because the failure may be temporary.
fs::file_status look_at(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  require<IoError>(status.type() != fs::file_type::none, "cannot stat {}: {}", path.string(),
                   error.message());
  return status;
}

}  // namespace

std::string compare_file(const fs::path& path, std::int64_t size) {
  const fs::file_status status = look_at(path);
  if (!fs::exists(status)) return "is missing, but the index lists it";
  if (!fs::is_regular_file(status)) return "is not a regular file";
  // Opens the file because a network file system may answer stat from a stale cache.
  const std::int64_t found = File::open(path, Links::Refuse).size();
  if (found == size) return "";
  return fmt::format("has {} bytes, but the index says {}: it was truncated or replaced", found,
                     size);
}

struct CheckpointReader::State {
  fs::path path;
  CheckpointIndex index;
  std::map<Section, SectionSource> sources;
};

CheckpointReader CheckpointReader::open(const fs::path& dir) {
  auto state = std::make_shared<State>();
  state->path = dir.has_filename() ? dir : dir.parent_path();
  // The directory's own name, even if `dir` is "." or ends with "x/..".
  const std::string name =
      fs::absolute(dir / "").lexically_normal().parent_path().filename().string();
  require<CorruptCheckpoint>(!name.ends_with(".tmp"),
                             "{} is not a committed checkpoint: directories that end in .tmp are "
                             "unfinished saves or removals",
                             state->path.string());
  const fs::path index_path = state->path / "index.json";
  require<CorruptCheckpoint>(fs::exists(look_at(index_path)),
                             "{} has no index.json: it is not a committed checkpoint",
                             state->path.string());
  state->index =
      parse_index(read_file(index_path, kMaxIndexBytes, Links::Refuse), index_path.string());
  const CheckpointIndex& index = state->index;
  const bool named_by_step = name.starts_with("step-");
  require<CorruptCheckpoint>(!named_by_step || name == checkpoint_name(index.step),
                             "{} is the index of step {}, but the directory is {}",
                             index_path.string(), index.step, name);

  auto files = index.files;
  if (index.trainer) files[index.trainer->file] = index.trainer->size;
  for (const auto& [file, size] : files) {
    const fs::path path = state->path / file;
    const std::string difference = compare_file(path, size);
    if (!difference.empty()) {
      throw CorruptFile(file, fmt::format("{} {}", path.string(), difference));
    }
  }
  for (const Section& section : index.tensor_sections())
    state->sources.try_emplace(section, state->path, index, section, true);
  return CheckpointReader(std::move(state));
}

CheckpointReader CheckpointReader::with(WeightKind weights) const {
  if (weights == WeightKind::Trained) return *this;
  require(
      has(kAverageSection),
      "checkpoint {} holds no moving average of the weights (it was trained without optim.ema); "
      "omit --weights ema",
      path().string());
  tensors(kModelSection);  // throws if absent
  auto state = std::make_shared<State>();
  state->path = path();
  state->index = index();
  auto& model = state->index.model.value();
  for (const auto& [name, record] : tensors(kAverageSection)) model.at(name) = record;
  state->index.optimizer->state.erase(kAverageSection.state);
  for (const Section& section : state->index.tensor_sections())
    state->sources.try_emplace(section, state->path, state->index, section, true);
  return CheckpointReader(std::move(state));
}

const fs::path& CheckpointReader::path() const { return state_->path; }
const CheckpointIndex& CheckpointReader::index() const { return state_->index; }

const TensorMap& CheckpointReader::tensors(const Section& section) const {
  const TensorMap* tensors = index().tensors(section);
  if (!tensors) throw InvalidArgument("{}", missing_section(path(), section, index()));
  return *tensors;
}

std::vector<Section> CheckpointReader::states() const {
  std::vector<Section> sections = index().tensor_sections();
  std::erase(sections, kModelSection);
  if (sections.empty()) throw InvalidArgument("{}", missing_section(path(), {"any"}, index()));
  return sections;
}

const TensorSource& CheckpointReader::source(const Section& section) const {
  tensors(section);  // throws if absent
  return state_->sources.at(section);
}

std::string CheckpointReader::trainer_json() const {
  require(index().trainer.has_value(),
          "checkpoint {0} has no trainer section, so no run goes on from it; start one from its "
          "weights with --model.init_from {0}",
          path().string());
  const TrainerSection& trainer = *index().trainer;
  const fs::path file = path() / trainer.file;
  std::string text = read_file(file, kMaxIndexBytes, Links::Refuse);
  require<CorruptCheckpoint>(crc64(text.data(), text.size()) == trainer.crc64,
                             "{}: the checksum is wrong: the file was changed after the save",
                             file.string());
  return text;
}

std::string CheckpointReader::digest() const {
  std::uint64_t digest = 0;
  const auto add = [&](std::string_view text) { digest = crc64(text.data(), text.size(), digest); };
  for (const auto& [name, record] : tensors(kModelSection)) {
    std::uint64_t crc = 0;
    if (const auto known = tensor_checksum(record)) {
      crc = *known;
    } else {
      const std::int64_t size = numel(record.shape), step = kBuffer / record.width();
      std::vector<char> buffer(static_cast<std::size_t>(std::min(size, step) * record.width()));
      for (std::int64_t begin = 0; begin < size; begin += step) {
        const std::int64_t end = std::min(size, begin + step);
        read(kModelSection, name, begin, end, buffer.data(), record.dtype);
        crc = crc64(buffer.data(), static_cast<std::size_t>((end - begin) * record.width()), crc);
      }
    }
    add(fmt::format("{}\n{}\n{}\n{}\n", name, record.dtype, record.shape, format_checksum(crc)));
  }
  return format_checksum(digest);
}

}  // namespace tessera::io
