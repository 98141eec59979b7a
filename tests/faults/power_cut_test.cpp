// Cuts the power after every system call of a save. All, none or part of the unsynced data may
// survive. In each case a valid checkpoint must be found: the new one if its save was committed.

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string_view>

#include "io/base/crc.h"
#include "tests/faults/campaign.h"
#include "tests/io/support.h"
#include "tests/support/fault_log.h"

using namespace tessera;
using namespace tessera::test;

namespace fs = std::filesystem;

namespace {

using Random = std::mt19937_64;
constexpr std::size_t kSector = 512;  // unit of atomic disk writes

std::size_t below(Random& random, std::size_t n) { return n == 0 ? 0 : random() % n; }

struct Node;
using NodePtr = std::shared_ptr<Node>;
using Entries = std::map<std::string, NodePtr>;

struct DataWrite {
  std::size_t at = 0;
  std::string_view data;
};

/// A directory change: `name` now refers to `node` (null: removed) and `from` is removed; or both
/// names swap their nodes.
struct NameChange {
  std::string name, from;
  NodePtr node;
  bool swap = false;
};

/// A file or directory: its durable state, and the changes since the last sync.
struct Node {
  bool is_directory = false;
  std::string data;
  std::vector<DataWrite> writes;
  Entries entries;
  std::vector<NameChange> changes;
};

void apply(std::string& data, const DataWrite& write) {
  data.resize(std::max(data.size(), write.at + write.data.size()));
  data.replace(write.at, write.data.size(), write.data);
}

void apply(Entries& entries, const NameChange& change) {
  if (change.swap) {
    std::swap(entries.at(change.name), entries.at(change.from));
    return;
  }
  if (!change.from.empty()) entries.erase(change.from);
  if (change.node) {
    entries[change.name] = change.node;
  } else {
    entries.erase(change.name);
  }
}

/// Unsynced changes that survive.
enum class Survival { Nothing, Names, NamesAndSizes, Data, All, Mixed };

class Disk {
 public:
  Disk(Survival survival, Random& random) : survival_(survival), random_(random) {}

  Entries entries(const Node& directory) {
    std::size_t kept = directory.changes.size();
    if (survival_ == Survival::Nothing || survival_ == Survival::Data) kept = 0;
    // Changes within a directory survive in order; directories are independent.
    if (survival_ == Survival::Mixed) kept = below(random_, kept + 1);
    Entries result = directory.entries;
    for (std::size_t i = 0; i < kept; ++i) apply(result, directory.changes[i]);
    return result;
  }

  std::string data(const Node& file) {
    std::string result = file.data;
    std::size_t size = result.size();
    for (const DataWrite& write : file.writes) size = std::max(size, write.at + write.data.size());
    switch (survival_) {
      case Survival::Nothing:
      case Survival::Names:
        return result;
      case Survival::NamesAndSizes:
        result.resize(size);
        return result;
      case Survival::Data:
      case Survival::All:
        for (const DataWrite& write : file.writes) apply(result, write);
        return result;
      case Survival::Mixed:
        break;
    }
    const std::size_t mode = below(random_, 5);
    const std::size_t kept = mode == 0 ? 0 : below(random_, file.writes.size() + 1);
    for (std::size_t i = 0; i < file.writes.size(); ++i) {
      const DataWrite& write = file.writes[i];
      const bool in_prefix = i < kept;
      if (mode == 1 && in_prefix) apply(result, write);
      if (mode == 2 && below(random_, 2) == 0) apply(result, write);
      if (mode == 3 && (in_prefix || i == kept)) apply_torn(result, write, in_prefix ? 0 : 2);
      if (mode == 4) apply_torn(result, write, 2);
    }
    // The size may reach the disk before the data, which then reads as zeros.
    if (below(random_, 2) == 0) result.resize(size);
    return result;
  }

