#include "tools/tessera/run_report/verdict.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>

#include "tools/tessera/report/console.h"

namespace tessera::tools {
namespace {

using comm::FlightEnd;
using comm::FlightRecord;
using comm::FlightState;
using Ranks = std::vector<const RankEvidence*>;

bool failed_alone(FlightEnd end) {
  return end == FlightEnd::Error || end == FlightEnd::OutOfMemory;
}
bool failed_together(FlightEnd end) { return end >= FlightEnd::Timeout; }

// Progress of a rank: number of collectives started.
std::uint64_t reached(const RankEvidence& rank) {
  std::uint64_t result = 0;
  for (const auto& c : rank.record->collectives) {
    if (c.started_ns != 0 || c.state == FlightState::Done) result = c.number + 1;
  }
  return result;
}

bool is_in_collective(const FlightRecord& record) {
  const auto* newest = record.newest_started();
  return newest != nullptr && newest->state == FlightState::Running;
}

std::vector<int> numbers(const Ranks& ranks) {
  std::vector<int> result;
  for (const RankEvidence* rank : ranks) result.push_back(rank->rank);
  return result;
}

std::string names(const Ranks& ranks) {
  std::vector<std::string> texts;
  for (const RankEvidence* rank : ranks) texts.push_back(rank_name(*rank));
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string where(const Ranks& ranks) {
  if (ranks.size() == 1) return describe_activity(*ranks[0]->record);
  std::vector<std::string> texts;
  for (const RankEvidence* rank : ranks) {
    texts.push_back(fmt::format("{} in {}", rank_name(*rank), describe_activity(*rank->record)));
  }
  return fmt::format("{}", fmt::join(texts, "; "));
}

class Case {
 public:
  Case(std::span<const RankEvidence> ranks, std::int64_t now, std::int64_t patience)
      : ranks_(ranks), now_(now), patience_(patience) {}

  Verdict judge() const {
    if (with_record(by_anyone).empty()) {
      return {VerdictKind::NeverStarted,
              {},
              "no flight records: the run failed before writing any, or is from an older tessera",
              {}};
    }
    for (const auto& look :
         {&Case::mismatch, &Case::own_error, &Case::killed, &Case::stopped, &Case::never_started,
          &Case::behind, &Case::communication, &Case::well}) {
      if (auto verdict = (this->*look)()) return *verdict;
    }
    const Ranks open = with_record([](const RankEvidence& r) { return !has_ended(r); });
    return {VerdictKind::Unclear,
            {},
            fmt::format("{} recorded no end, and the process can't be seen from here: it runs, or "
                        "was killed; last activity {} ago",
                        names(open), ago(last_sign(open))),
            {"tessera run-report on that host tells which"}};
  }

 private:
  using Condition = std::function<bool(const RankEvidence&)>;

  static bool has_ended(const RankEvidence& rank) { return rank.record->end != FlightEnd::Running; }
  static bool is_alive(const RankEvidence& rank) {
    return !has_ended(rank) &&
           (rank.process == ProcessState::Running || rank.process == ProcessState::Stopped);
  }

  Ranks with_record(const Condition& condition) const {
    Ranks result;
    for (const RankEvidence& rank : ranks_) {
      if (rank.record && condition(rank)) result.push_back(&rank);
    }
    return result;
  }
  Ranks failed() const {
    return with_record([](const auto& r) { return failed_together(r.record->end); });
  }

  // The rank that most communication errors blame; counts only errors of ranks that satisfy `by`.
  std::optional<int> blamed(const Condition& by) const {
    std::map<int, int> votes;
    for (const RankEvidence* rank : failed()) {
      const int culprit = rank->record->end_culprit;
      if (find(culprit) != nullptr && by(*rank)) ++votes[culprit];
    }
    const auto most =
        std::ranges::max_element(votes, {}, [](const auto& vote) { return vote.second; });
    return most == votes.end() ? std::nullopt : std::optional<int>(most->first);
  }
  static bool by_anyone(const RankEvidence& /*rank*/) { return true; }
  static bool by_timeout(const RankEvidence& r) { return r.record->end == FlightEnd::Timeout; }

  // A completed collective proves that all ranks finished the rendezvous.
  bool all_have_met() const {
    return std::ranges::any_of(failed(), [](const RankEvidence* rank) {
      return std::ranges::any_of(rank->record->collectives,
                                 [](const auto& c) { return c.state == FlightState::Done; });
    });
  }

  const RankEvidence* find(int rank) const {
    const auto found = std::ranges::find(ranks_, rank, &RankEvidence::rank);
    return found == ranks_.end() ? nullptr : &*found;
  }

  std::int64_t last_sign(const Ranks& ranks) const {
    std::int64_t last = 0;
    for (const RankEvidence* rank : ranks) {
      last = std::max(last, rank->record->wall_ns(rank->record->last_sign_ns()));
    }
    return last;
  }
  std::string ago(std::int64_t wall_ns) const {
    return format_duration(std::max(0.0, static_cast<double>(now_ - wall_ns) / 1e9));
  }

  // Makes a verdict and lists as evidence what each other rank does, or how it ended.
  Verdict conclude(VerdictKind kind, const Ranks& culprits, std::string headline) const {
    Verdict verdict{kind, numbers(culprits), std::move(headline), {}};
    std::map<std::string, Ranks> by_text;
    for (const RankEvidence& rank : ranks_) {
      if (std::ranges::count(verdict.culprits, rank.rank) > 0) continue;
      std::string text = rank.problem;
      if (rank.record) {
        text = has_ended(rank)
                   ? fmt::format("ended: {}{}{}", comm::flight_end_name(rank.record->end),
                                 rank.record->end_text.empty() ? "" : ": ", rank.record->end_text)
                   : fmt::format("{} in {}", is_alive(rank) ? "is" : "was",
                                 describe_activity(*rank.record));
      }
      by_text[text].push_back(&rank);
    }
    for (const auto& [text, ranks] : by_text) {
      verdict.evidence.push_back(fmt::format("{} {}: {}", ranks.size() == 1 ? "rank" : "ranks",
                                             format_ranks(numbers(ranks)), text));
    }
    return verdict;
  }

  // Finds the first sequence number at which ranks called different collectives.
  std::optional<Verdict> mismatch() const {
    using Calls = std::vector<std::pair<const RankEvidence*, const comm::Signature*>>;
    std::map<std::pair<std::uint64_t, std::uint64_t>, Calls> calls;  // by group and number
    for (const RankEvidence* rank : with_record(by_anyone)) {
      for (const auto& c : rank->record->collectives) {
        calls[{c.group, c.signature.sequence}].emplace_back(rank, &c.signature);
      }
    }
    for (const auto& [group_and_number, made] : calls) {
      const auto agreeing = [&made = made](const comm::Signature& s) {
        return std::ranges::count_if(made, [&](const auto& call) { return *call.second == s; });
      };
      const comm::Signature* reference = made.front().second;
      if (agreeing(*reference) == std::ssize(made)) continue;
      for (const auto& call : made) {
        if (agreeing(*call.second) > agreeing(*reference)) reference = call.second;
      }
      Ranks odd;
      std::vector<std::string> texts;
      for (const auto& call : made) {
        if (*call.second == *reference) continue;
        odd.push_back(call.first);
        texts.push_back(
            fmt::format("{} called {}", rank_name(*call.first), call.second->describe()));
      }
      return conclude(VerdictKind::Mismatch, odd,
                      fmt::format("{}, where the others called {}", fmt::join(texts, ", "),
                                  reference->describe()));
    }
    const auto odd = blamed([](const auto& r) { return r.record->end == FlightEnd::Mismatch; });
    if (!odd) return std::nullopt;
    const Ranks found = failed();
    return conclude(VerdictKind::Mismatch, {find(*odd)}, found.front()->record->end_text);
  }

  std::optional<Verdict> own_error() const {
    Ranks found = with_record([](const auto& r) { return failed_alone(r.record->end); });
    if (found.empty()) return std::nullopt;
    // Blame a killed rank first, because its loss may have caused the errors of other ranks.
    if (const auto other = blamed(by_anyone)) {
      const RankEvidence* rank = find(*other);
      const bool is_killed = rank->record && !has_ended(*rank) && !is_alive(*rank);
      if (is_killed) return std::nullopt;
    }
    const RankEvidence* first = first_to_end(found);
    const bool memory = first->record->end == FlightEnd::OutOfMemory;
    return conclude(
        memory ? VerdictKind::OutOfMemory : VerdictKind::Error, {first},
        fmt::format("{} {} in {}: {}", rank_name(*first), memory ? "ran out of memory" : "failed",
                    describe_activity(*first->record), first->record->end_text));
  }

  std::optional<Verdict> killed() const {
    const auto lost = blamed([](const auto& r) { return r.record->end == FlightEnd::PeerLost; });
    // A process that can't be seen counts as gone if other ranks lost it.
    const Ranks gone = with_record([&](const RankEvidence& r) {
      return !has_ended(r) && (r.process == ProcessState::Gone ||
                               (r.process == ProcessState::Unknown && lost == r.rank));
    });
    if (gone.empty()) return std::nullopt;
    // Left to stopped(): the launcher kills a stopped rank after others waited for it in vain.
    const auto waited_for = blamed(by_timeout);
    if (waited_for && lost != waited_for) return std::nullopt;
    Ranks culprits = gone;
    if (const auto named = lost ? lost : blamed(by_anyone);
        named && std::ranges::count(numbers(gone), *named) > 0) {
      culprits = {find(*named)};
    } else if (gone.size() > 1) {
      if (gone.size() == ranks_.size()) {
        return conclude(
            VerdictKind::Killed, {},
            fmt::format(
                "all ranks were killed {} ago: by the launcher or scheduler, by a signal to "
                "all of them, or with the host",
                ago(last_sign(gone))));
      }
      culprits = least_advanced(gone);
    }
    return conclude(VerdictKind::Killed, culprits,
                    fmt::format("{} {} killed in {}", names(culprits),
                                culprits.size() == 1 ? "was" : "were", where(culprits)));
  }

  static const RankEvidence* first_to_end(const Ranks& ranks) {
    return *std::ranges::min_element(ranks, {},
                                     [](auto* r) { return r->record->wall_ns(r->record->end_ns); });
  }

  static Ranks least_advanced(const Ranks& ranks) {
    const std::uint64_t lowest =
        reached(**std::ranges::min_element(ranks, {}, [](auto* rank) { return reached(*rank); }));
    Ranks result = ranks;
    std::erase_if(result, [&](const RankEvidence* rank) { return reached(*rank) != lowest; });
    return result;
  }

  Verdict stuck_verdict(const Ranks& culprits, std::string_view what) const {
    return conclude(VerdictKind::Stopped, culprits,
                    fmt::format("{} {}, in {}", names(culprits), what, where(culprits)));
  }

  std::optional<Verdict> stopped() const {
    const Ranks found = with_record(
        [](const RankEvidence& r) { return !has_ended(r) && r.process == ProcessState::Stopped; });
    if (!found.empty())
      return stuck_verdict(found, found.size() == 1 ? "is stopped (SIGSTOP, a debugger)"
                                                    : "are stopped (SIGSTOP, a debugger)");
    const auto waited_for = blamed(by_timeout);
    if (!waited_for) return std::nullopt;
    const RankEvidence* rank = find(*waited_for);
    if (!rank->record) return std::nullopt;
    return stuck_verdict({rank},
                         "was stuck or far behind: the other ranks waited for it until "
                         "the deadline");
  }

  std::optional<Verdict> never_started() const {
    const auto named = blamed(by_anyone);
    if (!named || find(*named)->record) return std::nullopt;
    const RankEvidence* rank = find(*named);
    if (!all_have_met()) {
      return conclude(VerdictKind::NeverStarted, {rank},
                      fmt::format("rank {} is missing: {}", rank->rank, rank->problem));
    }
    // The rank started, but could not write a record.
    const bool late = blamed(by_timeout) == named;
    return conclude(late ? VerdictKind::Stopped : VerdictKind::Killed, {rank},
                    fmt::format("rank {} {}, as the other ranks report; {}", rank->rank,
                                late ? "was stuck or far behind" : "was lost", rank->problem));
  }

  // Blames the least advanced ranks if the run still waits or its errors name no culprit.
  std::optional<Verdict> behind() const {
    const Ranks all = with_record(by_anyone);
    const Ranks last = least_advanced(all);
    if (last.size() == all.size()) return std::nullopt;
    if (failed().empty()) {
      const Ranks waiting = with_record([&](const RankEvidence& r) {
        const auto* newest = r.record->newest_started();
        return is_alive(r) && is_in_collective(*r.record) && reached(r) > reached(*last.front()) &&
               now_ - r.record->wall_ns(newest->started_ns) > patience_;
      });
      if (waiting.empty() || !std::ranges::all_of(last, [](auto* r) { return !has_ended(*r); })) {
        return std::nullopt;
      }
      const auto* newest = waiting.front()->record->newest_started();
      return stuck_verdict(last,
                           fmt::format("is behind: the other ranks have waited for {}",
                                       ago(waiting.front()->record->wall_ns(newest->started_ns))));
    }
    const bool timeouts =
        std::ranges::any_of(failed(), [](const RankEvidence* r) { return by_timeout(*r); });
    if (!timeouts || blamed(by_anyone)) return std::nullopt;
    return stuck_verdict(last, "was behind all others");
  }

  std::optional<Verdict> communication() const {
    const Ranks found = failed();
    if (found.empty()) return std::nullopt;
    const RankEvidence* first = first_to_end(found);
    const auto named = blamed(by_anyone);
    return conclude(VerdictKind::Communication, named ? Ranks{find(*named)} : Ranks{},
                    fmt::format("communication failed, first on {}: {}", rank_name(*first),
                                first->record->end_text));
  }

  std::optional<Verdict> well() const {
    const Ranks alive = with_record([](const RankEvidence& r) { return is_alive(r); });
    if (!alive.empty()) {
      const FlightRecord& first = *alive.front()->record;
      return conclude(VerdictKind::Running, {},
                      fmt::format("the run is running: phase {}, step {}; last activity {} ago",
                                  first.phase, first.step, ago(last_sign(alive))));
    }
    const Ranks all = with_record(by_anyone);
    if (!std::ranges::all_of(all, [](const RankEvidence* r) { return has_ended(*r); })) {
      return std::nullopt;
    }
    const FlightRecord& first = *all.front()->record;
    return conclude(VerdictKind::Done, {},
                    fmt::format("the run finished {} ago{}{}", ago(last_sign(all)),
                                first.end_text.empty() ? "" : ": ", first.end_text));
  }

  const std::span<const RankEvidence> ranks_;
  const std::int64_t now_, patience_;
};

}  // namespace

std::string_view process_state_name(ProcessState state) {
  static constexpr std::array<std::string_view, 4> kNames = {"unknown", "running", "stopped",
                                                             "gone"};
  return kNames[static_cast<std::size_t>(state)];
}

std::string_view verdict_name(VerdictKind kind) {
  static constexpr std::array<std::string_view, 10> kNames = {
      "running",       "done",  "killed",        "stopped",       "mismatch",
      "out of memory", "error", "communication", "never started", "unclear"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string describe_activity(const FlightRecord& record) {
  std::string phase = record.phase.empty() ? "an unknown phase" : "phase " + record.phase;
  if (record.step >= 0) phase += fmt::format(", step {}", record.step);
  const auto* newest = record.newest_started();
  if (newest == nullptr) return phase + ", before any collective";
  const std::string what = newest->describe();
  return is_in_collective(record) ? fmt::format("{} ({})", what, phase)
                                  : fmt::format("{}, after {}", phase, what);
}

std::string format_ranks(std::span<const int> ranks) {
  constexpr int kPieces = 20;
  std::string text;
  int pieces = 0;
  for (std::size_t i = 0; i < ranks.size();) {
    if (++pieces > kPieces) return text + fmt::format(" and {} more", ranks.size() - i);
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last < i + 2) last = i;  // list two adjacent ranks, not a range
    text += fmt::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
    if (last > i) text += fmt::format("-{}", ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string rank_name(const RankEvidence& rank) {
  return rank.record
             ? fmt::format("rank {} ({}, pid {})", rank.rank, rank.record->host, rank.record->pid)
             : fmt::format("rank {}", rank.rank);
}

Verdict judge_run(std::span<const RankEvidence> ranks, std::int64_t now_wall_ns,
                  std::int64_t patience_ns) {
  return Case(ranks, now_wall_ns, patience_ns).judge();
}

}  // namespace tessera::tools
