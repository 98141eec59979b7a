#include "io/source/checkpoint_tensors.h"

#include "io/checkpoint/shard_header.h"

namespace tessera::io {

CheckpointTensors::CheckpointTensors(CheckpointReader reader, Section section)
    : reader_(std::move(reader)), section_(section) {
  for (const auto& [name, record] : reader_.tensors(section_)) {
    tensors_.push_back({name, record.shape, record.dtype});
  }
}

void CheckpointTensors::read(const std::string& name, std::int64_t begin, std::int64_t end,
                             void* out, DType dtype) const {
  reader_.read(section_, name, begin, end, out, dtype);
}

void CheckpointTensors::stream(const std::string& name, std::size_t buffer_bytes,
                               const Sink& sink) const {
  reader_.stream(section_, name, buffer_bytes, sink);
}

std::optional<TensorLayout> CheckpointTensors::layout(const std::string& name) const {
  return TensorLayout{reader_.tensor(section_, name).chunks, true};
}

File CheckpointTensors::open_file(const std::string& name) const {
  File file = File::open(path() / name, Links::Refuse);
  {
    const std::lock_guard lock(mutex_);
    if (checked_.contains(name)) return file;
  }
  read_shard_header(file, name, reader_.index());
  const std::lock_guard lock(mutex_);
  checked_.insert(name);
  return file;
}

}  // namespace tessera::io
