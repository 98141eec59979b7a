#include "io/dcp/metadata.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "io/consolidate/consolidate.h"
#include "tests/io/dcp/bytes.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace tessera::test::pickled;

const fs::path kFixtures = test::source_path("tests/io/dcp/fixtures");
constexpr const char* kModule = "torch.distributed.checkpoint.metadata";

std::string size(const std::vector<std::int64_t>& dims) {
  std::vector<std::string> items;
  for (const std::int64_t dim : dims) items.push_back(integer(dim));
  return call(global("torch", "Size"), {tuple(items)});
}

/// A `.metadata` with one tensor "w" of shape [4, 3] in two chunks; tests modify parts of it.
struct Parts {
  std::string module = kModule, properties_module = kModule, name = text("w");
  std::string dtype = global("torch", "float32"), layout = text("torch.strided");
  std::string shape = size({4, 3});
  std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>> chunks = {
      {{0, 0}, {2, 3}}, {{2, 0}, {2, 3}}};
  struct Place {
    std::string name = text("w");
    std::vector<std::int64_t> offset;
    std::string path = text("__0_0.distcp"), begin = integer(0), length = integer(100);
    std::string more = {};  // further fields of _StorageInfo
  };
  std::vector<Place> places = {{.offset = {0, 0}}, {.offset = {2, 0}, .begin = integer(100)}};
  std::vector<std::pair<std::string, std::string>> more_entries = {}, more_fields = {};
  std::string chunk_list = {};

  std::string str() const {
    std::vector<std::string> boxes;
    for (const auto& [offsets, sizes] : chunks) {
      boxes.push_back(object(global(module, "ChunkStorageMetadata"),
                             {{"offsets", size(offsets)}, {"sizes", size(sizes)}}));
    }
    const std::string properties =
        global(properties_module, "TensorProperties") + ")\x81" +
        tuple({dtype, call(global("torch.serialization", "_get_layout"), {layout}), "\x89",
               call(global(kModule, "_MEM_FORMAT_ENCODING"), {"K" + std::string(1, '\0')}),
               "\x89"}) +
        "b";
    std::vector<std::pair<std::string, std::string>> entries = {
        {name, object(global(module, "TensorStorageMetadata"),
                      {{"properties", properties},
                       {"size", shape},
                       {"chunks", chunk_list.empty() ? list(boxes) : chunk_list}})}};
    entries.insert(entries.end(), more_entries.begin(), more_entries.end());
    std::vector<std::pair<std::string, std::string>> storage;
    for (const Place& place : places) {
      std::string info = object(
          global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
          {{"relative_path", place.path}, {"offset", place.begin}, {"length", place.length}});
      info.insert(info.size() - 2, place.more);
      storage.emplace_back(object(global(module, "MetadataIndex"),
                                  {{"fqn", place.name}, {"offset", size(place.offset)}}),
                           info);
    }
    std::vector<std::pair<std::string, std::string>> fields = {
        {"state_dict_metadata", dict(entries)}, {"storage_data", dict(storage)}};
    fields.insert(fields.end(), more_fields.begin(), more_fields.end());
    return program(object(global(module, "Metadata"), fields));
  }
};

DcpMetadata parse(const std::string& text) { return parse_dcp_metadata(text, ".metadata"); }

TEST_CASE("metadata of current and older PyTorch") {
  Parts parts;
  for (int old = 0; old < 2; ++old) {
    if (old) {
      parts.module = "torch.distributed._shard.checkpoint.metadata";
      parts.properties_module = "torch.distributed._shard.sharded_tensor.metadata";
    }
    const DcpMetadata metadata = parse(parts.str());
    REQUIRE(metadata.tensors.size() == 1);
    const DcpTensor& tensor = metadata.tensors.at("w");
    CHECK(tensor.dtype == "float32");
    CHECK(tensor.shape == Shape{4, 3});
    REQUIRE(tensor.chunks.size() == 2);
    CHECK(tensor.chunks[1].box == Box{{2, 0}, {2, 3}});
    CHECK(tensor.chunks[1].offset == 100);
    CHECK(tensor.chunks[1].length == 100);
    CHECK(metadata.files == std::vector<std::string>{"__0_0.distcp"});
    CHECK(tensor.top_key.empty());
  }
}

