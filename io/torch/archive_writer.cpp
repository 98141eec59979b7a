#include "io/torch/archive_writer.h"

#include <algorithm>
#include <iterator>

#include "core/base/error.h"
#include "io/base/file.h"

namespace tessera::io {
namespace {

constexpr PickleGlobal kMakeTyped{"torch._utils", "_rebuild_tensor_v2"};
constexpr PickleGlobal kMakeUntyped{"torch._utils", "_rebuild_tensor_v3"};
constexpr PickleGlobal kUntyped{"torch.storage", "UntypedStorage"};

}  // namespace

const TorchDType& torch_from_safetensors(std::string_view name) {
  const auto* const row = std::ranges::find(kTorchDTypes, name, &TorchDType::safetensors);
  require<Unsupported>(row != std::end(kTorchDTypes), "PyTorch has no dtype {}", name);
  return *row;
}

void pickle_tensor(PickleWriter& pickle, const TorchDType& dtype, std::int64_t width,
                   const Shape& shape, std::size_t storage) {
  const bool typed = !dtype.storage.empty();
  pickle.global(typed ? kMakeTyped : kMakeUntyped);
  pickle.begin_tuple();
  pickle.begin_tuple();
  pickle.text("storage");
  pickle.global(typed ? PickleGlobal{"torch", dtype.storage} : kUntyped);
  pickle.text(std::to_string(storage));
  pickle.text("cpu");
  pickle.integer(numel(shape) * (typed ? 1 : width));
  pickle.end_tuple();
  pickle.persistent_id();
  pickle.integer(0);  // first element
  pickle.sizes(shape);
  pickle.sizes(contiguous_strides(shape));
  pickle.boolean(false);  // requires_grad
  pickle.global(kOrderedDict);
  pickle.begin_tuple();
  pickle.end_tuple();
  pickle.reduce();  // hooks
  if (!typed) pickle.global({"torch", dtype.name});
  pickle.end_tuple();
  pickle.reduce();
}

ZipWriter plan_torch_archive(std::int64_t begin, std::string_view pickle,
                             const std::vector<TorchStorage>& storages) {
  const std::string folder = std::string(kExportFolder) + '/';
  ZipWriter zip(begin);
  zip.add(folder + "data.pkl", pickle);
  zip.add(folder + "byteorder", "little");
  for (std::size_t i = 0; i < storages.size(); ++i) {
    const std::string name = fmt::format("{}data/{}", folder, i);
    if (storages[i].bytes == 0 || !storages[i].content.empty())
      zip.add(name, storages[i].content);
    else
      zip.reserve(name, storages[i].bytes);
  }
  zip.add(folder + "version", "3\n");
  zip.finish();
  return zip;
}

bool is_torch_of_export(const fs::path& path) {
  try {
    const File file = File::open(path);
    const std::string name = std::string(kExportFolder) + "/data.pkl";
    std::string head(30 + name.size(), '\0');  // the local header of the first entry
    if (file.size() < std::ssize(head)) return false;
    file.read(0, head.data(), head.size());
    return head.starts_with("PK\3\4") && head.ends_with(name);
  } catch (const Error&) {
    return false;
  }
}

}  // namespace tessera::io
