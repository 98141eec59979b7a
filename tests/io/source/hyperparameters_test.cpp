#include "io/source/hyperparameters.h"

#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "io/pickle/pickle_writer.h"
#include "io/torch/saved_state.h"
#include "tests/io/torch/saved_bytes.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace tessera::test::pickled;

std::string real(double value) {
  PickleWriter pickle;
  pickle.real(value);
  const std::string program = pickle.finish();
  return program.substr(2, program.size() - 3);
}

using Fields = std::vector<std::pair<std::string, std::string>>;

// Reads the hyperparameters of a torch.save file with these entries.
Hyperparameters read(const Fields& entries) {
  SavedArchive archive;
  Fields items{
      {text("state"), dict({{text("w"), dict({{text("exp_avg"), archive.tensor({2})}})}})}};
  for (const auto& [key, value] : entries) items.emplace_back(text(key), value);
  const std::string bytes = archive.bytes(dict(items));
  return read_saved_state(ByteRange(bytes, "x.pt")).hyperparameters;
}

TEST_CASE("groups that list their weights") {
  const auto found =
      read({{"param_groups",
             list({dict({{text("lr"), real(0.1)},
                         {text("betas"), tuple({real(0.9), real(0.999)})},
                         {text("foreach"), "N"},
                         {text("amsgrad"), "\x88"},
                         {text("step"), integer(3)},
                         {text("name"), text("a")},
                         {text("param_names"), list({text("w"), text("v")})},
                         {text("params"), list({text("w"), text("v")})}}),
                   dict({{text("lr"), real(-1e300)}, {text("params"), list({text("b")})}})})}});
  REQUIRE(found.groups.size() == 2);
  CHECK(*found.groups[0].settings == Json::parse(R"({"lr": 0.1, "betas": [0.9, 0.999],
      "foreach": null, "amsgrad": true, "step": 3, "name": "a"})"));
  CHECK(found.groups[0].weights == std::vector<std::string>{"w", "v"});
  CHECK((*found.groups[1].settings)["lr"] == -1e300);
  CHECK(found.groups[1].weights == std::vector<std::string>{"b"});
  CHECK(found.left_out.empty());
}

TEST_CASE("settings of each weight, as with flatten_optimizer_state_dict") {
  const auto found = read({{"param_groups.w.lr", real(0.1)},
                           {"param_groups.a.b.w.lr", real(0.1)},
                           {"param_groups.w.eps", real(1)},
                           {"param_groups.a.b.w.eps", real(1)},
                           {"param_groups.bias.lr", real(0.2)}});
  REQUIRE(found.groups.size() == 2);
  CHECK(found.groups[0].weights == std::vector<std::string>{"a.b.w", "w"});
  CHECK(*found.groups[0].settings == Json::parse(R"({"lr": 0.1, "eps": 1.0})"));
  CHECK(found.groups[1].weights == std::vector<std::string>{"bias"});
}

TEST_CASE("groups as a Distributed Checkpoint has them, of several optimizers") {
  const auto found = read({{"optimizer_0.param_groups.0.lr", real(0.1)},
                           {"optimizer_0.param_groups.0.params", list({text("w")})},
                           {"optimizer_0.param_groups.w.lr", real(7)},  // the same by weight
                           {"optimizer_1.param_groups.v.lr", real(0.2)}});
  REQUIRE(found.groups.size() == 2);
  CHECK((*found.groups[0].settings)["lr"] == 0.1);
  CHECK(found.groups[1].weights == std::vector<std::string>{"v"});
}

TEST_CASE("values that are no settings are left out by name") {
  const std::string group = "param_groups.0.";
  const auto found = read({{group + "params", list({text("w")})},
                           {group + "lr", real(NAN)},
                           {group + "eps", real(INFINITY)},
                           {group + "hook", global("os", "system")},
                           {group + "call", call(global("os", "system"), {text("true")})},
                           {group + "deep", tuple({tuple({integer(1)})})},
                           {group + "long", text(std::string(5000, 'x'))},
                           {group + "bytes", text("\xff")},
                           {group + "kept", integer(1)}});
  REQUIRE(found.groups.size() == 1);
  CHECK(*found.groups[0].settings == Json::parse(R"({"kept": 1})"));
  CHECK(found.left_out.size() == 7);
  CHECK(found.left_out.front() == group + "lr");
}

TEST_CASE("groups of numbered weights have no names") {
  CHECK(read({{"param_groups",
               list({dict({{text("lr"), real(1)}, {text("params"), list({integer(0)})}})})}})
            .groups.empty());
  CHECK(read({{"param_groups", list({integer(1)})}}).groups.empty());
  CHECK(read({{"param_groups", integer(1)}}).groups.empty());
  CHECK(read({{"my_param_groups.w.lr", real(1)}}).groups.empty());
}

TEST_CASE("a pickle that repeats one large group is left out, with a sign") {
  std::vector<std::string> names(1 << 12, "h\x01");  // memo: one text
  std::string group =
      dict({{text("params"), "X" + bytes_of(std::uint32_t{4000}) + std::string(4000, 'x') +
                                 "q\x01" + "0" + list(names)}});
  std::string groups = "](" + group + "q\x02";
  for (int i = 0; i < 4000; ++i) groups += "h\x02";
  const auto found = read({{"param_groups", groups + "e"}});
  CHECK(found.too_many);
  CHECK(found.groups.empty());
}

TEST_CASE("equal settings of many weights take the memory of one, and a group has few") {
  Fields weights, many;
  for (int i = 0; i < 30'000; ++i)
    weights.emplace_back("param_groups.w" + std::to_string(i) + ".note",
                         text(std::string(1000, 'x')));
  const auto found = read(weights);
  REQUIRE(found.groups.size() == 1);
  CHECK(found.groups[0].weights.size() == 30'000);
  for (int i = 0; i < 257; ++i)
    many.emplace_back("param_groups.w.k" + std::to_string(i), integer(i));
  CHECK(read(many).too_many);
  many.pop_back();
  CHECK(read(many).groups.size() == 1);
}

TEST_CASE("a number of updates is a count, or there is none") {
  const auto step_of = [](const std::string& value) {
    Hyperparameters found =
        read({{"param_groups.w.step", value}, {"param_groups.v.step", integer(3)}});
    const auto step = found.take_step();
    for (const ParamGroup& group : found.groups) CHECK_FALSE(group.settings->contains("step"));
    return step;
  };
  CHECK(step_of(integer(3)) == 3);
  CHECK_FALSE(step_of(integer(4)));
  CHECK_FALSE(step_of(integer(-3)));
  CHECK_FALSE(step_of(real(2.5)));
  CHECK_FALSE(step_of("\x88"));
}

}  // namespace
}  // namespace tessera::io