TEST_CASE("empty and duplicate chunks are harmless") {
  Parts parts;
  parts.chunks.push_back({{4, 0}, {0, 3}});
  parts.chunks.push_back({{0, 0}, {2, 3}});
  CHECK(parse(parts.str()).tensors.at("w").chunks.size() == 2);
}

TEST_CASE("entries that are no tensors, and paths of tensors in nested dicts") {
  const DcpMetadata metadata =
      parse_dcp_metadata(read_text(kFixtures / "fsdp-wrapped/.metadata"), ".metadata");
  CHECK(metadata.objects == std::vector<std::string>{"optimizer.param_groups.0.lr", "step"});
  CHECK(metadata.tensors.at("model._orig_mod.layers.1.bias").top_key == "model");
  CHECK(parse_dcp_metadata(read_text(kFixtures / "torchtitan/.metadata"), ".metadata")
            .tensors.at("layers.0.bias")
            .top_key.empty());
}

TEST_CASE("each kind of malformed metadata has its own error") {
  const auto refuse = [](const char* reason, auto edit) {
    Parts parts;
    edit(parts);
    CAPTURE(reason);
    CHECK_THROWS_HOLDING(CorruptCheckpoint, reason, parse(parts.str()));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, ".metadata: ", parse(parts.str()));
  };
  refuse("tensor w: rows 2 to 4 of shape [4, 3] are in no chunk",
         [](Parts& p) { p.chunks.pop_back(); });
  refuse("rows 1 to 2 of shape [4, 3] are in no chunk",
         [](Parts& p) { p.chunks[0].second[0] = 1; });
  refuse("the boxes at [0, 0] of shape [2, 3] and at [1, 0] of shape [3, 3] overlap", [](Parts& p) {
    p.chunks[1] = {{1, 0}, {3, 3}};
  });
  refuse("the box at [2, 0] of shape [3, 3] is outside the shape [4, 3]",
         [](Parts& p) { p.chunks[1].second[0] = 3; });
  refuse("is outside the shape [4, 3]", [](Parts& p) { p.chunks[1].first[0] = INT64_MAX; });
  refuse("the box at [0] of shape [2] is outside", [](Parts& p) { p.chunks[0] = {{0}, {2}}; });
  refuse("chunks hold 10 of the 12 elements", [](Parts& p) { p.chunks[1].second[1] = 2; });
  refuse("found -1, expected 0 or more", [](Parts& p) { p.chunks[1].first[0] = -1; });
  refuse("found -4, expected 0 or more", [](Parts& p) { p.shape = size({-4, 3}); });
  refuse("has more than 2^63 - 1 elements", [](Parts& p) { p.shape = size({INT64_MAX, 3}); });
  refuse("size: expected a tuple, found a string", [](Parts& p) { p.shape = text("4x3"); });
  refuse("torch.Size of 2 values", [](Parts& p) {
    p.shape = call(global("torch", "Size"), {tuple({}), tuple({})});
  });
  refuse("the chunk at [2, 0] is not stored", [](Parts& p) { p.places.pop_back(); });
  refuse("the chunk at [0, 0] is stored twice", [](Parts& p) { p.places.push_back(p.places[0]); });
  for (const char* path : {"../x.distcp", "/etc/passwd", "a/b", "..", ".", ""}) {
    Parts parts;
    parts.places[0].path = text(path);
    CHECK_THROWS_HOLDING(CorruptCheckpoint,
                         fmt::format("relative_path: \"{}\" is not a plain file name", path),
                         parse(parts.str()));
  }
  refuse("a file name contains a NUL",
         [](Parts& p) { p.places[0].path = text(std::string("a\0b", 3)); });
  refuse("is not a plain file name",
         [](Parts& p) { p.places[0].path = text(std::string(256, 'a')); });
  refuse("offset: found -1", [](Parts& p) { p.places[0].begin = integer(-1); });
  refuse("length: found 0, expected 1 or more", [](Parts& p) { p.places[0].length = integer(0); });
  refuse("length: expected an integer, found a string",
         [](Parts& p) { p.places[0].length = text("100"); });
  refuse("expected an object of TensorStorageMetadata, found None", [](Parts& p) {
    p.more_entries = {{text("x"), "N"}};
  });
  refuse("duplicate entry w", [](Parts& p) {
    const std::string whole = p.str();  // the value without its dict
    const std::size_t begin = whole.find(global(kModule, "TensorStorageMetadata"));
    const std::size_t end = whole.find(text("storage_data")) - 1;
    p.more_entries = {{text("w"), whole.substr(begin, end - begin)}};
  });
  refuse("expected a string, found an integer", [](Parts& p) { p.name = "K\x05"; });
  refuse("a name has 0 bytes", [](Parts& p) { p.name = text(""); });
  refuse("or a NUL", [](Parts& p) { p.name = text(std::string("a\0b", 3)); });
  refuse("a name has 5000 bytes", [](Parts& p) { p.name = text(std::string(5000, 'n')); });
  refuse("collections.OrderedDict is not a dtype",
         [](Parts& p) { p.dtype = global("collections", "OrderedDict"); });
}

