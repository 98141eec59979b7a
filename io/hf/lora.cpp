#include "io/hf/lora.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "io/base/json.h"
#include "io/hf/family.h"
#include "io/safetensors/directory.h"
#include "io/source/names.h"
#include "io/torch/torch_directory.h"

namespace tessera::io {
namespace {

constexpr const char* kPeftConfig = "adapter_config.json";
constexpr const char* kPeftWeights = "adapter_model.safetensors";
constexpr const char* kOldPeftWeights = "adapter_model.bin";
constexpr const char* kPeftKind = "adapter in PEFT's format";
constexpr std::string_view kPeftPrefix = "base_model.model.";
constexpr const char* kAllLinear = "all-linear";
constexpr std::int64_t kMaxConfig = std::int64_t{1} << 20;

const HfFamily& family_of(const Json& model) {
  const std::string arch = model.value("arch", std::string());
  const HfFamily* const family = find_hf_family(arch);
  require<Unsupported>(family != nullptr, "tessera has no models of arch \"{}\"", arch);
  return *family;
}

std::string last_part(const std::string& path) { return path.substr(path.rfind('.') + 1); }

std::string without(const std::string& name, std::string_view end) {
  return name.substr(0, name.size() - end.size());
}

std::vector<LoraLayer> all_layers(const Json& model) {
  constexpr std::string_view kWeight = ".weight";
  std::vector<LoraLayer> layers;
  for (const HfTensor& tensor : family_of(model).tensors(model)) {
    if (!tensor.is_linear) continue;
    const Shape& shape = tensor.info.shape;
    std::int64_t first = 0;
    for (const HfTensor::Part& part : tensor.parts) {
      LoraLayer layer{.layer = without(tensor.info.name, kWeight),
                      .name = "lora_" + last_part(part.name.substr(0, part.name.rfind('.'))),
                      .hf_layer = without(part.name, kWeight),
                      .first = first,
                      .count = tensor.in_out ? shape[1] : part.rows,
                      .in = shape[tensor.in_out ? 0 : 1],
                      .in_out = tensor.in_out};
      layers.push_back(std::move(layer));
      first += part.rows;
    }
  }
  return layers;
}

bool matches(const std::string& target, const std::string& path) {
  if (target == kAllLinear) return true;
  if (target.find_first_of("*?[") != target.npos) return is_chosen({target}, path);
  return path == target || path.ends_with("." + target);
}

// Rows and columns of a weight to which a product of two small matrices is added.
struct Block {
  std::int64_t row_begin, row_end, column, columns, rank;
  std::vector<float> factors;  // [rows, rank], scaled
  std::vector<float> vectors;  // [rank, columns]
};

class LoraAddend final : public Addend {
 public:
  explicit LoraAddend(std::int64_t width) : width_(width) {}
  void add_block(Block block) { blocks_.push_back(std::move(block)); }

  void add(std::int64_t begin, std::int64_t n, float* values) const override {
    std::vector<float> sum;
    for (const Block& block : blocks_) {
      const std::int64_t last_row = std::min(block.row_end, (begin + n - 1) / width_ + 1);
      for (std::int64_t row = std::max(block.row_begin, begin / width_); row < last_row; ++row) {
        const std::int64_t at = row * width_ + block.column;  // of the block's row
        const std::int64_t from = std::max(begin, at), to = std::min(begin + n, at + block.columns);
        if (from >= to) continue;
        const auto count = static_cast<std::size_t>(to - from);
        sum.assign(count, 0.0F);
        for (std::int64_t k = 0; k < block.rank; ++k) {
          const float factor =
              block.factors[static_cast<std::size_t>((row - block.row_begin) * block.rank + k)];
          const float* const vector = block.vectors.data() + k * block.columns + (from - at);
          for (std::size_t i = 0; i < count; ++i) sum[i] += factor * vector[i];
        }
        for (std::size_t i = 0; i < count; ++i)
          values[from - begin + static_cast<std::int64_t>(i)] += sum[i];
      }
    }
  }

  std::uint64_t checksum() const override {
    std::uint64_t crc = 0;
    for (const Block& block : blocks_)
      for (const auto* list : {&block.factors, &block.vectors})
        crc = crc64(list->data(), list->size() * sizeof(float), crc);
    return crc;
  }