 private:
  // Loses each sector with probability 1 / loss; 0: none.
  void apply_torn(std::string& data, const DataWrite& write, std::size_t loss) {
    for (std::size_t begin = 0; begin < write.data.size();) {
      const std::size_t in_sector = kSector - (write.at + begin) % kSector;
      const std::size_t n = std::min(in_sector, write.data.size() - begin);
      if (loss == 0 || below(random_, loss) == 0) {
        apply(data, {write.at + begin, write.data.substr(begin, n)});
      }
      begin += n;
    }
  }

  const Survival survival_;
  Random& random_;
};

class Simulation {
 public:
  explicit Simulation(const SavedRun& run) : run_(run), root_(run.logged_checkpoints()) {
    // The logged run began with the base's files.
    for (const auto& [inode, path] : run.first_inodes()) {
      const fs::path relative = fs::path(path).lexically_relative(root_);
      const fs::path source = (run.base_checkpoints() / relative).lexically_normal();
      auto node = std::make_shared<Node>();
      node->is_directory = fs::is_directory(source);
      if (!node->is_directory) node->data = read_text(source);
      by_inode_[inode] = node;
      by_path_[relative.lexically_normal().string()] = node;
    }
    for (const auto& [path, node] : by_path_) {
      if (path == ".") continue;
      const fs::path relative(path);
      const std::string parent = relative.has_parent_path() ? relative.parent_path().string() : ".";
      by_path_.at(parent)->entries[relative.filename()] = node;
    }
    checkpoints_ = by_path_.at(".");
  }

  /// @return whether the call changes the possible outcomes of a power cut
  bool make(const LoggedCall& call) {
    if (call.name == "mkdir" || call.name == "create") {
      auto node = std::make_shared<Node>();
      node->is_directory = call.name == "mkdir";
      by_inode_[call.inode] = node;
      change(call.path, {fs::path(call.path).filename(), "", node, false});
    } else if (call.name == "rename" || call.name == "exchange") {
      const fs::path from(call.path), to(call.path2);
      REQUIRE(from.parent_path() == to.parent_path());  // within one directory
      const NodePtr moved = live(directory(call.path)).at(from.filename());
      change(call.path, {to.filename(), from.filename(), moved, call.name == "exchange"});
    } else if (call.name == "remove") {
      change(call.path, {fs::path(call.path).filename(), "", nullptr, false});
    } else if (call.name == "write") {
      const std::string_view data = run_.written();
      by_inode_.at(call.inode)
          ->writes.push_back({static_cast<std::size_t>(call.offset),
                              data.substr(static_cast<std::size_t>(call.data_at),
                                          static_cast<std::size_t>(call.bytes))});
    } else if (call.name == "sync") {
      Node& node = *by_inode_.at(call.inode);
      for (const DataWrite& write : node.writes) apply(node.data, write);
      node.writes.clear();
      for (const NameChange& change : node.changes) apply(node.entries, change);
      node.changes.clear();
      note_commit(node);
    } else {
      CAPTURE(call.name);
      REQUIRE((call.name == "open" || call.name == "close" || call.name == "flush" ||
               call.name == "failed"));
      return false;
    }
    return true;
  }

  void pretend(const LoggedCall& call) { note_commit(*by_inode_.at(call.inode)); }

  /// The newest step that the program may report as committed.
  std::int64_t committed() const { return committed_; }

  /// Writes the disk's contents. @return checksum that identifies the state
  std::uint64_t materialize(Disk& disk, const fs::path& to) const {
    std::uint64_t crc = 0;
    materialize(*checkpoints_, disk, to, crc);
    return crc;
  }

 private:
  static Entries live(const Node& directory) {
    Entries entries = directory.entries;
    for (const NameChange& change : directory.changes) apply(entries, change);
    return entries;
  }

  // The directory node that contains a path, by current names.
  Node& directory(const std::string& path) const {
    NodePtr node = checkpoints_;
    for (const fs::path& name : fs::path(path).parent_path().lexically_relative(root_)) {
      if (name != ".") node = live(*node).at(name);
    }
    return *node;
  }