TEST_CASE("other kinds of metadata are refused") {
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "expected an object of Metadata, found a dict",
                       parse(program("}")));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "the field \"storage_data\" is missing",
                       parse(program(object(global(kModule, "Metadata"), {}))));
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "state_dict_metadata: expected a dict, found a list",
      parse(program(object(global(kModule, "Metadata"),
                           {{"storage_data", "}"}, {"state_dict_metadata", "]"}}))));

  Parts parts;
  parts.dtype = call(global("os", "system"), {text("true")});
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "expected a class, found an object of os.system",
                       parse(parts.str()));
  parts = {};
  parts.layout = text("torch.sparse_coo");
  CHECK_THROWS_HOLDING(Unsupported, "layout torch.sparse_coo", parse(parts.str()));
  parts = {};
  parts.shape = size({1, 1, 1, 1, 1, 1, 1, 1, 1});
  CHECK_THROWS_HOLDING(Unsupported, "9 dims; tessera reads at most 8", parse(parts.str()));
  parts = {};
  parts.places[0].more = text("transform_descriptors") + list({text("stream.lz4/1")});
  CHECK_THROWS_HOLDING(Unsupported,
                       "w: data that an extension of PyTorch's writer transformed by stream.lz4/1; "
                       "tessera reads data that is plain or compressed once by stream.zstd/1",
                       parse(parts.str()));
  parts.places[0].more =
      text("transform_descriptors") + list({text("stream.zstd/1"), text("stream.zstd/1")});
  CHECK_THROWS_HOLDING(Unsupported, "transformed by zstd twice", parse(parts.str()));
  for (const char* version : {"2", "11", "", "1/2"}) {
    parts.places[0].more =
        text("transform_descriptors") + list({text(std::string("stream.zstd/") + version)});
    CHECK_THROWS_HOLDING(Unsupported, "transformed by stream.zstd/", parse(parts.str()));
  }
  Parts shared;
  shared.places[1].begin = integer(0);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor w: two chunks are both in byte 0 of __0_0.distcp",
                       parse(shared.str()));
  parts.places[0].more = text("transform_descriptors") + text("stream.zstd/1");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "expected a list of names", parse(parts.str()));
  for (const std::string& value : {list({text("stream.zstd/1")}), list({text("stream.zstd/1.3")}),
                                   std::string("N"), std::string("]")}) {
    parts.places[0].more = text("transform_descriptors") + value;
    const DcpMetadata metadata = parse(parts.str());
    CHECK(metadata.tensors.at("w").chunks[0].zstd == (value.size() > 1));
    CHECK_FALSE(metadata.tensors.at("w").chunks[1].zstd);
  }
}

