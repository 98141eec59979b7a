#pragma once

/// Modules, parameters, units and the common layers.
///
///     struct Net : nn::Module {                   // members register with their parent, by name
///       nn::Linear up{*this, "up", {.in = 1, .out = 16}}, down{*this, "down", {.in = 16, .out = 1}};
///       Tensor operator()(const Tensor& x) { return nn::unit(down, ops::tanh(nn::unit(up, x))); }
///     };

#include "core/nn/experts.h"
#include "core/nn/layers.h"
#include "core/nn/lora.h"
#include "core/nn/module.h"
#include "core/nn/parameter.h"
#include "core/nn/unit.h"
#include "core/nn/units.h"
