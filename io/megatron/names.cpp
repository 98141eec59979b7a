#include "io/megatron/names.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace tessera::io {
namespace {

// Rows of a tensor of Megatron's.
enum class Rows : std::uint8_t { All, Query, Key, Value, QueryKeyValue, Gate, Up, Vocabulary };

/// Origin of a tensor of a Hugging Face model.
struct MegatronRule {
  std::string_view theirs;  ///< Hugging Face's name without "model." and ".weight"; *: a number
  /// Name without the layer, up to "weight" or "bias"; #: the number of an expert, if it is in the
  /// name. Fused with the next layer as in TransformerEngine, or else by itself.
  std::string_view ours, alone = {};
  Rows rows = Rows::All;
  bool transposed = false;
};

constexpr std::string_view kQkv = "self_attention.linear_qkv.",
                           kProj = "self_attention.linear_proj.";
constexpr std::string_view kFc1 = "mlp.linear_fc1.", kFc2 = "mlp.linear_fc2.";
constexpr std::string_view kExpertFc1 = "mlp.experts.experts.#linear_fc1.";
constexpr std::string_view kExpertFc2 = "mlp.experts.experts.#linear_fc2.";
constexpr std::string_view kInputNorm = "self_attention.linear_qkv.layer_norm_";
constexpr std::string_view kMlpNorm = "mlp.linear_fc1.layer_norm_";
constexpr std::string_view kEmbedding = "embedding.word_embeddings.", kHead = "output_layer.";
constexpr std::string_view kFinalNorm = "decoder.final_layernorm.", kLayers = "decoder.layers.";

constexpr MegatronRule kMegatronRules[] = {
    {"embed_tokens", kEmbedding, {}, Rows::Vocabulary},
    {"wte", kEmbedding, {}, Rows::Vocabulary},
    {"wpe", "embedding.position_embeddings."},
    {"lm_head", kHead, {}, Rows::Vocabulary},
    {"norm", kFinalNorm},
    {"ln_f", kFinalNorm},
    {"layers.*.input_layernorm", kInputNorm, "input_layernorm."},
    {"h.*.ln_1", kInputNorm, "input_layernorm."},
    {"layers.*.post_attention_layernorm", kMlpNorm, "pre_mlp_layernorm."},
    {"h.*.ln_2", kMlpNorm, "pre_mlp_layernorm."},
    {"layers.*.self_attn.q_proj", kQkv, {}, Rows::Query},
    {"layers.*.self_attn.k_proj", kQkv, {}, Rows::Key},
    {"layers.*.self_attn.v_proj", kQkv, {}, Rows::Value},
    {"layers.*.self_attn.qkv_proj", kQkv, {}, Rows::QueryKeyValue},
    {"h.*.attn.c_attn", kQkv, {}, Rows::QueryKeyValue, true},
    {"layers.*.self_attn.o_proj", kProj},
    {"h.*.attn.c_proj", kProj, {}, Rows::All, true},
    {"layers.*.self_attn.q_norm", "self_attention.q_layernorm."},
    {"layers.*.self_attn.k_norm", "self_attention.k_layernorm."},
    {"layers.*.mlp.gate_proj", kFc1, {}, Rows::Gate},
    {"layers.*.mlp.up_proj", kFc1, {}, Rows::Up},
    {"layers.*.mlp.gate_up_proj", kFc1},
    {"layers.*.mlp.down_proj", kFc2},
    {"h.*.mlp.c_fc", kFc1, {}, Rows::All, true},
    {"h.*.mlp.c_proj", kFc2, {}, Rows::All, true},
    {"layers.*.mlp.gate", "mlp.router."},
    {"layers.*.mlp.experts.*.gate_proj", kExpertFc1, {}, Rows::Gate},
    {"layers.*.mlp.experts.*.up_proj", kExpertFc1, {}, Rows::Up},
    {"layers.*.mlp.experts.*.down_proj", kExpertFc2},
    {"layers.*.block_sparse_moe.gate", "mlp.router."},
    {"layers.*.block_sparse_moe.experts.*.w1", kExpertFc1, {}, Rows::Gate},
    {"layers.*.block_sparse_moe.experts.*.w3", kExpertFc1, {}, Rows::Up},
    {"layers.*.block_sparse_moe.experts.*.w2", kExpertFc2},
};

// Megatron pads the vocabulary to a multiple of 128 and of the ranks that share it.
constexpr std::int64_t kMostPadding = 128 * 64;

bool cut_start(std::string_view& text, std::string_view start) {
  if (!text.starts_with(start)) return false;
  text.remove_prefix(start.size());
  return true;
}

// Hugging Face's "model.layers.3.mlp.up_proj.weight" as "layers.*.mlp.up_proj", 3 and "weight".
struct TheirName {
  std::string pattern, last;
  std::vector<std::int64_t> numbers;

