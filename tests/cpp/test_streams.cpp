// Requirements of a process that runs for months: bounded kept memory, calls of many threads on one
// stream, and first uses during another thread's capture. Uses fake_cuda.hpp. The library's state
// lives as long as the program, so each test has a GPU of its own.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cutlass_attn.hpp"
#include "fake_cuda.hpp"
#include "mask_maps.hpp"
#include "runtime/kept.hpp"

using namespace cutlass_attn;

namespace {

int64_t count(std::vector<fake::Call> const& calls, std::string const& name) {
  return std::count_if(calls.begin(), calls.end(),
                       [&](fake::Call const& call) { return call.name == name; });
}

std::string names(std::vector<fake::Call> const& calls) {
  std::string text;
  for (fake::Call const& call : calls) text += call.name + " ";
  return text;
}

// A few queries over many keys, which blocks share. The operands' addresses are never read.
Problem decode(int batch = 1) {
  Problem p;
  p.set_dtype(DType::kFloat16);
  p.batch = batch;
  p.num_heads_q = p.num_heads_kv = 1;
  p.seq_q.seqlen = 1;
  p.seq_k.seqlen = 4096;
  p.head_dim = p.head_dim_v = 64;
  p.num_splits = 4;
  int64_t address = int64_t(1) << 40;
  for (auto [operand, rows] : {std::pair(&p.q, 1), {&p.k, 4096}, {&p.v, 4096}, {&p.o, 1}}) {
    operand->data = reinterpret_cast<void*>(address += int64_t(1) << 40);
    operand->row_stride = 64;
    operand->batch_stride = operand->head_stride = int64_t(64) * rows;
  }
  return p;
}

LaunchOptions on(int device_index, void* stream) {
  LaunchOptions options;
  options.device = Device::kCuda;
  options.device_index = device_index;
  options.stream = stream;
  options.kernel = "sm80/decode";
  return options;
}

// Memory like that of a caller's allocator: nobody else has it.
Workspace allocated(int64_t bytes) {
  static std::atomic<uintptr_t> next{uintptr_t(1) << 44};
  fake::record("allocate");
  return {reinterpret_cast<void*>(next.fetch_add((bytes + 511) / 512 * 512)), bytes};
}

// CHECK_EQ would make the call twice.
void run_call(Problem const& p, LaunchOptions const& options) {
  Status const status = attention_forward(p, options);
  CHECK_EQ(status.message, "");
}

}  // namespace

TEST(kept_memory_has_a_bound) {
  constexpr int kGpu = 1;
  fake::take_calls();
  CHECK_EQ(kept_bytes(kGpu), 0);
  std::set<void*> zeros, data;
  std::vector<fake::Stream*> streams;
  for (int i = 0; i < 10000; ++i) {
    streams.push_back(fake::new_stream());
    Workspace const kept = kept_workspace(kGpu, streams[size_t(i)], 1 << 20);
    CHECK_EQ(kept.bytes, i < Kept::kDataStreams ? Kept::kDataBytes
                         : i < Kept::kStreams   ? Kept::kSlotDataBytes
                                                : 0);
    CHECK_EQ(kept.zeros_bytes, i < Kept::kStreams ? Kept::kZerosBytes : 0);
    if (kept.zeros == nullptr) continue;
    CHECK(zeros.insert(kept.zeros).second && data.insert(kept.data).second);
    CHECK_EQ(reinterpret_cast<uintptr_t>(kept.data) % 256, 0u);
    CHECK_EQ(reinterpret_cast<uintptr_t>(kept.zeros) % 256, 0u);
  }
  CHECK_EQ(kept_bytes(kGpu), Kept::kMaxBytes);
  CHECK_EQ(Kept::kMaxBytes, 18 << 20);
  // Each stream's counters are zeroed once, on that stream, and nothing else is.
  std::vector<fake::Call> const calls = fake::take_calls();
  int64_t bytes = 0;
  std::set<void*> zeroed;
  for (fake::Call const& call : calls) {
    if (call.name == "cudaMalloc") bytes += call.bytes;
    if (call.name != "cudaMemsetAsync") continue;
    CHECK(call.stream == streams[zeroed.size()]);
    CHECK_EQ(call.bytes, Kept::kZerosBytes);
    zeroed.insert(call.address);
  }
  CHECK(zeroed == zeros);
  CHECK_EQ(bytes, Kept::kMaxBytes);
  CHECK_EQ(count(calls, "cudaFree"), 0);
  // Memory of different streams does not overlap.
  std::vector<std::pair<uintptr_t, int64_t>> parts;
  for (int i = 0; i < Kept::kStreams; ++i) {
    Workspace const kept = kept_workspace(kGpu, streams[size_t(i)], 0);
    parts.push_back({reinterpret_cast<uintptr_t>(kept.zeros), kept.zeros_bytes});
    parts.push_back({reinterpret_cast<uintptr_t>(kept.data), kept.bytes});
  }
  std::sort(parts.begin(), parts.end());
  for (size_t i = 1; i < parts.size(); ++i) {
    CHECK(parts[i - 1].first + uintptr_t(parts[i - 1].second) <= parts[i].first);
  }
}

