// Tests of the emulator. `make test-all` builds and runs them at widths 32 and 1. With another argument than the
// options of testing.h the program runs as the child process of a test: see run_as_child().
#include <cooperative_groups/reduce.h>
#include <cub/cub.cuh>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda/atomic>
#include <cuda/pipeline>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#include <mma.h>
#include <ptx.h>

#include <sys/wait.h>

#include <array>
#include <cmath>
#include <random>

#include "../tests/testing.h"

using namespace cuda_cpu::ptx;

extern __shared__ float4 dynamic_shared_memory[];

// ==== the harness =======================================================================================

// expect() of testing.h with the arguments in the other order, because conditions are long here.
static void expect(const std::string& what, bool holds) { expect(holds, what); }

// Expects holds(row) for each row of a table; prints the names of rows for which it is false.
template <class Table, class Holds> static void expect_each(const std::string& what, const Table& table, Holds holds) {
    std::string wrong;
    for (const auto& row : table)
        if (!holds(row)) wrong += std::string(" ") + row.name + ";";
    expect(wrong.empty() ? what : what + ":" + wrong, wrong.empty());
}

// Launches a kernel. configuration: {grid, block, bytes of shared memory, stream}.
template <class... Parameters, class... Arguments>
static cudaError_t launch(const cuda_cpu::Configuration& configuration, void (*kernel)(Parameters...),
                          Arguments... arguments) {
    return cudaLaunchKernelEx(&configuration, kernel, arguments...);
}

// Launches a kernel whose threads call body().
template <class Body> __global__ void call(Body body) { body(); }
template <class Body> static cudaError_t run(const cuda_cpu::Configuration& configuration, Body body) {
    return launch(configuration, call<Body>, body);
}

// A zero-initialised array in device memory.
template <class T> struct Array {
    T* data = nullptr;
    size_t size;
    explicit Array(size_t size_) : size(size_) {
        cudaMalloc(&data, size * sizeof(T));
        cudaMemset(data, 0, size * sizeof(T));
    }
    ~Array() { cudaFree(data); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    T& operator[](size_t i) { return data[i]; }
    std::vector<T> values() const { return {data, data + size}; }
    // Returns whether holds(i, element i) is true for each element.
    template <class Holds> bool each(Holds holds) const {
        for (size_t i = 0; i < size; i++)
            if (!holds(i, data[i])) return false;
        return true;
    }
    bool all_are(T value) const {
        return each([=](size_t, T x) { return x == value; });
    }
};

// Returns whether body() returns true in all threads of a block.
template <class Body> static bool holds(dim3 block, Body body, size_t shared_bytes = 0) {
    Array<int> right(block.x * block.y * block.z);
    run({1, block, shared_bytes}, [=, right = right.data] {
        right[threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z)] = body();
    });
    return right.all_are(1);
}

