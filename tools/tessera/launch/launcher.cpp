#include "tools/tessera/launch/launcher.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
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
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/authentication.h"
#include "comm/control/launch_environment.h"
#include "comm/control/monitor.h"
#include "comm/control/rendezvous.h"
#include "comm/control/tcp_store.h"
#include "comm/control/withheld_time.h"
#include "comm/failure_report.h"
#include "core/base/error.h"
#include "tools/tessera/launch/line_prefixer.h"
#include "tools/tessera/launch/log_output.h"
#include "tools/tessera/launch/starved.h"
#include "tools/tessera/signal/stop_signal.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kCommunicationFailed = 4;  // exit code
// timeout(1) and schedulers signal a process, then its group: not yet somebody who is impatient.
constexpr std::chrono::seconds kSameRequest{1};
// Of a rank to the store.
constexpr std::size_t kConnections = 4;
// Between looks at the clock while ranks are given time to end.
constexpr int kLastPumps = 16;  // a pipe holds 16 pages of memory, of 64 KiB at most
constexpr std::chrono::milliseconds kTick{100};
// Between looks at the ranks when nothing tells of one: a thread that was there before us may be
// handed the signal of a rank's end, and ignores it.
constexpr std::chrono::milliseconds kLook{1000};

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

struct Rank {
  pid_t pid = -1;
  bool running = true;
  bool is_ended = false;               // by us, and nobody else is for it
  std::chrono::nanoseconds starved{};  // when time was given last
  std::optional<LinePrefixer> output;
};

