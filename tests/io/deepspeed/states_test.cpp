#include "io/deepspeed/states.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "io/base/crc.h"
#include "tests/io/dcp/bytes.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace tessera::test::pickled;

using Entries = std::vector<std::pair<std::string, std::string>>;

/// A torch.save archive of a dict, with one storage of 24 bytes.
std::string archive_of(const Entries& entries) {
  Entries items;
  for (const auto& [key, value] : entries) items.emplace_back(text(key), value);
  ZipFile file;
  const auto add = [&](const char* name, const std::string& content) {
    file.parts.push_back({name, content, crc32(content.data(), content.size())});
  };
  add("archive/data.pkl", program(dict(items)));
  add("archive/data/0", std::string(24, 'x'));
  return file.bytes();
}

std::string numbers(const std::vector<std::int64_t>& values) {
  std::vector<std::string> items;
  for (const std::int64_t value : values) items.push_back(integer(value));
  return tuple(items);
}

std::string tensor(const std::vector<std::int64_t>& shape = {6},
                   const std::vector<std::int64_t>& strides = {1}) {
  const std::string storage = tuple({text("storage"), global("torch", "FloatStorage"), text("0"),
                                     text("cpu"), integer(6)}) +
                              "Q";
  return call(global("torch._utils", "_rebuild_tensor_v2"),
              {storage, integer(0), numbers(shape), numbers(strides), "\x89",
               call(global("collections", "OrderedDict"), {})});
}

std::string size_of(const std::vector<std::int64_t>& shape) {
  return call(global("torch", "Size"), {numbers(shape)});
}

DeepSpeedModel read_model(const Entries& entries) {
  const std::string bytes = archive_of(entries);
  return read_deepspeed_model(ByteRange(bytes, "m.pt"));
}
DeepSpeedOptimizer read_optimizer(const Entries& entries) {
  Entries items;
  for (const auto& [key, value] : entries) items.emplace_back(text(key), value);
  const std::string bytes = archive_of({{"optimizer_state_dict", dict(items)}});
  return read_deepspeed_optimizer(ByteRange(bytes, "o.pt"));
}

const std::string kNone = "N", kEmpty = "}";

TEST_CASE("model states: shapes, names and tensors") {
  const DeepSpeedModel model = read_model(
      {{"module", dict({{text("a"), tensor()}, {text("extra"), integer(1)}})},
       {"param_shapes", list({dict({{text("a"), size_of({2, 3})}, {text("b"), size_of({})}})})},
       {"buffer_names", list({text("a")})},
       {"shared_params", dict({{text("c"), text("a")}})},
       {"global_steps", integer(7)},
       {"sparse_tensor_module_names", call(global("__builtin__", "set"), {"]"})},  // 0.14
       {"lr_scheduler", dict({{text("last"), integer(1)}})}});
  CHECK(model.zero);
  CHECK(model.groups == std::vector<Named<Shape>>{{{"a", {2, 3}}, {"b", {}}}});
  CHECK(model.module.size() == 1);
  CHECK(model.shared.front() == std::pair<std::string, std::string>("c", "a"));
  CHECK(model.step == 7);
  CHECK_FALSE(read_model({{"module", kEmpty}, {"param_shapes", kNone}}).zero);
}

