#include "tools/tessera/config/fields.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

void set(Config& config, std::string_view key, const FieldValue& value) {
  const Field* field = find_field(key);
  REQUIRE(field != nullptr);
  set_field(config, *field, value, "test");
}

}  // namespace

TEST_CASE("keys are unique and documented, each with its own member and a valid default") {
  Config config;
  std::set<std::string_view> keys;
  std::set<const void*> members;
  for (const Field& field : fields()) {
    CHECK(keys.insert(field.key).second);
    const void* member =
        std::visit([](auto* m) { return static_cast<const void*>(m); }, field.ref(config));
    CHECK(members.insert(member).second);
    CHECK(!field.help.empty());
    INFO(std::string(field.key));
    const FieldValue value = std::visit([](auto* m) { return FieldValue(*m); }, field.ref(config));
    CHECK_NOTHROW(set_field(config, field, value, "default"));
    CHECK(config_help().find("--" + std::string(field.key)) != std::string::npos);
  }
}

TEST_CASE("values are parsed by type, completely and within range") {
  Config config;
  set(config, "model.n_layer", FieldText{"7"});
  CHECK(config.model.n_layer == 7);
  set(config, "optim.lr", FieldText{"3e-4"});
  CHECK(config.optim.lr == 3e-4);
  set(config, "optim.lr", std::int64_t{1});
  CHECK(config.optim.lr == 1.0);
  set(config, "run.out", FieldText{""});
  CHECK(config.run.out.empty());

  for (const char* text : {"", "x", "7x", " 7", "7.0", "1e3", "0x7", "99999999999999999999"}) {
    INFO(text);
    CHECK_THROWS_HOLDING(InvalidArgument, "test: model.n_layer must be an integer",
                         set(config, "model.n_layer", FieldText{text}));
  }
  for (const char* text : {"", "x", "1,5", "0.1f"}) {
    INFO(text);
    CHECK_THROWS_HOLDING(InvalidArgument, "optim.lr must be a number",
                         set(config, "optim.lr", FieldText{text}));
  }
  for (const char* text : {"nan", "-1", "inf", "1e4"}) {
    INFO(text);
    CHECK_THROWS_HOLDING(InvalidArgument, "optim.lr must be at least 0 and at most 1000",
                         set(config, "optim.lr", FieldText{text}));
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "found 0", set(config, "model.seq_len", FieldText{"0"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "above 0", set(config, "optim.eps", 0.0));
  CHECK_THROWS_HOLDING(InvalidArgument, "at most", set(config, "model.n_embd", 1e19));
  CHECK_THROWS_HOLDING(InvalidArgument, "one of constant, cosine, linear, wsd, found \"cos\"",
                       set(config, "optim.schedule", FieldText{"cos"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "run.out must be a string, found 3",
                       set(config, "run.out", std::int64_t{3}));
  CHECK_THROWS_HOLDING(InvalidArgument, "optim.clip_norm must be at least 0 and at most 1e+30",
                       set(config, "optim.clip_norm", FieldText{"inf"}));
  CHECK_THROWS_HOLDING(InvalidArgument, "train.steps must be at least 1",
                       set(config, "train.steps", FieldText{"0"}));
  CHECK(config.model.n_layer == 7);
}

TEST_CASE("an empty text is an empty list") {
  Config config;
  config.data.val = {"x"};
  set(config, "data.val", FieldText{""});
  CHECK(config.data.val.empty());
  set(config, "data.val", std::vector<std::string>{"", "v"});
  CHECK(config.data.val == std::vector<std::string>{"v"});
}

TEST_CASE("text that is not UTF-8 is refused with its key, from any source") {
  Config config;
  const std::string bad = "runs/\xe9t\xe9";
  const std::string message = "must be UTF-8 text";
  CHECK_THROWS_HOLDING(InvalidArgument, "test: run.out " + message,
                       set(config, "run.out", FieldText{bad}));
  CHECK_THROWS_HOLDING(InvalidArgument, "runs/\\ufffdt\\ufffd", set(config, "run.out", bad));
  CHECK_THROWS_HOLDING(InvalidArgument, "data.train " + message,
                       set(config, "data.train", FieldText{bad}));
  CHECK_THROWS_HOLDING(InvalidArgument, "data.val " + message,
                       set(config, "data.val", std::vector<std::string>{"good", bad}));
  CHECK(to_json(config) == to_json(Config{}));
  set(config, "run.out", FieldText{"runs/\u00e9t\u00e9"});
  CHECK(config.run.out == "runs/\u00e9t\u00e9");
}

TEST_CASE("choices match validate(), and help marks unavailable ones") {
  const std::string help = config_help();
  for (const Field& field : fields()) {
    CAPTURE(std::string(field.key));
    const auto checked = [&](std::string_view choice) {
      Config config;
      config.data.train = {"t.txt"};
      set(config, field.key, FieldText{std::string(choice)});
      config.validate(1);
    };
    for (const auto choice : field.choices) CHECK_NOTHROW(checked(choice));
  }
  CHECK(help.find("(gpt2, llama, mistral, qwen2,") != help.npos);
  CHECK(help.find("(shuffled, sequential)") != help.npos);
}

TEST_CASE("a list is one word, several words, or a JSON list in one word") {
  using List = std::vector<std::string>;
  Config config;
  set(config, "data.train", FieldText{"a b,c.txt"});
  CHECK(config.data.train == List{"a b,c.txt"});
  set(config, "data.train", List{"a", "b"});
  CHECK(config.data.train == List{"a", "b"});
  set(config, "data.train", FieldText{R"(["c", "d"])"});
  CHECK(config.data.train == List{"c", "d"});
  set(config, "data.train", FieldText{"[ab].txt"});
  CHECK(config.data.train == List{"[ab].txt"});
}

TEST_CASE("suggestions name the nearest key") {
  CHECK(nearest_key("model.n_layers") == "model.n_layer");
  CHECK(nearest_key("n_layer") == "model.n_layer");
  CHECK(nearest_key("train.lr") == "optim.lr");
  CHECK(nearest_key("model.seqlen") == "model.seq_len");
  CHECK(nearest_key("optim.learning_rate") != "");
  CHECK(nearest_section("modle") == "model");
  CHECK(find_field("train.micro_batch")->environment_name() == "TESSERA_TRAIN_MICRO_BATCH");
  CHECK(edit_distance("", "abc") == 3);
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("same", "same") == 0);
}
