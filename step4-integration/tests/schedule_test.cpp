// The schedules of decode_step's v3_persistent and v4_clusters: they are right for any number of blocks, and faults are
// found.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/decode_step/schedule_check.h"

namespace kf::decode_step {
namespace {

std::string fault_in_any_order(const Program& program) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    const std::string fault = fault_of(program, seed);
    if (!fault.empty()) return fault;
  }
  return "";
}

TEST(Schedule, IsRightForAnyNumberOfBlocks) {
  struct Size {
    int width, inner, vocab;
  };
  int checked = 0;
  for (const Size& size : {Size{64, 256, 67}, {64, 80, 20}, {128, 384, 300}, {192, 100, 500}, {320, 960, 300}}) {
    for (const int processors : {1, 8, 11, 16, 31}) {
      const Schedule s(size.width, size.inner, size.vocab, 4, processors);
      if (!s.fits()) continue;  // refused
      ++checked;
      for (const int keys : {0, 200, s.most_keys()}) {
        ASSERT_EQ(fault_of(program_of(s, keys), 0), "") << size.width << " on " << processors << ", " << keys;
        ASSERT_EQ(fault_of(program_of(s, keys), 7), "") << size.width << " on " << processors << ", " << keys;
      }
    }
  }
  EXPECT_GE(checked, 6);
}

// The four sizes of GPT-2.
struct Model {
  int width, inner;
};
constexpr Model kModels[] = {{768, 3072}, {1024, 4096}, {1280, 5120}, {1600, 6400}};

TEST(Schedule, IsRightForGpt2) {
  for (const int processors : {100, 114, 128, 132, 148}) {
    const Schedule s(768, 3072, 50257, 2, processors);
    ASSERT_EQ(s.fits(), processors >= 128);
    if (!s.fits()) continue;
    EXPECT_EQ(fault_of(program_of(s, 1023), 3), "") << processors;
  }
}

// While a tile is in use, those behind it for which there is room: 64 KB and more, in any block.
TEST(Schedule, KeepsBytesOnTheirWay) {
  const Schedule s(768, 3072, 50257, 2, 132);
  for (const int block : {0, 50, 131}) {
    std::vector<Tile> tiles;
    int end = 0, held = 0;
    Program program = program_of(s, 1023);
    for (const Action& a : program.of(block, kConsumers + 1)) {
      if (a.what != Action::kBring) continue;
      const Tile tile{a.tag, a.first, a.first + a.count};
      for (; held < static_cast<int>(tiles.size()) && in_the_way(tiles[static_cast<size_t>(held)], tile, end); ++held) {
        int bytes = 0;
        for (size_t i = static_cast<size_t>(held) + 1; i < tiles.size(); ++i) bytes += tiles[i].last - tiles[i].first;
        EXPECT_GE(bytes, 64 * 1024) << "block " << block << ", tile " << a.tag;
      }
      tiles.push_back(tile);
      end = tile.last;
    }
  }
}