TEST_CASE("malformed model states are refused") {
  const auto refuse = [](const char* reason, const std::string& key, const std::string& value) {
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, read_model({{"module", kEmpty}, {key, value}}));
  };
  const auto shape = [](const std::string& value) { return list({dict({{text("a"), value}})}); };
  refuse("m.pt: param_shapes[0]: a: found -3, expected 0 or more", "param_shapes",
         shape(size_of({2, -3})));
  refuse("param_shapes[0]: a: ", "param_shapes",
         shape(size_of({std::int64_t{1} << 62, std::int64_t{1} << 62})));
  refuse("a: expected a tuple, found an integer", "param_shapes", shape(integer(3)));
  refuse("a: torch.Size of 0 values", "param_shapes", shape(call(global("torch", "Size"), {})));
  refuse("param_shapes: expected a tuple, found a dict", "param_shapes", kEmpty);
  refuse("a key of m.pt: frozen_param_shapes: expected a string, found an integer",
         "frozen_param_shapes", dict({{integer(1), size_of({1})}}));
  refuse("shared_params: a: expected a string, found an integer", "shared_params",
         dict({{text("a"), integer(1)}}));
  refuse("global_steps: found -1", "global_steps", integer(-1));
  refuse("frozen_param_fragments: expected a dict, found a list", "frozen_param_fragments", "]");
  CHECK_THROWS_HOLDING(
      Unsupported, "9 dims; tessera reads at most 8",
      read_model(
          {{"module", kEmpty}, {"param_shapes", shape(size_of(std::vector<std::int64_t>(9, 1)))}}));
  CHECK_THROWS_HOLDING(Unsupported, "it is not a file of a DeepSpeed checkpoint",
                       read_model({{"weights", kEmpty}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "m.pt: module: expected a dict, found an object",
                       read_model({{"module", call(global("os", "system"), {text("ls")})}}));
  CHECK_THROWS_HOLDING(Unsupported, "experts are spread over ranks",
                       read_model({{"module", kEmpty}, {"num_experts", list({integer(8)})}}));
}

TEST_CASE("a dict that contains itself is read without recursion") {
  // {"module": d} with d = {"a": d}
  const std::string itself = "}q\x01" + text("a") + "h\x01s";
  CHECK(read_model({{"module", itself}}).objects == std::vector<std::string>{"module.a"});
}

TEST_CASE("client state may hold objects of any class, and any number of entries") {
  Entries entries = {
      {"module", dict({{text("a"), tensor()}})},
      {"hyper_parameters",
       dict({{text("when"), call(global("datetime", "timedelta"), {integer(1), integer(0)})},
             {text("model"), object(global("my.program", "Settings"), {{"lr", integer(1)}})}})}};
  for (int i = 0; i < 100; ++i) entries.emplace_back(fmt::format("mine{}", i), integer(i));
  const DeepSpeedModel model = read_model(entries);
  CHECK(model.module.size() == 1);
  REQUIRE(model.objects.size() == 101);
  CHECK(model.objects.front() == "hyper_parameters");
}

// A list that repeats one value.
std::string repeated(const std::string& value, int times) {
  std::vector<std::string> items{value + "q\x01"};
  for (int i = 1; i < times; ++i) items.emplace_back("h\x01");
  return list(items);
}

Entries optimizer(const std::string& state = "}") {
  return {
      {"single_partition_of_fp32_groups", list({tensor()})},
      {"base_optimizer_state", dict({{text("state"), state}})},
      {"partition_count", list({integer(1)})},
      {"zero_stage", call(global("deepspeed.runtime.zero.config", "ZeroStageEnum"), {integer(2)})}};
}

TEST_CASE("optimizer states: parts and moments, with attributes or without") {
  const std::string typed =
      call(global("torch._tensor", "_rebuild_from_type_v2"),
           {global("torch._utils", "_rebuild_tensor_v2"), global("torch", "Tensor"),
            tuple({tuple({text("storage"), global("torch", "FloatStorage"), text("0"), text("cpu"),
                          integer(6)}) +
                       "Q",
                   integer(0), numbers({6}), numbers({1}), "\x89",
                   call(global("collections", "OrderedDict"), {})}),
            dict({{text("ds_id"), text("1")}})});
  const std::string state = dict({{integer(0), dict({{text("step"), integer(4)},
                                                     {text("exp_avg"), typed},
                                                     {text("norm"), tensor({}, {})},
                                                     {text("table"), tensor({2, 3}, {3, 1})}})}});
  const DeepSpeedOptimizer found = read_optimizer(optimizer(state));
  CHECK(found.stage == 2);
  CHECK(found.ranks == 1);
  CHECK(found.steps == "4 ");
  REQUIRE(found.parts.size() == 1);
  REQUIRE(found.parts[0].moments.size() == 1);
  CHECK(found.parts[0].moments[0].first == "exp_avg");
}

TEST_CASE("malformed optimizer states are refused") {
  const auto with = [](const std::string& key, const std::string& value) {
    Entries entries = optimizer();
    for (auto& entry : entries)
      if (entry.first == key) entry.second = value;
    return entries;
  };
  const auto refuse = [&](const char* reason, const std::string& key, const std::string& value) {
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, read_optimizer(with(key, value)));
  };
  refuse("zero_stage is 3, but the weights are under \"single_partition", "zero_stage", integer(3));
  refuse("zero_stage is 0, but", "zero_stage", integer(0));
  refuse("partition_count[0]: found -1", "partition_count", list({integer(-1)}));
  refuse("has shape [2, 3] and strides [3, 1], expected one dim", "single_partition_of_fp32_groups",
         list({tensor({2, 3}, {3, 1})}));
  refuse("has shape [3] and strides [2], expected one dim", "single_partition_of_fp32_groups",
         list({tensor({3}, {2})}));
  refuse("7 elements of float32 from element 0 exceed the 24 bytes",
         "single_partition_of_fp32_groups", list({tensor({7})}));
  refuse("state: expected a dict, found a list", "base_optimizer_state",
         dict({{text("state"), "]"}}));
  CHECK_THROWS_HOLDING(
      Unsupported, "holds _rebuild_from_type_v2, expected one tensor",
      read_optimizer(
          with("single_partition_of_fp32_groups",
               list({call(global("torch._tensor", "_rebuild_from_type_v2"), {integer(1)})}))));
  CHECK_THROWS_HOLDING(Unsupported, "the float32 weights of ZeRO",
                       read_optimizer({{"partition_count", integer(1)}}));
  CHECK_THROWS_HOLDING(Unsupported, "experts are spread over ranks",
                       read_optimizer(with("partition_count", list({integer(2), integer(4)}))));
}

