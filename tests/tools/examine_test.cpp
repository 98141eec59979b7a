#include "tools/tessera/doctor/examine.h"

#include <doctest/doctest.h>

#include <cstdlib>

#include "tests/support/temp_dir.h"

using namespace tessera;
using namespace tessera::tools;

TEST_CASE("the machine has processors and memory") {
  const Machine machine = examine_machine();
  CHECK(machine.threads >= 1);
  CHECK(machine.memory_total > (std::int64_t{64} << 20));
  CHECK(machine.memory_available > 0);
  CHECK(machine.memory_available <= machine.memory_total);
  CHECK(machine.open_files > 0);
  CHECK(!machine.processor.empty());
}

TEST_CASE("a missing directory is checked through its parent, and not created") {
  const test::TempDir dir;
  const auto state = examine_directory(dir.path() / "a" / "b");
  CHECK(state.writable);
  CHECK(state.problem.empty());
  CHECK(state.free_bytes > 0);
  CHECK(std::filesystem::is_empty(dir.path()));
}

TEST_CASE("an unwritable directory is named") {
  const test::TempDir dir;
  const auto file = dir.write("file", "");
  CHECK(!examine_directory(file).writable);
  CHECK(examine_directory(file).problem.find("is not a directory") != std::string::npos);
  CHECK(examine_directory("/proc/absent").problem.find("/proc") != std::string::npos);
}

TEST_CASE("an unusable GPU is a failure if a driver is loaded, else a note") {
  const test::TempDir dir;
  const std::string driver = dir.write("version", "NVRM version\n");
  const auto examine = [](const std::string& plugin, const std::string& version) {
    REQUIRE(::setenv("TESSERA_CUDA_PLUGIN", plugin.c_str(), 1) == 0);
    const Gpus gpus = examine_gpus(version);
    REQUIRE(::unsetenv("TESSERA_CUDA_PLUGIN") == 0);
    CHECK(gpus.descriptions.empty());
    CHECK_FALSE(gpus.problem.empty());
    return gpus.healthy();
  };
  const std::string unfit = dir.write("plugin.so", "");
  CHECK_FALSE(examine(unfit, driver));
  CHECK(examine(unfit, dir.file("absent")));
  // The variable is empty and this test's directory has no plugins: no backend.
  CHECK(examine("", driver));
  REQUIRE(::setenv("CUDA_VISIBLE_DEVICES", "", 1) == 0);
  CHECK(examine(unfit, driver));
  REQUIRE(::unsetenv("CUDA_VISIBLE_DEVICES") == 0);
}

TEST_CASE("each library is listed for the build and the machine, with or without a GPU") {
  const test::TempDir dir;
  const auto examine = [] {
    std::vector<Library> libraries = examine_libraries();
    REQUIRE(libraries.size() == 4);
    CHECK(libraries[0].name == "CUDA backend");
    CHECK(libraries[1].name == "cuDNN attention");
    CHECK(libraries[2].name == "NCCL backend");
    CHECK(libraries[3].name == "oneDNN products");
    for (const Library& library : libraries) {
      CAPTURE(library.name);
      CHECK_FALSE(library.cost.empty());
      CHECK(library.on_machine == library.problem.empty());
      CHECK(library.found() == (library.in_build && library.on_machine));
    }
    return libraries;
  };
  // This test's directory has no plugins.
  ::unsetenv("TESSERA_CUDA_PLUGIN");
  ::unsetenv("TESSERA_NCCL_PLUGIN");
  ::unsetenv("TESSERA_ONEDNN_PLUGIN");
  for (const Library& library : examine()) CHECK_FALSE(library.in_build);

  REQUIRE(::setenv("TESSERA_CUDA_PLUGIN", dir.write("libtessera_cuda.so", "").c_str(), 1) == 0);
  REQUIRE(::setenv("TESSERA_NCCL_PLUGIN", dir.file("absent").c_str(), 1) == 0);
  auto libraries = examine();
  CHECK(libraries[0].in_build);
  CHECK_FALSE(libraries[0].on_machine);
  CHECK(libraries[0].problem.find("the CUDA backend can't be loaded") != std::string::npos);
  CHECK_FALSE(libraries[1].in_build);
  CHECK_FALSE(libraries[2].in_build);

  dir.write("libtessera_cudnn.so", "");
  REQUIRE(::setenv("TESSERA_NCCL_PLUGIN", dir.write("nccl.so", "").c_str(), 1) == 0);
  libraries = examine();
  CHECK(libraries[1].in_build);
  CHECK_FALSE(libraries[1].on_machine);
  CHECK(libraries[2].in_build);
  CHECK(libraries[2].problem.find("the NCCL backend can't be loaded") != std::string::npos);
  REQUIRE(::unsetenv("TESSERA_CUDA_PLUGIN") == 0);
  REQUIRE(::unsetenv("TESSERA_NCCL_PLUGIN") == 0);
}

TEST_CASE("the matrix product is correct at every supported CPU level") {
  for (const CpuLevel level : cpu_levels()) {
    const ProductResult result = examine_product(2, level);
    CHECK(result.correct);
    CHECK(result.largest_error < 1e-5);
    CHECK(result.gflops > 0);
  }
}