// Runs this program with an argument and returns its output and exit code. before: start of the shell command.
static std::pair<std::string, int> run_child(const std::string& argument, const std::string& before = "") {
    char self[4096] = "";
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return {"no /proc/self/exe", -1};
    FILE* pipe = popen((before + " '" + std::string(self) + "' " + argument + " 2>&1").c_str(), "r");
    std::string output;
    for (int c; (c = fgetc(pipe)) != EOF;) output += static_cast<char>(c);
    const int status = pclose(pipe);
    return {output, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

// Returns whether a child process ends with this exit code and prints this text.
static bool child_fails(int code, const std::string& text, const std::string& argument,
                        const std::string& before = "") {
    const auto [output, exit_code] = run_child(argument, before);
    return exit_code == code && contains(output, text);
}

// Returns whether check() holds under each seed in [first, end). Seed 0 is the natural order.
template <class Check> static bool under_seeds(uint64_t first, uint64_t end, Check check) {
    bool holds = true;
    for (uint64_t seed = first; seed < end; seed++) {
        cuda_cpu::set_seed(seed);
        holds = check() && holds;
    }
    cuda_cpu::set_seed(0);
    return holds;
}
template <class Check> static bool in_every_order(Check check) { return under_seeds(0, 8, check); }
template <class Body> static bool in_every_order(dim3 block, Body body, size_t shared_bytes = 0) {
    return in_every_order([=] { return holds(block, body, shared_bytes); });
}

// Returns whether check() holds on an emulated GPU. All queues are empty afterwards.
template <class Check> static bool on(const char* card, Check check) {
    cuda_cpu::set_card(card);
    const bool holds = check();
    cuda_cpu::set_card("");
    cudaGetLastError();
    return holds;
}

// ==== threads and blocks ================================================================================

static bool every_thread_runs_once(dim3 grid, dim3 block) {
    Array<int> visits(grid.x * grid.y * grid.z * block.x * block.y * block.z);
    run({grid, block}, [=, visits = visits.data] {
        const auto same = [](dim3 a, dim3 b) { return a.x == b.x && a.y == b.y && a.z == b.z; };
        const unsigned b = blockIdx.x + grid.x * (blockIdx.y + grid.y * blockIdx.z);
        const unsigned t = threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
        if (same(gridDim, grid) && same(blockDim, block)) visits[b * block.x * block.y * block.z + t]++;
    });
    return visits.all_are(1);
}

// Each thread reads the previous thread's store without a barrier. In the natural order the store has already happened.
static bool missing_barrier_shows() {
    return !holds(64, [] {
        __shared__ int tile[64];
        const int t = static_cast<int>(threadIdx.x);
        tile[t] = -1;
        __syncthreads();
        tile[t] = t;
        return t == 0 || tile[t - 1] == t - 1;
    });
}

TEST("blocks") {
    expect("every thread of every block runs once, with its own indices", in_every_order([] {
              return every_thread_runs_once({5, 3, 2}, {4, 3, 5}) && every_thread_runs_once(1, 1) &&
                     every_thread_runs_once(1000, 1) && every_thread_runs_once(3, 1024);
          }));
    expect("exited threads do not count at a barrier", in_every_order([] {
        Array<int> sum(64);
        run({1, 64}, [sum = sum.data] {
            __shared__ int here;
            if (threadIdx.x == 0) here = 0;
            __syncthreads();
            if (threadIdx.x % 2 == 1) return;
            for (int round = 0; round < 10; round++) {
                atomicAdd(&here, 1);
                __syncthreads();
                sum[threadIdx.x] += here;
                __syncthreads();
            }
        });
        return sum.each([](size_t t, int x) { return x == (t % 2 == 1 ? 0 : 32 * 55); });
    }));
    expect("a missing barrier gives a wrong result under some seed, but not in the natural order",
           !missing_barrier_shows() && !under_seeds(1, 10, [] { return !missing_barrier_shows(); }));
    Array<float> out(2);
    // Reads shared memory that no thread of this block has written.
    const auto read_unwritten = [out = out.data] {
        __shared__ float own[64];
        out[0] = reinterpret_cast<float*>(dynamic_shared_memory)[0];
        out[1] = own[63];
        own[63] = 1;
    };
    for (int launches = 0; launches < 2; launches++) run({1, 1, 4}, read_unwritten);
    expect("under a seed, uninitialised shared memory, dynamic and static, is NaN",
           out[1] == 1 && under_seeds(1, 3, [&] {
               return run({1, 1, 4}, read_unwritten) == cudaSuccess && std::isnan(out[0]) && std::isnan(out[1]);
           }));
}

// ==== warps =============================================================================================

TEST("warps") {
    if (WARP_SIZE == 1) return;
    expect("exited lanes do not count in a warp's masks", in_every_order([] {
              Array<int> out(64);
              run({1, 64}, [out = out.data] {
                  if (threadIdx.x % 32 >= 20) return;
                  int sum = 1;
                  for (unsigned offset = 16; offset > 0; offset /= 2) {
                      const int other = __shfl_down_sync(0xffffffff, sum, offset);
                      if (threadIdx.x % 32 + offset < 20) sum += other;
                  }
                  out[threadIdx.x] = sum;
              });
              return out[0] == 20 && out[32] == 20;
          }));
    expect("shuffles in segments of 8 lanes and votes are correct", in_every_order(dim3(16, 4), [] {
        constexpr unsigned all = 0xffffffff;
        const unsigned t = threadIdx.x + 16 * threadIdx.y, place = t % 8;
        const bool first = place == 0;
        return __shfl_sync(all, t, 3, 8) == t - place + 3 && __shfl_xor_sync(all, t, 5, 8) == (t ^ 5) &&
               __shfl_up_sync(all, t, 2, 8) == (place < 2 ? t : t - 2) &&
               __shfl_down_sync(all, t, 3, 8) == (place < 5 ? t + 3 : t) && __ballot_sync(all, first) == 0x01010101 &&
               __any_sync(all, first) && !__all_sync(all, first) && __all_sync(all, t < 64);
    }));
}

TEST("collectives") {
    expect("reductions, matches, and barriers that count, are right", in_every_order(64, [] {
        const unsigned t = threadIdx.x, lane = t % 32, mask = 0xfffff;
        bool right = __syncthreads_count(t < 40) == 40 && __syncthreads_count(t == 63) == 1 &&
                     __syncthreads_or(t == 5) && !__syncthreads_or(t > 64) && __syncthreads_and(t < 64) &&
                     !__syncthreads_and(t < 63);
        if (WARP_SIZE == 32 && lane < 20) {
            int all_same = 0, differ = 0;
            right = right && __reduce_add_sync(mask, lane) == 190 && __reduce_add_sync(mask, -int(lane)) == -190 &&
                    __reduce_min_sync(mask, int(lane) - 5) == -5 && __reduce_max_sync(mask, int(lane) - 30) == -11 &&
                    __reduce_min_sync(mask, lane - 1) == 0 && __reduce_max_sync(mask, lane - 1) == 0xffffffff &&
                    __reduce_and_sync(mask, lane | 64) == 64 && __reduce_or_sync(mask, lane) == 31 &&
                    __reduce_xor_sync(mask, 1u << lane) == mask &&
                    __match_any_sync(mask, double(lane % 5)) == 0x8421u << lane % 5 &&
                    __match_any_sync(mask, lane < 9 ? NAN : lane < 16 ? 0.0 : -0.0) ==
                        (lane < 9 ? 0x1ffu : lane < 16 ? 0xfe00u : 0xf0000u) &&
                    __match_all_sync(mask, 7, &all_same) == mask && all_same &&
                    __match_all_sync(mask, lane / 19, &differ) == 0 && !differ;
        }
        return right;
    }));
}

// Returns whether lanes that diverge see the lanes beside them: of both branches, and of a loop that they leave one by
// one. The other half of the block waits at the barrier, or in a loop.
static bool active_lanes_are_right(bool others_wait_in_a_loop) {
    Array<int> flag(1);
    return holds(64, [=, flag = flag.data] {
        const unsigned t = threadIdx.x, lane = t % 32;
        bool right = true;
        if (t < 32) {
            right = __activemask() == ~0u;
            if (lane < 10) right = right && __activemask() == 0x3ff && __reduce_add_sync(__activemask(), lane) == 45;
            else right = right && __activemask() == ~0x3ffu;
            for (unsigned i = 0; i < lane; i++) right = right && __activemask() == ~0u << (i + 1);
            atomicAdd(flag, 1);
        } else if (others_wait_in_a_loop) {
            while (atomicAdd(flag, 0) < 32) __nanosleep(100);
        }
        __syncthreads();
        return right;
    });
}

namespace cg = cooperative_groups;
template <class Group> static int sum_by_shuffles(const Group& group, int x) {
    for (unsigned i = group.size() / 2; i > 0; i /= 2) x += group.shfl_down(x, i);
    return group.shfl(x, 0);
}
// Copies arrays of 64 elements to shared memory by cp.async (float4, float) and by loads (char), and reads them.
template <class T> static bool groups_copy() {
    Array<T> in(64);
    for (unsigned i = 0; i < 64; i++) memset(static_cast<void*>(&in[i]), static_cast<int>(i), sizeof(T));
    return holds(64, [in = in.data] {
        __shared__ T stages[2][64];
        const unsigned t = threadIdx.x;
        const cg::thread_block block = cg::this_thread_block();
        cg::memcpy_async(block, stages[0], in, 32 * sizeof(T));
        cg::memcpy_async(block, stages[1], in + 32, 32 * sizeof(T));
        cg::wait_prior<1>(block);
        const bool first = t >= 32 || memcmp(&stages[0][31 - t], in + 31 - t, sizeof(T)) == 0;
        cg::wait(block);
        return first && (t < 32 || memcmp(&stages[1][63 - t], in + 95 - t, sizeof(T)) == 0);
    });
}
// Reductions and scans of THREADS threads in a block of two dimensions, with 1 and with 3 values per thread.
template <int THREADS> static bool cub_is_right() {
    constexpr int half = THREADS / 2, count = 3 * THREADS;
    const auto sum_below = [](int n) { return n * (n - 1) / 2; };
    return holds(dim3(half, 2), [=] {
        using Reduce = cub::BlockReduce<int, half, cub::BLOCK_REDUCE_WARP_REDUCTIONS, 2>;
        using Scan = cub::BlockScan<int, half, cub::BLOCK_SCAN_WARP_SCANS, 2>;
        __shared__ union { typename Reduce::TempStorage reduce; typename Scan::TempStorage scan; } storage;
        const int t = static_cast<int>(threadIdx.x + half * threadIdx.y);
        int three[3] = {3 * t, 3 * t + 1, 3 * t + 2}, result = 0, total = 0, results[3];
        bool right = true;
        const auto holds_in_first = [&](int found, int expected) {
            right = right && (t != 0 || found == expected);
            __syncthreads();
        };
        holds_in_first(Reduce(storage.reduce).Sum(t), sum_below(THREADS));
        holds_in_first(Reduce(storage.reduce).Sum(three), sum_below(count));
        holds_in_first(Reduce(storage.reduce).Reduce(7 - t, cub::Max(), THREADS - 5), 7);
        holds_in_first(Reduce(storage.reduce).Sum(t, THREADS - 5), sum_below(THREADS - 5));
        Scan(storage.scan).InclusiveSum(t, result, total);
        right = right && result == sum_below(t + 1) && total == sum_below(THREADS);
        __syncthreads();
        Scan(storage.scan).ExclusiveSum(three, results);
        right = right && results[0] == sum_below(3 * t) && results[2] == sum_below(3 * t + 2);
        __syncthreads();
        Scan(storage.scan).ExclusiveScan(t == 9 ? 50 : 1, result, -1, cub::Max());
        return right && result == (t == 0 ? -1 : t <= 9 ? 1 : 50);
    });
}
TEST("cub") {
    if (WARP_SIZE == 1) return;
    expect("BlockReduce and BlockScan: blocks of 256, 48 and 20 threads", in_every_order([] {
               return cub_is_right<256>() && cub_is_right<48>() && cub_is_right<20>();
           }));
    expect("WarpReduce of 8 lanes, WarpScan", in_every_order(64, [] {
        using Reduce = cub::WarpReduce<int, 8>;
        using Scan = cub::WarpScan<int>;
        __shared__ Reduce::TempStorage reduce[8];
        __shared__ Scan::TempStorage scan[2];
        const int t = static_cast<int>(threadIdx.x), lane = t % 32, first = t / 8 * 8;
        const int sum = Reduce(reduce[t / 8]).Sum(t), least = Reduce(reduce[t / 8]).Reduce(-t, cub::Min(), 5);
        int result = 0, total = 0;
        Scan(scan[t / 32]).ExclusiveSum(2, result, total);
        return (t != first || (sum == 8 * first + 28 && least == -first - 4)) && result == 2 * lane && total == 64;
    }));
}

// Blocks pass numbers to the next block, several times; shared memory and a thread's variables stay theirs.
static void pass_on(int* numbers, int rounds, int* right) {
    __shared__ int kept;
    extern __shared__ float4 dynamic_shared_memory[];
    int* const dynamic = reinterpret_cast<int*>(dynamic_shared_memory);
    const cg::grid_group grid = cg::this_grid();
    const unsigned t = threadIdx.x, me = static_cast<unsigned>(grid.thread_rank()), mine = blockIdx.x + 7;
    if (t == 0) kept = static_cast<int>(mine);
    dynamic[t] = static_cast<int>(me);
    for (int i = 0; i < rounds; i++) {
        const int next = numbers[(me + blockDim.x) % grid.size()];
        grid.sync();
        numbers[me] = next + 1;
        cg::sync(grid);
    }
    right[me] = grid.is_valid() && kept == static_cast<int>(mine) && dynamic[t] == static_cast<int>(me);
}
namespace wmma = nvcuda::wmma;
// d = a b + 2 c for small integers, with a and b in both layouts, and d stored in both. T: type of a and b; S: of c.
template <class T, class S, int M, int N, int K, class LA, class LB> static bool multiplies(wmma::layout_t layout) {
    using Element = typename wmma::fragment<wmma::matrix_a, M, N, K, T, LA>::element_type;
    constexpr bool a_rows = std::is_same_v<LA, wmma::row_major>, b_rows = std::is_same_v<LB, wmma::row_major>;
    constexpr unsigned a_stride = (a_rows ? K : M) + 16, b_stride = (b_rows ? N : K) + 16;
    const unsigned stride = (layout == wmma::mem_row_major ? N : M) + 8;
    Array<Element> a(64 * 64), b(64 * 64);
    Array<S> c(64 * 64), d(64 * 64);
    for (size_t i = 0; i < a.size; i++) {
        a[i] = Element(int(i * 7 % 5) - 1), b[i] = Element(int(i * 5 % 7) - 2), c[i] = S(int(i % 11) - 3);
    }
    run({1, 32}, [=, a = a.data, b = b.data, c = c.data, d = d.data] {
        wmma::fragment<wmma::matrix_a, M, N, K, T, LA> left;
        wmma::fragment<wmma::matrix_b, M, N, K, T, LB> right;
        wmma::fragment<wmma::accumulator, M, N, K, S> sums, others;
        wmma::load_matrix_sync(left, a, a_stride);
        wmma::load_matrix_sync(right, b, b_stride);
        wmma::load_matrix_sync(sums, c, stride, layout);
        wmma::fill_fragment(others, S(2));
        for (int i = 0; i < sums.num_elements; i++) sums.x[i] = sums.x[i] * others.x[i];
        wmma::mma_sync(sums, left, right, sums);
        wmma::store_matrix_sync(d, sums, stride, layout);
    });
    for (unsigned i = 0; i < M; i++)
        for (unsigned j = 0; j < N; j++) {
            const unsigned at = layout == wmma::mem_row_major ? i * stride + j : j * stride + i;
            double sum = 2 * static_cast<double>(c[at]);
            for (unsigned k = 0; k < K; k++)
                sum += static_cast<double>(a[a_rows ? i * a_stride + k : k * a_stride + i]) *
                       static_cast<double>(b[b_rows ? k * b_stride + j : j * b_stride + k]);
            if (static_cast<double>(d[at]) != sum) return false;
        }
    return true;
}
template <class T, class S, int M, int N, int K> static bool multiplies_all() {
    using Rows = wmma::row_major;
    using Columns = wmma::col_major;
    return multiplies<T, S, M, N, K, Rows, Rows>(wmma::mem_row_major) &&
           multiplies<T, S, M, N, K, Rows, Columns>(wmma::mem_col_major) &&
           multiplies<T, S, M, N, K, Columns, Rows>(wmma::mem_row_major) &&
           multiplies<T, S, M, N, K, Columns, Columns>(wmma::mem_col_major);
}
// 8 tiles pass through a pipeline of a thread or of the block.
template <cuda::thread_scope SCOPE> static bool pipelines_copy() {
    Array<float> in(8 * 32);
    for (size_t i = 0; i < in.size; i++) in[i] = static_cast<float>(i * i % 13);
    return holds(32, [in = in.data] {
        __shared__ float stages[3][32];
        __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 3> state;
        const auto block = cg::this_thread_block();
        auto pipe = [&] {
            if constexpr (SCOPE == cuda::thread_scope_block) return cuda::make_pipeline(block, &state);
            else return cuda::make_pipeline();
        }();
        const unsigned t = threadIdx.x;
        float sum = 0;   // of differences
        for (unsigned tile = 0, next = 0; tile < 8; tile++) {
            for (; next < 8 && next < tile + 3; next++) {
                pipe.producer_acquire();
                cuda::memcpy_async(&stages[next % 3][t], in + next * 32 + t, cuda::aligned_size_t<4>(4), pipe);
                pipe.producer_commit();
            }
            pipe.consumer_wait();
            __syncwarp();
            sum += stages[tile % 3][31 - t] - in[tile * 32 + 31 - t];
            __syncwarp();
            pipe.consumer_release();
        }
        return sum == 0;
    });
}
TEST("pipelines") {
    if (WARP_SIZE == 1) return;
    expect("cuda::barrier waits for all threads that have not dropped out", in_every_order(64, [] {
        // Two phases: each thread writes, and reads what another one has written.
        __shared__ cuda::barrier<cuda::thread_scope_block> ready;
        __shared__ unsigned numbers[64];
        const unsigned t = threadIdx.x;
        if (t == 0) init(&ready, 64);
        __syncthreads();
        numbers[t] = t;
        const auto token = ready.arrive();
        ready.wait(token);
        const unsigned other = numbers[63 - t];
        if (t == 40) return ready.arrive_and_drop(), other == 23;
        ready.arrive_and_wait();
        numbers[t] = other + 1;
        ready.arrive_and_wait();
        return t == 23 || numbers[63 - t] == t + 1;
    }));
    expect("cuda::pipeline of a thread and of a block", in_every_order([] {
               return pipelines_copy<cuda::thread_scope_thread>() && pipelines_copy<cuda::thread_scope_block>();
           }));
    expect("cuda::memcpy_async completes at a barrier", in_every_order([] {
        // The first warp copies; the second warp reads.
        Array<float4> in(32);
        for (size_t i = 0; i < in.size; i++) in[i].z = static_cast<float>(i);
        return holds(64, [in = in.data] {
            __shared__ cuda::barrier<cuda::thread_scope_block> ready;
            __shared__ float4 tile[32];
            const auto block = cg::this_thread_block();
            if (block.thread_rank() == 0) init(&ready, block.size());
            block.sync();
            const auto warp = cg::tiled_partition<32>(block);
            if (warp.meta_group_rank() == 0) cuda::memcpy_async(warp, tile, in, sizeof(tile), ready);
            ready.arrive_and_wait();
            const unsigned other = 31 - warp.thread_rank();
            return warp.meta_group_rank() == 0 || tile[other].z == static_cast<float>(other);
        });
    }));
}

TEST("wmma") {
    if (WARP_SIZE == 1) return;
    expect("products of half, bfloat16, tf32, double and bytes, in all layouts and shapes", in_every_order([] {
               return multiplies_all<half, float, 16, 16, 16>() && multiplies_all<half, half, 32, 8, 16>() &&
                      multiplies_all<__nv_bfloat16, float, 8, 32, 16>() &&
                      multiplies_all<wmma::precision::tf32, float, 16, 16, 8>() &&
                      multiplies_all<double, double, 8, 8, 4>() && multiplies_all<signed char, int, 16, 16, 16>();
           }));
    expect("__float_to_tf32 rounds ties away from zero",
           wmma::__float_to_tf32(1 + 0x1p-11f) == 1 + 0x1p-10f && wmma::__float_to_tf32(1 + 0x0.ffp-11f) == 1);
}

TEST("grids") {
    expect("grid.sync() waits for all blocks; shared memory and variables are kept", in_every_order([] {
        Array<int> numbers(5 * 48), right(5 * 48);
        for (size_t i = 0; i < numbers.size; i++) numbers[i] = static_cast<int>(i);
        int rounds = 3;
        void* arguments[] = {&numbers.data, &rounds, &right.data};
        const cudaError_t error = cudaLaunchCooperativeKernel(pass_on, 5, 48, arguments, 48 * sizeof(int));
        cudaDeviceSynchronize();
        return error == cudaSuccess && right.all_are(1) && numbers.each([](size_t i, int x) {
            return x == static_cast<int>((i + 3 * 48) % 240) + 3;
        });
    }));
    expect("a cooperative launch with more blocks than are resident is an error", WARP_SIZE == 1 || on("a100", [] {
               void* arguments[] = {nullptr, nullptr, nullptr};
               return cudaLaunchCooperativeKernel(pass_on, 108 * 2 + 1, 1024, arguments) ==
                      cudaErrorCooperativeLaunchTooLarge;
           }));
}

TEST("groups") {
    if (WARP_SIZE == 1) return;
    expect("__activemask has the lanes of a branch and of a loop; other threads may wait at a barrier or in a loop",
           in_every_order([] { return active_lanes_are_right(false) && active_lanes_are_right(true); }));
    expect("tiles of a block and of a warp: ranks, shuffles, votes, reductions, scans", in_every_order(dim3(16, 6), [] {
        __shared__ int sums[6];
        const cg::thread_block block = cg::this_thread_block();
        const unsigned t = block.thread_rank(), place = t % 16;
        const cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
        const auto tile = cg::tiled_partition<16>(warp);
        const cg::thread_group any = cg::tiled_partition(block, 4);
        bool right = t == threadIdx.x + 16 * threadIdx.y && block.size() == 96 && block.group_dim().y == 6 &&
                     warp.thread_rank() == t % 32 && warp.meta_group_size() == 3 && warp.meta_group_rank() == t / 32 &&
                     tile.meta_group_size() == 2 && tile.meta_group_rank() == t / 16 % 2 && tile.size() == 16 &&
                     any.size() == 4 && any.thread_rank() == t % 4;
        any.sync();
        const int first = static_cast<int>(t - place);
        right = right && sum_by_shuffles(tile, static_cast<int>(t)) == 16 * first + 120 &&
                tile.shfl_up(t, 3) == (place < 3 ? t : t - 3) && tile.shfl_xor(t, 5) == (t ^ 5) &&
                tile.any(place == 3) && !tile.all(place == 3) && tile.ballot(place == 3 || place == 9) == 0x208 &&
                tile.match_any(place % 4) == 0x1111u << place % 4 &&
                cg::reduce(tile, static_cast<int>(t), cg::plus<int>()) == 16 * first + 120 &&
                cg::reduce(tile, place + 1, cg::greater<>()) == 16 && cg::reduce(tile, place + 1, cg::less<>()) == 1 &&
                cg::inclusive_scan(tile, 2) == static_cast<int>(2 * place + 2) &&
                cg::exclusive_scan(tile, place, [](unsigned x, unsigned y) { return std::max(x, y); }) ==
                    (place == 0 ? 0 : place - 1);
        if (place == 0) sums[t / 16] = static_cast<int>(t);
        cg::sync(block);
        return right && sums[5] == 80;
    }));
    expect("coalesced threads", in_every_order(32, [] {
        const unsigned lane = threadIdx.x;
        bool right = true;
        if (lane % 3 == 1) {   // lanes 1, 4, ... 31
            const cg::coalesced_group active = cg::coalesced_threads();
            const auto pairs = cg::tiled_partition(active, 2);
            right = right && active.size() == 11 && active.thread_rank() == lane / 3 && active.shfl(lane, 2) == 7 &&
                    active.shfl_down(lane, 1) == (lane == 31 ? 31 : lane + 3) && active.ballot(lane > 27) == 0x600 &&
                    cg::reduce(active, lane, cg::plus<unsigned>()) == 176 &&
                    cg::inclusive_scan(active, 1u) == lane / 3 + 1 && pairs.thread_rank() == lane / 3 % 2 &&
                    pairs.shfl(lane, 0) == lane - lane / 3 % 2 * 3;
            active.sync();
        }
        return right;
    }));
    expect("groups copy arrays to shared memory", in_every_order([] {
               return groups_copy<float4>() && groups_copy<float>() && groups_copy<char>();
           }));
}

// ==== errors that end the program, and workers ==========================================================

// Runs a kernel with the named error.
static int run_fatal_error(const std::string& what) {
    Array<float> data(100);
    volatile float* const out = data.data;
    nvtxRangePushA("outer");
    nvtxRangePushA("half_wait");
    if (what == "deadlock")
        run({{2, 3}, 96}, [=] {
            if (threadIdx.x < 32) __syncwarp();
            for (int lane = 0; lane < 2 && threadIdx.x == 5; lane++) out[0] = __shfl_xor_sync(0xffffffff, 1.0f, 1);
            if (threadIdx.x < 64) __syncthreads();
        });
    if (what == "stack")
        run({1, 2}, [=] {
            volatile char large[cuda_cpu::fiber_stack_bytes + 4096];
            for (size_t i = 0; i < sizeof(large); i++) large[i] = static_cast<char>(i);
            out[threadIdx.x] = large[threadIdx.x];
        });
    volatile int past = 16;   // AddressSanitizer does not check a constant index into an array of known size
    if (what == "shared")
        run({1, 1, 64}, [i = int{past}] { reinterpret_cast<volatile float*>(dynamic_shared_memory)[i] = 1; });
    cudaLaunchAttribute cooperative{cudaLaunchAttributeCooperative, {1}};
    cuda_cpu::Configuration five_blocks(5, 2);
    five_blocks.attrs = &cooperative;
    five_blocks.numAttrs = what == "ordinary" ? 0 : 1;
    if (what == "ordinary" || what == "some_blocks")
        run(five_blocks, [] {
            if (blockIdx.x != 2) cg::this_grid().sync();
        });
    if (what == "trap") run({1, 1}, [] { __trap(); });
    if (what == "global") run({1, 1}, [=] { out[100] = 1; });
    return 0;
}

TEST("fatal errors") {
    if (WARP_SIZE == 32)
        expect("a deadlock is reported with its kernel, block and threads",
               child_fails(1,
                           "of (2, 3, 1), 96 x 1 x 1 threads: deadlock: no thread can continue\n"
                           "  threads 0-4, 6-63: in __syncthreads\n"
                           "  threads 5: in __shfl_xor_sync with mask 0xffffffff\n  threads 64-95: ended",
                           "deadlock") &&
                   child_fails(1, "kernel half_wait, block (", "deadlock"));
    expect("grid.sync() reports a launch that is not cooperative, and blocks that have ended",
           child_fails(1, "grid.sync() in a launch without cudaLaunchCooperativeKernel", "ordinary") &&
               child_fails(1, "deadlock: 4 blocks wait in grid.sync(), 1 have ended", "some_blocks"));
    expect("__trap ends the program", child_fails(1, "1 x 1 x 1 threads: __trap\n", "trap"));
#ifdef __SANITIZE_ADDRESS__
    expect("AddressSanitizer finds a write past the launch's shared memory",
           contains(run_child("shared").first, "use-after-poison"));
    expect("AddressSanitizer finds a write past an allocation of cudaMalloc",
           contains(run_child("global").first, "heap-buffer-overflow"));
#else
    expect("a stack overflow is reported with its thread",
           child_fails(1, "overflows its stack of 65536 bytes", "stack"));
#endif
}

// Prints the number of workers, this program's other arguments and the first line of its input.
static int print_workers(int argc, char** argv) {
    cudaSetDevice(0);
    printf("%d workers, ", omp_get_max_threads());
    for (int i = 2; i < argc; i++) printf("[%s]", argv[i]);
    char line[100];
    if (fgets(line, sizeof(line), stdin) != nullptr) printf(" %s", line);
    return 0;
}

TEST("workers") {
    const std::string before = "echo input | env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY OMP_NUM_THREADS=2 ";
    expect("a program that restarts itself with shorter spins keeps its arguments, variables and input",
           run_child("workers a '' 'two words'", before + "CUDA_CPU_THREADS=3").first ==
               "3 workers, [a][][two words] input\n");
    expect("CUDA_CPU_THREADS that is not a whole number is rejected",
           child_fails(2, "CUDA_CPU_THREADS is \"2x\"; expected a whole number", "workers", "CUDA_CPU_THREADS=2x"));
}

// ==== host functions ====================================================================================

__global__ void nothing() {}
__global__ void fill_shared(size_t bytes, int* aligned) {
    memset(static_cast<void*>(dynamic_shared_memory), 1, bytes);
    *aligned = reinterpret_cast<uintptr_t>(dynamic_shared_memory) % 1024 == 0;
}
// Returns whether a launch can use exactly 48 KiB of shared memory without opt-in, and exactly `most` bytes with it.
static bool shared_memory_ends_at(size_t most) {
    constexpr auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
    Array<int> flag(1);
    const auto with = [&](size_t bytes) { return launch({1, 1, bytes}, fill_shared, bytes, flag.data); };
    cudaFuncSetAttribute(fill_shared, dynamic, 0);
    return with(48 << 10) == cudaSuccess && with((48 << 10) + 1) == cudaErrorInvalidValue &&
           cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess &&
           cudaFuncSetAttribute(fill_shared, dynamic, static_cast<int>(most) + 1) == cudaErrorInvalidValue &&
           cudaFuncSetAttribute(fill_shared, dynamic, static_cast<int>(most)) == cudaSuccess &&
           with(most) == cudaSuccess && with(most + 1) == cudaErrorInvalidValue &&
           cudaDeviceSynchronize() == cudaSuccess && flag[0] == 1;
}

__constant__ float device_table[4];
namespace {
template <class T> __device__ volatile T device_sums[3] = {5, 6, 7};
}
// Copies to symbols, from a kernel's results, and back.
static bool symbols_are_copied() {
    const float table[] = {1, 2, 3, 4};
    float in_stack[4], found[4], one = 0;
    int sums[2];
    Array<float> out(4), source(1);
    cudaDeviceSynchronize();
    source[0] = 9;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    bool right = cudaMemcpyToSymbol(device_table, table, sizeof(table)) == cudaSuccess &&
                 cudaMemcpyToSymbol(device_table, table, 4, 12) == cudaSuccess &&
                 cudaMemcpyToSymbol(device_table, table, 8, 12) == cudaErrorInvalidValue &&
                 cudaMemcpyToSymbol(device_table, table, 4, 20) == cudaErrorInvalidValue &&
                 cudaMemcpyToSymbol(device_table, table, 4, 0, cudaMemcpyDeviceToHost) ==
                     cudaErrorInvalidMemcpyDirection &&
                 cudaMemcpyToSymbol(in_stack, table, 4) == cudaErrorInvalidSymbol &&
                 cudaMemcpyToSymbolAsync(device_table, source.data, 4, 8, cudaMemcpyDeviceToDevice, stream) ==
                     cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess;
    run({1, 4}, [out = out.data] {
        out[threadIdx.x] = device_table[threadIdx.x];
        if (threadIdx.x == 0) device_sums<int>[2] = 8;
    });
    right = right && cudaDeviceSynchronize() == cudaSuccess && out.values() == std::vector<float>({1, 2, 9, 1}) &&
            cudaMemcpyFromSymbol(sums, device_sums<int>, 8, 4) == cudaSuccess && sums[0] == 6 && sums[1] == 8 &&
            cudaMemcpyFromSymbol(sums, device_sums<int>, 8, 8) == cudaErrorInvalidValue &&
            cudaMemcpyFromSymbol(sums, device_sums<int>, 4, 0, cudaMemcpyHostToDevice) ==
                cudaErrorInvalidMemcpyDirection &&
            cudaMemcpyFromSymbol(out.data, device_table, 4, 8, cudaMemcpyDeviceToDevice) == cudaSuccess &&
            cudaMemcpyFromSymbolAsync(found, device_table, 16, 0, cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
            cudaStreamSynchronize(stream) == cudaSuccess && found[2] == 9 && cudaStreamDestroy(stream) == cudaSuccess;
    // The address of a symbol is device memory.
    float* address = nullptr;
    size_t bytes = 0;
    right = right && cudaGetSymbolAddress(&address, device_table) == cudaSuccess && address == device_table &&
            cudaGetSymbolSize(&bytes, device_table) == cudaSuccess && bytes == 16 &&
            cudaMemcpy(&one, address + 2, 4, cudaMemcpyDeviceToHost) == cudaSuccess && one == 9 &&
            cudaMemset(address, 0, 16) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess && address[2] == 0 &&
            cudaGetSymbolAddress(&address, in_stack) == cudaErrorInvalidSymbol;
    cudaGetLastError();
    return right && (cuda_cpu::card() == nullptr ||
                     cudaMemcpy(found, address, 20, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
}

// Copies two rows of 3 floats into a matrix, a part of them back, and sets a part.
static bool rows_are_copied() {
    float rows[2][3] = {{1, 2, 3}, {4, 5, 6}}, *matrix = nullptr, *host = nullptr;
    size_t pitch = 0;
    const auto to_host = cudaMemcpyDeviceToHost, to_device = cudaMemcpyHostToDevice;
    float *queued = nullptr, *mapped = nullptr;
    bool right = cudaMallocAsync(&queued, 4, nullptr) == cudaSuccess && cudaFreeAsync(queued, nullptr) == cudaSuccess &&
                 cudaMallocPitch(&matrix, &pitch, 12, 2) == cudaSuccess && pitch % 256 == 0 && pitch >= 12 &&
                 cudaHostAlloc(&host, 1024, cudaHostAllocMapped) == cudaSuccess &&
                 cudaMemcpy2D(matrix, pitch, rows, 12, 12, 2, to_device) == cudaSuccess &&
                 cudaMemset2D(matrix, pitch, 0, 4, 2) == cudaSuccess &&
                 cudaMemcpy2DAsync(host, 16, matrix, pitch, 12, 2, to_host) == cudaSuccess &&
                 cudaMemcpy2D(rows, 12, matrix + 2, pitch, 4, 2, to_host) == cudaSuccess;
    right = right && host[0] == 0 && host[1] == 2 && host[2] == 3 && host[4] == 0 && host[6] == 6 && rows[0][0] == 3 &&
            rows[1][0] == 6 && rows[0][1] == 2;
    right = right && cudaHostGetDevicePointer(&mapped, host, 0) == cudaSuccess && mapped == host &&
            cudaHostGetDevicePointer(&mapped, matrix, 0) == cudaErrorInvalidValue &&
            cudaMemcpy2D(matrix, 8, rows, 12, 12, 2, to_device) == cudaErrorInvalidPitchValue &&
            cudaMemset2D(matrix, 8, 0, 12, 2) == cudaErrorInvalidValue &&
            (cuda_cpu::card() == nullptr ||
             cudaMemcpy2D(matrix, pitch, rows, 12, 12, 200, to_device) == cudaErrorInvalidValue);
    cudaGetLastError();
    return right && cudaFree(matrix) == cudaSuccess && cudaFreeHost(host) == cudaSuccess;
}

// Registers memory; the pointers' kinds are known.
static bool memory_is_registered() {
    const Array<float> device(1);
    std::vector<float> host(4, 7);
    float* mapped = nullptr;
    cudaPointerAttributes of_device, of_host, of_stack;
    const bool right =
        cudaHostGetDevicePointer(&mapped, host.data(), 0) == cudaErrorInvalidValue &&
        cudaHostRegister(host.data(), 16, cudaHostRegisterMapped) == cudaSuccess &&
        cudaHostRegister(host.data(), 16, 0) == cudaErrorHostMemoryAlreadyRegistered &&
        cudaHostGetDevicePointer(&mapped, host.data(), 0) == cudaSuccess && mapped == host.data() &&
        cudaPointerGetAttributes(&of_device, device.data) == cudaSuccess && of_device.type == cudaMemoryTypeDevice &&
        cudaPointerGetAttributes(&of_host, mapped) == cudaSuccess && of_host.type == cudaMemoryTypeHost &&
        cudaPointerGetAttributes(&of_stack, &of_host) == cudaSuccess && of_stack.type == cudaMemoryTypeUnregistered &&
        cudaHostUnregister(host.data()) == cudaSuccess &&
        cudaHostUnregister(host.data()) == cudaErrorHostMemoryNotRegistered;
    cudaGetLastError();
    return right;
}

// Limits, flags, attributes and peers: what is set is returned, and what one device cannot do is an error.
static bool device_is_described() {
    size_t bytes = 0;
    unsigned flags = 0;
    int value = -1, one = 1;
    cudaFuncAttributes attributes{};
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    bool right = cudaDeviceSetLimit(cudaLimitStackSize, 4096) == cudaSuccess &&
                 cudaDeviceGetLimit(&bytes, cudaLimitStackSize) == cudaSuccess && bytes == 4096 &&
                 cudaSetDeviceFlags(cudaDeviceMapHost) == cudaSuccess && cudaGetDeviceFlags(&flags) == cudaSuccess &&
                 flags == cudaDeviceMapHost && cudaStreamGetFlags(stream, &flags) == cudaSuccess &&
                 flags == cudaStreamNonBlocking && cudaDeviceCanAccessPeer(&value, 0, 0) == cudaSuccess && value == 0 &&
                 cudaDeviceEnablePeerAccess(0, 0) == cudaErrorInvalidDevice &&
                 cudaDeviceGetAttribute(&value, cudaDevAttrComputeMode, 0) == cudaSuccess &&
                 value == cudaComputeModeDefault &&
                 cudaDeviceGetAttribute(&value, cudaDevAttrCanMapHostMemory, 0) == cudaSuccess && value == 1 &&
                 cudaFuncGetAttributes(&attributes, nothing) == cudaSuccess && attributes.maxThreadsPerBlock == 1024 &&
                 attributes.sharedSizeBytes == 0 && attributes.maxDynamicSharedSizeBytes == 48 << 10;
    const auto callback = [](cudaStream_t, cudaError_t status, void* to) {
        *static_cast<int*>(to) += status == cudaSuccess;
    };
    right = right && cudaStreamAddCallback(stream, callback, &one, 0) == cudaSuccess &&
            cudaStreamSynchronize(stream) == cudaSuccess && one == 2;
    cudaGetLastError();
    return right && cudaStreamDestroy(stream) == cudaSuccess;
}

__global__ void add_both(int* sum, int x, float y) { atomicAdd(sum, x + static_cast<int>(y)); }
static bool launches_by_address() {
    Array<int> sum(1);
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    int x = 3, *address = sum.data;
    float y = 4;
    void* arguments[] = {&address, &x, &y};
    bool right = cudaLaunchKernel(add_both, 2, 3, arguments, 0, stream) == cudaSuccess &&
                 cudaLaunchKernel(nothing, 1, 1, nullptr) == cudaSuccess &&
                 cudaLaunchKernel(nothing, 0, 1, nullptr) == cudaErrorInvalidConfiguration;
    cudaEvent_t event;
    cudaEventCreateWithFlags(&event, cudaEventBlockingSync);
    right = right && cudaLaunchHostFunc(stream, [](void* to) { ++*static_cast<int*>(to); }, address) == cudaSuccess &&
            cudaEventRecord(event, stream) == cudaSuccess;
    cudaError_t state;
    while ((state = cudaEventQuery(event)) != cudaSuccess) right = right && state == cudaErrorNotReady;
    right = right && cudaStreamQuery(stream) == cudaSuccess && sum[0] == 6 * 7 + 1;
    cudaGetLastError();
    return right && cudaEventDestroy(event) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess;
}

TEST("host") {
    expect("shared memory up to the limit can be used, more is rejected", shared_memory_ends_at(227 << 10));
    bool right = true;
    for (dim3 grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536), dim3(1, 0)})
        right = right && launch({grid, 1}, nothing) == cudaErrorInvalidConfiguration;
    for (dim3 block : {dim3(0), dim3(1025), dim3(32, 33), dim3(1, 1, 65)})
        right = right && launch({1, block}, nothing) == cudaErrorInvalidConfiguration;
    expect("invalid grids and blocks are rejected", right && cudaGetLastError() == cudaErrorInvalidConfiguration);
    cuda_cpu::launch(nothing, {0, 1})();
    expect("cudaGetLastError returns the error of a rejected <<<>>> launch",
           cudaPeekAtLastError() == cudaErrorInvalidConfiguration &&
               cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    expect("variables are copied within their bounds, and have an address and a size", symbols_are_copied());
    expect("rows are copied and set, with a pitch; pinned memory has an address on the device", rows_are_copied());
    expect("memory can be registered, and pointers tell their kind", memory_is_registered());
    expect("limits, flags and attributes of device and kernel are returned; callbacks run", device_is_described());
    expect("cudaLaunchKernel and cudaLaunchHostFunc run; queries return when they have", launches_by_address());
    cudaDeviceProp p;
    expect("cudaGetDeviceProperties describes the processor",
           cudaGetDeviceProperties(&p, 0) == cudaSuccess && p.name[0] != 0 && p.warpSize == WARP_SIZE && p.major == 0 &&
               p.multiProcessorCount == omp_get_max_threads() && cudaSetDevice(1) == cudaErrorInvalidDevice);
    cudaGetLastError();
}

// ==== capture and graphs ================================================================================

// Captures the work that work() issues to a stream. Returns the instantiated graph, or null and the error.
template <class Work> static cudaGraphExec_t captured(cudaStream_t stream, cudaError_t& error, Work work) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    work();
    error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    return executable;
}

TEST("graphs") {
    cudaStream_t stream;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaEventCreate(&event);
    cudaError_t error = cudaSuccess;
    cudaGraphExecDestroy(captured(stream, error, [&] { cudaEventRecord(event, stream); }));
    float ms = 0;
    expect("waiting for an event of a capture, or reading its time, is rejected",
           cudaEventSynchronize(event) == cudaErrorCapturedEvent &&
               cudaEventElapsedTime(&ms, event, event) == cudaErrorCapturedEvent);
    cudaGraph_t none = nullptr;
    const auto begin = [](cudaStream_t s) { return cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal); };
    expect("beginning or ending a capture twice, or a capture of the default stream, is rejected",
           cudaStreamEndCapture(stream, &none) == cudaErrorIllegalState &&
               begin(nullptr) == cudaErrorStreamCaptureUnsupported && begin(stream) == cudaSuccess &&
               begin(stream) == cudaErrorIllegalState && cudaStreamEndCapture(stream, &none) == cudaSuccess);
    cudaGraphDestroy(none);
    cudaGetLastError();
    cudaEventDestroy(event);
    cudaStreamDestroy(stream);
}

// ==== arithmetic ========================================================================================

// Returns the largest error of a function in [first, last) in ULP.
template <class Function, class Exact>
static double ulps(float first, float last, float step, Function f, Exact exact) {
    double worst = 0;
    for (float x = first; x < last; x += step) {
        const double expected = exact(static_cast<double>(x));
        worst = std::max(worst, std::fabs(f(x) - expected) / std::ldexp(1.0, std::ilogb(expected) - 23));
    }
    return worst;
}

TEST("numbers") {
    const float infinity = INFINITY, nan = NAN, tenth = 0.1f;
    expect("__expf is within 2 ULP, and correct for infinity and NaN",
           ulps(-87.3f, 88.72f, 0.0007f, __expf, [](double x) { return std::exp(x); }) < 2 && __expf(-infinity) == 0 &&
               __expf(-88) == 0 && __expf(infinity) == infinity && __expf(89) == infinity && std::isnan(__expf(nan)) &&
               __expf(0) == 1);
    expect("exp2_approx is within 2 ULP; subnormal results are 0, overflow is infinity",
           ulps(-126, 128, 0.00107f, exp2_approx, [](double x) { return std::exp2(x); }) < 2 &&
               exp2_approx(-126.5f) == 0 && exp2_approx(128) == infinity && std::isnan(exp2_approx(nan)));
    expect("fmaxf and fminf return the other argument if one is NaN",
           fmaxf(nan, 1) == 1 && fmaxf(1, nan) == 1 && fminf(nan, 1) == 1 && fminf(1, nan) == 1 && fmaxf(2, 1) == 2 &&
               fminf(2, 1) == 1);
    expect("min and max accept arguments of different types",
           max(3, 4u) == 4u && min(5L, 3) == 3 && max(1.0f, 2.0f) == 2 && max(-1, 1u) == 0xffffffffu);
    expect("__fmul_rn and __fadd_rn round the product; __fmaf_rn does not",
           __fadd_rn(__fmul_rn(tenth, tenth), -0.01f) == 9.31322574615478515625e-10f &&
               __fmaf_rn(tenth, tenth, -0.01f) == fmaf(tenth, tenth, -0.01f));
    static_assert(sizeof(double2) == 16 && alignof(double2) == 16 && alignof(uchar4) == 4 && sizeof(char3) == 3 &&
                  alignof(float4) == 16 && alignof(float2) == 8 && alignof(int3) == 4);
}

TEST("intrinsics") {
    const float tenth = 0.1f, tiny = 1e-9f;
    expect("operations round up, down and to zero as their suffix says",
           __fadd_rz(1, tiny) == 1 && __fadd_ru(1, tiny) == nextafterf(1, 2) &&
               __fadd_rd(1, -tiny) == nextafterf(1, 0) && __fsub_rz(-1, tiny) == -1 &&
               __fmul_ru(tenth, tenth) > 0.01f && __fmul_rd(tenth, tenth) < __fmul_ru(tenth, tenth) &&
               __fdiv_rd(1, 3) < __fdiv_ru(1, 3) && __fsqrt_rd(2) < __fsqrt_ru(2) &&
               __frcp_rz(3) == __fdiv_rd(1, 3) && __fmaf_rz(1, 1, -tiny) < 1 && __dadd_ru(1, 1e-30) > 1 &&
               __dmul_rd(0.1, 0.1) < __dmul_ru(0.1, 0.1) && __fma_ru(1, 1, 1e-30) > 1 && __ddiv_rn(1, 4) == 0.25 &&
               __frsqrt_rn(4) == 0.5f && __fadd_rn(1, tiny) == 1);
    expect("conversions round as their suffix says, and are clamped",
           __float2int_rn(2.5f) == 2 && __float2int_rz(-2.5f) == -2 && __float2int_rn(3e9f) == 2147483647 &&
               __float2int_rz(NAN) == 0 && __float2int_ru(1.25f) == 2 && __float2int_rd(-1.25f) == -2 &&
               __float2uint_rn(-3) == 0 && __float2uint_rz(5e9f) == 0xffffffff && __double2ll_rz(-2.5) == -2 &&
               __double2int_rn(3.5) == 4 && __double2int_rn(NAN) == INT_MIN && __float2ull_rz(NAN) == 1ull << 63 &&
               __float2ull_rd(1e30f) == ~0ull && __ll2float_rz(0x7fffffffffffffff) < 9.223372e18f &&
               __uint2float_ru(0xffffffff) == 4294967296.0f && __uint2float_rz(0xffffffff) < 4294967296.0f &&
               __double2float_ru(0.1) > __double2float_rd(0.1) && __int2double_rn(-7) == -7);
    expect("words are taken apart and put together",
           __brev(1) == 0x80000000 && __brevll(2) == 1ull << 62 &&
               __byte_perm(0x03020100, 0x07060504, 0x7250) == 0x07020500 &&
               __funnelshift_l(0x80000001, 2, 4) == 0x28 && __funnelshift_r(0x80000001, 2, 4) == 0x28000000 &&
               __funnelshift_l(5, 7, 33) == 14 && __funnelshift_lc(5, 7, 33) == 5 && __funnelshift_rc(5, 7, 99) == 7 &&
               __popc(0xf0f0) == 8 && __clz(1) == 31 && __clz(0) == 32 && __ffs(0) == 0 && __popcll(~0ull) == 64 &&
               __clzll(1) == 63 && __ffsll(8) == 4 && __float_as_uint(1.0f) == 0x3f800000 &&
               __int_as_float(0x40000000) == 2 && __double2hiint(1) == 0x3ff00000 && __double2loint(1) == 0 &&
               __hiloint2double(0x3ff00000, 0) == 1);
    expect("products, averages and differences of integers",
           __mulhi(-2, 0x40000000) == -1 && __umulhi(0x80000000u, 6) == 3 && __umul64hi(1ull << 63, 6) == 3 &&
               __mul64hi(-1, 1) == -1 && __mul24(0xffffff, 3) == -3 && __umul24(0xff000002, 3) == 6 &&
               __hadd(-3, 0) == -2 && __rhadd(-3, 0) == -1 && __uhadd(~0u, ~0u) == ~0u && __urhadd(3, 0) == 2 &&
               __sad(-2, 3, 4) == 9 && __usad(1, 3, 0) == 2 && umin(3, ~0u) == 3 && umax(3, ~0u) == ~0u &&
               llmin(-1, 1) == -1 && llmax(-1, 1) == 1 && ullmin(1, ~0ull) == 1 && ullmax(1, ~0ull) == ~0ull);
    expect("operations on the bytes and halves of a word",
           __dp4a(0x01ff0102, 0x02030405, 1) == 1 + 10 + 4 - 3 + 2 && __dp4a(0xffu, 0xffu, 1u) == 65026 &&
               __vadd4(0x01ff7f80, 0x01010101) == 0x02008081 && __vsub2(0x00010000, 0x00020001) == 0xffffffff &&
               __vmaxs4(0x80ff017f, 0) == 0x0000017f && __vmaxu4(0x80ff017f, 0x81810000) == 0x81ff017f &&
               __vmins2(0x80000001, 0) == 0x80000000 && __vminu2(0x80000001, 0x10000) == 0x10000 &&
               __vabsdiffu4(0x00ff0102, 0xff000201) == 0xffff0101 && __vabsdiffs2(0xffff0001, 0x00010001) == 0x20000 &&
               __vavgu4(0x01ff0002, 0x02ff0100) == 0x02ff0101 && __vcmpeq2(0x00010002, 0x00010003) == 0xffff0000);
    float sine = 0, cosine = 0, word = 3;
    __sincosf(0, &sine, &cosine);
    sincospif(0.5f, &word, &sine);
    expect("mathematical functions of CUDA that C does not have",
           __saturatef(2) == 1 && __saturatef(NAN) == 0 && normcdff(0) == 0.5f && rsqrt(4.0) == 0.5 &&
               std::fabs(rcbrtf(8) - 0.5f) < 1e-6f && sinpif(-1) == 0 && sinpif(1.75f) == -0.70710678f &&
               cospi(1.0) == -1 && cospif(-2.5f) == 0 && cosine == 1 && word == 1 && sine == 0 &&
               __log10f(1) == 0 && __log2f(4) == 2 && __powf(2, 3) == 8 && __tanf(0) == 0 && __tanhf(INFINITY) == 1 &&
               std::fabs(__exp10f(2) - 100) < 1e-3f && norm3df(2, 3, 6) == 7 && rnorm3d(0, 0, 4) == 0.25 &&
               std::fabs(norm4d(2, 4, 5, 6) - 9) < 1e-9 && rnorm4df(0, 0, 0, -4) == 0.25f && rhypotf(3, 4) == 0.2f &&
               fdividef(1, 4) == 0.25f && __fdividef(1, 4) == 0.25f);
    __stcs(&word, 5.0f);
    expect("loads and stores with a cache hint", __ldg(&word) == 5 && __ldcv(&word) == 5 && __ldlu(&word) == 5);
}

// ---- 16- and 8-bit floats, from their definition, in double

struct Format {
    int mantissa, bias, largest;   // mantissa bits, exponent bias, code of the largest finite value
    int too_large, nan;            // codes of values that overflow and of NaN

    // Returns the value of a code without sign; of the code after the largest, as if it were finite.
    double value(int code) const {
        const int exponent = code >> mantissa, digits = code & ((1 << mantissa) - 1);
        return exponent == 0 ? std::ldexp(digits, 1 - bias - mantissa)
                             : std::ldexp(digits + (1 << mantissa), exponent - bias - mantissa);
    }
};

template <class T> using Code = std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>;
template <class T> using Wide = std::conditional_t<sizeof(T) == 1, float, double>;   // the widest type that it rounds
template <class T> static float decoded(int code) {
    const auto bits = static_cast<Code<T>>(code);
    return static_cast<float>(reinterpret_cast<const T&>(bits));
}
template <class T> static int encoded(double x) {
    return cuda_cpu::bits<Code<T>>(T(static_cast<Wide<T>>(x)));
}

// Returns whether a type rounds to nearest even, with both signs, for each value, each midpoint between two values, and
// the numbers adjacent to midpoints, and whether each code is converted back exactly.
template <class T> static bool rounds_to_nearest(const Format& f) {
    const int sign = 1 << (8 * sizeof(T) - 1);
    bool right = encoded<T>(0.0) == 0 && encoded<T>(-0.0) == sign;
    const auto check = [&](double x, int expected) {
        const int code = expected > f.largest ? f.too_large : expected;
        right = right && encoded<T>(x) == code && encoded<T>(-x) == (code | sign);
    };
    for (int code = 0; code <= f.largest; code++) {
        const double here = f.value(code), middle = (here + f.value(code + 1)) / 2;
        check(here, code);
        check(middle, code + code % 2);
        check(std::nextafter(static_cast<Wide<T>>(middle), Wide<T>{0}), code);
        check(std::nextafter(static_cast<Wide<T>>(middle), Wide<T>{INFINITY}), code + 1);
        const float negative = decoded<T>(code | sign);
        right = right && decoded<T>(code) == here && negative == -here && std::signbit(negative);
    }
    check(INFINITY, f.largest + 1);
    return right;
}

// Compares conversions of packs of 16 with conversions of single elements, for every code, and for floats with every
// upper half and some lower halves.
template <class T> static bool packs_agree() {
    bool right = true;
    for (int first = 0; first < 65536; first += 16)
        for (unsigned lower : {0u, 1u, 0x1000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            Code<T> codes[16], packed[16];
            float numbers[16], unpacked[16];
            for (int i = 0; i < 16; i++) {
                codes[i] = static_cast<Code<T>>(first + i);
                numbers[i] = __uint_as_float(static_cast<unsigned>(first + i) << 16 | lower);
            }
            to_floats(unpacked, reinterpret_cast<const T(&)[16]>(codes));
            from_floats(reinterpret_cast<T(&)[16]>(packed), numbers);
            for (int i = 0; i < 16; i++)
                right = right && __float_as_uint(unpacked[i]) == __float_as_uint(decoded<T>(codes[i])) &&
                        packed[i] == encoded<T>(numbers[i]);
        }
    return right;
}

template <class T> static void test_short_float(const std::string& name, const Format& f) {
    expect(name + " rounds to nearest even and converts back exactly; NaN has one code; packs equal single elements",
           rounds_to_nearest<T>(f) && encoded<T>(NAN) == f.nan && encoded<T>(-NAN) == f.nan &&
               std::isnan(decoded<T>(f.nan)) && packs_agree<T>());
}

TEST("short floats") {
    test_short_float<__nv_bfloat16>("bfloat16", {7, 127, 0x7f7f, 0x7f80, 0x7fff});
    test_short_float<__half>("half precision, also from double,", {10, 15, 0x7bff, 0x7c00, 0x7fff});
    test_short_float<__nv_fp8_e4m3>("E4M3", {3, 7, 0x7e, 0x7e, 0x7f});
    test_short_float<__nv_fp8_e5m2>("E5M2", {2, 15, 0x7b, 0x7b, 0x7f});
    expect("E4M3 and E5M2 have NaNs of both signs, and E5M2 has infinity",
           std::isnan(decoded<__nv_fp8_e4m3>(0xff)) && std::isnan(decoded<__nv_fp8_e5m2>(0xff)) &&
               std::isinf(decoded<__nv_fp8_e5m2>(0x7c)));
    const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.25f);
    const __half one = 1.0f, large = 65504.0f;
    expect("arithmetic rounds to the type, __hfma rounds once, pairs keep their order",
           static_cast<float>(pair.x * pair.y) == -3.375f && __bfloat1622float2(pair).x == 1.5f && sizeof(pair) == 4 &&
               static_cast<float>(one + __half(0.0004f)) == 1 && std::isinf(__half2float(large + large)) &&
               static_cast<float>(__hfma(__half(0.0321f), __half(0.0321f), one)) == 1.0009765625f &&
               static_cast<float>((__floats2half2_rn(2, 3) * __float2half2_rn(0.5f)).x) == 1 &&
               __high2float(pair) == -2.25f && static_cast<float>(__low2bfloat16(pair)) == 1.5f &&
               __half_as_ushort(__ushort_as_half(0x3c01)) == 0x3c01 && __bfloat16_as_ushort(1.0f) == 0x3f80 &&
               __nv_cvt_float_to_fp8(-2, __NV_SATFINITE, __NV_E5M2) == 0xc0 &&
               __nv_cvt_float2_to_fp8x2({1, -2}, __NV_SATFINITE, __NV_E4M3) == 0xc038);
    const half2 halves = __floats2half2_rn(4, -0.25f), ones = __half2half2(one);
    const auto is = [](half2 v, float x, float y) { return __low2float(v) == x && __high2float(v) == y; };
    expect("functions, comparisons and conversions of half precision and bfloat16, and of pairs",
           is(h2sqrt(__habs2(halves)), 2, 0.5f) && is(h2rcp(halves), 0.25f, -4) && is(h2floor(halves), 4, -1) &&
               is(h2exp2(halves), 16, 0.8408203125f) && is(__hgt2(halves, ones), 1, 0) &&
               is(h2exp(__hmin2(halves, __hneg2(ones))), 0.367919921875f, 0.367919921875f) &&
               !__hbgt2(halves, ones) && __hble2(halves, halves) && __hne(one, large) && !__hne(one, __half(NAN)) &&
               __hisnan(__half(NAN)) && float(__nv_bfloat16((1 << 30) + (1 << 22) + 1)) == (1 << 30) + (1 << 23) &&
               float(__ll2bfloat16_rn((1ll << 62) + (1ll << 54) + 1)) == (1ll << 62) + (1ll << 55) &&
               float(__hfma(__nv_bfloat16(0.9375f), __nv_bfloat16(1.1875f), __nv_bfloat16(0x1p-99f))) == 1.1171875f &&
               __hisinf(__half(-INFINITY)) == -1 && is(__lowhigh2highlow(halves), -0.25f, 4) &&
               is(__highs2half2(halves, ones), -0.25f, 1) && __half2int_rd(halves.y) == -1 &&
               __half2ushort_rn(large) == 65504 && float(__int2half_rn(1 << 20)) == INFINITY &&
               float(hlog2(__nv_bfloat16(8))) == 3 && float(hrsqrt(__nv_bfloat16(4))) == 0.5f &&
               __bfloat162int_rn(__nv_bfloat16(2.5f)) == 2 && __high2float(__float22bfloat162_rn({1, 2})) == 2);
}

// ==== matrix products ===================================================================================
// test_gpt.cu compares products of all types and of larger sizes with loops in double ("kernels: matmul").

// The descriptors of a cublasLtMatmul call.
struct LtCall {
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t a, b, c, d;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;  // number of algorithms found
    cublasLtContext handle;

    // Sets the layouts of a product of A (m, k), or if it is transposed (k, m), and B (k, n).
    void set(cudaDataType_t type, uint64_t m, uint64_t n, uint64_t k, bool transposed) {
        const auto layout = [](cudaDataType_t of, uint64_t rows, uint64_t columns) {
            return cublasLtMatrixLayoutOpaque_t{of, rows, columns, static_cast<int64_t>(rows)};
        };
        desc.transpose_a = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        a = transposed ? layout(type, k, m) : layout(type, m, k);
        b = layout(type, k, n);
        c = d = layout(CUDA_R_32F, m, n);
    }
    cublasStatus_t find_algorithm() {
        return cublasLtMatmulAlgoGetHeuristic(&handle, &desc, &a, &b, &c, &d, &preference, 1, &found, &count);
    }
    cublasStatus_t multiply(const float& alpha, const void* A, const void* B, const float& beta, const void* C, void* D,
                            cudaStream_t stream = nullptr) {
        return cublasLtMatmul(&handle, &desc, &alpha, A, &a, B, &b, &beta, C, &c, D, &d,
                              count == 1 ? &found.algo : nullptr, nullptr, 0, stream);
    }
};

// Returns whether a product of matrices of T with n columns equals a loop in double. Each matrix has its own leading
// dimension, and C is not D. (test_gpt.cu tests the epilogues.)
template <class T>
static bool product_is_right(cudaDataType_t type, int n, bool transpose_a, bool transpose_b,
                             cuda_cpu::Algorithm algorithm) {
    constexpr int m = 300, k = 333, lda = 335, ldb = 336, ldc = 337, ldd = 338;
    constexpr float alpha = 0.5f, beta = 2;
    const double precision = std::is_same_v<T, float> ? 1e-4 : 1.0 / 256;
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const auto numbers = [&](size_t count) {
        std::vector<T> all(count);
        for (T& x : all) x = uniform(random);
        return all;
    };
    const auto A = numbers(lda * k), B = numbers(ldb * k), C = numbers(ldc * n);
    auto D = numbers(ldd * n);
    LtCall call;
    call.set(type, m, n, k, transpose_a);
    if (transpose_b) std::swap(call.b.rows, call.b.columns);
    call.c.type = call.d.type = type;
    call.a.ld = lda, call.b.ld = ldb, call.c.ld = ldc, call.d.ld = ldd;
    call.desc.transpose_b = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    call.count = 1;
    call.found = {};
    call.found.algo.data[0] = static_cast<uint64_t>(algorithm);
    const auto value = [](T x) -> double { return static_cast<float>(x); };
    bool right = call.multiply(alpha, A.data(), B.data(), beta, C.data(), D.data()) == CUBLAS_STATUS_SUCCESS;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double x = beta * value(C[j * ldc + i]);
            for (int l = 0; l < k; l++)
                x += alpha * value(A[transpose_a ? i * lda + l : l * lda + i]) *
                     value(B[transpose_b ? l * ldb + j : j * ldb + l]);
            right = right && std::fabs(value(D[j * ldd + i]) - x) < precision * (1 + std::fabs(x));
        }
    return right;
}

template <class T> static bool products_are_right(cudaDataType_t type) {
    bool right = true;
    for (int ways = 0; ways < 4; ways++)
        for (int n : {5, 1})   // oneDNN does not multiply a single 16-bit column
            for (const auto algorithm : {cuda_cpu::Algorithm::fast, cuda_cpu::Algorithm::plain})
                right = product_is_right<T>(type, n, ways & 1, ways & 2, algorithm) && right;
    return right;
}

// Returns an FP8 product with few tiles and long sums, which oneDNN would split among workers.
static std::vector<float> fp8_product(int workers) {
    constexpr int m = 144, n = 400, k = 2048;
    std::mt19937 random(3);
    std::vector<uint8_t> a(m * k), b(n * k);
    for (auto* matrix : {&a, &b})
        for (uint8_t& code : *matrix) code = static_cast<uint8_t>(random() % 64 | random() % 2 << 7);
    std::vector<float> d(m * n);
    LtCall call;
    call.set(CUDA_R_8F_E4M3, m, n, k, true);
    const int before = omp_get_max_threads();
    omp_set_num_threads(workers);
    call.multiply(1, a.data(), b.data(), 0, nullptr, d.data());
    omp_set_num_threads(before);
    return d;
}

// Returns the sum of 1 and of 31 products 2^-14, of E4M3 operands.
static float fp8_sum(int bits) {
    constexpr int m = 4, k = 32;
    std::vector<uint8_t> x(m * k, 0x04);                  // 2^-7
    for (int i = 0; i < m; i++) x[i * k] = 0x38;          // 1
    float d[m];
    LtCall call;
    call.set(CUDA_R_8F_E4M3, m, 1, k, true);
    cuda_cpu::fp8_bits = bits;
    call.multiply(1, x.data(), x.data(), 0, nullptr, d);
    cuda_cpu::fp8_bits = 0;
    return d[m - 1];
}

// Returns whether cuBLAS's functions of T give the results of their definitions, for 3 x 3 matrices of small integers,
// which C is at first: a vector is its first column or, in scal, row.
template <class T> static bool blas_is_right() {
    constexpr int n = 3, all = n * n;
    constexpr auto N = CUBLAS_OP_N, t = CUBLAS_OP_T;
    const T two = 2, three = 3, a_host[all] = {4, 1, -2, 0, 3, 5, 0, 0, 2}, b_host[all] = {1, -6, 3, 2, 0, 5, 7, 1, 4};
    cublasHandle_t handle;
    cudaStream_t stream;
    cublasCreate(&handle);
    cudaStreamCreate(&stream);
    cublasSetStream(handle, stream);
    Array<T> a(all), b(all), c(all);
    cublasSetMatrix(n, n, sizeof(T), a_host, n, a.data, n);
    cublasSetVector(all, sizeof(T), b_host, 1, b.data, 1);
    const T *const A = a.data, *const B = b.data;
    T* const C = c.data;
    // Returns whether f() changes C from B to `expected`.
    const auto gives = [&](auto f, const std::vector<T>& expected) {
        std::vector<T> found(all);
        cudaMemcpy(C, b_host, sizeof(b_host), cudaMemcpyHostToDevice);
        return f() == CUBLAS_STATUS_SUCCESS && cudaStreamSynchronize(stream) == cudaSuccess &&
               cublasGetMatrix(n, n, sizeof(T), C, n, found.data(), n) == CUBLAS_STATUS_SUCCESS && found == expected;
    };
    const bool right =
        gives([&] { return cuda_cpu::gemm(handle, t, N, n, n, n, &two, A, n, B, n, &three, C, n); },
              {-13, -24, 21, 2, 50, 35, 63, 49, 28}) &&
        gives([&] { return cuda_cpu::gemm_batches(handle, N, t, 1, 1, n, &two, A, n, 1, B, n, 1, &three, C, n, 1, n); },
              {11, -30, 63, 2, 0, 5, 7, 1, 4}) &&
        gives([&] { return cuda_cpu::geam(handle, N, t, n, n, &two, A, n, &three, B, n, C, n); },
              {11, 8, 17, -18, 6, 13, 9, 15, 16}) &&
        gives([&] { return cuda_cpu::gemv(handle, t, n, n, &two, A, n, B, 1, &three, C, 1); },
              {-13, -24, 21, 2, 0, 5, 7, 1, 4}) &&
        gives([&] { return cuda_cpu::axpy(handle, n, &two, A, 1, C, -1); }, {-3, -4, 11, 2, 0, 5, 7, 1, 4}) &&
        gives([&] { return cuda_cpu::scal(handle, n, &two, C, n); }, {2, -6, 3, 4, 0, 5, 14, 1, 4});
    return right && cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS && cudaStreamDestroy(stream) == cudaSuccess;
}

TEST("products") {
    expect("cuBLAS: functions of float and double give the results of their definitions",
           blas_is_right<float>() && blas_is_right<double>());
    expect("cublasGemmEx and cublasHgemm: half precision, with a float result; errors", [] {
        cublasHandle_t handle;
        cublasCreate(&handle);
        Array<__half> a(4), c(1);
        Array<float> d(4);
        for (int i = 0; i < 4; i++) a[i] = static_cast<float>(i + 1);
        const float half = 0.5f, none = 0;
        const auto status = [&](int ld, cudaDataType_t type) -> std::string {
            return cublasGetStatusName(cublasGemmEx(
                handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &half, a.data, CUDA_R_16F, ld, a.data, CUDA_R_16F, 2, &none,
                d.data, type, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT_TENSOR_OP));
        };
        const bool right = status(2, CUDA_R_32F) == "CUBLAS_STATUS_SUCCESS" &&
                           status(1, CUDA_R_32F) == "CUBLAS_STATUS_INVALID_VALUE" &&
                           status(2, CUDA_R_16BF) == "CUBLAS_STATUS_NOT_SUPPORTED" &&
                           cublasSscal(nullptr, 4, &half, d.data, 1) == CUBLAS_STATUS_NOT_INITIALIZED &&
                           cublasHgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 2, a.data, a.data, 2, a.data, 2, a.data,
                                       c.data, 1) == CUBLAS_STATUS_SUCCESS;
        cudaDeviceSynchronize();
        cublasDestroy(handle);
        return right && d[0] == 3.5f && d[1] == 5 && d[2] == 7.5f && d[3] == 11 && float(c[0]) == 7;
    }());
    expect("products of column-major matrices with every transposition, leading dimensions, alpha, beta and C equal a "
           "loop in double, by oneDNN and by the plain loop",
           products_are_right<float>(CUDA_R_32F) && products_are_right<__nv_bfloat16>(CUDA_R_16BF) &&
               products_are_right<__half>(CUDA_R_16F));
    const std::vector<float> one = fp8_product(1);
    expect("FP8: 1, 2, 3 and 16 workers give the same bits",
           one[0] != 0 && one == fp8_product(2) && one == fp8_product(3) && one == fp8_product(16));
    expect("CUDA_CPU_FP8_BITS: products lose their bits below those of the largest, as on tensor cores",
           fp8_sum(0) == 1 + 31 * 0x1p-14f && fp8_sum(14) == fp8_sum(0) && fp8_sum(13) == 1);
}

