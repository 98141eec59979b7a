#include "tools/tessera/plot/png.h"

#include <memory>

#include "core/base/error.h"
#include "core/base/plugin.h"

namespace tessera::tools {
namespace {

constexpr const char* kLibrary = "librsvg-2.so.2";
constexpr int kScale =
    2;  // pixels of the PNG per pixel of the drawing, for screens of high resolution

// Copies of declarations in the stable interfaces of librsvg 2.46, cairo 1.2 and GLib 2.0.
struct RsvgRectangle {
  double x, y, width, height;
};
struct GError {
  unsigned domain;
  int code;
  char* message;
};
using Handle = void;
using Surface = void;
using Cairo = void;
constexpr int kArgb32 = 0;  // CAIRO_FORMAT_ARGB32

// cairo_write_func_t. @return CAIRO_STATUS_SUCCESS
int append(void* to, const unsigned char* data, unsigned size) {
  static_cast<std::string*>(to)->append(reinterpret_cast<const char*>(data), size);
  return 0;
}

Plugin load_librsvg() {
  try {
    return {"PNG writer", {}, nullptr, kLibrary};
  } catch (const Unsupported& error) {
    throw Unsupported("{}; install librsvg (Debian: librsvg2-2), or write a .svg file",
                      error.what());
  }
}

}  // namespace

std::string to_png(const Drawing& drawing) {
  const Plugin library = load_librsvg();
  // Functions of libraries that librsvg needs are found, too.
  const auto new_handle = library.symbol<Handle* (*)(const unsigned char*, std::size_t, GError**)>(
      "rsvg_handle_new_from_data");
  const auto render = library.symbol<int (*)(Handle*, Cairo*, const RsvgRectangle*, GError**)>(
      "rsvg_handle_render_document");
  const auto unref = library.symbol<void (*)(void*)>("g_object_unref");
  const auto new_surface =
      library.symbol<Surface* (*)(int, int, int)>("cairo_image_surface_create");
  const auto destroy_surface = library.symbol<void (*)(Surface*)>("cairo_surface_destroy");
  const auto new_cairo = library.symbol<Cairo* (*)(Surface*)>("cairo_create");
  const auto destroy_cairo = library.symbol<void (*)(Cairo*)>("cairo_destroy");
  const auto write =
      library.symbol<int (*)(Surface*, int (*)(void*, const unsigned char*, unsigned), void*)>(
          "cairo_surface_write_to_png_stream");

  GError* error = nullptr;
  const auto check = [&](bool good) {
    require<InternalError>(good, "{} can't draw: {}", kLibrary,
                           error == nullptr ? "" : error->message);
  };
  const std::unique_ptr<Handle, void (*)(void*)> handle(
      new_handle(reinterpret_cast<const unsigned char*>(drawing.svg.data()), drawing.svg.size(),
                 &error),
      unref);
  check(handle != nullptr);
  const int width = kScale * drawing.width, height = kScale * drawing.height;
  const std::unique_ptr<Surface, void (*)(Surface*)> surface(new_surface(kArgb32, width, height),
                                                             destroy_surface);
  const std::unique_ptr<Cairo, void (*)(Cairo*)> cairo(new_cairo(surface.get()), destroy_cairo);
  const RsvgRectangle whole{0, 0, static_cast<double>(width), static_cast<double>(height)};
  check(render(handle.get(), cairo.get(), &whole, &error) != 0);
  std::string png;
  check(write(surface.get(), append, &png) == 0);
  return png;
}

}  // namespace tessera::tools
