// What the lanes of a warp do together: shuffles, votes, matches, and what PTX adds.
#include <cstdio>

#include "scheduler.h"

namespace kf::simt {

inline void Worker::warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name,
                                   CallSite site) {
  const Inside inside(*this);
  Warp& warp = warp_[current_ / warpSize];
  const unsigned lane = current_ % warpSize;
  const unsigned bit = 1u << lane;
  if (!(mask & bit)) fail_mask(mask, name, site);
  note_event();
  wait_[current_] = Wait::kWarp;
  unsigned i = 0;
  while (i < warp.open && !(warp.operations[i].mask == mask && warp.operations[i].kind == kind)) ++i;
  WarpOperation& operation = warp.operations[i];
  if (i == warp.open) {
    ++warp.open;
    operation.mask = mask;
    operation.arrived = 0;
    operation.kind = kind;
    operation.work = work;
    operation.name = name;
    operation.site = site;
  } else if (operation.work != work) {
    fail([&] {
      return std::string("calls ") + name + " (" + text_of(site) + ") while a lane of its warp is in another operation";
    });
  }
  if (__builtin_expect(observer != nullptr, 0)) {
    observer->waits(name, site, kind == WarpKind::kShuffle ? static_cast<const ShuffleLane*>(record) : nullptr);
  }
  operation.arrived |= bit;
  operation.records[lane] = record;
  if ((mask & warp.lanes & ~warp.exited & ~operation.arrived) == 0) complete(warp, i);
  suspend();
}

// Carries out an operation if it has all its lanes.
bool Worker::complete(Warp& warp, unsigned i) {
  WarpOperation& operation = warp.operations[i];
  if ((operation.mask & warp.lanes & ~warp.exited & ~operation.arrived) != 0) return false;
  const unsigned arrived = operation.arrived;
  if (race::kOn && operation.kind == WarpKind::kSync) {
    unsigned lanes[warpSize], count = 0;
    for (unsigned rest = arrived; rest != 0; rest &= rest - 1) {
      lanes[count++] = static_cast<unsigned>(&warp - warp_) * warpSize + static_cast<unsigned>(__builtin_ctz(rest));
    }
    race_.order(lanes, count, current_);
  }
  if (operation.work != nullptr) {
    for (unsigned rest = ~arrived; rest != 0; rest &= rest - 1) operation.records[__builtin_ctz(rest)] = nullptr;
    operation.work(operation.records, arrived);
  }
  if (__builtin_expect(observer != nullptr, 0)) {
    const bool exchanges = operation.kind == WarpKind::kShuffle || operation.kind == WarpKind::kReduce;
    if (exchanges) observer->shuffled(operation.site);
    observer->warp_goes_on(static_cast<unsigned>(&warp - warp_), arrived);
  }
  if (i != --warp.open) operation = warp.operations[warp.open];
  warp.ready |= arrived;
  return true;
}

void Worker::fail_mask(unsigned mask, const char* name, CallSite site) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  fail([&] {
    return std::string("calls ") + name + " (" + text_of(site) + ") with the mask " + text +
           ", which leaves out its own lane " + std::to_string(current_lane);
  });
}

unsigned Worker::active_mask(CallSite site) {
  const Inside inside(*this);
  note_event();
  wait_[current_] = Wait::kActiveMask;
  active_site_[current_] = site;
  warp_[current_ / warpSize].asking |= 1u << current_ % warpSize;
  suspend();
  return active_mask_[current_];
}

void Worker::resolve_active_mask(Warp& warp) {
  const unsigned base = static_cast<unsigned>(&warp - warp_) * warpSize;
  const unsigned leader = static_cast<unsigned>(__builtin_ctz(warp.asking));
  unsigned together = 0;
  for (unsigned lane = leader; lane < warpSize; ++lane) {
    const bool asks = warp.asking >> lane & 1;
    if (asks && same_site(active_site_[base + lane], active_site_[base + leader])) together |= 1u << lane;
  }
  for (unsigned lane = leader; lane < warpSize; ++lane) {
    if (together >> lane & 1) active_mask_[base + lane] = together;
  }
  warp.asking &= ~together;
  warp.ready |= together;
}

// What kernels call.

void warp_operation(WarpKind kind, unsigned mask, void* record, WarpWork work, const char* name, CallSite site) {
  running(name).warp_operation(kind, mask, record, work, name, site);
}

unsigned __activemask(CallSite site) { return running("__activemask").active_mask(site); }

void bad_width(int width, const char* name, CallSite site) {
  running(name).fail([&] {
    return std::string("calls ") + name + " (" + text_of(site) + ") with the width " + std::to_string(width) +
           ", which is not a power of two up to 32";
  });
}

// What a lane reads from a lane that does not take part is undefined; here it is NaN.
namespace {
void exchange(void* const* records, unsigned present) {
  std::uint64_t values[warpSize];
  for (int i = 0; i < warpSize; ++i) {
    values[i] = present >> i & 1 ? static_cast<const ShuffleLane*>(records[i])->value : ~std::uint64_t{0};
  }
  for (int i = 0; i < warpSize; ++i) {
    if (!(present >> i & 1)) continue;
    auto* const to = static_cast<ShuffleLane*>(records[i]);
    to->value = values[to->source & 31];
  }
}
}  // namespace

void shuffle(ShuffleLane& lane, unsigned mask, const char* name, CallSite site) {
  running(name).warp_operation(WarpKind::kShuffle, mask, &lane, exchange, name, site);
}

unsigned ballot(unsigned mask, bool predicate, const char* name, unsigned* present, CallSite site) {
  struct Lane {
    bool predicate;
    unsigned set, present;
  } lane{predicate, 0, 0};
  warp_operation(
      WarpKind::kVote, mask, &lane,
      [](void* const* records, unsigned here) {
        unsigned set = 0;
        for (int i = 0; i < warpSize; ++i) {
          if (here >> i & 1 && static_cast<const Lane*>(records[i])->predicate) set |= 1u << i;
        }
        for (int i = 0; i < warpSize; ++i) {
          if (!(here >> i & 1)) continue;
          static_cast<Lane*>(records[i])->set = set;
          static_cast<Lane*>(records[i])->present = here;
        }
      },
      name, site);
  if (present != nullptr) *present = lane.present;
  return lane.set;
}

MatchLane match(unsigned mask, std::uint64_t value, const char* name, CallSite site) {
  MatchLane lane{value, 0, 0};
  warp_operation(
      WarpKind::kMatch, mask, &lane,
      [](void* const* records, unsigned present) {
        for (int i = 0; i < warpSize; ++i) {
          if (!(present >> i & 1)) continue;
          auto* const mine = static_cast<MatchLane*>(records[i]);
          mine->present = present;
          mine->same = 0;
          for (int j = 0; j < warpSize; ++j) {
            if (present >> j & 1 && static_cast<const MatchLane*>(records[j])->value == mine->value) {
              mine->same |= 1u << j;
            }
          }
        }
      },
      name, site);
  return lane;
}

}  // namespace kf::simt