// ---- rejected products

// A supported product, which a Change may make unsupported.
struct Parts : LtCall {
    int a_offset = 0, d_offset = 0, aux_offset = 0;
};
using Change = void (*)(Parts&);

// Returns whether the product has this status, and the heuristic returns an algorithm accordingly.
static bool has_status(cublasStatus_t expected, bool of_fp8, Change change) {
    Parts p;
    if (of_fp8) {
        p.desc.transpose_a = CUBLAS_OP_T;
        p.a = {CUDA_R_8F_E4M3, 32, 16, 32}, p.b = {CUDA_R_8F_E4M3, 32, 48, 32}, p.d = {CUDA_R_16BF, 16, 48, 16};
    } else {
        p.a = {CUDA_R_16BF, 16, 16, 16}, p.b = p.d = p.a;
    }
    Array<char> memory(1 << 14);
    p.desc.bias = memory.data;
    p.desc.aux_ld = 16;
    change(p);
    p.c = p.d;
    p.desc.aux = memory.data + 1024 + p.aux_offset;
    const auto heuristic = p.find_algorithm();
    const auto product = p.multiply(1, memory.data + 4096 + p.a_offset, memory.data + 8192, 0, nullptr,
                                    memory.data + 12288 + p.d_offset);
    cudaDeviceSynchronize();
    return product == expected && (p.count == 1) == (heuristic == CUBLAS_STATUS_SUCCESS) &&
           (heuristic == expected || (heuristic == CUBLAS_STATUS_SUCCESS && expected == CUBLAS_STATUS_INVALID_VALUE));
}