// Each row of each product belongs to one block, each of its weights to one tile, and each of a head's keys to a part.
TEST(Schedule, LeavesNothingOut) {
  for (const int processors : {128, 132, 148, 200}) {
    const Schedule s(768, 3072, 50257, 12, processors);
    for (int kind = 0; kind < kKinds; ++kind) {
      const int rows = kind == 0 ? 3 * s.width : (kind == 2 ? s.inner : s.width);
      const int granule = kind == 2 ? kOfHidden : kOfMessage;
      std::vector<int> blocks_of(static_cast<size_t>(up(rows, granule) * granule), 0);
      int tiles = 0;
      for (int block = 0; block < s.blocks; ++block) {
        const Product p = s.product(block, static_cast<Kind>(kind));
        EXPECT_GT(p.rows, 0);
        for (int row = 0; row < p.rows; ++row) ++blocks_of[static_cast<size_t>(p.first + row)];
        int weights = 0;
        for (int tile = 0; tile < p.tiles(); ++tile) {
          const Body body = p.body(tile);
          weights += body.rows * body.depth;
          EXPECT_EQ(body.bytes(), body.rows * body.depth * 2);
        }
        EXPECT_EQ(weights, p.rows * p.depth);
        tiles += s.logit_groups(block);
      }
      EXPECT_EQ(blocks_of, std::vector<int>(blocks_of.size(), 1)) << kind;
      EXPECT_GE(tiles * kLogitRows, s.vocab);
    }
    for (const int keys : {0, 1, 63, 64, 65, 511, 1023, s.most_keys()}) {
      std::vector<int> seen(static_cast<size_t>(s.heads), 0), parts(seen);
      for (int block = 0; block < s.blocks; ++block) {
        const Part part = s.part(block, keys);
        if (part.head < 0) continue;
        EXPECT_LE(part.count, s.most_keys() / s.splits);
        seen[static_cast<size_t>(part.head)] += part.count;
        ++parts[static_cast<size_t>(part.head)];
      }
      EXPECT_EQ(seen, std::vector<int>(seen.size(), keys)) << keys;
      EXPECT_EQ(parts, std::vector<int>(seen.size(), s.splits_of(keys))) << keys;
    }
  }
}

// ---- faults ----

// Two wait for each other, a third one only reads: however many turns messages take, it can be overtaken.
TEST(Schedule, AReaderThatNobodyWaitsForIsOvertaken) {
  constexpr int kTurns = 16;
  Program program;
  program.words = 2 * kTurns;
  program.warps.resize(3);
  for (int tag = 1; tag <= 10 * kTurns; ++tag) {
    const int place = 2 * (tag % kTurns);
    for (int warp = 0; warp < 3; ++warp) {
      auto& actions = program.warps[static_cast<size_t>(warp)];
      if (warp < 2) actions.push_back({Action::kWrite, place + warp, 1, tag});
      actions.push_back({Action::kWait, place, 2, tag});
      actions.push_back({Action::kRead, place, 2, tag});
    }
  }
  EXPECT_NE(fault_in_any_order(program), "");
}

class Planted : public ::testing::Test {
 protected:
  Schedule s{128, 384, 67, 6, 16};  // its rings' slots go round
  static constexpr int kKeys = 100;
  Program program;
  void SetUp() override {
    ASSERT_TRUE(s.fits());
    program = program_of(s, kKeys);
    ASSERT_EQ(fault_in_any_order(program), "");
  }
  // Of a warp, its action of this kind on a word from `first` on, below `last`.
  std::vector<Action>::iterator find(int block, int warp, Action::What what, int first, int last, int tag) {
    auto& actions = program.of(block, warp);
    const auto at = std::find_if(actions.begin(), actions.end(), [&](const Action& a) {
      return a.what == what && a.first >= first && a.first < last && a.tag == tag;
    });
    EXPECT_NE(at, actions.end());
    return at;
  }
  void remove_waits(int first, int last, int tag) {
    for (auto& actions : program.warps) {
      drop(actions, [&](const Action& a) {
        return a.what == Action::kWait && a.first >= first && a.first < last && a.tag == tag;
      });
    }
  }
  void expect(const std::string& says) {
    const std::string fault = fault_in_any_order(program);
    EXPECT_NE(fault, "");
    EXPECT_NE(fault.find(says), std::string::npos) << fault;
  }
};

