#include "tools/tessera/serve/server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>
#include <thread>

#include "tools/tessera/serve/connections.h"
#include "tools/tessera/serve/response.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kMostBody = 16 << 20;          // bytes
constexpr std::size_t kMostDrained = 4 * kMostBody;  // of a refused request
// Connections that are idle or are being refused; each has a thread.
constexpr std::size_t kMoreConnections = 192;
constexpr int kBacklog = 1024;
constexpr std::chrono::milliseconds kPatience{100};  // between looks at the connection
constexpr std::chrono::seconds kFarewell{2};  // for clients to read the ends of their answers
constexpr const char* kJson = "application/json";
constexpr const char* kCompletions = "/v1/completions";
constexpr const char* kChats = "/v1/chat/completions";

void set_error(httplib::Response& response, const ApiError& error) {
  response.status = error.status;
  if (error.status == 503) response.set_header("Retry-After", "1");
  if (error.status == 401) response.set_header("WWW-Authenticate", "Bearer");
  response.set_content(dump_line(error_object(error)), kJson);
}

// The answer to a request whose body is not read; the connection ends after it.
void refuse(int socket, httplib::Response& response, const ApiError& error) {
  set_error(response, error);
  std::string body = std::exchange(response.body, {});
  response.headers.erase("Content-Type");
  response.set_header("Connection", "close");
  response.set_content_provider(
      body.size(), kJson, [socket, body](std::size_t offset, std::size_t, httplib::DataSink& sink) {
        if (sink.write(body.data() + offset, body.size() - offset))
          end_and_drain(socket, kFarewell, kMostDrained);
        return false;  // closes the connection
      });
}

bool is_json(std::string_view type) {
  type = type.substr(0, type.find(';'));
  const auto first = type.find_first_not_of(" \t");
  if (first == type.npos) return false;
  type = type.substr(first, type.find_last_not_of(" \t") - first + 1);
  return std::ranges::equal(type, std::string_view(kJson), [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b;
  });
}

ApiError too_large() {
  return {413, fmt::format("the request is larger than {} bytes", kMostBody)};
}

ApiError no_endpoint(const httplib::Request& request) {
  return {404, fmt::format("no such endpoint: {} {}", request.method, request.path)};
}

void check_headers(const httplib::Request& request) {
  const std::string type = request.get_header_value("Content-Type");
  if (!is_json(type))
    throw ApiError(415, fmt::format("the Content-Type must be {}, got '{}'", kJson, type));
  if (request.has_header("Content-Encoding"))
    throw ApiError(415, "requests with a Content-Encoding are not supported");
  if (request.has_header("Transfer-Encoding")) return;
  if (!request.has_header("Content-Length"))
    throw ApiError(411, "the request has no Content-Length");
  const std::string text = request.get_header_value("Content-Length");
  const char* const end = text.data() + text.size();
  std::uint64_t length = 0;
  const auto read = std::from_chars(text.data(), end, length);
  if (read.ptr != end || read.ec == std::errc::invalid_argument)
    throw ApiError(400, fmt::format("the Content-Length '{}' is not a number", text));
  if (read.ec != std::errc() || length > kMostBody) throw too_large();
}