struct Case {
    const char* name;
    cublasStatus_t status;
    Change change;
};

constexpr auto fine = CUBLAS_STATUS_SUCCESS, unsupported = CUBLAS_STATUS_NOT_SUPPORTED,
               invalid = CUBLAS_STATUS_INVALID_VALUE;
constexpr uint32_t bias_epilogue = CUBLASLT_EPILOGUE_BIAS, dgelu = CUBLASLT_EPILOGUE_DGELU;
alignas(16) static float a_scale[2] = {1, 1};

static const Case cases[] = {
    {"a product", fine, [](Parts&) {}},
    {"k differs", invalid, [](Parts& p) { p.b.rows = 15; }},
    {"types differ", unsupported, [](Parts& p) { p.b.type = CUDA_R_16F; }},
    {"float to bf16", unsupported, [](Parts& p) { p.a.type = p.b.type = CUDA_R_32F; }},
    {"GELU without aux", unsupported, [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_GELU; }},
    {"short rows of aux", invalid, [](Parts& p) { p.desc.epilogue = dgelu, p.desc.aux_ld = 8; }},
    {"a scale without FP8", invalid, [](Parts& p) { p.desc.scale_a = a_scale; }},
};
static void a_not_transposed(Parts& p) {
    p.desc.transpose_a = CUBLAS_OP_N;
    p.a = {CUDA_R_8F_E4M3, 16, 32, 16};
}
static const Case fp8_cases[] = {
    {"a product", fine, [](Parts&) {}},
    {"E5M2 and E4M3", fine, [](Parts& p) { p.a.type = CUDA_R_8F_E5M2; }},
    {"a bias", fine, [](Parts& p) { p.desc.epilogue = bias_epilogue; }},
    {"scales", fine, [](Parts& p) { p.desc.scale_a = p.desc.scale_b = a_scale; }},
    {"a scale that is not aligned to 16 bytes", unsupported, [](Parts& p) { p.desc.scale_b = a_scale + 1; }},
    {"E5M2 twice", unsupported, [](Parts& p) { p.a.type = p.b.type = CUDA_R_8F_E5M2; }},
    {"FP8 output", unsupported, [](Parts& p) { p.d.type = CUDA_R_8F_E4M3; }},
    {"A not transposed", unsupported, a_not_transposed},
    {"B transposed", unsupported,
     [](Parts& p) { p.desc.transpose_b = CUBLAS_OP_T, p.b = {CUDA_R_8F_E4M3, 48, 32, 48}; }},
    {"n of 33", fine, [](Parts& p) { p.b.columns = p.d.columns = 33; }},
    {"m of 24", fine, [](Parts& p) { p.a.columns = p.d.rows = p.d.ld = 24; }},
    {"m of 20", unsupported, [](Parts& p) { p.a.columns = p.d.rows = p.d.ld = 20; }},
    {"k of 24", unsupported, [](Parts& p) { p.a.rows = p.b.rows = 24; }},
    {"ld of 40", unsupported, [](Parts& p) { p.a.ld = 40; }},
    {"GELU", unsupported, [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_GELU; }},
    {"bias of float", unsupported, [](Parts& p) { p.desc.epilogue = bias_epilogue, p.desc.bias_type = CUDA_R_32F; }},
    {"address of A", invalid, [](Parts& p) { p.a_offset = 8; }},
    {"address of D", invalid, [](Parts& p) { p.d_offset = 8; }},
};