  explicit TheirName(std::string_view name) {
    for (const std::string_view base : {"model.", "transformer."}) cut_start(name, base);
    for (std::size_t dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.')) {
      std::int64_t number = 0;
      const char* const end = name.data() + dot;
      const auto [read, error] = std::from_chars(name.data(), end, number);
      const bool is_number = error == std::errc{} && read == end && number >= 0;
      if (is_number) numbers.push_back(number);
      pattern +=
          (pattern.empty() ? "" : ".") + (is_number ? "*" : std::string(name.substr(0, dot)));
      name.remove_prefix(dot + 1);
    }
    last = name;
  }
};

// A place where a rule may find its rows.
struct Place {
  std::string name;
  Shape item;
  Rows rows;
};

std::vector<Place> places_of(const MegatronRule& rule, const TheirName& theirs) {
  std::vector<Place> places;
  for (const std::string_view module : {rule.ours, rule.alone}) {
    if (module.empty()) continue;
    std::vector<Place> forms{{std::string(module) + theirs.last, {}, rule.rows}};
    const auto is_half = rule.rows == Rows::Gate || rule.rows == Rows::Up;
    if (is_half)  // saved with singleton_local_shards
      forms.push_back({forms[0].name + (rule.rows == Rows::Gate ? "_w" : "_v"), {}, Rows::All});
    for (const Place& form : forms) {
      if (theirs.numbers.empty()) places.push_back(form);
      for (std::size_t stacked = 0; stacked < 4 && !theirs.numbers.empty(); ++stacked) {
        Place place = form;
        if (stacked & 1)
          place.item.push_back(theirs.numbers[0]);
        else
          place.name = fmt::format("{}.{}", theirs.numbers[0], place.name);
        if (const std::size_t at = place.name.find('#'); at != std::string::npos) {
          if (stacked & 2) place.item.push_back(theirs.numbers[1]);
          place.name.replace(at, 1, stacked & 2 ? "" : fmt::format("{}.", theirs.numbers[1]));
        } else if (stacked & 2) {
          continue;
        }
        place.name.insert(0, kLayers);
        places.push_back(std::move(place));
      }
    }
  }
  return places;
}

// Numbers of query heads, and of the groups that share a key and a value.
struct Heads {
  std::int64_t queries = 0, groups = 0;

  explicit Heads(const Json& config) {
    for (const char* key : {"num_attention_heads", "n_head"}) read(config, key, queries);
    groups = queries;
    for (const char* key : {"num_key_value_heads", "n_kv_head"}) read(config, key, groups);
    constexpr std::int64_t kMost = 1 << 20;
    require(queries > 0 && groups > 0 && queries < kMost && queries % groups == 0,
            "the configuration has {} heads with {} keys and values, by which Megatron's rows of "
            "queries, keys and values can't be told apart; give the model's config.json with "
            "--config",
            queries, groups);
  }
  static void read(const Json& config, const char* key, std::int64_t& value) {
    const auto found = config.is_object() ? config.find(key) : config.end();
    if (found != config.end() && found->is_number_integer()) value = found->get<std::int64_t>();
  }
};

// "optimizer.state.exp_avg.X" or "chained_1.optimizer.state.exp_avg.X" as "exp_avg" and "X"; else
// "" and the name.
std::pair<std::string, std::string_view> moment_of(std::string_view name) {
  std::string_view rest = name;
  if (cut_start(rest, "chained_")) {
    rest.remove_prefix(std::min(rest.find_first_not_of("0123456789"), rest.size()));
    if (!cut_start(rest, ".")) return {"", name};
  }
  if (!cut_start(rest, "optimizer.state.")) return {"", name};
  const std::size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return {"", name};
  return {std::string(rest.substr(0, dot)), rest.substr(dot + 1)};
}

// Prefix of the names of all weights, such as "module."; may be empty.
std::optional<std::string> find_prefix(const ShardedSource& source) {
  const std::string norm = std::string(kFinalNorm) + "weight";
  for (const TensorInfo& info : source.tensors()) {
    if (!info.name.ends_with(norm) || !moment_of(info.name).first.empty()) continue;
    const std::string prefix = info.name.substr(0, info.name.size() - norm.size());
    if (prefix.empty() || prefix.back() == '.') return prefix;
  }
  return std::nullopt;
}

/// The weights, or one kind of moments.
class MegatronTensors {
 public:
  MegatronTensors(const ShardedSource& source, const ModelNames& model, const Heads& heads)
      : where_(source.path().string()), model_(model), heads_(heads) {}

