#pragma once

/// Optimizers and learning rate schedules. To add an optimizer, derive from optim::Optimizer.

#include "core/optim/adamw.h"
#include "core/optim/adamw8bit.h"
#include "core/optim/lr_schedule.h"
#include "core/optim/moving_average.h"
#include "core/optim/muon.h"
#include "core/optim/optimizer.h"
