#include "capi/source.h"

#include <algorithm>

#include "capi/call.h"
#include "core/base/error.h"
#include "io/checkpoint/find.h"
#include "io/gguf/source.h"
#include "io/hf/model_source.h"
#include "io/safetensors/dtype.h"
#include "io/source/find_sharded.h"
#include "io/source/open_sharded.h"

namespace tessera::capi {
namespace {

void add_all(OpenedSource& result, const io::TensorSource& source, const std::string& prefix) {
  for (const io::TensorInfo& info : source.tensors()) {
    result.tensors.push_back({prefix + info.name,
                              std::string(io::safetensors_dtype_name(info.dtype)), info.shape,
                              &source, info.name, info.dtype});
  }
}

void add_gguf(OpenedSource& result) {
  auto source = std::make_unique<io::GgufSource>(result.path);
  result.kind = "GGUF file";
  for (const io::GgufEntry& entry : source->header().tensors) {
    ListedTensor& tensor = result.tensors.emplace_back();
    tensor = {entry.name, std::string(entry.elements->name), entry.shape, source.get(), entry.name};
    if (entry.elements->encoding != io::Encoding::Plain) continue;
    tensor.stored = entry.elements->dtype;
    tensor.dtype = io::safetensors_dtype_name(*tensor.stored);
  }
  result.owned.push_back(std::move(source));
}

void add_sharded(OpenedSource& result, std::unique_ptr<io::ShardedSource> source) {
  result.kind = source->kind();
  add_all(result, *source, "");
  for (const auto& other : source->unreadable()) {
    const bool named = !other.safetensors_dtype.empty();
    result.tensors.push_back({other.name, named ? other.safetensors_dtype : other.dtype,
                              other.shape, source.get(), other.name, other.carrier, false});
  }
  result.owned.push_back(std::move(source));
}

void add_checkpoint(OpenedSource& result, std::optional<std::int64_t> step) {
  const io::CheckpointReader& reader =
      result.checkpoint.emplace(io::open_checkpoint(result.path, step));
  result.kind = "tessera checkpoint";
  result.path = reader.path();
  for (const io::Section& section : reader.index().tensor_sections())
    add_all(result, reader.source(section), section.is_model() ? "" : section.name() + "/");
}

}  // namespace

OpenedSource open_source(const io::fs::path& path, std::optional<std::int64_t> step,
                         std::optional<std::int64_t> shards) {
  OpenedSource result;
  result.path = path;
  std::unique_ptr<io::ShardedSource> sharded;
  if (!io::is_gguf(path)) {
    std::error_code ignored;
    if (!io::fs::is_regular_file(path, ignored)) io::require_model_directory(path);
    require(!io::is_adapter_directory(path),
            "{} holds LoRA adapters in PEFT's format; merge them into their base by a "
            "consolidation with merge-lora, and open that",
            path.string());
    sharded = io::open_sharded(path, shards);
  }
  if (sharded || io::is_gguf(path)) {
    require(!step, "{} is not a tessera checkpoint and has no step {}", path.string(),
            step.value_or(0));
    sharded ? add_sharded(result, std::move(sharded)) : add_gguf(result);
  } else {
    require(!shards, "{} records its number of shards; omit the option", path.string());
    add_checkpoint(result, step);
  }
  std::ranges::sort(result.tensors, {}, &ListedTensor::name);
  const auto twice = std::ranges::adjacent_find(result.tensors, {}, &ListedTensor::name);
  require<Unsupported>(twice == result.tensors.end(), "{} holds two tensors {}", path.string(),
                       twice == result.tensors.end() ? "" : twice->name);
  return result;
}

}  // namespace tessera::capi

struct tessera_source {
  tessera::capi::OpenedSource opened;
  std::string path;
  tessera::io::BoxOptions read;
};