TEST_F(Planted, NoWaitForQkv) {
  remove_waits(s.qkv_at, s.attended_at, 2);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitForAttention) {
  remove_waits(s.attended_at, s.hidden_at, 1);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitForTheProjection) {
  remove_waits(s.x_middle_at, s.qkv_at, 2);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitForTheHiddenLayer) {
  remove_waits(s.hidden_at, s.messages, 3);
  expect("reads what is not there");
}
TEST_F(Planted, TagsAreOneTooHigh) {
  find(3, 0, Action::kWait, s.hidden_at, s.messages, 2)->tag = 3;
  expect("waits for ever");
}
TEST_F(Planted, TagsAreOneTooLow) {
  find(3, 0, Action::kWait, s.x_middle_at, s.qkv_at, 2)->tag = 1;
  expect("");
}
TEST_F(Planted, AMessageIsNotSent) {
  program.of(2, 0).erase(find(2, 0, Action::kWrite, s.hidden_at, s.messages, 1));
  expect("waits for ever");
}
TEST_F(Planted, ABlockSendsBeforeItHasReceived) {
  auto& actions = program.of(0, 0);
  const auto write = find(0, 0, Action::kWrite, s.hidden_at, s.messages, 2);
  const Action moved = *write;
  actions.erase(write);
  actions.insert(find(0, 0, Action::kWait, s.x_at, s.x_middle_at, 1), moved);
  expect("overwrites what is still to be read");
}
TEST_F(Planted, SumsHaveOneBuffer) {
  for (auto& actions : program.warps) {
    for (Action& a : actions) {
      for (int block = 0; block < s.blocks; ++block) {
        const int first = Local(s, block).sums(0);
        if (a.first >= first && a.first < first + 4 * kConsumers) a.first = first + (a.first - first) % kConsumers;
      }
    }
  }
  expect("");
}
TEST_F(Planted, AWarpWithoutColumnsDoesNotWait) {
  for (int block = 0; block < s.blocks; ++block) {
    for (int warp = 2; warp < kConsumers; ++warp) {  // x has 128 columns: two warps
      drop(program.of(block, warp), [&](const Action& a) {
        const bool is_local = a.first >= s.messages;
        return (a.what == Action::kWait || a.what == Action::kRead) && !is_local;
      });
    }
  }
  expect("");
}
TEST_F(Planted, APlaceOfTheRingIsFreedEarly) {
  auto& actions = program.of(1, 5);
  for (size_t i = 1; i < actions.size(); ++i) {  // the word says so before the weights are used
    if (actions[i - 1].what == Action::kUse && actions[i].what == Action::kWrite) std::swap(actions[i - 1], actions[i]);
  }
  auto& producer = program.of(1, kConsumers + 1);
  drop(producer, [&](const Action& a) { return a.what == Action::kWait && a.tag == 4; });
  expect("");
}
TEST_F(Planted, TheWeightsOfAnotherStepAreUsed) {
  const auto at = std::find_if(program.of(1, 2).begin(), program.of(1, 2).end(),
                               [](const Action& a) { return a.what == Action::kUse && a.tag == 4; });
  at->first += 16;
  expect("uses a tile that is not there");
}

// ---- clusters ----

Shares shares(const Model& size, int clusters, int vocab = 300, int layers = 5, int least_steps = 0) {
  return {size.width, size.inner, vocab, layers, clusters, least_steps};
}

TEST(Clusters, AreRightInAnyOrder) {
  int checked = 0;
  for (const Model& size : {Model{64, 256}, {64, 80}, {128, 512}, {192, 640}}) {
    for (const int clusters : {1, 2, 3, 5}) {
      const Shares s = shares(size, clusters);
      if (!s.fits()) continue;
      EXPECT_EQ(fault_in_any_order(program_of(s)), "") << size.width << " on " << clusters;
      ++checked;
    }
  }
  EXPECT_GE(checked, 9);
}

TEST(Clusters, AreRightForGpt2) {
  for (const Model& size : kModels) {
    for (int clusters = 11; clusters <= 16; ++clusters) {
      const Shares s = shares(size, clusters, 50257, 3);
      ASSERT_EQ(s.fits(), size.width < 1600 || clusters >= 13) << size.width << " on " << clusters;
      if (!s.fits()) continue;
      // Of 768 columns a cluster has one head, or the kernel is that of 1024.
      ASSERT_EQ(s.steps * kStepDepth, size.width == 768 && clusters < 12 ? 1024 : size.width);
      EXPECT_EQ(fault_of(program_of(s), static_cast<unsigned>(clusters)), "") << size.width << " on " << clusters;
    }
  }
}