  void change(const std::string& path, NameChange change) {
    directory(path).changes.push_back(std::move(change));
  }

  // Checkpoints in a synced directory count as committed.
  void note_commit(const Node& synced) {
    if (&synced != checkpoints_.get()) return;
    for (const auto& [name, node] : live(synced)) {
      if (name.starts_with("step-") && fs::path(name).extension().empty()) {
        committed_ = std::max<std::int64_t>(committed_, std::stoll(name.substr(5)));
      }
    }
  }

  void materialize(const Node& directory, Disk& disk, const fs::path& to,
                   std::uint64_t& crc) const {
    fs::create_directory(to);
    for (const auto& [name, node] : disk.entries(directory)) {
      crc = io::crc64(name.data(), name.size(), crc);
      if (node->is_directory) {
        materialize(*node, disk, to / name, crc);
        crc = io::crc64("/", 1, crc);
        continue;
      }
      const std::string data = disk.data(*node);
      crc = io::crc64(data.data(), data.size(), crc);
      std::ofstream(to / name, std::ios::binary) << data;
    }
  }

  const SavedRun& run_;
  const fs::path root_;
  std::map<std::uint64_t, NodePtr> by_inode_;
  std::map<std::string, NodePtr> by_path_;  // initial state
  NodePtr checkpoints_;
  std::int64_t committed_ = kFirstStep;
};

std::map<std::string, std::string> files_of(const fs::path& dir) {
  std::map<std::string, std::string> files;
  for (const auto& item : fs::recursive_directory_iterator(dir)) {
    if (item.is_regular_file()) {
      files[item.path().lexically_relative(dir)] = read_text(item.path());
    }
  }
  return files;
}

using Syncs = bool (*)(const std::string& path);

struct Survey {
  std::int64_t states = 0, lost = 0, mixed = 0, undone = 0, resumed_badly = 0;
  std::set<std::uint64_t> distinct;
  std::map<std::int64_t, std::int64_t> found;  ///< states by newest valid step
  std::string stories;

  bool clean() const { return lost + mixed + undone + resumed_badly == 0; }
};

bool resumes_well(const fs::path& checkpoints, std::int64_t state) {
  const std::string run = saved_run().copy(fmt::format("cut-{}", state));
  fs::remove_all(run + "/checkpoints");
  fs::copy(checkpoints, run + "/checkpoints", fs::copy_options::recursive);
  const auto result = run_cli(saved_run().resume_arguments(run));
  const Newest newest = newest_of(run);
  fs::remove_all(run);
  return result.code == 0 && newest.step == kLastStep &&
         newest.content == saved_run().content().at(kLastStep);
}

/// Cuts the power `each` times after every call that can change the outcome.
/// @param resume_every  resumes training from every n-th state
/// @param missing       syncs to skip; the survey then stops at the first failure
Survey survey(std::int64_t each, std::int64_t resume_every, Syncs missing = nullptr) {
  Survey survey;
  Simulation simulation(saved_run());
  Random random(20240229);
  const TempDir dir;
  const fs::path checkpoints = dir.path() / "checkpoints";
  const auto& content = saved_run().content();
  for (const LoggedCall& call : saved_run().calls()) {
    if (missing != nullptr && call.name == "sync" && missing(call.path)) {
      simulation.pretend(call);
    } else if (!simulation.make(call)) {
      continue;
    }
    for (std::int64_t i = 0; i < each; ++i) {
      // With few cuts per call, rotate through all survival modes.
      const std::int64_t turn = each < 8 ? survey.states % 8 : i;
      const auto survival = turn < 5 ? static_cast<Survival>(turn) : Survival::Mixed;
      Disk disk(survival, random);
      std::error_code ignored;
      fs::remove_all(checkpoints, ignored);
      survey.distinct.insert(simulation.materialize(disk, checkpoints));
      ++survey.states;
      const Newest newest = newest_of(checkpoints);
      ++survey.found[newest.step];
      const auto expected = content.find(newest.step);
      std::string wrong;
      if (expected == content.end()) {
        ++survey.lost;
        wrong = "no valid checkpoint";
      } else if (expected->second != newest.content) {
        ++survey.mixed;
        wrong = "mixed content";
      } else if (newest.step < simulation.committed()) {
        ++survey.undone;
        wrong = fmt::format("step {} had been committed", simulation.committed());
      } else if (resume_every > 0 && survey.states % resume_every == 0 &&
                 !resumes_well(checkpoints, survey.states)) {
        ++survey.resumed_badly;
        wrong = "resuming gives another result";
      }
      if (wrong.empty()) continue;
      if (survey.stories.size() < 10'000) {
        survey.stories += fmt::format(
            "cut after call {} of rank {}, {} {} {}, survival {}, state {}: {}; newest is step {}; "
            "skipped: {}\n",
            call.number, call.rank, call.name, call.path, call.path2, static_cast<int>(survival),
            survey.states, wrong, newest.step, newest.skipped);
      }
      if (missing != nullptr) return survey;
    }
  }
  return survey;
}

std::int64_t calls_that_matter() {
  Simulation simulation(saved_run());
  const auto& calls = saved_run().calls();
  return std::count_if(calls.begin(), calls.end(),
                       [&](const LoggedCall& call) { return simulation.make(call); });
}

}  // namespace

