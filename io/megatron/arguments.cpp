#include "io/megatron/arguments.h"

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "core/base/error.h"
#include "io/pickle/pickle_reader.h"
#include "io/torch/torch_archive.h"

namespace tessera::io {
namespace {

constexpr const char* kCommon = "common.pt";
constexpr std::int64_t kMaxCommon = std::int64_t{64} << 20;  // bytes

std::string text_in(const Json& config, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto found = config.is_object() ? config.find(key) : config.end();
    if (found == config.end()) continue;
    if (found->is_string()) return found->get<std::string>();
    if (found->is_number_integer()) return fmt::format("{}", found->get<std::int64_t>());
  }
  return "";
}

class Arguments {
 public:
  Arguments(const PickleReader& args, std::string where) : args_(args), where_(std::move(where)) {}

  bool flag(const char* name) const {
    const PickleReader value = args_.get(name);
    return value.value().is(PickleKind::Bool) && value.value().integer != 0;
  }

  // Requires a number to be the configuration's, if both have it.
  void compare(const char* name, const Json& config,
               std::initializer_list<const char*> keys) const {
    const PickleReader value = args_.get(name);
    const std::string theirs = text_in(config, keys);
    if (!value.value().is(PickleKind::Int) || theirs.empty()) return;
    require(theirs == fmt::format("{}", value.integer()),
            "{}: Megatron's {} is {}, but the configuration's {} is {}; give the config.json of "
            "this model with --config",
            where_, name, value.integer(), *keys.begin(), theirs);
  }

  // Requires the vocabulary, with its padding, to be as large as Megatron's.
  void compare_vocabulary(const Json& config) const {
    const auto number = [&](const char* name) -> std::int64_t {
      const PickleReader value = args_.get(name);
      return value.value().is(PickleKind::Int) ? value.integer() : 0;
    };
    const std::int64_t padded = number("padded_vocab_size");
    const std::int64_t most = std::int64_t{1} << 31;
    const std::int64_t by = number("make_vocab_size_divisible_by"),
                       ranks = number("tensor_model_parallel_size");
    const auto found = config.is_object() ? config.find("vocab_size") : config.end();
    if (found == config.end() || !found->is_number_integer() || padded <= 0 || by <= 0 ||
        ranks <= 0 || by > most || ranks > most)
      return;
    const auto size = found->get<std::int64_t>();
    const std::int64_t unit = by * ranks;
    require(size > padded || padded - size < unit,
            "{}: Megatron's vocabulary has {} tokens, padded to a multiple of {}, but the "
            "configuration's vocab_size is {}; give the config.json of this model with --config",
            where_, padded, unit, size);
  }

 private:
  const PickleReader& args_;
  const std::string where_;
};

void compare(const PickleReader& args, const std::string& where, const Json& config) {
  const Arguments arguments(args, where);
  arguments.compare("num_attention_heads", config, {"num_attention_heads", "n_head"});
  if (arguments.flag("group_query_attention"))
    arguments.compare("num_query_groups", config, {"num_key_value_heads", "n_kv_head"});
  arguments.compare_vocabulary(config);
  // The weights of norms are stored less 1, as Gemma has them.
  const bool is_less_1 = arguments.flag("apply_layernorm_1p");
  const bool wants_less_1 = text_in(config, {"model_type", "arch"}).starts_with("gemma");
  require<Unsupported>(is_less_1 == wants_less_1,
                       "{}: Megatron's apply_layernorm_1p is {}, but the model's norms multiply by "
                       "{}; such weights compute something else there",
                       where, is_less_1, wants_less_1 ? "their weights and 1" : "their weights");
  require<Unsupported>(
      !arguments.flag("rotary_interleaved"),
      "{}: Megatron's rotary_interleaved is true, but Hugging Face's models rotate "
      "halves; such weights compute something else there",
      where);
}

// Calls f() with the content of common.pt. @return why that can't be read; empty if it was
template <typename F>
std::string read_common(const fs::path& path, F&& f) {
  const File file = File::open(path);
  const ByteRange range(file, 0, file.size());
  std::optional<TorchArchive> archive;
  try {
    archive.emplace(range, kMaxCommon, std::span<const PickleGlobal>(), UnknownGlobals::Inert);
  } catch (const CorruptCheckpoint& error) {
    return error.what();
  } catch (const Unsupported& error) {
    return error.what();
  }
  f(archive->root());
  return "";
}

// Lists of groups, also of chained optimizers: {"optimizer": {"param_groups": [...]}}, or by number.
void find_groups(const PickleValue& value, int depth, std::vector<const PickleValue*>& lists) {
  constexpr int kMaxDepth = 3;
  constexpr std::size_t kMaxKeys = 64;
  if (!value.is(PickleKind::Dict) || value.items().size() > 2 * kMaxKeys) return;
  const PickleValue* const list = value.find("param_groups");
  if (list != nullptr && list->is(PickleKind::List)) return lists.push_back(list);
  for (std::size_t i = 1; i < value.items().size() && depth < kMaxDepth; i += 2)
    find_groups(*value.items()[i], depth + 1, lists);
}

}  // namespace

