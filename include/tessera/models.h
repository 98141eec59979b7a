#pragma once

/// Models that come with tessera, and sampling from logits.

#include "models/gpt2.h"
#include "models/sampling.h"
