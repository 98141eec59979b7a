#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "io/chat/conversation_reader.h"
#include "io/data/dataset.h"
#include "tools/tessera/command.h"
#include "tools/tessera/model/text_generation.h"
#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

struct RenderCommand {
  std::string file, tokenizer, chat_template;
  std::string date = io::kChatDate;
  std::int64_t row = 1, seq_len = 0;
  bool json = false;
};

// The text of a conversation, where tokens with loss stand within marks.
std::string marked_text(const io::Tokenizer& tokenizer, const io::Conversation& conversation,
                        std::string_view open, std::string_view close) {
  std::string out, pending;
  TextStream text(tokenizer);
  bool had_loss = false;
  for (std::size_t i = 0; i < conversation.tokens.size(); ++i) {
    if (conversation.has_loss[i] != had_loss) {
      out += printable(std::exchange(pending, ""));
      out += had_loss ? close : open;
      had_loss = !had_loss;
    }
    pending += text.next({&conversation.tokens[i], 1});
    out += take_printable(pending);
  }
  out += printable(pending);
  return had_loss ? out.append(close) : out;
}

int run_render(const RenderCommand& options) {
  const auto tokenizer = options.tokenizer == "bytes" ? io::make_byte_tokenizer()
                                                      : io::load_tokenizer(options.tokenizer);
  const io::ConversationReader reader(
      tokenizer, io::ChatFormat(*tokenizer, options.chat_template,
                                io::parse_chat_date(options.date), "--chat-template"));
  // A row is shown even if another one is wrong.
  const bool only_row = options.row > 0 && options.seq_len == 0;
  std::int64_t count = 0;
  io::Conversations read;
  io::for_each_line(options.file, [&](std::string_view line, const std::string& where) {
    ++count;
    if (!only_row || count == options.row) read.add(reader.read(line, where), where);
    return !only_row || count < options.row;
  });
  require<IoError>(count > 0, "{} has no line of JSON", options.file);
  require(options.row <= count, "--row {}: {} has {} conversations", options.row, options.file,
          count);
  for (const auto& found : read.unlocated) fmt::print(stderr, "tessera: {}\n", found.second);
  const auto all = std::make_shared<const io::Conversations>(std::move(read));
  if (options.seq_len > 0) {
    const io::ConversationSamples rows(all, options.seq_len, io::DataOrder::Shuffled, 0,
                                       options.file);
    fmt::print(stderr, "tessera: {}\n", rows.report().str());
  }
  const bool color = detect_console(STDOUT_FILENO).color;
  const bool one_of_all = options.row > 0 && !only_row;
  const std::int64_t first = one_of_all ? options.row - 1 : 0;
  for (std::int64_t i = first; i < (one_of_all ? options.row : all->count()); ++i) {
    const std::int64_t begin = all->begin(i), end = all->end(i);
    const io::Conversation one{{all->tokens.begin() + begin, all->tokens.begin() + end},
                               {all->has_loss.begin() + begin, all->has_loss.begin() + end}};
    fmt::print(
        "{}\n",
        options.json
            ? nlohmann::json({{"tokens", one.tokens}, {"has_loss", one.has_loss}}).dump()
            : marked_text(*tokenizer, one, color ? "\x1b[32m" : "[[", color ? "\x1b[0m" : "]]"));
  }
  return 0;
}

}  // namespace

Command add_data_render(CLI::App& parent) {
  const auto options = std::make_shared<RenderCommand>();
  CLI::App* app = parent.add_subcommand(
      "render",
      "Show a conversation as the model sees it; tokens with loss are green, or within [[ ]]");
  app->add_option("FILE", options->file, "Conversations (.jsonl), see docs/conversations.md")
      ->required();
  app->add_option("--tokenizer", options->tokenizer,
                  "bytes, a tokenizer file, or a directory with one")
      ->required();
  app->add_option("--row", options->row, "Which conversation, from 1; 0: all")
      ->capture_default_str()
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  app->add_option("--seq-len", options->seq_len,
                  "Also report how the conversations fill rows of this many tokens");
  app->add_option("--chat-template", options->chat_template,
                  "File with a chat template; default: the tokenizer's own");
  app->add_option("--chat-date", options->date, "Date that the template gets from strftime_now")
      ->capture_default_str();
  app->add_flag("--json", options->json, "Token ids, and which have loss");
  return {app, [options] { return run_render(*options); }};
}

}  // namespace tessera::tools