TEST_CASE("plans of other classes are dropped, also if they hold the chunks") {
  // As Megatron saves them: the plan's items share chunks and sizes with the metadata.
  const auto plan_item = [](const std::string& chunk) {
    const std::string type = call(global("a.planner", "WriteItemType"), {"K\x02"});
    return object(global("a.planner", "WriteItem"),
                  {{"type", type},
                   {"tensor_data", object(global("a.planner", "TensorWriteData"),
                                          {{"chunk", chunk}, {"size", size({4, 3})}})}});
  };
  Parts parts;
  const std::string first = object(global(kModule, "ChunkStorageMetadata"),
                                   {{"offsets", size({0, 0}) + "q\x02"}, {"sizes", size({2, 3})}});
  const std::string second = object(global(kModule, "ChunkStorageMetadata"),
                                    {{"offsets", size({2, 0})}, {"sizes", size({2, 3})}});
  parts.chunk_list = list({first + "q\x01", second});
  const std::string plan =
      object(global("a.planner", "SavePlan"),
             {{"items", list({plan_item("h\x01"), plan_item("h\x01")})}, {"offset", "h\x02"}});
  parts.more_fields = {{"planner_data", call(global("os", "system"), {text("true")})},
                       {"all_local_plans", list({plan, plan})}};
  const DcpMetadata metadata = parse(parts.str());
  REQUIRE(metadata.tensors.at("w").chunks.size() == 2);
  CHECK(metadata.tensors.at("w").chunks[0].box == Box{{0, 0}, {2, 3}});
  CHECK(metadata.tensors.at("w").chunks[1].offset == 100);
}

TEST_CASE("plans of PyTorch's own classes are dropped") {
  const std::string text = read_text(test::source_path("tests/fuzz/seeds/dcp_metadata/plans"));
  REQUIRE(text.find("SavePlan") != std::string::npos);
  const DcpMetadata metadata = parse(text);
  REQUIRE(metadata.tensors.size() == 2);
  const DcpTensor& tensor = metadata.tensors.at("b.weight");
  CHECK(tensor.shape == Shape{8, 300});
  REQUIRE(tensor.chunks.size() == 2);
  CHECK(tensor.chunks[1].box == Box{{4, 0}, {4, 300}});
  CHECK(tensor.chunks[1].offset == 6000);
  CHECK(metadata.files.at(tensor.chunks[1].file) == "__1_0.distcp");
}

TEST_CASE("values that repeat others are limited by the size of the file") {
  // One tuple of 8 sizes, and a Size of it for every 8 bytes.
  std::string sizes = tuple(std::vector<std::string>(8, integer(1))) + "q\x01" + "0" +
                      global("torch", "Size") + "q\x02" + "0](";
  for (int i = 0; i < 200'000; ++i) sizes += "h\x02h\x01\x85R";
  Parts parts;
  parts.more_fields = {{"other", sizes + "e"}};
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "its values take more than", parse(parts.str()));
}

TEST_CASE("truncated metadata are refused") {
  const std::string whole = read_text(kFixtures / "lightning/.metadata");
  CHECK(parse(whole).tensors.size() == 16);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    CAPTURE(n);
    CHECK_THROWS_AS(parse(whole.substr(0, n)), CorruptCheckpoint);
  }
}

TEST_CASE("a changed byte gives an error or different metadata, nothing worse") {
  const std::string whole = read_text(kFixtures / "torchtitan/.metadata");
  int refused = 0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string changed = whole;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    try {
      parse(changed);
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(refused > static_cast<int>(whole.size()) / 4);
}

TEST_CASE("a chunk list that many tensors share is not parsed again for each") {
  // 3,000 tensors share one list of 10,000 chunks.
  std::vector<std::string> chunks(10'000, "h\x01");
  Parts parts;
  parts.shape = size({1});
  parts.chunk_list = object(global(kModule, "ChunkStorageMetadata"),
                            {{"offsets", size({0})}, {"sizes", size({1})}}) +
                     "q\x01"
                     "0" +
                     list(chunks) + "q\x02";
  std::string entry = parts.str();
  const std::size_t begin = entry.find(global(kModule, "TensorStorageMetadata"));
  const std::size_t end = entry.find(text("storage_data")) - 1;
  const std::string value = entry.substr(begin, end - begin) + "q\x03";
  Parts bomb;
  bomb.more_entries.emplace_back(text("n"), value);
  for (int i = 0; i < 3000; ++i)
    bomb.more_entries.emplace_back(text(fmt::format("{}", i)), "h\x03");
  bomb.places.push_back({.name = text("n"), .offset = {0}});
  for (int i = 0; i < 3000; ++i) {
    bomb.places.push_back({.name = text(fmt::format("{}", i)), .offset = {0}});
  }
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "too many for a file of its size", parse(bomb.str()));
}

TEST_CASE("chunks that share one large state dict") {
  Parts parts;
  std::vector<std::pair<std::string, std::string>> fields;
  for (int i = 0; i < 65; ++i) fields.emplace_back(fmt::format("field {}", i), "N");
  parts.chunk_list = list({object(global(kModule, "ChunkStorageMetadata"), fields)});
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "65 fields; at most 64 are accepted", parse(parts.str()));
}

