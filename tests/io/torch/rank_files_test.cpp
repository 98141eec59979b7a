#include "io/torch/rank_files.h"

#include <doctest/doctest.h>

#include <map>
#include <vector>

#include "core/base/error.h"
#include "io/consolidate/consolidate.h"
#include "io/source/open_sharded.h"
#include "io/torch/saved_state.h"
#include "tests/io/support.h"
#include "tests/io/torch/saved_bytes.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/safetensors_reader.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;
using namespace tessera::test::pickled;

const fs::path kFixtures = test::source_path("tests/io/torch/fixtures");

ConsolidateReport write_tensors(const fs::path& source, const fs::path& out) {
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  return consolidate(source, out, options);
}

std::string rank_name(std::int64_t rank, std::int64_t world) {
  return fmt::format("model_world_size_{}_rank_{}.pt", world, rank);
}

std::vector<float> values_of(const ShardedSource& source, const std::string& name, std::size_t n) {
  std::vector<float> values(n);
  source.read(name, 0, static_cast<std::int64_t>(n), values.data(), DType::F32);
  return values;
}

/// Files of two ranks, each with a value "w".
std::unique_ptr<ShardedSource> open_two(const TempDir& dir, SavedArchive& first,
                                        const std::string& one, SavedArchive& second,
                                        const std::string& two) {
  dir.write(rank_name(0, 2), first.bytes(dict({{text("w"), one}})));
  dir.write(rank_name(1, 2), second.bytes(dict({{text("w"), two}})));
  return open_sharded(dir.path());
}

/// Opens one rank's value "w".
std::unique_ptr<ShardedSource> open_one(const SavedArchive& archive, const std::string& value) {
  const TempDir dir;
  dir.write(rank_name(0, 1), archive.bytes(dict({{text("w"), value}})));
  return open_sharded(dir.path());
}

TEST_CASE("files that PyTorch and accelerate wrote become whole tensors, bit for bit") {
  for (const char* fixture : {"fsdp2", "fsdp2-old", "mesh", "fsdp1"}) {
    CAPTURE(fixture);
    const TempDir dir;
    const ConsolidateReport report = write_tensors(kFixtures / fixture, dir.path() / "out");
    CHECK(report.kind == "PyTorch FSDP checkpoint of rank files");
    const auto expected = tensors_of(kFixtures / fixture / "expected.safetensors.golden");
    CHECK(expected.size() >= 4);
    CHECK(tensors_of(dir.path() / "out/model.safetensors") == expected);
  }
}

TEST_CASE("a checkpoint of Lightning is read past hyperparameters of any class") {
  const TempDir dir;
  const ConsolidateReport report =
      write_tensors(kFixtures / "lightning/last.ckpt", dir.path() / "out");
  CHECK(report.kind == "PyTorch Lightning checkpoint");
  std::map<std::string, std::string> expected;  // the model is the attribute `model` of the module
  for (auto& [name, tensor] : tensors_of(kFixtures / "lightning/expected.safetensors.golden"))
    expected["model." + name] = tensor;
  CHECK(tensors_of(dir.path() / "out/model.safetensors") == expected);
  std::vector<std::string> skipped;
  for (const SkippedEntry& entry : report.skipped) skipped.push_back(entry.name);
  for (const char* name : {"hyper_parameters", "optimizer_states", "epoch"})
    CHECK(std::ranges::find(skipped, name) != skipped.end());
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.what = ExportWhat::All;
  CHECK_THROWS_HOLDING(InvalidArgument, "holds no optimizer state under names of weights",
                       plan_consolidation(kFixtures / "lightning/last.ckpt", options));
}

TEST_CASE("config.json and tokenizer come from verl's folder") {
  const TempDir dir;
  const fs::path source = dir.path() / "source", out = dir.path() / "out";
  fs::copy(kFixtures / "fsdp2", source, fs::copy_options::recursive);
  write_text(source / "huggingface/tokenizer.json", "{}");
  const ConsolidateReport report = consolidate(source, out);
  CHECK(report.files ==
        std::vector<std::string>{"model.safetensors", "config.json", "tokenizer.json"});
}

TEST_CASE("a flipped byte of a part is found, with its file and tensor") {
  const TempDir dir;
  const fs::path source = dir.path() / "source";
  fs::copy(kFixtures / "fsdp2", source, fs::copy_options::recursive);
  const fs::path file = source / rank_name(1, 3);
  std::string bytes = read_text(file);
  std::vector<float> row = {2.25F, 2.5F, 2.75F};  // of up.weight
  const std::string part(reinterpret_cast<const char*>(row.data()), 12);
  const std::size_t at = bytes.find(part);
  REQUIRE(at != std::string::npos);
  bytes[at] = static_cast<char>(bytes[at] ^ 1);
  write_text(file, bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "up.weight", write_tensors(source, dir.path() / "out"));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "rank_1.pt", write_tensors(source, dir.path() / "out"));
}

