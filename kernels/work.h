#pragma once

#include "core/base/kernel_work.h"

// Bytes and operations of each kernel, for traces and plans.
namespace tessera::kernels {

struct AdamW;
struct AdamW8bit;
struct Add;
struct AttentionBackward;
struct AttentionForward;
struct Binary;
struct BitHash;
struct Cast;
struct ClipFactor;
struct CollectRows;
struct Compare;
struct CrossEntropy;
struct Dropout;
struct EmbeddingBackward;
struct EmbeddingBackwardRows;
struct EmbeddingForward;
struct Fill;
struct GatedBackward;
struct GatedForward;
struct Gather;
struct GeluBackward;
struct GeluForward;
struct GroupPairs;
struct GroupedGradient;
struct GroupedMatmul;
struct Matmul;
struct MaxAlong;
struct MovingAverage;
struct MuonMomentum;
struct NormBackward;
struct NormForward;
struct Normalize;
struct Rotary;
struct RowProducts;
struct Sampling;
struct ScatterAdd;
struct SoftmaxBackward;
struct SoftmaxForward;
struct SpreadRows;
struct SumOfSquares;
struct SumRows;
struct SumTo;
struct TopK;
struct Total;
struct Unary;
struct WeightUpdate;
struct Where;

KernelWork work(const AdamW& args);
KernelWork work(const AdamW8bit& args);
KernelWork work(const Add& args);
KernelWork work(const AttentionBackward& args);
KernelWork work(const AttentionForward& args);
KernelWork work(const Binary& args);
KernelWork work(const BitHash& args);
KernelWork work(const Cast& args);
KernelWork work(const ClipFactor& args);
KernelWork work(const CollectRows& args);
KernelWork work(const Compare& args);
KernelWork work(const CrossEntropy& args);
KernelWork work(const Dropout& args);
KernelWork work(const EmbeddingBackward& args);
KernelWork work(const EmbeddingBackwardRows& args);
KernelWork work(const EmbeddingForward& args);
KernelWork work(const Fill& args);
KernelWork work(const GatedBackward& args);
KernelWork work(const GatedForward& args);
KernelWork work(const Gather& args);
KernelWork work(const GeluBackward& args);
KernelWork work(const GeluForward& args);
KernelWork work(const GroupPairs& args);
KernelWork work(const GroupedGradient& args);
KernelWork work(const GroupedMatmul& args);
KernelWork work(const Matmul& args);
KernelWork work(const MaxAlong& args);
KernelWork work(const MovingAverage& args);
KernelWork work(const MuonMomentum& args);
KernelWork work(const NormBackward& args);
KernelWork work(const NormForward& args);
KernelWork work(const Normalize& args);
KernelWork work(const Rotary& args);
KernelWork work(const RowProducts& args);
KernelWork work(const Sampling& args);
KernelWork work(const ScatterAdd& args);
KernelWork work(const SoftmaxBackward& args);
KernelWork work(const SoftmaxForward& args);
KernelWork work(const SpreadRows& args);
KernelWork work(const SumOfSquares& args);
KernelWork work(const SumRows& args);
KernelWork work(const SumTo& args);
KernelWork work(const TopK& args);
KernelWork work(const Total& args);
KernelWork work(const Unary& args);
KernelWork work(const WeightUpdate& args);
KernelWork work(const Where& args);

}  // namespace tessera::kernels