std::string entry_of(const Parts& parts) {
  const std::string whole = parts.str();
  const std::size_t begin = whole.find(global(kModule, "TensorStorageMetadata"));
  return whole.substr(begin, whole.find(text("storage_data")) - 1 - begin);
}

ConsolidatePlan plan_of(const Parts& parts) {
  const TempDir dir;
  write_text(dir.path() / ".metadata", parts.str());
  write_text(dir.path() / "__0_0.distcp", std::string(200, 'x'));
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  return plan_consolidation(dir.path(), options);
}

TEST_CASE("unreadable entries next to the model are left out") {
  Parts parts, other;
  other.dtype = global("torch", "complex128");
  parts.more_entries = {{text("loop.counter"), entry_of(other)}};
  for (const std::int64_t row : {0, 2}) {
    parts.places.push_back(
        {.name = text("loop.counter"), .offset = {row, 0}, .begin = integer(row)});
  }
  CHECK_THROWS_HOLDING(Unsupported, "loop.counter complex128", plan_of(parts));
  parts.more_fields = {
      {"planner_data", dict({{text("w"), tuple({text("model"), text("w")})},
                             {text("loop.counter"), tuple({text("loop"), text("counter")})}})}};
  const ConsolidatePlan plan = plan_of(parts);
  CHECK(plan.tensors.size() == 1);
  REQUIRE(plan.skipped.size() == 1);
  CHECK(plan.skipped[0].name == "loop.counter");
}

TEST_CASE("chunks larger than their bytes") {
  Parts parts;
  CHECK(plan_of(parts).tensors.size() == 1);
  const std::int64_t rows = std::int64_t{1} << 61;  // 3 * rows stays below 2^63
  parts.shape = size({rows, 3});
  parts.chunks = {{{0, 0}, {rows, 3}}};
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       ".metadata: tensor w: the chunk at [0, 0] of shape [2305843009213693952, 3] "
                       "does not fit in 100 bytes",
                       plan_of(parts));
}

std::vector<StoredBlock> boxes(
    const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>& list) {
  std::vector<StoredBlock> chunks;
  for (const auto& [offsets, sizes] : list) {
    chunks.push_back({{Shape(offsets), Shape(sizes)}});
  }
  return chunks;
}

TEST_CASE("boxes of any rank must cover a tensor exactly once") {
  auto tiles = boxes({{{0, 0, 0}, {2, 4, 3}},
                      {{0, 0, 3}, {2, 4, 2}},
                      {{2, 0, 0}, {1, 1, 5}},
                      {{2, 1, 0}, {1, 3, 5}}});
  check_boxes({3, 4, 5}, tiles, "t");
  CHECK(tiles.size() == 4);
  auto scalar = boxes({{{}, {}}});
  check_boxes({}, scalar, "t");
  auto none = boxes({});
  check_boxes({0, 3}, none, "t");
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "chunks hold 0 of the 1 elements of shape []",
                       check_boxes({}, none, "t"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "t: chunks hold 0 of the 3 elements",
                       check_boxes({3}, none, "t"));
  auto overlapping =
      boxes({{{0, 0, 0}, {2, 4, 3}}, {{0, 0, 3}, {2, 4, 2}}, {{1, 3, 4}, {2, 1, 1}}});
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       "the boxes at [0, 0, 3] of shape [2, 4, 2] and at [1, 3, 4] of shape "
                       "[2, 1, 1] overlap",
                       check_boxes({3, 4, 5}, overlapping, "t"));
  auto hole = boxes({{{0, 0}, {2, 1}}, {{0, 2}, {2, 1}}});
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "t: chunks hold 4 of the 6 elements of shape [2, 3]",
                       check_boxes({2, 3}, hole, "t"));
  std::vector<StoredBlock> slivers;
  for (std::int64_t i = 0; i < 2000; ++i) slivers.push_back({{{0, i}, {1, 1}}});
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "more than 1024 boxes share a row",
                       check_boxes({1, 2000}, slivers, "t"));
}

}  // namespace
}  // namespace tessera::io
