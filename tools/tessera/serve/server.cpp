#include "tools/tessera/serve/server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "tools/tessera/serve/connections.h"
#include "tools/tessera/serve/response.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kMostBody = 16 << 20;  // bytes
// Connections that are idle or are being refused; each has a thread.
constexpr std::size_t kMoreConnections = 192;
constexpr int kBacklog = 1024;
constexpr std::chrono::milliseconds kPatience{100};  // between looks at the connection
constexpr std::chrono::seconds kFarewell{2};  // for clients to read the ends of their answers
constexpr const char* kJson = "application/json";

void set_error(httplib::Response& response, const ApiError& error) {
  response.status = error.status;
  if (error.status == 503) response.set_header("Retry-After", "1");
  if (error.status == 401) response.set_header("WWW-Authenticate", "Bearer");
  response.set_content(dump_line(error_object(error)), kJson);
}

/// Counts a request for as long as it lives.
class Admission {
 public:
  Admission(std::atomic<std::size_t>& count, std::size_t most) : count_(count) {
    if (count_.fetch_add(1) < most) return;
    --count_;
    throw ApiError(503, fmt::format("{} requests are served or waiting already", most), {},
                   "overloaded");
  }
  ~Admission() { --count_; }
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

 private:
  std::atomic<std::size_t>& count_;
};

// In a time that does not depend on where the texts differ.
bool is_equal(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

/// A request in progress: what a connection waits for.
struct Exchange {
  Exchange(const ApiRequest& request, const ServedModel& model, std::atomic<std::size_t>& running,
           std::size_t most)
      : admission(running, most),
        request(request),
        writer(request, model),
        job(std::make_shared<Job>(request.work)) {}
  ~Exchange() { job->cancel(); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  Admission admission;
  const ApiRequest request;
  ResponseWriter writer;
  std::shared_ptr<Job> job;
  int socket = -1;
};

// The error of a job, as its client gets it.
ApiError api_error(const std::exception& error) {
  const bool stopping = dynamic_cast<const ServerStopping*>(&error) != nullptr;
  return {stopping ? 503 : 500, error.what()};
}

// The rest of a stream of server-sent events; called until it is done. @return false: disconnect
bool stream(Exchange& exchange, httplib::DataSink& sink) {
  const auto send = [&](const std::string& data) {
    const std::string event = "data: " + data + "\n\n";
    return sink.write(event.data(), event.size());
  };
  try {
    if (const auto part = exchange.job->next(kPatience)) {
      exchange.writer.add(*part, false);
      return send(dump_line(exchange.writer.chunk(*part)));
    }
    if (!exchange.job->finished()) return !is_closed_by_peer(exchange.socket);
    if (exchange.request.streams_usage && !send(dump_line(exchange.writer.usage_chunk())))
      return false;
  } catch (const std::exception& error) {
    if (!send(dump_line(error_object(api_error(error))))) return false;
  }
  if (!send("[DONE]")) return false;
  sink.done();
  return true;
}

void answer(Exchange& exchange, httplib::Response& response) {
  try {
    while (!exchange.job->finished()) {
      if (const auto part = exchange.job->next(kPatience))
        exchange.writer.add(*part, true);
      else if (is_closed_by_peer(exchange.socket))
        return;
    }
  } catch (const std::exception& error) {
    set_error(response, api_error(error));
    return;
  }
  response.set_content(dump_line(exchange.writer.whole()), kJson);
}

}  // namespace

struct ApiServer::Impl {
  explicit Impl(const ServerOptions& given) : options(given) {}

  void complete(const httplib::Request& request, httplib::Response& response, bool is_chat,
                const ServedModel& model, Executor& executor) {
    try {
      const std::string type = request.get_header_value("Content-Type");
      if (type.substr(0, type.find(';')) != kJson)
        throw ApiError(415, fmt::format("the Content-Type must be {}, got '{}'", kJson, type));
      const auto exchange = std::make_shared<Exchange>(
          parse_api_request(request.body, is_chat, model), model, running, options.requests);
      for_each_connection(port, [&](int socket, int peer_port) {
        if (peer_port == request.remote_port) exchange->socket = socket;
      });
      executor.submit(exchange->job);
      if (!exchange->request.streams) {
        answer(*exchange, response);
        return;
      }
      response.set_chunked_content_provider(
          "text/event-stream",
          [exchange](std::size_t, httplib::DataSink& sink) { return stream(*exchange, sink); });
    } catch (const ApiError& error) {
      set_error(response, error);
    } catch (const std::exception& error) {
      set_error(response, ApiError(500, error.what()));
    }
  }

  void set_routes(const ServedModel& model, Executor& executor) {
    const std::int64_t created = std::time(nullptr);
    http.Get("/health", [](const httplib::Request&, httplib::Response& response) {
      response.set_content("{\"status\":\"ok\"}", kJson);
    });
    http.Get("/v1/models", [&model, created](const httplib::Request&, httplib::Response& response) {
      const io::OrderedJson entry = {{"id", model.name},
                                     {"object", "model"},
                                     {"created", created},
                                     {"owned_by", "tessera"},
                                     {"max_model_len", model.loaded.model->arch().seq_len}};
      response.set_content(
          dump_line({{"object", "list"}, {"data", io::OrderedJson::array({entry})}}), kJson);
    });
    for (const bool is_chat : {false, true})
      http.Post(is_chat ? "/v1/chat/completions" : "/v1/completions",
                [this, is_chat, &model, &executor](const httplib::Request& request,
                                                   httplib::Response& response) {
                  complete(request, response, is_chat, model, executor);
                });
    using Handled = httplib::Server::HandlerResponse;
    http.set_pre_routing_handler([this](const httplib::Request& request,
                                        httplib::Response& response) {
      if (options.api_key.empty() || request.path == "/health" ||
          is_equal(request.get_header_value("Authorization"), "Bearer " + options.api_key))
        return Handled::Unhandled;
      set_error(response, ApiError(401, "the API key is missing or wrong", {}, "invalid_api_key"));
      return Handled::Handled;
    });
    // Errors of httplib, which have no body.
    http.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
      if (!response.body.empty()) return;
      const int status = response.status;
      set_error(response,
                ApiError(status, status == 404 ? fmt::format("no such endpoint: {} {}",
                                                             request.method, request.path)
                                 : status == 413
                                     ? fmt::format("the request is larger than {} bytes", kMostBody)
                                     : fmt::format("malformed HTTP request ({})", status)));
    });
  }

  const ServerOptions options;
  httplib::Server http;
  int port = 0;
  int listening = -1;
  std::atomic<std::size_t> running = 0;
};