TEST_CASE("pickles that repeat a value many times are refused") {
  constexpr const char* kReason = ": more values than a pickle of ";
  Entries names;
  for (int i = 0; i < 300; ++i) names.emplace_back(text(fmt::format("k{}", i)), size_of({}));
  CHECK(read_model({{"module", kEmpty}, {"param_shapes", list({dict(names)})}}).groups.size() == 1);
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "m.pt: more values than a pickle of ",
      read_model({{"module", kEmpty}, {"param_shapes", repeated(dict(names), 300)}}));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, kReason,
                       read_model({{"module", kEmpty},
                                   {"buffer_names", repeated(text(std::string(9999, 'n')), 99)}}));
  Entries entries = optimizer();
  entries.front().second = repeated(tensor(), 999);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, kReason, read_optimizer(entries));
}

DeepSpeedPart part(std::int64_t n, bool moments = true) {
  DeepSpeedPart result;
  result.values.dtype = "float32";
  result.values.shape = {n};
  result.values.strides = {1};
  if (moments) result.moments.emplace_back("exp_avg", result.values);
  return result;
}

DeepSpeedStates states_of(int stage, const std::vector<std::int64_t>& parts, Named<Shape> group,
                          std::int64_t ranks = 0) {
  DeepSpeedStates states;
  DeepSpeedModel model;
  model.zero = true;
  model.groups.push_back(std::move(group));
  const auto world = std::ssize(parts);
  for (std::int64_t rank = 0; rank < (stage == 3 ? world : 1); ++rank) states.add("m", model);
  for (const std::int64_t n : parts) {
    DeepSpeedOptimizer optimizer;
    optimizer.stage = stage;
    optimizer.ranks = ranks == 0 ? world : ranks;
    optimizer.parts.push_back(part(n));
    states.add("o", std::move(optimizer));
  }
  return states;
}

/// "file: [first of the tensor, number] from byte" of each block.
std::vector<std::string> blocks_of(const DeepSpeedTensor& tensor) {
  std::vector<std::string> blocks;
  for (const StoredBlock& block : tensor.blocks)
    blocks.push_back(fmt::format("{}: {} {} from {}", block.file, block.box.offsets,
                                 block.box.shape, block.offset));
  return blocks;
}

