#include "tools/tessera/signal/stop_signal.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

using tessera::tools::StopSignal;

namespace {

struct Ended {
  std::string err;
  int signal = 0;  // signal that ended it, or 0
};

struct Child {
  int err = -1;
  pid_t pid = -1;

  Child(bool answers, int signal, StopSignal::Stage stage, std::int64_t step, std::int64_t saved) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    pid = ::fork();
    if (pid == 0) {
      ::dup2(ends[1], STDERR_FILENO);
      ::close(ends[0]);
      ::close(ends[1]);
      StopSignal stop(answers);
      stop.set_progress(stage, step);
      StopSignal::set_saved(saved);
      ::raise(signal);
      if (stop.received() != signal) ::_exit(1);
      ::raise(signal);  // the same request: within a second
      std::this_thread::sleep_for(std::chrono::milliseconds(1050));
      ::raise(signal);
      ::_exit(0);
    }
    ::close(ends[1]);
    err = ends[0];
  }
  Ended wait() const {
    Ended ended;
    char c = 0;
    while (::read(err, &c, 1) == 1) ended.err += c;
    ::close(err);
    int status = 0;
    ::waitpid(pid, &status, 0);
    ended.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return ended;
  }
};

}  // namespace

TEST_CASE("the first signal is answered at once, the second with the number of lost steps") {
  using Stage = StopSignal::Stage;
  const struct {
    int signal;
    Stage stage;
    std::int64_t step, saved;
    std::vector<std::string> first;
    std::string second;
  } cases[] = {
      {SIGINT,
       Stage::Training,
       447,
       400,
       {"after this step, then saving", "press Ctrl-C again to quit without saving"},
       "lost: 47 steps since the newest checkpoint, of step 400\n"},
      {SIGTERM,
       Stage::Training,
       20,
       -1,
       {"send SIGTERM again"},
       "lost: 20 steps, no checkpoint exists"},
      {SIGINT,
       Stage::TrainingWithoutSaves,
       9,
       -1,
       {"nothing is saved"},
       "lost: 9 steps, no checkpoint exists"},
      {SIGINT, Stage::Loading, 0, -1, {"as soon as the run has loaded"}, "no step is lost\n"},
      {SIGINT, Stage::Training, 400, 400, {}, "no step is lost\n"},
  };
  std::vector<Child> children;
  for (const auto& c : cases) children.emplace_back(true, c.signal, c.stage, c.step, c.saved);
  for (std::size_t i = 0; i < children.size(); ++i) {
    const Ended ended = children[i].wait();
    CAPTURE(ended.err);
    CHECK(ended.signal == cases[i].signal);
    const auto end = ended.err.find('\n');
    REQUIRE(end != std::string::npos);
    for (const std::string& part : cases[i].first) CHECK(ended.err.substr(0, end).find(part) < end);
    CHECK(ended.err.find(cases[i].second, end) != std::string::npos);
    CHECK(std::count(ended.err.begin(), ended.err.end(), '\n') == 2);
  }
}

TEST_CASE("only rank 0 answers, and a scheduler's warning ends nothing") {
  const Child silent(false, SIGINT, StopSignal::Stage::Training, 1, 0);
  const Child warned(true, SIGUSR1, StopSignal::Stage::Training, 1, 0);
  const Ended first = silent.wait(), second = warned.wait();
  CHECK(first.err.empty());
  CHECK(first.signal == SIGINT);
  CHECK(second.signal == 0);
  CHECK(second.err == "tessera: stopping after this step, then saving\n");
}