ApiServer::ApiServer(const ServerOptions& options) : impl_(std::make_unique<Impl>(options)) {
  httplib::Server& http = impl_->http;
  // Without httplib's SO_REUSEPORT, by which a second server would take half of the connections.
  http.set_socket_options([this](int socket) {
    const int on = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    impl_->listening = socket;
  });
  http.set_tcp_nodelay(true);
  http.set_payload_max_length(kMostBody);
  http.set_keep_alive_max_count(100'000);
  const std::size_t threads = options.requests + kMoreConnections;
  http.new_task_queue = [threads] { return new httplib::ThreadPool(threads); };
  impl_->port = options.port == 0 ? http.bind_to_any_port(options.host)
                : http.bind_to_port(options.host, options.port) ? options.port
                                                                : -1;
  require<IoError>(impl_->port > 0, "cannot listen on {} port {}: in use, or not of this machine",
                   options.host, options.port);
  // httplib's own backlog is 5.
  ::listen(impl_->listening, kBacklog);
}

ApiServer::~ApiServer() = default;

int ApiServer::port() const { return impl_->port; }

void ApiServer::run(const ServedModel& model, Executor& executor) {
  impl_->set_routes(model, executor);
  impl_->http.listen_after_bind();
}

void ApiServer::stop() {
  // httplib cuts streams when it stops.
  const auto deadline = std::chrono::steady_clock::now() + kFarewell;
  while (impl_->running > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  impl_->http.stop();
  for_each_connection(impl_->port, [](int socket, int) { ::shutdown(socket, SHUT_RD); });
}

}  // namespace tessera::tools