TEST_CASE("one file of torch.save: flat, or under a key") {
  for (const char* key : {"", "model", "module", "state_dict", "model_state_dict"}) {
    CAPTURE(key);
    const TempDir dir;
    SavedArchive archive;
    const std::string state = dict({{text("a.w"), archive.tensor({2, 2}, 5)}});
    const std::string other = call(global("my.args", "Args"), {list({archive.tensor({1})})});
    const std::string root =
        *key == '\0' ? state : dict({{text(key), state}, {text("args"), other}});
    const std::string path = dir.write("m.pth", archive.bytes(root));
    const ConsolidateReport report = write_tensors(path, dir.path() / "out");
    CHECK(report.kind == "PyTorch file");
    const auto found = tensors_of(dir.path() / "out/model.safetensors");
    REQUIRE(found.size() == 1);
    CHECK(found.contains("a.w"));
    CHECK(report.skipped.size() == (*key == '\0' ? 0 : 1));
  }
}

TEST_CASE("tensors with attributes are read, and those without elements refused by name") {
  const TempDir dir;
  SavedArchive archive;
  const std::string rebuild = global("torch._utils", "_rebuild_tensor_v2");
  const std::string with_attributes =
      call(global("torch._tensor", "_rebuild_from_type_v2"),
           {rebuild, global("my", "Tensor"), tuple(archive.arguments({2}, 3)),
            dict({{text("tag"), integer(1)}})});
  const std::string parameter =
      call(global("torch._utils", "_rebuild_parameter_with_state"),
           {archive.tensor({2}, 3), "\x89", call(global("collections", "OrderedDict"), {}), "N"});
  const std::string sparse = call(global("torch._utils", "_rebuild_sparse_tensor"), {"N", "N"});
  const std::string path = dir.write(
      "m.pt", archive.bytes(dict({{text("a"), with_attributes}, {text("p"), parameter}})));
  const auto source = open_sharded(path);
  for (const char* name : {"a", "p"})
    CHECK(values_of(*source, name, 2) == std::vector<float>{3, 4});
  dir.write("m.pt", archive.bytes(dict({{text("a"), with_attributes}, {text("s"), sparse}})));
  CHECK_THROWS_HOLDING(Unsupported, "does not read:\n  s _rebuild_sparse_tensor",
                       write_tensors(path, dir.path() / "out"));
  ConsolidateOptions options;
  options.format = ExportFormat::Safetensors;
  options.tensors = {"a"};
  CHECK(consolidate(path, dir.path() / "out", options).skipped.size() == 1);
}

TEST_CASE("one of several files is no model") {
  const TempDir dir;
  SavedArchive archive;
  const std::string state = archive.bytes(dict({{text("w"), archive.tensor({2})}}));
  for (const char* name : {"pytorch_model-00001-of-00002.bin", "mp_rank_00_model_states.pt",
                           "zero_pp_rank_1_mp_rank_00_model_states.pt",
                           "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"}) {
    CHECK_THROWS_HOLDING(InvalidArgument, "is one of several files of a model; give the directory",
                         open_sharded(dir.write(name, state)));
  }
  open_sharded(dir.write("pytorch_model-00001-of-00001.bin", state));
}

TEST_CASE("every rank of one save must have a file") {
  const TempDir dir;
  SavedArchive archive;
  const std::string bytes = archive.bytes(dict({{text("w"), archive.tensor({2})}}));
  dir.write(rank_name(1, 3), bytes);
  dir.write(rank_name(2, 3), bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       "model_world_size_3_rank_0.pt is missing; 2 of 3 ranks have a file",
                       open_sharded(dir.path()));
  dir.write(rank_name(3, 3), bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "rank 3 of 3 ranks", open_sharded(dir.path()));
  fs::remove(dir.path() / rank_name(3, 3));
  dir.write("model_world_size_3_rank_01.pt", bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "are of one rank", open_sharded(dir.path()));
  dir.write(rank_name(0, 2), bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       "has files of several saves, model_world_size_2_rank_*.pt and "
                       "model_world_size_3_rank_*.pt",
                       open_sharded(dir.path()));

  const TempDir lying;
  lying.write(rank_name(0, 999999999), bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "1 of 999999999 ranks", open_sharded(lying.path()));
  const TempDir accelerate;
  accelerate.write("pytorch_model_fsdp_rank1.bin", bytes);
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "pytorch_model_fsdp_rank0.bin is missing",
                       open_sharded(accelerate.path()));
}

