// Faults of the processor in kernels, and accesses to pages that are watched. What is neither is handed on.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <thread>

#include "errors.h"
#include "memory.h"

extern "C" {
void kf_simt_watch(void* begin, std::size_t bytes);
std::size_t kf_simt_seen(char* text, std::size_t size);
void kf_simt_unwatch(void);
}

namespace {

const auto kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

// Pages of which every one is watched as a region.
class Pages {
 public:
  explicit Pages(std::size_t count) : count_(count) {
    void* const memory = mmap(nullptr, count * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    begin_ = static_cast<char*>(memory);
    for (std::size_t i = 0; i < count; ++i) kf_simt_watch(begin_ + i * kPage, kPage);
  }
  ~Pages() {
    kf_simt_unwatch();
    munmap(begin_, count_ * kPage);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  int* at(std::size_t page, std::size_t offset = 0) { return reinterpret_cast<int*>(begin_ + page * kPage + offset); }

 private:
  char* begin_;
  std::size_t count_;
};

std::string seen(std::size_t expected) {
  char text[2000] = "?";
  EXPECT_EQ(kf_simt_seen(text, sizeof(text)), expected) << text;
  return text;
}

std::string pointer(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

__global__ void read_it(const int* from, int* to) {
  if (blockIdx.x == 1 && threadIdx.x == 35) *to = *from + 1;
}
__global__ void write_it(int* to) {
  __syncthreads();
  if (threadIdx.y == 2) *to = 5;
}

TEST(WatchedPages, AnEmulatedThreadIsNamed) {
  Pages pages(3);
  EXPECT_EQ(seen(0), "");
  int sum = 0;
  read_it<<<2, 64>>>(pages.at(1, 16), &sum);
  EXPECT_EQ(sum, 1) << "the access went on";
  EXPECT_EQ(seen(1), "region 1: reads " + pointer(pages.at(1, 16)) +
                         ", 16 bytes into it, by kernel read_it, block (1,0,0), thread (35,0,0)\n");
  write_it<<<1, dim3(1, 3)>>>(pages.at(2, kPage - 4));
  EXPECT_EQ(seen(1), "region 2: writes " + pointer(pages.at(2, kPage - 4)) + ", " + std::to_string(kPage - 4) +
                         " bytes into it, by kernel write_it, block (0,0,0), thread (0,2,0)\n");
  EXPECT_EQ(*pages.at(2, kPage - 4), 5);
  EXPECT_EQ(seen(0), "");
}

TEST(WatchedPages, AnyOtherThreadIsFound) {
  Pages pages(3);
  std::thread([&] { *pages.at(2, 8) = 1; }).join();
  const volatile int value = *pages.at(0);
  EXPECT_EQ(value, 0);
  const std::string text = seen(2);
  EXPECT_EQ(text, "region 0: reads " + pointer(pages.at(0)) + ", 0 bytes into it, by a thread that is not emulated\n" +
                      "region 2: writes " + pointer(pages.at(2, 8)) +
                      ", 8 bytes into it, by a thread that is not emulated\n");
  *pages.at(0, 64) = 2;  // open by now
  EXPECT_EQ(seen(0), "");
}

TEST(WatchedPages, ShortTextsAreCut) {
  Pages pages(1);
  *pages.at(0) = 1;
  char text[10];
  EXPECT_EQ(kf_simt_seen(text, sizeof(text)), 1u);
  EXPECT_STREQ(text, "region 0:");
  EXPECT_EQ(kf_simt_seen(nullptr, 0), 0u);
}

TEST(WatchedPages, ManyThreadsAtOnce) {
  for (int round = 0; round < 20; ++round) {
    Pages pages(4);
    std::thread threads[8];
    for (int t = 0; t < 8; ++t) threads[t] = std::thread([&, t] { *pages.at(t % 4, 4 * t) = t; });
    for (std::thread& thread : threads) thread.join();
    seen(4);
  }
}

TEST(WatchedPages, NumbersBeginAnew) {
  {
    const Pages pages(5);
  }
  Pages pages(1);
  *pages.at(0) = 1;
  EXPECT_EQ(seen(1).substr(0, 9), "region 0:");
}

TEST(HandedOn, ToTheHandlerFromBefore) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";  // a process in which nothing has been called yet
  const auto run = [] {
    struct sigaction action{};
    action.sa_sigaction = [](int, siginfo_t* info, void*) { _exit(info->si_addr == nullptr ? 6 : 7); };
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    Pages pages(1);
    *pages.at(0) = 1;
    auto* const other = static_cast<int*>(mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    *other = 1;
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(7), "");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(KF_SIMT_TSAN)  // which have handlers of their own
TEST(HandedOn, OrTheProcessEnds) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto run = [] {
    Pages pages(1);
    munmap(pages.at(0), kPage);
    kf_simt_unwatch();
    *pages.at(0) = 1;
  };
  EXPECT_EXIT(run(), testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT((kf_simt_watch(nullptr, 0), raise(SIGBUS)), testing::KilledBySignal(SIGBUS), "");
}
#endif

// What ends a kernel. The text has the line: these tests are compiled with it.

template <class Launch>
void expect_error(Launch launch, std::initializer_list<std::string> parts) {
  for (int round = 0; round < 2; ++round) {  // and again: the runtime is usable after an error
    test::expect_error(launch, parts);
  }
}

// A sanitizer says it itself, or its own accesses come first.
#if !defined(__SANITIZE_ADDRESS__) && !defined(KF_SIMT_TSAN)
struct Row {
  int numbers[16];
};
__global__ void write_one(int* at) {
  if (threadIdx.x == 33) *at = 1;
}
__global__ void add_field(const Row* row, int* sum) { *sum += row->numbers[5]; }
__global__ void copy_row(Row* to, const Row* from) { *to = *from; }
__global__ void copy_many(char* to, const char* from, int bytes) { memcpy(to, from, bytes); }
__global__ void call(int (*function)(int), int* out) { *out = function(1); }
__global__ void copy_vector(int4* to, const int4* from) { *to = *from; }

TEST(Fault, ThroughNull) {
  expect_error([] { write_one<<<dim3(1, 2), 64>>>(nullptr); },
               {"kernel write_one, block (0,", "thread (33,0,0): writes to 0x0 at ",
                "fault_test.cu:", ", through a null pointer"});
  int sum = 0;
  expect_error([&] { add_field<<<1, 1>>>(nullptr, &sum); },
               {"kernel add_field", ": reads 0x14 at ", ", through a null"});
  Row row{};
  expect_error([&] { copy_row<<<1, 1>>>(&row, nullptr); }, {"kernel copy_row", ": reads 0x"});
}

TEST(Fault, InAFunctionOfTheLibrary) {
  char local[64];
  const char* volatile none = nullptr;  // or g++ sees it
  expect_error([&] { copy_many<<<1, 1>>>(local, static_cast<const char*>(none), 64); },
               {"kernel copy_many, block (0,0,0), thread (0,0,0): reads 0x", "through a null pointer"});
}

TEST(Fault, WhereNoMemoryIs) {
  void* const page = mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expect_error([&] { write_one<<<1, 64>>>(static_cast<int*>(page)); },
               {": writes to " + pointer(page) + " at ", ", where no memory is"});
  munmap(page, kPage);
  int sum = 0;
  expect_error([&] { add_field<<<1, 1>>>(static_cast<Row*>(page), &sum); },
               {": reads " + pointer(static_cast<char*>(page) + 20) + " at ", ", where no memory is"});
  int* const nowhere = reinterpret_cast<int*>(std::uintptr_t{1} << 62);
  expect_error([&] { write_one<<<1, 64>>>(nowhere); }, {"kernel write_one", "no memory"});
}

TEST(Fault, OfAFunctionPointer) {
  int out = 0;
  expect_error([&] { call<<<1, 1>>>(nullptr, &out); },
               {"kernel call", "calls a function at 0x0 at ", ", through a null"});
}

#ifdef __x86_64__
TEST(Fault, OfAVectorAtAnOddAddress) {
  alignas(16) int numbers[12] = {};
  expect_error([&] { copy_vector<<<1, 1>>>(reinterpret_cast<int4*>(numbers), reinterpret_cast<int4*>(numbers + 1)); },
               {"kernel copy_vector", ": reads " + pointer(numbers + 1) + " at ",
                ", which is not aligned as its vector must be"});
}
#endif
#endif

// Operations that C++ leaves undefined. By checks of the compiler here; without them the processor says less.
__global__ void divide(const int* a, const int* b, int* out) { out[threadIdx.x] = a[threadIdx.x] / b[threadIdx.x]; }
template <class T>
__global__ void divide_as(T a, T b, T* out) {
  out[0] = a / b;
  out[1] = a % b;
}
__global__ void shift(int x, int by, int* out) {
  out[0] = x << by;
  out[1] = x >> by;
}
__global__ void shift_long(unsigned long long x, int by, unsigned long long* out) { out[0] = x << by; }
__global__ void convert(float x, unsigned char* bytes, int* out) {
  if (bytes != nullptr) bytes[threadIdx.x] = x;
  if (out != nullptr) out[threadIdx.x] = x;
}

TEST(Undefined, DivisionByZero) {
  test::Memory<int> a(3, 7), b(3, 2), out(3);
  b[2] = 0;
  expect_error([&] { divide<<<1, 3>>>(a.get(), b.get(), out.get()); },
               {"kernel divide, block (", "thread (2,0,0): divides 7 by 0 at ", "fault_test.cu:"});
  divide<<<1, 2>>>(a.get(), b.get(), out.get());
  EXPECT_EQ(out[0], 3);
#ifdef __x86_64__
  expect_error([&] { divide_as<<<1, 1>>>(INT_MIN, -1, out.get()); }, {"kernel divide_as", "by -1"});
#endif
}

TEST(Undefined, ShiftsByTheWidth) {
  test::Memory<int> out(2);
  expect_error(
      [&] { shift<<<1, 1>>>(-5, 33, out.get()); },
      {"kernel shift, block (0,0,0), thread (0,0,0): shifts -5, an `int` of 32 bits, by 33 at ", "fault_test.cu:"});
  expect_error([&] { shift<<<1, 1>>>(-5, -1, out.get()); }, {"by -1 at "});
  test::Memory<unsigned long long> longs(1);
  expect_error([&] { shift_long<<<1, 1>>>(~0ull, 64, longs.get()); },
               {"shifts 18446744073709551615, an `long long unsigned int` of 64 bits, by 64"});
  shift<<<1, 1>>>(-5, 31, out.get());
  EXPECT_EQ(out[1], -1);
}

TEST(Undefined, ConversionsThatAreNoCasts) {
  test::Memory<int> out(1);
  test::Memory<unsigned char> bytes(1);
  expect_error([&] { convert<<<1, 1>>>(1e10f, nullptr, out.get()); },
               {"kernel convert", "converts 1e+10 to `int`, where it has no place, at ", "fault_test.cu:"});
  expect_error([&] { convert<<<1, 1>>>(NAN, nullptr, out.get()); }, {"converts nan to `int`"});
  expect_error([&] { convert<<<1, 1>>>(-300.0f, bytes.get(), nullptr); }, {"converts -300 to `unsigned char`"});
  convert<<<1, 1>>>(300.0f, bytes.get(), out.get());  // a GPU takes the low bits of 300 too
  EXPECT_EQ(bytes[0], 44);
  EXPECT_EQ(out[0], 300);
}

// With KF_SIMT_UNDEFINED=warn.
class Warned {
 public:
  Warned() {
    setenv("KF_SIMT_UNDEFINED", "warn", 1);
    testing::internal::CaptureStderr();
  }
  ~Warned() { unsetenv("KF_SIMT_UNDEFINED"); }
  std::string text() { return testing::internal::GetCapturedStderr(); }
};

#ifdef __x86_64__
template <class T>
void expect_quotient(T a, T b, T quotient, T rest) {
  test::Memory<T> out(2);
  Warned warned;
  divide_as<<<1, 1>>>(a, b, out.get());
  EXPECT_EQ(out[0], quotient) << a << " / " << b;
  EXPECT_EQ(out[1], rest) << a << " % " << b;
  warned.text();
}

// What an H200 gives.
TEST(Undefined, DivisionsGiveAGpusResult) {
  expect_quotient(7, 0, -1, 7);
  expect_quotient(-7, 0, -1, -7);
  expect_quotient(0, 0, -1, 0);
  expect_quotient(INT_MIN, -1, INT_MIN, 0);
  expect_quotient(7u, 0u, UINT_MAX, 7u);
  expect_quotient(7ll, 0ll, 0xffffffffll, 7ll);
  expect_quotient(-7ll, 0ll, -1ll, -7ll);
  expect_quotient(LLONG_MIN, -1ll, LLONG_MIN, 0ll);
  expect_quotient(1ull << 40, 0ull, ~0ull, 1ull << 40);
}
#endif

TEST(Undefined, TheHostIsLeftAlone) {
  Warned warned;
  const volatile int by = 33;
  const volatile float large = 1e10f;
  volatile int result = 1 << by;
  result = static_cast<int>(large);
  static_cast<void>(result);
  EXPECT_EQ(warned.text(), "");
}

}  // namespace
