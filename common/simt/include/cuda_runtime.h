// CUDA's names for kernels that run on the CPU. See common/simt/README.md.
#pragma once

#include "kf_simt/atomics.h"
#include "kf_simt/device.h"
#include "kf_simt/launch.h"
#include "kf_simt/math.h"
#include "kf_simt/runtime_api.h"
#include "kf_simt/types.h"

#include <cassert>
#include <cstdio>
#include <cstdlib>

// assert() in a kernel names the block and the thread. The C library declares what a failed assertion calls once; this
// name is replaced in every assertion after that.
#ifdef __GLIBC__
#define __assert_fail ::kf::simt::assert_failed
#endif