class Launch {
 public:
  /// @param signals  made before any thread, which inherits the mask
  Launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options,
         const LauncherSignals& signals)
      : nproc_(nproc),
        options_(options),
        argv_(argv),
        signals_(signals),
        log_(options.error_fd),
        server_(server_options(nproc)) {
    require<IoError>(static_cast<bool>(wake_), "eventfd failed: {}", std::strerror(errno));
    monitor_ = std::make_unique<comm::Monitor>(
        server_, comm::MonitorOptions{.silence = options.heartbeat_timeout},
        [this](const CommError& error) { take_verdict(error); },
        [this](const std::string& note) {
          log_.write(fmt::format("tessera: warning: {}\n", note));
        });
  }

  ~Launch() {  // only on an exception are any left
    monitor_.reset();
    for (const Rank& rank : ranks_) {
      if (!rank.running) continue;
      ::kill(rank.pid, SIGKILL);
      ::waitpid(rank.pid, nullptr, 0);
    }
  }

  void start() {
    for (int rank = 0; rank < nproc_; ++rank) start(rank);
  }

  LaunchOutcome wait() {
    while (running() > 0) {
      std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
      polled.push_back({log_.fd(), POLLOUT, 0});  // -1 is passed over
      for (const Rank& rank : ranks_) {
        if (rank.output && rank.output->fd() >= 0 && !log_.is_full())
          polled.push_back({rank.output->fd(), POLLIN, 0});
      }
      ::poll(polled.data(), polled.size(), time_to_wait());
      const auto now = Clock::now();
      const auto withheld = withheld_.look(now), stopped = stopped_.look(now);
      for (auto& [rank, began] : leaves_) began += stopped;
      if (next_step_) {
        *next_step_ += withheld;
        added_ += withheld;
      }
      read_signals();
      log_.flush();
      if (!log_.is_full()) pump_all();
      reap();
      act_on_verdict();
      if (next_step_ && Clock::now() >= *next_step_ && !give_starved_ranks_time()) end_the_others();
      end_who_stays();
    }
    // All that their pipes hold; processes that ranks began may go on to write, and are not waited
    // for.
    for (int i = 0; i < kLastPumps; ++i) pump_all();
    for (Rank& rank : ranks_) {
      if (rank.output) rank.output->finish();
    }
    LaunchOutcome outcome = conclude();
    log_.finish();
    return outcome;
  }

 private:
  static comm::TcpStoreServerOptions server_options(int nproc) {
    comm::TcpStoreServerOptions options;
    options.run_id = make_run_id();
    options.token = comm::make_token();
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
    variables["TESSERA_TOKEN"] = server_.token();
    variables.erase("TESSERA_TOKEN_FD");
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
      // A warning waits until the rank can take it: see HeldWarnings.
      sigset_t mask = signals_.before();
      sigaddset(&mask, SIGUSR1);
      ::pthread_sigmask(SIG_SETMASK, &mask, nullptr);
      ::execve(options_.program.c_str(), argv.data(), envp.data());
      ::_exit(127);
    }
    Rank& added = ranks_.emplace_back();
    added.pid = pid;
    server_.set_or_get(comm::started_key(rank), fmt::format("pid {}", pid));
    if (rank != 0) {
      ::fcntl(from.get(), F_SETFL, O_NONBLOCK);
      added.output.emplace(std::move(from), log_, fmt::format("[rank {}] ", rank));
    }
  }

  int time_to_wait() const {  // milliseconds
    if (!next_step_) return static_cast<int>(kLook.count());
    return std::min(comm::milliseconds_until(*next_step_), static_cast<int>(kTick.count()));
  }

  // No heartbeat is expected any more of a rank that has said that it leaves.
  void end_who_stays() {
    const auto now = Clock::now();
    if (next_step_ || now < look_for_leavers_) return;
    look_for_leavers_ = now + kLook;
    std::vector<int> staying;
    for (const auto& [rank, beat] : server_.beats().all()) {
      if (!beat.state.leaving || rank < 0 || rank >= nproc_) continue;
      if (!ranks_[static_cast<std::size_t>(rank)].running) continue;
      const auto began = leaves_.try_emplace(rank, now).first->second;
      if (now - began >= options_.leave) staying.push_back(rank);
    }
    if (staying.empty()) return;
    for (const int rank : staying) {  // it does not end by SIGTERM either
      Rank& stays = ranks_[static_cast<std::size_t>(rank)];
      stays.is_ended = true;
      ::kill(stays.pid, SIGKILL);
    }
    if (root_) return;
    const bool one = staying.size() == 1;
    const std::string what =
        fmt::format("did not end within {} of leaving, and {} ended",
                    comm::format_seconds(options_.leave), one ? "was" : "were");
    std::string text = comm::rank_list(staying);
    if (one) text += fmt::format(" (pid {})", ranks_[static_cast<std::size_t>(staying[0])].pid);
    text += " " + what;
    root_ = Failure{.code = kCommunicationFailed,
                    .by_signal = true,
                    .rank = one ? staying[0] : -1,
                    .what = one ? what : text,
                    .text = text};
  }

  void act_again_in(std::chrono::milliseconds time) {
    const auto now = Clock::now();
    withheld_.look(now);  // from here on it counts
    next_step_ = now + time;
    for (Rank& rank : ranks_) rank.starved = starved(rank.pid);
    added_ = {};
  }

  // A rank that is to say what it has to may not have had a processor yet. The grace after SIGTERM
  // stays what it is.
  bool give_starved_ranks_time() {
    if (ending_) return false;
    std::chrono::nanoseconds longest{};
    for (const Rank& rank : ranks_)
      if (rank.running) longest = std::max(longest, starved(rank.pid) - rank.starved);
    const auto more = time_for_starved(longest, added_);
    *next_step_ += more;
    added_ += more;
    return more.count() > 0;
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
      if (signal == SIGUSR1 && passed_on_ != 0) continue;  // a warning, and nobody's impatience
      if (passed_on_ != 0 && passed_on_ != SIGUSR1) {
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
    if (ranks_[static_cast<std::size_t>(rank)].is_ended) return;
    const pid_t pid = ranks_[static_cast<std::size_t>(rank)].pid;
    const bool by_signal = WIFSIGNALED(status);
    const int code = by_signal ? kCommunicationFailed : WEXITSTATUS(status);
    if (passed_on_ != 0 &&
        (by_signal ? WTERMSIG(status) == passed_on_ : code == stop_exit_code(passed_on_))) {
      stopped_by_ = passed_on_;
      if (by_signal) end_who_met(rank);
      return;
    }
    if (ending_) return;                          // our doing
    for (const int signal : {SIGINT, SIGTERM}) {  // it was signalled itself, and all stop for it
      if (by_signal || code != stop_exit_code(signal)) continue;
      stopped_by_ = signal;
      return;
    }
    const bool better = !by_signal && root_ && root_->code == kCommunicationFailed &&
                        !root_->by_signal && code != kCommunicationFailed;
    const bool beside = by_signal && root_ && root_->by_signal && root_->rank >= 0 && !better;
    if (beside && root_->rank != rank) {
      root_->text += fmt::format("; rank {} (pid {}) was killed by {}", rank, pid,
                                 signal_name(WTERMSIG(status)));
    }
    if (!root_ || better ||
        (by_signal && root_->code == kCommunicationFailed && !root_->by_signal)) {
      std::string what = by_signal ? "was killed by " + signal_name(WTERMSIG(status))
                                   : fmt::format("exited with code {}", code);
      if (!known_status) what = "ended, and its exit code is lost";
      if (code == 127 && !by_signal) what += fmt::format(" (could {} be run?)", options_.program);
      root_ =
          Failure{code,
                  by_signal,
                  rank,
                  what,
                  fmt::format("rank {} (pid {}) {}", rank, pid, what),
                  by_signal ? signal_name(WTERMSIG(status)) : fmt::format("exit code {}", code)};
      if (code != kCommunicationFailed || by_signal) {
        tell_others(rank);
        add_own_stop(rank);
      } else {
        name_nobody();
      }
    }
    if (!by_signal && code == kCommunicationFailed && !root_->by_signal &&
        root_->code == kCommunicationFailed) {
      blame_agreed();
    }
    if (!next_step_) act_again_in(options_.notice);
  }

  // A rank that has not met the others yet ends by a request to stop at once, and those that have
  // go on without it no more.
  void end_who_met(int rank) {
    ended_as_asked_.insert(rank);
    if (root_ || ending_ || running() == 0) return;
    CommError error(CommFailure::PeerLost, {rank},
                    "rank {} (pid {}) ended when it was asked to stop", rank,
                    ranks_[static_cast<std::size_t>(rank)].pid);
    comm::publish_verdict(server_, error.set_fate(signal_name(passed_on_)));
    if (!next_step_) act_again_in(options_.notice);
  }

  // A rank that could not talk to others is no culprit. It may be that they could not talk to us.
  void name_nobody() {
    const CommError lost(CommFailure::PeerLost, {root_->rank}, "{}", root_->text);
    root_->rank = -1;
    root_->what = root_->text = monitor_->judge(lost).what();
  }

  // The other ranks may have given this process up before they could hear of that one.
  void add_own_stop(int rank) {
    const CommError lost(CommFailure::PeerLost, {rank}, "{}", root_->text);
    const CommError judged = monitor_->judge(lost);
    if (judged.fate() == comm::kNoAnswer) root_->text += fmt::format("; {}", judged.what());
  }

  // It has agreed with them on who is.
  void blame_agreed() {
    auto verdict = comm::find_verdict(server_);
    if (!verdict) verdict = comm::find_failure(server_, comm::kRendezvous);
    if (!verdict || verdict->culprits().empty()) return;
    root_->rank = verdict->culprits().front();
    root_->what = what_happened(*verdict);
    const std::string_view text = verdict->what();
    root_->text = text.substr(0, text.find('\n'));
  }

  static std::string what_happened(const CommError& verdict) {
    if (verdict.fate() == "stopped") return "gave no sign of life";
    if (verdict.fate() == comm::kCutOff) return "and others did not reach each other";
    switch (verdict.failure()) {
      case CommFailure::PeerLost:
        return "was lost";
      case CommFailure::Timeout:
        return "did not come in time";
      case CommFailure::Mismatch:
        return "did something else than the others";
      case CommFailure::Aborted:
        return "gave up";
    }
    return "failed";
  }

  // Those that wait in an agreement, where no broken connection tells them.
  void tell_others(int rank) {
    if (running() == 0) return;
    CommError error(CommFailure::PeerLost, {rank}, "{}", root_->text);
    comm::publish_verdict(server_, error.set_fate(root_->fate));
  }

  // On the monitor's thread.
  void take_verdict(const CommError& error) {
    const std::lock_guard lock(verdict_mutex_);
    verdict_ = error;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(wake_.get(), &one, sizeof(one));
  }

  // Whoever is stopped takes no notice of anything but SIGKILL.
  void act_on_verdict() {
    std::optional<CommError> verdict;
    std::uint64_t count = 0;
    [[maybe_unused]] const auto n = ::read(wake_.get(), &count, sizeof(count));
    {
      const std::lock_guard lock(verdict_mutex_);
      verdict.swap(verdict_);
    }
    if (!verdict || root_) return;
    const bool known = !verdict->culprits().empty();
    root_ = Failure{kCommunicationFailed, true, known ? verdict->culprits().front() : -1,
                    known ? what_happened(*verdict) : verdict->what(), verdict->what()};
    for (const int culprit : verdict->culprits()) {
      if (culprit < 0 || culprit >= nproc_) continue;
      Rank& stopped = ranks_[static_cast<std::size_t>(culprit)];
      if (!stopped.running) continue;
      stopped.is_ended = true;
      ::kill(stopped.pid, SIGKILL);
    }
    if (!next_step_) act_again_in(options_.notice);
  }

  // First politely, then not.
  void end_the_others() {
    signalled_ = signalled_ || running() > 0;
    if (ending_ && killed_.empty()) {
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        if (ranks_[r].running) killed_.push_back(static_cast<int>(r));
    }
    signal_all(ending_ ? SIGKILL : SIGTERM);
    ending_ = true;
    act_again_in(options_.grace);
  }

  LaunchOutcome conclude() {
    LaunchOutcome outcome;
    outcome.signal = passed_on_ != 0 ? passed_on_ : stopped_by_;
    // What follows from that is no failure.
    if (root_ && root_->code == kCommunicationFailed && ended_as_asked_.contains(root_->rank))
      root_.reset();
    if (root_) {
      log_.write(fmt::format("tessera: {}{}\n", root_->text,
                             signalled_ ? "; the other ranks were ended" : ""));
      outcome.code = root_->code;
      outcome.failed = true;
      outcome.culprit = root_->rank;
      outcome.failure =
          root_->rank < 0 ? root_->what : fmt::format("rank {} {}", root_->rank, root_->what);
    } else if (!killed_.empty()) {
      log_.write(fmt::format(
          "tessera: rank{} {} did not end within {} of the last request to stop, and {} "
          "killed; what was not saved is lost\n",
          killed_.size() == 1 ? "" : "s", fmt::join(killed_, ", "),
          comm::format_seconds(options_.grace), killed_.size() == 1 ? "was" : "were"));
      outcome.code = kCommunicationFailed;
    } else if (stopped_by_ != 0 || ending_) {
      outcome.code = stop_exit_code(outcome.signal);
    }
    return outcome;
  }

  struct Failure {
    int code;
    bool by_signal;
    int rank;
    std::string what, text;  // with the rank, or whoever it is, before it in `text`
    std::string fate = {};
  };
  const int nproc_;
  const LaunchOptions options_;
  const std::vector<std::string> argv_;
  const LauncherSignals& signals_;
  LogOutput log_;
  comm::TcpStoreServer server_;
  comm::FileDescriptor wake_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::mutex verdict_mutex_;
  std::optional<CommError> verdict_;  // that the monitor came to
  std::unique_ptr<comm::Monitor> monitor_;
  std::deque<Rank> ranks_;
  std::optional<Failure> root_;
  int passed_on_ = 0;  // signal
  Clock::time_point passed_on_at_;
  int stopped_by_ = 0;  // signal
  bool ending_ = false;
  bool signalled_ = false;   // ranks that still ran then
  std::vector<int> killed_;  // that SIGTERM did not end
  std::optional<Clock::time_point> next_step_;
  std::chrono::nanoseconds added_{};  // to it, since it was set
  comm::WithheldTime withheld_{kTick};
  comm::WithheldTime stopped_{kLook};
  std::set<int> ended_as_asked_;             // by the signal that was passed on
  std::map<int, Clock::time_point> leaves_;  // since when a rank is known to
  Clock::time_point look_for_leavers_{};
};

}  // namespace

LauncherSignals::LauncherSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) sigaddset(&set, signal);
  fd_ = comm::FileDescriptor(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
  require<IoError>(fd_.get() >= 0, "signalfd failed: {}", std::strerror(errno));
  ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &standard, &child_before_);
}

LauncherSignals::~LauncherSignals() {
  ::sigaction(SIGCHLD, &child_before_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

LaunchOutcome launch_once(int nproc, const std::vector<std::string>& argv,
                          const LaunchOptions& options, const LauncherSignals& signals) {
  require(nproc >= 1, "--nproc: expected at least 1, got {}", nproc);
  Launch ranks(nproc, argv, options, signals);
  ranks.start();
  return ranks.wait();
}

int launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options) {
  const LauncherSignals signals;
  return launch_once(nproc, argv, options, signals).code;
}

}  // namespace tessera::tools
