#include <doctest/doctest.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "io/base/file.h"
#include "io/chat/conversation_reader.h"
#include "io/data/dataset.h"
#include "io/tokenizer/files.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::io;
using test::TempDir;

namespace {

constexpr const char* kTemplate =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

ConversationReader reader_of(const std::string& text,
                             const TokenizerPtr& tokenizer = make_byte_tokenizer()) {
  const TempDir dir;
  const ChatFormat format(*tokenizer, text.empty() ? "" : dir.write("t.jinja", text),
                          parse_chat_date(kChatDate), "--data.chat_template");
  return {tokenizer, format};
}

/// The text, where parts with loss stand within [ ].
std::string shown(const Conversation& c, const Tokenizer& tokenizer) {
  std::string out;
  for (std::size_t i = 0; i < c.tokens.size(); ++i) {
    if (c.has_loss[i] && (i == 0 || !c.has_loss[i - 1])) out += '[';
    out += tokenizer.decode({&c.tokens[i], 1});
    if (c.has_loss[i] && (i + 1 == c.tokens.size() || !c.has_loss[i + 1])) out += ']';
  }
  return out;
}

std::string shown(const std::string& text, const std::string& line) {
  return shown(reader_of(text).read(line, "f:1"), *make_byte_tokenizer());
}

constexpr const char* kTwoTurns =
    R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b \n"},)"
    R"({"role":"user","content":"c"},{"role":"assistant","content":"d"}]})";

Conversations numbered(const std::vector<std::int64_t>& lengths) {
  Conversations all;
  std::int32_t next = 1;
  for (const std::int64_t length : lengths) {
    Conversation c;
    for (std::int64_t i = 0; i < length; ++i) {
      c.tokens.push_back(next++);
      c.has_loss.push_back(i > 0);
    }
    all.add(c);
  }
  return all;
}

}  // namespace

TEST_CASE("loss is on the assistant's turns with their ends") {
  CHECK(shown(kTemplate, kTwoTurns) ==
        "<user>a</>\n<assistant>[b \n</>\n]<user>c</>\n<assistant>[d</>\n]");
  // Marks of the template win.
  CHECK(shown("{% for m in messages %}{% if m.role == 'user' %}<{{ m.content }}>{% else %}"
              "{% generation %}{{ m.content }}{% endgeneration %};{% endif %}{% endfor %}",
              kTwoTurns) == "<a>[b \n];<c>[d];");
  // The last turn is rendered differently: with its reasoning, and with an end of text.
  CHECK(shown("{% for m in messages %}<{{ m.role }}>"
              "{% if loop.last and m.role == 'assistant' %}(thinks){% endif %}{{ m.content "
              "}}</>\n{% endfor %}"
              "{% if add_generation_prompt %}<assistant>{% else %}END{% endif %}",
              kTwoTurns) ==
        "<user>a</>\n<assistant>[b \n</>\n]<user>c</>\n<assistant>[(thinks)d</>\nEND]");
  CHECK(shown(kTemplate, R"({"messages":[{"role":"user","content":"a"}]})") == "<user>a</>\n");
  // The system message is in the last turn of the user, and the prompt has an end of line more.
  CHECK(shown("{% for m in messages[1:] %}<{{ m.role }}>"
              "{{ messages[0].content if loop.index0 == (messages[1:] | selectattr('role', 'eq', "
              "'user') | list | length - 1) * 2 }} {{ m.content | trim }}</>{% endfor %}"
              "{% if add_generation_prompt %}<assistant>\n\n{% endif %}",
              R"({"messages":[{"role":"system","content":"S"},)" +
                  std::string(kTwoTurns).substr(13)) ==
        "<user> a</><assistant>[ b</>]<user>S c</><assistant>[ d</>]");
  // The text before the turn depends on what follows: the turn begins with its content.
  CHECK(shown("{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% "
              "endfor %}",
              kTwoTurns) == "4<user>a</><assistant>[b \n</>]<user>c</><assistant>[d</>]");
}

