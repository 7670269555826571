// The end of an op's rungs.h. Before it stand KF_OP, the op, and KF_RUNGS, the list of its rungs; from them come, for
// each backend, the declarations of what the rungs' files define, and the table. A row of the list:
//   RUNG(v2_fused, always, no_scratch)                          it takes any arguments, and needs no scratch memory
//   RUNG(v2_fused, can_implement, scratch_bytes)                its file also has v2_fused_can_implement, which says
//                                                               why not, and v2_fused_scratch_bytes
//   RUNG(v2_fused, always, no_scratch, "the sum"[, true])       Rung's `rounds`, and its `varies`
// Included once an op, so it has no guard.
#define KF_CHECK_always(name) [](const Args&) { return std::string(); }
#define KF_CHECK_can_implement(name) name##_can_implement
#define KF_SCRATCH_no_scratch(name) nullptr
#define KF_SCRATCH_scratch_bytes(name) name##_scratch_bytes
#define KF_DECLARE(name, ...)                         \
  void name(const Args& args, void* stream);          \
  std::string name##_can_implement(const Args& args); \
  int64_t name##_scratch_bytes(const Args& args);
#define KF_ROW(name, check, scratch, ...) \
  {#name, name, KF_CHECK_##check(name), KF_SCRATCH_##scratch(name), __VA_ARGS__},
#define KF_TABLE(backend)                                     \
  namespace kf::backend::KF_OP {                              \
  using kf::KF_OP::Args;                                      \
  KF_RUNGS(KF_DECLARE)                                        \
  inline Rungs<Args> rungs() {                                \
    static constexpr Rung<Args> kRows[] = {KF_RUNGS(KF_ROW)}; \
    return kRows;                                             \
  }                                                           \
  }

#ifdef KF_BACKEND  // kernels are compiled twice, as gpu and as emulated, and see their own table; host files see both
KF_TABLE(KF_BACKEND)
#else
KF_TABLE(emulated)
#ifdef KF_WITH_CUDA
KF_TABLE(gpu)
#else
namespace kf::gpu::KF_OP {
inline Rungs<kf::KF_OP::Args> rungs() { return {}; }
}  // namespace kf::gpu::KF_OP
#endif
#endif

#undef KF_CHECK_always
#undef KF_CHECK_can_implement
#undef KF_SCRATCH_no_scratch
#undef KF_SCRATCH_scratch_bytes
#undef KF_DECLARE
#undef KF_ROW
#undef KF_TABLE
#undef KF_RUNGS
#undef KF_OP
