#include "io/torch/torch_archive.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>

#include "core/base/error.h"
#include "io/pump/box.h"
#include "io/safetensors/dtype.h"

namespace tessera::io {
namespace {

constexpr std::int64_t kMaxPickle = std::int64_t{1} << 20;  // of one tensor

constexpr PickleGlobal kRebuildV2{"torch._utils", "_rebuild_tensor_v2"};
constexpr PickleGlobal kRebuildV3{"torch._utils", "_rebuild_tensor_v3"};
constexpr PickleGlobal kRebuildParameter{"torch._utils", "_rebuild_parameter"};
constexpr PickleGlobal kRebuildParameterWithState{"torch._utils", "_rebuild_parameter_with_state"};
// A tensor of a subclass or with attributes, such as the ds_id of DeepSpeed.
constexpr PickleGlobal kRebuildFromType{"torch._tensor", "_rebuild_from_type_v2"};
constexpr PickleGlobal kUntypedStorage{"torch.storage", "UntypedStorage"};

constexpr auto kTensorGlobals = [] {
  std::array<PickleGlobal, 9 + 2 * std::size(kTorchDTypes)> known{
      {kRebuildV2,
       kRebuildV3,
       kRebuildParameter,
       kRebuildParameterWithState,
       kRebuildFromType,
       {"torch", "Tensor"},
       {"torch.nn.parameter", "Parameter"},
       kOrderedDict,
       kUntypedStorage}};
  std::size_t n = 9;
  for (const TorchDType& row : kTorchDTypes) {
    known[n++] = {"torch", row.name};
    known[n++] = {"torch", row.storage.empty() ? row.name : row.storage};
  }
  return known;
}();

const PickleValue& item(const PickleValue& list, std::size_t i, PickleKind kind,
                        const std::string& where) {
  require<CorruptCheckpoint>(i < list.items().size(), "{}: holds {} values, expected more", where,
                             list.items().size());
  const PickleValue& value = *list.items()[i];
  require<CorruptCheckpoint>(value.is(kind), "{}: value {} is {}, expected {}", where, i,
                             pickle_kind_name(value.kind), pickle_kind_name(kind));
  return value;
}

Dims read_dims(const PickleValue& tuple, const std::string& where) {
  require<Unsupported>(tuple.items().size() <= Dims::kMaxDims,
                       "{}: {} dims; tessera reads at most {}", where, tuple.items().size(),
                       int{Dims::kMaxDims});
  Dims dims;
  for (std::size_t i = 0; i < tuple.items().size(); ++i) {
    const std::int64_t size = item(tuple, i, PickleKind::Int, where).integer;
    require<CorruptCheckpoint>(size >= 0, "{}: a size or stride of {}", where, size);
    dims.push_back(size);
  }
  return dims;
}

/// Largest offset of an element from the tensor's first element, in elements; -1 on overflow.
std::int64_t last_element(const Shape& shape, const Strides& strides) {
  std::int64_t last = 0;
  for (int i = 0; i < shape.size(); ++i) {
    std::int64_t more = 0;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &more) ||
        __builtin_add_overflow(last, more, &last)) {
      return -1;
    }
  }
  return last;
}

const TorchDType& find_dtype(const PickleGlobal& global, std::string_view TorchDType::*member,
                             const std::string& where) {
  const auto* const row = std::ranges::find_if(kTorchDTypes, [&](const TorchDType& each) {
    return global.module == "torch" && !global.name.empty() && each.*member == global.name;
  });
  require<CorruptCheckpoint>(row != std::end(kTorchDTypes), "{}: {}.{} is not a dtype", where,
                             global.module, global.name);
  return *row;
}

// Refuses {"conj": True} and {"neg": True}, a pending conjugation or negation of the elements.
void check_no_math_bits(const PickleValue& args, std::size_t i, const std::string& where) {
  if (i >= args.items().size() || args.items()[i]->is(PickleKind::None)) return;
  require<Unsupported>(args.items()[i]->is(PickleKind::Dict) && args.items()[i]->items().empty(),
                       "{}: a tensor with a pending conjugation or negation; save its "
                       ".resolve_conj().resolve_neg()",
                       where);
}

}  // namespace

