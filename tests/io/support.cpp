#include "tests/io/support.h"

#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/base/shard_layout.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/hf/family.h"
#include "io/safetensors/writer.h"
#include "tests/support/on_threads.h"

namespace tessera::test {

std::vector<std::string> ThreadCoordinator::exchange(const std::string& phase,
                                                     std::string_view mine) {
  std::unique_lock lock(board_.mutex);
  auto& values = board_.values[phase];
  values[rank_] = mine;
  board_.changed.notify_all();
  const bool all = board_.changed.wait_for(lock, std::chrono::seconds(30), [&] {
    return values.size() == static_cast<std::size_t>(board_.world_size);
  });
  if (!all) throw std::runtime_error("a rank did not arrive at " + phase);
  std::vector<std::string> result;
  for (const auto& [rank, value] : values) result.push_back(value);
  return result;
}

const SampleModel::Tensor& SampleModel::at(const std::string& name) const {
  for (const Tensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::runtime_error("no tensor " + name);
}

SampleModel make_sample_model(int salt) {
  SampleModel model;
  const io::Json config = {{"arch", "gpt2"},         {"n_layer", 2},     {"n_head", 1},
                           {"n_embd", 10},           {"vocab_size", 13}, {"seq_len", 7},
                           {"layer_norm_eps", 1e-5}, {"dropout", 0.0}};
  model.config = config.dump();
  float next = static_cast<float>(salt) * 0.25F;
  for (const io::TensorInfo& info : io::model_tensors(config)) {
    SampleModel::Tensor tensor{info.name, info.shape, {}, {}, {}};
    for (std::int64_t i = 0; i < numel(info.shape); ++i) {
      next += 1;
      tensor.weight.push_back(next);
      tensor.exp_avg.push_back(-next);
      tensor.exp_avg_sq.push_back(next / 1024);
    }
    model.tensors.push_back(std::move(tensor));
  }
  return model;
}

io::SaveRequest make_request(const SampleModel& model, const io::fs::path& dir, int rank,
                             const SaveOptions& options) {
  io::SaveRequest request;
  request.checkpoints_dir = dir;
  request.step = options.step;
  request.rank = rank;
  request.world_size = options.world_size;
  request.run_id = options.run_id;
  request.model_config = model.config;
  request.trainer_json = options.trainer_json;
  request.chunk_bytes = options.chunk_bytes;
  if (options.at_point) {
    request.at_point = [rank, f = options.at_point](std::string_view point) { f(rank, point); };
  }
  if (options.free_bytes) {
    request.free_bytes = [bytes = *options.free_bytes](const io::fs::path&) { return bytes; };
  }
  std::map<std::string, std::vector<ShardLayout::Parameter>> units;
  for (const auto& tensor : model.tensors) {
    const std::string& name = tensor.name;
    const std::size_t dot = name.starts_with("h.") ? 3 : name.rfind('.');
    const std::string unit = dot == std::string::npos ? "root" : name.substr(0, dot);
    units[unit].push_back({tensor.name, tensor.shape, false});
  }
  for (const auto& [unit, parameters] : units) {
    const ShardLayout layout(unit, parameters, options.world_size);
    for (const SlotRange& range : layout.ranges_of_rank(rank)) {
      const ParameterSlot& slot = layout.slots()[static_cast<std::size_t>(range.slot)];
      const SampleModel::Tensor& tensor = model.at(slot.name);
      const auto part = [&](const std::vector<float>& values) {
        return io::TensorPart{slot.name,   slot.shape, DType::F32,
                              range.begin, range.end,  values.data() + range.begin};
      };
      request.parts[io::kModelSection].push_back(part(tensor.weight));
      if (!options.optimizer) continue;
      request.parts[io::Section{"exp_avg"}].push_back(part(tensor.exp_avg));
      request.parts[io::Section{"exp_avg_sq"}].push_back(part(tensor.exp_avg_sq));
    }
  }
  return request;
}

std::vector<std::string> save_ranks(const SampleModel& model, const io::fs::path& dir,
                                    const SaveOptions& options) {
  ThreadCoordinator::Board board(options.world_size);
  std::vector<std::string> errors(static_cast<std::size_t>(options.world_size));
  on_threads(options.world_size, [&](int rank) {
    try {
      ThreadCoordinator coordinator(board, rank);
      io::save_checkpoint(make_request(model, dir, rank, options), coordinator);
    } catch (const IoError& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    } catch (const std::exception& error) {
      errors[static_cast<std::size_t>(rank)] = std::string("(no IoError) ") + error.what();
    }
  });
  return errors;
}

io::fs::path save(const SampleModel& model, const io::fs::path& dir, const SaveOptions& options) {
  for (const std::string& error : save_ranks(model, dir, options)) {
    if (!error.empty()) throw std::runtime_error(error);
  }
  const io::fs::path path = dir / io::checkpoint_name(options.step);
  return path;
}

io::CheckpointReader write_tensor(const io::fs::path& path, DType dtype, const Shape& shape,
                                  const std::string& bytes, bool boxed) {
  using namespace io;
  fs::create_directories(path);
  const auto width = static_cast<std::int64_t>(dtype_size(dtype));
  const SafetensorsPlan plan = plan_safetensors({{"model/w", dtype, Shape{numel(shape)}}});
  CheckpointIndex index;
  index.run_id = "r";
  index.created = "2026-01-31T12:00:00Z";
  index.files["data"] = plan.file_size;
  TensorRecord record{dtype, shape, {}};
  std::string stored;
  const std::int64_t columns = boxed ? shape[1] : 1, cut = (2 * columns + 2) / 3;
  for (const auto& [first, last] : {std::pair(std::int64_t{0}, cut), std::pair(cut, columns)}) {
    std::string part;
    for (std::int64_t row = 0; boxed && row < shape[0]; ++row) {
      part += bytes.substr(static_cast<std::size_t>((row * columns + first) * width),
                           static_cast<std::size_t>((last - first) * width));
    }
    if (!boxed && first == 0) part = bytes;
    const std::int64_t n = static_cast<std::int64_t>(part.size()) / width;
    for (const auto& [begin, end] : {std::pair(std::int64_t{0}, n / 2), std::pair(n / 2, n)}) {
      if (begin == end) continue;
      Chunk& chunk = record.chunks.emplace_back();
      chunk.file = "data";
      chunk.begin = begin;
      chunk.end = end;
      chunk.byte_begin =
          plan.tensors[0].begin + static_cast<std::int64_t>(stored.size()) + begin * width;
      chunk.byte_end = chunk.byte_begin + (end - begin) * width;
      chunk.crc64 =
          crc64(part.data() + begin * width, static_cast<std::size_t>((end - begin) * width));
      if (boxed) chunk.box = Box{{0, first}, {shape[0], last - first}};
    }
    stored += part;
  }
  index.model = TensorMap{{"w", record}};
  write_text(path / "index.json", format_index(index));
  write_text(path / "data", plan.preamble + stored);
  return CheckpointReader::open(path);
}

void write_dcp_shard(const io::fs::path& file, const std::vector<DcpEntry>& entries) {
  io::Json header, info;
  std::string data;
  for (const DcpEntry& entry : entries) {
    const std::size_t begin = data.size();
    data += entry.bytes;
    header[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {begin, data.size()}}};
    info[entry.name]["saved_offsets"] =
        entry.offsets.empty() ? std::vector<std::int64_t>(entry.shape.size()) : entry.offsets;
  }
  header["__metadata__"]["DCP_SHARDING_INFO"] = info.dump();
  const std::string text = header.dump();
  const std::uint64_t length = text.size();
  write_text(file, std::string(reinterpret_cast<const char*>(&length), 8) + text + data);
}

std::vector<std::string> names_in(const io::fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& path : io::list_directory(dir)) names.push_back(path.filename().string());
  return names;
}

std::vector<std::int64_t> steps_in(const io::fs::path& dir) {
  std::vector<std::int64_t> steps;
  for (const auto& entry : io::find_checkpoints(dir)) steps.push_back(entry.step);
  return steps;
}

std::string read_text(const io::fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_text(const io::fs::path& path, std::string_view content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << content;
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

void set_format_version(const io::fs::path& checkpoint, int version) {
  std::string text = read_text(checkpoint / "index.json");
  const std::string_view was = "\"version\": 1", start = "{\n \"checksum\": \"crc64:";
  text.replace(text.rfind(was), was.size(), fmt::format("\"version\": {}", version));
  text.replace(start.size(), 16, 16, '0');
  const std::string checksum = io::format_checksum(io::crc64(text.data(), text.size()));
  text.replace(start.size(), 16, checksum, checksum.size() - 16);
  write_text(checkpoint / "index.json", text);
}

int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body());
    } catch (...) {
      ::_exit(99);
    }
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

void flip_bit(const io::fs::path& path, std::int64_t byte) {
  std::string content = read_text(path);
  if (byte < 0) byte += static_cast<std::int64_t>(content.size());
  content.at(static_cast<std::size_t>(byte)) ^= 4;
  write_text(path, content);
}

}  // namespace tessera::test
