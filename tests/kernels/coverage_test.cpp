// Every kernel exists on every backend, and is tested on all of them.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

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

/// A function, a class or a test of a source file: what stands between blank lines at the left
/// edge.
struct Part {
  std::string text;
  std::set<std::string> names;  ///< that it defines
};

bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// Whether the text holds `words`, and there not as a part of longer names.
bool mentions(const std::string& text, const std::string& words) {
  for (auto at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
    const auto end = at + words.size();
    const bool begins = at == 0 || !is_of_name(text[at - 1]);
    const bool ends = end == text.size() || !is_of_name(words.back()) || !is_of_name(text[end]);
    if (begins && ends) return true;
  }
  return false;
}

std::set<std::string> defined_names(const std::string& text) {
  static const std::regex kClass("^(?:struct|class) (\\w+)"), kFunction("(\\w+)\\(");
  std::set<std::string> names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == ' ' || line[0] == '/') continue;
    std::smatch found;
    if (std::regex_search(line, found, kClass) || std::regex_search(line, found, kFunction))
      names.insert(found[1]);
  }
  names.erase("TEST_CASE");
  return names;
}

std::vector<Part> parts_of(const std::string& text) {
  std::vector<Part> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    auto end = text.find("\n\n", begin);
    while (end != std::string::npos && end + 2 < text.size() && text[end + 2] == ' ')
      end = text.find("\n\n", end + 2);
    const std::string part = text.substr(begin, end == std::string::npos ? end : end - begin);
    parts.push_back({part, defined_names(part)});
    begin = end == std::string::npos ? text.size() : end + 2;
  }
  return parts;
}

/// The text of the parts that is_first names, and of all whose names those mention, in any number
/// of steps.
template <typename F>
std::string reached(const std::vector<Part>& parts, const F& is_first) {
  std::vector<bool> taken(parts.size());
  std::vector<std::size_t> next;
  const auto take = [&](std::size_t i) {
    if (!taken[i]) next.push_back(i);
    taken[i] = true;
  };
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (is_first(parts[i])) take(i);
  std::string text;
  while (!next.empty()) {
    const std::string part = parts[next.back()].text;
    next.pop_back();
    text += part + "\n";
    for (std::size_t i = 0; i < parts.size(); ++i)
      for (const std::string& name : parts[i].names)
        if (!taken[i] && mentions(part, name)) take(i);
  }
  return text;
}

/// Whether a test calls the kernel in what runs in `contexts`, as "for_each_context": itself, in a
/// function that it calls, or in the body that it hands to a template which calls `contexts`.
bool calls_in(const std::string& test, const std::string& contexts, const std::string& kernel) {
  if (!mentions(test, kernel + "(")) return false;
  const std::vector<Part> parts = parts_of(test);
  std::set<std::string> runners = {contexts};
  for (const Part& part : parts)
    if (mentions(part.text, contexts) && mentions(part.text, "typename F"))
      runners.insert(part.names.begin(), part.names.end());
  const std::string text = reached(parts, [&](const Part& part) {
    return std::any_of(runners.begin(), runners.end(),
                       [&](const std::string& name) { return mentions(part.text, name + "("); });
  });
  return mentions(text, "kernels::" + kernel + "(") ||
         (mentions(test, "using kernels::" + kernel + ";") && mentions(text, kernel + "("));
}

// On a GPU these are a library's. On fibers a plain loop of the host stands in for it, and GELU
// comes after: there is no kernel to compare.
const std::set<std::string> kProducts = {"matmul", "matmul_bias_gradient", "matmul_gelu",
                                         "matmul_gelu_backward"};

TEST_CASE("every kernel has a test that runs on all backends, as fibers, too") {
  std::vector<std::string> tests;
  for (const auto& entry : fs::directory_iterator(fs::path(TESSERA_SOURCE_DIR) / "tests/kernels"))
    if (entry.path().extension() == ".cpp") tests.push_back(read(entry.path()));
  std::set<std::string> names = kernels();
  names.merge(fused_kernels());
  for (const std::string& product : kProducts) CHECK(names.contains(product));
  for (const std::string& name : names) {
    CAPTURE(name);
    const char* contexts = kProducts.contains(name) ? "for_gpu_context" : "for_each_context";
    CHECK(std::any_of(tests.begin(), tests.end(),
                      [&](const std::string& test) { return calls_in(test, contexts, name); }));
  }
}

