#include "tools/tessera/launch/restarts.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "tests/support/temp_dir.h"
#include "tests/support/text.h"

using namespace tessera;
using namespace std::chrono_literals;
using test::holds;
using tools::RestartOptions;

namespace {

struct Run {
  int code = -1;
  std::string errors;
};

// Launches ranks that run a shell script with $RANK and $DIR, the test's directory. The newest
// "checkpoint" is the number in $DIR/step. At each start rank 0 appends a line to $DIR/starts
// (number of ranks, script argument), for which the others wait.
Run run(int nproc, const std::string& script, const test::TempDir& dir, RestartOptions restarts) {
  tools::LaunchOptions options;
  options.program = "/bin/sh";
  options.notice = 100ms;
  options.grace = 300ms;
  options.error_fd =
      ::open(dir.file("log").c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  restarts.newest_step = [&]() -> std::optional<std::int64_t> {
    if (!std::filesystem::exists(dir.file("step"))) return std::nullopt;
    return std::stoll(dir.read("step"));
  };
  const std::string text = "DIR=" + dir.path().string() +
                           "\nif test $RANK = 0; then\n"
                           "  echo $WORLD_SIZE $1 >> $DIR/starts; touch $DIR/$TESSERA_RUN_ID\n"
                           "fi\n"
                           "while ! test -e $DIR/$TESSERA_RUN_ID; do sleep 0.02; done\n" +
                           script;
  restarts.arguments = [&](bool has_checkpoint) {
    return std::vector<std::string>{"sh", "-c", text, "sh", has_checkpoint ? "from" : "anew"};
  };
  Run result;
  result.code =
      tools::launch_with_restarts(nproc, {"sh", "-c", text, "sh", "first"}, restarts, options);
  ::close(options.error_fd);
  result.errors = dir.read("log");
  return result;
}

RestartOptions at_most(int restarts, int min_nproc = 0) {
  RestartOptions options;
  options.restarts = restarts;
  options.min_nproc = min_nproc;
  options.pause = 10ms;
  return options;
}

const std::string kRankOneDies = "test $RANK = 1 && kill -KILL $$\nexec sleep 30";

}  // namespace

TEST_CASE("after a rank is killed all ranks are restarted") {
  const test::TempDir dir;
  const Run r = run(2,
                    "test -e $DIR/died && exit 0\n"
                    "test $RANK = 1 && { echo 400 > $DIR/step; touch $DIR/died; kill -KILL $$; }\n"
                    "exec sleep 30",
                    dir, at_most(3));
  INFO(r.errors);
  CHECK(r.code == 0);
  CHECK(dir.read("starts") == "2 first\n2 from\n");
  CHECK(holds(r.errors,
              "tessera: restart 1 of 3: rank 1 was killed by SIGKILL; resuming from step 400\n"));
}

TEST_CASE("without restarts nothing is restarted, silently") {
  const test::TempDir dir;
  const Run r = run(2, kRankOneDies, dir, at_most(0));
  CHECK(r.code == 4);
  CHECK(dir.read("starts") == "2 first\n");
  CHECK(r.errors.ends_with("was killed by SIGKILL; the other ranks were terminated\n"));
}

TEST_CASE("a rank that always dies after some progress ends the run after the last restart") {
  const test::TempDir dir;
  const Run r = run(1, "echo x >> $DIR/n; wc -l < $DIR/n > $DIR/step; exit 3", dir, at_most(4));
  INFO(r.errors);
  CHECK(r.code == 3);
  CHECK(dir.read("starts") == "1 first\n1 from\n1 from\n1 from\n1 from\n");
  CHECK(holds(r.errors, "restart 4 of 4: rank 0 exited with code 3; resuming from step 4\n"));
  CHECK(holds(r.errors, "rank 0 exited with code 3; giving up after 4 restarts\n"));
}

TEST_CASE("two failures in a row without a checkpoint in between end the run") {
  const test::TempDir dir;
  const Run r = run(2, kRankOneDies, dir, at_most(9));
  INFO(r.errors);
  CHECK(r.code == 4);
  CHECK(dir.read("starts") == "2 first\n2 anew\n");
  CHECK(holds(r.errors,
              "restart 1 of 9: rank 1 was killed by SIGKILL; starting from scratch, "
              "no checkpoint yet\n"));
  CHECK(holds(r.errors, "giving up: no checkpoint was committed between the last 2"));
}

TEST_CASE("a rank that fails twice at the same place is dropped, if allowed") {
  const test::TempDir dir;
  dir.write("step", "7");
  RestartOptions options = at_most(9, 2);
  options.fits = [](int nproc) { return nproc != 3; };
  const Run r = run(4, "test $WORLD_SIZE = 2 && exit 0\ntest $RANK = 3 && exit 5\nexec sleep 30",
                    dir, options);
  INFO(r.errors);
  CHECK(r.code == 0);
  CHECK(dir.read("starts") == "4 first\n4 from\n2 from\n");
  CHECK(holds(r.errors,
              "restart 2 of 9: rank 3 exited with code 5; resuming from step 7 with 2 "
              "ranks instead of 4\n"));
  const test::TempDir other;
  options = at_most(9, 2);
  CHECK(run(2, kRankOneDies, other, options).code == 4);
  CHECK(other.read("starts") == "2 first\n2 anew\n");
}

TEST_CASE("ranks that cannot name a culprit are restarted, and none is dropped") {
  const test::TempDir dir;
  const Run r = run(2, "exit 4", dir, at_most(9, 1));
  INFO(r.errors);
  CHECK(r.code == 4);
  CHECK(dir.read("starts") == "2 first\n2 anew\n");
  CHECK(holds(r.errors, "restart 1 of 9: rank "));
  CHECK(holds(r.errors, ") exited with code 4; starting from scratch"));
}

TEST_CASE("usage errors are not retried") {
  const test::TempDir dir;
  const Run r = run(2, "test $RANK = 1 && exit 2\nexec sleep 30", dir, at_most(3));
  CHECK(r.code == 2);
  CHECK(dir.read("starts") == "2 first\n");
  CHECK_FALSE(holds(r.errors, "restart"));
}

TEST_CASE("a signal between two starts, or forwarded to ranks, ends the run") {
  for (const bool between : {true, false}) {
    CAPTURE(between);
    const test::TempDir dir;
    dir.write("log", "");
    const pid_t pid = ::fork();
    if (pid == 0) {
      RestartOptions options = at_most(3);
      options.pause = between ? 5'000ms : 10ms;
      const std::string second =
          "test $1 = first || { touch $DIR/second; while true; do sleep 0.02; done; }\n";
      ::_exit(run(2, second + kRankOneDies, dir, options).code);
    }
    const auto ready = [&] {
      return between ? holds(dir.read("log"), "restart 1 of 3")
                     : std::filesystem::exists(dir.file("second"));
    };
    for (int i = 0; i < 1000 && !ready(); ++i) std::this_thread::sleep_for(10ms);
    ::kill(pid, SIGTERM);
    int status = 0;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 143);
    CHECK(holds(dir.read("log"), "before the restart") == between);
    CHECK_FALSE(holds(dir.read("log"), "restart 2 of 3"));
  }
}

TEST_CASE("138 is not the exit code of a clean stop") {
  const test::TempDir dir;
  const Run r = run(2, "test $RANK = 0 && sleep 0.3\nexit 138", dir, at_most(0));
  CHECK(r.code == 138);
  CHECK(holds(r.errors, "exited with code 138"));
}

TEST_CASE("ranks that agree to stop after one was signalled have not failed") {
  for (const int code : {130, 143}) {
    const test::TempDir dir;
    const Run r =
        run(2, "test $RANK = 0 && sleep 0.3\nexit " + std::to_string(code), dir, at_most(3));
    CHECK(r.code == code);
    CHECK(r.errors == "");
    CHECK(dir.read("starts") == "2 first\n");
  }
}