TorchCall rebuild_call(const PickleValue& value) {
  if (!value.is(PickleKind::Object)) return {};
  const auto args = value.args->items();
  if (value.is_object(kRebuildParameter) || value.is_object(kRebuildParameterWithState))
    return args.empty() ? TorchCall() : rebuild_call(*args[0]);
  if (!value.is_object(kRebuildFromType)) return {value.global, value.args};
  // Arguments: function, class, its arguments, attributes.
  const bool is_plain = args.size() == 4 && args[0]->is(PickleKind::Global) &&
                        (*args[0]->global == kRebuildV2 || *args[0]->global == kRebuildV3) &&
                        args[2]->is(PickleKind::Tuple);
  return is_plain ? TorchCall{args[0]->global, args[2]} : TorchCall{value.global, value.args};
}

bool is_plain_tensor(const PickleValue& value) {
  const PickleGlobal* const function = rebuild_call(value).function;
  return function != nullptr && (*function == kRebuildV2 || *function == kRebuildV3);
}

std::string_view safetensors_from_torch(std::string_view name) {
  const auto* const row = std::ranges::find(kTorchDTypes, name, &TorchDType::name);
  return row == std::end(kTorchDTypes) ? "" : row->safetensors;
}

TorchArchive::TorchArchive(const ByteRange& archive, std::int64_t max_pickle,
                           std::span<const PickleGlobal> more, UnknownGlobals unknown)
    : archive_(archive),
      where_(archive.name()),
      known_(std::begin(kTensorGlobals), std::end(kTensorGlobals)),
      directory_(archive) {
  known_.insert(known_.end(), more.begin(), more.end());

  // All entries are in one folder, named like the file that torch.save wrote.
  constexpr std::string_view kPickle = "/data.pkl";
  const auto pickle_entry = std::find_if(
      directory_.entries().begin(), directory_.entries().end(), [&](const ZipEntry& entry) {
        return entry.name.ends_with(kPickle) &&
               entry.name.find('/') == entry.name.size() - kPickle.size();
      });
  if (pickle_entry == directory_.entries().end()) {
    // Throws if a name is damaged in the directory, because the local header has a copy of it.
    for (const ZipEntry& entry : directory_.entries()) zip_data_begin(archive, entry);
    throw Unsupported("{} is not a torch.save archive: it has no data.pkl", where_);
  }
  folder_ = pickle_entry->name.substr(0, pickle_entry->name.size() - kPickle.size() + 1);
  if (const ZipEntry* order = directory_.find(folder_ + "byteorder")) {
    const std::string text = read_zip_entry(archive, *order, 16);
    require<Unsupported>(text == "little",
                         "{}: byteorder is \"{}\"; tessera reads little-endian data", where_, text);
  }
  pickle_bytes_ = pickle_entry->size;
  pickle_.emplace(read_zip_entry(archive, *pickle_entry, max_pickle), known_, where_ + ", data.pkl",
                  Pickle::kMaxMemory, unknown);
}

