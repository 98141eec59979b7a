// The module tessera._core: the C API with Python's types, without the interpreter lock while it works.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <tessera/c_api.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Options = std::vector<std::pair<std::string, std::string>>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<tessera_option> views(const Options& options) {
  std::vector<tessera_option> list;
  for (const auto& [name, value] : options) list.push_back({name.c_str(), value.c_str()});
  return list;
}

/// The outcome of a call, which belongs to the thread that made it.
struct Outcome {
  int status = TESSERA_OK;
  std::string message, file, tensor;

  static Outcome of(int status) {
    return {status, tessera_error_message(), tessera_error_file(), tessera_error_tensor()};
  }
  void check() const {
    if (status == TESSERA_OK) return;
    const nb::object error =
        nb::module_::import_("tessera._errors").attr("make")(status, message, file, tensor);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
  }
};

class Source {
 public:
  Source(const std::string& path, const Options& options) {
    Outcome outcome;
    {
      const nb::gil_scoped_release released;
      const auto list = views(options);
      outcome = Outcome::of(tessera_open(path.c_str(), list.data(), list.size(), &source_));
    }
    outcome.check();
  }
  ~Source() { tessera_close(source_); }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const char* kind() const { return tessera_source_kind(source_); }
  const char* path() const { return tessera_source_path(source_); }
  /// Name, dtype, shape and bytes per element of each tensor.
  nb::list tensors() const {
    nb::list all;
    for (std::size_t i = 0; i < tessera_tensor_count(source_); ++i) {
      const std::int64_t* const shape = tessera_tensor_shape(source_, i);
      nb::list sizes;
      for (std::size_t d = 0; d < tessera_tensor_dims(source_, i); ++d) sizes.append(shape[d]);
      all.append(nb::make_tuple(tessera_tensor_name(source_, i), tessera_tensor_dtype(source_, i),
                                nb::tuple(sizes), tessera_tensor_width(source_, i)));
    }
    return all;
  }
  void read(std::size_t index, const std::vector<std::int64_t>& begin,
            const std::vector<std::int64_t>& end, const std::optional<std::string>& dtype,
            const Bytes& out) const {
    if (begin.size() != tessera_tensor_dims(source_, index) || end.size() != begin.size())
      throw nb::value_error("begin and end need an entry per dim");
    Outcome outcome;
    {
      const nb::gil_scoped_release released;
      outcome =
          Outcome::of(tessera_read(source_, index, begin.data(), end.data(),
                                   dtype ? dtype->c_str() : nullptr, out.data(), out.nbytes()));
    }
    outcome.check();
  }

 private:
  tessera_source* source_ = nullptr;
};

/// A call on another thread, while this one handles signals and Python's callbacks. The callbacks of
/// the C API, on that thread, take no interpreter lock.
class Work {
 public:
  using Problem = std::tuple<std::string, std::string, std::int64_t, std::int64_t, std::string>;

  /// @param call       returns its status; on the other thread
  /// @param progress   None or progress(done, total)
  /// @param warn       None or warn(text)
  Outcome run(const std::function<int()>& call, const nb::object& progress,
              const nb::object& warn) {
    std::thread thread;
    {
      const nb::gil_scoped_release released;
      thread = std::thread([&] {
        const Outcome outcome = Outcome::of(call());
        const std::lock_guard lock(mutex_);
        outcome_ = outcome;
        finished_ = true;
        changed_.notify_all();
      });
    }
    std::exception_ptr error;  // of Python
    std::int64_t told = -1;
    for (bool finished = false; !finished;) {
      std::vector<std::string> warnings;
      std::int64_t done = 0, total = 0;
      {
        const nb::gil_scoped_release released;
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return finished_; });
        finished = finished_;
        done = done_;
        total = total_;
        warnings.swap(warnings_);
      }
      try {
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (error) continue;
        for (const std::string& text : warnings)
          if (!warn.is_none()) warn(text);
        if (!progress.is_none() && total > 0 && done != told) progress(done, total);
        told = done;
      } catch (...) {
        if (!error) error = std::current_exception();
        const std::lock_guard lock(mutex_);
        stop_ = true;
      }
    }
    {
      const nb::gil_scoped_release released;
      thread.join();
    }
    if (error) std::rethrow_exception(error);
    return outcome_;
  }

  static int on_progress(void* user, std::int64_t done, std::int64_t total) {
    Work& self = *static_cast<Work*>(user);
    const std::lock_guard lock(self.mutex_);
    self.done_ = done;
    self.total_ = total;
    return self.stop_ ? 1 : 0;
  }
  static void on_warning(void* user, const char* text) {
    Work& self = *static_cast<Work*>(user);
    const std::lock_guard lock(self.mutex_);
    self.warnings_.emplace_back(text);
  }
  static void on_report(void* user, const char* text) { static_cast<Work*>(user)->report = text; }
  static void on_problem(void* user, const char* file, const char* tensor, std::int64_t begin,
                         std::int64_t end, const char* what) {
    static_cast<Work*>(user)->problems.emplace_back(file, tensor, begin, end, what);
  }

  std::string report;  // after run()
  std::vector<Problem> problems;

 private:
  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  bool finished_ = false, stop_ = false;
  std::int64_t done_ = 0, total_ = 0;
  std::vector<std::string> warnings_;
  Outcome outcome_;
};