 private:
  std::int64_t width_;
  std::vector<Block> blocks_;
};

std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t rows,
                              std::int64_t columns) {
  std::vector<float> result(matrix.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      result[static_cast<std::size_t>(c * rows + r)] =
          matrix[static_cast<std::size_t>(r * columns + c)];
  return result;
}

class MergedSource final : public ModelSource {
 public:
  /// @param adapters  their path
  MergedSource(std::unique_ptr<ModelSource> base, const fs::path& adapters,
               const CheckpointReader* reader)
      : base_(std::move(base)), origins_(base_->origins()) {
    origins_.push_back(adapters);
    if (reader != nullptr) reader_ = *reader;
  }
  void add_block(const std::string& weight, std::int64_t width, Block block) {
    auto& addend = addends_[weight];
    if (!addend) addend = std::make_shared<LoraAddend>(width);
    addend->add_block(std::move(block));
  }

  bool is_merged() const override { return true; }
  const Json& config() const override { return base_->config(); }
  const CheckpointReader* checkpoint() const override {
    return reader_ ? &*reader_ : base_->checkpoint();
  }
  const fs::path& path() const override { return base_->path(); }
  std::vector<fs::path> origins() const override { return origins_; }
  const fs::path& config_dir() const override { return base_->config_dir(); }
  const std::vector<TensorInfo>& tensors() const override { return base_->tensors(); }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    auto record = base_->record(name);
    const auto found = addends_.find(name);
    if (found == addends_.end()) return record;
    TensorRecord sum = *record;
    // The base is a merged model itself.
    require<Unsupported>(!sum.addend,
                         "{}: an adapter of a model that has another adapter; merge "
                         "that one first (tessera consolidate --merge-lora)",
                         name);
    sum.addend = found->second;
    return std::make_shared<const TensorRecord>(std::move(sum));
  }
  File open_file(const std::string& name) const override { return base_->open_file(name); }
  std::string title(const std::string& name) const override { return base_->title(name); }

 private:
  std::unique_ptr<ModelSource> base_;
  std::vector<fs::path> origins_;
  std::optional<CheckpointReader> reader_;
  std::map<std::string, std::shared_ptr<LoraAddend>> addends_;
};

// The tensors of PEFT's file under tessera's names.
class PeftSource final : public TensorSource {
 public:
  explicit PeftSource(std::shared_ptr<const ShardedSource> file) : file_(std::move(file)) {}
  void add(const std::string& name, const TensorInfo& theirs) {
    tensors_.push_back({name, theirs.shape, theirs.dtype});
    theirs_.emplace(name, theirs.name);
  }

  const fs::path& path() const override { return file_->path(); }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  std::shared_ptr<const TensorRecord> record(const std::string& name) const override {
    return file_->record(title(name));
  }
  File open_file(const std::string& name) const override { return file_->open_file(name); }
  std::string title(const std::string& name) const override {
    const auto found = theirs_.find(name);
    require(found != theirs_.end(), "{} holds no tensor {}", path().string(), name);
    return found->second;
  }

 private:
  std::shared_ptr<const ShardedSource> file_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> theirs_;
};

// Settings under which an adapter is more than the product of A and B.
void check_peft_config(const Json& config, const std::string& where) {
  const auto text = [&](const char* key, const std::string& missing) {
    const auto found = config.find(key);
    return found == config.end() || found->is_null() ? missing
           : found->is_string()                      ? found->get<std::string>()
                                                     : found->dump();
  };
  require<CorruptCheckpoint>(config.is_object(), "{} is not an object", where);
  require<Unsupported>(text("peft_type", "LORA") == "LORA",
                       "{}: peft_type is {}; tessera reads LORA", where, text("peft_type", ""));
  require<Unsupported>(text("bias", "none") == "none",
                       "{}: bias is \"{}\", which trains biases of the base too; tessera reads "
                       "\"none\"",
                       where, text("bias", ""));
  // These change the weights of the base when they are loaded.
  const std::string start = text("init_lora_weights", "true");
  require<Unsupported>(start == "true" || start == "false" || start == "gaussian" ||
                           start == "orthogonal" || start == "eva",
                       "{}: init_lora_weights is \"{}\", which changes the base's weights; tessera "
                       "lacks it",
                       where, start);
  for (const char* key : {"use_dora", "lora_bias", "use_qalora", "alora_invocation_tokens"})
    require<Unsupported>(text(key, "false") == "false", "{}: {} is set, which tessera lacks", where,
                         key);
  for (const char* key :
       {"modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"}) {
    const auto found = config.find(key);
    require<Unsupported>(found == config.end() || found->empty(),
                         "{}: {} is set, which tessera lacks", where, key);
  }
}

// A number of alpha_pattern or rank_pattern for a module, as PEFT finds it.
double by_pattern(const Json& config, const char* key, const std::string& module, double other) {
  const auto patterns = config.find(key);
  if (patterns == config.end() || !patterns->is_object()) return other;
  for (const auto& [pattern, value] : patterns->items()) {
    try {
      if (value.is_number() && std::regex_match(module, std::regex("(.*\\.)?(" + pattern + ")")))
        return value.get<double>();
    } catch (const std::regex_error& error) {
      throw Unsupported("{} of {}: cannot read the pattern \"{}\": {}", key, kPeftConfig, pattern,
                        error.what());
    }
  }
  return other;
}

}  // namespace

