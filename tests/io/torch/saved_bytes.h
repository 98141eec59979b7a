#pragma once

// Builds archives of torch.save with tensors and parts of tensors, including lying ones.

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "io/base/crc.h"
#include "tests/io/dcp/bytes.h"

namespace tessera::test {

using Sizes = std::vector<std::int64_t>;

inline std::string pickled_sizes(const Sizes& sizes) {
  std::vector<std::string> items;
  for (const std::int64_t size : sizes) items.push_back(pickled::integer(size));
  return pickled::tuple(items);
}

/// An archive under construction.
class SavedArchive {
 public:
  /// Pickle of a float tensor with the values first, first + 1, ... in a storage of its own.
  std::string tensor(const Sizes& shape, float first = 0) {
    return pickled::call(pickled::global("torch._utils", "_rebuild_tensor_v2"),
                         arguments(shape, first));
  }
  /// Arguments of the call that makes such a tensor.
  /// @param after  values of the storage that follow those of the tensor
  std::vector<std::string> arguments(const Sizes& shape, float first = 0,
                                     const std::vector<float>& after = {}) {
    using namespace pickled;
    std::int64_t n = 1;
    Sizes strides(shape.size());
    for (std::size_t i = shape.size(); i-- > 0; n *= shape[i]) strides[i] = n;
    std::string data;
    for (std::int64_t i = 0; i < n; ++i) data += bytes_of(first + static_cast<float>(i));
    for (const float value : after) data += bytes_of(value);
    const std::string key = std::to_string(storages_.size());
    storages_.push_back(data);
    const std::string storage = tuple({text("storage"), global("torch", "FloatStorage"), text(key),
                                       text("cpu"), integer(n + std::ssize(after))}) +
                                "Q";
    return {storage,
            integer(0),
            pickled_sizes(shape),
            pickled_sizes(strides),
            "\x89",
            call(global("collections", "OrderedDict"), {})};
  }
  std::string bytes(const std::string& root) const {
    ZipFile file;
    const auto add = [&](const std::string& name, const std::string& content) {
      file.parts.push_back({name, content, io::crc32(content.data(), content.size())});
    };
    add("a/data.pkl", pickled::program(root));
    for (std::size_t i = 0; i < storages_.size(); ++i)
      add("a/data/" + std::to_string(i), storages_[i]);
    return file.bytes();
  }

 private:
  std::vector<std::string> storages_;
};

inline std::string pickled_placement(const char* name, std::int64_t dim = 0,
                                     std::int64_t factor = 0) {
  using namespace pickled;
  std::vector<std::pair<std::string, std::string>> fields = {{"dim", integer(dim)}};
  if (factor != 0) fields.emplace_back("split_factor", integer(factor));
  return object(global("torch.distributed.tensor.placement_types", name), fields);
}

/// Pickle of a tensor class's wrapper.
inline std::string pickled_wrapper(const std::string& cls, const Sizes& shape,
                                   const std::string& state) {
  using namespace pickled;
  return call(global("torch._tensor", "_rebuild_from_type_v2"),
              {global("torch._utils", "_rebuild_wrapper_subclass"), cls,
               tuple({cls, global("torch", "float32"), pickled_sizes(shape)}), state});
}

/// A DTensor to pickle.
struct SavedDTensor {
  Sizes shape = {4, 2}, mesh = {2}, coordinate = {0};
  std::vector<std::string> placements = {pickled_placement("Shard")};
  std::string order = "N";  ///< shard_order

  std::string pickled(const std::string& local) const {
    using namespace test::pickled;
    std::vector<std::string> axes;
    for (const std::int64_t size : mesh) {
      axes.push_back(object(global("torch.distributed._mesh_layout", "_FlatLayout"),
                            {{"shape", tuple({integer(size)})}}));
    }
    const std::string layout =
        object(global("torch.distributed._mesh_layout", "_MeshLayout"), {{"axes", tuple(axes)}});
    const std::string spec = object(
        global("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
        {{"mesh", object(global("torch.distributed.device_mesh", "DeviceMesh"),
                         {{"_layout", layout}, {"_coordinate_on_dim", pickled_sizes(coordinate)}})},
         {"placements", tuple(placements)},
         {"shard_order", order}});
    return pickled_wrapper(global("torch.distributed.tensor", "DTensor"), shape,
                           dict({{text("_local_tensor"), local}, {text("_spec"), spec}}));
  }
};

/// Pickle of a ShardedTensor with one shard.
inline std::string pickled_sharded(const Sizes& shape, const Sizes& offsets, const Sizes& sizes,
                                   const std::string& local) {
  using namespace pickled;
  const std::string module = "torch.distributed._shard.sharded_tensor.";
  const auto slots = [](const std::string& cls, const std::string& fields) {
    return cls + ")\x81" + tuple({"N", fields}) + "b";
  };
  const std::string metadata = slots(global("torch.distributed._shard.metadata", "ShardMetadata"),
                                     dict({{text("shard_offsets"), pickled_sizes(offsets)},
                                           {text("shard_sizes"), pickled_sizes(sizes)}}));
  const std::string shard = slots(global(module + "shard", "Shard"),
                                  dict({{text("tensor"), local}, {text("metadata"), metadata}}));
  return pickled_wrapper(global(module + "api", "ShardedTensor"), shape,
                         tuple({list({shard}), "N", "N", "N", "\x89"}));
}

}  // namespace tessera::test