namespace {

using tessera::require;
using tessera::capi::ListedTensor;

const ListedTensor* tensor_at(const tessera_source* source, size_t index) {
  if (source == nullptr || index >= source->opened.tensors.size()) return nullptr;
  return &source->opened.tensors[index];
}

// @param list  entries per dim; null: `otherwise`
tessera::Shape dims_of(const int64_t* list, const tessera::Shape& otherwise) {
  return list == nullptr ? otherwise
                         : tessera::Shape(list, static_cast<std::size_t>(otherwise.size()));
}

void read_box(const tessera_source& source, const ListedTensor& tensor, const int64_t* begin,
              const int64_t* end, const char* dtype, void* out, size_t bytes) {
  require<tessera::Unsupported>(
      tensor.stored.has_value(), "{}: tensor {} has dtype {}, which tessera does not read; {}",
      source.path, tensor.name, tensor.dtype, "a consolidation may convert it");
  tessera::DType wanted = *tensor.stored;
  if (dtype != nullptr && dtype != tensor.dtype) {
    const auto known = tessera::io::dtype_from_safetensors(dtype);
    require<tessera::Unsupported>(tensor.converts && known.has_value(),
                                  "tensor {} is stored as {}, which does not convert to {}",
                                  tensor.name, tensor.dtype, dtype);
    wanted = *known;
  }
  require((begin == nullptr) == (end == nullptr), "only one of begin and end is NULL");
  const tessera::Shape zeros = [&] {
    tessera::Shape shape = tensor.shape;
    for (int i = 0; i < shape.size(); ++i) shape[i] = 0;
    return shape;
  }();
  tessera::io::Box box{dims_of(begin, zeros), dims_of(end, tensor.shape)};
  for (int i = 0; i < box.shape.size(); ++i) {
    require(
        box.offsets[i] >= 0 && box.offsets[i] <= box.shape[i] && box.shape[i] <= tensor.shape[i],
        "elements {} to {} of dim {} are outside tensor {} of shape {}", box.offsets[i],
        box.shape[i], i, tensor.name, tensor.shape);
    box.shape[i] -= box.offsets[i];
  }
  std::size_t needed = 0;
  const bool fits = !__builtin_mul_overflow(static_cast<std::size_t>(numel(box.shape)),
                                            dtype_size(wanted), &needed);
  require(fits && bytes == needed,
          "tensor {}: the memory has {} bytes, but a box of shape {} has {} elements of {} bytes",
          tensor.name, bytes, box.shape, numel(box.shape), dtype_size(wanted));
  require(out != nullptr || bytes == 0, "the memory is NULL");
  tensor.source->read_box(tensor.stored_name, box, out, wanted, source.read);
}

}  // namespace

extern "C" {

int tessera_open(const char* path, const tessera_option* options, size_t option_count,
                 tessera_source** out) {
  return tessera::capi::run_call({path == nullptr ? "" : path, ""}, [&] {
    require(out != nullptr, "the result is NULL");
    *out = nullptr;
    const tessera::io::OptionTexts given = tessera::capi::option_texts(options, option_count);
    const auto step = given.step(), shards = given.integer("shards", 1);
    auto source = std::make_unique<tessera_source>();
    source->read.threads = given.jobs();
    source->read.verify_partial =
        given.choice<bool>("verify", {{"chunks", true}, {"whole", false}}).value_or(true);
    given.refuse_others();
    source->opened =
        tessera::capi::open_source(tessera::capi::text_argument(path, "the path"), step, shards);
    source->path = source->opened.path.string();
    *out = source.release();
  });
}

void tessera_close(tessera_source* source) { delete source; }

const char* tessera_source_kind(const tessera_source* source) {
  return source == nullptr ? nullptr : source->opened.kind.c_str();
}
const char* tessera_source_path(const tessera_source* source) {
  return source == nullptr ? nullptr : source->path.c_str();
}
size_t tessera_tensor_count(const tessera_source* source) {
  return source == nullptr ? 0 : source->opened.tensors.size();
}
const char* tessera_tensor_name(const tessera_source* source, size_t index) {
  const ListedTensor* const tensor = tensor_at(source, index);
  return tensor == nullptr ? nullptr : tensor->name.c_str();
}
const char* tessera_tensor_dtype(const tessera_source* source, size_t index) {
  const ListedTensor* const tensor = tensor_at(source, index);
  return tensor == nullptr ? nullptr : tensor->dtype.c_str();
}
size_t tessera_tensor_dims(const tessera_source* source, size_t index) {
  const ListedTensor* const tensor = tensor_at(source, index);
  return tensor == nullptr ? 0 : static_cast<size_t>(tensor->shape.size());
}
const int64_t* tessera_tensor_shape(const tessera_source* source, size_t index) {
  const ListedTensor* const tensor = tensor_at(source, index);
  return tensor == nullptr ? nullptr : tensor->shape.begin();
}
size_t tessera_tensor_width(const tessera_source* source, size_t index) {
  const ListedTensor* const tensor = tensor_at(source, index);
  return tensor == nullptr || !tensor->stored ? 0 : dtype_size(*tensor->stored);
}

int tessera_find(const tessera_source* source, const char* name, size_t* index) {
  return tessera::capi::run_call({source == nullptr ? "" : source->path, ""}, [&] {
    require(source != nullptr && index != nullptr, "the source or the result is NULL");
    const std::string wanted = tessera::capi::text_argument(name, "the name");
    const auto& tensors = source->opened.tensors;
    const auto found = std::ranges::lower_bound(tensors, wanted, {}, &ListedTensor::name);
    require(found != tensors.end() && found->name == wanted, "{} holds no tensor {}", source->path,
            wanted);
    *index = static_cast<size_t>(found - tensors.begin());
  });
}

int tessera_read(const tessera_source* source, size_t index, const int64_t* begin,
                 const int64_t* end, const char* dtype, void* out, size_t bytes) {
  const ListedTensor* const tensor = tensor_at(source, index);
  return tessera::capi::run_call(tensor == nullptr
                                     ? tessera::io::ErrorPlace{}
                                     : tessera::io::ErrorPlace{source->path, tensor->name},
                                 [&] {
                                   require(tensor != nullptr, "there is no tensor {}", index);
                                   read_box(*source, *tensor, begin, end, dtype, out, bytes);
                                 });
}

}  // extern "C"