TEST_CASE("turns are found where a template shows them differently later") {
  // Reasoning is shown in the last turn only, and a tool call has no content to search.
  constexpr const char* kThinks =
      "{% for m in messages %}<|{{ m.role }}|>\n"
      "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
      "{{ m.content.split('</think>')[-1].lstrip('\n') if m.content }}"
      "{% for c in m.tool_calls or [] %}{{ '\n' if m.content }}[call]{{ c.name }}{% endfor "
      "%}<|end|>\n"
      "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
      "{% if thinks is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}";
  for (const char* content : {R"("")", "null"})
    CHECK(shown(kThinks, R"({"messages":[{"role":"user","content":"a"},{"role":"assistant",)"
                         R"("content":)" +
                             std::string(content) +
                             R"(,"tool_calls":[{"name":"f"}]},{"role":"tool","content":"2"},)"
                             R"({"role":"assistant","content":"b"}]})") ==
          "<|user|>\na<|end|>\n<|assistant|>\n[[call]f<|end|>\n]<|tool|>\n2<|end|>\n"
          "<|assistant|>\n[<think>\n\n</think>\n\nb<|end|>\n]");
  CHECK(shown(kThinks, R"({"messages":[{"role":"user","content":"a"},)"
                       R"({"role":"assistant","content":"<think>\nr\n</think>\n\n"},)"
                       R"({"role":"user","content":"c"},{"role":"assistant","content":"d"}]})") ==
        "<|user|>\na<|end|>\n<|assistant|>\n[<|end|>\n]<|user|>\nc<|end|>\n<|assistant|>\n"
        "[<think>\n\n</think>\n\nd<|end|>\n]");
  // Reasoning and an answer in one text, whose begin is not shown, after a turn that is shown differently.
  CHECK(shown(kThinks, R"({"messages":[{"role":"assistant","content":"a"},)"
                       R"({"role":"assistant","content":"<think>\nr\n</think>\n\nb"},)"
                       R"({"role":"user","content":"c"}]})") ==
        "<|assistant|>\n[a<|end|>\n]<|assistant|>\n[b<|end|>\n]<|user|>\nc<|end|>\n");
  // The assistant begins; a template that refuses an empty list of messages.
  CHECK(shown(std::string("{{ 'S' if messages[0].role == 'x' }}") + kTemplate,
              R"({"messages":[{"role":"assistant","content":"a"},{"role":"user","content":"b"},)"
              R"({"role":"assistant","content":"c"}]})") ==
        "<assistant>[a</>\n]<user>b</>\n<assistant>[c</>\n]");
  // No generation prompt follows a system message alone.
  CHECK(shown("{{ messages[0].content }}{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}"
              "{{ '<assistant>' if loop.last and add_generation_prompt }}{% endfor %}",
              R"({"messages":[{"role":"system","content":"s"},)"
              R"({"role":"assistant","content":"a"}]})") == "s<assistant>[a]");
  // The prompt has an end of thinking that the completion lacks.
  CHECK(shown(kThinks, R"({"prompt":[{"role":"user","content":"a"}],"completion":[)"
                       R"({"role":"assistant","content":"b"},{"role":"user","content":"c"}],)"
                       R"("chat_template_kwargs":{"thinks":false}})") ==
        "<|user|>\na<|end|>\n<|assistant|>\n[b<|end|>\n<|user|>\nc<|end|>\n]");
}

