#pragma once

/// Communicators: one rank, ranks as threads, and processes that a launcher started.
///
///     const auto group = std::make_shared<comm::ThreadGroup>(2);
///     const auto communicator = comm::make_threads_communicator(group, rank);   // in each thread

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/single.h"
#include "comm/threads.h"
