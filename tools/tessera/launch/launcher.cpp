#include "tools/tessera/launch/launcher.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "comm/collective.h"
#include "comm/control/agreement.h"
#include "comm/control/authentication.h"
#include "comm/control/launch_environment.h"
#include "comm/control/monitor.h"
#include "comm/control/rendezvous.h"
#include "comm/control/tcp_store.h"
#include "core/base/error.h"
#include "core/base/processors.h"
#include "tools/tessera/launch/log_output.h"
#include "tools/tessera/launch/rank_process.h"
#include "tools/tessera/report/utf8.h"
#include "tools/tessera/signal/stop_signal.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;

// Signals within this time are one request, because schedulers signal a process and its group.
constexpr std::chrono::seconds kSameRequest{1};
// Maximum connections of a rank to the store.
constexpr std::size_t kConnections = 4;
// Final pump() calls, of 64 KiB each, that empty a full pipe: 16 pages of at most 64 KiB.
constexpr int kLastPumps = 16;
// Interval between checks for ranks that announced their exit and still run.
constexpr std::chrono::milliseconds kLook{1000};

std::string line_of(std::string_view text) { return fmt::format("tessera: {}\n", escaped(text)); }

struct Failure {
  int code = kCommunication;
  bool is_own = true;     // root cause, not a consequence of another rank's failure
  int rank = -1;          // -1: unknown
  std::string what = {};  // "was killed by SIGKILL"
  std::string text = {};  // "rank 1 (pid 12) was killed by SIGKILL"
};

std::string what_happened(const CommError& verdict) {
  if (verdict.fate() == "stopped") return "sent no heartbeat";
  switch (verdict.failure()) {
    case CommFailure::PeerLost:
      return "was lost";
    case CommFailure::Timeout:
      return "did not arrive in time";
    case CommFailure::Mismatch:
      return "disagreed with the others";
    case CommFailure::Aborted:
      return "aborted communication";
  }
  return "failed";
}

Failure failure_of(const CommError& verdict, bool is_own) {
  const std::string_view text = verdict.what();
  Failure failure{.is_own = is_own, .text = std::string(text.substr(0, text.find('\n')))};
  failure.what = failure.text;
  if (!verdict.culprits().empty()) {
    failure.rank = verdict.culprits().front();
    failure.what = what_happened(verdict);
  }
  return failure;
}

class Launch {
 public:
  /// @param signals  created before any thread, so that threads inherit the mask
  Launch(int nproc, const LaunchOptions& options, const LauncherSignals& signals)
      : nproc_(nproc),
        options_(options),
        signals_(signals),
        log_(options.error_fd),
        server_(server_options(nproc)) {
    require<IoError>(static_cast<bool>(verdict_), "eventfd failed: {}", std::strerror(errno));
    monitor_ = std::make_unique<comm::Monitor>(
        server_, comm::MonitorOptions{.silence = options.heartbeat_timeout},
        [this](const CommError& /*published*/) {
          const std::uint64_t one = 1;
          [[maybe_unused]] const auto n = ::write(verdict_.get(), &one, sizeof(one));
        },
        [this](const std::string& note) { log_.write(line_of("warning: " + note)); });
  }

  ~Launch() {  // ranks still run only after an exception
    monitor_.reset();
    for (const RankProcess& rank : ranks_) {
      if (!rank.running()) continue;
      rank.signal(SIGKILL);
      ::waitpid(rank.pid(), nullptr, 0);
    }
  }

  LaunchOutcome run(const std::vector<std::string>& argv) {
    for (int number = 0; number < nproc_; ++number) start(number, argv);
    while (running() > 0) {
      poll_events();
      read_signals();
      log_.flush();
      if (!log_.is_full()) pump_all();
      reap();
      act_on_verdict();
      if (next_step_ && Clock::now() >= *next_step_) end_the_others();
      kill_lingering();
    }
    // Drain the pipes; a bounded number of reads, because child processes of ranks may still write.
    for (int i = 0; i < kLastPumps; ++i) pump_all();
    for (RankProcess& rank : ranks_) rank.finish_output();
    LaunchOutcome outcome = conclude();
    log_.finish();
    return outcome;
  }