std::string consolidate(const std::string& source, const std::string& out, const Options& options,
                        const nb::object& progress, const nb::object& warn) {
  const auto list = views(options);
  Work work;
  work.run(
          [&] {
            return tessera_consolidate(source.c_str(), out.c_str(), list.data(), list.size(),
                                       Work::on_progress, Work::on_warning, Work::on_report, &work);
          },
          progress, warn)
      .check();
  return work.report;
}

/// @return report, problems
std::pair<std::string, std::vector<Work::Problem>> verify(const std::string& path,
                                                          const Options& options,
                                                          const nb::object& progress) {
  const auto list = views(options);
  Work work;
  const Outcome outcome = work.run(
      [&] {
        return tessera_verify(path.c_str(), list.data(), list.size(), Work::on_problem,
                              Work::on_progress, Work::on_report, &work);
      },
      progress, nb::none());
  if (work.problems.empty()) outcome.check();
  return {std::move(work.report), std::move(work.problems)};
}

/// State, name, dtype, shape, offsets, extents and elements of a part.
using Part =
    std::tuple<std::optional<std::string>, std::string, std::string, std::vector<std::int64_t>,
               std::vector<std::int64_t>, std::vector<std::int64_t>, ConstBytes>;

struct Saving {
  nb::object exchange;
  std::exception_ptr error;  // of Python
  std::string report;
};

int on_exchange(void* user, const char* phase, const void* mine, std::size_t bytes,
                tessera_messages* all) {
  (void)phase;
  const nb::gil_scoped_acquire acquired;
  auto& saving = *static_cast<Saving*>(user);
  try {
    const nb::object answers = saving.exchange(nb::bytes(mine, bytes));
    for (const nb::handle answer : answers) {
      if (!nb::isinstance<nb::bytes>(answer))
        throw nb::type_error("exchange must return a bytes object of each rank");
      const auto text = nb::cast<nb::bytes>(answer);
      tessera_add_message(all, text.data(), text.size());
    }
    return 0;
  } catch (...) {
    saving.error = std::current_exception();
    return 1;
  }
}

std::string save(const std::string& dir, const Options& options, const std::vector<Part>& parts,
                 const nb::object& exchange) {
  const auto list = views(options);
  std::vector<tessera_part> given;
  for (const auto& [state, name, dtype, shape, offsets, extents, data] : parts) {
    if (offsets.size() != shape.size() || extents.size() != shape.size())
      throw nb::value_error("shape, offsets and extents differ in length");
    given.push_back({state ? state->c_str() : nullptr, name.c_str(), dtype.c_str(), shape.size(),
                     shape.data(), offsets.data(), extents.data(), data.data()});
  }
  Saving saving{exchange, nullptr, ""};
  const auto on_report = [](void* user, const char* text) {
    static_cast<Saving*>(user)->report = text;
  };
  Outcome outcome;
  {
    const nb::gil_scoped_release released;
    outcome =
        Outcome::of(tessera_save(dir.c_str(), list.data(), list.size(), given.data(), given.size(),
                                 exchange.is_none() ? nullptr : on_exchange, on_report, &saving));
  }
  if (saving.error) std::rethrow_exception(saving.error);
  outcome.check();
  return saving.report;
}

/// A DLPack capsule of an array with a dtype that NumPy lacks.
/// @param code, bits  of DLDataType
nb::ndarray<> as_dlpack(const Bytes& data, const std::vector<std::size_t>& shape, int code,
                        int bits) {
  nb::dlpack::dtype dtype{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  return nb::ndarray<>(data.data(), shape.size(), shape.data(), nb::find(data), nullptr, dtype);
}

}  // namespace

NB_MODULE(_core, module) {
  module.attr("version") = tessera_library_version();
  nb::class_<Source>(module, "Source")
      .def(nb::init<const std::string&, const Options&>())
      .def_prop_ro("kind", &Source::kind)
      .def_prop_ro("path", &Source::path)
      .def("tensors", &Source::tensors)
      .def("read", &Source::read, "index"_a, "begin"_a, "end"_a, "dtype"_a.none(), "out"_a);
  module.def("consolidate", &consolidate, "source"_a, "out"_a, "options"_a, "progress"_a.none(),
             "warn"_a.none());
  module.def("verify", &verify, "path"_a, "options"_a, "progress"_a.none());
  module.def("save", &save, "dir"_a, "options"_a, "parts"_a, "exchange"_a.none());
  module.def("as_dlpack", &as_dlpack, "data"_a, "shape"_a, "code"_a, "bits"_a);
}