TEST(memory_that_is_short_is_not_asked_for_again_and_again) {
  constexpr int kGpu = 2;
  fake::Stream* const stream = fake::new_stream();
  fake::state().has_memory = false;
  CHECK(kept_workspace(kGpu, stream, 0).zeros == nullptr);
  CHECK_EQ(kept_bytes(kGpu), 0);
  fake::state().has_memory = true;
  CHECK(kept_workspace(kGpu, stream, 0).zeros != nullptr);
  fake::state().has_memory = false;
  fake::take_calls();
  for (int i = 0; i < 100; ++i) {
    CHECK_EQ(kept_workspace(kGpu, stream, 1 << 20).bytes, Kept::kSlotDataBytes);
  }
  std::vector<fake::Call> const calls = fake::take_calls();
  CHECK_EQ(count(calls, "cudaMalloc"), Kept::kDataStreams);
  fake::state().has_memory = true;
  CHECK_EQ(kept_bytes(kGpu), Kept::kStreams * Kept::kSlotBytes);
}

TEST(a_captured_stream_gets_nothing) {
  constexpr int kGpu = 3;
  fake::Stream* const stream = fake::new_stream();
  for (bool const is_captured : {false, true, false}) {
    stream->is_captured = is_captured;
    CHECK_EQ(kept_workspace(kGpu, stream, 0).zeros == nullptr, is_captured);
  }
  // A captured call uses memory that the graph owns, including counters.
  stream->is_captured = true;
  LaunchOptions options = on(kGpu, stream);
  options.allocate = allocated;
  fake::take_calls();
  run_call(decode(), options);
  std::vector<fake::Call> const calls = fake::take_calls();
  CHECK_EQ(count(calls, "allocate"), 1);
  CHECK_EQ(count(calls, "cudaMemsetAsync"), 1);
  CHECK_EQ(count(calls, "cudaLaunchKernel"), 1);
}

TEST(a_call_makes_three_driver_calls) {
  constexpr int kGpu = 4;
  LaunchOptions options = on(kGpu, fake::new_stream());
  run_call(decode(), options);
  fake::take_calls();
  run_call(decode(), options);
  std::string made = names(fake::take_calls());
  CHECK_EQ(made, "cudaStreamIsCapturing cudaStreamGetId cudaLaunchKernel ");
  // With memory of the caller and kept counters, nothing more is kept.
  Problem const large = decode(500);
  CHECK(attention_forward(large, options).message.find("the call needs a workspace of ") == 0);
  options.allocate = allocated;
  fake::take_calls();
  run_call(large, options);
  made = names(fake::take_calls());
  CHECK_EQ(made, "cudaStreamIsCapturing cudaStreamGetId allocate cudaLaunchKernel ");
}

TEST(a_call_on_the_default_stream_makes_one_driver_call) {
  constexpr int kGpu = 14;
  LaunchOptions const options = on(kGpu, nullptr);
  run_call(decode(), options);
  fake::take_calls();
  run_call(decode(), options);
  std::string const made = names(fake::take_calls());
  CHECK_EQ(made, "cudaLaunchKernel ");
  void* const of_default = kept_workspace(kGpu, nullptr, 0).zeros;
  CHECK(of_default != nullptr);
  CHECK(of_default != kept_workspace(kGpu, fake::new_stream(), 0).zeros);
}

