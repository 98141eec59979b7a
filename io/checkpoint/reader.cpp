#include "io/checkpoint/reader.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "core/base/error.h"
#include "io/base/convert.h"
#include "io/base/crc64.h"
#include "io/checkpoint/box.h"
#include "io/checkpoint/find.h"
#include "io/checkpoint/shard_header.h"
#include "io/safetensors/reader.h"

namespace tessera::io {
namespace {

constexpr std::size_t kBuffer = std::size_t{1} << 20;
constexpr std::size_t kMaxOpenFiles = 128;

// What a user should do who asked a weights-only checkpoint for its optimizer state.
std::string missing_section(const fs::path& path, Section section, const CheckpointIndex& index) {
  if (section == Section::Model) {
    return fmt::format("checkpoint {} holds no model section", path.string());
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
        continue;  // a broken neighbour is no advice
      }
    }
  } catch (const IoError&) {
    return text;
  }
  return text;
}

// What is not there is damage; that the disk does not tell may pass.
fs::file_status look_at(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  require<IoError>(status.type() != fs::file_type::none, "cannot look at {}: {}", path.string(),
                   error.message());
  return status;
}

}  // namespace

struct CheckpointReader::State {
  fs::path path;
  CheckpointIndex index;

  std::mutex mutex;
  std::map<std::string, std::shared_ptr<File>> open_files;  // guarded by mutex
  std::set<std::string> identified;                         // guarded by mutex
  std::set<const Chunk*> verified;                          // guarded by mutex

  std::shared_ptr<File> file(const std::string& name) {
    const std::lock_guard lock(mutex);
    auto& slot = open_files[name];
    if (!slot) {
      auto opened = std::make_shared<File>(File::open(path / name, Links::Refuse));
      if (!identified.contains(name)) {
        read_shard_header(*opened, name, index);
        identified.insert(name);
      }
      if (open_files.size() > kMaxOpenFiles) open_files.clear();  // readers keep theirs alive
      open_files[name] = opened;
      return opened;
    }
    return slot;
  }
  bool is_verified(const Chunk& chunk) {
    const std::lock_guard lock(mutex);
    return verified.contains(&chunk);
  }
  void set_verified(const Chunk& chunk) {
    const std::lock_guard lock(mutex);
    verified.insert(&chunk);
  }
};

CheckpointReader CheckpointReader::open(const fs::path& dir) {
  auto state = std::make_shared<State>();
  state->path = dir.has_filename() ? dir : dir.parent_path();
  // The name that the path leads to: "." or "x/.." have one too.
  const std::string name =
      fs::absolute(dir / "").lexically_normal().parent_path().filename().string();
  require<CorruptCheckpoint>(!name.ends_with(".tmp"),
                             "{} is no committed checkpoint: what ends in .tmp is an attempt to "
                             "save one, or was being removed",
                             state->path.string());
  const fs::path index_path = state->path / "index.json";
  require<CorruptCheckpoint>(fs::exists(look_at(index_path)),
                             "{} has no index.json: it is no committed checkpoint",
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
    const fs::file_status status = look_at(path);
    if (!fs::exists(status)) {
      throw CorruptFile(file, fmt::format("{} is missing, but the index lists it", path.string()));
    }
    if (!fs::is_regular_file(status)) {
      throw CorruptFile(file, fmt::format("{} is not a regular file", path.string()));
    }
    // Opened, as a network file system may answer for the name alone what it knew before.
    const std::int64_t found = File::open(path, Links::Refuse).size();
    if (found != size) {
      throw CorruptFile(
          file, fmt::format("{} has {} bytes, but the index says {}: it was cut or replaced",
                            path.string(), found, size));
    }
  }
  return CheckpointReader(std::move(state));
}

const fs::path& CheckpointReader::path() const { return state_->path; }
const CheckpointIndex& CheckpointReader::index() const { return state_->index; }

const TensorMap& CheckpointReader::tensors(Section section) const {
  const TensorMap* tensors = index().tensors(section);
  if (!tensors) throw InvalidArgument("{}", missing_section(path(), section, index()));
  return *tensors;
}

const TensorRecord& CheckpointReader::tensor(Section section, const std::string& name) const {
  const TensorMap& all = tensors(section);
  const auto found = all.find(name);
  require(found != all.end(), "checkpoint {} holds no tensor {} in its section {}", path().string(),
          name, section_name(section));
  return found->second;
}

std::shared_ptr<const File> CheckpointReader::file(const std::string& name) const {
  return state_->file(name);
}

void CheckpointReader::fail_checksum(Section section, const std::string& tensor,
                                     const Chunk& chunk) const {
  throw CorruptCheckpoint(
      "{}: tensor {}/{}, elements {} to {} (bytes {} to {}): the checksum is wrong, the data was "
      "damaged after it was saved",
      (path() / chunk.file).string(), section_name(section), tensor, chunk.begin, chunk.end,
      chunk.byte_begin, chunk.byte_end);
}

