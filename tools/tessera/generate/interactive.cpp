#include <unistd.h>

#include <csignal>
#include <iostream>
#include <nlohmann/json.hpp>

#include "io/tokenizer/unicode.h"
#include "tools/tessera/generate/generate_options.h"
#include "tools/tessera/model/chat_prompt.h"
#include "tools/tessera/signal/stop_signal.h"

namespace tessera::tools {

int run_interactive(const GenerateOptions& options, LoadedModel& loaded) {
  io::OrderedJson conversation = options.messages.empty()
                                     ? io::OrderedJson{{"messages", io::OrderedJson::array()}}
                                     : read_messages(options.messages);
  io::OrderedJson& messages = conversation["messages"];
  const auto add = [&](const char* role, const std::string& content) {
    messages.push_back({{"role", role}, {"content", content}});
  };
  const bool on_terminal = ::isatty(STDIN_FILENO) == 1 && ::isatty(STDOUT_FILENO) == 1;
  GenerationOptions generation = options.generation();
  std::string line;
  const auto read_line = [&] {
    if (on_terminal) std::cout << "> " << std::flush;
    return static_cast<bool>(std::getline(std::cin, line));
  };
  while (read_line()) {
    if (line.empty()) continue;
    if (io::find_malformed_utf8(line) != line.npos) {
      std::cerr << "tessera: this line is not valid UTF-8\n";
      continue;
    }
    add("user", line);
    const ChatPrompt prompt =
        chat_prompt(*loaded.tokenizer, conversation, options.chat_template, "the conversation");
    SampleText text(loaded.tokenizer.get(), options.stop);
    std::string answer;
    const auto show = [&](const std::string& part) {
      answer += part;
      std::cout << part << std::flush;
    };
    const StopSignal stop;  // only during an answer; otherwise Ctrl-C ends the program
    generation.ends = prompt.ends;
    generation.on_token = [&](std::size_t, std::int32_t token, const Tensor&) {
      if (!loaded.ends_text(token, prompt.ends)) show(text.add(token));
      return !text.stopped() && stop.received() == 0;
    };
    generate(*loaded.model, loaded.context, {prompt.tokens}, generation);
    show(text.rest());
    std::cout << std::endl;
    add("assistant", answer);
    ++generation.first_sample;
    if (stop.received() != 0 && stop.received() != SIGINT) return stop_exit_code(stop.received());
  }
  if (on_terminal) std::cout << std::endl;
  return 0;
}

}  // namespace tessera::tools