TEST_CASE("the log of a save is complete: replayed, it gives the run's files") {
  Simulation simulation(saved_run());
  for (const LoggedCall& call : saved_run().calls()) simulation.make(call);
  Random random(1);
  Disk disk(Survival::All, random);
  const TempDir dir;
  simulation.materialize(disk, dir.path() / "checkpoints");
  const auto expected = files_of(saved_run().logged_checkpoints());
  CHECK(expected.size() == 7);  // checkpoint files and `latest`
  CHECK((files_of(dir.path() / "checkpoints") == expected));
}

TEST_CASE("after a power cut at any point of a save, the old or the new checkpoint is valid") {
  const std::int64_t wanted = tries_all() ? 10'000 : 400;
  const std::int64_t calls = calls_that_matter();
  const Survey result = survey((wanted + calls - 1) / calls, tries_all() ? 100 : 300);
  std::puts(fmt::format("| power cut | {}, {} distinct | {} | {} | - | {} | - | - |", result.states,
                        result.distinct.size(), result.lost, result.mixed,
                        result.undone + result.resumed_badly)
                .c_str());
  std::fflush(stdout);
  log_fault(fmt::format(
      R"({{"fault": "power cut", "point": "save", "world": 4, "count": {}, "wrong": "{}"}})",
      result.states, result.clean() ? "" : "lost, mixed or undone"));
  INFO(result.stories);
  CHECK(result.states >= wanted);
  CHECK(result.clean());
  // Cuts range from before the first commit to after the second.
  for (const auto& [step, same] : saved_run().content()) {
    CAPTURE(step);
    CHECK(result.found.contains(step));
  }
}

// Each of these syncs is necessary: skipping it is detected.
TEST_CASE("a save that skips a sync loses data in a power cut") {
  struct Case {
    const char* what;
    Syncs missing;
  };
  for (const auto& [what, missing] : {
           Case{"shards", [](const std::string& p) { return p.ends_with(".safetensors"); }},
           Case{"trainer state",
                [](const std::string& p) { return p.ends_with("trainer.json.tmp"); }},
           Case{"index", [](const std::string& p) { return p.ends_with("index.json.tmp"); }},
           Case{"the checkpoint's directory",
                [](const std::string& p) {
                  return p.ends_with(".tmp") && !p.ends_with(".json.tmp");
                }},
           Case{"the directory of checkpoints",
                [](const std::string& p) { return p.ends_with("/checkpoints"); }},
       }) {
    CAPTURE(what);
    const Survey result = survey(3, 0, missing);
    CHECK_FALSE(result.clean());
  }
}
