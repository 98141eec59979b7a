#include "tools/tessera/launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>

#include "comm/control/agreement.h"
#include "comm/control/launch_environment.h"
#include "comm/control/tcp_store.h"
#include "core/base/error.h"
#include "tools/tessera/launch/line_prefixer.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kCommunicationFailed = 4;  // exit code
// timeout(1) and schedulers signal a process, then its group: not yet somebody who is impatient.
constexpr std::chrono::seconds kSameRequest{1};
// Of a rank to the store.
constexpr std::size_t kConnections = 4;
// For connecting to our own store.
constexpr std::chrono::milliseconds kTelling{500};

std::string make_run_id() {
  std::uint64_t bits[2] = {};
  require<IoError>(::getrandom(bits, sizeof(bits), 0) == sizeof(bits), "getrandom failed: {}",
                   std::strerror(errno));
  return fmt::format("{:016x}{:016x}", bits[0], bits[1]);
}

std::string signal_name(int signal) {
  const char* const name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

// Signals blocked for a scope and read through a descriptor; the children get the mask before it.
// SIGCHLD may have been ignored by who started us, which exec keeps: the kernel would then throw
// the ranks' exit codes away.
class SignalScope {
 public:
  SignalScope() {
    sigset_t set;
    sigemptyset(&set);
    for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&set, signal);
    ::pthread_sigmask(SIG_BLOCK, &set, &before_);
    struct sigaction standard {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &standard, &child_before_);
    fd_ = comm::FileDescriptor(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  }
  ~SignalScope() {
    ::sigaction(SIGCHLD, &child_before_, nullptr);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  int fd() const { return fd_.get(); }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t before_;
  struct sigaction child_before_ {};
  comm::FileDescriptor fd_;
};

struct Rank {
  pid_t pid = -1;
  bool running = true;
  std::optional<LinePrefixer> output;
};

class Launch {
 public:
  Launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options)
      : nproc_(nproc), options_(options), argv_(argv), server_(server_options(nproc)) {
    require<IoError>(signals_.fd() >= 0, "signalfd failed: {}", std::strerror(errno));
  }

  ~Launch() {  // only on an exception are any left
    for (const Rank& rank : ranks_) {
      if (!rank.running) continue;
      ::kill(rank.pid, SIGKILL);
      ::waitpid(rank.pid, nullptr, 0);
    }
  }

  void start() {
    for (int rank = 0; rank < nproc_; ++rank) start(rank);
  }

  int wait() {
    while (running() > 0) {
      std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
      for (const Rank& rank : ranks_) {
        if (rank.output && rank.output->fd() >= 0) polled.push_back({rank.output->fd(), POLLIN, 0});
      }
      const int timeout = next_step_ ? comm::milliseconds_until(*next_step_) : 60'000;
      ::poll(polled.data(), polled.size(), timeout);
      read_signals();
      pump_all();
      reap();
      if (next_step_ && Clock::now() >= *next_step_) end_the_others();
    }
    pump_all();
    for (Rank& rank : ranks_) {
      if (rank.output) rank.output->finish();
    }
    return conclude();
  }

 private:
  static comm::TcpStoreServerOptions server_options(int nproc) {
    comm::TcpStoreServerOptions options;
    options.run_id = make_run_id();
    options.max_connections += kConnections * static_cast<std::size_t>(nproc);
    return options;
  }

  std::vector<std::string> environment(int rank) const {
    auto variables = comm::process_environment();
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    variables.try_emplace("OMP_NUM_THREADS", std::to_string(std::max(1, cores / nproc_)));
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
    variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(nproc_);
    variables["TESSERA_RENDEZVOUS"] = fmt::format("{}:{}", server_.host(), server_.port());
    variables["TESSERA_RUN_ID"] = server_.run_id();
    std::vector<std::string> lines;
    for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
    return lines;
  }

  void start(int rank) {
    // Between fork and exec only what is safe in a copy of a process with threads: no allocation.
    std::vector<std::string> arguments = argv_, variables = environment(rank);
    std::vector<char*> argv, envp;
    for (std::string& s : arguments) argv.push_back(s.data());
    for (std::string& s : variables) envp.push_back(s.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    int ends[2] = {-1, -1};
    require<IoError>(rank == 0 || ::pipe2(ends, O_CLOEXEC) == 0, "pipe failed: {}",
                     std::strerror(errno));
    comm::FileDescriptor from(ends[0]), to(ends[1]);

    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    require<IoError>(pid >= 0, "cannot start rank {}: fork failed: {}", rank, std::strerror(errno));
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(kCommunicationFailed);  // it died before the line above
      if (rank != 0) {
        ::dup2(to.get(), STDOUT_FILENO);
        ::dup2(to.get(), STDERR_FILENO);
      }
      ::pthread_sigmask(SIG_SETMASK, &signals_.before(), nullptr);
      ::execve(options_.program.c_str(), argv.data(), envp.data());
      ::_exit(127);
    }
    Rank& added = ranks_.emplace_back();
    added.pid = pid;
    if (rank != 0) {
      ::fcntl(from.get(), F_SETFL, O_NONBLOCK);
      added.output.emplace(std::move(from), options_.error_fd, fmt::format("[rank {}] ", rank));
    }
  }

  int running() const {
    return static_cast<int>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.running; }));
  }

  void signal_all(int signal) {
    for (const Rank& rank : ranks_) {
      if (rank.running) ::kill(rank.pid, signal);
    }
  }

  void pump_all() {
    for (Rank& rank : ranks_) {
      if (rank.output) rank.output->pump();
    }
  }

  void read_signals() {
    signalfd_siginfo info;
    while (::read(signals_.fd(), &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) continue;
      if (passed_on_ != 0) {
        if (Clock::now() - passed_on_at_ >= kSameRequest) end_the_others();
        continue;
      }
      passed_on_ = signal;
      passed_on_at_ = Clock::now();
      // What the terminal sends has reached the ranks already: they are in its group.
      if (info.ssi_code != SI_KERNEL) signal_all(signal);
    }
  }

  void reap() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (!ranks_[r].running) continue;
      int status = 0;
      const pid_t ended = ::waitpid(ranks_[r].pid, &status, WNOHANG);
      if (ended == 0 || (ended < 0 && errno != ECHILD)) continue;
      ranks_[r].running = false;
      note_end(static_cast<int>(r), ended > 0 ? std::optional<int>(status) : std::nullopt);
    }
  }

  // Without a status, somebody else in this process waited for the rank: not known to have ended
  // well, so it counts as a failure.
  void note_end(int rank, std::optional<int> known_status) {
    const int status = known_status.value_or(W_EXITCODE(1, 0));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
    const pid_t pid = ranks_[static_cast<std::size_t>(rank)].pid;
    const bool by_signal = WIFSIGNALED(status);
    const int code = by_signal ? kCommunicationFailed : WEXITSTATUS(status);
    if (passed_on_ != 0 &&
        (by_signal ? WTERMSIG(status) == passed_on_ : code == 128 + passed_on_)) {
      stopped_by_signal_ = true;
      return;
    }
    if (ending_) return;  // our doing
    const bool better = !by_signal && root_ && root_->code == kCommunicationFailed &&
                        !root_->by_signal && code != kCommunicationFailed;
    if (!root_ || better ||
        (by_signal && root_->code == kCommunicationFailed && !root_->by_signal)) {
      std::string what = by_signal ? "was killed by " + signal_name(WTERMSIG(status))
                                   : fmt::format("exited with code {}", code);
      if (!known_status) what = "ended, and its exit code is lost";
      if (code == 127 && !by_signal) what += fmt::format(" (could {} be run?)", options_.program);
      root_ = Failure{code, by_signal, fmt::format("rank {} (pid {}) {}", rank, pid, what)};
      // A rank that could not talk to others is no culprit.
      if (code != kCommunicationFailed || by_signal) tell_others(rank);
    }
    if (!next_step_) next_step_ = Clock::now() + options_.notice;
  }

  // Those that wait in an agreement, where no broken connection tells them.
  void tell_others(int rank) {
    if (running() == 0) return;
    try {
      comm::TcpStore store(server_.host(), server_.port(), server_.run_id(), kTelling);
      comm::tell_of_lost_rank(store, CommError(CommFailure::PeerLost, {rank}, "{}", root_->text));
    } catch (const CommError&) {
      // They are ended by signals then.
    }
  }

  // First politely, then not.
  void end_the_others() {
    signalled_ = signalled_ || running() > 0;
    signal_all(ending_ ? SIGKILL : SIGTERM);
    ending_ = true;
    next_step_ = Clock::now() + options_.grace;
  }

  int conclude() const {
    if (root_) {
      const std::string line = fmt::format("tessera: {}{}\n", root_->text,
                                           signalled_ ? "; the other ranks were ended" : "");
      [[maybe_unused]] const auto n = ::write(options_.error_fd, line.data(), line.size());
      return root_->code;
    }
    return stopped_by_signal_ || ending_ ? 128 + passed_on_ : 0;
  }

  struct Failure {
    int code;
    bool by_signal;
    std::string text;
  };
  const int nproc_;
  const LaunchOptions options_;
  const std::vector<std::string> argv_;
  SignalScope signals_;  // before the server's thread, which inherits the mask
  comm::TcpStoreServer server_;
  std::deque<Rank> ranks_;
  std::optional<Failure> root_;
  int passed_on_ = 0;  // signal
  Clock::time_point passed_on_at_;
  bool stopped_by_signal_ = false;
  bool ending_ = false;
  bool signalled_ = false;  // ranks that still ran then
  std::optional<Clock::time_point> next_step_;
};

}  // namespace

int launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options) {
  require(nproc >= 1, "--nproc: expected at least 1, got {}", nproc);
  Launch ranks(nproc, argv, options);
  ranks.start();
  return ranks.wait();
}

}  // namespace tessera::tools