// A memset and the launch that counts in its memory are two driver calls. Between them another
// thread may launch on the stream; its call must not use that memory.
TEST(two_threads_share_a_stream) {
  constexpr int kGpu = 5, kCalls = 200;
  fake::Stream* const stream = fake::new_stream();
  run_call(decode(), on(kGpu, stream));
  fake::take_calls();
  auto const run = [&](int first) {
    LaunchOptions options = on(kGpu, stream);
    options.allocate = [](int64_t bytes) {
      Workspace const workspace = allocated(bytes);
      fake::record("given", workspace.data);
      return workspace;
    };
    for (int i = first; i < first + kCalls; ++i) {
      // In kept memory; only counters kept; more tiles than a stream has counters.
      int const batch = i % 3 == 0 ? 1 : i % 3 == 1 ? 500 : 2000;
      run_call(decode(batch), options);
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  std::vector<fake::Call> const calls = fake::take_calls();
  CHECK_EQ(count(calls, "cudaLaunchKernel"), 2 * kCalls);
  CHECK_EQ(count(calls, "cudaMalloc"), 0);
  int64_t large = 0;
  for (int first : {0, 1}) {
    for (int i = first; i < first + kCalls; ++i) large += i % 3 == 2;
  }
  CHECK_EQ(count(calls, "cudaMemsetAsync"), large);
  std::map<std::thread::id, void*> given;
  for (fake::Call const& call : calls) {
    if (call.name == "given") given[call.thread] = call.address;
    if (call.name == "cudaMemsetAsync") CHECK(call.address == given[call.thread]);
  }
}

TEST(first_uses_leave_a_capture_of_another_thread_valid) {
  constexpr int kGpu = 6;
  fake::State& state = fake::state();
  state.has_capture = true;
  fake::take_calls();
  run_call(decode(), on(kGpu, fake::new_stream()));
  std::vector<fake::Call> calls = fake::take_calls();
  CHECK_EQ(count(calls, "cudaMalloc"), 2);
  CHECK(!state.is_invalidated);
  CHECK_EQ(int(fake::mode), int(cudaStreamCaptureModeGlobal));

  std::vector<VariantInfo> const all = variants();
  auto const left_out = std::find_if(all.begin(), all.end(), [](VariantInfo const& info) {
    return info.device == Device::kCuda && !info.compiled && info.tier == "full";
  });
  if (left_out != all.end() && CUDART_VERSION >= 12080) {
    Status const status = load_kernel(left_out->key, kGpu, "");
    CHECK_EQ(status.message, "");
    calls = fake::take_calls();
    CHECK_EQ(count(calls, "cudaLibraryLoadData"), 1);
    CHECK_EQ(count(calls, "cudaMemcpy"), 0);
    CHECK(!state.is_invalidated);
    CHECK_EQ(int(fake::mode), int(cudaStreamCaptureModeGlobal));
  }
  // The fake invalidates the capture if a thread has not relaxed its mode.
  void* data = nullptr;
  CHECK(cudaMalloc(&data, 1) != cudaSuccess);
  CHECK(state.is_invalidated);
  state.has_capture = state.is_invalidated = false;
}

TEST(rows_that_a_backward_pass_cannot_number_are_refused) {
  constexpr int kGpu = 7;
  std::vector<VariantInfo> const all = variants();
  auto const variant = std::find_if(all.begin(), all.end(), [](VariantInfo const& info) {
    return info.kernel == "sm80/backward_varlen" && info.head_dim == 64;
  });
  if (!variant->compiled && CUDART_VERSION < 12080) return;
  if (!variant->compiled) CHECK(load_kernel(variant->key, kGpu, "").ok());
  for (int const batch : {1000000, 1 << 20}) {  // sequences of one token
    int32_t cu_seqlens = 0;
    Problem p = decode(batch);
    Gradients grad;
    p.num_splits = 0;
    p.num_heads_q = 64;
    p.seq_k.seqlen = 1;
    p.seq_q.total = p.seq_k.total = batch;
    p.seq_q.cu_seqlens = p.seq_k.cu_seqlens = &cu_seqlens;
    for (Operand* operand : {&p.q, &p.k, &p.v, &p.o}) {
      operand->batch_stride = 0;
      operand->head_stride = 64;
      operand->row_stride = 64 * (operand == &p.q || operand == &p.o ? 64 : 1);
    }
    p.softmax_lse = reinterpret_cast<float*>(int64_t(11) << 40);
    grad.o = p.o;
    grad.q = p.q;
    grad.k = p.k;
    grad.v = p.v;
    int64_t address = int64_t(20) << 40;
    for (Operand* operand : {&grad.o, &grad.q, &grad.k, &grad.v}) {
      operand->data = reinterpret_cast<void*>(address += int64_t(1) << 40);
    }
    p.grad = &grad;
    LaunchOptions options = on(kGpu, fake::new_stream());
    options.kernel = variant->key;
    options.allocate = allocated;
    CHECK_EQ(attention_backward(p, options).message,
             batch == 1000000 ? ""
                              : "seqlen_q, or total + 64 x batch of packed q, times num_heads_q / "
                                "num_heads_kv is more than 4294967296: split the batch or the "
                                "heads");
  }
}

namespace {

// As a program keeps maps: all of them.
struct AllMaps : MaskMaps {
  std::vector<std::pair<MaskMapKey, Workspace>> maps;

  Workspace find(MaskMapKey const& key) override {
    for (auto const& [of, workspace] : maps) {
      if (of == key) return workspace;
    }
    return {};
  }
  void keep(MaskMapKey const& key, Workspace const& workspace) override {
    maps.push_back({key, workspace});
  }
};

// 100 queries and 200 keys with a mask that is shared by all heads.
Problem masked() {
  Problem p = decode(2);
  p.num_splits = 0;
  p.seq_q.seqlen = 100;
  p.seq_k.seqlen = 200;
  for (auto [operand, rows] : {std::pair(&p.q, 100), {&p.k, 200}, {&p.v, 200}, {&p.o, 100}}) {
    operand->head_stride = int64_t(64) * rows;
    operand->batch_stride = 2 * operand->head_stride;
  }
  p.mask.elements = {reinterpret_cast<void*>(int64_t(9) << 40), 0, 0, 200, 1};
  return p;
}

}  // namespace

TEST(calls_with_one_mask_make_its_map_once) {
  constexpr int kGpu = 8;
  std::string const key = "sm80/mask/f16/d64/64x64x4";
  if (CUDART_VERSION < 12080 || !load_kernel(key, kGpu, "").ok()) return;
  fake::Stream* const stream = fake::new_stream();
  LaunchOptions options = on(kGpu, stream);
  options.kernel = key;
  options.allocate = allocated;
  AllMaps maps;
  // Launches: of the map, if it is made, and of the kernel.
  auto const runs_with = [&](int64_t launches, Problem const& p) {
    fake::take_calls();
    Status const status = attention_forward(p, options, maps);
    CHECK_EQ(status.message, "");
    std::vector<fake::Call> const calls = fake::take_calls();
    CHECK_EQ(count(calls, "cudaLaunchKernel"), launches);
    CHECK_EQ(count(calls, "allocate"), launches - 1);
  };
  Problem const p = masked();
  runs_with(2, p);
  runs_with(1, p);
  Problem layer = p;  // with other operands
  layer.q.data = layer.v.data;
  layer.logits.softmax_scale = 3.0f;
  runs_with(1, layer);
  MaskMapKey of_call;
  CHECK(mask_map_key(layer, options, of_call) && maps.find(of_call).bytes > 0);

  // What the map depends on.
  using Change = void (*)(Problem&);
  Change const changes[] = {
      [](Problem& p) { p.mask.causal = true, p.mask.window_right = 0; },
      [](Problem& p) { p.mask.window_left = 3; },
      [](Problem& p) { p.mask.window_right = 3; },
      [](Problem& p) { p.mask.diagonal_shift = 3; },
      [](Problem& p) { p.mask.attention_chunk = 64; },
      [](Problem& p) { p.mask.elements.data = p.k.data; },
      [](Problem& p) { p.mask.elements.batch_stride = 1; },
      [](Problem& p) { p.mask.elements.head_stride = 1; },
      [](Problem& p) { p.mask.elements.row_stride = 1; },
      [](Problem& p) { p.mask.elements.key_stride = 2; },
      [](Problem& p) { p.batch = 1; },
      [](Problem& p) { p.num_heads_q = 2; },
      [](Problem& p) { p.num_heads_q = p.num_heads_kv = 2; },
      [](Problem& p) { p.seq_q.seqlen = 99; },
      [](Problem& p) { p.seq_k.seqlen = 199; },
  };
  for (Change const change : changes) {
    Problem other = p;
    change(other);
    runs_with(2, other);
    runs_with(1, other);
    runs_with(1, p);
  }

  // Work of another stream is in no order with the map's; a handle is used again, an id is not.
  ++stream->id;
  runs_with(2, p);
  --stream->id;
  runs_with(1, p);

  // A graph makes the map in each replay, in its own memory, and keeps nothing.
  size_t const kept = maps.maps.size();
  stream->is_captured = true;
  runs_with(2, p);
  CHECK(!mask_map_key(p, options, of_call));
  stream->is_captured = false;
  CHECK_EQ(maps.maps.size(), kept);

  // A call that fails keeps nothing.
  Problem large = p;
  large.batch = 3;
  options.allocate = [](int64_t) { return Workspace{}; };
  CHECK(!attention_forward(large, options, maps).ok());
  CHECK_EQ(maps.maps.size(), kept);

  // Without a mask there is nothing to ask for.
  Problem plain = p;
  plain.mask.elements = {};
  options.kernel = "sm80";
  CHECK(!mask_map_key(plain, options, of_call));
}

int main(int argc, char** argv) { return check::run(argc, argv); }
