// Every kernel exists on every backend, and is tested on all of them.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// The names that stand between `before` and a ',' or '('.
std::set<std::string> names_after(const std::string& text, const std::string& before) {
  std::set<std::string> names;
  for (auto at = text.find(before); at != std::string::npos; at = text.find(before, at + 1)) {
    const auto begin = at + before.size();
    const auto end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789", begin);
    if (end != std::string::npos && end > begin && (text[end] == ',' || text[end] == '('))
      names.insert(text.substr(begin, end - begin));
  }
  return names;
}

// The names that stand after `before` in the dispatching files.
std::set<std::string> dispatched(const std::string& before) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(fs::path(TESSERA_SOURCE_DIR) / "kernels")) {
    if (entry.path().extension() != ".cpp") continue;
    names.merge(names_after(read(entry.path()), before));
  }
  return names;
}

// What the dispatching files declare.
std::set<std::string> kernels() { return dispatched("\nTESSERA_CPU_KERNEL("); }

// What CUDA may do at once, and is composed of kernels elsewhere.
std::set<std::string> fused_kernels() { return dispatched("  TESSERA_DISPATCH_FUSED("); }

void check_plugin(const char* path, const std::set<std::string>& names) {
  CAPTURE(path);
  void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  const char* why = library == nullptr ? dlerror() : "";
  CAPTURE(why);
  REQUIRE(library != nullptr);
  for (const std::string& name : names) {
    CAPTURE(name);
    CHECK(dlsym(library, ("tessera_kernel_" + name).c_str()) != nullptr);
  }
  CHECK(dlsym(library, "tessera_kernel_of_no_name") == nullptr);
}

TEST_CASE("every kernel is there on CUDA, and as fibers") {
  CHECK(kernels().size() >= 20);
  CHECK(kernels().contains("attention_backward"));
  CHECK(fused_kernels().contains("matmul_gelu"));
  check_plugin(TESSERA_FIBER_PLUGIN, kernels());
#if defined(TESSERA_CUDA_PLUGIN_FILE)
  check_plugin(TESSERA_CUDA_PLUGIN_FILE, kernels());
  check_plugin(TESSERA_CUDA_PLUGIN_FILE, fused_kernels());
#endif
}

TEST_CASE("every kernel has a test that runs on all backends") {
  std::string tests;
  for (const auto& entry : fs::directory_iterator(fs::path(TESSERA_SOURCE_DIR) / "tests/kernels")) {
    const std::string text = read(entry.path());
    // Products on a GPU are a library's: their test runs on CPU levels and on a GPU.
    if (text.find("for_each_context(") != std::string::npos ||
        text.find("for_gpu_context(") != std::string::npos)
      tests += text;
  }
  std::set<std::string> names = kernels();
  names.merge(fused_kernels());
  for (const std::string& name : names) {
    CAPTURE(name);
    bool called = false;
    for (const char* before : {" ", "(", ":", "\n"})
      called = called || tests.find(before + name + "(") != std::string::npos;
    CHECK(called);
  }
}

TEST_CASE("every operation that computes calls a kernel") {
  const std::set<std::string> views = {"view", "checks"};
  for (const auto& entry : fs::directory_iterator(fs::path(TESSERA_SOURCE_DIR) / "core/ops")) {
    if (entry.path().extension() != ".cpp" || views.contains(entry.path().stem())) continue;
    CAPTURE(entry.path().string());
    CHECK_FALSE(names_after(read(entry.path()), "kernels::").empty());
  }
}

}  // namespace