 private:
  static comm::TcpStoreServerOptions server_options(int nproc) {
    comm::TcpStoreServerOptions options;
    options.run_id = comm::make_token().substr(0, 32);
    options.token = comm::make_token();
    options.max_connections += kConnections * static_cast<std::size_t>(nproc);
    return options;
  }

  void start(int number, const std::vector<std::string>& argv) {
    auto variables = comm::process_environment();
    const int cores = usable_processors();
    variables.try_emplace("OMP_NUM_THREADS", std::to_string(std::max(1, cores / nproc_)));
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(number);
    variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(nproc_);
    variables["TESSERA_RENDEZVOUS"] = fmt::format("{}:{}", server_.host(), server_.port());
    variables["TESSERA_RUN_ID"] = server_.run_id();
    variables["TESSERA_TOKEN"] = server_.token();
    variables.erase("TESSERA_TOKEN_FD");
    RankCommand command{
        options_.program, argv, {}, signals_.mask_of_ranks(options_.blocks_warnings)};
    for (const auto& [name, value] : variables) command.environment.push_back(name + "=" + value);
    const pid_t pid = ranks_.emplace_back(number, std::move(command), log_).pid();
    server_.set_or_get(comm::started_key(number), fmt::format("pid {}", pid));
  }

  RankProcess& rank(int number) { return ranks_[static_cast<std::size_t>(number)]; }
  std::string name(int number) {
    return fmt::format("rank {} (pid {})", number, rank(number).pid());
  }
  int running() const {
    return static_cast<int>(std::ranges::count_if(ranks_, &RankProcess::running));
  }
  void signal_all(int signal) {
    for (const RankProcess& rank : ranks_) rank.signal(signal);
  }
  void pump_all() {
    for (RankProcess& rank : ranks_) rank.pump();
  }