std::string LoraLayer::peft_name(char which) const {
  return fmt::format("{}{}.lora_{}.weight", kPeftPrefix, hf_layer, which);
}

std::vector<LoraLayer> lora_layers(const Json& model, const std::vector<std::string>& targets) {
  std::vector<LoraLayer> layers = all_layers(model);
  for (const std::string& target : targets) {
    const bool any = std::any_of(layers.begin(), layers.end(), [&](const LoraLayer& layer) {
      return matches(target, layer.hf_layer);
    });
    if (any) continue;
    std::set<std::string> names;
    for (const LoraLayer& layer : layers) names.insert(last_part(layer.hf_layer));
    throw InvalidArgument(
        "lora.targets: no layer matches '{}'; there are {}, in modules such as {}, and {} is all "
        "of them",
        target, fmt::join(names, ", "), layers.front().hf_layer, kAllLinear);
  }
  std::erase_if(layers, [&](const LoraLayer& layer) {
    return std::none_of(targets.begin(), targets.end(),
                        [&](const std::string& target) { return matches(target, layer.hf_layer); });
  });
  return layers;
}

std::vector<LoraLayer> lora_layers(const Json& model) {
  const JsonReader reader(model, "model");
  std::vector<std::string> targets;
  const JsonReader list = reader.at("lora").at("targets");
  for (std::size_t i = 0; i < list.array_size(); ++i) targets.push_back(list.at(i).string());
  return lora_layers(model, targets);
}

std::vector<TensorInfo> lora_tensors(const Json& model) {
  const std::int64_t rank = JsonReader(model, "model").at("lora").at("rank").integer(1, 1 << 20);
  std::vector<TensorInfo> tensors;
  for (const LoraLayer& layer : lora_layers(model)) {
    tensors.push_back({layer.a(), {rank, layer.in}, DType::F32});
    tensors.push_back({layer.b(), {layer.count, rank}, DType::F32});
  }
  return tensors;
}

bool is_peft(const fs::path& dir) { return is_there(dir / kPeftConfig); }

std::unique_ptr<ShardedSource> open_peft_tensors(const fs::path& dir) {
  return is_there(dir / kPeftWeights) || !is_there(dir / kOldPeftWeights)
             ? open_safetensors_file(dir, kPeftWeights, kPeftKind)
             : open_torch_file(dir, kOldPeftWeights, kPeftKind);
}

PeftTensors read_peft(const fs::path& dir) {
  PeftTensors result;
  result.config_file = dir / kPeftConfig;
  result.config = std::make_shared<const Json>(
      parse_json(read_file(result.config_file, kMaxConfig), result.config_file.string()));
  result.source = open_peft_tensors(dir);
  for (const TensorInfo& tensor : result.source->tensors())
    result.tensors.emplace(tensor.name, tensor);
  return result;
}

PeftAdapter open_peft(const fs::path& dir, const Json& model) {
  return open_peft(read_peft(dir), model);
}

