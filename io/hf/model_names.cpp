#include "io/hf/model_names.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "core/base/error.h"
#include "io/hf/config.h"
#include "io/source/open_sharded.h"

namespace tessera::io {
namespace {

constexpr std::string_view kHead = "lm_head.weight";
constexpr std::size_t kMostCopies = 4;  // of tied weights: T5 has three

enum class Head { Causal, None, Other };

Head head_of(const Json& config) {
  if (is_headless(config)) return Head::None;
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array() || names->empty() || !names->front().is_string())
    return Head::Causal;
  const std::string& name = names->front().get_ref<const std::string&>();
  return name.ends_with("ForCausalLM") || name.ends_with("LMHeadModel") ? Head::Causal
                                                                        : Head::Other;
}

std::string_view cut_prefix(std::string_view prefix, std::string_view name) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

// Whether a prefix ends with these parts of names.
bool has_last(std::string_view prefix, std::string_view last) {
  return prefix.ends_with(last) &&
         (prefix.size() == last.size() || prefix[prefix.size() - last.size() - 1] == '.');
}

TensorInfo info_of(const ShardedSource& source, std::size_t i) {
  const std::vector<TensorInfo>& infos = source.tensors();
  if (i < infos.size()) return infos[i];
  const ShardedSource::Unreadable& other = source.unreadable()[i - infos.size()];
  const bool is_float = other.safetensors_dtype.starts_with("F");
  return {other.name, other.shape, is_float ? DType::F32 : other.carrier.value_or(DType::U8)};
}

// Where a running model of transformers 5 has the weights of expert 3, of [rows, columns].
struct HeldExpert {
  std::string_view name;  // X.experts.3.NAME.weight on disk
  std::string_view held;  // X.experts.HELD, of [experts, parts * rows, columns]
  std::int64_t part, parts;
};
constexpr HeldExpert kHeldExperts[] = {
    {"gate_proj", "gate_up_proj", 0, 2}, {"w1", "gate_up_proj", 0, 2},
    {"up_proj", "gate_up_proj", 1, 2},   {"w3", "gate_up_proj", 1, 2},
    {"down_proj", "down_proj", 0, 1},    {"w2", "down_proj", 0, 1}};

constexpr std::int64_t kMostRows = std::int64_t{1} << 40;

// Sets what a running model has: experts stacked, and in Mixtral another name of their module.
void set_held(std::vector<ModelTensor>& tensors) {
  constexpr std::string_view kMixtral = ".block_sparse_moe.", kExperts = ".experts.";
  std::unordered_map<std::string, std::int64_t> experts;  // by name of the stack
  for (ModelTensor& tensor : tensors) {
    tensor.held = tensor.name;
    tensor.held_shape = tensor.shape;
    if (const std::size_t at = tensor.held.find(kMixtral); at != std::string::npos)
      tensor.held.replace(at, kMixtral.size(), ".mlp.");
    const std::size_t at = tensor.held.find(kExperts);
    if (at == std::string::npos || tensor.shape.size() != 2 || tensor.shape[0] > kMostRows)
      continue;
    const std::string stem = tensor.held.substr(0, at + kExperts.size());
    const std::string_view rest = std::string_view(tensor.held).substr(stem.size());
    std::int32_t number = -1;
    const char* const end = std::from_chars(rest.data(), rest.data() + rest.size(), number).ptr;
    const std::string_view last = rest.substr(static_cast<std::size_t>(end - rest.data()));
    const auto* const kind = std::ranges::find_if(kHeldExperts, [&](const HeldExpert& one) {
      return last == fmt::format(".{}.weight", one.name);
    });
    if (number < 0 || kind == std::end(kHeldExperts)) continue;
    const std::int64_t rows = tensor.shape[0];
    tensor.held = stem + std::string(kind->held);
    tensor.held_shape = {0, kind->parts * rows, tensor.shape[1]};
    tensor.expert = number;
    tensor.begin = kind->part * rows;
    std::int64_t& count = experts[tensor.held];
    count = std::max<std::int64_t>(count, number + std::int64_t{1});
  }
  for (ModelTensor& tensor : tensors)
    if (tensor.expert >= 0) tensor.held_shape[0] = experts[tensor.held];
}

// Whether checksums say that two tensors are equal; empty if they say nothing.
std::optional<bool> compare_checksums(const TensorRecord& a, const TensorRecord& b) {
  if (a.chunks.size() != b.chunks.size()) return {};
  bool equal = true;
  for (std::size_t i = 0; i < a.chunks.size(); ++i) {
    const Chunk &x = a.chunks[i], &y = b.chunks[i];
    if (x.storage || y.storage || x.box != y.box || x.begin != y.begin || x.end != y.end ||
        x.checksum != y.checksum || x.checksum == Checksum::None)
      return {};
    equal = equal && x.crc64 == y.crc64;
  }
  return equal;
}

bool are_equal(const TensorSource& source, const std::string& a, const std::string& b) {
  const auto first = source.record(a), second = source.record(b);
  if (first->dtype != second->dtype || first->shape != second->shape) return false;
  if (const auto known = compare_checksums(*first, *second)) return *known;
  const std::int64_t size = numel(first->shape);
  const std::int64_t piece = (std::int64_t{1} << 20) / first->width();
  std::vector<char> left(static_cast<std::size_t>(std::min(piece, size) * first->width()));
  std::vector<char> right(left.size());
  for (std::int64_t begin = 0; begin < size; begin += piece) {
    const std::int64_t end = std::min(size, begin + piece);
    source.read(a, begin, end, left.data(), first->dtype);
    source.read(b, begin, end, right.data(), first->dtype);
    if (std::memcmp(left.data(), right.data(),
                    static_cast<std::size_t>((end - begin) * first->width())) != 0)
      return false;
  }
  return true;
}

}  // namespace