  void poll_events() {
    std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}, {verdict_.get(), POLLIN, 0}};
    polled.push_back({log_.fd(), POLLOUT, 0});  // poll() ignores -1
    for (const RankProcess& rank : ranks_) {
      if (!log_.is_full()) polled.push_back({rank.output(), POLLIN, 0});
    }
    int timeout = static_cast<int>(kLook.count());
    if (next_step_) timeout = std::min(timeout, comm::milliseconds_until(*next_step_));
    ::poll(polled.data(), polled.size(), timeout);
  }

  void read_signals() {
    for (auto signal = signals_.next(); signal.number != 0; signal = signals_.next()) {
      if (signal.number == SIGUSR1 && passed_on_ != 0) continue;
      if (passed_on_ != 0 && passed_on_ != SIGUSR1) {
        if (Clock::now() - passed_on_at_ >= kSameRequest) {
          quits_ = true;
          end_the_others();
        }
        continue;
      }
      note_request(signal.number);
      // The terminal has signalled the whole process group, ranks included.
      if (!signal.by_terminal) signal_all(signal.number);
    }
  }

  void note_request(int signal) {
    passed_on_ = signal;
    passed_on_at_ = Clock::now();
  }

  void reap() {
    for (int number = 0; number < nproc_; ++number) {
      if (const auto status = rank(number).reap()) note_end(number, *status);
    }
  }

  void note_end(int number, int status) {
    if (status == 0 || rank(number).is_expected_to_end()) return;
    if (const int signal = stop_request_of(status); signal != 0) {
      stopped_by_ = signal;
      if (WIFSIGNALED(status)) end_by_request(number, signal);
      return;
    }
    if (ending_) return;  // we sent SIGTERM or SIGKILL
    const int code = WIFSIGNALED(status) ? kCommunication : WEXITSTATUS(status);
    Failure failure{.code = code,
                    .is_own = WIFSIGNALED(status) || code != kCommunication,
                    .rank = number,
                    .what = describe_end(status)};
    if (code == 127) failure.what += fmt::format(" (is {} an executable?)", options_.program);
    failure.text = name(number) + " " + failure.what;
    if (root_ && root_->is_own) {
      if (WIFSIGNALED(status) && root_->rank >= 0 && root_->rank != number)
        root_->text += "; " + failure.text;
    } else if (failure.is_own) {
      root_ = failure;
      publish(number, root_->text, short_end(status));
    } else {
      blame_verdict(failure);
    }
    if (!next_step_) act_in(options_.notice);
  }

  // Returns the stop signal, forwarded or sent to the rank itself, that ended a rank; else 0.
  int stop_request_of(int status) const {
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) {
      const bool is_own = passed_on_ == 0 && !ending_ && signal != SIGUSR1 &&
                          (WIFSIGNALED(status) || options_.stop_together);
      if (signal != passed_on_ && !is_own) continue;
      if (WIFSIGNALED(status) ? WTERMSIG(status) == signal
                              : WEXITSTATUS(status) == stop_exit_code(signal))
        return signal;
    }
    return 0;
  }

  // A rank that dies of a stop signal has no handler yet, so its rendezvous never ends: stop all.
  void end_by_request(int number, int signal) {
    ended_by_request_.insert(number);
    if (root_ || ending_ || running() == 0) return;
    if (passed_on_ == 0) {
      note_request(signal);
      signal_all(signal);
    }
    publish(number, name(number) + " exited on a stop request", signal_name(signal));
    if (!next_step_) act_in(options_.notice);
  }

  // Exit code 4 is a consequence, so blame the rank named by the verdict, the error that all ranks
  // agreed to report. Without a verdict, the ranks could not reach this process.
  void blame_verdict(const Failure& failure) {
    auto verdict = comm::find_verdict(server_);
    if (!verdict) verdict = comm::find_failure(server_, comm::kRendezvous);
    if (verdict && !verdict->culprits().empty()) {
      root_ = failure_of(*verdict, false);
    } else if (!root_) {
      const CommError lost(CommFailure::PeerLost, {failure.rank}, "{}", failure.text);
      root_ = Failure{.is_own = false, .text = monitor_->judge(lost).what()};
      root_->what = root_->text;
    }
  }

  // Publishes the failure to ranks waiting in an agreement, because they see no broken connection.
  void publish(int number, const std::string& text, const std::string& fate) {
    if (running() == 0) return;
    CommError error(CommFailure::PeerLost, {number}, "{}", text);
    comm::publish_verdict(server_, error.set_fate(fate));
  }

  // Acts on the monitor's verdict. Sends SIGKILL, because a stopped process ignores other signals.
  void act_on_verdict() {
    std::uint64_t count = 0;
    if (::read(verdict_.get(), &count, sizeof(count)) < 0 || root_) return;
    const auto verdict = comm::find_verdict(server_);
    if (!verdict) return;
    root_ = failure_of(*verdict, true);
    for (const int culprit : verdict->culprits()) {
      if (culprit >= 0 && culprit < nproc_ && rank(culprit).running())
        rank(culprit).kill_expected();
    }
    if (!next_step_) act_in(options_.notice);
  }

  // Kills ranks that announced their exit and still run, because the monitor expects no heartbeat
  // from them. Counts checks instead of time, which also passes while the host is suspended.
  void kill_lingering() {
    const auto now = Clock::now();
    if (next_step_ || now < next_look_) return;
    next_look_ = now + kLook;
    std::vector<int> staying;
    for (const auto& [number, beat] : server_.beats().all()) {
      if (!beat.state.leaving || number < 0 || number >= nproc_ || !rank(number).running())
        continue;
      if (leaving_looks_[number]++ * kLook >= options_.leave) staying.push_back(number);
    }
    if (staying.empty()) return;
    for (const int number : staying) rank(number).kill_expected();
    if (root_) return;
    const bool one = staying.size() == 1;
    root_ =
        Failure{.rank = one ? staying[0] : -1,
                .what = fmt::format("did not exit within {} of announcing it, and {} killed",
                                    comm::format_seconds(options_.leave), one ? "was" : "were")};
    root_->text = (one ? name(staying[0]) : comm::rank_list(staying)) + " " + root_->what;
    if (!one) root_->what = root_->text;
  }

  void act_in(std::chrono::milliseconds time) { next_step_ = Clock::now() + time; }

  // The first call sends SIGTERM; the next one, options_.grace later, sends SIGKILL.
  void end_the_others() {
    signalled_ = signalled_ || running() > 0;
    if (ending_ && killed_.empty()) {
      for (int number = 0; number < nproc_; ++number)
        if (rank(number).running()) killed_.push_back(number);
    }
    signal_all(ending_ ? SIGKILL : SIGTERM);
    ending_ = true;
    act_in(options_.grace);
  }

  LaunchOutcome conclude() {
    LaunchOutcome outcome;
    outcome.signal = passed_on_ != 0 ? passed_on_ : stopped_by_;
    if (root_ && root_->code == kCommunication && ended_by_request_.contains(root_->rank))
      root_.reset();  // the failure is a consequence of the stop request
    if (root_) {
      log_.write(line_of(root_->text + (signalled_ ? "; the other ranks were terminated" : "")));
      outcome.code = root_->code;
      outcome.failed = true;
      outcome.culprit = root_->rank;
      outcome.failure =
          root_->rank < 0 ? root_->what : fmt::format("rank {} {}", root_->rank, root_->what);
    } else if (!killed_.empty()) {
      log_.write(line_of(fmt::format(
          "{} did not exit within {} of the last stop request, and {} killed{}",
          comm::rank_list(killed_), comm::format_seconds(options_.grace),
          killed_.size() == 1 ? "was" : "were", quits_ ? "" : "; unsaved progress is lost")));
      outcome.code = quits_ ? stop_exit_code(outcome.signal) : kCommunication;
    } else if (stopped_by_ != 0 || ending_) {
      outcome.code = stop_exit_code(outcome.signal);
    }
    return outcome;
  }

  const int nproc_;
  const LaunchOptions options_;
  const LauncherSignals& signals_;
  LogOutput log_;
  comm::TcpStoreServer server_;
  comm::FileDescriptor verdict_{
      ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};  // readable once a verdict is published
  std::unique_ptr<comm::Monitor> monitor_;
  std::deque<RankProcess> ranks_;
  std::optional<Failure> root_;
  int passed_on_ = 0;  // forwarded signal; 0: none
  Clock::time_point passed_on_at_;
  bool quits_ = false;       // a second stop request arrived
  int stopped_by_ = 0;       // stop signal that ended a rank; 0: none
  bool ending_ = false;      // SIGTERM was sent
  bool signalled_ = false;   // SIGTERM was sent while ranks were running
  std::vector<int> killed_;  // ranks that survived SIGTERM
  std::optional<Clock::time_point> next_step_;
  std::set<int> ended_by_request_;
  std::map<int, int> leaving_looks_;
  Clock::time_point next_look_{};
};

}  // namespace

void say(const LaunchOptions& options, std::string_view text) {
  LogOutput log(options.error_fd);
  log.write(line_of(text));
  log.finish();
}

LaunchOutcome launch(int nproc, const std::vector<std::string>& argv, const LaunchOptions& options,
                     const LauncherSignals& signals) {
  require(nproc >= 1, "--nproc: expected at least 1, got {}", nproc);
  return Launch(nproc, options, signals).run(argv);
}

}  // namespace tessera::tools
