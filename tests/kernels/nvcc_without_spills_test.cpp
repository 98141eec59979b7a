// Tests cmake/nvcc_without_spills.sh with a fake compiler that prints ptxas statistics.
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace {

struct Result {
  int code = -1;
  std::string said;
};

/// Runs the wrapper around a compiler that prints this text, logs its arguments, and exits with
/// this code.
Result compile(const tessera::test::TempDir& dir, const std::string& text, int code = 0) {
  dir.write("text", text);
  const std::string nvcc =
      dir.write("nvcc", "printf '<%s>' \"$@\" >" + dir.file("arguments") + "\ncat " +
                            dir.file("text") + " >&2\nexit " + std::to_string(code) + "\n");
  const std::string command = "bash " + tessera::test::source_path("cmake/nvcc_without_spills.sh") +
                              " sh " + nvcc + " -c 'a file.cu' -Xptxas=-v >" + dir.file("out") +
                              " 2>" + dir.file("err") + " </dev/null";
  const int status = std::system(command.c_str());
  CHECK(dir.read("out") == "");
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, dir.read("err")};
}

std::string statistics(const std::string& kernel, int stack, int stores, int loads) {
  return "ptxas info    : Compiling entry function '" + kernel +
         "' for 'sm_90a'\n"
         "ptxas info    : Function properties for " +
         kernel + "\n    " + std::to_string(stack) + " bytes stack frame, " +
         std::to_string(stores) + " bytes spill stores, " + std::to_string(loads) +
         " bytes spill loads\n"
         "ptxas info    : Used 255 registers, used 1 barriers, 400 bytes cmem[0]\n";
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("kernels without spills compile silently") {
  const tessera::test::TempDir dir;
  const Result quiet = compile(dir, "ptxas info    : 0 bytes gmem\n" + statistics("hot", 0, 0, 0));
  CHECK(quiet.code == 0);
  CHECK(quiet.said == "");
  CHECK(dir.read("arguments") == "<-c><a file.cu><-Xptxas=-v>");
  CHECK(compile(dir, statistics("hot", 16, 0, 0)).code == 0);
  CHECK(compile(dir, "").code == 0);
}

TEST_CASE("an array on the stack fails the compilation") {
  const tessera::test::TempDir dir;
  const Result slow = compile(dir, statistics("adamw", 128, 0, 0));
  CHECK(slow.code == 1);
  CHECK(holds(slow.said, "array on the stack: adamw:    128 bytes stack frame"));
}

TEST_CASE("a kernel that spills fails to compile, and is named") {
  const tessera::test::TempDir dir;
  for (const auto& [stores, loads] : {std::pair{24, 32}, {4, 0}, {0, 8}}) {
    const Result spilled =
        compile(dir, statistics("cold", 0, 0, 0) + statistics("hot", 32, stores, loads) +
                         statistics("tepid", 8, 0, 0));
    CHECK(spilled.code == 1);
    CHECK(holds(spilled.said, "spilled registers: hot:"));
    CHECK(holds(spilled.said, std::to_string(stores) + " bytes spill stores"));
    CHECK_FALSE(holds(spilled.said, "cold"));
    CHECK_FALSE(holds(spilled.said, "tepid"));
  }
}

TEST_CASE("a kernel of the table takes no more registers than it allows, and no stack") {
  const tessera::test::TempDir dir;
  const std::string add =
      "_ZN7tessera7kernels4cuda18elementwise_kernelILi8ENS1_7AddBodyINS_8BFloat16EEEEEvlT0_";
  const std::string name = "void elementwise_kernel<8, AddBody<BFloat16> >";
  const auto with = [](std::string text, const std::string& part, const std::string& other) {
    return text.replace(text.find(part), part.size(), other);
  };
  const std::string text = statistics(add, 0, 0, 0);
  const Result slow = compile(dir, text);
  CHECK(slow.code == 1);
  CHECK(holds(slow.said, "too many registers: " + name));
  CHECK(holds(slow.said, ": 255 on sm_90a; kernels/cuda/expected_code.txt allows 32"));
  CHECK(compile(dir, with(text, "sm_90a", "sm_80")).code == 0);
  CHECK(compile(dir, with(text, "255", "32")).code == 0);
  const Result stacked = compile(dir, with(statistics(add, 8, 0, 0), "255", "32"));
  CHECK(stacked.code == 1);
  CHECK(holds(stacked.said, "array on the stack: " + name));
}

TEST_CASE("other compiler output and the exit code are passed through") {
  const tessera::test::TempDir dir;
  const std::string warning = "a.cu(3): warning #177-D: variable \"x\" was declared";
  const Result warned = compile(dir, statistics("hot", 0, 0, 0) + warning + "\n");
  CHECK(warned.code == 0);
  CHECK(warned.said == warning + "\n");
  const std::string error = "a.cu(4): error: expected a \";\"";
  const Result failed = compile(dir, error + "\n", 2);
  CHECK(failed.code == 2);
  CHECK(failed.said == error + "\n");
  CHECK(compile(dir, statistics("hot", 0, 4, 4), 2).code == 2);
}