TEST_CASE("a call counts as tested only where the contexts asked for run it") {
  const std::string test = R"(
using kernels::scale;

void check(Context& context) {
  kernels::half(context);

  helper(context);
}

void helper(Context& context) { kernels::third(context); }

template <typename F>
void for_all_sizes(F&& f) {
  for_gpu_context([&](Context& context) { f(context); });
}

TEST_CASE("all") {
  for_each_context([](Context& context) { check(context); });
}

TEST_CASE("on a GPU") {
  for_all_sizes([](Context& context) { scale(context); });
}

TEST_CASE("on the CPU") {
  kernels::fourth(*Context::create());
}
)";
  for (const char* kernel : {"half", "third"}) {
    CHECK(calls_in(test, "for_each_context", kernel));
    CHECK_FALSE(calls_in(test, "for_gpu_context", kernel));
  }
  CHECK(calls_in(test, "for_gpu_context", "scale"));
  for (const char* kernel : {"scale", "fourth", "hal", "check"})
    CHECK_FALSE(calls_in(test, "for_each_context", kernel));
}

// Functions of kernels/ that run nothing on a device.
const std::set<std::string> kHostFunctions = {"accumulator_dtype"};

std::set<std::string> called_kernels(const std::string& text) {
  std::set<std::string> names = names_after(text, "kernels::");
  for (const std::string& name : kHostFunctions) names.erase(name);
  return names;
}

TEST_CASE("every operation runs kernels that all backends have, and has a test") {
  const fs::path source = TESSERA_SOURCE_DIR;
  std::string tests;
  for (const auto& entry : fs::directory_iterator(source / "tests/core"))
    tests += read(entry.path());
  std::set<std::string> known = kernels();
  known.merge(fused_kernels());
  static const std::regex kDeclaration("(?:^|\n)(?:Tensor|SumAndNorm) (\\w+)\\(");
  int operations = 0;
  for (const auto& entry : fs::directory_iterator(source / "core/ops")) {
    if (entry.path().extension() != ".h") continue;
    const std::string header = read(entry.path());
    const auto parts = parts_of(read(fs::path(entry.path()).replace_extension(".cpp")));
    const auto end = std::sregex_iterator();
    for (auto at = std::sregex_iterator(header.begin(), header.end(), kDeclaration); at != end;
         ++at, ++operations) {
      const std::string operation = (*at)[1];
      CAPTURE(operation);
      const auto used = called_kernels(
          reached(parts, [&](const Part& part) { return part.names.contains(operation); }));
      CHECK(used.empty() == (operation == "reshape"));  // which moves nothing
      for (const std::string& kernel : used) {
        CAPTURE(kernel);
        CHECK(known.contains(kernel));
      }
      CHECK(mentions(tests, operation + "("));
    }
  }
  CHECK(operations >= 19);
}

TEST_CASE("what models and training call beside operations are kernels that all backends have") {
  std::set<std::string> known = kernels();
  known.merge(fused_kernels());
  for (const char* folder : {"core", "models", "tools/tessera"}) {
    const fs::path path = fs::path(TESSERA_SOURCE_DIR) / folder;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.path().extension() != ".cpp") continue;
      CAPTURE(entry.path().string());
      for (const std::string& kernel : called_kernels(read(entry.path()))) {
        CAPTURE(kernel);
        CHECK(known.contains(kernel));
      }
    }
  }
}

TEST_CASE("every way to cut a launch has a test") {
  std::string tests;
  for (const auto& entry : fs::directory_iterator(fs::path(TESSERA_SOURCE_DIR) / "tests/kernels"))
    tests += read(entry.path());
  static const std::regex kShape("\nstruct (\\w+Shape) ");
  std::set<std::string> shapes;
  const fs::path folder = fs::path(TESSERA_SOURCE_DIR) / "kernels/cuda/launch";
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string header = read(entry.path());
    const auto end = std::sregex_iterator();
    for (auto at = std::sregex_iterator(header.begin(), header.end(), kShape); at != end; ++at)
      shapes.insert((*at)[1]);
  }
  CHECK(shapes.size() >= 14);
  for (const std::string& shape : shapes) {
    CAPTURE(shape);
    CHECK(mentions(tests, shape));
  }
}

}  // namespace