TEST_CASE("no marker is split between a turn and its surroundings") {
  constexpr const char* kPhi =
      "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
      "{{ '<|assistant|>\n<think>' if add_generation_prompt else '<|endoftext|>' }}";
  CHECK(shown(kPhi, R"({"messages":[{"role":"user","content":"a"},)"
                    R"({"role":"assistant","content":"<b>"},{"role":"user","content":"c"},)"
                    R"({"role":"assistant","content":"<d>"}]})") ==
        "<|user|>\na<|end|>\n<|assistant|>\n[<b><|end|>\n]<|user|>\nc<|end|>\n<|assistant|>\n"
        "[<d><|end|>\n<|endoftext|>]");
  // A line's end that the last turn lacks.
  CHECK(shown("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ '\n' if not loop.last }}"
              "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
              R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},)"
              R"({"role":"assistant","content":"c"}]})") ==
        "<|user|>\na\n<|assistant|>\n[b]\n<|assistant|>\n[c]");
  // A special token that does not look like a marker.
  const auto path = test::source_path("tests/io/tokenizer/fixtures/llama3.json");
  Json json = parse_json(read_file(path, 1 << 20), path);
  for (const char* text : {"@@end", "@@eot"}) {
    Json token = json["added_tokens"].front();
    token["content"] = text;
    token["id"] = json["model"]["vocab"].size() + json["added_tokens"].size();
    json["added_tokens"].push_back(token);
  }
  const TempDir dir;
  const TokenizerPtr tokenizer = load_tokenizer(dir.write("tokenizer.json", json.dump()));
  const Conversation found = reader_of(
                                 "{% for m in messages %}{{ m.content }}"
                                 "{{ '@@end' if loop.last else '@@eot' }}{% endfor %}",
                                 tokenizer)
                                 .read(kTwoTurns, "f");
  CHECK(shown(found, *tokenizer) == "a@@eot[b \n]@@eotc@@eot[d@@end]");
}

TEST_CASE("a conversation whose turns are not found is dropped, with its line") {
  const TempDir dir;
  const std::string file =
      dir.write("c.jsonl", std::string(R"({"text":"abc"})") + "\n" + kTwoTurns + "\n" + kTwoTurns);
  const auto all = std::make_shared<const Conversations>(read_conversations(
      {file}, reader_of("{% for m in messages %}{{ loop.length }}{{ m.content | length }}{% "
                        "endfor %}")));
  const PackingReport report = ConversationSamples(all, 8, DataOrder::Shuffled, 1).report();
  CHECK(report.conversations == 3);
  CHECK(report.dropped == 2);
  CHECK(report.unlocated == 2);
  CHECK(report.str().find("; 2 are dropped, the first is " + file +
                          ":2: message 2: its tokens can't be found") != std::string::npos);
  CHECK(all->slice(2, 3).unlocated.front().first == 0);
}

TEST_CASE("prompt and completion, text, tools and variables of a line") {
  CHECK(shown("", R"({"prompt":"1+1=","completion":"2"})") == "1+1=[2]");
  CHECK(shown("", R"({"text":"all"})") == "[all]");
  CHECK(shown(kTemplate, R"({"prompt":[{"role":"user","content":"a"}],)"
                         R"("completion":[{"role":"assistant","content":"b"}]})") ==
        "<user>a</>\n<assistant>[b</>\n]");
  CHECK(shown("{{ tools[0].name }}{{ style }}{{ strftime_now('%Y-%m-%d') }}",
              R"({"messages":[{"role":"user","content":"a"}],"tools":[{"name":"f"}],)"
              R"("chat_template_kwargs":{"style":"s"}})") == "fs2024-07-26");
}

TEST_CASE("special tokens are recognized, the end of text is added once, and no other BOS") {
  const auto path = test::source_path("tests/io/tokenizer/fixtures/llama3.json");
  const TokenizerPtr tokenizer = load_tokenizer(path);
  const std::string text =
      "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor "
      "%}"
      "{% if add_generation_prompt %}assistant\n{% endif %}";
  const Conversation chat = reader_of(text, tokenizer).read(kTwoTurns, "f:1");
  CHECK(shown(chat, *tokenizer) ==
        "<|begin_of_text|>user\na<|endoftext|>assistant\n[b \n<|endoftext|>]user\nc<|endoftext|>"
        "assistant\n[d<|endoftext|>]");
  CHECK(std::ranges::count(chat.tokens, 0) == 1);
  const Conversation pair =
      reader_of("", tokenizer).read(R"({"prompt":"a","completion":" b"})", "f");
  CHECK(shown(pair, *tokenizer) == "<|begin_of_text|>a[ b<|endoftext|>]");
  // A tokenizer that changes the text: parts are found by encoding prefixes.
  const auto other = load_tokenizer(test::source_path("tests/io/tokenizer/fixtures/llama2.json"));
  const Conversation found =
      reader_of("", other).read(R"({"prompt":"The model","completion":" of the sum"})", "f");
  const auto split = std::ranges::find(found.has_loss, true) - found.has_loss.begin();
  std::vector<std::int32_t> prompt{1};
  for (const std::int32_t id : other->encode("The model")) prompt.push_back(id);
  CHECK(std::vector(found.tokens.begin(), found.tokens.begin() + split) == prompt);
}

