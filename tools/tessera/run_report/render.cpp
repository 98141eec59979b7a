#include "tools/tessera/run_report/render.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

namespace tessera::tools {
namespace {

using comm::FlightEnd;
using comm::FlightRecord;

double age_of(const FlightRecord& record, std::int64_t ns, std::int64_t now_wall_ns) {
  return std::max(0.0, static_cast<double>(now_wall_ns - record.wall_ns(ns)) / 1e9);
}

// Quotes a word for a shell.
std::string quoted(const std::string& word) {
  const bool plain =
      word.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+=:,") ==
      std::string::npos;
  if (plain && !word.empty()) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

std::string state_of(const RankEvidence& rank, const Verdict& verdict) {
  if (!rank.record) return "no record";
  if (rank.record->end != FlightEnd::Running) {
    return std::string(comm::flight_end_name(rank.record->end));
  }
  if (rank.process == ProcessState::Stopped) return "STOPPED";
  if (rank.process == ProcessState::Gone && verdict.kind == VerdictKind::Killed) return "KILLED";
  return std::string(process_state_name(rank.process));
}

// The newest started collective, else the newest queued one.
const comm::FlightCollective* last_collective(const FlightRecord& record) {
  if (const auto* newest = record.newest_started()) return newest;
  return record.collectives.empty() ? nullptr : &record.collectives.back();
}

std::int64_t changed_ns(const comm::FlightCollective& c) {
  return std::max({c.queued_ns, c.started_ns, c.ended_ns});
}

std::string table(const RunEvidence& run, const Verdict& verdict, std::int64_t now,
                  const ConsoleStyle& style) {
  using Row = std::array<std::string, 5>;
  std::vector<Row> rows = {{"rank", "host, pid", "state", "phase, step", "last collective"}};
  std::vector<bool> bad = {false};
  const auto is_culprit = [&](const RankEvidence& rank) {
    return std::ranges::count(verdict.culprits, rank.rank) > 0;
  };
  for (std::size_t i = 0; i < run.ranks.size(); ++i) {
    const RankEvidence& rank = run.ranks[i];
    // Adjacent ranks with the same problem share a row.
    std::vector<int> numbers = {rank.rank};
    const auto is_alike = [&](const RankEvidence& other) {
      return !other.record && !is_culprit(other) && other.problem == rank.problem;
    };
    if (is_alike(rank)) {
      for (; i + 1 < run.ranks.size() && is_alike(run.ranks[i + 1]); ++i) {
        numbers.push_back(run.ranks[i + 1].rank);
      }
    }
    bad.push_back(is_culprit(rank));
    Row row = {format_ranks(numbers), "-", state_of(rank, verdict), "-", rank.problem};
    if (rank.record) {
      const FlightRecord& record = *rank.record;
      row[1] = fmt::format("{}, {}", record.host, record.pid);
      if (!record.phase.empty()) row[3] = record.phase;
      if (!record.phase.empty() && record.step >= 0) row[3] += fmt::format(", {}", record.step);
      row[4] = "none";
      if (const auto* last = last_collective(record)) {
        row[4] =
            fmt::format("{} {}, {} ago", last->describe(), comm::flight_state_name(last->state),
                        format_duration(age_of(record, changed_ns(*last), now)));
      }
    }
    rows.push_back(std::move(row));
  }
  std::array<std::size_t, 5> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t i = 0; i < rows[r].size(); ++i) {
      line += fmt::format("  {:<{}}", rows[r][i], i + 1 < rows[r].size() ? widths[i] : 0);
    }
    text += paint(style, r == 0 ? Tone::Dim : bad[r] ? Tone::Bad : Tone::Plain, line) + '\n';
  }
  return text;
}

bool is_well(const Verdict& verdict) {
  return verdict.kind == VerdictKind::Running || verdict.kind == VerdictKind::Done;
}

bool any_alive(const RunEvidence& run) {
  return std::ranges::any_of(run.ranks, [](const RankEvidence& rank) {
    return rank.record && rank.record->end == FlightEnd::Running &&
           (rank.process == ProcessState::Running || rank.process == ProcessState::Stopped);
  });
}

}  // namespace

