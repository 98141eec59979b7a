#pragma once

#include <string_view>

#include "core/base/context.h"
#include "core/base/tensor_view.h"
#include "core/base/trace.h"

// How <family>.cpp reaches the backends. For a kernel `void gelu_forward(Context&, const
// GeluForward&)`:
//
//   TESSERA_CPU_KERNEL(gelu_forward, GeluForward)
//   void gelu_forward(Context& context, const GeluForward& args) {
//     ... checks of args that hold on every device ...
//     TESSERA_DISPATCH(gelu_forward, context, args);
//   }

#if defined(__x86_64__) && !defined(TESSERA_GENERIC_CPU)
#define TESSERA_CPU_KERNEL(name, Args) \
  namespace cpu::generic {             \
  void name(Context&, const Args&);    \
  }                                    \
  namespace cpu::v2 {                  \
  void name(Context&, const Args&);    \
  }                                    \
  namespace cpu::v3 {                  \
  void name(Context&, const Args&);    \
  }                                    \
  namespace cpu::v4 {                  \
  void name(Context&, const Args&);    \
  }
#define TESSERA_CPU_DISPATCH(name, context, args) \
  switch ((context).cpu_level()) {                \
    case CpuLevel::V4:                            \
      return cpu::v4::name(context, args);        \
    case CpuLevel::V3:                            \
      return cpu::v3::name(context, args);        \
    case CpuLevel::V2:                            \
      return cpu::v2::name(context, args);        \
    case CpuLevel::Generic:                       \
      return cpu::generic::name(context, args);   \
  }
#else
#define TESSERA_CPU_KERNEL(name, Args) \
  namespace cpu::generic {             \
  void name(Context&, const Args&);    \
  }
#define TESSERA_CPU_DISPATCH(name, context, args) return cpu::generic::name(context, args)
#endif

/// Runs the kernel of the context's device; meta devices compute nothing.
#define TESSERA_DISPATCH(name, context, args)                                   \
  do {                                                                          \
    const ::tessera::KernelRange kernel_range(context, #name);                  \
    switch ((context).device().type) {                                          \
      case DeviceType::Meta:                                                    \
        return;                                                                 \
      case DeviceType::CPU:                                                     \
        TESSERA_CPU_DISPATCH(name, context, args);                              \
        break;                                                                  \
      case DeviceType::CUDA:                                                    \
        if (::tessera::kernels::run_on_device(#name, context, &(args))) return; \
        break;                                                                  \
    }                                                                           \
    ::tessera::kernels::throw_no_kernel(#name, (context).device());             \
  } while (false)

/// Runs a kernel that does at once what the lines after it compose of others, and returns, if the
/// context's device has one.
#define TESSERA_DISPATCH_FUSED(name, context, args)                         \
  do {                                                                      \
    if ((context).device().type != DeviceType::CUDA) break;                 \
    const ::tessera::KernelRange kernel_range(context, #name);              \
    if (::tessera::kernels::run_on_device(#name, context, &(args))) return; \
  } while (false)

namespace tessera::kernels {

/// @throws Unsupported naming operation and device
[[noreturn]] void throw_no_kernel(std::string_view kernel, Device device);

/// Starts the kernel of a device beside the CPU. @return false if it has none of that name
/// @throws OutOfMemory with the ledger, also where what is missing is no block of it
bool run_on_device(std::string_view kernel, Context& context, const void* args);

/// Checks shared by the families; all name the kernel and the argument and print what they
/// compared.
void check_device(std::string_view kernel, std::string_view argument, const Context& context,
                  const TensorView& view);
void check_dtype(std::string_view kernel, std::string_view argument, const TensorView& view,
                 DType expected);
void check_shape(std::string_view kernel, std::string_view argument, const TensorView& view,
                 const Shape& expected);
void check_contiguous(std::string_view kernel, std::string_view argument, const TensorView& view);
/// f64 for f64, else f32.
constexpr DType accumulator_dtype(DType dtype) {
  return dtype == DType::F64 ? DType::F64 : DType::F32;
}

}  // namespace tessera::kernels