PeftAdapter open_peft(const PeftTensors& tensors, const Json& model) {
  const Json& config = *tensors.config;
  check_peft_config(config, tensors.config_file.string());
  const std::string where = tensors.source->where();
  PeftAdapter adapter;
  auto source = std::make_unique<PeftSource>(tensors.source);

  std::map<std::string, TensorInfo> found = tensors.tensors;
  const auto alpha_of = config.find("lora_alpha");
  const double alpha =
      alpha_of != config.end() && alpha_of->is_number() ? alpha_of->get<double>() : 8.0;
  const auto stable_of = config.find("use_rslora");
  const bool rank_stable = stable_of != config.end() && *stable_of == true;
  std::set<std::string> names;
  bool is_even = true;
  for (const LoraLayer& layer : all_layers(model)) {
    const auto a = found.find(layer.peft_name('A')), b = found.find(layer.peft_name('B'));
    if (a == found.end() && b == found.end()) continue;
    require<CorruptCheckpoint>(a != found.end() && b != found.end(), "{}: {} has one of A and B",
                               where, layer.hf_layer);
    const Shape &shape_a = a->second.shape, &shape_b = b->second.shape;
    const bool fits = shape_a.size() == 2 && shape_b.size() == 2 && shape_a[1] == layer.in &&
                      shape_b[0] == layer.count && shape_a[0] == shape_b[1] && shape_a[0] > 0;
    require<CorruptCheckpoint>(
        fits, "{}: the adapter of {} has shapes {} and {}; expected [rank, {}] and [{}, rank]",
        where, layer.hf_layer, shape_a, shape_b, layer.in, layer.count);
    source->add(layer.a(), a->second);
    source->add(layer.b(), b->second);
    const double own = by_pattern(config, "alpha_pattern", layer.hf_layer, alpha);
    const auto rank = static_cast<double>(shape_a[0]);
    is_even = is_even && own == alpha && (adapter.rank == 0 || adapter.rank == shape_a[0]);
    adapter.rank = shape_a[0];
    adapter.scales.push_back(own / (rank_stable ? std::sqrt(rank) : rank));
    adapter.layers.push_back(layer);
    names.insert(last_part(layer.hf_layer));
    found.erase(a);
    found.erase(b);
  }
  require(found.empty(), "{}: {} belongs to no layer of the model that LoRA can adapt", where,
          found.empty() ? "" : found.begin()->first);
  require<CorruptCheckpoint>(!adapter.layers.empty(), "{} holds no adapter", where);
  adapter.alpha = adapter.scales.front() * static_cast<double>(adapter.rank);
  if (!is_even) adapter.rank = 0, adapter.alpha = 0;
  // As names if they choose these layers and no others.
  adapter.targets.assign(names.begin(), names.end());
  if (lora_layers(model, adapter.targets).size() != adapter.layers.size()) {
    adapter.targets.clear();
    for (const LoraLayer& layer : adapter.layers) adapter.targets.push_back(layer.hf_layer);
  }
  adapter.source = std::move(source);
  return adapter;
}

Json peft_config(const Json& model) {
  const JsonReader lora = JsonReader(model, "model").at("lora");
  const std::vector<LoraLayer> layers = lora_layers(model);
  std::set<std::string> targets;
  for (const LoraLayer& layer : layers) targets.insert(last_part(layer.hf_layer));
  const std::vector<std::string> names(targets.begin(), targets.end());
  if (lora_layers(model, names).size() != layers.size()) {
    targets.clear();
    for (const LoraLayer& layer : layers) targets.insert(layer.hf_layer);
  }
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path", lora.at("base").string()},
          {"r", lora.at("rank").integer(1)},
          {"lora_alpha", lora.at("alpha").value()},
          {"lora_dropout", lora.at("dropout").value()},
          {"target_modules", targets},
          {"bias", "none"},
          {"fan_in_fan_out", layers.front().in_out},
          {"inference_mode", true}};
}

std::unique_ptr<ModelSource> merge_lora(std::unique_ptr<ModelSource> base,
                                        const TensorSource& adapters,
                                        const std::vector<LoraLayer>& layers,
                                        const std::vector<double>& scales,
                                        const CheckpointReader* reader) {
  std::map<std::string, Shape> shapes;
  for (const TensorInfo& tensor : base->tensors()) shapes[tensor.name] = tensor.shape;
  const std::string of = adapters.path().string(), to = base->path().string();
  auto merged = std::make_unique<MergedSource>(std::move(base), adapters.path(), reader);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LoraLayer& layer = layers[i];
    const auto weight = shapes.find(layer.weight());
    require(weight != shapes.end() && weight->second.size() == 2 &&
                weight->second[layer.in_out ? 0 : 1] == layer.in &&
                weight->second[layer.in_out ? 1 : 0] >= layer.first + layer.count,
            "the adapters in {} don't fit the model in {}: its {} {}", of, to, layer.weight(),
            weight == shapes.end() ? "is missing" : fmt::format("is {}", weight->second));
    const std::int64_t rank = adapters.record(layer.a())->shape[0];
    const auto load = [&](const std::string& name, std::int64_t n) {
      std::vector<float> values(static_cast<std::size_t>(n));
      adapters.read(name, 0, n, values.data(), DType::F32);
      return values;
    };
    std::vector<float> a = load(layer.a(), rank * layer.in),
                       b = load(layer.b(), layer.count * rank);
    for (float& value : layer.in_out ? a : b) value *= static_cast<float>(scales[i]);
    const std::int64_t last = layer.first + layer.count;
    if (layer.in_out)
      merged->add_block(layer.weight(), layer.count,
                        {0, layer.in, layer.first, layer.count, rank, transposed(a, rank, layer.in),
                         transposed(b, layer.count, rank)});
    else
      merged->add_block(layer.weight(), layer.in,
                        {layer.first, last, 0, layer.in, rank, std::move(b), std::move(a)});
  }
  return merged;
}

}  // namespace tessera::io