Hyperparameters read_megatron_hyperparameters(const fs::path& dir) {
  const fs::path path = dir / kCommon;
  Hyperparameters result;
  if (!is_there(path)) return result;
  std::shared_ptr<const Json> decayed, others;
  HyperparametersReader reader;
  bool is_clear = true;
  const auto add = [&](const PickleValue& group) {
    const std::shared_ptr<const Json> settings = reader.read_group(group).first;
    const auto factor = settings ? settings->find("wd_mult") : Json::const_iterator();
    if (!settings || factor == settings->end() || !factor->is_number()) {
      is_clear = false;
      return;
    }
    auto& kept = factor->get<double>() != 0 ? decayed : others;
    for (const char* key : {"lr", "betas", "eps", "weight_decay"})
      is_clear = is_clear && (!kept || kept->value(key, Json()) == settings->value(key, Json()));
    if (!kept) kept = settings;
  };
  read_common(path, [&](const PickleValue& root) {
    const PickleValue* const optimizer =
        root.is(PickleKind::Dict) ? root.find("optimizer") : nullptr;
    const PickleValue* const args = root.is(PickleKind::Dict) ? root.find("args") : nullptr;
    if (args != nullptr && args->is(PickleKind::Object)) {
      const PickleReader arguments(*args, path.string() + ": args");
      is_clear = !Arguments(arguments, arguments.where()).flag("apply_wd_to_qk_layernorm");
    }
    std::vector<const PickleValue*> lists;
    if (optimizer != nullptr) find_groups(*optimizer, 0, lists);
    constexpr std::size_t kMaxGroups = 64;
    for (const PickleValue* list : lists)
      for (const PickleValue* group :
           list->items().first(std::min(list->items().size(), kMaxGroups)))
        if (!reader.is_full()) add(*group);
  });
  result = reader.finish();
  if (result.too_many) return result;
  if (!is_clear || !decayed || !others) return {};
  result.groups = {{decayed, ParamGroup::Of::Matrices}, {others, ParamGroup::Of::Others}};
  return result;
}

std::vector<std::string> check_megatron_arguments(const fs::path& dir, const Json& config) {
  const fs::path path = dir / kCommon;
  const std::string unknown = fmt::format(
      "{} has no arguments of Megatron-LM, so the numbers of heads and of tokens of the "
      "config.json, and zero-centered norms, are not compared with them",
      path.string());
  if (!is_there(path)) return {unknown};
  bool has_arguments = false;
  const std::string problem = read_common(path, [&](const PickleValue& value) {
    const PickleReader root(value, path.string());
    if (!root.value().is(PickleKind::Dict)) return;
    const PickleReader args = root.get("args");
    has_arguments = args.value().is(PickleKind::Object);
    if (has_arguments) compare(args, path.string() + ": args", config);
  });
  if (!problem.empty()) return {problem + "; Megatron's arguments are not compared with the model"};
  if (!has_arguments) return {unknown};
  return {};
}

}  // namespace tessera::io