std::vector<std::string> next_steps(const RunEvidence& run, const Verdict& verdict) {
  std::vector<std::string> steps;
  if (is_well(verdict)) return steps;
  for (const int rank : verdict.culprits) {
    if (run.log_tails.contains(rank)) {
      const auto log = run.directory / "logs" / fmt::format("rank-{}.log", rank);
      steps.push_back(fmt::format("look at {}", quoted(log.string())));
    }
  }
  if (verdict.kind == VerdictKind::Killed) {
    steps.emplace_back(
        "find out what killed it: dmesg (the kernel's out-of-memory killer), the scheduler's log, "
        "or the launcher's output");
  } else if (verdict.kind == VerdictKind::Stopped && any_alive(run)) {
    for (const int rank : verdict.culprits) {
      const auto found = std::ranges::find(run.ranks, rank, &RankEvidence::rank);
      if (found == run.ranks.end() || !found->record) continue;
      steps.push_back(fmt::format("resume it: kill -CONT {}; or see where it hangs: gdb -p {}",
                                  found->record->pid, found->record->pid));
    }
  } else if (verdict.kind == VerdictKind::OutOfMemory) {
    steps.emplace_back("use a smaller --train.micro_batch, more ranks, or --train.recompute block");
  }
  if (any_alive(run)) {
    steps.emplace_back("some ranks still run: wait for the run to end, or stop it first");
  } else if (run.has_config) {
    const bool one_host = std::ranges::all_of(run.ranks, [&](const RankEvidence& rank) {
      return !rank.record ||
             rank.record->host == run.ranks.front().record.value_or(*rank.record).host;
    });
    const std::string nproc = one_host && run.ranks.size() > 1
                                  ? fmt::format("--nproc {} ", run.ranks.size())
                                  : std::string();
    steps.push_back(fmt::format("{}: the same command again, or tessera train {}{}",
                                run.checkpoint_step >= 0
                                    ? fmt::format("resume from step {}", run.checkpoint_step)
                                    : std::string("start again"),
                                nproc, quoted((run.directory / "config.json").string())));
  }
  return steps;
}

std::string render_text(const RunEvidence& run, const Verdict& verdict, std::int64_t now_wall_ns,
                        const ConsoleStyle& style) {
  const Tone tone = is_well(verdict) ? Tone::Good : Tone::Bad;
  std::string text = paint(style, tone, verdict.headline) + "\n\n";
  if (!run.ranks.empty()) text += table(run, verdict, now_wall_ns, style) + '\n';
  if (!is_well(verdict) && !verdict.evidence.empty()) {
    text += "Other ranks:\n";
    for (const std::string& line : verdict.evidence) text += "  " + line + '\n';
    text += '\n';
  }
  std::vector<std::pair<std::string, std::string>> rows;
  if (run.last_step) {
    rows.emplace_back("last logged step",
                      fmt::format("{}, loss {:.4f}", *run.last_step, run.last_loss.value_or(0)));
  }
  rows.emplace_back("newest checkpoint",
                    run.checkpoint_step >= 0
                        ? fmt::format("step {}, {}", run.checkpoint_step, run.checkpoint.string())
                        : std::string("none"));
  if (run.saved_step && run.save_seconds) {
    rows.emplace_back("last reported save", fmt::format("step {}, took {}", *run.saved_step,
                                                        format_duration(*run.save_seconds)));
  }
  text += format_rows(style, rows);
  for (const int rank : verdict.culprits) {
    const auto lines = run.log_tails.find(rank);
    if (lines == run.log_tails.end() || lines->second.empty()) continue;
    text += fmt::format("\nEnd of rank {}'s log:\n", rank);
    for (const std::string& line : lines->second) text += "  " + line + '\n';
  }
  const auto steps = next_steps(run, verdict);
  if (!steps.empty()) text += "\nWhat to do:\n";
  for (const std::string& step : steps) text += "  - " + step + '\n';
  if (!run.problems.empty()) text += "\nCould not be read:\n";
  for (const std::string& problem : run.problems) text += "  " + problem + '\n';
  return text;
}

nlohmann::json render_json(const RunEvidence& run, const Verdict& verdict,
                           std::int64_t now_wall_ns) {
  using nlohmann::json;
  const auto or_null = [](const auto& value) { return value ? json(*value) : json(); };
  json ranks = json::array();
  for (const RankEvidence& rank : run.ranks) {
    json row{{"rank", rank.rank},
             {"process", process_state_name(rank.process)},
             {"problem", rank.problem.empty() ? json() : json(rank.problem)}};
    if (rank.record) {
      const FlightRecord& record = *rank.record;
      row["host"] = record.host;
      row["pid"] = record.pid;
      row["end"] = comm::flight_end_name(record.end);
      row["text"] = record.end_text;
      row["phase"] = record.phase;
      row["step"] = record.step;
      row["last"] = nullptr;
      if (const auto* last = last_collective(record)) {
        row["last"] = {{"label", last->describe()},
                       {"sequence", last->signature.sequence},
                       {"state", comm::flight_state_name(last->state)},
                       {"age_s", age_of(record, changed_ns(*last), now_wall_ns)}};
      }
    }
    ranks.push_back(std::move(row));
  }
  json out{{"run", run.directory.string()},
           {"state", verdict_name(verdict.kind)},
           {"culprits", verdict.culprits},
           {"headline", verdict.headline},
           {"evidence", verdict.evidence},
           {"ranks", std::move(ranks)},
           {"last_step", or_null(run.last_step)},
           {"last_loss", or_null(run.last_loss)},
           {"checkpoint", nullptr},
           {"next", next_steps(run, verdict)},
           {"problems", run.problems}};
  if (run.checkpoint_step >= 0) {
    out["checkpoint"] = {{"step", run.checkpoint_step}, {"path", run.checkpoint.string()}};
  }
  return out;
}

}  // namespace tessera::tools
