// The schedule of decode_step v3_persistent: it is right for any number of blocks, and each of twelve faults is found.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "kernels/decode_step/schedule_check.h"

namespace kf::decode_step {
namespace {

constexpr int kShared = 227 * 1024;

std::string fault_in_any_order(const Program& program, const Schedule& s) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const std::string fault = fault_of(program, s.messages(), s.ring, seed);
    if (!fault.empty()) return fault;
  }
  return "";
}

TEST(Schedule, IsRightForAnyNumberOfBlocks) {
  struct Size {
    int width, inner, heads, vocab;
  };
  for (const Size& size : {Size{64, 256, 1, 67}, {64, 8, 8, 5}, {80, 200, 5, 300}, {128, 512, 16, 1000}}) {
    for (int processors : {1, 2, 3, 5, 8, 11, 16, 31, 132}) {
      const Schedule s(size.width, size.inner, size.heads, size.width / size.heads, size.vocab, 3, processors, kShared);
      if (s.steps_of_layer() > kMostJobs) continue;  // refused
      ASSERT_GT(s.ahead, 0);
      for (const int used : {1, s.splits}) {
        EXPECT_EQ(fault_of(program_of(s, used), s.messages(), s.ring, 0), "") << size.width << " on " << processors;
        EXPECT_EQ(fault_of(program_of(s, used), s.messages(), s.ring, 7), "") << size.width << " on " << processors;
      }
    }
  }
}

TEST(Schedule, IsRightForGpt2) {
  for (const int processors : {78, 108, 114, 132, 148}) {
    const Schedule small(768, 3072, 12, 64, 50257, 12, processors, kShared);
    EXPECT_EQ(fault_of(program_of(small, small.splits), small.messages(), small.ring, 0), "") << processors;
    EXPECT_GE(small.ahead, 4) << processors;
  }
}

// Each column of each product belongs to one block, and each of the depth.
TEST(Schedule, LeavesNothingOut) {
  for (const int blocks : {1, 7, 24, 100, 132}) {
    const Schedule s(768, 3072, 12, 64, 50257, 12, blocks, kShared);
    std::vector<std::vector<int>> done(kKinds);
    for (int k = 0; k < kKinds; ++k) done[k].resize(k == 1 ? s.heads * s.splits : s.messages());
    int rows = 0;
    for (int block = 0; block < s.blocks; ++block) {
      rows += s.logits_of(block).count();
      for (int step = 0; step < s.steps_of_layer(); ++step) {
        const Job job = s.job(block, step);
        const int kind = static_cast<int>(job.kind);
        if (job.kind == Kind::kAttention) {
          if (job.count > 0) ++done[kind][job.first * s.splits + job.depth_first];
          continue;
        }
        for (int g = 0; g < job.count; ++g) ++done[kind][(job.depth_first / job.depth) * s.width + job.first + g];
      }
    }
    EXPECT_EQ(rows, s.vocab);
    for (int kind : {0, 3}) {
      const int granules = (kind == 0 ? 3 * s.width : s.inner) / kGranule;
      for (int g = 0; g < granules; ++g) ASSERT_EQ(done[kind][g], 1) << blocks << ", " << g;
    }
    for (int kind : {2, 4}) {
      for (int part = 0; part < s.parts; ++part) {
        for (int g = 0; g < s.width / kGranule; ++g) ASSERT_EQ(done[kind][part * s.width + g], 1) << blocks;
      }
    }
    for (const int item : done[1]) ASSERT_EQ(item, 1) << blocks;
  }
}

// ---- faults ----

