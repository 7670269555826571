// What a tool that watches the emulation is told. The runtime calls it only if one has been set.
#pragma once

#include "kf_simt/device.h"
#include "kf_simt/launch.h"

namespace kf::simt {

// Called on the OS thread that runs the block.
struct Observer {
  void (*block_begins)();
  void (*block_ended)();  // blockIdx and entered_kernel are still those of the block
  void (*barrier_passed)(CallSite site);
  // Those of the warp's threads that were in a warp operation go on.
  void (*warp_goes_on)(unsigned warp, unsigned lanes);
};

// Null without a tool. It is set before the first launch and then stays.
extern const Observer* observer;

}  // namespace kf::simt