// A head's weights are as many as two units': clusters of 15 have as many of a layer, or one unit more. Of 768 columns
// a head counts as one, and no warp has two tiles.
TEST(Clusters, HaveAlikeShares) {
  for (const Model& size : kModels) {
    const Shares s = shares(size, 15);
    int least_of_all = 1000, most = 0;
    for (int c = 0; c < s.clusters; ++c) {
      const int weights = (size.width == 768 ? 1 : 2) * s.heads_of(c).count() + s.units_of(c).count();
      least_of_all = std::min(least_of_all, weights);
      most = std::max(most, weights);
    }
    EXPECT_LE(most - least_of_all, 1) << size.width;
    for (int w = 0; w < s.clusters * kOfCluster && size.width == 768; ++w) {
      EXPECT_LE(s.tiles(Shares::place(w), Kind::kQkv), 1);
      EXPECT_LE(s.tiles(Shares::place(w), Kind::kFc), 1);
    }
  }
}

// Each weight of each product is one warp's, once, and so is each column of x; each key, each row of the logits.
TEST(Clusters, LeaveNothingOut) {
  struct Case {
    Model size;
    int clusters, least_steps;
  };
  for (const Case& each : {Case{{768, 3072}, 12, 0},
                           {{768, 3072}, 15, 0},
                           {{1600, 6400}, 15, 0},
                           {{1024, 4096}, 16, 0},
                           {{1280, 5120}, 13, 0},
                           {{128, 300}, 2, 0},
                           {{128, 300}, 1, 16},
                           {{64, 80}, 2, 25}}) {
    const Shares s = shares(each.size, each.clusters, 1003, 2, each.least_steps);
    ASSERT_TRUE(s.fits());
    const int warps = s.clusters * kOfCluster;
    std::vector<int> tiles(static_cast<size_t>(up(s.vocab, kGranule)), 0);
    int64_t end = s.streams_at;
    for (int kind = 0; kind < kKinds; ++kind) {
      const Kind which = static_cast<Kind>(kind);
      const int64_t depth = which == Kind::kSecond ? s.inner : s.width;
      const int64_t columns = which == Kind::kQkv ? 3 * s.width : (which == Kind::kFc ? s.inner : s.width);
      std::vector<int> seen(static_cast<size_t>(depth * columns), 0);
      for (int w = 0; w < warps; ++w) {
        const WarpPlace p = Shares::place(w);
        ASSERT_EQ(Shares::number(p), w);
        for (int i = 0; i < s.product_steps(p, which) * kStepBytes / 2; ++i) {
          const StepSpot in_step = spot_in_step(i % (kStepBytes / 2));
          const Shares::Spot spot = s.spot(p, which, i / (kStepBytes / 2), in_step.row, in_step.depth);
          if (spot.column >= 0 && spot.place >= 0) ++seen[static_cast<size_t>(spot.place * columns + spot.column)];
        }
        if (kind > 0) continue;
        EXPECT_EQ(s.stream_at(p), end);
        end += s.stride;
        EXPECT_LE(std::max(s.tiles(p, Kind::kQkv), s.tiles(p, Kind::kFc)), kMostTiles);
        const Range own = s.logit_tiles(p);
        EXPECT_LE((s.layers * s.layer_steps(p) + own.count() * s.steps) * kStepBytes, s.stride);
        for (int tile = own.first; tile < own.last; ++tile) ++tiles[static_cast<size_t>(tile)];
        std::vector<int> columns_of_warp(static_cast<size_t>(s.granules_of(p.index()).count() * kGranule), 0);
        for (size_t i = 0; i < columns_of_warp.size(); ++i) {
          const int granules = s.granules_of(p.index()).count(), group = static_cast<int>(i) / kGranule;
          ++columns_of_warp[static_cast<size_t>(column_in_warp(granules, group, static_cast<int>(i) % kGranule))];
        }
        EXPECT_EQ(columns_of_warp, std::vector<int>(columns_of_warp.size(), 1));
      }
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << s.width << ", " << kind;
    }
    EXPECT_EQ(end, s.bytes());
    EXPECT_EQ(tiles, std::vector<int>(tiles.size(), 1));
  }
  for (const int keys : {0, 1, 63, 512, 1024}) {
    int next = 0;
    for (int index = 0; index < kOfCluster; ++index) {
      EXPECT_EQ(Shares::keys(keys, index).first, next);
      EXPECT_LE(Shares::keys(keys, index).count(), kWarpKeys);
      next = Shares::keys(keys, index).last;
    }
    EXPECT_EQ(next, keys);
  }
}

