#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/clock.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/model/text_generation.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string model;
  std::string prompt;
  std::vector<std::int32_t> prompt_tokens;
  std::int64_t max_new_tokens = 200;
  models::SamplingOptions sampling{.temperature = 0.8};
  std::int64_t seed = 1337;
  LoadOptions load;
  bool json = false;
};

int run(const Options& options) {
  options.sampling.validate();
  require(options.prompt.empty() != options.prompt_tokens.empty(),
          "give a prompt: either --prompt TEXT or --prompt-tokens ID ...");
  LoadedModel loaded = load_model(options.model, options.load);
  std::vector<std::int32_t> prompt = options.prompt_tokens;
  std::size_t hidden = 0;  // special tokens before the prompt's text
  if (prompt.empty()) {
    require<Unsupported>(
        loaded.tokenizer != nullptr,
        "{} came without a tokenizer that this build reads ({}); give token ids with "
        "--prompt-tokens",
        loaded.path.string(), loaded.no_tokenizer);
    prompt = loaded.tokenizer->encode(options.prompt, "--prompt");
    const auto prefix = loaded.tokenizer->prefix();
    hidden = prefix.size();
    prompt.insert(prompt.begin(), prefix.begin(), prefix.end());
  }
  const std::int64_t vocab_size = loaded.model->arch().vocab_size;
  for (const std::int32_t id : prompt)
    require(id >= 0 && id < vocab_size,
            "--prompt-tokens: {} is not one of the model's ids, 0 to {}", id, vocab_size - 1);
  const RngKey key =
      RngKey::make(static_cast<std::uint64_t>(options.seed), RngPurpose::Sampling, 0);
  // Streams text unless --json is given. `pending` holds an incomplete UTF-8 character.
  const bool stream = !options.json;
  std::string pending;
  std::optional<TextStream> text;
  if (loaded.tokenizer) text.emplace(*loaded.tokenizer);
  const char* separator = "";
  const auto show = [&](std::span<const std::int32_t> tokens) {
    if (loaded.tokenizer == nullptr) {
      if (!stream) return;
      std::cout << separator << fmt::format("{}", fmt::join(tokens, " ")) << std::flush;
      separator = " ";
    } else {
      pending += text->next(tokens);
      if (stream) std::cout << take_printable(pending) << std::flush;
    }
  };
  show(std::span(prompt).subspan(hidden));
  if (!stream) pending.clear();
  const auto start = std::chrono::steady_clock::now();
  const auto ids = generate(*loaded.model, loaded.context, prompt, options.max_new_tokens,
                            options.sampling, key, [&](std::int32_t token) {
                              show({&token, 1});
                            });
  if (stream) {
    std::cout << printable(pending) << std::endl;
    return 0;
  }
  nlohmann::ordered_json out;
  out["model"] = loaded.path.string();
  out["prompt_tokens"] = prompt;
  out["tokens"] = ids;
  out["seconds"] = seconds_since(start);
  if (loaded.tokenizer) out["text"] = printable(pending);
  // error_handler_t::replace, because the path can be invalid UTF-8.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  std::cout << out.dump(-1, ' ', false, kReplace) << std::endl;
  return 0;
}

}  // namespace

Command add_generate(CLI::App& parent) {
  const auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("generate", "Continue a text with a model");
  add_load_options(*app, options->model, options->load);
  app->add_option("--prompt", options->prompt, "Text to continue");
  app->add_option("--prompt-tokens", options->prompt_tokens, "Token ids to continue");
  app->add_option("--max-new-tokens", options->max_new_tokens, "Number of tokens to generate")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30));
  app->add_option("--temperature", options->sampling.temperature,
                  "Sampling temperature; 0: always the most likely token")
      ->capture_default_str();
  app->add_option("--top-k", options->sampling.top_k,
                  "Sample from the k most likely tokens; 0: all")
      ->capture_default_str();
  app->add_option("--top-p", options->sampling.top_p,
                  "Sample from the most likely tokens that together reach this probability")
      ->capture_default_str();
  app->add_option("--seed", options->seed, "Random seed")->capture_default_str();
  app->add_flag("--json", options->json, "Machine-readable output");
  return {app,
          [options] { return with_load_advice(options->load, {}, [&] { return run(*options); }); }};
}

}  // namespace tessera::tools
