#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/clock.h"
#include "io/base/file.h"
#include "io/chat/conversation_reader.h"
#include "io/tokenizer/unicode.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/model/text_generation.h"

namespace tessera::tools {
namespace {

struct Options {
  std::string model;
  std::string prompt;
  std::vector<std::int32_t> prompt_tokens;
  std::string chat, messages, chat_template;
  std::int64_t max_new_tokens = 200;
  models::SamplingOptions sampling{.temperature = 0.8};
  std::int64_t seed = 1337;
  LoadOptions load;
  bool json = false;
};

// The conversation of --chat or --messages, as the model sees it before its answer.
std::vector<std::int32_t> chat_prompt(const Options& options, const io::Tokenizer& tokenizer,
                                      std::vector<std::int32_t>& ends) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  const io::ChatFormat format(tokenizer, options.chat_template, local, "--chat-template");
  const std::size_t malformed = io::find_malformed_utf8(options.chat);
  require(malformed == options.chat.npos, "--chat: byte {} is not valid UTF-8", malformed);
  io::OrderedJson json{{"messages", {{{"role", "user"}, {"content", options.chat}}}}};
  if (!options.messages.empty()) {
    json = io::parse_ordered_json(io::read_file(options.messages, 64 << 20), options.messages);
    if (json.is_array()) json = io::OrderedJson{{"messages", json}};
    require(json.is_object() && json.contains("messages"),
            "{}: expected a list of messages, or an object with \"messages\"", options.messages);
  }
  io::chat::Dict conversation;
  try {
    conversation = io::template_variables(json, {"messages"});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", options.messages, error.what());
  }
  ends = format.turn_ends(tokenizer, conversation);
  return tokenizer.encode(format.render(conversation, true).text, "--chat");
}

int run(const Options& options) {
  options.sampling.validate();
  const bool chats = !options.chat.empty() || !options.messages.empty();
  const int prompts = (options.prompt.empty() ? 0 : 1) + (options.prompt_tokens.empty() ? 0 : 1) +
                      (options.chat.empty() ? 0 : 1) + (options.messages.empty() ? 0 : 1);
  require(
      prompts == 1,
      "give one prompt: --prompt TEXT, --chat TEXT, --messages FILE, or --prompt-tokens ID ...");
  LoadedModel loaded = load_model(options.model, options.load);
  std::vector<std::int32_t> prompt = options.prompt_tokens;
  std::size_t hidden = 0;  // special tokens before the prompt's text
  std::vector<std::int32_t> ends;
  if (prompt.empty()) {
    require<Unsupported>(
        loaded.tokenizer != nullptr,
        "{} came without a tokenizer that this build reads ({}); give token ids with "
        "--prompt-tokens",
        loaded.path.string(), loaded.no_tokenizer);
    if (chats) {
      prompt = chat_prompt(options, *loaded.tokenizer, ends);
      hidden = prompt.size();
    } else {
      prompt = loaded.tokenizer->encode(options.prompt, "--prompt");
      const auto prefix = loaded.tokenizer->prefix();
      hidden = prefix.size();
      prompt.insert(prompt.begin(), prefix.begin(), prefix.end());
    }
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
  const auto ids = generate(
      *loaded.model, loaded.context, prompt, options.max_new_tokens, options.sampling, key,
      [&](std::int32_t token) {
        const auto& eos = loaded.model->arch().eos_tokens;
        const bool is_end = std::ranges::find(ends, token) != ends.end() ||
                            std::ranges::find(eos, token) != eos.end();
        if (!chats || !is_end) show({&token, 1});
      },
      ends);
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
  app->add_option("--chat", options->chat, "Message to answer, through the model's chat template");
  app->add_option("--messages", options->messages,
                  "JSON file with a conversation to answer: a list of messages, or an object with "
                  "\"messages\"");
  app->add_option("--chat-template", options->chat_template,
                  "File with a chat template for --chat and --messages; default: the model's");
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
