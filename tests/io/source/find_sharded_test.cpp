#include "io/source/find_sharded.h"

#include <doctest/doctest.h>

#include <iterator>
#include <map>

#include "core/base/error.h"
#include "io/consolidate/consolidate.h"
#include "tests/io/support.h"
#include "tests/support/check_throws.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace tessera::io {
namespace {

using namespace tessera::test;

void copy_fixture(const std::string& fixture, const fs::path& to) {
  fs::create_directories(to.parent_path());
  fs::copy(test::source_path("tests/io/" + fixture), to, fs::copy_options::recursive);
}

struct Tree {
  TempDir dir;
  fs::path root = dir.path() / "run";
  Tree() { fs::create_directory(root); }
  /// By path below the root.
  std::map<std::string, FoundCheckpoint> find() const {
    std::map<std::string, FoundCheckpoint> found;
    for (FoundCheckpoint& each : find_sharded(root))
      found[each.path.lexically_relative(root).string()] = each;
    return found;
  }
};

TEST_CASE("checkpoints of every kind are found below a directory, with step and state") {
  const Tree tree;
  copy_fixture("dcp/fixtures/fsdp-gpt2", tree.root / "step-10");
  copy_fixture("dcp/fixtures/fsdp-gpt2", tree.root / "step-9");
  copy_fixture("dcp/fixtures/fsdp-gpt2", tree.root / "step-20");
  fs::remove(tree.root / "step-20/__1_0.distcp");
  copy_fixture("torch/fixtures/fsdp2", tree.root / "global_step_8/actor");
  copy_fixture("torch/fixtures/lightning/last.ckpt", tree.root / "epoch=1-step=7.ckpt");
  copy_fixture("torch/fixtures/lightning/last.ckpt", tree.root / "cut.ckpt");
  fs::resize_file(tree.root / "cut.ckpt", 100);
  copy_fixture("gguf/fixtures/llama.gguf", tree.root / "gguf/llama.gguf");
  copy_fixture("dcp/fixtures/fsdp-gpt2", tree.root / ".hidden/step-99");
  fs::create_directory_symlink("step-10", tree.root / "last");
  write_text(tree.root / "scheduler.pt", "no archive");
  write_text(tree.root / "notes.txt", "");
  const auto found = tree.find();
  CHECK(found.size() == 7);
  CHECK(found.at("step-10").kind == "PyTorch DCP");
  CHECK(found.at("step-10").step == 10);
  CHECK(found.at("step-10").problem.empty());
  CHECK(found.at("step-10").newest);
  CHECK(found.at("step-10").bytes > 1000);
  CHECK_FALSE(found.at("step-9").newest);
  CHECK(found.at("step-20").problem.find("__1_0.distcp is missing") != std::string::npos);
  CHECK_FALSE(found.at("step-20").newest);
  CHECK(found.at("global_step_8/actor").kind == "PyTorch FSDP checkpoint of rank files");
  CHECK(found.at("global_step_8/actor").step == 8);
  CHECK(found.at("epoch=1-step=7.ckpt").kind == "PyTorch Lightning checkpoint");
  CHECK(found.at("epoch=1-step=7.ckpt").step == 7);
  CHECK_FALSE(found.at("cut.ckpt").problem.empty());
  CHECK_FALSE(found.at("cut.ckpt").step);
  CHECK(found.at("gguf/llama.gguf").kind == "GGUF file");
  // By step, then by path.
  const auto listed = find_sharded(tree.root);
  CHECK(listed.back().step == 20);
  CHECK_FALSE(listed.front().step);
}

TEST_CASE("a run of DeepSpeed is its checkpoints, and a Trainer's model is listed with them") {
  const Tree tree;
  copy_fixture("deepspeed/fixtures/zero2", tree.root / "zero");
  consolidate(test::source_path("tests/io/dcp/fixtures/fsdp-gpt2"), tree.root / "checkpoint-2");
  copy_fixture("deepspeed/fixtures/zero2/global_step2", tree.root / "checkpoint-2/global_step2");
  auto found = tree.find();
  CHECK(found.size() == 3);
  CHECK(found.at("zero/global_step2").kind == "DeepSpeed ZeRO-2 checkpoint");
  CHECK(found.at("zero/global_step2").step == 2);
  CHECK(found.at("checkpoint-2").kind == "Hugging Face model");
  CHECK(found.at("checkpoint-2").step == 2);
  CHECK(found.at("checkpoint-2/global_step2").problem.empty());
  CHECK(found.at("checkpoint-2").bytes < found.at("checkpoint-2/global_step2").bytes);
  ConsolidateOptions all;
  all.format = ExportFormat::Safetensors;
  all.what = ExportWhat::All;
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "give its folder " + (tree.root / "checkpoint-2/global_step2").string(),
                       plan_consolidation(tree.root / "checkpoint-2", all));
  // The file of a rank is missing.
  for (const fs::path& path : list_directory(tree.root / "zero/global_step2"))
    if (path.string().ends_with("rank_1_mp_rank_00_optim_states.pt")) fs::remove(path);
  found = tree.find();
  CHECK(found.at("zero/global_step2").problem.find("missing") != std::string::npos);
}

TEST_CASE("a run of Megatron is its iterations, and accelerate's folders are one checkpoint") {
  const Tree tree;
  copy_fixture("megatron/fixtures/llama", tree.root / "megatron");
  copy_fixture("dcp/fixtures/accelerate", tree.root / "checkpoint-5");
  const auto found = tree.find();
  CHECK(found.size() == 2);
  CHECK(found.at("checkpoint-5").kind == "checkpoint of accelerate's FSDP (PyTorch DCP)");
  CHECK(found.at("checkpoint-5").step == 5);
  CHECK(found.at("checkpoint-5").bytes > 10'000);
  const auto& [path, iteration] = *std::prev(found.end());
  CHECK(path.starts_with("megatron/iter_"));
  CHECK(iteration.kind == "Megatron-core (PyTorch DCP)");
}

TEST_CASE("one checkpoint or file is listed by itself, and nothing is an empty list") {
  const Tree tree;
  CHECK(tree.find().empty());
  copy_fixture("dcp/fixtures/fsdp-gpt2", tree.root / "step-10");
  const auto one = find_sharded(tree.root / "step-10");
  REQUIRE(one.size() == 1);
  CHECK(one[0].step == 10);
  CHECK(one[0].newest);
  copy_fixture("torch/fixtures/lightning/last.ckpt", tree.root / "last.ckpt");
  REQUIRE(find_sharded(tree.root / "last.ckpt").size() == 1);
  CHECK(find_sharded(tree.root / "last.ckpt")[0].kind == "PyTorch Lightning checkpoint");
}

}  // namespace
}  // namespace tessera::io