  void add(std::string_view name, const TensorInfo& info) { tensors_.emplace(name, Stored{info}); }

  /// Whether those that both have are of the same shapes.
  bool has_shapes_of(const MegatronTensors& other) const {
    return std::ranges::all_of(tensors_, [&](const auto& entry) {
      const auto found = other.tensors_.find(entry.first);
      return found == other.tensors_.end() || found->second.info.shape == entry.second.info.shape;
    });
  }

  /// @param kind  of moments; empty: weights
  std::vector<MadeTensor> make(const std::string& kind) {
    std::vector<MadeTensor> made;
    const auto make_one = [&](const ModelTensor& tensor) {
      const TheirName theirs(tensor.name);
      const auto* const rule =
          std::ranges::find(kMegatronRules, theirs.pattern, &MegatronRule::theirs);
      if (rule == std::end(kMegatronRules) ||
          theirs.numbers.size() != static_cast<std::size_t>(std::ranges::count(rule->theirs, '*')))
        return;
      for (const Place& place : places_of(*rule, theirs)) {
        const auto found = tensors_.find(place.name);
        if (found == tensors_.end()) continue;
        MadeTensor one = make_of(tensor, *rule, place, found->second);
        one.name =
            kind.empty() ? tensor.name : fmt::format("optimizer.state.{}.{}", tensor.name, kind);
        made.push_back(std::move(one));
        return;
      }
    };
    const ModelTensor* embedding = nullptr;
    bool has_head = false;
    for (const ModelTensor& tensor : model_.tensors) {
      make_one(tensor);
      const std::string pattern = TheirName(tensor.name).pattern;
      if (pattern == "embed_tokens" || pattern == "wte") embedding = &tensor;
      has_head = has_head || pattern == "lm_head";
    }
    // A head that the model ties to its embedding: match_model compares them.
    if (embedding != nullptr && !has_head) make_one({"lm_head.weight", embedding->shape});
    check_all_used();
    return made;
  }

 private:
  struct Stored {
    TensorInfo info;
    std::int64_t used = 0;  // elements
  };