std::string read_body(const httplib::ContentReader& reader) {
  std::string body;
  bool fits = true;
  const bool complete = reader([&](const char* data, std::size_t size) {
    fits = size <= kMostBody - body.size();
    if (fits) body.append(data, size);
    return fits;
  });
  if (!fits) throw too_large();
  if (!complete) throw ApiError(400, "the request's body is malformed or incomplete");
  return body;
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
  Exchange(std::unique_ptr<Admission> admitted, const ApiRequest& request, const ServedModel& model,
           int socket)
      : admission(std::move(admitted)),
        socket(socket),
        request(request),
        writer(request, model),
        job(std::make_shared<Job>(request.work)) {}
  ~Exchange() { job->cancel(); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const std::unique_ptr<Admission> admission;
  const int socket;
  const ApiRequest request;
  ResponseWriter writer;
  std::shared_ptr<Job> job;
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
  auto looked = std::chrono::steady_clock::now();
  try {
    while (!exchange.job->finished()) {
      if (const auto part = exchange.job->next(kPatience)) exchange.writer.add(*part, true);
      const auto now = std::chrono::steady_clock::now();
      if (now - looked < kPatience) continue;
      looked = now;
      if (is_closed_by_peer(exchange.socket)) return;
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

  int socket_of(const httplib::Request& request) const {
    const Peer client{request.remote_addr, request.remote_port};
    int found = -1;
    for_each_connection(port, [&](int socket, const Peer& peer) {
      if (peer == client) found = socket;
    });
    return found;
  }

  void complete(const httplib::Request& request, httplib::Response& response,
                const httplib::ContentReader& reader, bool is_chat, const ServedModel& model,
                Executor& executor) {
    const int socket = socket_of(request);
    std::unique_ptr<Admission> admission;
    std::string body;
    try {
      check_headers(request);
      admission = std::make_unique<Admission>(running, options.requests);
      body = read_body(reader);
    } catch (const ApiError& error) {
      refuse(socket, response, error);
      return;
    }
    try {
      const auto exchange = std::make_shared<Exchange>(
          std::move(admission), parse_api_request(std::exchange(body, {}), is_chat, model), model,
          socket);
      executor.submit(exchange->job);
      if (!exchange->request.streams) {
        answer(*exchange, response);
        // httplib writes the answer after this function, and destroys the response after that.
        ++writing;
        response.content_provider_resource_releaser_ = [this](bool) { --writing; };
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
      http.Post(is_chat ? kChats : kCompletions,
                [this, is_chat, &model, &executor](const httplib::Request& request,
                                                   httplib::Response& response,
                                                   const httplib::ContentReader& reader) {
                  complete(request, response, reader, is_chat, model, executor);
                });
    using Handled = httplib::Server::HandlerResponse;
    http.set_pre_routing_handler(
        [this](const httplib::Request& request, httplib::Response& response) {
          // httplib would answer with parts of the JSON.
          const_cast<httplib::Request&>(request).ranges.clear();
          const bool may_enter =
              options.api_key.empty() || request.path == "/health" ||
              is_equal(request.get_header_value("Authorization"), "Bearer " + options.api_key);
          if (!may_enter) {
            refuse(socket_of(request), response,
                   ApiError(401, "the API key is missing or wrong", {}, "invalid_api_key"));
            return Handled::Handled;
          }
          // httplib reads bodies of other requests without a limit.
          const bool is_get = request.method == "GET" || request.method == "HEAD";
          const bool is_post =
              request.method == "POST" && (request.path == kCompletions || request.path == kChats);
          if (is_get || is_post) return Handled::Unhandled;
          refuse(socket_of(request), response, no_endpoint(request));
          return Handled::Handled;
        });
    // Errors of httplib, which have no body.
    http.set_error_handler([](const httplib::Request& request, httplib::Response& response) {
      if (!response.body.empty() || response.content_provider_) return;
      const int status = response.status;
      set_error(response,
                status == 404
                    ? no_endpoint(request)
                    : ApiError(status, fmt::format("malformed HTTP request ({})", status)));
    });
  }

  const ServerOptions options;
  httplib::Server http;
  int port = 0;
  int listening = -1;
  std::atomic<std::size_t> running = 0;
  std::atomic<std::size_t> writing = 0;  // answers that are not streamed
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

bool ApiServer::is_running() const { return impl_->http.is_running(); }

void ApiServer::run(const ServedModel& model, Executor& executor) {
  impl_->set_routes(model, executor);
  impl_->http.listen_after_bind();
}

void ApiServer::stop() {
  // httplib cuts streams when it stops.
  const auto deadline = std::chrono::steady_clock::now() + kFarewell;
  while ((impl_->running > 0 || impl_->writing > 0) && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  impl_->http.stop();
  for_each_connection(impl_->port, [](int socket, const Peer&) { ::shutdown(socket, SHUT_RD); });
}

}  // namespace tessera::tools