ModelNames names_of_family(const HfFamily& family, const Json& model, const Json& config,
                           const std::string& of) {
  const Head head = head_of(config);
  ModelNames names{of, {}, std::string(family.prefix), head == Head::Other};
  for (const HfTensor& tensor : family.tensors(model)) {
    for (const HfTensor::Part& part : tensor.parts) {
      if (head != Head::Causal && part.name == kHead) continue;
      const bool has_base = head == Head::None;
      names.tensors.push_back(
          {std::string(cut_prefix(has_base ? names.base : "", part.name)), tensor.shape_of(part)});
    }
  }
  if (head == Head::None) names.base.clear();
  set_held(names.tensors);
  return names;
}

ModelNames names_in_directory(const fs::path& dir) {
  const auto source = open_sharded(dir);
  require(source != nullptr && source->kind() == "Hugging Face model",
          "{} is no Hugging Face model directory, whose tensors --like would compare",
          dir.string());
  ModelNames names{dir.string(), {}, "", false};
  for (std::size_t i = 0; i < source->tensors().size() + source->unreadable().size(); ++i) {
    const TensorInfo info = info_of(*source, i);
    names.tensors.push_back({info.name, info.shape});
  }
  set_held(names.tensors);
  return names;
}

std::string NameLayout::name_of(const ModelNames& model, const ModelTensor& tensor) const {
  const std::string& name = is_held ? tensor.held : tensor.name;
  return std::string(lacks_base ? cut_prefix(model.base, name) : name);
}

NameLayout find_layout(const ModelNames& model, const std::vector<std::string>& names,
                       bool any_prefix) {
  const bool has_held = std::ranges::any_of(
      model.tensors, [](const ModelTensor& tensor) { return tensor.held != tensor.name; });
  constexpr double kOtherModel = 0.2;
  NameLayout best;
  double best_share = -1;
  std::map<std::string, double> shares;  // largest share of the names behind each prefix
  for (const bool is_held : {false, true}) {
    for (const bool lacks_base : {false, true}) {
      if ((is_held && !has_held) || (lacks_base && model.base.empty())) continue;
      NameLayout layout{is_held, lacks_base};
      std::unordered_set<std::string> wanted;
      std::size_t longest = 0;
      for (const ModelTensor& tensor : model.tensors) {
        const std::string name = layout.name_of(model, tensor);
        longest = std::max(longest, name.size());
        wanted.insert(name);
      }
      std::map<std::string_view, std::size_t> found;  // names behind each prefix
      for (const std::string_view name : names) {
        for (std::size_t at = 0; at < name.size();) {
          const std::string_view prefix = name.substr(0, at);
          // Names behind the base are those of the layout that has it.
          const bool is_base = lacks_base && has_last(prefix, model.base);
          if (!is_base && name.size() - at <= longest &&
              wanted.contains(std::string(name.substr(at))))
            ++found[prefix];
          const std::size_t dot = any_prefix ? name.find('.', at) : std::string_view::npos;
          if (dot == std::string_view::npos) break;
          at = dot + 1;
        }
      }
      for (const auto& [prefix, count] : found) {
        const double share = static_cast<double>(count) / static_cast<double>(wanted.size());
        double& most = shares[std::string(prefix)];
        most = std::max(most, share);
        if (share <= best_share) continue;
        best_share = share;
        layout.prefix = prefix;
        layout.found = count;
        layout.is_complete = count == wanted.size();
        best = layout;
      }
    }
  }
  for (const auto& [prefix, share] : shares)
    if (share >= kOtherModel && prefix != best.prefix) best.others.push_back(prefix);
  return best;
}