TEST_CASE("ZeRO-2 cuts parameters across ranks, and leaves the padding") {
  const auto tensors =
      states_of(2, {4, 4, 3}, {{"a", {3, 2}}, {"b", {1}}, {"c", {0}}, {"d", {2}}}).cut();
  REQUIRE(tensors.size() == 7);  // c has no moment
  CHECK(tensors[0].moment.empty());
  CHECK(blocks_of(tensors[0]) ==
        std::vector<std::string>{"1: [0] [4] from 0", "2: [4] [2] from 0"});
  CHECK(tensors[1].moment == "exp_avg");
  CHECK(blocks_of(tensors[1]) == blocks_of(tensors[0]));
  CHECK(blocks_of(tensors[2]) == std::vector<std::string>{"2: [0] [1] from 8"});
  CHECK(tensors[4].shape == Shape{0});
  CHECK(blocks_of(tensors[5]) ==
        std::vector<std::string>{"2: [0] [1] from 12", "3: [1] [1] from 0"});
}

TEST_CASE("moments that are not needed have no blocks") {
  const DeepSpeedStates states = states_of(3, {4, 4, 4}, {{"a", {7}}, {"b", {1}}});
  const auto all = states.cut(), tensors = states.cut(false);
  REQUIRE(tensors.size() == all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(tensors[i].moment == all[i].moment);
    CHECK(blocks_of(tensors[i]) ==
          (all[i].moment.empty() ? blocks_of(all[i]) : std::vector<std::string>()));
  }
}

TEST_CASE("ZeRO-3 cuts each parameter into equal parts, with the last one short or empty") {
  const auto tensors = states_of(3, {4, 4, 4}, {{"a", {7}}, {"b", {1}}}).cut();
  REQUIRE(tensors.size() == 4);
  CHECK(blocks_of(tensors[0]) ==
        std::vector<std::string>{"3: [0] [3] from 0", "4: [3] [3] from 0", "5: [6] [1] from 0"});
  CHECK(blocks_of(tensors[2]) == std::vector<std::string>{"3: [0] [1] from 12"});
}

TEST_CASE("flat buffers that parameters do not fill are refused") {
  const auto refuse = [](const char* reason, const DeepSpeedStates& states) {
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, states.cut());
  };
  refuse("a parameter needs 9 elements, but 8 of 8 are left", states_of(2, {4, 4}, {{"a", {9}}}));
  refuse("parameters use 4 elements, but the flat buffer 0 of the optimizer has 8",
         states_of(2, {4, 4}, {{"a", {4}}}));
  refuse("parameters use 2 elements", states_of(3, {3, 3}, {{"a", {4}}}));
  refuse("are left in its flat buffer", states_of(3, {4, 4}, {{"a", {std::int64_t{1} << 62}}}));
  refuse("has 3 elements, but", states_of(3, {4, 3}, {{"a", {8}}}));
  refuse("is of a run of 2147483648 ranks, but the files of 2 are here",
         states_of(2, {4, 4}, {{"a", {8}}}, std::int64_t{1} << 31));
  refuse("the parameter a is listed twice", states_of(2, {4, 4}, {{"a", {4}}, {"a", {4}}}));
}

TEST_CASE("ranks that disagree are refused") {
  DeepSpeedStates states = states_of(2, {4, 4}, {{"a", {8}}}, 3);
  DeepSpeedOptimizer optimizer;
  optimizer.stage = 2;
  optimizer.ranks = 3;
  optimizer.parts.push_back(part(4, false));
  optimizer.steps = "9 ";
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "p has 9  as the optimizer's steps, but o has ",
                       states.add("p", optimizer));
  optimizer.steps.clear();
  states.add("p", optimizer);
  DeepSpeedModel model;
  model.zero = true;
  model.groups = {{{"a", {12}}}};
  DeepSpeedStates wider;
  wider.add("m", model);
  for (const char* name : {"o0", "o1"}) {
    DeepSpeedOptimizer more = optimizer;
    more.parts[0] = part(4);
    wider.add(name, more);
  }
  wider.add("o2", optimizer);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "a: its exp_avg is missing on another rank", wider.cut());
  model.step = 5;
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "n has 5 global_steps, but m has 0",
                       wider.add("n", model));
}

}  // namespace
}  // namespace tessera::io