TorchTensor TorchArchive::tensor(const PickleValue& value, const std::string& name) const {
  const std::string where = name.empty() ? where_ : fmt::format("{}, {}", where_, name);
  const auto [function, arguments] = rebuild_call(value);
  const bool untyped = function != nullptr && *function == kRebuildV3;
  require<Unsupported>(untyped || (function != nullptr && *function == kRebuildV2),
                       "{} holds {}, expected one tensor", where,
                       function != nullptr ? function->name : pickle_kind_name(value.kind));
  // Arguments: storage, offset in elements, sizes, strides, requires_grad, hooks; for v3: the dtype.
  const PickleValue& args = *arguments;
  const PickleValue& id = *item(args, 0, PickleKind::PersistentId, where).args;
  const std::int64_t offset = item(args, 1, PickleKind::Int, where).integer;
  TorchTensor tensor;
  tensor.shape = read_dims(item(args, 2, PickleKind::Tuple, where), where);
  tensor.strides = read_dims(item(args, 3, PickleKind::Tuple, where), where);
  require<CorruptCheckpoint>(tensor.strides.size() == tensor.shape.size(),
                             "{}: shape {} with strides {}", where, tensor.shape, tensor.strides);

  // id: ("storage", storage class, key, device, number of elements)
  require<CorruptCheckpoint>(id.is(PickleKind::Tuple), "{}: a storage is {}, expected a tuple",
                             where, pickle_kind_name(id.kind));
  require<CorruptCheckpoint>(item(id, 0, PickleKind::Str, where).text() == "storage",
                             "{}: a persistent id that is not a storage", where);
  const PickleGlobal& storage_class = *item(id, 1, PickleKind::Global, where).global;
  const std::string key(item(id, 2, PickleKind::Str, where).text());
  const std::int64_t elements = item(id, 4, PickleKind::Int, where).integer;
  require<CorruptCheckpoint>(!untyped || storage_class == kUntypedStorage,
                             "{}: storage of class {}.{}", where, storage_class.module,
                             storage_class.name);
  const TorchDType& dtype = untyped ? find_dtype(*item(args, 6, PickleKind::Global, where).global,
                                                 &TorchDType::name, where)
                                    : find_dtype(storage_class, &TorchDType::storage, where);
  const std::optional<DType> carrier = carrier_of_safetensors(dtype.safetensors);
  require<Unsupported>(carrier.has_value(), "{}: a tensor of {}, which tessera does not read",
                       where, dtype.name);
  check_no_math_bits(args, untyped ? 7 : 6, where);
  tensor.dtype = dtype.name;
  tensor.carrier = *carrier;

  const ZipEntry* const storage = directory_.find(folder_ + "data/" + key);
  require<CorruptCheckpoint>(storage != nullptr, "{}: the storage data/{} is missing", where, key);
  const auto width = static_cast<std::int64_t>(dtype_size(tensor.carrier));
  std::int64_t bytes = 0;
  require<CorruptCheckpoint>(
      elements >= 0 &&
          !__builtin_mul_overflow(elements, untyped ? std::int64_t{1} : width, &bytes) &&
          bytes == storage->size,
      "{}: data/{} has {} bytes, but its description says {} elements", where, key, storage->size,
      elements);
  const std::int64_t n = count_elements(tensor.shape, where);
  require<CorruptCheckpoint>(
      offset >= 0 && n <= storage->size / width && offset <= storage->size / width - n,
      "{}: {} elements of {} from element {} exceed the {} bytes of data/{}", where, n,
      tensor.dtype, offset, storage->size, key);
  const std::int64_t last = n == 0 ? 0 : last_element(tensor.shape, tensor.strides);
  require<CorruptCheckpoint>(
      n == 0 || (last >= 0 && last < storage->size / width - offset),
      "{}: shape {} with strides {} from element {} exceeds the {} bytes of data/{}", where,
      tensor.shape, tensor.strides, offset, storage->size, key);
  tensor.storage_begin = zip_data_begin(archive_, *storage);
  tensor.storage_end = tensor.storage_begin + storage->size;
  tensor.begin = tensor.storage_begin + offset * width;
  if (storage->crc32 != 0) tensor.crc32 = storage->crc32;
  return tensor;
}

TorchTensor read_torch_tensor(const ByteRange& archive) {
  const TorchArchive file(archive, kMaxPickle);
  return file.tensor(file.root(), "");
}

void require_torch_archive(const ByteRange& archive) {
  constexpr std::string_view kPointer = "version https://git-lfs";
  const auto head = std::min<std::int64_t>(archive.size(), std::ssize(kPointer));
  require<Unsupported>(archive.read(0, head) != kPointer,
                       "{} is a pointer of Git LFS, not the file; fetch it with `git lfs pull`",
                       archive.name());
  // The length of a safetensors header, and its first byte.
  require<Unsupported>(archive.size() < 10 || archive.read(4, 5) != std::string("\0\0\0\0{", 5),
                       "{} is a safetensors file under the name of a file of torch.save; rename it "
                       "to model.safetensors in a directory of its own",
                       archive.name());
  require<Unsupported>(archive.size() < 2 || archive.read(0, 2) == "PK",
                       "{} is no zip archive: PyTorch before 1.6 wrote it; load and save it once "
                       "with a newer PyTorch",
                       archive.name());
}

}  // namespace tessera::io
