#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "core/base/error.h"
#include "tools/tessera/model/loaded_model.h"
#include "tools/tessera/serve/job.h"

namespace tessera::tools {

class ServerStopping : public Error {
 public:
  using Error::Error;
};

/// Runs jobs one after another on the one thread that uses the model.
class Executor {
 public:
  /// @param batch  rows decoded or scored at a time
  Executor(LoadedModel& loaded, std::int64_t batch);
  ~Executor() { stop(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// After stop(), closes the job with ServerStopping.
  void submit(std::shared_ptr<Job> job);
  /// Ends the running job after its next token, and all others, with ServerStopping.
  void stop();

 private:
  class Choice;

  void run_jobs();
  void run(Job& job);
  bool goes_on(const Job& job) const;

  LoadedModel& loaded_;
  const std::int64_t batch_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> waiting_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tessera::tools