  MadeTensor make_of(const ModelTensor& tensor, const MegatronRule& rule, const Place& place,
                     Stored& stored) const {
    const Shape& whole = stored.info.shape;
    const int lead = place.item.size();
    const auto fail = [&](const std::string& why) {
      return InvalidArgument(
          "{}: {} of shape {} does not hold {} of shape {}{}; is the config.json that of another "
          "model, or of another size of it?",
          where_, stored.info.name, whole, tensor.name, tensor.shape, why);
    };
    if (whole.size() <= lead) throw fail("");
    for (int i = 0; i < lead; ++i)
      if (place.item[i] >= whole[i])
        throw fail(fmt::format(" at position {} of {}", place.item[i], whole[i]));
    const Shape item(whole.begin() + lead, static_cast<std::size_t>(whole.size() - lead));
    const bool transposed = rule.transposed && item.size() == 2;
    const Shape wanted = transposed && tensor.shape.size() == 2
                             ? Shape{tensor.shape[1], tensor.shape[0]}
                             : tensor.shape;

    MadeTensor made{tensor.name, stored.info.name, place.item, {}, transposed};
    std::int64_t rows = 0;
    const auto take = [&](std::int64_t begin, std::int64_t n) {
      made.rows.emplace_back(begin, n);
      rows += n;
    };
    const std::int64_t all = item[0];
    switch (place.rows) {
      case Rows::All:
        take(0, all);
        break;
      case Rows::Vocabulary: {
        const std::int64_t padding = wanted.empty() ? 0 : all - wanted[0];
        if (padding < 0 || padding >= kMostPadding)
          throw fail(fmt::format(" and less than {} rows of padding", kMostPadding));
        take(0, all - padding);
        Shape rest = item;
        rest[0] = padding;
        stored.used += numel(rest);
        break;
      }
      case Rows::Gate:
      case Rows::Up:
        if (all % 2 != 0) throw fail(" and as many rows of gate or up");
        take(place.rows == Rows::Gate ? 0 : all / 2, all / 2);
        break;
      default:
        take_heads(place.rows, all, take, fail);
    }
    Shape shape = item;
    shape[0] = rows;
    if (shape != wanted) throw fail("");
    stored.used += numel(shape);
    return made;
  }

  // Rows are those of one group after the other: queries, a key and a value.
  template <typename Take, typename Fail>
  void take_heads(Rows which, std::int64_t all, Take&& take, Fail&& fail) const {
    const std::int64_t in_group = heads_.queries / heads_.groups;
    if (all == 0 || all % (heads_.groups * (in_group + 2)) != 0)
      throw fail(fmt::format(" and the rows of {} heads with {} keys and values", heads_.queries,
                             heads_.groups));
    const std::int64_t dim = all / (heads_.groups * (in_group + 2));
    const auto take_each = [&](std::int64_t begin, std::int64_t n) {
      for (std::int64_t group = 0; group < heads_.groups; ++group)
        take((group * (in_group + 2) + begin) * dim, n * dim);
    };
    const bool every = which == Rows::QueryKeyValue;
    if (every || which == Rows::Query) take_each(0, in_group);
    if (every || which == Rows::Key) take_each(in_group, 1);
    if (every || which == Rows::Value) take_each(in_group + 1, 1);
  }

  void check_all_used() const {
    for (const auto& [name, stored] : tensors_) {
      const std::int64_t all = numel(stored.info.shape);
      require(stored.used == 0 || stored.used == all,
              "{}: {} of shape {} has {} elements, but {} of them are in tensors of {}; has its "
              "configuration fewer layers or experts?",
              where_, stored.info.name, stored.info.shape, all, stored.used, model_.of);
    }
  }

  const std::string where_;
  const ModelNames& model_;
  const Heads& heads_;
  std::map<std::string, Stored, std::less<>> tensors_;  // by name without prefix
};

}  // namespace

bool is_megatron(const ShardedSource& source) {
  const auto prefix = find_prefix(source);
  return prefix && std::ranges::any_of(source.tensors(), [&](const TensorInfo& info) {
           return info.name.starts_with(*prefix + std::string(kLayers)) &&
                  info.name.find(".self_attention.linear_qkv.") != std::string::npos;
         });
}

std::string use_hugging_face_names(ShardedSource& source, const ModelNames& model,
                                   const Json& config) {
  const Heads heads(config);
  const std::string prefix = find_prefix(source).value_or("");
  std::map<std::string, MegatronTensors> kinds;  // the weights are the first
  std::string flattened;
  for (const TensorInfo& info : source.tensors()) {
    auto [kind, name] = moment_of(info.name);
    if (name.find("optimizer.distributed.") != std::string_view::npos) flattened = info.name;
    if (!cut_start(name, prefix)) continue;
    kinds.try_emplace(kind, source, model, heads).first->second.add(name, info);
  }
  std::vector<MadeTensor> made;
  for (auto& [kind, tensors] : kinds) {
    if (!tensors.has_shapes_of(kinds.at(""))) {
      flattened = fmt::format("optimizer.state.{}", kind);
      continue;
    }
    std::vector<MadeTensor> more = tensors.make(kind);
    std::ranges::move(more, std::back_inserter(made));
  }
  source.make(std::move(made));
  return flattened;
}

}  // namespace tessera::io