TEST_CASE("ranks must agree on a tensor, and their parts must cover it once") {
  const TempDir dir;
  SavedArchive a, b;
  const SavedDTensor zero, one{.coordinate = {1}};
  const auto source =
      open_two(dir, a, zero.pickled(a.tensor({2, 2}, 0)), b, one.pickled(b.tensor({2, 2}, 4)));
  CHECK(values_of(*source, "w", 8) == std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7});
  // Two equal parts are replicas.
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "tensor w: rows 2 to 4 of shape [4, 2] are in no chunk",
      open_two(dir, a, zero.pickled(a.tensor({2, 2})), b, zero.pickled(b.tensor({2, 2}))));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "overlap",
                       open_two(dir, a, pickled_sharded({4, 2}, {0, 0}, {3, 2}, a.tensor({3, 2})),
                                b, pickled_sharded({4, 2}, {2, 0}, {2, 2}, b.tensor({2, 2}))));
  SavedDTensor taller = one;
  taller.shape = {6, 2};
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint,
      "rank_1.pt: tensor w is a part of float32 of [6, 2], but a part of float32 "
      "of [4, 2] in",
      open_two(dir, a, zero.pickled(a.tensor({2, 2})), b, taller.pickled(b.tensor({3, 2}))));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor w is a whole float32 of [4, 2], but a part of",
                       open_two(dir, a, zero.pickled(a.tensor({2, 2})), b, b.tensor({4, 2})));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "tensor w is a whole float32 of [3], but a whole",
                       open_two(dir, a, a.tensor({4}), b, b.tensor({3})));
}

TEST_CASE("copies that differ between ranks are refused or reported") {
  const TempDir dir;
  SavedArchive a, b;
  CHECK(open_two(dir, a, a.tensor({4}, 1), b, b.tensor({4}, 1))->warnings().empty());
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       "such as those of w at [0] in model_world_size_2_rank_0.pt and "
                       "model_world_size_2_rank_1.pt, and may be parts of larger ones",
                       open_two(dir, a, a.tensor({4}, 1), b, b.tensor({4}, 2)));
  const SavedDTensor copy{.placements = {pickled_placement("Replicate")}};
  const auto source =
      open_two(dir, a, copy.pickled(a.tensor({4, 2}, 1)), b, copy.pickled(b.tensor({4, 2}, 2)));
  REQUIRE(source->warnings().size() == 1);
  CHECK(source->warnings()[0].ends_with("rank_1.pt; the first are written"));
  CHECK(values_of(*source, "w", 1) == std::vector<float>{1});

  // Views: only the bytes of the tensor count, not the others of its storage.
  const std::string view = global("torch._utils", "_rebuild_tensor_v2");
  const auto two_views = [&](float first, float after) {
    return open_two(dir, a, call(view, a.arguments({4}, 1, {5})), b,
                    call(view, b.arguments({4}, first, {after})));
  };
  CHECK(two_views(1, 6)->warnings().empty());
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "ranks saved different data", two_views(2, 5));
}