bool CheckpointReader::scan(const TensorRecord& tensor, const Chunk& chunk,
                            std::size_t buffer_bytes, const Sink& sink) const {
  const auto file = state_->file(chunk.file);
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.dtype));
  const std::int64_t per_piece =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(buffer_bytes) / width, 1,
                               std::max<std::int64_t>(chunk.end - chunk.begin, 1));
  std::vector<char> buffer(static_cast<std::size_t>(per_piece * width));
  std::uint64_t crc = 0;
  for (std::int64_t begin = chunk.begin; begin < chunk.end; begin += per_piece) {
    const std::int64_t n = std::min(per_piece, chunk.end - begin);
    const auto bytes = static_cast<std::size_t>(n * width);
    file->read(chunk.byte_begin + (begin - chunk.begin) * width, buffer.data(), bytes);
    crc = crc64(buffer.data(), bytes, crc);
    sink(begin, buffer.data(), n);
  }
  if (crc == chunk.crc64) state_->set_verified(chunk);
  return crc == chunk.crc64;
}

void CheckpointReader::read(Section section, const std::string& name, std::int64_t begin,
                            std::int64_t end, void* out, DType dtype) const {
  const TensorRecord& record = tensor(section, name);
  const std::int64_t size = numel(record.shape);
  require(begin >= 0 && begin <= end && end <= size,
          "elements {} to {} are outside tensor {} of shape {}", begin, end, name, record.shape);
  require<Unsupported>(can_convert(record.dtype, dtype),
                       "tensor {} is stored as {}, which does not "
                       "convert to {}",
                       name, record.dtype, dtype);
  const auto width = static_cast<std::int64_t>(dtype_size(record.dtype));
  auto* const target = static_cast<char*>(out);
  const auto place = [&](std::int64_t element) {
    return target + (element - begin) * static_cast<std::int64_t>(dtype_size(dtype));
  };
  for (const Chunk& chunk : record.chunks) {
    if (!touches(chunk, record.shape, begin, end)) continue;
    if (!chunk.box && !state_->is_verified(chunk)) {
      const bool right =
          scan(record, chunk, kBuffer, [&](std::int64_t first, const void* data, std::int64_t n) {
            const std::int64_t low = std::max(first, begin), high = std::min(first + n, end);
            if (low >= high) return;
            convert_elements(record.dtype, static_cast<const char*>(data) + (low - first) * width,
                             dtype, place(low), high - low);
          });
      if (!right) fail_checksum(section, name, chunk);
      continue;
    }
    if (!state_->is_verified(chunk) &&
        !scan(record, chunk, kBuffer, [](std::int64_t, const void*, std::int64_t) {})) {
      fail_checksum(section, name, chunk);
    }
    const auto file = state_->file(chunk.file);
    for_each_run(chunk, record.shape, begin, end, [&](const ChunkRun& run) {
      read_elements(*file, chunk.byte_begin + (run.in_chunk - chunk.begin) * width, record.dtype,
                    run.n, dtype, place(run.in_tensor));
    });
  }
}

void CheckpointReader::stream(Section section, const std::string& name, std::size_t buffer_bytes,
                              const Sink& sink) const {
  const TensorRecord& record = tensor(section, name);
  if (tensor_checksum(record)) {
    for (const Chunk& chunk : record.chunks) {
      if (!scan(record, chunk, buffer_bytes, sink)) fail_checksum(section, name, chunk);
    }
    return;
  }
  const std::int64_t size = numel(record.shape);
  const auto per_piece =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(buffer_bytes / dtype_size(record.dtype)));
  std::vector<char> buffer(static_cast<std::size_t>(std::min(per_piece, size)) *
                           dtype_size(record.dtype));
  for (std::int64_t begin = 0; begin < size; begin += per_piece) {
    const std::int64_t n = std::min(per_piece, size - begin);
    read(section, name, begin, begin + n, buffer.data(), record.dtype);
    sink(begin, buffer.data(), n);
  }
}

std::string CheckpointReader::trainer_json() const {
  require(index().trainer.has_value(), "checkpoint {} holds no trainer section", path().string());
  const TrainerSection& trainer = *index().trainer;
  const fs::path file = path() / trainer.file;
  std::string text = read_file(file, kMaxIndexBytes, Links::Refuse);
  require<CorruptCheckpoint>(crc64(text.data(), text.size()) == trainer.crc64,
                             "{}: the checksum is wrong, the file was changed after it was saved",
                             file.string());
  return text;
}

std::string CheckpointReader::digest() const {
  std::uint64_t digest = 0;
  const auto add = [&](std::string_view text) { digest = crc64(text.data(), text.size(), digest); };
  for (const auto& [name, record] : tensors(Section::Model)) {
    std::uint64_t crc = 0;
    if (const auto known = tensor_checksum(record)) {
      crc = *known;
    } else {
      const auto width = dtype_size(record.dtype);
      stream(Section::Model, name, kBuffer, [&](std::int64_t, const void* data, std::int64_t n) {
        crc = crc64(data, static_cast<std::size_t>(n) * width, crc);
      });
    }
    add(fmt::format("{}\n{}\n{}\n{}\n", name, record.dtype, record.shape, format_checksum(crc)));
  }
  return format_checksum(digest);
}

}  // namespace tessera::io
