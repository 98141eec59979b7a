#include "tests/io/support.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "core/base/shard_layout.h"
#include "io/base/crc64.h"
#include "io/base/json.h"
#include "io/checkpoint/find.h"
#include "io/hf/gpt2.h"
#include "io/safetensors/writer.h"

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
  for (const io::TensorInfo& info : io::gpt2_tensors(config)) {
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
    const std::string unit = tensor.name.starts_with("h.") ? tensor.name.substr(0, 3) : "root";
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
      request.model.push_back(part(tensor.weight));
      if (!options.optimizer) continue;
      request.exp_avg.push_back(part(tensor.exp_avg));
      request.exp_avg_sq.push_back(part(tensor.exp_avg_sq));
    }
  }
  return request;
}

std::vector<std::string> save_ranks(const SampleModel& model, const io::fs::path& dir,
                                    const SaveOptions& options) {
  ThreadCoordinator::Board board(options.world_size);
  std::vector<std::string> errors(static_cast<std::size_t>(options.world_size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < options.world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        ThreadCoordinator coordinator(board, rank);
        io::save_checkpoint(make_request(model, dir, rank, options), coordinator);
      } catch (const IoError& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = std::string("(no IoError) ") + error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
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
  const std::int64_t columns = boxed ? shape[1] : 1;
  for (std::int64_t column = 0; column < columns; ++column) {
    std::string part = bytes;
    if (boxed) {
      part.clear();
      for (std::int64_t row = 0; row < shape[0]; ++row) {
        part += bytes.substr(static_cast<std::size_t>((row * columns + column) * width),
                             static_cast<std::size_t>(width));
      }
    }
    Chunk chunk;
    chunk.file = "data";
    chunk.byte_begin = plan.tensors[0].begin + static_cast<std::int64_t>(stored.size());
    chunk.byte_end = chunk.byte_begin + static_cast<std::int64_t>(part.size());
    chunk.end = static_cast<std::int64_t>(part.size()) / width;
    chunk.crc64 = crc64(part.data(), part.size());
    if (boxed) chunk.box = Box{{0, column}, {shape[0], 1}};
    record.chunks.push_back(chunk);
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

void flip_bit(const io::fs::path& path, std::int64_t byte) {
  std::string content = read_text(path);
  content.at(static_cast<std::size_t>(byte)) ^= 4;
  write_text(path, content);
}

}  // namespace tessera::test