TEST_CASE("the order in which axes shard a dim is followed") {
  const auto order = [](std::int64_t dim, const Sizes& axes) {
    return tuple({global("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry") +
                  tuple({integer(dim), pickled_sizes(axes)}) + "\x81"});
  };
  SavedDTensor tensor{.shape = {4},
                      .mesh = {2, 2},
                      .coordinate = {0, 1},
                      .placements = {pickled_placement("Shard"), pickled_placement("Shard")}};
  const auto box_of = [&](const std::string& given) {
    tensor.order = given;
    SavedArchive archive;
    const std::string bytes =
        archive.bytes(dict({{text("w"), tensor.pickled(archive.tensor({1}))}}));
    return read_saved_state(ByteRange(bytes, "x")).tensors[0].stored[0].box.offsets;
  };
  CHECK(box_of("N") == Shape{1});
  CHECK(box_of(order(0, {0, 1})) == Shape{1});
  CHECK(box_of(order(0, {1, 0})) == Shape{2});
  for (const Sizes& axes : {Sizes{2}, Sizes{0, 1, 0}})
    CHECK_THROWS_HOLDING(CorruptCheckpoint, "does not shard dim 0", box_of(order(0, axes)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint, "dim 1 of 1 dims is sharded", box_of(order(1, {0})));
}

TEST_CASE("descriptions that contradict themselves are refused, each with its reason") {
  SavedArchive archive;
  const std::string local = archive.tensor({2, 2});
  const auto refuses = [&](const char* why, const SavedDTensor& tensor) {
    CHECK_THROWS_HOLDING(CorruptCheckpoint, why, open_one(archive, tensor.pickled(local)));
  };
  refuses("a coordinate of 2 on an axis of 2 ranks", {.coordinate = {2}});
  refuses("found -1, expected 0 or more", {.coordinate = {-1}});
  refuses("2 coordinates on a mesh of 1 axes", {.coordinate = {0, 0}});
  refuses("1 placements on a mesh of 2 axes", {.mesh = {2, 1}, .coordinate = {0, 0}});
  refuses("a mesh of more than 16 axes", {.mesh = Sizes(17, 1)});
  refuses("a coordinate of 0 on an axis of 0 ranks", {.mesh = {0}});
  refuses("dim 2 of 2 dims is sharded", {.placements = {pickled_placement("Shard", 2)}});
  refuses("a part of float32 [2, 2] is stored for the box at [0, 0] of shape [3, 2]",
          {.shape = {6, 2}});
  refuses("found -4, expected 0 or more", {.shape = {-4, 2}});
  for (const char* name : {"Partial", "_MaskPartial", "Placement"}) {
    CHECK_THROWS_HOLDING(
        Unsupported, std::string(name) + ", which tessera does not assemble",
        open_one(archive, SavedDTensor{.placements = {pickled_placement(name)}}.pickled(local)));
  }
  CHECK_THROWS_HOLDING(
      Unsupported, "a split factor of 2, which is no product",
      open_one(
          archive,
          SavedDTensor{.placements = {pickled_placement("_StridedShard", 0, 2)}}.pickled(local)));
  CHECK_THROWS_HOLDING(CorruptCheckpoint,
                       "the box at [3, 0] of shape [2, 2] is outside the shape [4, 2]",
                       open_one(archive, pickled_sharded({4, 2}, {3, 0}, {2, 2}, local)));
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "is outside the shape",
      open_one(archive, pickled_sharded({4, 2}, {std::int64_t{1} << 62, 0}, {2, 2}, local)));
  CHECK_THROWS_HOLDING(
      CorruptCheckpoint, "chunks hold 4 of the",
      open_one(archive, pickled_sharded({1 << 30, 1 << 30}, {0, 0}, {2, 2}, local)));
  CHECK_THROWS_HOLDING(
      Unsupported, "a torchao.Quantized, which tessera does not read",
      open_one(archive, pickled_wrapper(global("torchao", "Quantized"), {2}, "}")));
}

TEST_CASE("FSDP's flat parameters are refused with the reason") {
  SavedArchive archive;
  const TempDir dir;
  dir.write("pytorch_model_fsdp_rank0.bin",
            archive.bytes(dict({{text("_flat_param"), archive.tensor({8})}})));
  CHECK_THROWS_HOLDING(Unsupported, "does not record which weights it consists of",
                       open_sharded(dir.path()));
}

TEST_CASE("dicts in dicts end, and names are limited") {
  const TempDir dir;
  const auto refuses = [&](const char* why, const std::string& root) {
    const std::string path = dir.write("x.pt", SavedArchive().bytes(root));
    CHECK_THROWS_HOLDING(CorruptCheckpoint, why, open_sharded(path));
  };
  refuses("nested deeper than 16 levels",
          text(std::string(1000, 'x')) + "0}q\1" + text("k") + "h\1s");
  // Each dict contains the one before under 100 keys.
  std::string bomb = "}q\1";
  for (int level = 0; level < 4; ++level) {
    std::string entries = "(";
    for (int i = 0; i < 100; ++i) entries += text(std::to_string(i)) + "h\1";
    bomb += "0}" + entries + "uq\1";
  }
  refuses("more entries than a pickle of", bomb);
  refuses("a name has", dict({{text(std::string(100000, 'n')), "N"}}));
  // A long name before many short ones.
  std::string many = "}(";
  for (int i = 0; i < 1000; ++i) many += text(std::to_string(i)) + "N";
  refuses("names that its nested dicts repeat", dict({{text(std::string(4000, 'p')), many + "u"}}));
  refuses("a name has 0 bytes", dict({{text(""), "N"}}));
  const auto no_dict = [&](const char* why, const std::string& bytes) {
    const std::string path = dir.write("x.pt", bytes);
    CHECK_THROWS_HOLDING(Unsupported, why, open_sharded(path));
  };
  no_dict("holds an object of a.Model, expected a dict of tensors; save the state_dict()",
          SavedArchive().bytes(call(global("a", "Model"), {})));
  no_dict("is no zip archive", "\x80\x02}.");
  CHECK_THROWS_HOLDING(InvalidArgument, "is one of several files of a model; give the directory",
                       open_sharded(kFixtures / "fsdp2" / rank_name(0, 3)));
}

}  // namespace
}  // namespace tessera::io