// A warp's pieces are its whole stream, and lie where who takes them looks for them: in the ring, where nothing is that
// may not have been used yet.
template <int kSteps, int kBatch = 1>
void check_pieces(const Shares& s, const WarpPlace& p) {
  constexpr int kPiece = piece_of(kSteps);
  const int heads = s.heads_of(p.cluster).count(), units = s.units_of(p.cluster).count();
  const int granules = s.granules_of(p.index()).count();
  std::vector<int> of_layer;  // rooms, in steps
  const auto take = [&](int pieces, int steps, int most) {
    of_layer.insert(of_layer.end(), static_cast<size_t>(pieces), exact_room(kSteps) ? steps : most);
  };
  take(s.tiles(p, Kind::kQkv) * (kSteps / kPiece), kPiece, kPiece);
  take(heads, granules, most_granules(kSteps));
  take(s.tiles(p, Kind::kFc) * (kSteps / kPiece), kPiece, kPiece);
  take(granules, units, most_units(kSteps));
  Walk taken;
  struct Room {
    int first, last;
  };
  std::vector<Room> rooms;
  int steps = 0;
  for (NextPiece<kSteps, kBatch> next(s, p); next.index < next.all(); next.go_on()) {
    const int room = (next.index < next.of_layers ? of_layer[next.index % of_layer.size()] : kPiece) * kStepBytes;
    const int first = taken.next(room, ring_bytes(kSteps, kBatch)), last = first + room;
    ASSERT_EQ(next.first, first) << "piece " << next.index;
    ASSERT_LE(next.steps.of_piece * kStepBytes, room);
    ASSERT_LE(last, ring_bytes(kSteps, kBatch));
    ASSERT_LE(next.used.index, next.index);  // or it would wait for itself
    ASSERT_LT(next.index - next.used.index, kMostPieces);
    for (size_t i = next.used.index; i < rooms.size(); ++i) {
      ASSERT_TRUE(rooms[i].last <= first || rooms[i].first >= last) << "piece " << next.index;
    }
    rooms.push_back({first, last});
    steps += next.steps.of_piece;
    if (next.index + 1 == next.of_layers) {
      ASSERT_EQ(steps, s.layers * s.layer_steps(p));
    }
  }
  EXPECT_EQ(steps, s.layers * s.layer_steps(p) + s.logit_tiles(p).count() * kSteps);
  if constexpr (kBatch < most_batch(kSteps)) check_pieces<kSteps, 2 * kBatch>(s, p);
}
TEST(Clusters, PiecesFitTheRing) {
  for (const int least_steps : {0, 16, 20, 25}) {
    for (const Model& size :
         {Model{768, 3072}, Model{1024, 4096}, Model{1280, 5120}, Model{1600, 6400}, Model{64, 64}}) {
      const Shares s = shares(size, size.width == 64 ? 1 : 15, 50257, 3, least_steps);
      ASSERT_TRUE(s.fits());
      for (int w = 0; w < s.clusters * kOfCluster; ++w) {
        const WarpPlace p = Shares::place(w);
        switch (s.steps) {
          case 12: check_pieces<12>(s, p); break;
          case 16: check_pieces<16>(s, p); break;
          case 20: check_pieces<20>(s, p); break;
          default: check_pieces<25>(s, p);
        }
      }
    }
  }
}