TEST_CASE("turns end with the special token after them") {
  const auto path = test::source_path("tests/io/tokenizer/fixtures/llama3.json");
  const TokenizerPtr tokenizer = load_tokenizer(path);
  const TempDir dir;
  const ChatFormat format(
      *tokenizer,
      dir.write("t",
                "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
                "{% for m in messages %}{{ m.content }}\n{{ bos_token }}{% endfor %}"),
      parse_chat_date(kChatDate), "");
  const auto ends = [&](const char* role) {
    return format.turn_ends(*tokenizer, {{"messages", chat::List{chat::Dict{{"role", role}}}}});
  };
  CHECK(ends("system") == std::vector<std::int32_t>{0});
  CHECK(ends("user") == std::vector<std::int32_t>{1});  // refused: the end of text
}

TEST_CASE("the template comes from the tokenizer's files, in transformers' order") {
  const auto from = test::source_path("tests/io/tokenizer/fixtures/llama3.json");
  const TempDir dir;
  dir.write("tokenizer.json", read_file(from, 1 << 20));
  const auto rendered = [&] {
    const TokenizerPtr tokenizer = load_tokenizer(dir.path().string());
    const ChatFormat format(*tokenizer, "", parse_chat_date(kChatDate), "--data.chat_template");
    return format.render({{"messages", chat::List{chat::Dict{{"role", "user"}}}}}, false).text;
  };
  CHECK_THROWS_HOLDING(Unsupported, "give a file with one with --data.chat_template", rendered());
  dir.write("tokenizer_config.json",
            R"({"eos_token":{"content":"<|endoftext|>"},"chat_template":"1{{ eos_token }}"})");
  CHECK(rendered() == "1<|endoftext|>");
  dir.write(
      "tokenizer_config.json",
      R"({"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"d"}]})");
  CHECK(rendered() == "d");
  dir.write("chat_template.jinja", "file");
  CHECK(rendered() == "file");
  // A template given to a run goes with its tokenizer.
  const TokenizerPtr own =
      with_chat_template(load_tokenizer(dir.path().string()), dir.write("own", "mine"));
  CHECK(tokenizer_from_json(own->to_json())->files()->content.at(kChatTemplateJinja) == "mine");
}

TEST_CASE("errors name the file and the line") {
  const TempDir dir;
  const auto fails = [&](const std::string& line, const char* what) {
    CAPTURE(line);
    const std::string file =
        dir.write("c.jsonl", std::string(R"({"text":"a"})") + "\n\n" + line + "\n");
    const std::string text =
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}";
    CHECK_THROWS_HOLDING(Error, (file + ":3: ").c_str(),
                         read_conversations({file}, reader_of(text)));
    CHECK_THROWS_HOLDING(Error, what, read_conversations({file}, reader_of(text)));
  };
  fails("{", "not valid JSON");
  fails("[]", "expected an object with \"messages\"");
  fails(R"({"x":1})", "expected an object with \"messages\"");
  fails(R"({"messages":[]})", "\"messages\" is empty");
  fails(R"({"messages":"a"})", "\"messages\" must be a list of messages, found string");
  fails(R"({"messages":[{"content":"a"}]})",
        "message 1: expected an object with a string \"role\"");
  fails(R"({"prompt":"a","completion":1})", "\"completion\" must be a string, found number");
  fails(R"({"messages":[{"role":"assistant","content":"a"}]})",
        "t.jinja:1: the template refuses: user first");
  CHECK_THROWS_HOLDING(Unsupported, "has no chat template", reader_of("").read(kTwoTurns, "f:1"));
  CHECK_THROWS_HOLDING(IoError, "has no line of JSON",
                       read_conversations({dir.write("e.jsonl", "\n")}, reader_of("")));
}