TEST("rejected products") {
    expect_each("unsupported products and mismatched sizes are rejected", cases,
                [](const Case& c) { return has_status(c.status, false, c.change); });
    expect_each("FP8: unsupported types, transpositions, sizes, alignments and epilogues are rejected", fp8_cases,
                [](const Case& c) { return has_status(c.status, true, c.change); });
}

// ---- rounding

using cuda_cpu::set_rounding;

// Returns the product of two random matrices of T, in float, with a seed of the rounding.
template <class T> static std::vector<float> product_with(uint64_t seed, cudaDataType_t type) {
    constexpr int size = 64;
    std::mt19937 random(3);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<T> a(size * size);
    for (T& x : a) x = uniform(random);
    std::vector<float> d(a.size());
    LtCall call;
    call.set(type, size, size, size, false);
    set_rounding(seed);
    call.multiply(1, a.data(), a.data(), 0, nullptr, d.data());
    set_rounding(0);
    return d;
}

// Returns whether the seeds change bits of a product, by at most a rounding error, and a seed always gives the same.
template <class T> static bool product_is_perturbed(cudaDataType_t type) {
    const auto exact = product_with<T>(0, type), first = product_with<T>(1, type), second = product_with<T>(2, type);
    bool near = true;
    for (size_t i = 0; i < exact.size(); i++) near = near && std::fabs(first[i] - exact[i]) < 1e-5f;
    return near && first != exact && second != exact && second != first && first == product_with<T>(1, type);
}

TEST("rounding") {
    expect("CUDA_CPU_ROUNDING: products differ between seeds only by rounding; a seed always gives the same bits",
           product_is_perturbed<float>(CUDA_R_32F) && product_is_perturbed<__nv_bfloat16>(CUDA_R_16BF) &&
               product_is_perturbed<__half>(CUDA_R_16F));
    struct { const char* name; float (*function)(float); } const functions[] = {
        {"__expf", [](float x) { return __expf(-x); }},
        {"exp2_approx", [](float x) { return exp2_approx(-x); }},
        {"rsqrtf", [](float x) { return rsqrtf(x); }},
        {"reciprocal_approx", [](float x) { return reciprocal_approx(x); }},
        {"__logf", [](float x) { return __logf(x); }}};
    expect_each("CUDA_CPU_ROUNDING: functions differ only in their last bits", functions, [](const auto& row) {
        bool right = true;
        for (uint64_t seed = 1; seed <= 8 && cuda_cpu::perturbs_math; seed++) {
            int differ = 0, worst = 0;   // in ULP
            for (float x = 0.125f; x < 80; x += 0.0625f) {
                const int before = __float_as_int(row.function(x));
                set_rounding(seed);
                const int distance = std::abs(__float_as_int(row.function(x)) - before);
                set_rounding(0);
                differ += distance > 0;
                worst = std::max(worst, distance);
            }
            right = right && differ > 50 && worst <= 3;
        }
        return right;
    });
    set_rounding(3);
    expect("CUDA_CPU_ROUNDING: results that every machine computes exactly do not change",
           __expf(0) == 1 && rsqrtf(64) == 0.125f && reciprocal_approx(8) == 0.125f && __logf(1) == 0);
    set_rounding(0);
    expect("CUDA_CPU_ROUNDING that is not a whole number is rejected",
           child_fails(2, "CUDA_CPU_ROUNDING is \"many\"; expected a whole number", "workers",
                       "CUDA_CPU_ROUNDING=many"));
}

// ==== tensor cores ======================================================================================

// Operands are small integers, so sums are exact in any order. Layouts follow the PTX manual, independently of ptx.h.

struct Integers : Array<__nv_bfloat16> {
    Integers(size_t count, unsigned seed) : Array(count) {
        std::mt19937 random(seed);
        for (size_t i = 0; i < count; i++) data[i] = static_cast<int>(random() % 17) - 8;
    }
    float at(size_t i) const { return data[i]; }
};

// An error in a kernel: a removed wait, fence or barrier, or a write that comes too early.
enum class Fault { NONE, FULL_WAIT, EARLY_RELEASE, LAST_WAIT, ASYNC_FENCE, SYNCTHREADS, FRAGMENTS };

static uint32_t pair_at(const __nv_bfloat16* p) {
    return __bfloat16_as_ushort(p[0]) | static_cast<uint32_t>(__bfloat16_as_ushort(p[1])) << 16;
}

// Returns the address of 16-byte chunk `chunk` of row `row` in a swizzled tile of 128-byte rows.
static char* chunk_at(char* tile, int row, int chunk) { return tile + row * 128 + (chunk ^ row % 8) * 16; }

static char* shared_bytes() { return reinterpret_cast<char*>(dynamic_shared_memory); }