class Planted : public ::testing::Test {
 protected:
  Schedule s{64, 256, 4, 16, 67, 3, 8, kShared};
  Program program;
  void SetUp() override {
    s.ring = 2 * *std::max_element(s.vectors, s.vectors + kKinds + 1);  // so small that it goes round
    s.ahead = 1;
    program = program_of(s, s.splits);
    ASSERT_EQ(fault_in_any_order(program, s), "");
  }
  // Of block `block`, the number-th action of this kind from message `first` on, below `last`.
  std::vector<Action>::iterator find(int block, Action::What what, int first, int last, int tag) {
    auto& actions = program[block];
    const auto at = std::find_if(actions.begin(), actions.end(), [&](const Action& a) {
      return a.what == what && a.first >= first && a.first < last && a.tag == tag;
    });
    EXPECT_NE(at, actions.end());
    return at;
  }
  void expect(const std::string& says) {
    EXPECT_NE(fault_in_any_order(program, s).find(says), std::string::npos) << fault_in_any_order(program, s);
  }
  void remove_wait(int first, int last, int tag) {
    for (int block = 0; block < s.blocks; ++block) {
      auto& actions = program[block];
      for (size_t i = actions.size(); i-- > 0;) {
        const Action& a = actions[i];
        if (a.what == Action::kWait && a.first >= first && a.first < last && a.tag == tag)
          actions.erase(actions.begin() + i);
      }
    }
  }
};

TEST_F(Planted, NoWaitForQkv) {
  remove_wait(s.qkv_at(), s.attended_at(), 2);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitForAttention) {
  remove_wait(s.attended_at(), s.projected_at(), 1);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitForTheProjection) {
  remove_wait(s.projected_at(), s.hidden_at(), 2);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitForFc) {
  remove_wait(s.hidden_at(), s.second_at(), 3);
  expect("reads what is not there");
}
TEST_F(Planted, NoWaitBeforeTheLogits) {
  remove_wait(s.second_at(), s.messages(), 3);
  expect("reads what is not there");
}
TEST_F(Planted, TagsAreOneTooHigh) {
  find(3, Action::kWait, s.hidden_at(), s.second_at(), 2)->tag = 3;
  expect("waits for ever");
}
TEST_F(Planted, TagsAreOneTooLow) {
  find(3, Action::kWait, s.projected_at(), s.hidden_at(), 2)->tag = 1;
  expect("");
  EXPECT_NE(fault_in_any_order(program, s), "");
}
TEST_F(Planted, AMessageIsNotSent) {
  program[2].erase(find(2, Action::kWrite, s.hidden_at(), s.second_at(), 1));
  expect("waits for ever");
}
TEST_F(Planted, AMessageIsSentTwice) {
  const auto at = find(2, Action::kWrite, s.qkv_at(), s.attended_at(), 1);
  program[2].insert(at, Action(*at));
  expect("writes again");
}
TEST_F(Planted, ABlockSendsBeforeItHasReceived) {
  auto& actions = program[0];
  const auto write = find(0, Action::kWrite, s.hidden_at(), s.second_at(), 2);
  const Action moved = *write;
  actions.erase(write);
  actions.insert(find(0, Action::kWait, s.projected_at(), s.hidden_at(), 1), moved);
  EXPECT_NE(fault_in_any_order(program, s), "");
}
TEST_F(Planted, APlaceOfTheRingIsFreedEarly) {
  auto& actions = program[1];
  const auto use = std::find_if(actions.begin(), actions.end(),
                                [](const Action& a) { return a.what == Action::kUse && a.tag == 1; });
  const auto bring = std::find_if(actions.begin(), actions.end(),
                                  [](const Action& a) { return a.what == Action::kBring && a.tag == 3; });
  const Action moved = *bring;
  actions.erase(bring);
  actions.insert(actions.begin() + (use - actions.begin()) - 2, moved);
  EXPECT_NE(fault_in_any_order(program, s), "");
}
TEST_F(Planted, WeightsOfAnotherStepAreUsed) {
  auto& actions = program[1];
  std::find_if(actions.begin(), actions.end(), [](const Action& a) {
    return a.what == Action::kUse && a.tag == 4;
  })->first += 1;
  expect("uses weights that are not there");
}

}  // namespace
}  // namespace kf::decode_step
