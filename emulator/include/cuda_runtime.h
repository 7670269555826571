// CUDA's names for kernels that run on the CPU. See emulator/README.md.
#pragma once

// CUDA's header brings these, and programs ask for the names of two others before they declare what those would.
#define __CUDA_RUNTIME_H__
#define __DRIVER_TYPES_H__

// clock() counts the device's cycles in a kernel and the host's time elsewhere. Declared before the C library does, so
// that its declaration, which follows, is of this function too.
#if defined(__linux__)
extern "C" long clock(void) noexcept __asm__("kf_simt_clock");
#endif

#include <limits.h>
#include <time.h>

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