// The arguments of cuTensorMapEncodeTiled that tests change. By default the tensor is 64 x 8 x 100 x 4.
struct MapRequest {
    const void* data = reinterpret_cast<const void*>(uintptr_t{1} << 20);
    uint32_t rank = 4;
    uint64_t extents[6] = {64, 8, 100, 4, 1, 1}, strides[5] = {128, 1024, 102400, 409600, 409600};
    uint32_t box[6] = {64, 1, 64, 1, 1, 1}, steps[6] = {1, 1, 1, 1, 1, 1};
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;

    CUresult encode(CUtensorMap& map) const {
        return cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), extents,
                                      strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    CUresult status() const {
        CUtensorMap map;
        return encode(map);
    }
};

// Returns the map of a tensor (1, rows, 1, 64) with boxes of 64 rows.
static CUtensorMap map_of(const __nv_bfloat16* data, uint64_t rows) {
    CUtensorMap map{};
    MapRequest{data, 4, {64, 1, rows, 1}, {128, 128, rows * 128}}.encode(map);
    return map;
}

// ---- instructions of a warp: mma, ldmatrix, cp.async

// Adds a (16 x 16) b (16 x 8). Rows of a and columns of b are contiguous.
static bool mma_multiplies() {
    Integers a(16 * 16, 1), b(8 * 16, 2);
    return holds(32, [a = a.data, b = b.data] {
        const unsigned g = threadIdx.x / 4, t = 2 * (threadIdx.x % 4);
        const auto pair = [=](const __nv_bfloat16* m, unsigned row, unsigned k) { return pair_at(m + row * 16 + k); };
        const uint32_t fragment[4] = {pair(a, g, t), pair(a, g + 8, t), pair(a, g, t + 8), pair(a, g + 8, t + 8)};
        float sum[4] = {0, 1, 2, 3};
        mma_m16n8k16(sum, fragment, pair(b, g, t), pair(b, g, t + 8));
        for (unsigned i = 0; i < 4; i++) {
            const unsigned row = g + i / 2 * 8, column = t + i % 2;
            for (unsigned k = 0; k < 16; k++) sum[i] -= float(a[row * 16 + k]) * float(b[column * 16 + k]);
        }
        return sum[0] == 0 && sum[1] == 1 && sum[2] == 2 && sum[3] == 3;
    });
}

// Copies three groups of two chunks per thread, by both functions for it. The last group is not valid and so writes
// zeros. Reads them when up to `pending` groups may be pending. Returns each group's number of chunks that had not been
// copied.
template <int pending> static std::array<int, 3> missing_copies() {
    Array<int4> in(64 * 6), out(64 * 6);
    for (int i = 0; i < 64 * 6; i++) in[static_cast<size_t>(i)] = make_int4(i, i + 1, i + 2, i + 3);
    run({1, 64, 64 * 96}, [out = out.data, in = in.data] {
        int4* to = reinterpret_cast<int4*>(dynamic_shared_memory) + threadIdx.x * 6;
        for (int i = 0; i < 6; i++) to[i] = make_int4(-1, -1, -1, -1);
        for (int i = 0; i < 6; i++) {
            const int4* from = in + threadIdx.x * 6 + i;
            if (i % 2 == 0) cp_async(to + i, from, i < 4);
            else __pipeline_memcpy_async(to + i, from, 16, i < 4 ? 0 : 16), __pipeline_commit();
        }
        cp_async_wait<pending>();
        for (int i = 0; i < 6; i++) out[threadIdx.x * 6 + i] = to[i];
        cp_async_wait<0>();
    });
    std::array<int, 3> missing{};
    for (size_t i = 0; i < out.size; i++) {
        const int4 expected = i % 6 < 4 ? in[i] : make_int4(0, 0, 0, 0);
        missing[i % 6 / 2] += memcmp(&out[i], &expected, sizeof(expected)) != 0;
    }
    return missing;
}

static void test_warp_instructions() {
    expect("mma_m16n8k16 adds a product, with the PTX manual's fragments", in_every_order(mma_multiplies));
    expect("ldmatrix: every lane gets its elements of four matrices, plain and transposed", in_every_order(32, [] {
        // Each lane passes the address of a row of 8 numbers (row stride 80 bytes).
        char* row = shared_bytes() + threadIdx.x * 80;
        for (unsigned i = 0; i < 8; i++)
            reinterpret_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(threadIdx.x * 8 + i);
        __syncwarp();
        uint32_t loaded[4], columns[4];
        ldmatrix(loaded, row);
        ldmatrix_transposed(columns, row);
        bool right = true;
        for (unsigned m = 0; m < 4; m++) {
            const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4, plain = (m * 8 + g) * 8 + 2 * t,
                           transposed = (m * 8 + 2 * t) * 8 + g;
            right = right && loaded[m] == (plain | (plain + 1) << 16) &&
                    columns[m] == (transposed | (transposed + 8) << 16);
        }
        return right;
    }, 32 * 80));
    expect("cp_async: after cp_async_wait<0> all groups are complete, with zeros where not valid",
           in_every_order([] { return missing_copies<0>() == std::array<int, 3>{}; }));
    expect("cp_async: under a seed, cp_async_wait<1> completes all groups but the last, which is partly complete",
           under_seeds(3, 4, [] {
               const auto missing = missing_copies<1>();
               return missing[0] == 0 && missing[1] == 0 && missing[2] > 20 && missing[2] < 108;
           }));
}

// ---- the Tensor Memory Accelerator (TMA)

// Loads boxes of 64 (without swizzling 16) x 2 x 3 x 2 from a tensor (3, 7, 5, 72): inside, across each edge, outside.
template <Fault S = Fault::NONE> static bool boxes_are_copied(CUtensorMapSwizzle swizzle) {
    constexpr int4 corners[] = {{0, 0, 0, 0},  {8, 3, 4, 1},   {16, 1, 1, 0}, {-8, 0, 0, 0}, {0, -1, 2, 0},
                                {0, 4, -2, 2}, {3, 0, 6, -1},  {72, 0, 0, 0}, {0, 5, 0, 0},  {0, -2, 0, 0},
                                {0, 0, 7, 0},  {0, 0, 100, 0}, {0, 0, 0, -2}, {80, 6, 9, 4}};
    const int columns = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 64 : 16, n[] = {72, 5, 7, 3},
              size[] = {columns, 2, 3, 2}, count = columns * 12, bytes = 2 * count;
    Array<uint16_t> in(80 * 5 * 8 * 3), out(static_cast<size_t>(count));  // strides are larger than extents
    for (size_t i = 0; i < in.size; i++) in[i] = static_cast<uint16_t>(i + 1);
    CUtensorMap map;
    if (MapRequest{in.data, 4, {72, 5, 7, 3}, {160, 800, 6400}, {static_cast<uint32_t>(columns), 2, 3, 2},
                   {1, 1, 1, 1}, swizzle}.encode(map) != CUDA_SUCCESS)
        return false;
    bool right = true;
    for (const int4& corner : corners) {
        const int at[] = {corner.x, corner.y, corner.z, corner.w};
        run({1, 32, static_cast<size_t>(bytes + 4096)}, [=, out = out.data] {
            uint64_t* barrier = reinterpret_cast<uint64_t*>(shared_bytes() + 2048 + bytes);
            if (threadIdx.x == 0) {
                mbarrier_init(barrier, 1);
                fence_mbarrier_init();
                mbarrier_arrive_expect_tx(barrier, bytes);
                tma_load(shared_bytes() + 1024, &map, barrier, corner.x, corner.y, corner.z, corner.w);
            }
            if (S != Fault::FULL_WAIT && threadIdx.x == 0) mbarrier_wait(barrier, 0);
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
                out[i] = reinterpret_cast<uint16_t*>(shared_bytes() + 1024)[i];
            mbarrier_wait(barrier, 0);
        });
        right = right && out.each([&](size_t place, uint16_t found) {
            const int i = static_cast<int>(place), row = i / columns, chunk = i % 64 / 8 ^ row % 8;
            int x[4], rest = columns == 64 ? row * 64 + chunk * 8 + i % 8 : i;
            bool inside = true;
            for (int d = 0; d < 4; d++) {
                x[d] = at[d] + rest % size[d];
                rest /= size[d];
                inside = inside && x[d] >= 0 && x[d] < n[d];
            }
            return found == (inside ? in[static_cast<size_t>(((x[3] * 8 + x[2]) * 5 + x[1]) * 80 + x[0])] : 0);
        });
    }
    return right;
}

TEST("tensor maps") {
    void (*const rejected[])(MapRequest&) = {
        [](MapRequest& r) { r.data = reinterpret_cast<void*>(8); }, [](MapRequest& r) { r.data = nullptr; },
        [](MapRequest& r) { r.rank = 0; },            [](MapRequest& r) { r.rank = 6; },
        [](MapRequest& r) { r.strides[1] += 8; },     [](MapRequest& r) { r.strides[2] = uint64_t{1} << 40; },
        [](MapRequest& r) { r.extents[2] = 0; },      [](MapRequest& r) { r.extents[0] = (uint64_t{1} << 32) + 1; },
        [](MapRequest& r) { r.box[2] = 257; },        [](MapRequest& r) { r.box[1] = 0; },
        [](MapRequest& r) { r.box[0] = 72; },         [](MapRequest& r) { r.box[0] = 4; },
        [](MapRequest& r) { r.steps[1] = 0; },        [](MapRequest& r) { r.steps[3] = 9; }};
    bool right = MapRequest{}.status() == CUDA_SUCCESS;
    for (const auto change : rejected) {
        MapRequest request;
        change(request);
        right = right && request.status() == CUDA_ERROR_INVALID_VALUE;
    }
    expect("cuTensorMapEncodeTiled rejects the addresses, strides, extents, boxes and steps that CUDA rejects", right);
    if (WARP_SIZE == 1) return;
    expect("tma_load copies boxes of four dimensions, swizzled or not, with zeros outside of the tensor",
           in_every_order([] {
               return boxes_are_copied(CU_TENSOR_MAP_SWIZZLE_128B) && boxes_are_copied(CU_TENSOR_MAP_SWIZZLE_NONE);
           }));
}

// ---- wgmma

// Return the row and column of this thread's accumulator i in D (64 x N).
static int row_of(int i) {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + i % 4 / 2 * 8;
}
static int column_of(int i) { return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2; }

// Computes d (64 x N) = a (64 x 64) b, or d += a b. b is (N x 64) for Major::K, (64 x N) for Major::MN. group_bytes:
// stride between groups of 8 rows (1024 if contiguous).
template <int N, Major B, bool a_in_registers, Fault S>
__global__ void multiply_tiles(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b, bool add, int group_bytes) {
    char *a_tile = shared_bytes() + 1024, *b_tile = shared_bytes() + 32768;
    const int block_bytes = 8 * group_bytes + 1024;  // MN: stride between blocks of 64 columns
    const auto place = [=](char* tile, int row, int chunk) {
        return chunk_at(tile + row / 8 * group_bytes, row % 8, chunk);
    };
    const auto operand = [=](char* tile, int block = 16) {
        return (wgmma_descriptor(tile, block) & ~(uint64_t{0x3fff} << 32)) |
               static_cast<uint64_t>(group_bytes / 16) << 32;
    };
    for (int i = static_cast<int>(threadIdx.x); i < 64 * 8; i += 128)
        memcpy(place(a_tile, i / 8, i % 8), a + i * 8, 16);
    for (int i = static_cast<int>(threadIdx.x); i < N * 8; i += 128) {
        const int row = i / (N / 8), column = i % (N / 8) * 8;
        if (B == Major::K)
            memcpy(place(b_tile, i / 8, i % 8), b + i * 8, 16);
        else
            memcpy(place(b_tile + column / 64 * block_bytes, row, column % 64 / 8), b + row * N + column, 16);
    }
    if (S != Fault::ASYNC_FENCE) async_fence();
    if (S != Fault::SYNCTHREADS) __syncthreads();
    float sum[N / 2];
    uint32_t fragments[4][4];
    for (int i = 0; i < N / 2; i++) sum[i] = add ? d[row_of(i) * N + column_of(i)] : NAN;
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 4; i++)
            fragments[k][i] = pair_at(a + row_of(2 * (i % 2)) * 64 + 16 * k + column_of(4 * (i / 2)));
    wgmma_fence(sum, fragments);
    for (int k = 0; k < 4; k++) {
        const uint64_t b_operand = B == Major::K ? operand(b_tile + 32 * k)
                                                 : operand(b_tile + 2 * group_bytes * k, N > 64 ? block_bytes : 16);
        if constexpr (a_in_registers)
            wgmma<N, B>(sum, fragments[k], b_operand, add || k > 0);
        else
            wgmma<N, B>(sum, operand(a_tile + 32 * k), b_operand, add || k > 0);
    }
    wgmma_commit();
    if (S == Fault::EARLY_RELEASE) memset(a_tile + threadIdx.x * 64, 0, 64);
    if (S == Fault::FRAGMENTS) fragments[3][3] = 0;
    if (S != Fault::LAST_WAIT) wgmma_wait<0>(sum);
    for (int i = 0; i < N / 2; i++) d[row_of(i) * N + column_of(i)] = sum[i];
    if (S == Fault::LAST_WAIT) wgmma_wait<0>(sum);
}

template <int N, Major B, bool a_in_registers, Fault S = Fault::NONE>
static bool tiles_multiply(int group_bytes = 1024) {
    constexpr int bytes = 200 * 1024;
    Integers a(64 * 64, 1), b(64 * N, 2);
    bool right = true;
    for (bool add : {false, true}) {
        Array<float> d(64 * N);
        for (size_t i = 0; i < d.size; i++) d[i] = static_cast<float>(i % 1000);
        const auto kernel = multiply_tiles<N, B, a_in_registers, S>;
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        launch({1, 128, bytes}, kernel, d.data, a.data, b.data, add, group_bytes);
        right = right && d.each([&](size_t i, float found) {
            const size_t m = i / N, n = i % N;
            float sum = add ? static_cast<float>(i % 1000) : 0;
            for (size_t k = 0; k < 64; k++)
                sum += a.at(m * 64 + k) * b.at(B == Major::K ? n * 64 + k : k * N + n);
            return found == sum;
        });
    }
    return right;
}

// Returns whether a kernel is wrong under one of a few seeds. It may end the program, so a child process calls this.
template <class Check> static bool goes_wrong(Check is_right) { return !under_seeds(1, 9, is_right); }
template <Fault S, bool a_in_registers = false> static bool tiles_go_wrong() {
    return goes_wrong([] { return tiles_multiply<64, Major::K, a_in_registers, S>(); });
}

struct Demonstration {
    const char* name;
    bool (*goes_wrong)();
};
static const Demonstration demonstrations[] = {
    {"the wait for a tma_load",
     [] { return goes_wrong([] { return boxes_are_copied<Fault::FULL_WAIT>(CU_TENSOR_MAP_SWIZZLE_128B); }); }},
    {"a wgmma_wait before an operand is overwritten", tiles_go_wrong<Fault::EARLY_RELEASE>},
    {"a wgmma_wait before the result is read", tiles_go_wrong<Fault::LAST_WAIT>},
    {"a wgmma_wait before fragments are overwritten", tiles_go_wrong<Fault::FRAGMENTS, true>},
    {"the async_fence after stores", tiles_go_wrong<Fault::ASYNC_FENCE>},
    {"the __syncthreads after other warps' stores", tiles_go_wrong<Fault::SYNCTHREADS>},
};

static void test_warpgroups() {
    expect("wgmma assigns and adds products, with A in shared memory or registers, N 64, 128 and 256, both majors",
           in_every_order([] {
               return tiles_multiply<64, Major::K, false>() && tiles_multiply<256, Major::K, false>() &&
                      tiles_multiply<64, Major::MN, true>() && tiles_multiply<128, Major::MN, false>() &&
                      tiles_multiply<128, Major::K, true>();
           }));
    expect("wgmma uses the descriptor's stride between groups of 8 rows",
           tiles_multiply<128, Major::K, false>(3072) && tiles_multiply<256, Major::MN, false>(2048));
    set_rounding(5);
    expect("mma and wgmma of integers are exact under CUDA_CPU_ROUNDING",
           mma_multiplies() && tiles_multiply<64, Major::K, false>());
    set_rounding(0);
    for (size_t i = 0; i < std::size(demonstrations); i++)
        expect(std::string("under some seed the result is wrong without ") + demonstrations[i].name,
               run_child("fault" + std::to_string(i)).second == 1);
}

// ---- invalid calls, and instructions that some GPUs do not have

