#pragma once

/// Models that come with tessera, and sampling from logits.

#include "models/decoder.h"
#include "models/sampling.h"
