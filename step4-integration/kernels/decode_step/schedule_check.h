// Whether a schedule works: its blocks are played in some order, and every access to a message is looked at.
//
// Plain C++, for tests. A block is a list of actions, in the order in which it does them: it waits for a message of a
// tag, reads, writes, has weights brought into a place of its ring, uses them. A list that waits too little reads what
// is not there; one that is overtaken reads what is of the next layer; one that waits for too much never ends.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "schedule.h"

namespace kf::decode_step {

struct Action {
  enum What { kWait, kRead, kWrite, kBring, kUse } what;
  int first, count;  // messages, or vectors of the ring
  int tag;           // the layer + 1; of the ring, the step
};
using Program = std::vector<std::vector<Action>>;  // of each block

// What the kernel does, by the same jobs. `used`: splits of the keys that are in use.
inline Program program_of(const Schedule& s, int used) {
  Program program(s.blocks);
  const int of_width = s.width / kOfMessage, of_head = s.head_dim / kOfMessage, steps = s.steps_of_layer();
  for (int block = 0; block < s.blocks; ++block) {
    std::vector<Action>& to = program[block];
    const auto receive = [&](int first, int count, int tag) {
      to.push_back({Action::kWait, first, count, tag});
      to.push_back({Action::kRead, first, count, tag});
    };
    const auto vectors = [&](int step) {
      return step < s.layers * steps ? s.vectors_of(step % steps) : s.vectors[kKinds];
    };
    int asked = 0, asked_at = 0, at = 0, step = 0;
    const auto ask = [&] {
      if (asked < s.steps()) {
        to.push_back({Action::kBring, asked_at, vectors(asked), asked});
        asked_at = (asked_at + vectors(asked)) % s.ring;
      }
      ++asked;
    };
    const auto use = [&] { to.push_back({Action::kUse, at, vectors(step), step}); };
    const auto end = [&] {
      ask();
      at = (at + vectors(step++)) % s.ring;
    };
    for (int i = 0; i < s.ahead; ++i) ask();
    for (int layer = 0; layer < s.layers; ++layer) {
      const int tag = layer + 1;
      for (int i = 0; i < steps; ++i) {
        const Job job = s.job(block, i);
        const bool first = i == s.begin[static_cast<int>(job.kind)];
        const int columns = job.first * kGranule / kOfMessage, count = job.count * kGranule / kOfMessage;
        use();
        if (job.kind == Kind::kQkv) {
          if (first && layer > 0) receive(s.second_at(), s.parts * of_width, tag - 1);
          to.push_back({Action::kWrite, s.qkv_at() + columns, count, tag});
        } else if (job.kind == Kind::kFc) {
          if (first) receive(s.projected_at(), s.parts * of_width, tag);
          to.push_back({Action::kWrite, s.hidden_at() + columns, count, tag});
        } else if (job.count > 0 && job.kind == Kind::kAttention) {
          if (job.depth_first < used) {
            for (int part = 0; part < (job.depth_first == used - 1 ? 3 : 1); ++part) {
              receive(s.qkv_at() + (part * s.heads + job.first) * of_head, of_head, tag);
            }
            const int at_split = (job.first * s.splits + job.depth_first) * of_head;
            to.push_back({Action::kWrite, s.attended_at() + at_split, of_head, tag});
          }
        } else if (job.count > 0) {
          const int from = job.depth_first / kOfMessage, depth = job.depth / kOfMessage;
          if (job.kind == Kind::kProjection) {
            for (int number = from; number < from + depth; ++number) {
              for (int split = 0; split < used; ++split) {
                const int at_split = (number / of_head * s.splits + split) * of_head;
                receive(s.attended_at() + at_split + number % of_head, 1, tag);
              }
            }
          } else {
            receive(s.hidden_at() + from, depth, tag);
          }
          const int added = job.kind == Kind::kProjection ? s.projected_at() : s.second_at();
          to.push_back({Action::kWrite, added + job.depth_first / job.depth * of_width + columns, count, tag});
        }
        end();
      }
    }
    receive(s.second_at(), s.parts * of_width, s.layers);
    for (int i = 0; i < s.logit_steps; ++i) {
      use();
      end();
    }
  }
  return program;
}

// Plays the blocks in an order that `seed` chooses, with 0 each as far as it comes; what is wrong, or "".
inline std::string fault_of(const Program& program, int messages, int ring, unsigned seed) {
  std::vector<int> tag(messages, 0);
  std::vector<std::vector<int>> readers(messages);  // [message][tag]: how many have not read it yet
  for (const auto& actions : program) {
    for (const Action& a : actions) {
      if (a.what != Action::kRead) continue;
      for (int m = a.first; m < a.first + a.count; ++m) {
        if (static_cast<int>(readers[m].size()) <= a.tag) readers[m].resize(a.tag + 1, 0);
        ++readers[m][a.tag];
      }
    }
  }
  std::vector<size_t> at(program.size(), 0);
  std::vector<std::vector<int>> held(program.size(), std::vector<int>(ring, -1));  // by which step, of the ring
  std::mt19937 random(seed);
  const auto text = [](size_t block, const char* what, const Action& a) {
    return "block " + std::to_string(block) + " " + what + " (" + std::to_string(a.first) + ", tag " +
           std::to_string(a.tag) + ")";
  };
  for (size_t done = 0; done < program.size();) {
    std::vector<size_t> able;
    done = 0;
    for (size_t b = 0; b < program.size(); ++b) {
      if (at[b] == program[b].size()) {
        ++done;
        continue;
      }
      const Action& a = program[b][at[b]];
      bool there = true;
      if (a.what == Action::kWait) {
        for (int m = a.first; m < a.first + a.count; ++m) {
          if (tag[m] > a.tag) return text(b, "is overtaken: what it waits for is gone", a);
          there = there && tag[m] == a.tag;
        }
      }
      if (there) able.push_back(b);
    }
    if (done == program.size()) break;
    if (able.empty()) {
      for (size_t b = 0; b < program.size(); ++b) {
        if (at[b] < program[b].size()) return text(b, "waits for ever", program[b][at[b]]);
      }
    }
    const size_t b = able[seed == 0 ? 0 : random() % able.size()];
    // One block goes as far as it comes, or with a seed a few actions.
    for (size_t turns = seed == 0 ? ~size_t{0} : 1 + random() % 7; turns > 0 && at[b] < program[b].size(); --turns) {
      const Action& a = program[b][at[b]];
      bool there = true;
      for (int m = a.first; m < a.first + a.count; ++m) {
        switch (a.what) {
          case Action::kWait: there = there && tag[m] == a.tag; break;
          case Action::kRead:
            if (tag[m] != a.tag) return text(b, "reads what is not there", a);
            --readers[m][a.tag];
            break;
          case Action::kWrite:
            if (tag[m] >= a.tag) return text(b, "writes again", a);
            for (int older = 0; older < a.tag && older < static_cast<int>(readers[m].size()); ++older) {
              if (readers[m][older] > 0) return text(b, "overwrites what is still to be read", a);
            }
            tag[m] = a.tag;
            break;
          case Action::kBring:
            if (held[b][m % ring] >= 0) return text(b, "brings weights where others are", a);
            held[b][m % ring] = a.tag;
            break;
          case Action::kUse:
            if (held[b][m % ring] != a.tag) return text(b, "uses weights that are not there", a);
            held[b][m % ring] = -1;
            break;
        }
      }
      if (!there) break;
      ++at[b];
    }
  }
  return "";
}

}  // namespace kf::decode_step
