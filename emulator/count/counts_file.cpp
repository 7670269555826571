// What has been counted, as JSON. counts.py turns its addresses into source lines.
#include <cstdio>

#include "access_counter.h"

namespace kf::simt {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

std::string hex(Address pc, Address base) {
  char text[32];
  std::snprintf(text, sizeof(text), "\"%zx\"", static_cast<std::size_t>(pc - base));
  return text;
}

std::string dimensions(const dim3& d) {
  return "[" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + "]";
}

}  // namespace

// {"kernels": [{name, signature, blocks, launches: [{grid, block, shared, times}], barriers: [{file, line, times}],
//               shuffles: as barriers}],
//  "places": [{kernel, pc: [addresses, innermost first], kind, space, size, requests, …}]}. Addresses are relative to
// where this program or library was loaded, and lie within the calling instruction.
void AccessCounter::write(const char* path) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "KF_SIMT_COUNT: cannot write %s\n", path);
    return;
  }
  const Address base = lasting<Ranges>().base;

  const std::lock_guard<std::mutex> lock(all().mutex);
  std::map<const KernelInfo*, KernelTotals> kernels;
  for (const AccessCounter* counter : all().counters) {
    for (const auto& [kernel, totals] : counter->kernels_) {
      KernelTotals& sum = kernels[kernel];
      sum.blocks += totals.blocks;
      for (const auto& [shape, times] : totals.launches) sum.launches[shape] += times;
      for (const auto& [place, times] : totals.barriers) sum.barriers[place] += times;
      for (const auto& [place, times] : totals.shuffles) sum.shuffles[place] += times;
    }
  }
  std::string out = "{\"kernels\": [";
  std::map<const KernelInfo*, std::size_t> number_of;
  for (const auto& [kernel, totals] : kernels) {
    out += number_of.empty() ? "\n" : ",\n";
    number_of.emplace(kernel, number_of.size());
    out += "{\"name\": " + quoted(short_name(kernel->signature)) + ", \"signature\": " + quoted(kernel->signature) +
           ", \"blocks\": " + std::to_string(totals.blocks) + ", \"launches\": [";
    const char* comma = "";
    for (const auto& [shape, times] : totals.launches) {
      out += comma + ("{\"grid\": " + dimensions(shape.grid)) + ", \"block\": " + dimensions(shape.block) +
             ", \"shared\": " + std::to_string(shape.shared) + ", \"times\": " + std::to_string(times) + "}";
      comma = ", ";
    }
    for (const auto& [name, places] : {std::pair("barriers", &totals.barriers), {"shuffles", &totals.shuffles}}) {
      out += std::string("], \"") + name + "\": [";
      comma = "";
      for (const auto& [place, times] : *places) {
        out += comma + ("{\"file\": " + quoted(place.first)) + ", \"line\": " + std::to_string(place.second) +
               ", \"times\": " + std::to_string(times) + "}";
        comma = ", ";
      }
    }
    out += "]}";
  }
  out += "],\n\"places\": [";
  const char* comma = "\n";
  for (const AccessCounter* counter : all().counters) {
    for (const auto& [place, totals] : counter->totals_) {
      if (totals.requests == 0 || number_of.count(place.kernel) == 0) continue;
      out +=
          comma + ("{\"kernel\": " + std::to_string(number_of[place.kernel])) + ", \"pc\": [" + hex(place.pc - 1, base);
      for (const Context* context = place.context; context->parent != nullptr; context = context->parent) {
        out += ", " + hex(context->call - 1, base);
      }
      out += std::string("], \"kind\": \"") + kKindNames[static_cast<int>(place.kind)] + "\", \"space\": \"" +
             kSpaceNames[static_cast<int>(place.space)] + "\", \"reading\": \"" +
             kReadingNames[static_cast<int>(place.reading)] + "\", \"size\": " + std::to_string(place.size);
      const auto field = [&](const char* name, std::uint64_t value) {
        out += std::string(", \"") + name + "\": " + std::to_string(value);
      };
      field("requests", totals.requests);
      field("lanes", totals.lanes);
      field("partial", totals.partial);
      field("sectors", totals.sectors);
      field("wavefronts", totals.wavefronts);
      field("conflicts", totals.conflicts);
      out += "}";
      comma = ",\n";
    }
  }
  out += "]}\n";
  const bool whole = std::fwrite(out.data(), 1, out.size(), file) == out.size();
  if (std::fclose(file) != 0 || !whole) std::fprintf(stderr, "KF_SIMT_COUNT: cannot write %s\n", path);
}

}  // namespace kf::simt