ModelMatch match_model(const ModelNames& model, const ShardedSource& source,
                       const std::vector<TensorName>& names, bool any_prefix) {
  ModelMatch match;
  std::vector<std::string> weights;
  for (const TensorName& name : names)
    if (name.role == TensorRole::Weight) weights.push_back(name.name);
  match.layout = find_layout(model, weights, any_prefix);
  const std::string& prefix = match.layout.prefix;

  std::unordered_map<std::string, Shape> wanted;
  std::vector<TensorInfo> expected, given;
  for (const ModelTensor& tensor : model.tensors) {
    const std::string name = match.layout.name_of(model, tensor);
    const Shape& shape = match.layout.is_held ? tensor.held_shape : tensor.shape;
    if (wanted.emplace(name, shape).second) expected.push_back({name, shape, DType::F32});
  }
  std::unordered_map<std::string, std::size_t> places;
  std::vector<std::size_t> unexpected;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].role != TensorRole::Weight) continue;
    if (!names[i].name.starts_with(prefix)) {
      match.ignored.emplace_back(i, fmt::format("outside of the model, which is in {}", prefix));
      continue;
    }
    TensorInfo info = info_of(source, i);
    info.name = names[i].name.substr(prefix.size());
    if (wanted.contains(info.name)) {
      places.emplace(info.name, i);
      given.push_back(std::move(info));
    } else if (HfFamily::is_buffer(info.name)) {
      match.ignored.emplace_back(i, "a buffer");
    } else if (model.is_open && !info.name.starts_with(model.base)) {
      match.extra.push_back(i);
    } else {
      unexpected.push_back(i);
    }
  }
  for (const ModelTensor& tensor : model.tensors) {
    const auto place = places.find(match.layout.name_of(model, tensor));
    const bool is_there = place != places.end();
    const bool is_part = match.layout.is_held && tensor.expert >= 0;
    const bool fits =
        is_there && (!is_part || info_of(source, place->second).shape == tensor.held_shape);
    match.found.push_back(fits ? std::optional(place->second) : std::nullopt);
  }
  const bool may_be_copies = unexpected.size() <= kMostCopies;
  for (const std::size_t i : unexpected) {
    TensorInfo info = info_of(source, i);
    const auto copy_of = [&](const std::optional<std::size_t>& other) {
      return other && info.shape.size() == 2 && info_of(source, *other).shape == info.shape &&
             are_equal(source, names[i].source, names[*other].source);
    };
    const auto original =
        may_be_copies ? std::ranges::find_if(match.found, copy_of) : match.found.end();
    if (original != match.found.end()) {
      match.ignored.emplace_back(
          i, fmt::format("equal to {}, to which it is tied", names[**original].source));
      continue;
    }
    info.name = names[i].name.substr(prefix.size());
    given.push_back(std::move(info));
  }
  match.comparison = compare_tensors(expected, given);
  return match;
}

TensorPlace place_of(const ModelTensor& tensor, const TensorInfo& stored, const NameLayout& layout,
                     const TensorSource& source, PartsSource& parts) {
  if (!layout.is_held || tensor.expert < 0) return {&source, stored};
  const std::int64_t end = tensor.begin + tensor.shape[0];
  TensorInfo part{fmt::format("{}[{}][{}:{}]", stored.name, tensor.expert, tensor.begin, end),
                  tensor.shape, stored.dtype};
  parts.add(part, {stored.name, tensor.expert, tensor.begin, tensor.shape[0]});
  return {&parts, std::move(part)};
}

ModelNames names_of_weights(const ShardedSource& source, const std::vector<TensorName>& names) {
  ModelNames model;
  model.of = source.where();
  std::optional<std::string> first;  // part of all names
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].role != TensorRole::Weight) continue;
    const std::string& name = names[i].name;
    const std::size_t readable = source.tensors().size();
    const Shape& shape =
        i < readable ? source.tensors()[i].shape : source.unreadable()[i - readable].shape;
    model.tensors.push_back({name, shape, name, shape});
    const std::string part = name.substr(0, name.find('.') + 1);
    if (!first) first = part;
    if (*first != part) first = "";
  }
  model.base = first.value_or("");
  return model;
}

std::vector<TensorName> name_all(const ShardedSource& source, const NameRules& rules) {
  std::vector<KeyedName> keyed;
  for (std::size_t i = 0; i < source.tensors().size(); ++i)
    keyed.push_back({source.tensors()[i].name, source.top_keys()[i]});
  for (const ShardedSource::Unreadable& tensor : source.unreadable())
    keyed.push_back({tensor.name, tensor.top_key});
  std::vector<TensorName> names = name_tensors(keyed, rules, source.where());
  check_distinct(names, source.where());
  return names;
}

}  // namespace tessera::io