// The operands of the kernels below, which have 128 threads: a tile in shared memory followed by a barrier.
struct Parts128 {
    char* tile;
    uint64_t* barrier;
    const __nv_bfloat16* data;
    const CUtensorMap* map;
    bool first;        // whether this is thread 0
    uint64_t operand;  // descriptor of the tile
    void load(void* to) const { tma_load(to, map, barrier, 0, 0, 0, 0); }
    void init(bool fence = true) const {
        if (first) mbarrier_init(barrier, 1);
        if (first && fence) fence_mbarrier_init();
        __syncthreads();
    }
};
using Operation = void (*)(const Parts128& p);
using Wgmma = float[32];

static void product(uint64_t a, uint64_t b, bool waits = true) {
    Wgmma d = {};
    wgmma_fence();
    wgmma<64, Major::K>(d, a, b, 0);
    if (!waits) return;
    wgmma_commit();
    wgmma_wait<0>(d);
}

struct Misuse {
    std::string message;   // empty: the call is valid
    Operation operation;
};
static const Misuse misuses[] = {
    {"thread 0 calls cp_async with an address that is not a multiple of 16",
     [](const Parts128& p) { if (p.first) cp_async(p.tile + 8, p.data, true); }},
    {"thread 0 ended without waiting for a cp_async",
     [](const Parts128& p) { if (p.first) cp_async(p.tile, p.data, true); }},
    {"thread 0 calls tma_load to an address that is not a multiple of 1024",
     [](const Parts128& p) { p.init(); if (p.first) p.load(p.tile + 512); }},
    {"thread 0 calls tma_load with a barrier that is not initialised",
     [](const Parts128& p) { if (p.first) p.load(p.tile); }},
    {"thread 0 calls tma_load before fence_mbarrier_init",
     [](const Parts128& p) { p.init(false); if (p.first) p.load(p.tile); }},
    {"thread 0 calls tma_load with a box that ends beyond the launch's shared memory",
     [](const Parts128& p) { p.init(); if (p.first) p.load(p.tile + 9 * 1024); }},
    {"the block ended without waiting for a tma_load",
     [](const Parts128& p) {
         p.init();
         if (!p.first) return;
         mbarrier_arrive_expect_tx(p.barrier, 16384);
         p.load(p.tile);
         mbarrier_wait(p.barrier, 1);  // waits for the previous phase
     }},
    {"thread 0 calls mbarrier_arrive for a barrier whose phase already has all 1 arrivals",
     [](const Parts128& p) {
         p.init();
         if (p.first) mbarrier_arrive_expect_tx(p.barrier, 64);
         if (p.first) mbarrier_arrive(p.barrier);
     }},
    {"deadlock: no thread can continue\n  threads 0: in mbarrier_wait, parity 0, barrier at byte 16384: 0 of 1 threads "
     "have arrived, 0 bytes are missing\n  threads 1-127: ended",
     [](const Parts128& p) { p.init(); if (p.first) mbarrier_wait(p.barrier, 0); }},
    {"calls named_barrier_sync for 100 threads; expected a multiple of 32, no more than the block's",
     [](const Parts128&) { named_barrier_sync(1, 100); }},
    {"thread 0 calls named_barrier_arrive but has already arrived at barrier 2",
     [](const Parts128& p) { for (int i = 0; i < 2 && p.first; i++) named_barrier_arrive(2, 128); }},
    {"threads 0-63: in named_barrier_sync, barrier 4: 64 of 128 threads have arrived\n  threads 64-127: ended",
     [](const Parts128&) { if (threadIdx.x < 64) named_barrier_sync(4, 128); }},
    {"calls mma_m16n8k16 but lanes of its warp have ended; expected all 32",
     [](const Parts128&) {
         Wgmma d = {};
         if (threadIdx.x % 32 < 16) mma_m16n8k16(d, {0, 0, 0, 0}, 0, 0);
     }},
    {"calls ldmatrix with an address that is not a multiple of 16",
     [](const Parts128& p) {
         uint32_t r[4];
         ldmatrix(r, p.tile + 4);
     }},
    {"calls shared_address with an address that is not in dynamic shared memory",
     [](const Parts128& p) { shared_address(p.data); }},
    {"wgmma: warp 0 has not called wgmma_fence",
     [](const Parts128& p) {
         Wgmma d = {};
         wgmma<64, Major::K>(d, p.operand, p.operand, 0);
     }},
    {"wgmma: the lanes of a warp pass different descriptors or different values of add",
     [](const Parts128& p) { product(p.operand, wgmma_descriptor(p.tile + threadIdx.x % 2 * 8192)); }},
    {"wgmma: the warps of warpgroup 0 do not call the same instruction",
     [](const Parts128& p) { product(p.operand, wgmma_descriptor(p.tile + threadIdx.x / 32 % 2 * 8192)); }},
    {"the warps of warpgroup 0 did not call the same wgmma instructions",
     [](const Parts128& p) { if (threadIdx.x < 32) product(p.operand, p.operand); }},
    {"warp 0 ended without waiting for a wgmma",
     [](const Parts128& p) { product(p.operand, p.operand, false); }},
    {"wgmma: a descriptor's swizzle is mode 2; expected 1 (128 bytes)",
     [](const Parts128& p) { product(p.operand, p.operand ^ uint64_t{3} << 62); }},
    {"wgmma reads beyond the launch's shared memory",
     [](const Parts128& p) { product(p.operand, wgmma_descriptor(p.tile + 16384)); }},
    {"wgmma: a descriptor starts at byte 128, in row 1 of a swizzle pattern; expected row 0: a multiple of 1024",
     [](const Parts128& p) { product(p.operand, wgmma_descriptor(p.tile + 128)); }},
    {"", [](const Parts128& p) { product(p.operand, wgmma_descriptor(p.tile, 0)); }},
};

struct Instruction {
    const char* name;
    int least, most;   // compute capabilities
    Operation operation;
};
static const Instruction instructions[] = {
    {"ldmatrix", 75, 999,
     [](const Parts128& p) {
         uint32_t r[4];
         ldmatrix(r, p.tile + threadIdx.x % 32 * 16);
     }},
    {"mma_m16n8k16", 80, 999, [](const Parts128&) { Wgmma d = {}; mma_m16n8k16(d, {0, 0, 0, 0}, 0, 0); }},
    {"cp_async", 80, 999, [](const Parts128& p) { cp_async(p.tile, p.data, true); cp_async_commit();
                                                    cp_async_wait<0>(); }},
    {"mbarrier_init", 90, 999,
     [](const Parts128& p) {
         p.init();
         if (!p.first) return;
         mbarrier_arrive_expect_tx(p.barrier, 8192);
         p.load(p.tile);
         mbarrier_wait(p.barrier, 0);
     }},
    {"async_fence", 90, 999, [](const Parts128&) { async_fence(); }},
    {"wgmma_fence", 90, 90, [](const Parts128& p) { product(p.operand, p.operand); }},
    {"setmaxnreg_dec", 90, 90, [](const Parts128&) { setmaxnreg_dec<24>(); }},
    {"named_barrier_sync", 75, 999, [](const Parts128&) { if (threadIdx.x < 64) named_barrier_sync(1, 64); }},
};

// Runs an operation in a child process and returns the exit code.
static int run_operation(Operation operation) {
    Integers data(64 * 64, 1);
    cudaDeviceSynchronize();
    run({1, 128, 16384 + 64}, [operation, data = data.data, map = map_of(data.data, 64)] {
        char* const tile = shared_bytes();
        operation({tile, reinterpret_cast<uint64_t*>(tile + 16384), data, &map, threadIdx.x == 0,
                   wgmma_descriptor(tile)});
    });
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 3;
}

TEST("tensor cores") {
    if (WARP_SIZE == 1) {
        expect("with WARP_SIZE 1, PTX instructions report that they need warps of 32 threads",
               child_fails(1, "need warps of 32 threads", "misuse1"));
        return;
    }
    test_warp_instructions();
    test_warpgroups();
    for (size_t i = 0; i < std::size(misuses); i++) {
        const auto [output, code] = run_child("misuse" + std::to_string(i));
        const std::string& message = misuses[i].message;
        expect(message.empty() ? "a valid call prints nothing" : "reported: " + message.substr(0, message.find('\n')),
               message.empty() ? code == 0 && output.empty() : code == 1 && contains(output, message));
    }
}

// ==== emulated GPUs =====================================================================================

__global__ void holds_4_kib(float* out) {
    __shared__ float own[1024];
    own[threadIdx.x] = out[0];
    __syncthreads();
    out[0] = own[(threadIdx.x + 1) % blockDim.x];
}

__device__ float rotated(float x) {
    __shared__ float values[64];
    values[threadIdx.x] = x;
    __syncthreads();
    return values[(threadIdx.x + 1) % blockDim.x];
}
__global__ void calls_rotated(float* out) { out[threadIdx.x] = rotated(1); }

// ---- streams

__global__ void set_to(float* x, float value) { *x = value; }
__global__ void add_to(float* sum, const float* x) { *sum += *x; }

// Two streams, device memory x and sum (both 0), pinned host memory (7), and an event.
struct TwoStreams {
    cudaStream_t compute, copies;
    cudaEvent_t event;
    Array<float> x_array{1}, sum_array{1};
    float *const x = x_array.data, *const sum = sum_array.data, *pinned;

    explicit TwoStreams(unsigned flags = cudaStreamNonBlocking) {
        cudaStreamCreateWithFlags(&compute, flags);
        cudaStreamCreateWithFlags(&copies, flags);
        cudaEventCreate(&event);
        cudaMallocHost(&pinned, sizeof(float));
        *pinned = 7;
        cudaDeviceSynchronize();
    }
    ~TwoStreams() {
        cudaDeviceSynchronize();
        cudaFreeHost(pinned);
        cudaEventDestroy(event);
        cudaStreamDestroy(compute);
        cudaStreamDestroy(copies);
    }
    void upload() const { cudaMemcpyAsync(x, pinned, sizeof(float), cudaMemcpyHostToDevice, copies); }
    void add(cudaStream_t stream) const { launch({1, 1, 0, stream}, add_to, sum, x); }
    void set(float* to, float value) const { launch({1, 1, 0, compute}, set_to, to, value); }
    void let_compute_wait(bool waits) {
        cudaEventRecord(event, copies);
        if (waits) cudaStreamWaitEvent(compute, event);
    }
    float result() const {
        float value = 0;
        cudaMemcpyAsync(&value, sum, sizeof(value), cudaMemcpyDeviceToHost, compute);
        cudaStreamSynchronize(compute);
        return value;
    }
};

// A use of two streams. is_right() runs it and returns whether the result is correct. ordered: a stream or the host
// waits where necessary. needs_order: without this wait, the result must be wrong under some seed.
struct Scenario {
    const char* name;
    bool needs_order;
    bool (*is_right)(TwoStreams& s, bool ordered);
};
static const Scenario scenarios[] = {
    {"a kernel waits for a copy in another stream", true,
     [](TwoStreams& s, bool ordered) {
         s.upload();
         s.let_compute_wait(ordered);
         s.add(s.compute);
         return s.result() == 7;
     }},
    {"pinned memory is read after the copy to it", true,
     [](TwoStreams& s, bool ordered) {
         s.set(s.sum, 3);
         cudaMemcpyAsync(s.pinned, s.sum, sizeof(float), cudaMemcpyDeviceToHost, s.compute);
         if (ordered) cudaStreamSynchronize(s.compute);
         return *s.pinned == 3;
     }},
    {"a graph waits, and its launches run one after another", true,
     [](TwoStreams& s, bool ordered) {
         cudaError_t error = cudaSuccess;
         const cudaGraphExec_t graph = captured(s.compute, error, [&] {
             s.add(s.compute);
             launch({1, 1, 0, s.compute}, add_to, s.sum, static_cast<const float*>(s.sum));
         });
         s.upload();
         s.let_compute_wait(ordered);
         for (int run = 0; run < 2; run++) cudaGraphLaunch(graph, s.compute);
         cudaGraphExecDestroy(graph);
         return error == cudaSuccess && s.result() == 2 * (2 * 7 + 7);
     }},
    {"a matrix product waits, and keeps its alpha", true,
     [](TwoStreams& s, bool ordered) {
         LtCall call;
         call.set(CUDA_R_32F, 1, 1, 1, false);
         float alpha = 1;
         s.upload();
         s.let_compute_wait(ordered);
         call.multiply(alpha, s.x, s.x, 0, nullptr, s.sum, s.compute);
         alpha = 2;
         return s.result() == 49;
     }},
    {"a stream waits for the last record of an event before the wait, not for later ones", false,
     [](TwoStreams& s, bool) {
         s.upload();
         s.let_compute_wait(true);
         cudaEventRecord(s.event, s.compute);
         s.add(s.compute);
         return cudaEventSynchronize(s.event) == cudaSuccess && s.result() == 7;
     }},
    {"the default stream orders blocking streams, but not non-blocking ones", true,
     [](TwoStreams&, bool ordered) {
         TwoStreams s(ordered ? cudaStreamDefault : cudaStreamNonBlocking);
         s.upload();
         s.add(nullptr);
         launch({1, 1, 0, s.compute}, add_to, s.sum, static_cast<const float*>(s.sum));
         return s.result() == 14;
     }},
    {"cudaFree waits for all work", false,
     [](TwoStreams& s, bool) {
         float* device = nullptr;
         cudaMalloc(&device, sizeof(float));
         s.set(s.sum, 3);
         cudaFree(device);
         return *s.sum == 3;
     }},
};

static void test_streams() {
    for (const Scenario& scenario : scenarios) {
        const auto is_right = [&](bool ordered) {
            TwoStreams s;
            return scenario.is_right(s, ordered);
        };
        const auto under_each_seed = [&](bool ordered) {
            return under_seeds(1, 41, [&] { return on("h100", [&] { return is_right(ordered); }); });
        };
        const bool found = !scenario.needs_order || !under_each_seed(false);
        expect(scenario.name + std::string(scenario.needs_order ? "; without the wait a result is wrong" : ""),
               under_each_seed(true) && found && is_right(true));
    }
    expect("without an emulated GPU, work is complete when its call returns", [] {
        TwoStreams s;
        return scenarios[0].is_right(s, false);
    }());
    expect("all calls that wait return the error of queued work", on("h100", [] {
              TwoStreams s;
              bool right = cuda_cpu::submit(s.compute, [] { return cudaErrorUnknown; }) == cudaSuccess;
              for (int call = 0; call < 2; call++)
                  right = right && cudaStreamSynchronize(s.compute) == cudaErrorUnknown;
              cuda_cpu::asynchronous_error() = cudaSuccess;
              return right;
          }));
}

// ---- capture

// A call during a capture, and its expected result. An error must invalidate the capture.
struct CapturedCall {
    const char* name;
    cudaError_t expected;
    cudaError_t (*call)(TwoStreams&);
    unsigned flags = cudaStreamNonBlocking;  // of the captured stream
};
constexpr auto rejected = cudaErrorStreamCaptureUnsupported, implicit = cudaErrorStreamCaptureImplicit;
static cudaError_t copy(TwoStreams& s) { return cudaMemcpy(s.x, s.pinned, 4, cudaMemcpyHostToDevice); }
static cudaError_t launch_by_default(TwoStreams& s) { return launch({1, 1}, set_to, s.x, 1.0f); }
static cudaError_t wait_for_event_of(TwoStreams& s, cudaStream_t stream) {
    cudaEventRecord(s.event, stream);
    return cudaStreamWaitEvent(s.compute, s.event);
}
static const CapturedCall captured_calls[] = {
    {"cudaFree", rejected, [](TwoStreams&) { return cudaFree(nullptr); }},
    {"cudaMemcpy", rejected, copy},
    {"cudaStreamSynchronize of another stream", rejected,
     [](TwoStreams& s) { return cudaStreamSynchronize(s.copies); }},
    {"cudaEventSynchronize", rejected, [](TwoStreams& s) { return cudaEventSynchronize(s.event); }},
    {"cudaDeviceSynchronize", rejected, [](TwoStreams&) { return cudaDeviceSynchronize(); }},
    {"cudaStreamSynchronize", rejected, [](TwoStreams& s) { return cudaStreamSynchronize(s.compute); }},
    {"cudaStreamWaitEvent, event outside of the capture", cudaErrorStreamCaptureIsolation,
     [](TwoStreams& s) { return wait_for_event_of(s, s.copies); }},
    {"cudaStreamWaitEvent, event of the capture", cudaSuccess,
     [](TwoStreams& s) { return wait_for_event_of(s, s.compute); }},
    {"cudaStreamWaitEvent of another stream", cudaSuccess,
     [](TwoStreams& s) { return cudaStreamWaitEvent(s.copies, s.event); }},
    {"launch on the default stream", cudaSuccess, launch_by_default},
    {"cudaMemcpy, blocking stream captured", implicit, copy, cudaStreamDefault},
    {"launch on the default stream, blocking stream captured", implicit, launch_by_default, cudaStreamDefault}};