// The cluster that has a head.
int of_cluster(const Shares& s, int head) {
  int cluster = 0;
  while (s.heads_of(cluster).last <= head) ++cluster;
  return cluster;
}

class ClusterFaults : public ::testing::Test {
 protected:
  Shares s{128, 512, 67, 6, 3, 0};  // two clusters with heads, one without
  Program program = program_of(s);
  void SetUp() override { ASSERT_EQ(fault_in_any_order(program), ""); }
  void expect(const std::string& says) const {
    const std::string fault = fault_in_any_order(program);
    EXPECT_NE(fault, "");
    EXPECT_NE(fault.find(says), std::string::npos) << fault;
  }
  std::vector<Action>& warp(int cluster, int index) {
    return program.warps[static_cast<size_t>(cluster * kOfCluster + index)];
  }
  ClusterLocal local(int block) const { return {s, block}; }
};

TEST_F(ClusterFaults, AttentionsPartsLieWhereTheMlpsDo) {
  const int of_half = part_at(s, 1, 0, 0, 0);
  for (auto& actions : program.warps) {
    for (Action& a : actions) {
      if (a.first < part_at(s, 0, s.layers, 0, 0) && a.first / of_half % 2 == 1) a.first -= of_half;
    }
  }
  expect("");
}
TEST_F(ClusterFaults, NobodyWaitsForTheNorm) {
  for (int index = 0; index < kOfCluster; ++index) {
    drop(warp(1, index), [&](const Action& a) {
      return a.what == Action::kWait && a.first == local(kClusterBlocks + index / kClusterWarps).norm(0);
    });
  }
  expect("reads what is not there");
}
TEST_F(ClusterFaults, TheNormIsFoundBeforeTheLastMomentsHaveCome) {
  for (size_t block = 0; block < static_cast<size_t>(s.clusters * kClusterBlocks); ++block) {
    drop(program.warps[static_cast<size_t>(s.clusters * kOfCluster) + block],
         [&](const Action& a) { return a.what == Action::kWait; });
  }
  expect("reads what is not there");
}
TEST_F(ClusterFaults, ABlocksWarpsDoNotMeet) {
  for (int index = 0; index < kOfCluster; ++index) {
    drop(warp(of_cluster(s, 0), index), [&](const Action& a) {
      return a.what == Action::kWait &&
             a.first == local(of_cluster(s, 0) * kClusterBlocks + index / kClusterWarps).of_warps(0);
    });
  }
  expect("reads what is not there");
}
TEST_F(ClusterFaults, NoWaitForTheHiddenLayer) {
  for (int index = 0; index < kOfCluster; ++index) {
    drop(warp(1, index), [&](const Action& a) {
      return a.what == Action::kWait && a.first == local(kClusterBlocks + index / kClusterWarps).hidden();
    });
  }
  expect("reads what is not there");
}
TEST_F(ClusterFaults, ABlocksKeysAreNotSent) {
  const int cluster = of_cluster(s, 0);
  drop(warp(cluster, 3), [&](const Action& a) {
    return a.what == Action::kWrite && a.first == local(cluster * kClusterBlocks + 3).attended(0);
  });
  expect("waits for ever");
}
TEST_F(ClusterFaults, AttentionAndMlpHaveOneX) {
  for (auto& actions : program.warps) {
    for (Action& a : actions) {
      for (int block = 0; block < s.clusters * kClusterBlocks; ++block) {
        if (a.first >= local(block).x(1) && a.first < local(block).x(1) + kOfCluster) a.first -= kOfCluster;
      }
    }
  }
  expect("");
}

}  // namespace
}  // namespace kf::decode_step