TEST_CASE("rows hold whole conversations once per epoch, alike at any batch") {
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < 200; ++i) lengths.push_back(2 + i * i % 23);
  const auto data = std::make_shared<const Conversations>(numbered(lengths));
  for (const DataOrder order : {DataOrder::Shuffled, DataOrder::Sequential}) {
    const ConversationSamples samples(data, 16, order, 7);
    const std::int64_t rows = samples.samples_per_epoch();
    const PackingReport& report = samples.report();
    CHECK(report.rows == rows);
    std::vector<std::int32_t> inputs(static_cast<std::size_t>(rows * 16)),
        targets = inputs, documents = inputs, positions = inputs;
    for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
      samples.fill_batch(epoch * rows, rows, inputs.data(), targets.data());
      samples.fill_documents(epoch * rows, rows, documents.data(), positions.data());
      std::set<std::int32_t> seen;
      std::int64_t count = 0;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const bool starts_row = i % 16 == 0;
        CHECK((positions[i] == 0) == (starts_row || documents[i] != documents[i - 1]));
        if (!starts_row && positions[i] > 0) CHECK(positions[i] == positions[i - 1] + 1);
        if (targets[i] < 0) continue;
        ++count;
        CHECK(targets[i] == inputs[i] + 1);  // the next token of the same conversation
        CHECK(seen.insert(targets[i]).second);
      }
      CHECK(count == report.targets);
      CHECK(samples.count_targets(epoch * rows, rows) == count);
    }
    // Row by row, as another world size would read them.
    for (std::int64_t row = 0; row < rows; ++row) {
      std::vector<std::int32_t> one(16), goal(16);
      samples.fill_batch(rows + row, 1, one.data(), goal.data());
      CHECK(std::equal(one.begin(), one.end(), inputs.begin() + row * 16));
      CHECK(samples.count_targets(rows + row, 1) ==
            std::ranges::count_if(goal, [](auto t) { return t >= 0; }));
    }
    std::int64_t positions_needed = 0, truncated = 0, lost = 0;
    for (const std::int64_t n : lengths) {
      positions_needed += std::min<std::int64_t>(n - 1, 16);
      truncated += n > 17 ? 1 : 0;
      lost += std::max<std::int64_t>(n - 17, 0);
    }
    CHECK(report.padding == rows * 16 - positions_needed);
    CHECK(report.truncated == truncated);
    CHECK(report.lost == lost);
    if (order == DataOrder::Shuffled) CHECK(report.padding < rows * 16 / 50);
  }
}

TEST_CASE("conversations without a token with loss are dropped, and none at all is an error") {
  Conversations data = numbered({4, 4, 1});
  std::fill(data.has_loss.begin(), data.has_loss.begin() + 4, false);
  const auto shared = std::make_shared<const Conversations>(data);
  const ConversationSamples samples(shared, 8, DataOrder::Shuffled, 1);
  CHECK(samples.report().dropped == 2);
  CHECK(samples.report().str().find("2 are dropped") != std::string::npos);
  CHECK(samples.samples_per_epoch() == 1);
  const auto none = std::make_shared<const Conversations>(data.slice(0, 1));
  CHECK_THROWS_HOLDING(InvalidArgument, "has 1 conversations, and none has a token with loss",
                       ConversationSamples(none, 8, DataOrder::Shuffled, 1));
}

TEST_CASE("a dataset of conversations is split by conversations and not mixed with text") {
  const TempDir dir;
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += fmt::format(R"({{"text":"{}"}})", i) + "\n";
  const auto file = dir.write("a.jsonl", lines);
  const Dataset data = open_dataset({.train = {file}});
  REQUIRE(data.conversations);
  CHECK(data.conversations->count() == 18);
  REQUIRE(data.val_conversations);
  CHECK(data.val_conversations->count() == 2);
  CHECK(data.tokenizer->decode(data.val_conversations->tokens) == "1819");
  CHECK_THROWS_HOLDING(InvalidArgument, "is text; data.train and data.val must be of one kind",
                       open_dataset({.train = {file}, .val = {dir.write("t.txt", "a")}}));
  CHECK_THROWS_HOLDING(InvalidArgument, "takes its characters from text",
                       open_dataset({.train = {file}, .tokenizer = "chars"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "a chat template is for conversations",
                       open_dataset({.train = {dir.file("t.txt")}, .chat_template = file}));
}
