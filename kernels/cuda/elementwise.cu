#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/sums.h"
#include "kernels/elementwise_args.h"

// All kernels are memory-bound.
namespace tessera::kernels::cuda {
namespace {

template <typename T>
struct AddBody {
  const T* a;
  const T* b;
  T* y;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    const Pack<T, N> left = load_pack<N>(a + i), right = load_pack<N>(b + i);
    Pack<T, N> out;
    for (int k = 0; k < N; ++k) out[k] = narrow<T>(widen(left[k]) + widen(right[k]));
    store_pack<N>(y + i, out);
  }
};

template <typename T>
struct FillBody {
  T* out;
  Compute<T> value;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    Pack<T, N> pack;
    for (int k = 0; k < N; ++k) pack[k] = narrow<T>(value);
    store_pack<N>(out + i, pack);
  }
};

// As in kernels/cpu/elementwise.cpp: if either side is f64, scales and adds in f64, rounds once.
template <typename In, typename Out>
using CastCompute = std::conditional_t<std::is_same_v<In, double>, double, Compute<Out>>;

/// Rows are strided, of whole packs. With columns = 0, the tensors are dense.
template <typename In, typename Out>
struct CastBody {
  const In* in;
  Out* out;
  CastCompute<In, Out> scale;
  bool accumulate;
  std::int64_t columns, in_stride, out_stride;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t i, std::integral_constant<int, N>) const {
    using A = CastCompute<In, Out>;
    std::int64_t source = i, target = i;
    if (columns > 0) {
      const std::int64_t row = i / columns, column = i % columns;
      source = row * in_stride + column;
      target = row * out_stride + column;
    }
    const Pack<In, N> from = load_pack<N>(in + source);
    Pack<Out, N> to{};
    if (accumulate) to = load_pack<N>(out + target);
    for (int k = 0; k < N; ++k) {
      A value = scale * static_cast<A>(widen(from[k]));
      if (accumulate) value += static_cast<A>(widen(to[k]));
      to[k] = narrow<Out>(static_cast<Compute<Out>>(value));
    }
    store_pack<N>(out + target, to);
  }
};

struct Itself {
  __device__ __forceinline__ double operator()(double x) const { return x; }
};

template <typename Out>
struct StoreSum {
  Out* out;
  double scale;
  bool accumulate;
  __device__ __forceinline__ void operator()(double sum) const {
    *out = static_cast<Out>(scale * sum + (accumulate ? static_cast<double>(*out) : 0.0));
  }
};

template <typename T>
const T* input(const TensorView& view) {
  return static_cast<const T*>(view.data);
}

}  // namespace

void add(Context& context, const Add& args) {
  visit_floating(args.y.dtype, "add", [&]<typename T>(std::type_identity<T>) {
    const AddBody<T> body{input<T>(args.a), input<T>(args.b), static_cast<T*>(args.y.data)};
    launch_elementwise<kPack<T>>(context, "add", args.y.numel(), is_aligned(body.a, body.b, body.y),
                                 body);
  });
}

void fill(Context& context, const Fill& args) {
  visit_floating(args.out.dtype, "fill", [&]<typename T>(std::type_identity<T>) {
    const FillBody<T> body{static_cast<T*>(args.out.data), static_cast<Compute<T>>(args.value)};
    launch_elementwise<kPack<T>>(context, "fill", args.out.numel(), is_aligned(body.out), body);
  });
}

void cast(Context& context, const Cast& args) {
  visit_floating(args.in.dtype, "cast", [&]<typename In>(std::type_identity<In>) {
    visit_floating(args.out.view.dtype, "cast", [&]<typename Out>(std::type_identity<Out>) {
      constexpr int kBoth = kPack<In> < kPack<Out> ? kPack<In> : kPack<Out>;
      CastBody<In, Out> body{.in = input<In>(args.in),
                             .out = static_cast<Out*>(args.out.view.data),
                             .scale = static_cast<CastCompute<In, Out>>(args.scale),
                             .accumulate = args.out.accumulate,
                             .columns = 0,
                             .in_stride = 0,
                             .out_stride = 0};
      bool packs = is_aligned(body.in, body.out);
      if (!args.in.is_contiguous() || !args.out.view.is_contiguous()) {
        body.columns = args.in.shape[1];
        body.in_stride = args.in.strides[0];
        body.out_stride = args.out.view.strides[0];
        packs = packs && (body.columns | body.in_stride | body.out_stride) % kBoth == 0;
      }
      launch_elementwise<kBoth>(context, "cast", args.in.numel(), packs, body);
    });
  });
}

void sum_rows(Context& context, const SumRows& args) {
  visit_floating(args.in.dtype, "sum_rows", [&]<typename T>(std::type_identity<T>) {
    const std::int64_t rows = args.in.shape[0], columns = args.in.shape[1];
    const SumRowsTerm<T> term{input<T>(args.in), args.in.strides[0]};
    const StoreColumnSums<Compute<T>> store{
        columns, {static_cast<Compute<T>*>(args.out.view.data)}, {args.out.accumulate}};
    const bool packs = is_aligned(term.in) && columns % kPack<T> == 0 &&
                       (rows <= 1 || term.stride % kPack<T> == 0);
    visit_pack<T>(packs, [&]<int N>(std::integral_constant<int, N>) {
      launch_column_sums<Compute<T>, 1, N>(context, "sum_rows", rows, term, store);
    });
  });
}

void sum(Context& context, const Total& args) {
  visit_floating(args.in.dtype, "sum", [&]<typename T>(std::type_identity<T>) {
    const auto run = [&](auto* out) {
      launch_sum(
          context, "sum", input<T>(args.in), args.in.numel(), Itself{},
          StoreSum<std::remove_pointer_t<decltype(out)>>{out, args.scale, args.out.accumulate});
    };
    if (args.out.view.dtype == DType::F64)
      run(static_cast<double*>(args.out.view.data));
    else
      run(static_cast<float*>(args.out.view.data));
  });
}

TESSERA_CUDA_KERNEL(add, Add)
TESSERA_CUDA_KERNEL(fill, Fill)
TESSERA_CUDA_KERNEL(cast, Cast)
TESSERA_CUDA_KERNEL(sum_rows, SumRows)
TESSERA_CUDA_KERNEL(sum, Total)

}  // namespace tessera::kernels::cuda
