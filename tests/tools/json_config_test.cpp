#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "tests/support/check_throws.h"
#include "tools/tessera/config/fields.h"
#include "tools/tessera/config/load.h"

using namespace tessera;
using namespace tessera::tools;

namespace {

Config read(std::string_view text) {
  Config config;
  read_json_config(config, text, "c.json");
  return config;
}

}  // namespace

TEST_CASE("a file with comments sets the named keys and no others") {
  const Config config = read(R"({
    // small
    "model": {"n_layer": 2, /* narrow */ "n_embd": 48},
    "data": {"train": ["a", "b"], "val": "v"},
    "optim": {"lr": 1, "beta1": 0.5},
    "run": {"out": "x"}
  })");
  CHECK(config.model.n_layer == 2);
  CHECK(config.model.n_embd == 48);
  CHECK(config.model.n_head == Config{}.model.n_head);
  CHECK(config.data.train == std::vector<std::string>{"a", "b"});
  CHECK(config.data.val == std::vector<std::string>{"v"});
  CHECK(config.optim.lr == 1.0);
  CHECK(config.optim.beta1 == 0.5);
  CHECK(config.run.out == "x");
}

TEST_CASE("every malformed file is refused in one sentence with its line") {
  struct Case {
    const char* text;
    const char* message;
  };
  const Case cases[] = {
      {"", "c.json:1: not valid JSON"},
      {"{\n\"model\": {\n\"n_layer\": 3", "c.json:3: not valid JSON"},
      {"{\n\"model\": {\"n_layer\": 3,}\n}", "c.json:2: not valid JSON"},
      {"{\n\n\"optim\": {\"lr\": NaN}}", "c.json:3: not valid JSON"},
      {"{\"optim\": {\"lr\":\n 1e400}}", "c.json:2: not valid JSON: number overflow"},
      {"{} {}", "not valid JSON"},
      {"{\"run\": {\"out\": \"\xff\"}}", "ill-formed UTF-8 byte"},
      {"[]", "c.json:1: expected an object of sections"},
      {"3", "c.json:1: expected an object of sections"},
      {"{\n\"modle\": {}}", "c.json:2: unknown section \"modle\"; did you mean \"model\"?"},
      {"{\"model\":\n{\"n_layers\": 1}}",
       "c.json:2: unknown key \"model.n_layers\"; did you mean \"model.n_layer\"?"},
      {"{\"model\": {\n\"n_layer\": 1,\n\"n_layer\": 2}}",
       "c.json:3: model.n_layer is given twice"},
      {"{\"model\": {},\n\"model\": {}}", "c.json:2: model is given twice"},
      {"{\"model\": {\n\n\"n_layer\": \"3\"}}",
       "c.json:3: model.n_layer must be an integer, found"},
      {"{\"model\": {\"n_layer\": 1.5}}", "must be an integer, found 1.5"},
      {"{\"model\": {\"n_layer\": 18446744073709551616}}", "at most 4096"},
      {"{\"model\": {\"n_layer\": 9223372036854775808}}", "at most 4096"},
      {"{\"model\": {\"n_layer\": -1}}", "at least 1"},
      {"{\"model\": {\"n_layer\": null}}", "found null"},
      {"{\"model\": {\"n_layer\": {}}}", "found an object"},
      {"{\"model\": {\"n_layer\": [1]}}", "found a number in it"},
      {"{\"model\": {\"n_layer\": []}}", "found a list"},
      {"{\"model\": 3}", "\"model\" must be an object"},
      {"{\"model\": [3]}", "\"model\" must be an object"},
      {"{\"data\": {\"train\": [[\"a\"]]}}", "found a list in it"},
      {"{\"data\": {\"train\": [{}]}}", "found an object in it"},
      {"{\"data\": {\"train\": [\"a\", true]}}", "found true in it"},
      {"{\"data\": {\"order\": \"random\"}}", "one of shuffled, sequential"},
  };
  for (const Case& c : cases) {
    INFO(c.text);
    CHECK_THROWS_HOLDING(InvalidArgument, c.message, read(c.text));
    CHECK_THROWS_HOLDING(InvalidArgument, "c.json:", read(c.text));
  }
}

TEST_CASE("deep nesting is refused without deep recursion") {
  CHECK_THROWS_AS(read(std::string(100000, '[')), InvalidArgument);
  CHECK_THROWS_AS(read("{\"model\":" + std::string(100000, '{')), InvalidArgument);
}

TEST_CASE("a truncated file is refused at any length") {
  const std::string text = R"({"model": {"n_layer": 2}, "data": {"train": ["a"]}})";
  CHECK_NOTHROW(read(text));
  for (std::size_t length = 0; length < text.size(); ++length) {
    CHECK_THROWS_AS(read(text.substr(0, length)), InvalidArgument);
  }
}

TEST_CASE("a saved configuration reads back unchanged") {
  Config config;
  config.model.n_layer = 3;
  config.data.train = {"a \"quoted\" name", "b"};
  config.optim.lr = 0.1 + 0.2;
  config.train.seed = 1234567890123456789;
  config.comm.timeout = 0.5;
  const std::string saved = to_json(config).dump(2);
  CHECK(to_json(read(saved)).dump(2) == saved);
  CHECK(to_json(config)["model"].contains("layer_norm_eps"));
}

TEST_CASE("range limits are saved as numbers that read back") {
  for (const Field& field : fields()) {
    if (field.type_name() != "number" && field.type_name() != "integer") continue;
    CAPTURE(std::string(field.key));
    const double least = field.min_exclusive ? std::nextafter(field.min, field.max) : field.min;
    for (const double end : {least, field.max}) {
      Config config;
      FieldValue value = end;
      if (field.type_name() == "integer") value = static_cast<std::int64_t>(end);
      set_field(config, field, value, "test");
      const std::string saved = to_json(config).dump(2);
      CHECK(saved.find("null") == std::string::npos);
      CHECK(to_json(read(saved)).dump(2) == saved);
    }
  }
}