static void test_captures(const char* card) {
    const std::string what = "a capture rejects calls that free or may wait, events outside of it, and, on an emulated "
                             "GPU, the default stream if the captured stream is blocking; it accepts other calls";
    expect_each(what, captured_calls, [=](const CapturedCall& c) {
        return (*card == 0 && c.flags == cudaStreamDefault) || on(card, [&] {
            TwoStreams s(c.flags);
            cudaGraph_t graph = nullptr;
            cudaStreamBeginCapture(s.compute, cudaStreamCaptureModeThreadLocal);
            const cudaError_t error = c.call(s), end = cudaStreamEndCapture(s.compute, &graph);
            cudaGraphDestroy(graph);
            return error == c.expected && end == (error ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
        });
    });
}

TEST("captures") { test_captures(""); }

// ---- cuBLASLt and instructions

static void promise(Parts& p, uint32_t bytes) { std::fill_n(p.preference.alignments, 4, bytes); }
static const Case card_cases[] = {
    {"a bias", fine, [](Parts& p) { p.desc.epilogue = bias_epilogue, p.desc.bias_type = CUDA_R_16BF; }},
    {"a bias of another type", unsupported,
     [](Parts& p) { p.desc.epilogue = bias_epilogue, p.desc.bias_type = CUDA_R_32F; }},
    {"a bias of float to float", fine,
     [](Parts& p) { p.desc.epilogue = bias_epilogue, p.d.type = CUDA_R_32F, p.desc.bias_type = CUDA_R_32F; }},
    {"aux", fine, [](Parts& p) { p.desc.epilogue = dgelu, p.aux_offset = 16; }},
    {"aux_ld of 20", unsupported, [](Parts& p) { p.desc.epilogue = dgelu, p.desc.aux_ld = 20; }},
    {"aux at 8 bytes", unsupported, [](Parts& p) { p.desc.epilogue = dgelu, p.aux_offset = 8; }},
    {"A at 16 bytes", fine, [](Parts& p) { p.a_offset = 16; }},
    {"A at 8 bytes", invalid, [](Parts& p) { p.a_offset = 8; }},
    {"D at 2 bytes", invalid, [](Parts& p) { p.d_offset = 2; }},
    {"A at 8 bytes, 8 promised", fine, [](Parts& p) { promise(p, 8), p.a_offset = 8; }},
    {"A at 4 bytes, 8 promised", invalid, [](Parts& p) { promise(p, 8), p.a_offset = 4; }},
};

TEST("cards") {
    if (WARP_SIZE == 1) {
        expect("emulating a GPU with WARP_SIZE 1 is rejected",
               child_fails(2, "needs a build with -DWARP_SIZE=32", "global", "CUDA_CPU_CARD=h100"));
        return;
    }
    for (const cuda_cpu::Card& card : cuda_cpu::cards) {
        const int capability = card.capability.number();
        expect(card.key + std::string(": properties, shared memory, tensor maps, FP8 are the GPU's"), on(card.key, [&] {
            cudaDeviceProp p;   // as in card.h, the only place that has the numbers
            cudaGetDeviceProperties(&p, 0);
            return p.name == std::string(card.name) && p.major * 10 + p.minor == capability &&
                   p.multiProcessorCount == card.multiprocessors && p.totalGlobalMem == card.memory_bytes &&
                   p.sharedMemPerMultiprocessor == card.capability.shared_per_multiprocessor &&
                   p.reservedSharedMemPerBlock == p.sharedMemPerMultiprocessor - p.sharedMemPerBlockOptin &&
                   p.sharedMemPerBlock == 48 << 10 && p.regsPerBlock == 65536 && p.warpSize == 32 &&
                   shared_memory_ends_at(p.sharedMemPerBlockOptin) &&
                   (MapRequest{}.status() == CUDA_SUCCESS) == (capability >= 90) &&
                   has_status(fine, true, [](Parts&) {}) == (capability >= 89) &&
                   has_status(fine, true, a_not_transposed) == (capability / 10 == 10);
        }));
        expect_each(std::string(card.key) + ": PTX instructions that the GPU does not have are rejected", instructions,
                    [&](const Instruction& i) {
            const auto [output, code] = run_child("instruction" + std::to_string(&i - instructions),
                                                  std::string("CUDA_CPU_CARD=") + card.key);
            if (capability >= i.least && capability <= i.most) return code == 0 && output.empty();
            return code == 1 && contains(output, std::string("calls ") + i.name +
                                                     " but it is an illegal instruction on " + card.name);
        });
    }
    expect("an unknown GPU is rejected with a list of those that can be emulated",
           child_fails(2, "CUDA_CPU_CARD is \"h900\"; expected one of h100, h200, a100, 4090, l40s, t4, b200", "global",
                       "CUDA_CPU_CARD=h900"));
    expect("symbols and rows are copied on an emulated GPU, and launches by address run", on("h100", [] {
              const auto all = [] { return symbols_are_copied() && rows_are_copied() && memory_is_registered() &&
                                               launches_by_address() && blas_is_right<float>(); };
              return under_seeds(1, 8, all);
          }));
    test_streams();
    test_captures("h100");
    expect_each("cuBLASLt checks types and alignment of epilogues and operands", card_cases,
                [](const Case& c) { return on("h100", [&] { return has_status(c.status, false, c.change); }); });
}

TEST("limits of cards") {
    if (WARP_SIZE == 1) return;
    expect("occupancy and attributes are the GPU's", on("h100", [] {
        int blocks = 0, grid = 0, threads = 0, value = 0;
        const auto resident = [&](int size, size_t bytes) {
            const auto error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, size, bytes);
            return error == cudaSuccess ? blocks : -1;
        };
        const auto shared_bytes = [](int size) { return size > 512 ? 200 << 10 : 0; };
        return resident(256, 0) == 8 && resident(32, 0) == 32 && resident(33, 0) == 32 && resident(1024, 0) == 2 &&
               resident(64, 56 << 10) == 4 && resident(64, 256 << 10) == 0 && resident(1025, 0) == -1 &&
               cudaOccupancyMaxPotentialBlockSize(&grid, &threads, nothing) == cudaSuccess && grid == 264 &&
               threads == 1024 && cudaOccupancyMaxPotentialBlockSize(&grid, &threads, nothing, 0, 200) == cudaSuccess &&
               threads == 128 && grid == 132 * 16 &&
               cudaOccupancyMaxPotentialBlockSizeVariableSMem(&grid, &threads, nothing, shared_bytes) == cudaSuccess &&
               threads == 512 && grid == 132 * 4 &&
               cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess && value == 132 &&
               cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && value == 9 &&
               cudaDeviceGetAttribute(&value, cudaDeviceAttr(9999), 0) == cudaErrorInvalidValue &&
               cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 7) == cudaErrorInvalidDevice;
    }));
    expect("a kernel's __shared__ arrays count towards its shared memory", on("h100", [] {
        constexpr auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
        Array<float> out(1);
        const auto with = [&](size_t bytes) { return launch({1, 1, bytes}, holds_4_kib, out.data); };
        return with(44 << 10) == cudaSuccess && with((44 << 10) + 1) == cudaErrorInvalidValue &&
               cudaFuncSetAttribute(holds_4_kib, dynamic, (223 << 10) + 1) == cudaErrorInvalidValue &&
               cudaFuncSetAttribute(holds_4_kib, dynamic, 223 << 10) == cudaSuccess && with(223 << 10) == cudaSuccess;
    }));
    expect("so do those of the functions that it calls", on("h100", [] {
        // The arrays are noticed after the first block.
        Array<float> out(32);
        const auto with = [&](size_t bytes) { return launch({1, 32, bytes}, calls_rotated, out.data); };
        const bool noticed = with(48 << 10) == cudaSuccess && cudaDeviceSynchronize() == cudaErrorInvalidValue;
        cuda_cpu::asynchronous_error() = cudaSuccess;
        return noticed && with(48 << 10) == cudaErrorInvalidValue && with((48 << 10) - 256) == cudaSuccess &&
               cudaFuncSetAttribute(calls_rotated, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10) ==
                   cudaErrorInvalidValue;
    }));
    expect("device memory is the GPU's minus the context's, in pages of 2 MiB, and NaN at first; more is rejected",
           on("h100", [] {
        constexpr size_t mib = 1 << 20;
        size_t before = 0, after = 0, total = 0;
        char *most = nullptr, *more = nullptr, *blocks[3];
        cudaMemGetInfo(&before, &total);
        const size_t all = before / (2 * mib) * (2 * mib);
        bool right = total / mib > 79 * 1024 && total / mib < 80 * 1024 && total - before > 100 * mib &&
                     total - before < 2048 * mib;
        right = right && cudaMalloc(&more, before + 1) == cudaErrorMemoryAllocation && more == nullptr;
        right =
            right && cudaMalloc(&most, all) == cudaSuccess && cudaMalloc(&more, 2 * mib) == cudaErrorMemoryAllocation;
        if (right) most[all - 1] = 1;  // the last byte can be written
        right = right && cudaFree(most) == cudaSuccess;
        for (size_t i = 0; i < 3; i++) cudaMalloc(&blocks[i], i < 2 ? 1000 : 2 * mib + 1);
        cudaMemGetInfo(&after, &total);
        right = right && before - after == 2 * mib + 4 * mib && std::isnan(*reinterpret_cast<float*>(blocks[2]));
        for (char* block : blocks) cudaFree(block);
        cudaMemGetInfo(&after, &total);
        return right && after == before;
    }));
    expect("copies whose kind does not match the memory, or that exceed an allocation, are rejected",
           on("h100", [] {
        float host[4] = {};
        const Array<float> array(4);
        float* const block = array.data;
        struct { void* to; const void* from; size_t bytes; cudaMemcpyKind kind; cudaError_t error; } const copies[] = {
            {block, host, 16, cudaMemcpyHostToDevice, cudaSuccess},
            {host, block, 16, cudaMemcpyDefault, cudaSuccess},
            {block, host, 16, cudaMemcpyDeviceToHost, cudaErrorInvalidValue},
            {host, block, 16, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
            {block, host, 16, cudaMemcpyDeviceToDevice, cudaErrorInvalidValue},
            {block, host, 17, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
            {block + 1, host, 12, cudaMemcpyHostToDevice, cudaSuccess},
            {block + 1, host, 13, cudaMemcpyHostToDevice, cudaErrorInvalidValue}};
        bool right = cudaMemset(block, 0, 16) == cudaSuccess && cudaMemset(block, 0, 17) == cudaErrorInvalidValue &&
                     cudaMemset(host, 0, 16) == cudaErrorInvalidValue;
        for (const auto& c : copies) right = right && cudaMemcpy(c.to, c.from, c.bytes, c.kind) == c.error;
        return right;
    }));
}

// ==== atomics ===========================================================================================

// Calls operation() in every thread of a launch, on one number. Returns the final number and the sorted results.
template <class T, class Operation> static std::pair<T, std::vector<T>> after_all(T first, Operation operation) {
    Array<T> number(1), seen(256);
    number[0] = first;
    run({4, 64}, [=, number = number.data, seen = seen.data] {
        const unsigned t = blockIdx.x * blockDim.x + threadIdx.x;
        seen[t] = operation(number, t);
    });
    std::vector<T> values = seen.values();
    std::sort(values.begin(), values.end());
    return {number[0], values};
}
template <class T> static bool sums_of(T value) {
    const auto [sum, seen] = after_all<T>(T(3), [=](T* n, unsigned) { return atomicAdd(n, value); });
    bool each_once = sum == T(3) + T(256) * value;
    for (size_t i = 0; i < seen.size(); i++) each_once = each_once && seen[i] == T(3) + static_cast<T>(i) * value;
    return each_once;
}

// The operations of cuda::atomic_ref and cuda::atomic on one number.
template <class T> static bool atomic_types_are_right() {
    T number = 5, expected = 4;
    const cuda::atomic_ref<T, cuda::thread_scope_device> r(number);
    bool right = r.fetch_add(3, cuda::memory_order_relaxed) == 5 && r.load(cuda::memory_order_acquire) == 8 &&
                 r.fetch_sub(1) == 8 && r.fetch_max(20) == 7 && r.fetch_min(6) == 20 && r.exchange(9) == 6 &&
                 !r.compare_exchange_strong(expected, 1) && expected == 9 && r.compare_exchange_weak(expected, 1) &&
                 ++r == 2 && r-- == 2 && (r += 10) == 11 && r == 11 && number == 11;
    r.store(3, cuda::memory_order_release);
    cuda::std::atomic<T> value(7);
    return right && number == 3 && value++ == 7 && (value = 2) == 2 && value.fetch_add(4) == 2 && value == 6;
}

TEST("atomics") {
    expect("cuda::atomic_ref and cuda::atomic: operations on int, unsigned long long, float",
           atomic_types_are_right<int>() && atomic_types_are_right<unsigned long long>() &&
               atomic_types_are_right<float>());
    expect("a thread waits for an atomic flag", in_every_order(64, [] {
        __shared__ int data;
        __shared__ cuda::atomic<int, cuda::thread_scope_block> flag;
        if (threadIdx.x == 0) flag.store(0);
        __syncthreads();
        if (threadIdx.x == 40) {
            data = 7;
            flag.store(1, cuda::memory_order_release);
        }
        flag.wait(0, cuda::memory_order_acquire);
        return data == 7;
    }));
    expect("each atomicAdd returns a different sum, for int, unsigned, unsigned long long, float, double, bfloat16",
           sums_of<int>(2) && sums_of<unsigned>(3) && sums_of<unsigned long long>(1ull << 40) && sums_of<float>(0.5f) &&
               sums_of<double>(0.125) &&
               after_all<__nv_bfloat16>(0, [](auto* n, unsigned) { return atomicAdd(n, 1); }).first == 256.0f);
    const auto wrapped = after_all<unsigned>(0, [](unsigned* n, unsigned) { return atomicInc(n, 99); });
    expect("atomicInc wraps above its bound", wrapped.first == 56 && wrapped.second.back() == 99);
    const auto won = after_all<int>(-1, [](int* n, unsigned t) { return atomicCAS(n, -1, static_cast<int>(t)); });
    expect("atomicCAS succeeds in exactly one thread",
           std::count(won.second.begin(), won.second.end(), -1) == 1 && won.second[1] == won.first);
    const auto down = after_all<unsigned>(5, [](unsigned* n, unsigned) { return atomicDec(n, 99); });
    long long smallest = -3;
    expect("atomicDec wraps below 0; atomics of 64 bits, of the block and the system",
           down.first == 49 && down.second.back() == 99 && atomicMin(&smallest, 1ll << 40) == -3 &&
               atomicMax_system(&smallest, 1ll << 40) == -3 && smallest == 1ll << 40 &&
               after_all<int>(0, [](int* n, unsigned) { return atomicAdd_block(n, 2); }).first == 512);
    unsigned bits = 0xf0;
    expect("atomicMin, atomicMax, atomicAnd, atomicOr, atomicXor, atomicSub and atomicExch are correct",
           atomicMin(&bits, 0xf1u) == 0xf0 && atomicMax(&bits, 3u) == 0xf0 &&
               atomicAnd(&bits, 0x3c) == 0xf0 && atomicOr(&bits, 0x01) == 0x30 && atomicXor(&bits, 0x11) == 0x31 &&
               atomicSub(&bits, 0x20) == 0x20 && atomicExch(&bits, 7u) == 0 && bits == 7);
}

// ==== main ==============================================================================================

// Runs a child process's part of a test; returns the exit code.
static int run_as_child(const std::string& what) {
    const auto number_after = [&](const char* word) { return atoi(what.c_str() + strlen(word)); };
    if (what.rfind("fault", 0) == 0) return demonstrations[number_after("fault")].goes_wrong() ? 1 : 0;
    if (what.rfind("instruction", 0) == 0) return run_operation(instructions[number_after("instruction")].operation);
    if (what.rfind("misuse", 0) == 0) return run_operation(misuses[number_after("misuse")].operation);
    return run_fatal_error(what);
}

int main(int argc, char** argv) {
    const std::string first = argc > 1 ? argv[1] : "";
    if (first == "workers") return print_workers(argc, argv);
    if (argc == 2 && first != "--list") return run_as_child(first);
    return run_tests(argc, argv, "CHILD'S ARGUMENT");
}
