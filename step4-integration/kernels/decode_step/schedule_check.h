// Whether a schedule works: its warps are played in some order, and every access to what they share is looked at.
//
// Plain C++, for tests. A warp is a list of actions, in the order in which it does them: it waits for a word of a tag,
// reads, writes, has a tile brought into the ring, uses it. Words are messages, and in each block what warps leave for
// each other; barriers are words that are waited for. A list that waits too little reads what is not there; one that is
// overtaken reads what is of the next layer; one that waits for too much never ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cluster_shares.h"
#include "schedule.h"

namespace kf::decode_step {

template <class T, class Predicate>
void drop(std::vector<T>& from, Predicate which) {
  from.erase(std::remove_if(from.begin(), from.end(), which), from.end());
}

struct Action {
  enum What { kWait, kRead, kWrite, kBring, kUse } what;
  int first, count;  // words, or bytes of the ring
  int tag;           // of a word; of the ring, the tile
  int block = 0;     // whose ring
};

struct Program {
  std::vector<std::vector<Action>> warps;
  int words = 0;
  size_t of_block = kConsumers + 2;  // warps: eight consumers, a helper and a producer

  std::vector<Action>& of(int block, int warp) { return warps[static_cast<size_t>(block) * of_block + warp]; }
};

// Words of a block, behind all messages.
struct Local {
  int first;
  explicit Local(const Schedule& s, int block) : first(s.messages + block * kWords) {}
  static constexpr int kHeads = most_heads(kMostSteps);
  static constexpr int kWords = 4 * kConsumers + 2 * kConsumers + 2 + kConsumers + 1 + kConsumers + kSlots * 9;
  int sums(int step) const { return first + step % 4 * kConsumers; }
  int moments(int norm) const { return first + (4 + norm % 2) * kConsumers; }
  int statistics(int norm) const { return first + 6 * kConsumers + norm % 2; }
  int scores() const { return first + 6 * kConsumers + 2; }  // and the newest key's
  int met() const { return scores() + kConsumers + 1; }
  int full(int tile) const { return met() + kConsumers + tile % kSlots; }
  int free(int tile) const { return met() + kConsumers + kSlots + tile % kSlots * kConsumers; }
};

// What the kernel does, by the same schedule, with `keys` before the token.
inline Program program_of(const Schedule& s, int keys) {
  Program program;
  program.words = s.messages + s.blocks * Local::kWords;
  program.warps.resize(static_cast<size_t>(s.blocks * (kConsumers + 2)));
  const int parts = s.splits_of(keys), of_split = s.width / kOfAttended, norms = 2 * s.layers;
  for (int block = 0; block < s.blocks; ++block) {
    const Local local(s, block);
    const Part part = s.part(block, keys);
    std::vector<int> bytes;  // of each tile
    for (int step = 0; step < kKinds * s.layers; ++step) {
      const Product p = s.product(block, static_cast<Kind>(step % kKinds));
      for (int tile = 0; tile < p.tiles(); ++tile) bytes.push_back(p.tile_bytes(tile));
      if (step % kKinds == 0 && part.count > 0) bytes.push_back(part.count * kHead * 4);
    }
    bytes.push_back(s.depth * 2);
    const int logit_tiles = s.logit_groups(block);
    for (int i = 0; i < logit_tiles; ++i) bytes.push_back(s.logit_group_bytes());

    for (int warp = 0; warp < kConsumers; ++warp) {
      std::vector<Action>& to = program.of(block, warp);
      Walk walk;
      const auto write = [&](int first, int count, int tag) { to.push_back({Action::kWrite, first, count, tag}); };
      const auto receive = [&](int first, int count, int tag) {
        to.push_back({Action::kWait, first, count, tag});
        to.push_back({Action::kRead, first, count, tag});
      };
      // Of `all` those that the warp's lanes have; a warp without any waits for the last one.
      const auto own = [&](int at, int all, int each, int tag) {
        const int first = least(warp * each, all - 1);
        receive(at + first, warp * each < all ? least(each, all - first) : 1, tag);
      };
      const auto of_x = [&](int at, int tag) { own(at, s.granules, 32, tag); };
      const auto use = [&] {
        const int tile = walk.index, first = walk.next(bytes[static_cast<size_t>(tile)], kRingBytes);
        receive(local.full(tile), 1, tile + 1);
        to.push_back({Action::kUse, first, bytes[static_cast<size_t>(tile)], tile, block});
        write(local.free(tile) + warp, 1, tile + 1);
      };
      const auto meet = [&](int tag) {
        write(local.met() + warp, 1, tag);
        receive(local.met(), kConsumers, tag);
      };
      for (int step = 0; step < kKinds * s.layers; ++step) {
        const int layer = step / kKinds, tag = layer + 1, norm = step / 2;
        const Kind kind = static_cast<Kind>(step % kKinds);
        const bool normed = step % 2 == 0;
        if (kind == Kind::kProjection && part.head >= 0) {
          if (part.count > 0) use();
          receive(s.qkv_at + part.head * kHead, 22, tag);
          write(local.scores() + warp, 1, tag);
          receive(local.scores(), kConsumers + 1, tag);
          write(s.attended_at + part.split * of_split + part.head * (kHead / kOfAttended) + 2 * warp, 2, tag);
        }
        use();
        if (kind == Kind::kQkv && layer > 0) {
          meet(layer);
          of_x(s.x_at, layer);
        }
        if (kind == Kind::kFc) of_x(s.x_middle_at, tag);
        if (normed) write(local.moments(norm) + warp, 1, norm + 1);
        if (kind == Kind::kProjection) {
          for (int i = 0; i < parts; ++i) {
            own(s.attended_at + i * of_split, of_split, kUnit / kOfAttended, tag);
          }
        }
        if (kind == Kind::kSecond) {
          own(s.hidden_at, s.hidden_granules, 64, tag);
        }
        const Product p = s.product(block, kind);
        for (int tile = 1; tile < p.tiles(); ++tile) use();
        write(local.sums(step) + warp, 1, step + 1);
        if (warp > 0) continue;
        receive(local.sums(step), kConsumers, step + 1);
        if (normed) receive(local.statistics(norm), 1, norm + 1);
        const int of_message = kind == Kind::kFc ? kOfHidden : kOfMessage;
        const int at[kKinds] = {s.qkv_at, s.x_middle_at, s.hidden_at, s.x_at};
        write(at[static_cast<int>(kind)] + p.first / of_message, p.rows / of_message, tag);
      }
      use();
      meet(s.layers);
      of_x(s.x_at, s.layers);
      write(local.moments(norms) + warp, 1, norms + 1);
      for (int i = 0; i < logit_tiles; ++i) use();
      receive(local.statistics(norms), 1, norms + 1);
    }

    std::vector<Action>& helper = program.of(block, kConsumers);
    const auto helper_receives = [&](int first, int count, int tag) {
      helper.push_back({Action::kWait, first, count, tag});
      helper.push_back({Action::kRead, first, count, tag});
    };
    for (int norm = 0; norm <= norms; ++norm) {
      helper_receives(local.moments(norm), kConsumers, norm + 1);
      helper.push_back({Action::kWrite, local.statistics(norm), 1, norm + 1});
      if (norm % 2 == 1 || norm == norms || part.head < 0) continue;
      const int tag = norm / 2 + 1;
      if (part.split == parts - 1) helper_receives(s.qkv_at + part.head * kHead, kHead, tag);
      helper.push_back({Action::kWrite, local.scores() + kConsumers, 1, tag});
    }

    std::vector<Action>& producer = program.of(block, kConsumers + 1);
    std::vector<Tile> brought;
    Walk walk;
    size_t oldest = 0;
    for (const int of_tile : bytes) {
      const int index = walk.index, end = walk.at, first = walk.next(of_tile, kRingBytes);
      const Tile tile{index, first, first + of_tile};
      for (; oldest < brought.size() && in_the_way(brought[oldest], tile, end); ++oldest) {
        const int older = brought[oldest].index;
        producer.push_back({Action::kWait, local.free(older), kConsumers, older + 1});
        producer.push_back({Action::kRead, local.free(older), kConsumers, older + 1});
      }
      brought.push_back(tile);
      producer.push_back({Action::kBring, first, of_tile, index, block});
      producer.push_back({Action::kWrite, local.full(index), 1, index + 1});
    }
  }
  return program;
}

// ---- v4_clusters ----

// What a cluster adds to a warp's columns of x, in half a layer.
inline int part_at(const Shares& s, int half, int layer, int cluster, int index) {
  return ((layer * 2 + half) * s.clusters + cluster) * kOfCluster + index;
}
// Words of a block, behind all these.
constexpr int kQkvTiles = 3 * kHead / kGranule;  // of a head
struct ClusterLocal {
  int first;
  ClusterLocal(const Shares& s, int block) : first(part_at(s, 0, s.layers, 0, 0) + block * kWords) {}
  static constexpr int kOfHidden = 8 * kUnitOfHidden / kGranule;
  static constexpr int kHeads = most_heads(kMostSteps);
  static constexpr int kWords = 4 * kOfCluster + kHeads * (kQkvTiles + 2 * kClusterBlocks) + kOfHidden + 2;
  int x(int half) const { return first + half * kOfCluster; }
  int moments(int half) const { return first + (2 + half) * kOfCluster; }
  int hidden() const { return first + 4 * kOfCluster; }
  int qkv() const { return hidden() + kOfHidden; }
  int attended(int head) const { return qkv() + kHeads * kQkvTiles + head * kClusterBlocks; }
  int of_warps(int head) const { return attended(kHeads) + head * kClusterWarps; }
  int norm(int half) const { return of_warps(kHeads) + half; }
};

// What its kernel does: 64 warps of each cluster, and behind all of them a warp of each block that finds norms. A
// warp's own weights and keys are nobody else's: they are left out.
inline Program program_of(const Shares& s) {
  Program program;
  program.of_block = kClusterWarps;
  program.words = part_at(s, 0, s.layers, 0, 0) + s.clusters * kClusterBlocks * ClusterLocal::kWords;
  const size_t computing = static_cast<size_t>(s.clusters) * kOfCluster;
  program.warps.resize(computing + static_cast<size_t>(s.clusters) * kClusterBlocks);
  for (size_t w = 0; w < computing; ++w) {
    const int number = static_cast<int>(w), index = number % kOfCluster;
    const WarpPlace p = Shares::place(number);
    const ClusterLocal local(s, number / kClusterWarps);
    const int heads = s.heads_of(p.cluster).count(), units = s.units_of(p.cluster).count();
    std::vector<Action>& to = program.warps[w];
    const auto write = [&](int first, int count, int tag) { to.push_back({Action::kWrite, first, count, tag}); };
    const auto wait = [&](int first, int count, int tag) { to.push_back({Action::kWait, first, count, tag}); };
    const auto receive = [&](int first, int count, int tag) {
      wait(first, count, tag);
      to.push_back({Action::kRead, first, count, tag});
    };
    // A word to all blocks of the cluster.
    const auto send = [&](int word, int tag) {
      for (int block = 0; block < kClusterBlocks; ++block) {
        write(word - local.first + ClusterLocal(s, p.cluster * kClusterBlocks + block).first, 1, tag);
      }
    };
    const auto send_x = [&](int half, int tag) {
      send(local.x(half) + index, tag);
      send(local.moments(half) + index, tag);
    };
    // Rows of a product behind a LayerNorm. For the unit of what is added then, all warps need its factor.
    const auto rows = [&](int half, int tag, int tiles, int first, Kind kind) {
      if (tiles > 0 || p.warp == 0) receive(local.x(half), kOfCluster, tag);
      receive(local.norm(half), 1, tag);
      for (int k = 0; k < tiles; ++k) {
        if (k > 0) receive(local.x(half), kOfCluster, tag);
        send(first + Shares::tile(p, kind, k), tag);
      }
    };
    const auto add_parts = [&](int half, int layer) {
      for (int c = 0; c < s.clusters; ++c) {
        if (half == 1 || s.heads_of(c).count() > 0) receive(part_at(s, half, layer, c, index), 1, layer + 1);
      }
    };
    send_x(1, 1);
    for (int layer = 0; layer < s.layers; ++layer) {
      const int tag = layer + 1;
      rows(1, tag, s.tiles(p, Kind::kQkv), local.qkv(), Kind::kQkv);
      if (heads > 0) {
        receive(local.qkv(), heads * kQkvTiles, tag);
        for (int head = 0; head < heads; ++head) {
          write(local.of_warps(head) + p.warp, 1, tag);
        }
        for (int head = 0; head < heads; ++head) {
          receive(local.of_warps(head), kClusterWarps, tag);
          write(ClusterLocal(s, p.cluster * kClusterBlocks + p.warp).attended(head) + p.block, 1, tag);
        }
        receive(local.qkv(), heads * kQkvTiles, tag);  // the newest keys and values
        receive(local.attended(0), heads * kClusterBlocks, tag);
        write(part_at(s, 0, layer, p.cluster, index), 1, tag);
      }
      receive(local.norm(1), 1, tag);  // of several rows: for the unit once more
      add_parts(0, layer);
      send_x(0, tag);
      rows(0, tag, s.tiles(p, Kind::kFc), local.hidden(), Kind::kFc);
      receive(local.hidden(), units * (kUnitOfHidden / kGranule), tag);
      write(part_at(s, 1, layer, p.cluster, index), 1, tag);
      receive(local.norm(0), 1, tag);
      add_parts(1, layer);
      send_x(1, tag + 1);
    }
    receive(local.x(1), kOfCluster, s.layers + 1);
    receive(local.norm(1), 1, s.layers + 1);
  }
  for (size_t w = computing; w < program.warps.size(); ++w) {
    const ClusterLocal local(s, static_cast<int>(w - computing));
    for (int i = 0; i <= 2 * s.layers; ++i) {
      const int half = 1 - i % 2, tag = i / 2 + 1;
      program.warps[w].push_back({Action::kWait, local.moments(half), kOfCluster, tag});
      program.warps[w].push_back({Action::kRead, local.moments(half), kOfCluster, tag});
      program.warps[w].push_back({Action::kWrite, local.norm(half), 1, tag});
    }
  }
  return program;
}

// Plays the warps in an order that `seed` chooses, in which one is late: it goes on only where no other can. With 0
// each goes as far as it comes. What is wrong, or "".
inline std::string fault_of(const Program& program, unsigned seed) {
  struct Held {
    int first, last, tile, users;
  };
  std::vector<int> tag(static_cast<size_t>(program.words), 0);
  std::vector<std::vector<int>> readers(tag.size());  // [word][tag]: how many have not read it yet
  std::vector<std::vector<Held>> rings(program.warps.size());
  for (const auto& actions : program.warps) {
    for (const Action& a : actions) {
      if (a.what != Action::kRead) continue;
      for (int m = a.first; m < a.first + a.count; ++m) {
        auto& of_word = readers[static_cast<size_t>(m)];
        if (static_cast<int>(of_word.size()) <= a.tag) of_word.resize(static_cast<size_t>(a.tag) + 1, 0);
        ++of_word[static_cast<size_t>(a.tag)];
      }
    }
  }
  std::vector<size_t> at(program.warps.size(), 0), live;
  for (size_t w = 0; w < at.size(); ++w) live.push_back(w);
  std::mt19937 random(seed);
  const size_t late = seed == 0 ? at.size() : random() % at.size();
  const auto text = [&](size_t warp, const char* what, const Action& a) {
    return "block " + std::to_string(warp / program.of_block) + " warp " + std::to_string(warp % program.of_block) +
           " " + what + " (" + std::to_string(a.first) + ", tag " + std::to_string(a.tag) + ")";
  };
  // One action; false: it must wait.
  const auto play = [&](size_t warp, const Action& a, std::string& fault) {
    if (a.what == Action::kBring || a.what == Action::kUse) {
      auto& ring = rings[static_cast<size_t>(a.block)];
      for (size_t i = 0; i < ring.size(); ++i) {
        if (a.what == Action::kUse && ring[i].tile == a.tag && ring[i].first == a.first) {
          if (--ring[i].users == 0) ring.erase(ring.begin() + static_cast<std::ptrdiff_t>(i));
          return true;
        }
        if (a.what == Action::kBring && ring[i].first < a.first + a.count && ring[i].last > a.first) {
          fault = text(warp, "brings a tile where another is", a);
        }
      }
      if (a.what == Action::kUse) fault = text(warp, "uses a tile that is not there", a);
      ring.push_back({a.first, a.first + a.count, a.tag, kConsumers});
      return true;
    }
    for (int m = a.first; m < a.first + a.count; ++m) {
      int& of_word = tag[static_cast<size_t>(m)];
      auto& left = readers[static_cast<size_t>(m)];
      if (a.what == Action::kWait) {
        if (of_word > a.tag) fault = text(warp, "is overtaken: what it waits for is gone", a);
        if (of_word < a.tag) return false;
      } else if (a.what == Action::kRead) {
        if (of_word != a.tag) fault = text(warp, "reads what is not there", a);
        --left[static_cast<size_t>(a.tag)];
      } else {
        if (of_word >= a.tag) fault = text(warp, "writes again", a);
        for (size_t older = 0; older < left.size() && static_cast<int>(older) < a.tag; ++older) {
          if (left[older] > 0) fault = text(warp, "overwrites what is still to be read", a);
        }
        of_word = a.tag;
      }
    }
    return true;
  };
  while (!live.empty()) {
    bool moved = false;
    if (seed != 0) std::shuffle(live.begin(), live.end(), random);
    std::partition(live.begin(), live.end(), [&](size_t warp) { return warp != late; });
    for (const size_t warp : live) {
      if (warp == late && moved) continue;
      const auto& actions = program.warps[warp];
      for (size_t turns = seed == 0 ? ~size_t{0} : 1 + random() % 7; turns > 0 && at[warp] < actions.size(); --turns) {
        std::string fault;
        const bool done = play(warp, actions[at[warp]], fault);
        if (!fault.empty()) return fault;
        if (!done) break;
        moved = true;
        ++at[warp];
      }
    }
    drop(live, [&](size_t warp) { return at[warp] == program.warps[warp].size(); });
    if (!moved && !live.empty()) return text(live[0], "waits for ever", program.warps[live[0]][at[live[0]]]);
  }
  return "";
}

}  // namespace kf::decode_step
