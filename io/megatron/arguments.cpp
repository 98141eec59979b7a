#include "io/megatron/arguments.h"

#include <initializer_list>
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

}  // namespace

std::vector<std::string> check_megatron_arguments(const fs::path& dir, const Json& config) {
  const fs::path path = dir / kCommon;
  const std::string unknown = fmt::format(
      "{} has no arguments of Megatron-LM, so the numbers of heads and of tokens of the "
      "config.json, and zero-centered norms, are not compared with them",
      path.string());
  if (!is_there(path)) return {unknown};
  const File file = File::open(path);
  const ByteRange range(file, 0, file.size());
  std::optional<TorchArchive> archive;
  const auto warning = [&](const Error& error) {
    return fmt::format("{}; Megatron's arguments are not compared with the model", error.what());
  };
  try {
    archive.emplace(range, kMaxCommon, std::span<const PickleGlobal>(), UnknownGlobals::Inert);
  } catch (const CorruptCheckpoint& error) {
    return {warning(error)};
  } catch (const Unsupported& error) {
    return {warning(error)};
  }
  const PickleReader root(archive->root(), path.string());
  if (!root.value().is(PickleKind::Dict)) return {unknown};
  const PickleReader args = root.get("args");
  if (!args.value().is(PickleKind::Object)) return {unknown};
  compare(args, path.string() + ": args", config);
  return {};
}

}  // namespace tessera::io
