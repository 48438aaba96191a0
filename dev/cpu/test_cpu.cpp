// Tests of the CPU stand-in, a claim a line. Build it as a program is built (README.md), for either width:
//
//   g++ -std=c++17 -O3 -march=native -fopenmp -Wno-unknown-pragmas -Idev/cpu -DWARP_SIZE=32 -DHAVE_ONEDNN
//       dev/cpu/test_cpu.cpp -o test_cpu -lboost_context -ldnnl
#include <cooperative_groups.h>
#include <cooperative_groups/scan.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda/barrier>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#include <ptx.h>

#include <fcntl.h>
#include <sys/wait.h>

#include <array>
#include <cfloat>
#include <cmath>
#include <functional>
#include <random>
#include <sstream>

extern __shared__ float4 dynamic_shared_memory[];

// ==== the harness =======================================================================================

static int passed = 0, failed = 0;

static void claim(const std::string& what, bool holds)
{
    printf("%s  %s\n", holds ? "ok    " : "FAILED", what.c_str());
    fflush(stdout);
    ++(holds ? passed : failed);
}

template <class... Parameters, class... Arguments>
static cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(Parameters...), Arguments... arguments)
{
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A vector that kernels may write: its size is that of the array on the "device".
template <class T>
struct Array {
    T* data = nullptr;
    size_t size;
    explicit Array(size_t size_) : size(size_)
    {
        cudaMalloc(&data, size * sizeof(T));
        cudaMemset(data, 0, size * sizeof(T));
    }
    ~Array() { cudaFree(data); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    T& operator[](size_t i) { return data[i]; }
    std::vector<T> values() const { return {data, data + size}; }
};

// Runs this program again to do something fatal, and returns what it said and how it ended.
static std::pair<std::string, int> run_child(const std::string& deed, const std::string& before = "")
{
    char self[4096] = "";
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return {"no /proc/self/exe", -1};
    FILE* pipe = popen((before + " '" + std::string(self) + "' " + deed + " 2>&1").c_str(), "r");
    std::string said;
    for (int c; (c = fgetc(pipe)) != EOF;) said += static_cast<char>(c);
    const int status = pclose(pipe);
    return {said, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Whether something holds in the natural order and under a few seeds.
template <class Check>
static bool in_every_order(Check check)
{
    bool holds = true;
    for (uint64_t seed = 0; seed < 8; seed++) {
        cuda_cpu::set_seed(seed);
        holds = check() && holds;
    }
    cuda_cpu::set_seed(0);
    return holds;
}

// ==== threads and blocks ================================================================================

__global__ void count_visits(int* visits, dim3 grid, dim3 block)
{
    const bool same = gridDim.x == grid.x && gridDim.y == grid.y && gridDim.z == grid.z && blockDim.x == block.x && blockDim.y == block.y && blockDim.z == block.z;
    const unsigned b = blockIdx.x + grid.x * (blockIdx.y + grid.y * blockIdx.z);
    const unsigned t = threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
    if (same) visits[b * block.x * block.y * block.z + t]++;
}

static bool every_thread_runs_once(dim3 grid, dim3 block)
{
    Array<int> visits(grid.x * grid.y * grid.z * block.x * block.y * block.z);
    launch(grid, block, 0, count_visits, visits.data, grid, block);
    return visits.values() == std::vector<int>(visits.size, 1);
}

__global__ void reduce_block(const float* in, float* out)
{
    __shared__ float partial[32];
    float sum = in[blockIdx.x * blockDim.x + threadIdx.x];
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (WARP_SIZE == 1) {  // the block is the warp's size times three in both widths
        float* all = reinterpret_cast<float*>(dynamic_shared_memory);
        all[threadIdx.x] = sum;
        __syncthreads();
        for (unsigned t = 0; t < blockDim.x && threadIdx.x == 0; t++) out[blockIdx.x] += all[t];
        return;
    }
    if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned w = 0; w < blockDim.x / WARP_SIZE; w++) out[blockIdx.x] += partial[w];
}

static bool a_block_reduces(unsigned threads)
{
    const unsigned blocks = 37;
    Array<float> in(blocks * threads), out(blocks);
    std::vector<float> expected(blocks);
    for (unsigned i = 0; i < in.size; i++) expected[i / threads] += in[i] = static_cast<float>(i % 101);
    launch(blocks, threads, threads * sizeof(float), reduce_block, in.data, out.data);
    return std::equal(expected.begin(), expected.end(), out.data);
}

__global__ void vote(int* result)
{
    const int third = threadIdx.x % 3 == 0;
    result[threadIdx.x] = __syncthreads_count(third) * 1000 + __syncthreads_or(third) * 100 + __syncthreads_or(0) * 10 + __syncthreads_and(third) + 2 * __syncthreads_and(1);
}

__global__ void half_leave(int* sum)
{
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
}

// Each thread reads what the one before it wrote; in the natural order that one has run already.
__global__ void forgets_barrier(int* out)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = -1;
    __syncthreads();
    tile[threadIdx.x] = static_cast<int>(threadIdx.x);
    out[threadIdx.x] = tile[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}

__global__ void note_order(int* order, int* place)
{
    order[blockIdx.x * blockDim.x + static_cast<unsigned>(atomicAdd(&place[blockIdx.x], 1))] = static_cast<int>(threadIdx.x);
    __syncthreads();
    order[blockIdx.x * blockDim.x + static_cast<unsigned>(atomicAdd(&place[blockIdx.x], 1)) % blockDim.x] += 1000 * static_cast<int>(threadIdx.x);
}

static std::vector<int> order_under(uint64_t seed)
{
    Array<int> order(4 * 64), place(4);
    cuda_cpu::set_seed(seed);
    launch(4, 64, 0, note_order, order.data, place.data);
    cuda_cpu::set_seed(0);
    return order.values();
}

__global__ void read_unwritten_shared(float* out) { *out = reinterpret_cast<float*>(dynamic_shared_memory)[threadIdx.x]; }

static void test_blocks()
{
    claim("every thread of every block runs once, with its own indices", in_every_order([] {
        return every_thread_runs_once({5, 3, 2}, {4, 3, 5}) && every_thread_runs_once(1, 1) && every_thread_runs_once(1000, 1) && every_thread_runs_once(3, 1024);
    }));
    claim("a block of 96 threads reduces through shuffles and shared memory", in_every_order([] { return a_block_reduces(96); }));
    claim("votes at a barrier: count, or, and", in_every_order([] {
        Array<int> result(100);
        launch(1, 100, 0, vote, result.data);
        return result.values() == std::vector<int>(100, 34102);
    }));
    claim("exited threads do not count at a barrier", in_every_order([] {
        Array<int> sum(64);
        launch(1, 64, 0, half_leave, sum.data);
        bool right = true;
        for (int t = 0; t < 64; t++) right = right && sum[static_cast<size_t>(t)] == (t % 2 == 1 ? 0 : 32 * 55);
        return right;
    }));
    int shown = 0, shown_in_natural_order = 0;
    for (uint64_t seed = 0; seed < 10; seed++) {
        cuda_cpu::set_seed(seed);
        Array<int> out(64);
        launch(1, 64, 0, forgets_barrier, out.data);
        bool wrong = false;
        for (int t = 1; t < 64; t++) wrong = wrong || out[static_cast<size_t>(t)] != t - 1;
        (seed == 0 ? shown_in_natural_order : shown) += wrong;
    }
    cuda_cpu::set_seed(0);
    claim("a missing barrier shows under some seed, where the natural order hides it", shown > 0 && shown_in_natural_order == 0);
    claim("one seed gives one order of threads, another gives another", order_under(7) == order_under(7) && order_under(7) != order_under(8) && order_under(7) != order_under(0));
    cuda_cpu::set_seed(1);
    Array<float> out(1);
    launch(1, 1, 4, read_unwritten_shared, out.data);
    cuda_cpu::set_seed(0);
    claim("under a seed, shared memory nobody wrote is not a number", std::isnan(out[0]));
}

// ==== warps =============================================================================================

template <class T>
__global__ void shuffle(T* out, int kind, int argument, int width)
{
    const unsigned t = threadIdx.x;
    const T mine = static_cast<T>(t + 1) * static_cast<T>(3);
    switch (kind) {
    case 0: out[t] = __shfl_sync(0xffffffff, mine, argument, width); break;
    case 1: out[t] = __shfl_xor_sync(0xffffffff, mine, argument, width); break;
    case 2: out[t] = __shfl_up_sync(0xffffffff, mine, static_cast<unsigned>(argument), width); break;
    case 3: out[t] = __shfl_down_sync(0xffffffff, mine, static_cast<unsigned>(argument), width); break;
    }
}

template <class T>
static bool shuffles_are_right()
{
    bool right = true;
    for (int kind = 0; kind < 4; kind++)
        for (int width : {WARP_SIZE, WARP_SIZE >= 8 ? 8 : 1})
            for (int argument : {0, 1, 3, 4, 7}) {
                Array<T> out(64);
                launch(1, 64, 0, shuffle<T>, out.data, kind, argument, width);
                for (int t = 0; t < 64; t++) {
                    const int segment = t / width * width;
                    int from = kind == 0 ? segment + argument % width : kind == 1 ? t ^ argument : kind == 2 ? t - argument : t + argument;
                    if (kind > 0 && (from < segment || from >= segment + width)) from = t;
                    right = right && out[static_cast<size_t>(t)] == static_cast<T>(from + 1) * static_cast<T>(3);
                }
            }
    return right;
}

__global__ void ballots(unsigned* out)
{
    const unsigned lane = threadIdx.x % 32, half = lane < 16 ? 0xffffu : 0xffff0000u;
    const int odd = lane % 2;
    out[threadIdx.x] = __ballot_sync(0xffffffff, odd);
    if (lane < 16 ? __any_sync(half, odd) : __all_sync(half, odd)) out[threadIdx.x] ^= 0xf0000000;
    __syncwarp();
}

__global__ void lanes_leave(int* out)
{
    if (threadIdx.x % 32 >= 20) return;
    int sum = 1;
    for (int offset = 16; offset > 0; offset /= 2) {
        const int other = __shfl_down_sync(0xffffffff, sum, offset);
        if (threadIdx.x % 32 + static_cast<unsigned>(offset) < 20) sum += other;
    }
    out[threadIdx.x] = sum;
}

static void test_warps()
{
    claim("shuffles of 32 and 64 bits take the lane they name, within their width", in_every_order([] {
        return shuffles_are_right<int>() && shuffles_are_right<float>() && shuffles_are_right<double>() && shuffles_are_right<long long>();
    }));
    if (WARP_SIZE == 1) return;
    claim("ballot, any and all, with halves of a warp apart", in_every_order([] {
        Array<unsigned> out(64);
        launch(1, 64, 0, ballots, out.data);
        bool right = true;
        for (unsigned t = 0; t < 64; t++) right = right && out[t] == (0xaaaaaaaa ^ (t % 32 < 16 ? 0xf0000000 : 0));
        return right;
    }));
    claim("exited lanes do not count in a warp's masks", in_every_order([] {
        Array<int> out(64);
        launch(1, 64, 0, lanes_leave, out.data);
        return out[0] == 20 && out[32] == 20;
    }));
}

// ==== what ends the program =============================================================================

__global__ void half_wait(float* out)
{
    if (threadIdx.x < 32) {
        __syncwarp();
        for (int lane = 0; lane < 2 && threadIdx.x == 5; lane++) out[0] += __shfl_xor_sync(0xffffffff, out[1], 1);
    }
    if (threadIdx.x >= 64) return;
    __syncthreads();
}

__global__ void use_stack(char* out)
{
    volatile char large[cuda_cpu::fiber_stack_bytes + 4096];
    for (size_t i = 0; i < sizeof(large); i++) large[i] = static_cast<char>(i);
    out[threadIdx.x] = large[threadIdx.x];
}

__global__ void write_shared(int index) { reinterpret_cast<volatile float*>(dynamic_shared_memory)[index] = 1; }
__global__ void write_global(float* out, int index) { reinterpret_cast<volatile float*>(out)[index] = 1; }

static void do_deed(const std::string& deed)
{
    Array<float> data(100);
    nvtxRangePushA("outer");
    nvtxRangePushA("half_wait");
    if (deed == "deadlock") launch({2, 3}, 96, 0, half_wait, data.data);
    if (deed == "stack") launch(1, 2, 0, use_stack, reinterpret_cast<char*>(data.data));
    if (deed == "shared") launch(1, 1, 64, write_shared, 16);
    if (deed == "global") launch(1, 1, 0, write_global, data.data, 100);
}

static void test_deaths()
{
    if (WARP_SIZE == 32) {
        const auto [said, code] = run_child("deadlock");
        claim("a deadlock is reported with kernel, block and threads",
              code == 1 && contains(said, "kernel half_wait, block (") && contains(said, "of (2, 3, 1), 96 x 1 x 1 threads: deadlock") &&
                  contains(said, "threads 0-4, 6-63: in __syncthreads\n  threads 5: in __shfl_xor_sync with mask 0xffffffff\n  threads 64-95: ended"));
    }
#ifdef __SANITIZE_ADDRESS__
    claim("AddressSanitizer sees a write past the launch's shared memory", contains(run_child("shared").first, "use-after-poison"));
    claim("AddressSanitizer sees a write past what cudaMalloc gave", contains(run_child("global").first, "heap-buffer-overflow"));
#else
    const auto [said, code] = run_child("stack");
    claim("a thread that needs too much stack is named", code == 1 && contains(said, "needs more than the 65536 bytes of stack"));
#endif
}

// ==== workers ===========================================================================================

// The same with these variables, none of this program's about waiting, and the word "input" to read.
static std::pair<std::string, int> run_child_with(const std::string& variables, const std::string& deed)
{
    return run_child(deed, "echo input | env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY " + variables);
}

// The turns for which libgomp spins, as it says itself when it is loaded: the last time, where that is twice.
static long turns_of_spinning(const std::string& variables)
{
    const std::string said = run_child_with(variables + " OMP_DISPLAY_ENV=verbose", "workers").first;
    const std::string name = "GOMP_SPINCOUNT = '";
    const size_t at = said.rfind(name);
    return at == said.npos ? -1 : atol(said.c_str() + at + name.size());
}

static void test_workers()
{
#ifndef KMP_VERSION_MAJOR  // LLVM's OpenMP says nothing of libgomp
    const long turns = turns_of_spinning("OMP_NUM_THREADS=2");
    const double ns = turns * cuda_cpu::ns_of_a_turn();
    claim("workers that wait spin for a while and then sleep",
          ns > cuda_cpu::spin_ns / 4 && ns < cuda_cpu::spin_ns * 4);
    claim("OMP_WAIT_POLICY and GOMP_SPINCOUNT are the user's to set",
          turns_of_spinning("OMP_NUM_THREADS=2 GOMP_SPINCOUNT=7") == 7 &&
              turns_of_spinning("OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive") == 0);
    claim("a program of one worker starts once", turns_of_spinning("OMP_NUM_THREADS=1") > turns);
#endif
    const std::string deed = "workers a '' 'two words'", variables = "OMP_NUM_THREADS=2 CUDA_CPU_THREADS=3";
    const std::string twice = run_child_with(variables, deed).first;
    claim("a program that starts again has its arguments, its variables and its input",
          contains(twice, "3 workers, [a][][two words] input\n"));
    claim("and no more files open than one that starts once",
          twice == run_child_with(variables + " GOMP_SPINCOUNT=7", deed).first);
    for (const char* number : {"0", "1025", "-1", "two", "2x", "''"}) {
        const auto [said, code] = run_child_with(std::string("CUDA_CPU_THREADS=") + number, "workers");
        claim(std::string("CUDA_CPU_THREADS=") + number + " is refused",
              code == 2 && contains(said, "expected a whole number from 1 to 1024"));
    }
}

// ==== the host's side ===================================================================================

__global__ void nothing() {}
__global__ void fill_shared(size_t bytes, int* aligned)
{
    memset(static_cast<void*>(dynamic_shared_memory), 1, bytes);
    *aligned = reinterpret_cast<uintptr_t>(dynamic_shared_memory) % 1024 == 0;
}
__global__ void takes_arguments(double* out, float x, const int* y, __nv_bfloat16 z) { *out = x + *y + static_cast<float>(z); }

static void test_host()
{
    Array<int> flag(1);
    const size_t kib = 1024;
    bool right = launch(1, 1, 48 * kib, fill_shared, 48 * kib, flag.data) == cudaSuccess && flag[0] == 1;
    right = right && launch(1, 1, 48 * kib + 1, fill_shared, 0, flag.data) == cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess;
    right = right && cudaFuncSetAttribute(fill_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 * 1024) == cudaErrorInvalidValue;
    right = right && cudaFuncSetAttribute(fill_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024) == cudaSuccess;
    right = right && launch(1, 1, 227 * kib, fill_shared, 227 * kib, flag.data) == cudaSuccess && launch(1, 1, 227 * kib + 1, fill_shared, 0, flag.data) != cudaSuccess;
    claim("too much shared memory is refused, what was asked for is there", right);

    right = true;
    for (dim3 grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536), dim3(1, 0)}) right = right && launch(grid, 1, 0, nothing) == cudaErrorInvalidConfiguration;
    for (dim3 block : {dim3(0), dim3(1025), dim3(32, 33), dim3(1, 1, 65)}) right = right && launch(1, block, 0, nothing) == cudaErrorInvalidConfiguration;
    claim("grids and blocks out of bounds are refused", right && cudaGetLastError() == cudaErrorInvalidConfiguration);

    Array<double> sum(1);
    Array<int> two(1);
    two[0] = 2;
    launch(1, 1, 0, takes_arguments, sum.data, 1, two.data, 0.5f);
    claim("arguments are converted to the kernel's parameters", sum[0] == 3.5);

    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    size_t free_before = 0, free_after = 0, total = 0;
    void *block = nullptr, *too_much = nullptr;
    cudaMemGetInfo(&free_before, &total);
    right = cudaMalloc(&block, 10 << 20) == cudaSuccess && reinterpret_cast<uintptr_t>(block) % 256 == 0;
    cudaMemGetInfo(&free_after, &total);
    right = right && free_before - free_after == 10 << 20 && cudaMalloc(&too_much, free_after + 1) == cudaErrorMemoryAllocation && too_much == nullptr;
    right = right && cudaMemset(block, 5, 10 << 20) == cudaSuccess && static_cast<char*>(block)[(10 << 20) - 1] == 5;
    right = right && cudaFree(block) == cudaSuccess && cudaFree(nullptr) == cudaSuccess && cudaFree(&total) == cudaErrorInvalidValue;
    cudaMemGetInfo(&free_after, &total);
    claim("memory is counted, aligned, refused beyond what is available, which is less than the machine has",
          right && free_before == free_after && total > free_before && total == properties.totalGlobalMem);
    cudaGetLastError();

    std::vector<int> from(3 << 20), to(3 << 20);
    for (size_t i = 0; i < from.size(); i++) from[i] = static_cast<int>(i * i);
    cudaMemcpy(to.data(), from.data(), from.size() * sizeof(int), cudaMemcpyDeviceToHost);
    claim("a copy of 12 MiB is one", from == to);

    cudaEvent_t begin, end;
    float milliseconds = -1;
    cudaEventCreate(&begin);
    cudaEventCreateWithFlags(&end, cudaEventDefault);
    right = cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorInvalidResourceHandle;
    cudaEventRecord(begin);
    usleep(2000);
    cudaEventRecord(end);
    right = right && cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess && milliseconds >= 2 && milliseconds < 1000;
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    claim("events measure time", right);

    int value = 0;
    right = cudaGetDeviceProperties(&properties, 0) == cudaSuccess && properties.name[0] != 0 && properties.warpSize == WARP_SIZE && properties.major == 0;
    right = right && cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess && value == omp_get_max_threads() && cudaSetDevice(1) == cudaErrorInvalidDevice;
    claim("the device describes itself", right);
    cudaGetLastError();
}

// ==== capture and graphs ================================================================================

struct Scale { float factor; };   // passed by value

__global__ void scale_by(float* x, Scale scale, const float* device_factor) { x[blockIdx.x] *= scale.factor * *device_factor; }
__global__ void add_one(float* x) { x[blockIdx.x] += 1; }

static cudaError_t launch_on(cudaStream_t stream, unsigned grid, void (*kernel)(float*), float* x)
{
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, x);
}

// Captures what `work` hands to a stream; returns the graph, ready to launch, or nothing and the error.
template <class Work>
static cudaGraphExec_t captured(cudaStream_t stream, cudaError_t& error, Work work)
{
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    work();
    error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    return executable;
}

static void test_graphs()
{
    cudaStream_t stream, other;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    Array<float> x(4), y(4), factor(1);
    factor[0] = 2;
    cudaError_t error = cudaSuccess;
    auto all_are = [](Array<float>& array, float value) { return array.values() == std::vector<float>(array.size, value); };

    // x = (0 + 1) * 3 * factor; y = x
    cudaGraphExec_t graph = captured(stream, error, [&] {
        cudaLaunchConfig_t config{};
        config.gridDim = 4;
        config.stream = stream;
        cudaMemsetAsync(x.data, 0, 4 * sizeof(float), stream);
        launch_on(stream, 4, add_one, x.data);
        Scale scale{3};
        cudaLaunchKernelEx(&config, scale_by, x.data, scale, factor.data);
        scale.factor = 100;
        config.gridDim = 1;
        cudaMemcpyAsync(y.data, x.data, 4 * sizeof(float), cudaMemcpyDeviceToDevice, stream);
    });
    claim("a captured stream does nothing yet", error == cudaSuccess && all_are(x, 0) && all_are(y, 0));
    bool right = cudaGraphLaunch(graph, stream) == cudaSuccess && all_are(y, 6);
    factor[0] = 5;
    right = right && cudaGraphLaunch(graph, stream) == cudaSuccess && all_are(y, 15);
    claim("its graph repeats it, with the arguments of then and the memory of now", right);
    cudaGraphExecDestroy(graph);
    launch_on(stream, 4, add_one, x.data);
    claim("after the capture the stream works again", all_are(x, 16));

    // What waits, might wait, or comes from outside the capture.
    cudaEvent_t outside, inside;
    cudaEventCreate(&outside);
    cudaEventCreate(&inside);
    cudaEventRecord(outside, other);
    void* block = nullptr;
    float ms = 0;
    const std::pair<const char*, std::function<cudaError_t()>> refused[] = {
        {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream); }}, {"cudaStreamQuery", [&] { return cudaStreamQuery(stream); }},
        {"cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); }}, {"cudaMalloc", [&] { return cudaMalloc(&block, 16); }},
        {"cudaFree", [&] { return cudaFree(nullptr); }}, {"cudaMallocHost", [&] { return cudaMallocHost(&block, 16); }},
        {"cudaFreeHost", [&] { return cudaFreeHost(nullptr); }}, {"cudaMemcpy", [&] { return cudaMemcpy(y.data, x.data, 4, cudaMemcpyDeviceToDevice); }},
        {"cudaMemset", [&] { return cudaMemset(y.data, 0, 4); }}};
    std::string wrong;
    for (const auto& [name, refused_call] : refused) {
        const auto& call = refused_call;  // a lambda may not name a part of a pair, in C++17
        cudaError_t said = cudaSuccess, after = cudaSuccess;
        const auto before = y.values();
        graph = captured(stream, error, [&] {
            launch_on(stream, 4, add_one, y.data);
            said = call();
            after = launch_on(stream, 4, add_one, y.data);
        });
        if (said != cudaErrorStreamCaptureUnsupported || after != cudaErrorStreamCaptureInvalidated || error != cudaErrorStreamCaptureInvalidated || graph != nullptr || y.values() != before) wrong += std::string(" ") + name;
    }
    claim("calls that wait or might wait are refused in a capture, and spoil it:" + wrong, wrong.empty());
    graph = captured(stream, error, [&] { right = cudaStreamWaitEvent(stream, outside) == cudaErrorStreamCaptureIsolation; });
    claim("so is waiting for an event from outside", right && error == cudaErrorStreamCaptureInvalidated);
    graph = captured(stream, error, [&] {
        cudaEventRecord(inside, stream);
        right = cudaStreamWaitEvent(stream, inside) == cudaSuccess && cudaStreamSynchronize(other) == cudaSuccess && cudaStreamWaitEvent(other, outside) == cudaSuccess;
    });
    claim("an event of the capture, and other streams, are no concern of it", right && error == cudaSuccess && cudaEventSynchronize(inside) == cudaErrorCapturedEvent && cudaEventElapsedTime(&ms, outside, inside) == cudaErrorCapturedEvent);
    cudaGraphExecDestroy(graph);

    cudaGraph_t none = nullptr;
    right = cudaStreamEndCapture(stream, &none) == cudaErrorIllegalState && cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal) == cudaErrorStreamCaptureUnsupported;
    right = right && cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess && cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState;
    right = right && cudaMallocHost(&block, 16) != cudaSuccess && cudaStreamEndCapture(stream, &none) == cudaErrorStreamCaptureInvalidated && cudaMalloc(&block, 16) == cudaSuccess && cudaFree(block) == cudaSuccess;
    claim("a capture begins and ends once, and not on the stream of nobody", right);
    cudaGetLastError();
    cudaEventDestroy(outside);
    cudaEventDestroy(inside);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(other);
}

// d = a b + d, twice, with a bias that is another one after each call: all is as it was at each call.
static void test_captured_products()
{
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cublasLtHandle_t handle;
    cublasLtCreate(&handle);
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    cublasLtMatrixLayout_t layout;
    cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 2, 2, 2);
    Array<float> a(4), b(4), d(4), bias_1(2), bias_2(2);
    for (int i = 0; i < 4; i++) a[i] = b[i] = 1;
    for (int i = 0; i < 2; i++) bias_1[i] = 10, bias_2[i] = 100;
    float alpha = 1, beta = 0;
    auto multiply = [&](const float* bias) {
        cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
        return cublasLtMatmul(handle, desc, &alpha, a.data, layout, b.data, layout, &beta, d.data, layout, d.data, layout, nullptr, nullptr, 0, stream);
    };
    cudaError_t error = cudaSuccess;
    cublasStatus_t spoilt = CUBLAS_STATUS_SUCCESS;
    cudaGraphExec_t graph = captured(stream, error, [&] {
        multiply(bias_1.data);   // 2 + 10
        alpha = 3, beta = 1;
        multiply(bias_2.data);   // 3 * 2 + 12 + 100
        alpha = beta = 1000;
    });
    bool right = error == cudaSuccess && d.values() == std::vector<float>(4, 0);
    multiply(bias_2.data);
    cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(desc);
    for (int run = 0; run < 2; run++) right = right && cudaGraphLaunch(graph, stream) == cudaSuccess && d.values() == std::vector<float>(4, 118);
    claim("a captured product keeps alpha, beta and its description as they were", right);
    cudaGraphExecDestroy(graph);
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 2, 2, 2);
    captured(stream, error, [&] {
        cudaStreamSynchronize(stream);
        spoilt = multiply(bias_1.data);
    });
    claim("in a spoilt capture it fails", spoilt == CUBLAS_STATUS_EXECUTION_FAILED && error == cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
    cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(handle);
    cudaStreamDestroy(stream);
}

// ==== numbers ===========================================================================================

static void test_numbers()
{
    double worst = 0;
    for (float x = -87.3f; x < 88.72f; x += 0.0007f) {
        const double exact = std::exp(static_cast<double>(x));
        worst = std::max(worst, std::fabs(__expf(x) - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
    }
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    claim("__expf is within 2 units in the last place, right at infinity and NaN",
          worst < 2 && __expf(-infinity) == 0 && __expf(-88) == 0 && __expf(infinity) == infinity && __expf(89) == infinity && std::isnan(__expf(nan)) && __expf(0) == 1);
    claim("fmaxf and fminf prefer a number to NaN", fmaxf(nan, 1) == 1 && fmaxf(1, nan) == 1 && fminf(nan, 1) == 1 && fminf(1, nan) == 1 && fmaxf(2, 1) == 2 && fminf(2, 1) == 1);
    claim("min and max mix integer types", max(3, 4u) == 4u && min(5L, 3) == 3 && max(1.0f, 2.0f) == 2 && max(-1, 1u) == 0xffffffffu);
    claim("bits are counted and seen", __popc(0xf0f0) == 8 && __clz(1) == 31 && __clz(0) == 32 && __umulhi(0x80000000u, 6) == 3 && __float_as_uint(1.0f) == 0x3f800000 && __int_as_float(0x40000000) == 2);
    int largest = 3;
    claim("atomics return what was there", atomicMax(&largest, 5) == 3 && atomicMax(&largest, 4) == 5 && atomicAdd(&largest, 2) == 5 && largest == 7);
    claim("ranges nest and close", nvtxRangePushA("a") == 0 && nvtxRangePushA("b") == 1 && nvtxRangePop() == 1 && nvtxRangePop() == 0 && nvtxRangePop() == -2);
}

// The nearest of the two neighbours, in exact arithmetic; of two equally near, the even one.
static uint16_t nearest_bf16(float x)
{
    const uint32_t bits = cuda_cpu::bits<uint32_t>(x);
    const uint16_t lower = static_cast<uint16_t>(bits >> 16);
    const double below = cuda_cpu::bits<float>(static_cast<uint32_t>(lower) << 16);
    const bool last = (lower & 0x7fff) == 0x7f7f;  // after it comes what would be 2^128, which rounds to infinity
    const double above = last ? std::copysign(std::ldexp(1.0, 128), x) : cuda_cpu::bits<float>((lower + 1u) << 16);
    const double down = std::fabs(x - below), up = std::fabs(above - x);
    return static_cast<uint16_t>(down < up || (down == up && lower % 2 == 0) ? lower : lower + 1);
}

static void test_bf16()
{
    bool nearest = true, nans = true, exact = true;
    std::mt19937 random(1);
    for (uint32_t upper = 0; upper < 65536; upper++) {
        for (uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, static_cast<uint32_t>(random() & 0xffff), static_cast<uint32_t>(random() & 0xffff)}) {
            const float x = cuda_cpu::bits<float>(upper << 16 | lower);
            const uint16_t rounded = __bfloat16_as_ushort(__float2bfloat16(x));
            if (std::isnan(x)) nans = nans && rounded == 0x7fff;
            else if (std::isinf(x)) exact = exact && rounded == upper;
            else nearest = nearest && rounded == nearest_bf16(x);
        }
        const float back = __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(upper)));
        exact = exact && cuda_cpu::bits<uint32_t>(back) == upper << 16;
    }
    claim("bf16 rounds to nearest even, for every upper half of a float and 8 lower ones", nearest);
    claim("every NaN becomes one bf16 NaN; bf16 to float is exact", nans && exact);
    const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.25f);
    claim("bf16 pairs and arithmetic", __bfloat1622float2(pair).x == 1.5f && __high2float(pair) == -2.25f && static_cast<float>(pair.x * pair.y) == -3.375f && sizeof(pair) == 4);
}

// ---- FP8, from its definition: bits of sign, exponent and mantissa, in double.

// What a code stands for; what comes after the largest number is as large as it would be if it were one.
static double fp8_value(int code, __nv_fp8_interpretation_t kind)
{
    const int mantissa_bits = kind == __NV_E4M3 ? 3 : 2, bias = kind == __NV_E4M3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const double size = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                      : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return code & 0x80 ? -size : size;
}
static int fp8_largest(__nv_fp8_interpretation_t kind) { return kind == __NV_E4M3 ? 0x7e : 0x7b; }

// The nearest of all codes, of two equally near the even one; what rounds to more than the largest becomes `beyond`.
static int nearest_fp8(double x, __nv_fp8_interpretation_t kind, int beyond)
{
    const double size = std::min(std::fabs(x), fp8_value(fp8_largest(kind) + 1, kind));
    int best = 0;
    for (int code = 1; code <= fp8_largest(kind) + 1; code++) {
        const double here = std::fabs(fp8_value(code, kind) - size), there = std::fabs(fp8_value(best, kind) - size);
        if (here < there || (here == there && code % 2 == 0)) best = code;
    }
    return (std::signbit(x) ? 0x80 : 0) | (best > fp8_largest(kind) ? beyond : best);
}

static void test_fp8(__nv_fp8_interpretation_t kind, const std::string& name)
{
    const auto encode = [=](float x, __nv_saturation_t saturation = __NV_SATFINITE) { return __nv_cvt_float_to_fp8(x, saturation, kind); };
    const auto decode = [=](int code) {
        __nv_fp8_e4m3 a;
        __nv_fp8_e5m2 b;
        a.__x = b.__x = static_cast<__nv_fp8_storage_t>(code);
        return kind == __NV_E4M3 ? static_cast<float>(a) : static_cast<float>(b);
    };
    const int largest = fp8_largest(kind);
    bool exact = true, back = true;
    for (int code = 0; code < 256; code++) {
        if ((code & 0x7f) > largest) continue;
        exact = exact && decode(code) == fp8_value(code, kind) && std::signbit(decode(code)) == (code >= 0x80);
        back = back && encode(decode(code)) == code && __nv_cvt_double_to_fp8(decode(code), __NV_SATFINITE, kind) == code;
    }
    claim(name + ": every number is the float that its bits say, -0 too, and comes back as itself", exact && back);
    const float infinity = INFINITY;
    claim(name + ": infinity and not a number",
          std::isnan(decode(0x7f)) && std::isnan(decode(0xff)) && encode(NAN) == 0x7f && encode(-NAN) == 0x7f &&
              (kind == __NV_E4M3 || (decode(0x7c) == infinity && decode(0xfc) == -infinity && std::isnan(decode(0x7d)) && std::isnan(decode(0xfe)))));

    const int beyond = kind == __NV_E4M3 ? 0x7f : 0x7c;   // not a number, infinity
    bool nearest = true, unsaturated = true;
    const auto check = [&](float x) {
        nearest = nearest && encode(x) == nearest_fp8(x, kind, largest);
        unsaturated = unsaturated && encode(x, __NV_NOSAT) == nearest_fp8(x, kind, beyond);
    };
    for (int code = 0; code <= largest; code++)
        for (float sign : {1.0f, -1.0f}) {
            const float middle = sign * static_cast<float>((fp8_value(code, kind) + fp8_value(code + 1, kind)) / 2);
            for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, sign * infinity)}) check(x);
        }
    std::mt19937 random(11);
    for (int i = 0; i < 20000; i++) {
        const float x = cuda_cpu::bits<float>(static_cast<uint32_t>(random()));
        if (!std::isnan(x)) check(x);
    }
    for (float x : {0.0f, -0.0f, infinity, -infinity, FLT_MAX, FLT_MIN, -FLT_TRUE_MIN}) check(x);
    claim(name + ": rounds to nearest, ties to even, at and beside every middle, subnormals too, and saturates", nearest);
    claim(name + ": without saturation what is too large is infinity, or not a number", unsaturated);
    const double just_more = (fp8_value(0x30, kind) + fp8_value(0x31, kind)) / 2 * (1 + DBL_EPSILON);
    claim(name + ": a double is not rounded twice", __nv_cvt_double_to_fp8(just_more, __NV_SATFINITE, kind) == 0x31 &&
          encode(static_cast<float>(just_more)) == 0x30);
}

// Packs of 16 against one at a time: every code, floats of all bits.
template <class T> static bool packs_agree()
{
    std::mt19937 random(13);
    for (int turn = 0; turn < 2000; turn++) {
        T codes[16], packed[16];
        float numbers[16], decoded[16];
        for (int i = 0; i < 16; i++) codes[i].__x = static_cast<__nv_fp8_storage_t>(turn * 16 + i);
        for (float& x : numbers) x = cuda_cpu::bits<float>(static_cast<uint32_t>(random()));
        to_floats(decoded, codes);
        from_floats(packed, numbers);
        for (int i = 0; i < 16; i++)
            if (__float_as_uint(decoded[i]) != __float_as_uint(static_cast<float>(codes[i])) || packed[i].__x != T(numbers[i]).__x) return false;
    }
    return true;
}

static void test_fp8()
{
    test_fp8(__NV_E4M3, "E4M3");
    test_fp8(__NV_E5M2, "E5M2");
    claim("packs of FP8 are converted as their elements are", packs_agree<__nv_fp8_e4m3>() && packs_agree<__nv_fp8_e5m2>());
    const __nv_fp8_e4m3 ours(1.0f);
    const __nv_fp8_e5m2 theirs(-1.0f);
    claim("the two kinds have their codes, two at a time the first is in the lower byte",
          ours.__x == 0x38 && theirs.__x == 0xbc && sizeof(ours) == 1 && static_cast<float>(__nv_bfloat16(ours)) == 1 &&
              __nv_cvt_float2_to_fp8x2({1, -2}, __NV_SATFINITE, __NV_E4M3) == 0xc038);
}

// ==== matrix products ===================================================================================

template <class In, class Out>
struct Matmul {
    int m = 70, n = 45, k = 333, batch = 1;
    bool transpose_a = false, transpose_b = false;
    float alpha = 1, beta = 0;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int pad = 0;  // rows between columns that are not the matrix's
    bool float_bias = false;
    cuda_cpu::Algorithm algorithm = cuda_cpu::Algorithm::fast;
    mutable std::vector<Out> product;   // D as error() found it

    // The largest error, in units of what rounding allows; infinite if anything outside D changed.
    double error() const
    {
        std::mt19937 random(3);
        std::uniform_real_distribution<float> uniform(-1, 1);
        const int rows_a = transpose_a ? k : m, columns_a = transpose_a ? m : k, rows_b = transpose_b ? n : k, columns_b = transpose_b ? k : n;
        const int lda = rows_a + pad, ldb = rows_b + pad, ldd = m + pad;
        const int64_t stride_a = int64_t{lda} * columns_a, stride_b = int64_t{ldb} * columns_b, stride_d = int64_t{ldd} * n;
        std::vector<In> a(static_cast<size_t>(stride_a * batch)), b(static_cast<size_t>(stride_b * batch));
        std::vector<Out> d(static_cast<size_t>(stride_d * batch)), aux(static_cast<size_t>(stride_d)), bias(static_cast<size_t>(m));
        std::vector<float> bias_float(static_cast<size_t>(m));
        for (auto& x : a) x = uniform(random);
        for (auto& x : b) x = uniform(random);
        for (auto& x : d) x = uniform(random);
        for (auto& x : aux) x = 2 * uniform(random);
        for (size_t i = 0; i < bias.size(); i++) bias[i] = bias_float[i] = static_cast<float>(Out(uniform(random)));
        const auto old_d = d, old_aux = aux;

        cublasLtHandle_t handle;
        cublasLtMatmulDesc_t desc;
        cublasLtMatrixLayout_t layout_a, layout_b, layout_d;
        const auto type = [](auto x) { return sizeof(x) == 4 ? CUDA_R_32F : std::is_same_v<decltype(x), __half> ? CUDA_R_16F : CUDA_R_16BF; };
        cublasLtCreate(&handle);
        cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) { cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)); };
        set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, float_bias ? static_cast<const void*>(bias_float.data()) : bias.data());
        if (float_bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(aux.data()));
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(ldd));
        cublasLtMatrixLayoutCreate(&layout_a, type(In{}), static_cast<uint64_t>(rows_a), static_cast<uint64_t>(columns_a), lda);
        cublasLtMatrixLayoutCreate(&layout_b, type(In{}), static_cast<uint64_t>(rows_b), static_cast<uint64_t>(columns_b), ldb);
        cublasLtMatrixLayoutCreate(&layout_d, type(Out{}), static_cast<uint64_t>(m), static_cast<uint64_t>(n), ldd);
        const auto set_batch = [&](cublasLtMatrixLayout_t layout, int64_t stride) {
            cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch));
            cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride));
        };
        set_batch(layout_a, stride_a);
        set_batch(layout_b, stride_b);
        set_batch(layout_d, stride_d);
        cublasLtMatmulHeuristicResult_t heuristic;
        int found = 0;
        cublasLtMatmulAlgoGetHeuristic(handle, desc, layout_a, layout_b, layout_d, layout_d, nullptr, 1, &heuristic, &found);
        heuristic.algo.data[0] = static_cast<uint64_t>(algorithm);
        const auto multiply = [&] {
            return found == 1 && cublasLtMatmul(handle, desc, &alpha, a.data(), layout_a, b.data(), layout_b, &beta, d.data(), layout_d, d.data(), layout_d,
                                                &heuristic.algo, nullptr, 0, nullptr) == CUBLAS_STATUS_SUCCESS;
        };
        bool fine = multiply();
        const auto first_d = d, first_aux = aux;
        d = old_d;
        aux = old_aux;
        fine = multiply() && fine && memcmp(d.data(), first_d.data(), d.size() * sizeof(Out)) == 0 && memcmp(aux.data(), first_aux.data(), aux.size() * sizeof(Out)) == 0;
        for (auto layout : {layout_a, layout_b, layout_d}) cublasLtMatrixLayoutDestroy(layout);
        cublasLtMatmulDescDestroy(desc);
        cublasLtDestroy(handle);
        product = d;
        if (!fine) return std::numeric_limits<double>::infinity();

        const double epsilon = sizeof(Out) == 4 ? 4.0 / (1 << 23) : std::is_same_v<Out, __half> ? 1.0 / 2048 : 1.0 / 256;
        const bool writes_aux = epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        double worst = 0;
        const auto compare = [&](double got, double expected, double scale) { worst = std::max(worst, std::isnan(got) ? 1e30 : std::fabs(got - expected) / (epsilon * scale)); };
        const auto untouched = [&](double got, double before) { if (got != before) worst = std::numeric_limits<double>::infinity(); };
        for (int64_t g = 0; g < batch; g++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t i = 0; i < ldd; i++) {
                    const size_t at = static_cast<size_t>(g * stride_d + j * ldd + i), at_aux = static_cast<size_t>(j * ldd + i);
                    const double before = old_d[at];
                    if (i >= m) {
                        untouched(d[at], before);
                        untouched(aux[at_aux], old_aux[at_aux]);
                        continue;
                    }
                    double sum = 0, size = 0;
                    for (int64_t kk = 0; kk < k; kk++) {
                        const double term = static_cast<double>(a[static_cast<size_t>(g * stride_a + (transpose_a ? i * lda + kk : kk * lda + i))]) *
                                            static_cast<double>(b[static_cast<size_t>(g * stride_b + (transpose_b ? kk * ldb + j : j * ldb + kk))]);
                        sum += term;
                        size += std::fabs(term);
                    }
                    double x = alpha * sum + beta * before;
                    // Float sums err by parts of the terms' size, a bfloat16 result by parts of itself.
                    const double scale = 1 + std::fabs(x) + (sizeof(Out) == 4 ? std::fabs(alpha) * size / 4 : 0);
                    if (epilogue & CUBLASLT_EPILOGUE_BIAS) x += bias_float[static_cast<size_t>(i)];
                    const double z = epilogue == CUBLASLT_EPILOGUE_DGELU ? static_cast<double>(old_aux[at_aux]) : x;
                    const double u = std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z), t = std::tanh(u);
                    if (epilogue == CUBLASLT_EPILOGUE_DGELU) {
                        x *= 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
                    } else if (epilogue & CUBLASLT_EPILOGUE_GELU) {
                        if (writes_aux) compare(aux[at_aux], x, scale);
                        x *= 0.5 * (1 + t);
                    }
                    if (!writes_aux) untouched(aux[at_aux], old_aux[at_aux]);
                    compare(d[at], x, 2 * scale);
                }
        return worst;
    }
};

template <class In, class Out>
static void test_products(const std::string& types)
{
    using Problem = Matmul<In, Out>;
    double worst = 0;
    for (int bits = 0; bits < 8; bits++) {
        Problem p;
        p.transpose_a = bits & 1;
        p.transpose_b = bits & 2;
        p.pad = bits & 4 ? 11 : 0;
        for (float beta : {0.0f, 1.0f}) {
            p.beta = beta;
            p.m = 70, p.n = 45, p.k = 333;
            worst = std::max(worst, p.error());
            p.m = 1, p.n = 7, p.k = 1;
            worst = std::max(worst, p.error());
            p.m = 128, p.n = 256, p.k = 512;
            p.alpha = 0.125f;
            worst = std::max(worst, p.error());
            p.m = 300, p.n = 1, p.k = 334;   // a single column has code of its own
            worst = std::max(worst, p.error());
            p.m = 7, p.n = 1, p.k = 5;
            worst = std::max(worst, p.error());
            p.alpha = 1;
        }
    }
    claim(types + ": transposes, leading dimensions, alpha and beta, against a plain loop in double (and twice the same bits)", worst < 1);

    worst = 0;
    for (uint32_t epilogue : {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS, CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU})
        for (float beta : {0.0f, 1.0f})
            for (float alpha : {1.0f, 0.5f})
                for (bool float_bias : {false, true}) {
                    Problem p;
                    p.m = 300, p.n = 40, p.k = 24;
                    p.epilogue = epilogue;
                    p.alpha = alpha;
                    p.beta = beta;
                    p.float_bias = float_bias;
                    p.pad = 4;
                    worst = std::max(worst, p.error());
                }
    claim(types + ": every epilogue against a plain loop in double", worst < 1);

    worst = 0;
    for (int bits = 0; bits < 4; bits++) {
        Problem p;
        p.batch = 5;
        p.transpose_a = bits & 1;
        p.transpose_b = bits & 2;
        p.m = 33, p.n = 20, p.k = 64;
        p.pad = 3;
        worst = std::max(worst, p.error());
        p.batch = 1 + omp_get_max_threads() / 2;
        p.beta = 1;
        worst = std::max(worst, p.error());
    }
    claim(types + ": batches", worst < 1);

    worst = 0;
    Problem p;
    for (const auto algorithm : {cuda_cpu::Algorithm::plain, cuda_cpu::Algorithm::slow, cuda_cpu::Algorithm::in_place})
        for (uint32_t epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DGELU})
            for (float beta : {0.0f, 1.0f}) {
                p.algorithm = algorithm;
                p.epilogue = epilogue;
                p.beta = beta;
                worst = std::max(worst, p.error());
            }
    p.algorithm = cuda_cpu::Algorithm::failing;
    claim(types + ": the other algorithms, of which one fails", worst < 1 && std::isinf(p.error()));
}

// ---- products of FP8

struct Fp8Matmul {
    cudaDataType_t type_a = CUDA_R_8F_E4M3, type_b = CUDA_R_8F_E4M3, type_d = CUDA_R_32F;
    int m = 48, n = 80, k = 112, pad = 0;
    float alpha = 1, beta = 0, scale_a = 1, scale_b = 1;
    bool scaled = false, has_bias = false;
    int8_t fast_sums = 0;
    cuda_cpu::Algorithm algorithm = cuda_cpu::Algorithm::fast;

    static std::vector<double> values(const std::vector<unsigned char>& codes, cudaDataType_t type)
    {
        std::vector<double> x;
        for (unsigned char code : codes) x.push_back(fp8_value(code, type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2));
        return x;
    }
    static std::vector<unsigned char> codes(std::mt19937& random, cudaDataType_t type, size_t count)
    {
        std::normal_distribution<float> normal;
        std::vector<unsigned char> x(count);
        for (auto& c : x) c = __nv_cvt_float_to_fp8(normal(random), __NV_SATFINITE, type == CUDA_R_8F_E4M3 ? __NV_E4M3 : __NV_E5M2);
        return x;
    }

    // The largest error in units of what rounding allows; infinite where it is refused, or something else changed.
    double error() const
    {
        std::mt19937 random(9);
        const int ld = k + pad, ldd = m + pad;
        const auto a = codes(random, type_a, static_cast<size_t>(ld * m)), b = codes(random, type_b, static_cast<size_t>(ld * n));
        std::vector<float> before(static_cast<size_t>(ldd * n)), bias(static_cast<size_t>(m)), after(before.size());
        for (auto* x : {&before, &bias})
            for (float& e : *x) e = static_cast<float>(random() % 64) / 16 - 2;   // a number in each type
        const cudaDataType_t bias_type = type_d == CUDA_R_32F ? CUDA_R_16BF : type_d;
        alignas(16) static unsigned char d[1 << 20], bias_there[1 << 12];
        cuda_cpu::store(d, before.data(), type_d, static_cast<int64_t>(before.size()));
        cuda_cpu::store(bias_there, bias.data(), bias_type, m);

        cublasLtContext handle;
        cublasLtMatmulDesc_t desc;
        cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) { return cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)); };
        set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias_there));
        set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast_sums);
        float scales[] = {NAN, NAN};   // are read when the product runs
        if (scaled) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales[0]);
        if (scaled) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales[1]);
        const auto layout = [](cudaDataType_t type, int rows, int columns, int ld) {
            return cublasLtMatrixLayoutOpaque_t{static_cast<uint32_t>(type), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), ld};
        };
        auto la = layout(type_a, k, m, ld), lb = layout(type_b, k, n, ld), ldd_layout = layout(type_d, m, n, ldd);
        cublasLtMatmulHeuristicResult_t heuristic{};
        int found = 0;
        cublasLtMatmulAlgoGetHeuristic(&handle, desc, &la, &lb, &ldd_layout, &ldd_layout, nullptr, 1, &heuristic, &found);
        heuristic.algo.data[0] = static_cast<uint64_t>(algorithm);
        scales[0] = scale_a;
        scales[1] = scale_b;
        const bool done = found == 1 && cublasLtMatmul(&handle, desc, &alpha, a.data(), &la, b.data(), &lb, &beta, d, &ldd_layout, d, &ldd_layout,
                                                       &heuristic.algo, nullptr, 0, nullptr) == CUBLAS_STATUS_SUCCESS;
        cublasLtMatmulDescDestroy(desc);
        if (!done) return INFINITY;
        cuda_cpu::load(after.data(), d, type_d, static_cast<int64_t>(after.size()));

        const double epsilon = type_d == CUDA_R_16BF ? 1.0 / 256 : type_d == CUDA_R_16F ? 1.0 / 2048 : 0x1p-23;
        const auto x = values(a, type_a), y = values(b, type_b);
        double worst = 0;
        for (int j = 0; j < n; j++)
            for (int i = 0; i < ldd; i++) {
                const size_t at = static_cast<size_t>(j * ldd + i);
                if (i >= m) {
                    if (after[at] != before[at]) return INFINITY;
                    continue;
                }
                double sum = 0, size = 0;
                for (int l = 0; l < k; l++) {
                    const double term = x[static_cast<size_t>(i * ld + l)] * y[static_cast<size_t>(j * ld + l)];
                    sum += term;
                    size += std::fabs(term);
                }
                const double scale = static_cast<double>(alpha) * scale_a * scale_b;
                const double expected = scale * sum + beta * static_cast<double>(before[at]) + (has_bias ? static_cast<double>(bias[static_cast<size_t>(i)]) : 0);
                const double allowed = epsilon * (std::fabs(expected) + 1e-3) + 0x1p-21 * (std::fabs(scale) * size + 4);
                worst = std::max(worst, std::isnan(after[at]) ? INFINITY : std::fabs(after[at] - expected) / allowed);
            }
        return worst;
    }
};

// D of one product, rounded as the seed has it; empty if it is wrong or a repetition has other bits.
template <class In, class Out>
static std::vector<float> rounded_product(uint64_t seed)
{
    cuda_cpu::rounding = cuda_cpu::Rounding::of_seed(seed);
    Matmul<In, Out> p;
    p.beta = 1;
    p.epilogue = CUBLASLT_EPILOGUE_BIAS;
    const bool right = p.error() < 1;
    cuda_cpu::rounding = cuda_cpu::Rounding::of_seed(0);
    return right ? std::vector<float>(p.product.begin(), p.product.end()) : std::vector<float>();
}

template <class In, class Out>
static bool product_is_perturbed()
{
    const std::vector<float> exact = rounded_product<In, Out>(0), first = rounded_product<In, Out>(1);
    const std::vector<float> second = rounded_product<In, Out>(2);
    return !exact.empty() && !first.empty() && !second.empty() && first != exact && second != exact && first != second &&
           first == rounded_product<In, Out>(1) && exact == rounded_product<In, Out>(0);
}

// How many of a function's results differ from those of seed 0; the largest difference in units of the last place.
static std::pair<int, int> perturbed_results(float (*function)(float), uint64_t seed)
{
    int differ = 0, worst = 0;
    for (float x = 0.125f; x < 80; x += 0.0625f) {
        const int before = __float_as_int(function(x));
        cuda_cpu::rounding = cuda_cpu::Rounding::of_seed(seed);
        const int distance = std::abs(__float_as_int(function(x)) - before);
        cuda_cpu::rounding = cuda_cpu::Rounding::of_seed(0);
        differ += distance > 0;
        worst = std::max(worst, distance);
    }
    return {differ, worst};
}

static void test_rounding()
{
    claim("CUDA_CPU_ROUNDING: a matrix product differs from seed to seed, by rounding only, and repeats bit for bit",
          product_is_perturbed<float, float>() && product_is_perturbed<__nv_bfloat16, float>() &&
              product_is_perturbed<__half, float>());
    const std::pair<const char*, float (*)(float)> functions[] = {
        {"__expf(-x)", [](float x) { return __expf(-x); }}, {"rsqrtf", [](float x) { return rsqrtf(x); }},
        {"__logf", [](float x) { return __logf(x); }}, {"exp2_approx(-x)", [](float x) { return exp2_approx(-x); }},
        {"reciprocal_approx", [](float x) { return reciprocal_approx(x); }}};
    for (const auto& [name, function] : functions) {
        bool fine = true;
        for (uint64_t seed = 1; seed <= 8; seed++) {
            const auto [differ, worst] = perturbed_results(function, seed);
            fine = fine && differ > 50 && worst <= 3;
        }
        claim(std::string("CUDA_CPU_ROUNDING: ") + name + " differs in its last bits", fine);
    }
    cuda_cpu::rounding = cuda_cpu::Rounding::of_seed(3);
    claim("CUDA_CPU_ROUNDING: results that every machine returns exactly stay",
          __expf(0) == 1 && rsqrtf(64) == 0.125f && reciprocal_approx(8) == 0.125f && __logf(1) == 0);
    cuda_cpu::rounding = cuda_cpu::Rounding::of_seed(0);
    const auto [said, code] = run_child("workers", "CUDA_CPU_ROUNDING=many");
    claim("CUDA_CPU_ROUNDING that is no number ends the program with exit code 2",
          code == 2 && contains(said, "CUDA_CPU_ROUNDING is \"many\"; expected a whole number"));
}

static void test_products_of_fp8()
{
    constexpr std::array<std::array<cudaDataType_t, 2>, 3> kinds = {{{CUDA_R_8F_E4M3, CUDA_R_8F_E4M3}, {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2}, {CUDA_R_8F_E5M2, CUDA_R_8F_E4M3}}};
    double sizes = 0, scales = 0, others = 0;
    for (const auto& [a, b] : kinds)
        for (cudaDataType_t d : {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F}) {
            Fp8Matmul p;
            p.type_a = a, p.type_b = b, p.type_d = d;
            for (const std::array<int, 3>& size : {std::array<int, 3>{48, 80, 112}, {16, 16, 16}, {144, 16, 528}, {16, 272, 48}})
                for (int pad : {0, 16}) {
                    p.m = size[0], p.n = size[1], p.k = size[2], p.pad = pad;
                    sizes = std::max(sizes, p.error());
                }
            for (float beta : {0.0f, 1.0f, -0.5f})
                for (bool has_bias : {false, true})
                    for (float scale : {1.0f, 0.37f, 0.5f}) {   // 0.37: no power of 2
                        p.m = 304, p.beta = beta, p.has_bias = has_bias, p.scaled = scale != 1, p.alpha = 2 * scale;
                        p.scale_a = scale, p.scale_b = scale == 1 ? 1 : 4 * scale;
                        scales = std::max(scales, p.error());
                    }
            p.fast_sums = 1;
            for (const auto algorithm : {cuda_cpu::Algorithm::plain, cuda_cpu::Algorithm::slow, cuda_cpu::Algorithm::in_place, cuda_cpu::Algorithm::fast}) {
                p.algorithm = algorithm;
                others = std::max(others, p.error());
            }
        }
    claim("FP8: three pairs of kinds, to float, bf16 and half, odd multiples of 16, leading dimensions", sizes < 1);
    claim("FP8: alpha, beta, bias, and scales that are read when the product runs", scales < 1);
    claim("FP8: the other algorithms, and sums that may be fast", others < 1);
}

// A product of few tiles and long sums, which oneDNN would split among workers.
static void test_workers_of_fp8()
{
    constexpr int m = 144, n = 400, k = 4096;
    std::mt19937 random(17);
    const auto a = Fp8Matmul::codes(random, CUDA_R_8F_E4M3, m * k), b = Fp8Matmul::codes(random, CUDA_R_8F_E4M3, n * k);
    cublasLtContext handle;
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t la{CUDA_R_8F_E4M3, k, m, k}, lb{CUDA_R_8F_E4M3, k, n, k}, ld{CUDA_R_32F, m, n, m};
    const float alpha = 1, beta = 0;
    desc.transpose_a = CUBLAS_OP_T;
    const int workers = omp_get_max_threads();
    std::vector<float> first, d(m * n);
    bool same = true;
    for (int count : {1, 2, 3, 5, 16}) {
        omp_set_num_threads(count);
        same = same && cublasLtMatmul(&handle, &desc, &alpha, a.data(), &la, b.data(), &lb, &beta, d.data(), &ld, d.data(), &ld,
                                      nullptr, nullptr, 0, nullptr) == CUBLAS_STATUS_SUCCESS;
        if (first.empty()) first = d;
        same = same && d == first;
    }
    omp_set_num_threads(workers);
    claim("FP8: one, two, three, five and sixteen workers have the same bits", same);
}

// A product of FP8 that is there; `spoil` makes one that is not. Its heuristic's answer, and its own.
template <class Spoil> static bool fp8_refused(cublasStatus_t status, Spoil spoil)
{
    struct Parts {
        cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
        cublasLtMatrixLayoutOpaque_t a{CUDA_R_8F_E4M3, 32, 16, 32}, b{CUDA_R_8F_E4M3, 32, 48, 32}, d{CUDA_R_16BF, 16, 48, 16};
        cublasLtMatmulPreferenceOpaque_t preference;
    } parts;
    alignas(16) static unsigned char memory[1 << 14];
    float alpha = 1, beta = 0;
    parts.desc.transpose_a = CUBLAS_OP_T;
    parts.desc.bias = memory;
    spoil(parts);
    auto& [desc, a, b, d, preference] = parts;
    cublasLtContext handle;
    cublasLtMatmulHeuristicResult_t result;
    int found = -1;
    const auto heuristic = cublasLtMatmulAlgoGetHeuristic(&handle, &desc, &a, &b, &d, &d, &preference, 1, &result, &found);
    const auto product = cublasLtMatmul(&handle, &desc, &alpha, memory, &a, memory, &b, &beta, memory + 8192, &d, memory + 8192, &d, nullptr, nullptr, 0, nullptr);
    return heuristic == status && (found == 1) == (status == CUBLAS_STATUS_SUCCESS) && product == status;
}

static void test_refusals_of_fp8()
{
    constexpr auto success = CUBLAS_STATUS_SUCCESS, unsupported = CUBLAS_STATUS_NOT_SUPPORTED, invalid = CUBLAS_STATUS_INVALID_VALUE;
    static float scale = 1;
    claim("FP8: what is described well is there",
          fp8_refused(success, [](auto&) {}) && fp8_refused(success, [](auto& p) { p.a.type = CUDA_R_8F_E5M2; }) &&
              fp8_refused(success, [](auto& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BIAS; }) &&
              fp8_refused(success, [](auto& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BIAS, p.d.type = CUDA_R_32F, p.desc.bias_type = CUDA_R_16BF; }) &&
              fp8_refused(success, [](auto& p) { p.desc.scale_a = p.desc.scale_b = &scale; }));
    claim("FP8: refused are operands of other types, of E5M2 both, outputs of 8 bits",
          fp8_refused(unsupported, [](auto& p) { p.a.type = p.b.type = CUDA_R_8F_E5M2; }) &&
              fp8_refused(unsupported, [](auto& p) { p.b.type = CUDA_R_16BF; }) && fp8_refused(unsupported, [](auto& p) { p.a.type = CUDA_R_16BF; }) &&
              fp8_refused(unsupported, [](auto& p) { p.d.type = CUDA_R_8F_E4M3; }));
    claim("FP8: ... A not transposed, B transposed, other sums than float",
          fp8_refused(unsupported, [](auto& p) { p.desc.transpose_a = CUBLAS_OP_N, p.a = {CUDA_R_8F_E4M3, 16, 32, 16}; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.transpose_b = CUBLAS_OP_T, p.b = {CUDA_R_8F_E4M3, 48, 32, 48}; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.compute = CUBLAS_COMPUTE_32F_FAST_TF32; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.scale_type = CUDA_R_16BF; }));
    claim("FP8: ... m, n, k and leading dimensions that are no multiples of 16",
          fp8_refused(unsupported, [](auto& p) { p.a.columns = p.d.rows = 8; }) && fp8_refused(unsupported, [](auto& p) { p.b.columns = p.d.columns = 40; }) &&
              fp8_refused(unsupported, [](auto& p) { p.a.rows = p.b.rows = 24; }) && fp8_refused(unsupported, [](auto& p) { p.a.ld = 40; }) &&
              fp8_refused(unsupported, [](auto& p) { p.b.ld = 40; }) && fp8_refused(unsupported, [](auto& p) { p.d.ld = 24; }));
    claim("FP8: ... batches, epilogues other than a bias, a bias of float",
          fp8_refused(unsupported, [](auto& p) { p.a.batch = p.b.batch = p.d.batch = 2; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_GELU; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_DGELU, p.desc.aux = &scale, p.desc.aux_ld = 16; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BIAS, p.desc.bias_type = CUDA_R_32F; }) &&
              fp8_refused(unsupported, [](auto& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BIAS, p.desc.bias_type = CUDA_R_32F, p.d.type = CUDA_R_32F; }));
    claim("scales are refused where they have no meaning: of operands that are not FP8, of C, of D, its largest number",
          fp8_refused(invalid, [](auto& p) { p.desc.scale_a = &scale, p.a.type = p.b.type = CUDA_R_16BF; }) &&
              fp8_refused(invalid, [](auto& p) { p.desc.scale_b = &scale, p.a.type = p.b.type = CUDA_R_16BF; }) &&
              fp8_refused(invalid, [](auto& p) { p.desc.scale_c = &scale; }) && fp8_refused(invalid, [](auto& p) { p.desc.scale_d = &scale; }) &&
              fp8_refused(invalid, [](auto& p) { p.desc.largest_d = &scale; }));

    alignas(16) static unsigned char memory[1 << 14];
    cublasLtContext handle;
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    desc.transpose_a = CUBLAS_OP_T;
    cublasLtMatrixLayoutOpaque_t a{CUDA_R_8F_E4M3, 32, 16, 32}, d{CUDA_R_16BF, 16, 16, 16};
    const float alpha = 1, beta = 0;
    bool right = true;
    for (int which = -1; which < 3; which++) {
        unsigned char* const to[] = {memory, memory + 4096, memory + 8192};
        const auto moved = [&](int i) { return to[i] + (i == which ? 8 : 0); };
        right = right && cublasLtMatmul(&handle, &desc, &alpha, moved(0), &a, moved(1), &a, &beta, moved(2), &d, moved(2), &d, nullptr, nullptr, 0, nullptr) ==
                             (which < 0 ? success : invalid);
        cublasLtMatmulPreferenceOpaque_t preference;
        if (which >= 0) preference.alignments[which == 2 ? 3 : which] = 8;
        cublasLtMatmulHeuristicResult_t result;
        int found = 0;
        right = right && cublasLtMatmulAlgoGetHeuristic(&handle, &desc, &a, &a, &d, &d, &preference, 1, &result, &found) == (which < 0 ? success : unsupported);
    }
    claim("FP8: addresses that are no multiples of 16 are refused, and preferences that promise less", right);
}

// Scales belong to the memory of the moment, as operands do.
static void test_captured_scales()
{
    cublasLtContext handle;
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t a{CUDA_R_8F_E4M3, 16, 16, 16}, d{CUDA_R_32F, 16, 16, 16};
    alignas(16) __nv_fp8_e4m3 ones[256];
    alignas(16) float sums[256] = {};
    for (auto& x : ones) x = __nv_fp8_e4m3(1.0f);
    float scale = 3;
    const float alpha = 1, beta = 0;
    desc.transpose_a = CUBLAS_OP_T;
    desc.scale_a = desc.scale_b = &scale;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaError_t error = cudaSuccess;
    cudaGraphExec_t graph = captured(stream, error, [&] {
        cublasLtMatmul(&handle, &desc, &alpha, ones, &a, ones, &a, &beta, sums, &d, sums, &d, nullptr, nullptr, 0, stream);
    });
    bool right = error == cudaSuccess;
    for (float x : {0.5f, 2.0f}) {
        scale = x;
        right = right && cudaGraphLaunch(graph, stream) == cudaSuccess && sums[0] == 16 * x * x && sums[255] == 16 * x * x;
    }
    claim("FP8: a captured product reads its scales anew, each time", right);
    cudaGraphExecDestroy(graph);
    cudaStreamDestroy(stream);
}

static void test_refusals()
{
    const auto status = [](cudaDataType_t in, cudaDataType_t out, uint32_t epilogue, uint64_t k_of_b) {
        cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
        desc.epilogue = epilogue;
        cublasLtMatrixLayoutOpaque_t a{static_cast<uint32_t>(in), 8, 16, 8}, b{static_cast<uint32_t>(in), k_of_b, 4, 16}, d{static_cast<uint32_t>(out), 8, 4, 8};
        cublasLtMatmulHeuristicResult_t result;
        int found = -1;
        const cublasStatus_t answer = cublasLtMatmulAlgoGetHeuristic(nullptr, &desc, &a, &b, &d, &d, nullptr, 1, &result, &found);
        return (answer == CUBLAS_STATUS_SUCCESS) == (found == 1) ? answer : CUBLAS_STATUS_EXECUTION_FAILED;
    };
    claim("products that are not there are refused, and sizes that do not fit",
          status(CUDA_R_32F, CUDA_R_32F, CUBLASLT_EPILOGUE_DEFAULT, 16) == CUBLAS_STATUS_SUCCESS && status(CUDA_R_32F, CUDA_R_32F, CUBLASLT_EPILOGUE_DEFAULT, 15) == CUBLAS_STATUS_INVALID_VALUE &&
              status(CUDA_R_32F, CUDA_R_16BF, CUBLASLT_EPILOGUE_DEFAULT, 16) == CUBLAS_STATUS_NOT_SUPPORTED && status(CUDA_R_16F, CUDA_R_16BF, CUBLASLT_EPILOGUE_DEFAULT, 16) == CUBLAS_STATUS_NOT_SUPPORTED &&
              status(CUDA_R_32F, CUDA_R_32F, CUBLASLT_EPILOGUE_BGRADB, 16) == CUBLAS_STATUS_NOT_SUPPORTED && status(CUDA_R_32F, CUDA_R_32F, CUBLASLT_EPILOGUE_DGELU, 16) == CUBLAS_STATUS_INVALID_VALUE);
}

// ==== tensor cores ===============================================================================

// Whole numbers, small enough that every order of adding gives the same float. Fragments, tiles and chunks are
// written down here as the PTX manual has them, once more.

static std::vector<__nv_bfloat16> whole_numbers(size_t count, unsigned seed)
{
    std::mt19937 random(seed);
    std::vector<__nv_bfloat16> values(count);
    for (auto& x : values) x = static_cast<int>(random() % 17) - 8;
    return values;
}

struct Numbers : Array<__nv_bfloat16> {
    Numbers(size_t count, unsigned seed) : Array(count)
    {
        cudaMemcpy(data, whole_numbers(count, seed).data(), count * sizeof(*data), cudaMemcpyHostToDevice);
    }
};

// What people forget.
enum class Slip {
    NONE,
    FULL_WAIT,
    EMPTY_WAIT,
    EARLY_RELEASE,
    FIRST_WAIT,
    LAST_WAIT,
    ASYNC_FENCE,
    SYNCTHREADS,
    FRAGMENTS
};

static uint32_t pair_at(const __nv_bfloat16* p, size_t distance = 1)
{
    return __bfloat16_as_ushort(p[0]) | static_cast<uint32_t>(__bfloat16_as_ushort(p[distance])) << 16;
}

// Where 16-byte chunk `chunk` of row `row` lies in a tile of 128-byte rows.
static char* chunk_at(char* tile, int row, int chunk) { return tile + row * 128 + (chunk ^ row % 8) * 16; }

static char* shared_bytes() { return reinterpret_cast<char*>(dynamic_shared_memory); }

template <class... Parameters, class... Arguments>
static cudaError_t launch_large(dim3 grid, dim3 block, void (*kernel)(Parameters...), Arguments... arguments)
{
    constexpr size_t bytes = 200 * 1024;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return launch(grid, block, bytes, kernel, arguments...);
}

// A tensor (1, rows, 1, 64) in boxes of so many rows.
static CUtensorMap map_of(const __nv_bfloat16* data, uint64_t rows, uint32_t box_rows)
{
    const uint64_t extents[] = {64, 1, rows, 1}, strides[] = {128, 128, rows * 128};
    const uint32_t box[] = {64, 1, box_rows, 1}, steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<__nv_bfloat16*>(data), extents,
                           strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return map;
}

// ---- a warp's instructions

// d (16 x 8) = c + a (16 x 16) b (16 x 8), row by row in memory.
__global__ void multiply_fragments(float* d, const float* c, const __nv_bfloat16* a, const __nv_bfloat16* b)
{
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    const uint32_t fragment[4] = {pair_at(a + g * 16 + 2 * t), pair_at(a + (g + 8) * 16 + 2 * t),
                                  pair_at(a + g * 16 + 2 * t + 8), pair_at(a + (g + 8) * 16 + 2 * t + 8)};
    float sum[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
    mma_m16n8k16(sum, fragment, pair_at(b + 2 * t * 8 + g, 8), pair_at(b + (2 * t + 8) * 8 + g, 8));
    d[g * 8 + 2 * t] = sum[0];
    d[g * 8 + 2 * t + 1] = sum[1];
    d[(g + 8) * 8 + 2 * t] = sum[2];
    d[(g + 8) * 8 + 2 * t + 1] = sum[3];
}

static bool mma_multiplies()
{
    Numbers a(256, 1), b(128, 2);
    Array<float> c(128), d(128);
    for (unsigned i = 0; i < 128; i++) c[i] = static_cast<float>(i);
    launch(1, 32, 0, multiply_fragments, d.data, c.data, a.data, b.data);
    bool right = true;
    for (unsigned i = 0; i < 128; i++) {
        float sum = c[i];
        for (unsigned k = 0; k < 16; k++)
            sum += static_cast<float>(a[i / 8 * 16 + k]) * static_cast<float>(b[k * 8 + i % 8]);
        right = right && d[i] == sum;
    }
    return right;
}

// d (16 x 8) = c + a (16 x 32) b (32 x 8) in E4M3: b's columns, and the others' rows, are consecutive in memory.
__global__ void multiply_fp8_fragments(float* d, const float* c, const __nv_fp8_e4m3* a, const __nv_fp8_e4m3* b)
{
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto four = [](const __nv_fp8_e4m3* p) { return *reinterpret_cast<const uint32_t*>(p); };
    const __nv_fp8_e4m3 *row = a + g * 32 + 4 * t, *column = b + g * 32 + 4 * t;
    const uint32_t fragment[4] = {four(row), four(row + 8 * 32), four(row + 16), four(row + 8 * 32 + 16)};
    float sum[4];
    const auto place = [=](unsigned i) { return (g + i / 2 * 8) * 8 + 2 * t + i % 2; };
    for (unsigned i = 0; i < 4; i++) sum[i] = c[place(i)];
    mma_m16n8k32_e4m3(sum, fragment, four(column), four(column + 16));
    for (unsigned i = 0; i < 4; i++) d[place(i)] = sum[i];
}

static bool fp8_mma_multiplies()
{
    Array<__nv_fp8_e4m3> a(16 * 32), b(8 * 32);
    Array<float> c(128), d(128);
    std::mt19937 random(4);
    for (auto* x : {&a, &b})
        for (size_t i = 0; i < x->size; i++) (*x)[i] = __nv_fp8_e4m3(static_cast<float>(random() % 17) - 8);
    for (unsigned i = 0; i < 128; i++) c[i] = static_cast<float>(i);
    launch(1, 32, 0, multiply_fp8_fragments, d.data, c.data, a.data, b.data);
    bool right = true;
    for (unsigned i = 0; i < 128; i++) {
        float sum = c[i];
        for (unsigned k = 0; k < 32; k++)
            sum += static_cast<float>(a[i / 8 * 32 + k]) * static_cast<float>(b[i % 8 * 32 + k]);
        right = right && d[i] == sum;
    }
    return right;
}

// Rows of 8 numbers, 80 bytes apart; each lane names one, and notes what it gets, plain and transposed.
__global__ void load_matrices(uint32_t* out)
{
    char* row = shared_bytes() + threadIdx.x * 80;
    for (unsigned i = 0; i < 8; i++) reinterpret_cast<uint16_t*>(row)[i] = static_cast<uint16_t>(threadIdx.x * 8 + i);
    __syncwarp();
    uint32_t plain[4], transposed[4];
    ldmatrix(plain, row);
    ldmatrix_transposed(transposed, row);
    for (unsigned m = 0; m < 4; m++) {
        out[threadIdx.x * 8 + m] = plain[m];
        out[threadIdx.x * 8 + 4 + m] = transposed[m];
    }
}

static bool ldmatrix_loads()
{
    Array<uint32_t> out(256);
    launch(1, 32, 32 * 80, load_matrices, out.data);
    bool right = true;
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned m = 0; m < 4; m++) {
            const unsigned g = lane / 4, t = lane % 4, plain = (m * 8 + g) * 8 + 2 * t,
                           transposed = (m * 8 + 2 * t) * 8 + g;
            right = right && out[lane * 8 + m] == (plain | (plain + 1) << 16) &&
                    out[lane * 8 + 4 + m] == (transposed | (transposed + 8) << 16);
        }
    return right;
}

// Three groups of copies, of which the last two chunks are to be zeros; reads after so many groups may still be
// under way.
template <int under_way> __global__ void copy_groups(int4* out, const int4* in)
{
    int4* to = reinterpret_cast<int4*>(dynamic_shared_memory) + threadIdx.x * 6;
    for (int i = 0; i < 6; i++) to[i] = make_int4(-1, -1, -1, -1);
    for (int i = 0; i < 6; i++) {
        copy_async(to + i, in + threadIdx.x * 6 + i, i < 4);
        if (i % 2 == 1) copy_async_commit();
    }
    copy_async_wait<under_way>();
    for (int i = 0; i < 6; i++) out[threadIdx.x * 6 + i] = to[i];
    copy_async_wait<0>();
}

// How many of each group's chunks were not there.
template <int under_way> static std::vector<int> missing_copies()
{
    Array<int4> in(64 * 6), out(64 * 6);
    for (int i = 0; i < 64 * 6; i++) in[static_cast<size_t>(i)] = make_int4(i, i + 1, i + 2, i + 3);
    launch(1, 64, 64 * 96, copy_groups<under_way>, out.data, in.data);
    std::vector<int> missing(3);
    for (size_t i = 0; i < out.size; i++) {
        const int4 expected = i % 6 < 4 ? in[i] : make_int4(0, 0, 0, 0);
        missing[i % 6 / 2] += memcmp(&out[i], &expected, sizeof(expected)) != 0;
    }
    return missing;
}

static void test_warp_instructions()
{
    claim("mma_m16n8k16: fragments as in the manual, a product is added", in_every_order(mma_multiplies));
    claim("mma_m16n8k32_e4m3: fragments as in the manual, a product is added", in_every_order(fp8_mma_multiplies));
    claim("ldmatrix: every lane gets its elements of four matrices, plain and transposed",
          in_every_order(ldmatrix_loads));
    claim("copy_async: all groups have landed after a wait for all, zeros where not valid",
          in_every_order([] { return missing_copies<0>() == std::vector<int>(3); }));
    cuda_cpu::set_seed(3);
    const auto one = missing_copies<1>(), three = missing_copies<3>();
    cuda_cpu::set_seed(0);
    claim("copy_async: under a seed, the groups that a wait leaves under way land partly, those before are there",
          one[0] == 0 && one[1] == 0 && one[2] > 20 && one[2] < 108 && three[0] > 20 && three[1] > 20 &&
              missing_copies<3>() == std::vector<int>(3));
}

// ---- barriers

// Threads of warp 0 hand numbers to those of warp 1 through a ring of two slots, by barriers that count 32 arrivals.
__global__ void hand_over(int* out, int count)
{
    uint64_t* barriers = reinterpret_cast<uint64_t*>(shared_bytes());  // full, full, empty, empty
    int* slots = reinterpret_cast<int*>(shared_bytes() + 64);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) barrier_init(barriers + i, 32);
        barrier_init_done();
    }
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    for (int i = 0; i < count; i++) {
        const int slot = i % 2;
        const uint32_t parity = static_cast<uint32_t>(i / 2 % 2);
        if (threadIdx.x < 32) {
            barrier_wait(barriers + 2 + slot, parity ^ 1);  // the first of which is over when it begins
            slots[slot * 32 + static_cast<int>(lane)] = i * 32 + static_cast<int>(lane);
            barrier_arrive(barriers + slot);
        } else {
            barrier_wait(barriers + slot, parity);
            out[i * 32 + static_cast<int>(lane)] = slots[slot * 32 + 31 - static_cast<int>(lane)];
            barrier_arrive(barriers + 2 + slot);
        }
    }
}

// Two warps take turns by two named barriers, a third arrives at a barrier where a fourth waits.
__global__ void take_turns(int* out, int* place)
{
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < 2) {
        if (warp == 1) named_barrier_arrive(1, 64);  // warp 0 may begin
        for (int i = 0; i < 5; i++) {
            named_barrier_wait(1 + warp, 64);
            if (threadIdx.x % 32 == 0) out[(*place)++] = 10 * warp + i;
            if (warp == 0 || i < 4) named_barrier_arrive(2 - warp, 64);
        }
    } else if (warp == 2) {
        out[64 + threadIdx.x % 32] = static_cast<int>(threadIdx.x);
        named_barrier_arrive(15, 64);
    } else {
        named_barrier_wait(15, 64);
        out[threadIdx.x - 64 + 64] = out[64 + threadIdx.x % 32];
    }
}

static void test_barriers()
{
    claim("mbarriers: phases and parities hand 50 times 32 numbers through a ring of two", in_every_order([] {
              Array<int> out(50 * 32);
              launch(1, 64, 1024, hand_over, out.data, 50);
              bool right = true;
              for (int i = 0; i < 50 * 32; i++)
                  right = right && out[static_cast<size_t>(i)] == i / 32 * 32 + 31 - i % 32;
              return right;
          }));
    claim("named barriers: two warps take turns, one arrives where another waits", in_every_order([] {
              Array<int> out(128), place(1);
              launch(1, 128, 0, take_turns, out.data, place.data);
              bool right = place[0] == 10;
              for (int i = 0; i < 10; i++) right = right && out[static_cast<size_t>(i)] == i % 2 * 10 + i / 2;
              for (size_t i = 0; i < 32; i++) right = right && out[96 + i] == static_cast<int>(64 + i);
              return right;
          }));
}

// ---- the copy engine

template <Slip S>
__global__ void load_box(uint16_t* out, const __grid_constant__ CUtensorMap map, int bytes, int c0, int c1, int c2,
                         int c3)
{
    uint64_t* barrier = reinterpret_cast<uint64_t*>(shared_bytes() + 2048 + bytes);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
        barrier_arrive_expect(barrier, bytes);
        tensor_load(shared_bytes() + 1024, &map, barrier, c0, c1, c2, c3);
    }
    if (S != Slip::FULL_WAIT && threadIdx.x == 0) barrier_wait(barrier, 0);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < bytes / 2; i += static_cast<int>(blockDim.x))
        out[i] = reinterpret_cast<uint16_t*>(shared_bytes() + 1024)[i];
    barrier_wait(barrier, 0);
}

// Boxes of 64 (or, not swizzled, 16) x 2 x 3 x 2 in a tensor (3, 7, 5, 72), inside and over each edge.
using Corner = std::array<int, 4>;
static const std::vector<Corner> inside_and_over_edges = {{0, 0, 0, 0},  {8, 3, 4, 1},  {16, 1, 1, 0}, {-8, 0, 0, 0},
                                                          {0, -1, 2, 0}, {0, 4, -2, 2}, {3, 0, 6, -1}};
static const std::vector<Corner> wholly_outside = {{72, 0, 0, 0}, {-64, 0, 0, 0}, {0, 5, 0, 0},  {0, -2, 0, 0},
                                                   {0, 0, 7, 0},  {0, 0, 100, 0}, {0, 0, -3, 0}, {0, 0, 0, 3},
                                                   {0, 0, 0, -2}, {80, 6, 9, 4}};
template <Slip S = Slip::NONE>
static bool boxes_land(CUtensorMapSwizzle swizzle, const std::vector<Corner>& corners = inside_and_over_edges)
{
    const int columns = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 64 : 16, n[] = {72, 5, 7, 3},
              size[] = {columns, 2, 3, 2}, count = columns * 12;
    Array<uint16_t> in(80 * 5 * 8 * 3),
        out(static_cast<size_t>(count));  // rows of 80, of which 72 count; 8 in the third dimension
    for (size_t i = 0; i < in.size; i++) in[i] = static_cast<uint16_t>(i + 1);
    const uint64_t extents[] = {72, 5, 7, 3}, strides[] = {160, 800, 6400};
    const uint32_t box[] = {static_cast<uint32_t>(columns), 2, 3, 2}, steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    if (cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, in.data, extents, strides, box, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return false;
    bool right = true;
    for (const Corner& at : corners) {
        launch(1, 32, static_cast<size_t>(count * 2 + 4096), load_box<S>, out.data, map, count * 2, at[0], at[1], at[2],
               at[3]);
        for (int i = 0; i < count; i++) {
            int x[4], rest = i;
            bool inside = true;
            for (int d = 0; d < 4; d++) {
                x[d] = at[static_cast<size_t>(d)] + rest % size[d];
                rest /= size[d];
                inside = inside && x[d] >= 0 && x[d] < n[d];
            }
            const int row = i / columns, place = columns == 64 ? row * 64 + (i % 64 / 8 ^ row % 8) * 8 + i % 8 : i;
            const uint16_t expected = inside ? in[static_cast<size_t>(((x[3] * 8 + x[2]) * 5 + x[1]) * 80 + x[0])] : 0;
            right = right && out[static_cast<size_t>(place)] == expected && (!inside || &corners != &wholly_outside);
        }
    }
    return right;
}

static void test_tensor_maps()
{
    struct Request {
        uintptr_t address = 1 << 20;
        uint32_t rank = 4;
        uint64_t extents[6] = {64, 8, 100, 4, 1, 1}, strides[5] = {128, 1024, 102400, 409600, 409600};
        uint32_t box[6] = {64, 1, 64, 1, 1, 1}, steps[6] = {1, 1, 1, 1, 1, 1};
        CUresult status() const
        {
            CUtensorMap map;
            return cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
                                          reinterpret_cast<void*>(address), extents, strides, box, steps,
                                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        }
    };
    const auto refused = [](auto change) {
        Request request;
        change(request);
        return request.status() == CUDA_ERROR_INVALID_VALUE;
    };
    bool right = Request{}.status() == CUDA_SUCCESS;
    right = right && refused([](Request& r) { r.address += 8; }) && refused([](Request& r) { r.address = 0; }) &&
            refused([](Request& r) { r.rank = 0; }) && refused([](Request& r) { r.rank = 6; });
    right = right && refused([](Request& r) { r.strides[1] += 8; }) &&
            refused([](Request& r) { r.strides[2] = uint64_t{1} << 40; });
    right = right && refused([](Request& r) { r.extents[2] = 0; }) &&
            refused([](Request& r) { r.extents[0] = (uint64_t{1} << 32) + 1; });
    right = right && refused([](Request& r) { r.box[2] = 257; }) && refused([](Request& r) { r.box[1] = 0; }) &&
            refused([](Request& r) { r.box[0] = 72; }) && refused([](Request& r) { r.box[0] = 4; });
    right = right && refused([](Request& r) { r.steps[1] = 0; }) && refused([](Request& r) { r.steps[3] = 9; });
    claim("cuTensorMapEncodeTiled refuses what CUDA refuses: addresses, strides, extents, boxes, steps", right);

    void *known = nullptr, *unknown = &right;
    cudaDriverEntryPointQueryResult of_known, of_unknown;
    claim("a function of the driver is found by its name",
          cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &known, 12000, cudaEnableDefault, &of_known) ==
                  cudaSuccess &&
              of_known == cudaDriverEntryPointSuccess && known == reinterpret_cast<void*>(&cuTensorMapEncodeTiled) &&
              cudaGetDriverEntryPointByVersion("cuTensorMapDecode", &unknown, 12000, cudaEnableDefault, &of_unknown) ==
                  cudaSuccess &&
              of_unknown == cudaDriverEntryPointSymbolNotFound && unknown == nullptr);
    if (WARP_SIZE == 1) return;
    claim("tensor_load: a box of four dimensions lands swizzled, with zeros for what is before or past the tensor",
          in_every_order([] { return boxes_land(CU_TENSOR_MAP_SWIZZLE_128B); }));
    claim("tensor_load: a box that is wholly outside of the tensor is zeros, and its bytes are counted",
          in_every_order([] {
              return boxes_land(CU_TENSOR_MAP_SWIZZLE_128B, wholly_outside) &&
                     boxes_land(CU_TENSOR_MAP_SWIZZLE_NONE, wholly_outside);
          }));
    claim("tensor_load: ... and plain without swizzle",
          in_every_order([] { return boxes_land(CU_TENSOR_MAP_SWIZZLE_NONE); }));
}

// ---- products of a warpgroup

enum class From { SHARED, REGISTERS };

// Accumulator i of this thread is element (row, column) of (64 x N).
static int row_of(int i)
{
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + i % 4 / 2 * 8;
}
static int column_of(int i) { return i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2; }

// d (64 x N) = a (64 x 64) b, or d += a b; b is (N x 64) for Major::K, (64 x N) for Major::MN. The tiles begin at these
// offsets, and their groups of 8 rows are so many bytes apart (dense: 1024).
template <int N, Major B, From A, Slip S>
__global__ void multiply_tiles(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b, bool add, int a_offset,
                               int b_offset, int group_bytes)
{
    char *a_tile = shared_bytes() + a_offset, *b_tile = shared_bytes() + b_offset;
    const int block_bytes = 8 * group_bytes + 1024;  // MN: between blocks of 64 columns
    const auto place = [=](char* tile, int row, int chunk) {
        return chunk_at(tile + row / 8 * group_bytes, row % 8, chunk);
    };
    const auto operand = [=](char* tile, int block = 16) {
        return (wgmma_operand(tile, block) & ~(uint64_t{0x3fff} << 32)) | static_cast<uint64_t>(group_bytes / 16) << 32;
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
    if (S != Slip::ASYNC_FENCE) async_fence();
    if (S != Slip::SYNCTHREADS) __syncthreads();
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
        if constexpr (A == From::SHARED)
            wgmma<N, B>(sum, operand(a_tile + 32 * k), b_operand, add || k > 0);
        else
            wgmma<N, B>(sum, fragments[k], b_operand, add || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>(sum);
    for (int i = 0; i < N / 2; i++) d[row_of(i) * N + column_of(i)] = sum[i];
}

template <int N, Major B, From A, Slip S = Slip::NONE>
static bool tiles_multiply(int a_offset = 1024, int b_offset = 32768, int group_bytes = 1024)
{
    Numbers a(64 * 64, 1), b(64 * N, 2);
    bool right = true;
    for (bool add : {false, true}) {
        Array<float> d(64 * N);
        for (size_t i = 0; i < d.size; i++) d[i] = static_cast<float>(i % 1000);
        launch_large(1, 128, multiply_tiles<N, B, A, S>, d.data, a.data, b.data, add, a_offset, b_offset, group_bytes);
        for (size_t m = 0; m < 64; m++)
            for (size_t n = 0; n < N; n++) {
                float sum = add ? static_cast<float>((m * N + n) % 1000) : 0;
                for (size_t k = 0; k < 64; k++)
                    sum += static_cast<float>(a[m * 64 + k]) *
                           static_cast<float>(B == Major::K ? b[n * 64 + k] : b[k * N + n]);
                right = right && d[m * N + n] == sum;
            }
    }
    return right;
}

// Two groups with accumulators of their own, and one that adds to the first; notes what each holds when so many groups
// may be under way.
__global__ void group_products(float* out, const __nv_bfloat16* a)
{
    for (int i = static_cast<int>(threadIdx.x); i < 64 * 8; i += 128)
        memcpy(chunk_at(shared_bytes(), i / 8, i % 8), a + i * 8, 16);
    async_fence();
    __syncthreads();
    const uint64_t tile = wgmma_operand(shared_bytes());
    float x[32], y[32];
    wgmma_fence(x, y);
    wgmma<64, Major::K>(x, tile, tile, 0);
    wgmma_commit();
    wgmma<64, Major::K>(y, tile, tile, 0);
    wgmma_commit();
    wgmma<64, Major::K>(x, tile, tile, 1);
    wgmma_commit();
    wgmma_wait<3>();
    out[threadIdx.x * 6] = y[0];
    wgmma_wait<1>(y);
    out[threadIdx.x * 6 + 1] = x[0];
    out[threadIdx.x * 6 + 2] = y[0];
    wgmma_wait<0>(x, y);
    out[threadIdx.x * 6 + 3] = x[0];
    out[threadIdx.x * 6 + 4] = y[0];
}

static bool groups_end_in_order(bool late)
{
    Numbers a(64 * 64, 1);
    Array<float> out(128 * 6);
    launch_large(1, 128, group_products, out.data, a.data);
    bool right = true;
    for (size_t t = 0; t < 128; t++) {
        const float* seen = out.data + t * 6;
        right = right && seen[4] == seen[2] && seen[3] == 2 * seen[4] && std::isnan(seen[0]) == late &&
                std::isnan(seen[1]) == late;
    }
    return right && out[4] != 0;
}

// A loop as kernels have it: out (64 x 64) = sum over i of (q k_i') k_i, where a warp of its own loads the 64 rows of
// k_i into a ring of two stages, s = q k_i' becomes the fragments of the second product, and those of odd i go by way
// of shared memory.
template <Slip S>
__global__ void __launch_bounds__(160) pipeline(float* out, const __grid_constant__ CUtensorMap q_map,
                                                const __grid_constant__ CUtensorMap k_map, int tiles)
{
    constexpr int tile_bytes = 64 * 128;
    char *q = shared_bytes(), *k = q + tile_bytes, *p = k + 2 * tile_bytes;
    uint64_t *full = reinterpret_cast<uint64_t*>(p + tile_bytes), *empty = full + 2, *q_full = full + 4;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 4);
        }
        barrier_init(q_full, 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        keep_registers<24>();
        if (threadIdx.x > 128) return;
        barrier_arrive_expect(q_full, tile_bytes);
        tensor_load(q, &q_map, q_full, 0, 0, 0, 0);
        for (int i = 0; i < tiles; i++) {
            if (S != Slip::EMPTY_WAIT) barrier_wait(empty + i % 2, static_cast<uint32_t>(i / 2 % 2 ^ 1));
            barrier_arrive_expect(full + i % 2, tile_bytes);
            tensor_load(k + i % 2 * tile_bytes, &k_map, full + i % 2, 0, 0, 64 * i, 0);
        }
        if (S == Slip::FULL_WAIT) barrier_wait(full + (tiles - 1) % 2, static_cast<uint32_t>((tiles - 1) / 2 % 2));
        return;
    }
    take_registers<240>();
    float s[32], o[32];
    for (int i = 0; i < 32; i++) o[i] = 0;
    barrier_wait(q_full, 0);
    for (int i = 0; i < tiles; i++) {
        char* k_i = k + i % 2 * tile_bytes;
        if (S != Slip::FULL_WAIT) barrier_wait(full + i % 2, static_cast<uint32_t>(i / 2 % 2));
        wgmma_fence(s);
        for (int j = 0; j < 4; j++)
            wgmma<64, Major::K>(s, wgmma_operand(q + 32 * j), wgmma_operand(k_i + 32 * j), j > 0);
        wgmma_commit();
        if (S != Slip::FIRST_WAIT) wgmma_wait<0>(s);
        uint32_t fragments[4][4];
        for (int j = 0; j < 16; j++) {
            const __nv_bfloat16 pair[2] = {s[2 * j], s[2 * j + 1]};
            fragments[j / 4][j % 4] = pair_at(pair);
        }
        if (i % 2 == 0) {
            wgmma_fence(o, fragments);
            for (int j = 0; j < 4; j++) wgmma<64, Major::MN>(o, fragments[j], wgmma_operand(k_i + 2048 * j), 1);
        } else {
            for (int j = 0; j < 16; j++) {
                const int row = row_of(2 * j), column = column_of(2 * j);
                memcpy(chunk_at(p, row, column / 8) + column % 8 * 2, &fragments[j / 4][j % 4], 4);
            }
            if (S != Slip::ASYNC_FENCE) async_fence();
            named_barrier_wait(1, 128);
            wgmma_fence(o);
            for (int j = 0; j < 4; j++)
                wgmma<64, Major::MN>(o, wgmma_operand(p + 32 * j), wgmma_operand(k_i + 2048 * j), 1);
        }
        wgmma_commit();
        if (S == Slip::EARLY_RELEASE && threadIdx.x % 32 == 0) barrier_arrive(empty + i % 2);
        if (S == Slip::FRAGMENTS) fragments[3][3] = 0;
        if (S != Slip::LAST_WAIT || i < tiles - 1) wgmma_wait<0>(o);
        if (S != Slip::EARLY_RELEASE && threadIdx.x % 32 == 0) barrier_arrive(empty + i % 2);
        if (i % 2 == 1) named_barrier_wait(2, 128);  // p may be written again
    }
    for (int i = 0; i < 32; i++) out[(static_cast<int>(blockIdx.x) * 64 + row_of(i)) * 64 + column_of(i)] = o[i];
    if (S == Slip::LAST_WAIT) wgmma_wait<0>(o);
    if (S == Slip::FIRST_WAIT) wgmma_wait<0>(s);
}

template <Slip S> static bool pipeline_is_right()
{
    constexpr size_t tiles = 8;  // both parities come last
    Numbers q(64 * 64, 1), k(tiles * 64 * 64, 2);
    for (size_t i = 0; i < q.size; i++)
        q[i] = i / 64 == i % 64 || i / 64 == (i * 7) % 64 ? 1.0f : 0.0f;  // so that s is small
    Array<float> out(4 * 64 * 64);
    launch(4, 160, 4 * 8192 + 64, pipeline<S>, out.data, map_of(q.data, 64, 64), map_of(k.data, tiles * 64, 64),
           static_cast<int>(tiles));
    std::vector<float> expected(64 * 64);
    for (size_t m = 0; m < 64; m++)
        for (size_t j = 0; j < tiles * 64; j++) {
            float s = 0;
            for (size_t d = 0; d < 64; d++) s += static_cast<float>(q[m * 64 + d]) * static_cast<float>(k[j * 64 + d]);
            for (size_t n = 0; n < 64; n++) expected[m * 64 + n] += s * static_cast<float>(k[j * 64 + n]);
        }
    bool right = true;
    for (size_t i = 0; i < out.size; i++) right = right && out[i] == expected[i % expected.size()];
    return right;
}

// Whether a kernel goes wrong under one of a few seeds, or ends the program, which is why it has one of its own.
template <class Check> static bool goes_wrong(Check is_right)
{
    bool wrong = false;
    for (uint64_t seed = 1; seed < 9 && !wrong; seed++) {
        cuda_cpu::set_seed(seed);
        wrong = !is_right();
    }
    return wrong;
}

static bool do_slip(int slip)
{
    switch (static_cast<Slip>(slip)) {
    case Slip::NONE:
        return goes_wrong(pipeline_is_right<Slip::NONE>) ||
               goes_wrong([] { return tiles_multiply<64, Major::K, From::SHARED>(); });
    case Slip::FULL_WAIT:
        return goes_wrong([] { return boxes_land<Slip::FULL_WAIT>(CU_TENSOR_MAP_SWIZZLE_128B); }) &&
               goes_wrong(pipeline_is_right<Slip::FULL_WAIT>);
    case Slip::EMPTY_WAIT:
        return goes_wrong(pipeline_is_right<Slip::EMPTY_WAIT>);
    case Slip::EARLY_RELEASE:
        return goes_wrong(pipeline_is_right<Slip::EARLY_RELEASE>);
    case Slip::FIRST_WAIT:
        return goes_wrong(pipeline_is_right<Slip::FIRST_WAIT>);
    case Slip::LAST_WAIT:
        return goes_wrong(pipeline_is_right<Slip::LAST_WAIT>);
    case Slip::FRAGMENTS:
        return goes_wrong(pipeline_is_right<Slip::FRAGMENTS>);
    case Slip::ASYNC_FENCE:
        return goes_wrong(pipeline_is_right<Slip::ASYNC_FENCE>) &&
               goes_wrong([] { return tiles_multiply<64, Major::K, From::SHARED, Slip::ASYNC_FENCE>(); });
    case Slip::SYNCTHREADS:
        return goes_wrong([] { return tiles_multiply<64, Major::K, From::SHARED, Slip::SYNCTHREADS>(); });
    }
    return false;
}

static bool shows(Slip slip) { return run_child("slip" + std::to_string(static_cast<int>(slip))).second == 1; }

static void test_products_of_warpgroups()
{
    claim("wgmma, both operands in shared memory: N of 64, 128 and 256, both majors, assigned and added",
          in_every_order([] {
              return tiles_multiply<64, Major::K, From::SHARED>() && tiles_multiply<128, Major::K, From::SHARED>() &&
                     tiles_multiply<256, Major::K, From::SHARED>() && tiles_multiply<64, Major::MN, From::SHARED>() &&
                     tiles_multiply<128, Major::MN, From::SHARED>() && tiles_multiply<256, Major::MN, From::SHARED>();
          }));
    claim("wgmma, a in registers: N of 64 and 128, both majors", in_every_order([] {
              return tiles_multiply<64, Major::K, From::REGISTERS>() && tiles_multiply<128, Major::K, From::REGISTERS>() &&
                     tiles_multiply<64, Major::MN, From::REGISTERS>() && tiles_multiply<128, Major::MN, From::REGISTERS>();
          }));
    claim("wgmma: groups of 8 rows are as far apart as the descriptor says",
          tiles_multiply<128, Major::K, From::SHARED>(1024, 32768, 3072) &&
              tiles_multiply<256, Major::MN, From::SHARED>(1024, 32768, 2048));
    claim(
        "wgmma_wait: groups end in their order; under a seed what is under way is not a number",
        groups_end_in_order(false) && [] {
            cuda_cpu::set_seed(1);
            const bool right = groups_end_in_order(true);
            cuda_cpu::set_seed(0);
            return right;
        }());
    claim("a loader and a warpgroup, two products in a chain, work in every order",
          in_every_order(pipeline_is_right<Slip::NONE>) && !shows(Slip::NONE));
    claim("it shows when a kernel does not wait for a load", shows(Slip::FULL_WAIT));
    claim("it shows when a load does not wait until its stage is free", shows(Slip::EMPTY_WAIT));
    claim("it shows when a stage is released before the product that reads it has ended", shows(Slip::EARLY_RELEASE));
    claim("it shows when a product's result is read before wgmma_wait",
          shows(Slip::FIRST_WAIT) && shows(Slip::LAST_WAIT));
    claim("it shows when fragments are written before wgmma_wait", shows(Slip::FRAGMENTS));
    claim("it shows when stores are not followed by async_fence", shows(Slip::ASYNC_FENCE));
    claim("it shows when warps do not wait for each other's stores", shows(Slip::SYNCTHREADS));
}

// ---- what ends the program

__global__ void misuse(int which, const __nv_bfloat16* data, const __grid_constant__ CUtensorMap map)
{
    char* tile = shared_bytes();
    uint64_t* barrier = reinterpret_cast<uint64_t*>(tile + 16384);
    const bool first = threadIdx.x == 0;
    const uint64_t operand = wgmma_operand(tile), other = wgmma_operand(tile + 8192);
    float d[32] = {};
    if (first && which != 3) barrier_init(barrier, 1);
    if (first && which != 4) barrier_init_done();
    __syncthreads();
    if (first && which == 0) copy_async(tile + 8, data, true);
    if (first && which == 1) copy_async(tile, data + 4, true);
    if (first && which == 2) tensor_load(tile + 512, &map, barrier, 0, 0, 0, 0);
    if (first && (which == 3 || which == 4)) tensor_load(tile, &map, barrier, 0, 0, 0, 0);
    if (first && which == 5) {
        barrier_arrive_expect(barrier, 64);
        barrier_arrive(barrier);
    }
    if (first && which == 6) barrier_wait(barrier, 0);
    if (which == 7) threadIdx.x < 32 ? named_barrier_wait(3, 96) : named_barrier_arrive(3, 128);
    if (which == 8) named_barrier_wait(0, 128);
    if (which == 9) named_barrier_wait(1, 100);
    if (first && which == 10) {
        named_barrier_arrive(2, 128);
        named_barrier_arrive(2, 128);
    }
    if (which == 11 && threadIdx.x < 64) named_barrier_wait(4, 128);
    if (first && which == 12) {
        copy_async(tile, data, true);
        copy_async_commit();
    }
    if (first && which == 13) {
        barrier_arrive_expect(barrier, 16384);
        tensor_load(tile, &map, barrier, 0, 0, 0, 0);
        barrier_wait(barrier, 1);  // of the phase before
    }
    if (which == 14) wgmma<64, Major::K>(d, operand, operand, 0);
    if (which >= 15 && which < 22) wgmma_fence();
    if (which == 15) wgmma<64, Major::K>(d, operand, threadIdx.x % 2 == 0 ? operand : other, 0);
    if (which == 16) wgmma<64, Major::K>(d, operand, threadIdx.x < 32 ? operand : other, 0);
    if (which == 17) wgmma<64, Major::K>(d, operand, operand ^ uint64_t{3} << 62, 0);
    if (which == 18) wgmma<64, Major::K>(d, operand, wgmma_operand(tile + 16384), 0);
    if (which == 19) wgmma<64, Major::K>(d, operand, operand, 0);
    if (which == 20) {
        wgmma<64, Major::K>(d, operand, operand, 0);
        wgmma_commit();
        wgmma_wait<1>(d);
    }
    if (which == 21 && threadIdx.x < 32) {
        wgmma<64, Major::K>(d, operand, operand, 0);
        wgmma_commit();
        wgmma_wait<0>(d);
    }
    if (which == 22 && threadIdx.x % 32 < 16) {
        uint32_t a[4] = {};
        mma_m16n8k16(d, a, 0, 0);
    }
    if (which == 23) {
        uint32_t r[4];
        ldmatrix(r, tile + 4);
    }
    if (which == 24) shared_address(data);
    if (first && which == 25) tensor_load(tile + 9 * 1024, &map, barrier, 0, 0, 0, 0);
    if (which < 26) return;
    uint32_t fragment[4] = {};
    wgmma_fence(fragment);
    if (which == 26) wgmma<64, Major::K>(d, operand, operand, 1);
    if (which == 27) fragment[0] = 1;
    const uint64_t b = which == 31   ? wgmma_operand(tile + 128)
                       : which == 32 ? wgmma_operand(tile, 1024)
                       : which == 33 ? wgmma_operand(tile, 0)
                       : which == 34 ? wgmma_operand(tile + 96)
                                     : operand;
    wgmma<64, Major::K>(d, fragment, b, 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (which == 28) d[0] = 1;
    wgmma_fence(d);
    wgmma<64, Major::K>(d, operand, operand, 1);
    wgmma_commit();
    if (which == 29)
        wgmma_wait<0>();
    else
        wgmma_wait<0>(d);
}

// What is said, in the order of `misuse`; nothing of what is right. From 26 on there is a seed, which it takes to see
// some.
static const std::vector<std::string> misuses = {
    "thread 0 calls copy_async with an address that is not a multiple of 16",
    "thread 0 calls copy_async with an address that is not a multiple of 16",
    "thread 0 calls tensor_load to an address that is not a multiple of 1024",
    "thread 0 calls tensor_load with a barrier that nobody has initialised",
    "thread 0 calls tensor_load before barrier_init_done",
    "thread 0 calls barrier_arrive for a barrier where all 1 have arrived, before its phase has ended",
    "deadlock: no thread can go on\n  threads 0: in barrier_wait, parity 0, barrier at byte 16384: 0 of 1 threads have "
    "arrived, 0 bytes are missing\n  threads 1-127: ended",
    "calls named_barrier_arrive for 128 threads, others for 96, at barrier 3",
    "calls named_barrier_wait with number 0; expected 1 to 15",
    "calls named_barrier_wait for 100 threads; expected a multiple of 32, no more than the block's",
    "thread 0 calls named_barrier_arrive and has arrived at barrier 2 already",
    "threads 0-63: in named_barrier_wait, barrier 4: 64 of 128 threads have arrived\n  threads 64-127: ended",
    "thread 0 ended without waiting for a copy_async",
    "the block ended, and nobody has waited for a tensor_load",
    "wgmma: warp 0 has not called wgmma_fence",
    "wgmma: the lanes of a warp do not agree on descriptors or on adding",
    "wgmma: the warps of warpgroup 0 do not call the same one",
    "wgmma: a descriptor's swizzle is mode 2; only that of 128 bytes (1) is known here",
    "wgmma reads beyond the launch's shared memory",
    "warp 0 ended without waiting for a wgmma",
    "calls wgmma_wait and names accumulators of a product that is still under way",
    "the warps of warpgroup 0 did not call the same wgmma's",
    "calls mma_m16n8k16 and its warp has no 32 lanes any more",
    "calls ldmatrix with an address that is not a multiple of 16",
    "calls shared_address with an address that is not in dynamic shared memory",
    "thread 0 calls tensor_load and the box ends beyond the launch's shared memory",
    "calls wgmma with accumulators that no wgmma_fence has named since they were written",
    "calls wgmma with fragments that no wgmma_fence has named since they were written",
    "has changed accumulators that no wgmma_wait has named",
    "thread 0 ended, and no wgmma_wait has named the accumulators of a wgmma",
    "",
    "wgmma: a descriptor begins at byte 128, in row 1 of a pattern of 8; expected a multiple of 1024",
    "wgmma: a descriptor has blocks of columns 1024 bytes apart, where there is one; expected 0 or 16",
    "",  // 0
    "",  // a step of 96 bytes along K
};

static void do_misuse(int which)
{
    cuda_cpu::set_seed(which >= 26);
    Numbers data(64 * 64, 1);
    launch(1, 128, 16384 + 64, misuse, which, data.data, map_of(data.data, 64, 64));
}

static void test_misuses()
{
    for (size_t i = 0; i < misuses.size(); i++) {
        const auto [said, code] = run_child("misuse" + std::to_string(i));
        const std::string line = misuses[i].substr(0, misuses[i].find('\n'));
        if (line.empty())
            claim("nothing is said when nothing is wrong", code == 0 && said.empty());
        else
            claim("it is said: " + line, code == 1 && contains(said, misuses[i]));
    }
}

static void test_tensor_cores()
{
    double worst = 0;
    for (float x = -126; x < 128; x += 0.00107f) {
        const double exact = std::exp2(static_cast<double>(x));
        worst = std::max(worst, std::fabs(exp2_approx(x) - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
    }
    const float infinity = std::numeric_limits<float>::infinity();
    claim("exp2_approx is within 2 units in the last place, 0 below the normal range, right at infinity and NaN",
          worst < 2 && exp2_approx(-126.5f) == 0 && exp2_approx(-infinity) == 0 && exp2_approx(128) == infinity &&
              exp2_approx(infinity) == infinity && std::isnan(exp2_approx(NAN)) && exp2_approx(-3) == 0.125f);
    test_tensor_maps();
    if (WARP_SIZE == 1) {
        const auto [said, code] = run_child("misuse22");
        claim("with a warp of 1 thread, tensor cores say that they need 32",
              code == 1 && contains(said, "take warps of 32 threads"));
        return;
    }
    test_warp_instructions();
    test_barriers();
    test_products_of_warpgroups();
    test_misuses();
}

// What is offered follows CUDA_CPU_MATMULS, so this program runs again to see it: prints each algorithm's
// number, with a minus where its state is an error.
static int print_offers(uint32_t reduction_schemes)
{
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t square{CUDA_R_32F, 8, 8, 8};
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction_schemes, sizeof(reduction_schemes));
    cublasLtMatmulHeuristicResult_t results[4];
    int found = 0;
    cublasLtMatmulAlgoGetHeuristic(nullptr, &desc, &square, &square, &square, &square, preference, 4, results, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    for (int i = 0; i < found; i++) {
        cublasLtMatmulHeuristicResult_t checked = results[i];
        const bool usable = cublasLtMatmulAlgoCheck(nullptr, &desc, &square, &square, &square, &square, &checked.algo, &checked) == CUBLAS_STATUS_SUCCESS;
        printf("%s%d ", (results[i].state == CUBLAS_STATUS_SUCCESS) == usable ? usable ? "" : "-" : "?", static_cast<int>(results[i].algo.data[0]));
    }
    return 0;
}

static void test_algorithms()
{
    const auto offered = [](const char* names, const char* deed) {
        setenv("CUDA_CPU_MATMULS", names, 1);
        const auto said = run_child(deed);
        unsetenv("CUDA_CPU_MATMULS");
        return said;
    };
    claim("one algorithm is offered unless others are asked for", run_child("offers").first == "0 ");
    claim("those asked for come in their order, as many as fit", offered("slow,refused,in_place,fast,plain", "offers").first == "2 -4 3 0 ");
    claim("sums in place are not offered where the preference forbids them", offered("slow,refused,in_place,fast,plain", "offers_without_in_place").first == "2 -4 0 1 ");
    const auto [said, code] = offered("fastest", "offers");
    claim("an algorithm that is unknown is named", code == 2 && contains(said, "\"fastest\""));
    cublasLtMatmulAlgo_t unknown{};
    unknown.data[3] = 1;
    claim("an algorithm that nobody offered is not usable", !cuda_cpu::usable(unknown) && cuda_cpu::usable({}));
}

// ==== cards =============================================================================================

// Whether something holds on a card. What is left in its queues is done there.
template <class Check> static bool on(const char* card, Check check)
{
    cuda_cpu::set_card(card);
    const bool holds = check();
    cuda_cpu::set_card("");
    cudaGetLastError();
    return holds;
}

// ... under each of some seeds; and whether it fails under one.
constexpr uint64_t card_seeds = 40;
template <class Check> static bool on_under_every_seed(const char* card, Check check)
{
    bool holds = true;
    for (uint64_t seed = 1; seed <= card_seeds; seed++) {
        cuda_cpu::set_seed(seed);
        holds = on(card, check) && holds;
    }
    cuda_cpu::set_seed(0);
    return holds;
}
template <class Check> static bool fails_under_some_seed(const char* card, Check check)
{
    int failures = 0;
    for (uint64_t seed = 1; seed <= card_seeds; seed++) {
        cuda_cpu::set_seed(seed);
        failures += !on(card, check);
    }
    cuda_cpu::set_seed(0);
    return failures > 0;
}

static std::pair<std::string, int> run_child_on(const char* card, const std::string& deed)
{
    setenv("CUDA_CPU_CARD", card, 1);
    const auto said = run_child(deed);
    unsetenv("CUDA_CPU_CARD");
    return said;
}

static void test_card_properties()
{
    struct Expected {
        const char *key, *name;
        int capability, multiprocessors;
        size_t kib_by_opt_in, kib_of_multiprocessor;
    };
    const Expected table[] = {
        {"h100", "NVIDIA H100 80GB HBM3", 90, 132, 227, 228}, {"h200", "NVIDIA H200", 90, 132, 227, 228},
        {"a100", "NVIDIA A100-SXM4-80GB", 80, 108, 163, 164}, {"4090", "NVIDIA GeForce RTX 4090", 89, 128, 99, 100},
        {"l40s", "NVIDIA L40S", 89, 142, 99, 100},            {"t4", "Tesla T4", 75, 40, 64, 64},
        {"b200", "NVIDIA B200", 100, 148, 227, 228}};
    bool right = true;
    for (const Expected& e : table)
        right = on(e.key, [&] {
            cudaDeviceProp p;
            int major = 0, registers = 0, kept = 0;
            cudaGetDeviceProperties(&p, 0);
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
            cudaDeviceGetAttribute(&registers, cudaDevAttrMaxRegistersPerBlock, 0);
            cudaDeviceGetAttribute(&kept, cudaDevAttrReservedSharedMemoryPerBlock, 0);
            return p.name == std::string(e.name) && p.major * 10 + p.minor == e.capability && major == p.major &&
                   p.multiProcessorCount == e.multiprocessors && p.sharedMemPerBlockOptin == e.kib_by_opt_in << 10 &&
                   p.sharedMemPerMultiprocessor == e.kib_of_multiprocessor << 10 && p.sharedMemPerBlock == 48 << 10 &&
                   static_cast<size_t>(kept) == p.sharedMemPerMultiprocessor - p.sharedMemPerBlockOptin &&
                   registers == 65536 && p.warpSize == 32;
        }) && right;
    claim("each card has its name, compute capability, multiprocessors and shared memory", right);
    const auto [said, code] = run_child_on("h900", "nothing");
    claim("a card that is unknown is named, with those that are known",
          code == 2 &&
              contains(said, "CUDA_CPU_CARD is \"h900\"; expected one of h100, h200, a100, 4090, l40s, t4, b200"));
}

// ---- what a launch may ask for

__global__ void __launch_bounds__(96) bounded() {}
template <int N> __global__ void __launch_bounds__(2 * N, 1) bounded_by() {}
__global__ void holds_4_kib(float* out)
{
    __shared__ float own[1024];
    own[threadIdx.x] = out[0];
    __syncthreads();
    out[0] = own[(threadIdx.x + 1) % blockDim.x];
}
__global__ void read_unwritten_static(float* out)
{
    __shared__ float own[64];
    out[0] = own[63];
    own[63] = 1;
}

static void test_launch_bounds()
{
    if (!cuda_cpu::has_launch_bounds) return;
    const bool right = launch(1, 96, 0, bounded) == cudaSuccess && launch(1, 97, 0, bounded) == cudaErrorInvalidValue &&
                       launch(1, 128, 0, bounded_by<64>) == cudaSuccess &&
                       launch(1, 129, 0, bounded_by<64>) == cudaErrorInvalidValue &&
                       launch(1, {32, 4}, 0, bounded_by<64>) == cudaSuccess &&
                       launch(1, {43, 3}, 0, bounded_by<64>) == cudaErrorInvalidValue &&
                       launch(1, 1024, 0, bounded_by<512>) == cudaSuccess && launch(1, 1024, 0, nothing) == cudaSuccess;
    claim("__launch_bounds__ bounds a block's threads; without it there may be 1024", right);
    cudaGetLastError();
}

static void test_static_shared()
{
    Array<float> out(1);
    for (int run = 0; run < 2; run++) launch(1, 1, 0, read_unwritten_static, out.data);
    bool right = out[0] == 1;
    cuda_cpu::set_seed(1);
    for (int run = 0; run < 2; run++)
        right = right && launch(1, 1, 0, read_unwritten_static, out.data) == cudaSuccess && std::isnan(out[0]);
    cuda_cpu::set_seed(0);
    claim("under a seed a kernel's __shared__ arrays are not numbers when a block begins", right);
}

static void test_static_shared_on_cards()
{
    constexpr auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
    claim("on a card they count", on("h100", [] {
              Array<float> out(1);
              const auto with = [&](size_t bytes) { return launch(1, 1, bytes, holds_4_kib, out.data); };
              return with(44 << 10) == cudaSuccess && with((44 << 10) + 1) == cudaErrorInvalidValue &&
                     cudaFuncSetAttribute(holds_4_kib, dynamic, (223 << 10) + 1) == cudaErrorInvalidValue &&
                     cudaFuncSetAttribute(holds_4_kib, dynamic, 223 << 10) == cudaSuccess &&
                     with(223 << 10) == cudaSuccess;
          }));
}

static void test_card_launches()
{
    constexpr auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
    bool right = true;
    for (const auto& [key, kib] :
         {std::pair{"h100", 227}, {"a100", 163}, {"4090", 99}, {"l40s", 99}, {"t4", 64}, {"b200", 227}})
        right = on(key, [&, most = kib << 10] {
            Array<int> flag(1);
            cudaFuncSetAttribute(fill_shared, dynamic, 0);
            return launch(1, 1, 48 << 10, fill_shared, 0, flag.data) == cudaSuccess &&
                   launch(1, 1, (48 << 10) + 1, fill_shared, 0, flag.data) == cudaErrorInvalidValue &&
                   cudaFuncSetAttribute(fill_shared, dynamic, most + 1) == cudaErrorInvalidValue &&
                   cudaFuncSetAttribute(fill_shared, dynamic, most) == cudaSuccess &&
                   launch(1, 1, static_cast<size_t>(most), fill_shared, static_cast<size_t>(most), flag.data) ==
                       cudaSuccess &&
                   launch(1, 1, static_cast<size_t>(most) + 1, fill_shared, 0, flag.data) == cudaErrorInvalidValue &&
                   cudaDeviceSynchronize() == cudaSuccess && flag[0] == 1;
        }) && right;
    claim("48 KiB of shared memory without asking, the card's own limit by opt-in, not a byte more", right);

    const auto with_attribute = [](const char* key, cudaLaunchAttribute attribute) {
        cudaError_t error = cudaSuccess;
        on(key, [&] {
            cudaLaunchConfig_t config{};
            config.attrs = &attribute;
            config.numAttrs = 1;
            error = cudaLaunchKernelEx(&config, nothing);
            return true;
        });
        return error;
    };
    cudaLaunchAttribute cluster{}, early{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {1, 1, 1};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    right = with_attribute("h100", cluster) == cudaSuccess && with_attribute("h100", early) == cudaSuccess &&
            with_attribute("a100", early) == cudaErrorNotSupported;
    cluster.val.clusterDim = {2, 1, 1};
    claim("clusters are refused, and programmatic launches before capability 9.0",
          right && with_attribute("a100", cluster) == cudaErrorNotSupported &&
              with_attribute("h100", cluster) == cudaErrorNotSupported);
}

// ---- memory

static void test_card_memory()
{
    constexpr size_t mib = 1 << 20;
    claim("a card has its own memory, less a context's; more than is free is refused", on("h100", [] {
        size_t before = 0, after = 0, total = 0;
        void *most = nullptr, *more = nullptr;
        cudaMemGetInfo(&before, &total);
        bool right = total / mib > 79 * 1024 && total / mib < 80 * 1024 && total - before > 100 * mib &&
                     total - before < 2048 * mib;
        right = right && cudaMalloc(&more, before + 1) == cudaErrorMemoryAllocation && more == nullptr;
        right = right && cudaMalloc(&most, before / (2 * mib) * (2 * mib)) == cudaSuccess &&
                cudaMalloc(&more, 2 * mib) == cudaErrorMemoryAllocation;
        if (right) static_cast<char*>(most)[before / (2 * mib) * (2 * mib) - 1] = 1;  // the last byte is there
        right = right && cudaFree(most) == cudaSuccess;
        cudaMemGetInfo(&after, &total);
        return right && after == before;
    }));
    claim("it comes in pieces of 2 MiB, which small blocks share", on("4090", [] {
        size_t before = 0, after = 0, total = 0;
        void* blocks[3];
        cudaMemGetInfo(&before, &total);
        for (size_t i = 0; i < 3; i++) cudaMalloc(&blocks[i], i < 2 ? 1000 : 2 * mib + 1);
        cudaMemGetInfo(&after, &total);
        for (void* block : blocks) cudaFree(block);
        return before - after == 2 * mib + 4 * mib;
    }));
    claim("fresh memory is full of NaNs on a card", on("h100", [] {
        float* block = nullptr;
        cudaMalloc(&block, 3000000);
        const bool right = std::isnan(block[0]) && std::isnan(block[749999]);
        cudaFree(block);
        return right;
    }));
    claim("a card knows its own memory from the host's, and where a block ends", on("h100", [] {
        float host[4] = {}, *block = nullptr;
        cudaMalloc(&block, 16);
        const auto copy = [&](void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
            return cudaMemcpy(to, from, bytes, kind);
        };
        const bool right = copy(block, host, 16, cudaMemcpyHostToDevice) == cudaSuccess &&
                           copy(host, block, 16, cudaMemcpyDefault) == cudaSuccess &&
                           copy(block, host, 16, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue &&
                           copy(host, block, 16, cudaMemcpyHostToDevice) == cudaErrorInvalidValue &&
                           copy(block, host, 16, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue &&
                           copy(block, host, 17, cudaMemcpyHostToDevice) == cudaErrorInvalidValue &&
                           copy(block + 1, host, 12, cudaMemcpyHostToDevice) == cudaSuccess &&
                           copy(block + 1, host, 13, cudaMemcpyHostToDevice) == cudaErrorInvalidValue &&
                           copy(block, host, 16, static_cast<cudaMemcpyKind>(5)) == cudaErrorInvalidMemcpyDirection &&
                           cudaMemset(block, 0, 16) == cudaSuccess &&
                           cudaMemset(block, 0, 17) == cudaErrorInvalidValue &&
                           cudaMemset(host, 0, 16) == cudaErrorInvalidValue;
        cudaFree(block);
        return right;
    }));
}

// ---- streams

__global__ void set_to(float* x, float value) { *x = value; }
__global__ void add_to(float* sum, const float* x) { *sum += *x; }

// Two streams that no default stream holds together, memory on both sides, and an event.
struct TwoStreams {
    cudaStream_t compute, copies;
    cudaEvent_t event;
    float *x, *sum, *pinned;

    explicit TwoStreams(unsigned flags = cudaStreamNonBlocking)
    {
        cudaStreamCreateWithFlags(&compute, flags);
        cudaStreamCreateWithFlags(&copies, flags);
        cudaEventCreate(&event);
        cudaMalloc(&x, sizeof(float));
        cudaMalloc(&sum, sizeof(float));
        cudaMallocHost(&pinned, sizeof(float));
        cudaMemset(x, 0, sizeof(float));
        cudaMemset(sum, 0, sizeof(float));
        *pinned = 7;
        cudaDeviceSynchronize();
    }
    ~TwoStreams()
    {
        cudaDeviceSynchronize();
        cudaFree(x);
        cudaFree(sum);
        cudaFreeHost(pinned);
        cudaEventDestroy(event);
        cudaStreamDestroy(compute);
        cudaStreamDestroy(copies);
    }
    template <class... Parameters, class... Arguments>
    void launch_on(cudaStream_t stream, void (*kernel)(Parameters...), Arguments... arguments) const
    {
        cudaLaunchConfig_t config{};
        config.stream = stream;
        cudaLaunchKernelEx(&config, kernel, arguments...);
    }
    void upload() const { cudaMemcpyAsync(x, pinned, sizeof(float), cudaMemcpyHostToDevice, copies); }
    float result() const
    {
        float value = 0;
        cudaMemcpyAsync(&value, sum, sizeof(value), cudaMemcpyDeviceToHost, compute);
        cudaStreamSynchronize(compute);
        return value;
    }
};

enum class Order { NO_EVENT, EVENT };

static bool copy_then_kernel(Order order)
{
    TwoStreams s;
    s.upload();
    cudaEventRecord(s.event, s.copies);
    if (order == Order::EVENT) cudaStreamWaitEvent(s.compute, s.event);
    s.launch_on(s.compute, add_to, s.sum, s.x);
    return s.result() == 7;
}

// The other way round: x may change only when the kernel has read it.
static bool kernel_then_copy(Order order)
{
    TwoStreams s;
    s.launch_on(s.compute, set_to, s.x, 3.0f);
    cudaStreamSynchronize(s.compute);
    s.launch_on(s.compute, add_to, s.sum, s.x);
    cudaEventRecord(s.event, s.compute);
    if (order == Order::EVENT) cudaStreamWaitEvent(s.copies, s.event);
    s.upload();
    cudaStreamSynchronize(s.copies);
    return s.result() == 3;
}

// A stream waits for what an event had recorded when it was told to, not for what it records later.
static bool event_is_recorded_again()
{
    TwoStreams s;
    s.upload();
    cudaEventRecord(s.event, s.copies);
    cudaStreamWaitEvent(s.compute, s.event);
    cudaEventRecord(s.event, s.compute);
    s.launch_on(s.compute, add_to, s.sum, s.x);
    return cudaEventSynchronize(s.event) == cudaSuccess && s.result() == 7;
}

static bool pinned_memory_is_used_again(Order order)
{
    TwoStreams s;
    s.upload();
    cudaEventRecord(s.event, s.copies);
    if (order == Order::EVENT) cudaEventSynchronize(s.event);
    *s.pinned = 8;
    cudaStreamSynchronize(s.copies);
    s.launch_on(s.compute, add_to, s.sum, s.x);
    return s.result() == 7;
}

static bool pageable_memory_is_used_again()
{
    TwoStreams s;
    float pageable = 7;
    cudaMemcpyAsync(s.x, &pageable, sizeof(float), cudaMemcpyHostToDevice, s.compute);
    pageable = 8;
    s.launch_on(s.compute, add_to, s.sum, s.x);
    cudaMemcpyAsync(&pageable, s.sum, sizeof(float), cudaMemcpyDeviceToHost, s.compute);
    return pageable == 7;
}

// cudaMemcpy has read it when it returns.
static bool pinned_memory_is_copied()
{
    TwoStreams s;
    cudaMemcpy(s.x, s.pinned, sizeof(float), cudaMemcpyHostToDevice);
    *s.pinned = 8;
    s.launch_on(s.compute, add_to, s.sum, s.x);
    return s.result() == 7;
}

static bool pinned_memory_is_read_early(Order order)
{
    TwoStreams s;
    s.launch_on(s.compute, set_to, s.sum, 3.0f);
    cudaMemcpyAsync(s.pinned, s.sum, sizeof(float), cudaMemcpyDeviceToHost, s.compute);
    if (order == Order::EVENT) cudaStreamSynchronize(s.compute);
    return *s.pinned == 3;
}

// The stream of nobody waits for blocking streams, and they for it.
static bool default_stream_orders(unsigned flags)
{
    TwoStreams s(flags);
    s.upload();
    s.launch_on(nullptr, add_to, s.sum, s.x);
    s.launch_on(s.compute, add_to, s.sum, s.sum);
    return s.result() == 14;
}

static bool arguments_are_those_of_the_launch()
{
    TwoStreams s;
    float value = 3;
    s.launch_on(s.compute, set_to, s.sum, value);
    value = 4;
    return s.result() == 3;
}

static bool graph_waits_and_is_waited_for(Order order)
{
    TwoStreams s;
    cudaError_t error = cudaSuccess;
    cudaGraphExec_t graph = captured(s.compute, error, [&] {
        s.launch_on(s.compute, add_to, s.sum, s.x);
        s.launch_on(s.compute, add_to, s.sum, s.sum);
    });
    s.upload();
    cudaEventRecord(s.event, s.copies);
    if (order == Order::EVENT) cudaStreamWaitEvent(s.compute, s.event);
    for (int run = 0; run < 2; run++) cudaGraphLaunch(graph, s.compute);
    cudaGraphExecDestroy(graph);
    return error == cudaSuccess && s.result() == 2 * (2 * 7 + 7);
}

static bool product_waits(Order order)
{
    TwoStreams s;
    cublasLtHandle_t handle;
    cublasLtCreate(&handle);
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t one{CUDA_R_32F, 1, 1, 1};
    float alpha = 1, beta = 0;
    s.upload();
    cudaEventRecord(s.event, s.copies);
    if (order == Order::EVENT) cudaStreamWaitEvent(s.compute, s.event);
    cublasLtMatmul(handle, &desc, &alpha, s.x, &one, s.x, &one, &beta, s.sum, &one, s.sum, &one, nullptr, nullptr, 0,
                   s.compute);
    alpha = 2;
    cublasLtDestroy(handle);
    return s.result() == 49;
}

// How often a question for an event is answered by "not yet"; in the end it is not.
static int times_not_ready()
{
    TwoStreams s;
    cudaEvent_t begin;
    cudaEventCreate(&begin);
    cudaEventRecord(begin, s.compute);
    for (int i = 0; i < 20; i++) s.launch_on(s.compute, add_to, s.sum, s.x);
    cudaEventRecord(s.event, s.compute);
    int times = 0;
    float milliseconds = -1;
    while (cudaEventQuery(s.event) == cudaErrorNotReady && times < 100000) times++;
    const bool right = cudaGetLastError() == cudaSuccess &&
                       cudaEventElapsedTime(&milliseconds, begin, s.event) == cudaSuccess && milliseconds >= 0;
    cudaEventDestroy(begin);
    return right ? times : -1;
}

static bool elapsed_time_is_not_known_yet()
{
    TwoStreams s;
    float milliseconds = -1;
    cudaEvent_t end;
    cudaEventCreate(&end);
    cudaEventRecord(s.event, s.compute);
    cudaEventRecord(end, s.compute);
    const cudaError_t early = cudaEventElapsedTime(&milliseconds, s.event, end);
    cudaEventSynchronize(end);
    const bool later = cudaEventElapsedTime(&milliseconds, s.event, end) == cudaSuccess;
    cudaEventDestroy(end);
    return later && early == cudaErrorNotReady;
}

static bool freeing_waits()
{
    TwoStreams s;
    float *device = nullptr, *host = nullptr;
    cudaMalloc(&device, sizeof(float));
    cudaMallocHost(&host, sizeof(float));
    s.launch_on(s.compute, set_to, s.sum, 3.0f);
    cudaFree(device);
    const bool right = *s.sum == 3;
    s.launch_on(s.compute, set_to, s.sum, 4.0f);
    cudaFreeHost(host);
    return right && *s.sum == 4;
}

static bool queue_is_bounded()
{
    TwoStreams s;
    for (int i = 0; i < 6000; i++) s.launch_on(s.compute, add_to, s.sum, s.x);
    return s.compute->queue.size() <= 1024;
}

// An error of work that was put off, which only tests can have.
static bool late_errors_are_told()
{
    TwoStreams s;
    bool right = cuda_cpu::hand_over(s.compute, [] { return cudaErrorUnknown; }) == cudaSuccess;
    for (int call = 0; call < 2; call++) right = right && cudaStreamSynchronize(s.compute) == cudaErrorUnknown;
    cuda_cpu::late_error() = cudaSuccess;
    return right;
}

static void test_card_streams()
{
    const auto right_with_event_only = [](auto check) {
        return on_under_every_seed("h100", [&] { return check(Order::EVENT); }) &&
               fails_under_some_seed("h100", [&] { return check(Order::NO_EVENT); });
    };
    claim("a kernel that does not wait for a copy in another stream shows", right_with_event_only(copy_then_kernel));
    claim("a copy that does not wait for a kernel in another stream shows", right_with_event_only(kernel_then_copy));
    claim("without a card both are right, event or not",
          copy_then_kernel(Order::NO_EVENT) && kernel_then_copy(Order::NO_EVENT));
    claim("a stream waits for what an event had recorded by then",
          on_under_every_seed("h100", event_is_recorded_again));
    claim("pinned memory that is used again too early shows", right_with_event_only(pinned_memory_is_used_again));
    claim("cudaMemcpy is done with pinned memory when it returns",
          on_under_every_seed("h100", pinned_memory_is_copied));
    claim("pinned memory that is read too early shows", right_with_event_only(pinned_memory_is_read_early));
    claim("pageable memory may be used again when the call returns",
          on_under_every_seed("h100", pageable_memory_is_used_again));
    claim("the default stream orders blocking streams, but not the others",
          on_under_every_seed("h100", [] { return default_stream_orders(cudaStreamDefault); }) &&
              fails_under_some_seed("h100", [] { return default_stream_orders(cudaStreamNonBlocking); }));
    claim("cudaFree and cudaFreeHost wait for what is under way", on_under_every_seed("h100", freeing_waits));
    claim("a queue holds 1024 pieces of work, then a launch waits", on_under_every_seed("h100", queue_is_bounded));
    claim("what goes wrong later is told by calls that wait, from then on", on("h100", late_errors_are_told));
    claim("arguments are those of the launch", on_under_every_seed("h100", arguments_are_those_of_the_launch));
    claim("a graph takes its place in the stream", right_with_event_only(graph_waits_and_is_waited_for));
    claim("so does a product of cuBLASLt, with alpha as it was", right_with_event_only(product_waits));
    const auto becomes_ready = [] { const int times = times_not_ready(); return times >= 0 && times < 100000; };
    claim("an event that is asked for is not ready, and then it is",
          on_under_every_seed("h100", becomes_ready) &&
              fails_under_some_seed("h100", [] { return times_not_ready() == 0; }) && times_not_ready() == 0);
    claim("nor is a time known that is not over",
          fails_under_some_seed("h100", [] { return !elapsed_time_is_not_known_yet(); }));
    cudaEvent_t untimed;
    cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming);
    cudaEventRecord(untimed);
    float milliseconds = 0;
    claim("an event without timing has none",
          cudaEventElapsedTime(&milliseconds, untimed, untimed) == cudaErrorInvalidResourceHandle);
    cudaEventDestroy(untimed);
    cudaGetLastError();
}

// ---- capture

// What a call returns while a stream is captured, and what the capture's end says then.
template <class Call>
static std::pair<cudaError_t, cudaError_t> in_capture_on(const char* card, cudaStreamCaptureMode mode, unsigned flags,
                                                         Call call)
{
    cudaError_t said = cudaSuccess, end = cudaSuccess;
    on(card, [&] {
        TwoStreams s(flags);
        cudaGraph_t graph = nullptr;
        cudaStreamBeginCapture(s.compute, mode);
        said = call(s);
        end = cudaStreamEndCapture(s.compute, &graph);
        cudaGraphDestroy(graph);
        return true;
    });
    return {said, end};
}

static void test_card_captures()
{
    using Call = std::function<cudaError_t(TwoStreams&)>;
    const std::pair<const char*, Call> unsafe[] = {
        {"cudaMalloc",
         [](TwoStreams&) {
             void* block = nullptr;
             const cudaError_t error = cudaMalloc(&block, 16);
             cudaFree(block);
             return error;
         }},
        {"cudaMemcpy", [](TwoStreams& s) { return cudaMemcpy(s.x, s.pinned, 4, cudaMemcpyHostToDevice); }},
        {"cudaStreamSynchronize of another", [](TwoStreams& s) { return cudaStreamSynchronize(s.copies); }},
        {"cudaEventSynchronize", [](TwoStreams& s) { return cudaEventSynchronize(s.event); }},
        {"cudaEventQuery", [](TwoStreams& s) { return cudaEventQuery(s.event); }}};
    const std::pair<const char*, Call> never[] = {
        {"cudaDeviceSynchronize", [](TwoStreams&) { return cudaDeviceSynchronize(); }},
        {"cudaStreamSynchronize", [](TwoStreams& s) { return cudaStreamSynchronize(s.compute); }},
        {"cudaStreamQuery", [](TwoStreams& s) { return cudaStreamQuery(s.compute); }}};
    const std::pair refused{cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated},
        fine{cudaSuccess, cudaSuccess};
    std::string wrong;
    for (const auto& [name, call] : unsafe)
        for (const auto mode :
             {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed})
            if (in_capture_on("h100", mode, cudaStreamNonBlocking, call) !=
                (mode == cudaStreamCaptureModeRelaxed ? fine : refused))
                wrong += std::string(" ") + name;
    claim("calls that allocate or might wait are refused in a capture unless it is relaxed:" + wrong, wrong.empty());
    wrong.clear();
    for (const auto& [name, call] : never)
        for (const auto mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed})
            if (in_capture_on("h100", mode, cudaStreamNonBlocking, call) != refused) wrong += std::string(" ") + name;
    claim("those that would wait for the capture are refused in any:" + wrong, wrong.empty());
    const std::pair implicit{cudaErrorStreamCaptureImplicit, cudaErrorStreamCaptureInvalidated};
    const auto launch_by_default = [](TwoStreams& s) {
        s.launch_on(nullptr, set_to, s.x, 1.0f);
        return cudaGetLastError();
    };
    const auto copy_by_default = [](TwoStreams& s) { return cudaMemcpy(s.x, s.pinned, 4, cudaMemcpyHostToDevice); };
    claim("the default stream cannot be used while a blocking stream is captured",
          in_capture_on("h100", cudaStreamCaptureModeRelaxed, cudaStreamDefault, launch_by_default) == implicit &&
              in_capture_on("h100", cudaStreamCaptureModeRelaxed, cudaStreamDefault, copy_by_default) == implicit &&
              in_capture_on("h100", cudaStreamCaptureModeRelaxed, cudaStreamNonBlocking, launch_by_default) == fine);
    cudaGetLastError();
}

// ---- cuBLASLt

struct CardProduct {
    cudaDataType_t type = CUDA_R_16BF, out = CUDA_R_16BF;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int32_t bias_type = -1, aux_type = -1;
    int64_t aux_ld = 16;
    size_t aux_offset = 0, a_offset = 0, d_offset = 0;
    uint32_t promised = 16;

    // What the heuristic says, or else the product.
    cublasStatus_t status() const
    {
        Array<char> memory(4 * 1024);
        char* const place = memory.data;
        cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
        desc.epilogue = epilogue;
        desc.bias = place;
        desc.bias_type = bias_type;
        desc.aux = place + 1024 + aux_offset;
        desc.aux_ld = aux_ld;
        desc.aux_type = aux_type;
        cublasLtMatrixLayoutOpaque_t a{static_cast<uint32_t>(type), 8, 8, 8}, d{static_cast<uint32_t>(out), 8, 8, 8};
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulPreferenceCreate(&preference);
        for (const auto operand :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            cublasLtMatmulPreferenceSetAttribute(preference, operand, &promised, sizeof(promised));
        cublasLtMatmulHeuristicResult_t result;
        int found = 0;
        cublasStatus_t answer =
            cublasLtMatmulAlgoGetHeuristic(nullptr, &desc, &a, &a, &d, &d, preference, 1, &result, &found);
        cublasLtMatmulPreferenceDestroy(preference);
        if (found == 0) return answer;
        cublasLtHandle_t handle;
        cublasLtCreate(&handle);
        const float alpha = 1, beta = 0;
        answer = cublasLtMatmul(handle, &desc, &alpha, place + a_offset, &a, place, &a, &beta, place + 2048 + d_offset,
                                &d, place + 2048 + d_offset, &d, &result.algo, nullptr, 0, nullptr);
        cublasLtDestroy(handle);
        return answer;
    }
};

static void test_card_products()
{
    const auto status = [](auto change) {
        CardProduct product;
        change(product);
        cublasStatus_t answer = CUBLAS_STATUS_SUCCESS;
        on("h100", [&] { answer = product.status(); return true; });
        return answer;
    };
    const auto with_epilogue = [&](uint32_t epilogue, auto change) {
        return status([&](CardProduct& p) {
            p.epilogue = epilogue;
            change(p);
        });
    };
    constexpr auto none = CUBLAS_STATUS_NOT_SUPPORTED, fine = CUBLAS_STATUS_SUCCESS;
    constexpr auto bias = CUBLASLT_EPILOGUE_BIAS, dgelu = CUBLASLT_EPILOGUE_DGELU;
    const auto has_fp8 = [](const char* card) {
        return on(card, [] { return fp8_refused(CUBLAS_STATUS_SUCCESS, [](auto&) {}); });
    };
    const auto has_none = [](const char* card) {
        return on(card, [] { return fp8_refused(CUBLAS_STATUS_NOT_SUPPORTED, [](auto&) {}); });
    };
    claim("FP8 is multiplied from capability 8.9 on",
          has_fp8("4090") && has_fp8("h100") && has_fp8("b200") && has_none("a100") && has_none("t4"));
    claim("a bias has the output's type",
          with_epilogue(bias, [](CardProduct&) {}) == fine &&
              with_epilogue(bias, [](CardProduct& p) { p.bias_type = CUDA_R_16BF; }) == fine &&
              with_epilogue(bias, [](CardProduct& p) { p.bias_type = CUDA_R_32F; }) == none &&
              with_epilogue(bias,
                            [](CardProduct& p) {
                                p.out = CUDA_R_32F;
                                p.bias_type = CUDA_R_32F;
                            }) == fine &&
              with_epilogue(bias, [](CardProduct& p) {
                  p.out = CUDA_R_32F;
                  p.bias_type = CUDA_R_16BF;
              }) == none);
    claim("the second matrix of an epilogue has the output's type, rows of 8, and begins at a multiple of 16",
          with_epilogue(dgelu, [](CardProduct&) {}) == fine &&
              with_epilogue(dgelu, [](CardProduct& p) { p.aux_type = CUDA_R_32F; }) == none &&
              with_epilogue(dgelu, [](CardProduct& p) { p.aux_ld = 12; }) == none &&
              with_epilogue(dgelu, [](CardProduct& p) { p.aux_ld = 0; }) == CUBLAS_STATUS_INVALID_VALUE &&
              with_epilogue(dgelu, [](CardProduct& p) { p.aux_offset = 8; }) == none &&
              with_epilogue(dgelu, [](CardProduct& p) { p.aux_offset = 16; }) == fine);
    claim("operands are aligned as the preference promised",
          status([](CardProduct& p) { p.a_offset = 16; }) == fine &&
              status([](CardProduct& p) { p.a_offset = 8; }) == CUBLAS_STATUS_INVALID_VALUE &&
              status([](CardProduct& p) { p.d_offset = 2; }) == CUBLAS_STATUS_INVALID_VALUE &&
              status([](CardProduct& p) {
                  p.a_offset = 8;
                  p.promised = 8;
              }) == fine &&
              status([](CardProduct& p) {
                  p.a_offset = 4;
                  p.promised = 8;
              }) == CUBLAS_STATUS_INVALID_VALUE &&
              status([](CardProduct& p) {
                  p.a_offset = 8;
                  p.promised = 256;
              }) == CUBLAS_STATUS_INVALID_VALUE);
}

// ---- instructions

__global__ void one_instruction(int which, const __nv_bfloat16* data, const __grid_constant__ CUtensorMap map)
{
    char* tile = shared_bytes();
    uint64_t* barrier = reinterpret_cast<uint64_t*>(tile + 16384);
    uint32_t r[4] = {};
    float d[32] = {};
    if (which == 0) ldmatrix(r, tile + threadIdx.x % 32 * 16);
    if (which == 1) mma_m16n8k16(d, r, 0, 0);
    if (which == 2) {
        copy_async(tile, data, true);
        copy_async_commit();
        copy_async_wait<0>();
    }
    if (which == 3 && threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
        barrier_arrive(barrier);
        barrier_wait(barrier, 0);
    }
    if (which == 4 && threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_done();
        barrier_arrive_expect(barrier, 8192);
        tensor_load(tile, &map, barrier, 0, 0, 0, 0);
        barrier_wait(barrier, 0);
    }
    if (which == 5) async_fence();
    if (which == 9) mma_m16n8k32_e4m3(d, r, 0, 0);
    if (which == 6) {
        wgmma_fence(d);
        wgmma<64, Major::K>(d, wgmma_operand(tile), wgmma_operand(tile), 0);
        wgmma_commit();
        wgmma_wait<0>(d);
    }
    if (which == 7) keep_registers<24>();
    if (which == 8 && threadIdx.x < 64) named_barrier_wait(1, 64);
}

static int run_instruction(int which)
{
    Numbers data(64 * 64, 1);
    cudaDeviceSynchronize();
    const CUtensorMap map = cuda_cpu::card() == nullptr || cuda_cpu::card()->capability.major >= 9
                                ? map_of(data.data, 64, 64)
                                : CUtensorMap{};
    launch(1, 128, 16384 + 64, one_instruction, which, data.data, map);
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 3;
}

static void test_card_instructions()
{
    struct Instruction { const char* name; int least, most; };
    const Instruction table[] = {
        {"ldmatrix", 75, 999},     {"mma_m16n8k16", 80, 999},  {"copy_async", 80, 999},
        {"barrier_init", 90, 999}, {"barrier_init", 90, 999},  {"async_fence", 90, 999},
        {"wgmma_fence", 90, 90},   {"keep_registers", 90, 90}, {"named_barrier_wait", 75, 999},
        {"mma_m16n8k32_e4m3", 89, 999}};
    for (const auto& [card, capability] :
         {std::pair{"t4", 75}, {"a100", 80}, {"4090", 89}, {"h100", 90}, {"b200", 100}}) {
        std::string wrong;
        for (size_t i = 0; i < std::size(table); i++) {
            const auto [said, code] = run_child_on(card, "instruction" + std::to_string(i));
            const bool has = capability >= table[i].least && capability <= table[i].most;
            const std::string illegal =
                std::string("calls ") + table[i].name + " and that is an illegal instruction on ";
            if (has ? code != 0 || !said.empty() : code != 1 || !contains(said, illegal))
                wrong += std::string(" ") + table[i].name;
        }
        claim(std::string("instructions of tensor cores are those of a ") + card + ":" + wrong, wrong.empty());
    }
    const auto encoded = [](const char* card) {
        CUresult result = CUDA_SUCCESS;
        on(card, [&] {
            Array<__nv_bfloat16> data(64 * 64);
            const uint64_t extents[] = {64, 64}, strides[] = {128};
            const uint32_t box[] = {64, 64}, steps[] = {1, 1};
            CUtensorMap map;
            result = cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data.data, extents, strides, box,
                                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                            CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
            return true;
        });
        return result;
    };
    claim("maps of tensors are made from capability 9.0 on", encoded("h100") == CUDA_SUCCESS &&
                                                                 encoded("b200") == CUDA_SUCCESS &&
                                                                 encoded("4090") == CUDA_ERROR_INVALID_VALUE);
}

static void test_cards()
{
    if (WARP_SIZE == 1) {
        const auto [said, code] = run_child_on("h100", "global");
        claim("with a warp of 1 thread there are no cards",
              code == 2 && contains(said, "takes a build with -DWARP_SIZE=32"));
        return;
    }
    test_card_properties();
    test_static_shared_on_cards();
    test_card_launches();
    test_card_memory();
    test_card_streams();
    test_card_captures();
    test_card_products();
    test_card_instructions();
}

// ==== what other programs ask for =======================================================================

// Every thread of a launch does the same to one number; what each saw before is put in order.
template <class T, class Deed>
__global__ void do_to_one(T* number, T* seen, Deed deed)
{
    const unsigned t = blockIdx.x * blockDim.x + threadIdx.x;
    seen[t] = deed(number, t);
}
template <class T, class Deed>
static std::pair<T, std::vector<T>> after_all(T first, Deed deed)
{
    Array<T> number(1), seen(256);
    number[0] = first;
    cuda_cpu::launch(do_to_one<T, Deed>, {4, 64})(number.data, seen.data, deed);
    std::vector<T> values = seen.values();
    std::sort(values.begin(), values.end());
    return {number[0], values};
}
template <class T>
static bool sums_of(T value)
{
    const auto [sum, seen] = after_all<T>(T(3), [=](T* n, unsigned) { return atomicAdd(n, value); });
    bool each_once = sum == T(3) + T(256) * value;
    for (size_t i = 0; i < seen.size(); i++) each_once = each_once && seen[i] == T(3) + static_cast<T>(i) * value;
    return each_once;
}

static void test_atomics()
{
    claim("each atomicAdd sees another sum: int, unsigned, unsigned long long, float, double, bfloat16",
          sums_of<int>(2) && sums_of<unsigned>(3) && sums_of<unsigned long long>(1ull << 40) && sums_of<float>(0.5f) &&
              sums_of<double>(0.125) && after_all<__nv_bfloat16>(0, [](auto* n, unsigned) { return atomicAdd(n, 1); }).first == 256.0f);
    const auto wrapped = after_all<unsigned>(0, [](unsigned* n, unsigned) { return atomicInc(n, 99); });
    const auto down = after_all<unsigned>(0, [](unsigned* n, unsigned) { return atomicDec(n, 99); });
    claim("atomicInc wraps above its bound, atomicDec below 0",
          wrapped.first == 56 && wrapped.second.back() == 99 && down.first == 44 && down.second.back() == 99);
    const auto least = after_all<int>(7, [](int* n, unsigned t) { return atomicMin(n, static_cast<int>(t) - 100); });
    const auto most = after_all<unsigned long long>(0, [](auto* n, unsigned t) { return atomicMax(n, t + (1ull << 33)); });
    claim("atomicMin and atomicMax, also of 64 bits", least.first == -100 && most.first == (1ull << 33) + 255);
    const auto swapped = after_all<int>(1000, [](int* n, unsigned t) { return atomicExch(n, static_cast<int>(t)); });
    bool all_but_one = swapped.second.back() == 1000;
    for (int i = 0; i < 255; i++) all_but_one = all_but_one && swapped.second[static_cast<size_t>(i)] == i + (i >= swapped.first);
    claim("atomicExch: what one brings another takes away, but for the last", all_but_one);
    const auto won = after_all<int>(-1, [](int* n, unsigned t) { return atomicCAS(n, -1, static_cast<int>(t)); });
    claim("atomicCAS: one of all wins", std::count(won.second.begin(), won.second.end(), -1) == 1 && won.second[1] == won.first);
    unsigned bits = 0xf0;
    claim("atomicAnd, atomicOr, atomicXor, atomicSub",
          atomicAnd(&bits, 0x3c) == 0xf0 && atomicOr(&bits, 0x01) == 0x30 && atomicXor(&bits, 0x11) == 0x31 &&
              atomicSub(&bits, 0x20) == 0x20 && bits == 0);
}

__global__ void use_groups(unsigned* out)
{
    namespace cg = cooperative_groups;
    constexpr unsigned size = warpSize < 8 ? 1 : 8;
    const auto block = cg::this_thread_block();
    const auto warp = cg::tiled_partition<warpSize>(block);
    const cg::thread_block_tile<size> tile = cg::tiled_partition<size>(warp);
    const cg::thread_group any_group = cg::tiled_partition(cg::thread_group(block), size);
    const unsigned rank = block.thread_rank();
    unsigned wrong = block.size() != blockDim.x * blockDim.y || tile.thread_rank() != rank % size || tile.size() != size;
    wrong += warp.meta_group_rank() != rank / warpSize || warp.meta_group_size() != (block.size() + warpSize - 1) / warpSize;
    wrong += tile.meta_group_rank() != rank % warpSize / size || tile.meta_group_size() != warpSize / size;
    wrong += any_group.size() != size || any_group.thread_rank() != rank % size;
    const unsigned first = rank / size * size;
    wrong += cg::reduce(tile, rank, cg::plus<unsigned>()) != size * first + size * (size - 1) / 2;
    wrong += cg::reduce(tile, rank, cg::greater<unsigned>()) != first + size - 1 || cg::reduce(tile, rank, cg::less<unsigned>()) != first;
    wrong += cg::inclusive_scan(tile, 2u) != 2 * (rank % size + 1) || cg::exclusive_scan(tile, 2u) != 2 * (rank % size);
    wrong += tile.shfl(rank, size - 1) != first + size - 1 || tile.shfl_xor(rank, size / 2) != (rank ^ size / 2);
    wrong += tile.shfl_down(rank, 1) != (rank % size == size - 1 ? rank : rank + 1);
    wrong += tile.shfl_up(rank, 1) != (rank % size == 0 ? rank : rank - 1);
    wrong += tile.ballot(rank % size == 0) != 1 || !tile.any(rank % size == 0) || tile.all(rank % size == 0) != (size == 1);
    tile.sync();
    any_group.sync();
    block.sync();
    out[rank] = wrong;
}

// Two stages of shared memory: while one is copied to, the other is read.
__global__ void copy_in_stages(const float* in, float* out)
{
    using Barrier = cuda::barrier<cuda::thread_scope_block>;
    __shared__ Barrier full[2];
    __shared__ float stages[2][64];
    if (threadIdx.x < 2) init(&full[threadIdx.x], blockDim.x);
    __syncthreads();
    const unsigned t = threadIdx.x;
    const auto fetch = [&](unsigned i) {
        cuda::memcpy_async(&stages[i % 2][t], in + i * 64 + t, cuda::aligned_size_t<4>(4), full[i % 2]);
    };
    fetch(0);
    for (unsigned i = 0; i < 8; i++) {
        if (i + 1 < 8) fetch(i + 1);
        full[i % 2].arrive_and_wait();
        out[i * 64 + t] = stages[i % 2][63 - t];
        __syncthreads();
    }
}
__global__ void forgotten_arrival()
{
    __shared__ cuda::barrier<cuda::thread_scope_block> lonely;
    if (threadIdx.x == 0) init(&lonely, 3);
    __syncthreads();
    lonely.arrive_and_wait();
}

static void test_groups()
{
    claim("groups: blocks, tiles, tiles of tiles, their shuffles, votes, reductions and scans", in_every_order([] {
        Array<unsigned> out(96);
        cuda_cpu::launch(use_groups, {1, dim3(24, 4)})(out.data);
        return out.values() == std::vector<unsigned>(96, 0);
    }));
    claim("a block's barriers in shared memory end phase after phase", in_every_order([] {
        Array<float> in(8 * 64), out(8 * 64);
        bool right = true;
        for (unsigned i = 0; i < in.size; i++) in[i] = static_cast<float>(i);
        cuda_cpu::launch(copy_in_stages, {1, 64})(in.data, out.data);
        for (unsigned i = 0; i < out.size; i++) right = right && out[i] == in[i / 64 * 64 + 63 - i % 64];
        return right;
    }));
    const auto [said, code] = run_child("forgotten_arrival");
    claim("who waits there forever is told of", code == 1 && contains(said, "threads 0-1: in cuda::barrier::wait"));
}

static void test_half()
{
    unsigned wrong = 0;
    for (unsigned bits = 0; bits < 0x7c00; bits++) {
        const __half low = __ushort_as_half(static_cast<unsigned short>(bits));
        const double x = __half2float(low), next = bits == 0x7bff ? 65536.0 : static_cast<float>(__ushort_as_half(static_cast<unsigned short>(bits + 1)));
        const double middle = (x + next) / 2;  // of two halves, the even one is nearer
        const auto rounds_to = [](double y) { return static_cast<unsigned>(__half_as_ushort(__half(y))); };
        wrong += rounds_to(x) != bits || rounds_to(-x) != (bits | 0x8000) || rounds_to(middle) != bits + bits % 2;
        wrong += rounds_to(std::nextafter(middle, 0)) != bits || rounds_to(std::nextafter(middle, 1e9)) != bits + 1;
        wrong += static_cast<unsigned>(__half_as_ushort(static_cast<float>(middle))) != bits + bits % 2;
    }
    bool as_single = true;   // of floats every 65536th and its neighbours
    for (unsigned first = 0; first < 65536; first += 16)
        for (int near : {0, 1, 0x1000, 0x2fff, 0xffff}) {
            __half halves[16], packed[16];
            float floats[16], wide[16];
            for (unsigned i = 0; i < 16; i++) {
                halves[i] = __ushort_as_half(static_cast<unsigned short>(first + i));
                floats[i] = cuda_cpu::bits<float>((first + i) << 16 | static_cast<unsigned>(near));
            }
            to_floats(wide, halves);
            from_floats(packed, floats);
            for (unsigned i = 0; i < 16; i++)
                as_single = as_single && cuda_cpu::bits<unsigned>(wide[i]) == cuda_cpu::bits<unsigned>(static_cast<float>(halves[i])) &&
                            __half_as_ushort(packed[i]) == __half_as_ushort(__half(floats[i]));
        }
    claim("halves: a pack is converted as each of them alone, infinities and what is not a number too", as_single);
    const __half nan = NAN, one = 1.0f, large = 65504.0f;
    claim("halves: all of them, and what lies between, rounded once, to nearest and even",
          wrong == 0 && std::isnan(__half2float(nan)) && std::isinf(__half2float(large + large)));
    claim("halves: arithmetic rounds, and a fused one only at its end",
          static_cast<float>(one + __half(0.0004f)) == 1 && static_cast<float>(__hfma(__half(0.0321f), __half(0.0321f), one)) == 1.0009765625f &&
              static_cast<float>(__low2half(__floats2half2_rn(2, 3) * __float2half2_rn(0.5f))) == 1);
}

__device__ int counter_of_device = 5;
__constant__ float table_of_device[4];
__global__ void read_symbols(float* out)
{
    out[threadIdx.x] = table_of_device[threadIdx.x];
    if (threadIdx.x == 0) counter_of_device++;
}
template <int Stack> __global__ void __launch_bounds__(256) asked_about(float* out)
{
    __shared__ float array[Stack];
    array[threadIdx.x] = 1;
    __syncthreads();
    *out = array[0];
}
__global__ void by_old_launch(float* out, int a, double b) { *out = static_cast<float>(a + b); }

static void test_other_calls()
{
    const float table[] = {1, 2, 3, 4};
    Array<float> out(4);
    int counter = 0;
    const bool copied = cudaMemcpyToSymbol(table_of_device, table, sizeof(table)) == cudaSuccess &&
                        cudaMemcpyToSymbol(table_of_device, table, 4, 12) == cudaSuccess &&
                        cudaMemcpyToSymbol(table_of_device, table, 8, 12) == cudaErrorInvalidValue;
    cudaGetLastError();
    cuda_cpu::launch(read_symbols, {1, 4})(out.data);
    const cudaError_t read = cudaMemcpyFromSymbol(&counter, counter_of_device, sizeof(int));
    claim("variables of the device are copied to and from, within their bounds",
          copied && read == cudaSuccess && counter == 6 && out.values() == std::vector<float>({1, 2, 3, 1}));
    float *managed = nullptr, *ordered = nullptr;
    size_t pitch = 0;
    char *rows = nullptr, part[6];
    claim("managed memory, memory in a stream's order, rows",
          cudaMallocManaged(&managed, 4) == cudaSuccess && (*managed = 1) == 1 && cudaMemPrefetchAsync(managed, 4, 0) == cudaSuccess &&
              cudaMallocAsync(&ordered, 4, nullptr) == cudaSuccess && cudaFreeAsync(ordered, nullptr) == cudaSuccess &&
              cudaFree(managed) == cudaSuccess && cudaMallocPitch(&rows, &pitch, 3, 2) == cudaSuccess && pitch >= 3 &&
              cudaMemcpy2D(rows, pitch, "abcdef", 3, 3, 2, cudaMemcpyHostToDevice) == cudaSuccess &&
              cudaMemset2D(rows, pitch, 'x', 1, 2) == cudaSuccess &&
              cudaMemcpy2D(part, 3, rows, pitch, 3, 2, cudaMemcpyDeviceToHost) == cudaSuccess &&
              std::string(part, 6) == "xbcxef" && cudaFree(rows) == cudaSuccess);
    int a = 3, blocks = 0, grid = 0, block = 0;
    double b = 0.5;
    float* where = out.data;
    void* arguments[] = {&where, &a, &b};
    claim("cudaLaunchKernel takes the places of its arguments",
          cudaLaunchKernel(by_old_launch, 1, 1, arguments, 0, nullptr) == cudaSuccess && out[0] == 3.5f);
    cuda_cpu::launch(by_old_launch, {0, 1})(out.data, 1, 1);
    claim("a launch that is refused leaves its error for cudaGetLastError",
          cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    std::string order;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaLaunchHostFunc(stream, [](void* text) { *static_cast<std::string*>(text) += "a"; }, &order);
    cudaStreamAddCallback(stream, [](cudaStream_t, cudaError_t, void* text) { *static_cast<std::string*>(text) += "b"; }, &order, 0);
    claim("a stream calls the host's functions in order",
          cudaStreamSynchronize(stream) == cudaSuccess && order == "ab" && cudaStreamDestroy(stream) == cudaSuccess);
    const bool bounded = cudaOccupancyMaxPotentialBlockSize(&grid, &block, asked_about<8>) == cudaSuccess;
    claim("occupancy: threads, shared memory and launch bounds count",
          bounded && block == (cuda_cpu::has_launch_bounds ? 256 : 1024) && grid > 0 &&
              cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, asked_about<8>, 256, 100 * 1024) == cudaSuccess && blocks == 2 &&
              cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, asked_about<8>, 256, 0) == cudaSuccess && blocks == 4);
    claim("what there is nothing to do for succeeds",
          cudaProfilerStart() == cudaSuccess && cudaProfilerStop() == cudaSuccess && cudaDeviceReset() == cudaSuccess &&
              cudaFuncSetCacheConfig(by_old_launch, cudaFuncCachePreferL1) == cudaSuccess);
    const float tenth = 0.1f;
    claim("a product is rounded before it is added to, but for a fused one",
          __fadd_rn(__fmul_rn(tenth, tenth), -0.01f) == 9.31322574615478515625e-10f &&
              __fmaf_rn(tenth, tenth, -0.01f) == fmaf(tenth, tenth, -0.01f) &&
              __fmaf_rn(tenth, tenth, -0.01f) != __fadd_rn(__fmul_rn(tenth, tenth), -0.01f));
    claim("whole numbers from floats: four ways to round, clamped", __float2int_rn(2.5f) == 2 && __float2int_rz(-2.5f) == -2 &&
          __float2int_ru(2.1f) == 3 && __float2int_rd(-2.1f) == -3 && __float2int_rn(3e9f) == 2147483647 && __float2uint_rz(-1) == 0 && __float2int_rz(NAN) == 0);
    claim("bits of 64, in reverse, by bytes", __popcll(~0ull) == 64 && __clzll(1) == 63 && __ffsll(8) == 4 && __brev(1) == 0x80000000 &&
          __byte_perm(0x33221100, 0x77665544, 0x7410) == 0x77441100 && __funnelshift_l(0x80000000, 1, 1) == 3 && __mulhi(-1, 5) == -1);
    static_assert(sizeof(double2) == 16 && alignof(double2) == 16 && alignof(uchar4) == 4 && sizeof(char3) == 3 && alignof(short4) == 8);
}

// cuBLAS's products against the sums that they stand for: all four ways to transpose, with rows that are not there.
template <class T>
static double error_of_cublas(int batch, bool one_by_one)
{
    constexpr int m = 7, n = 5, k = 33, pad = 3;
    const cudaDataType_t type = sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;
    cublasHandle_t handle;
    cublasCreate(&handle);
    double worst = 0;
    for (int ways = 0; ways < 4; ways++) {
        const bool ta = ways & 1, tb = ways & 2;
        const int lda = (ta ? k : m) + pad, ldb = (tb ? n : k) + pad, ldc = m + pad;
        const int stride_a = lda * (ta ? m : k), stride_b = ldb * (tb ? k : n), stride_c = ldc * n;
        Array<T> A(static_cast<size_t>(stride_a * batch)), B(static_cast<size_t>(stride_b * batch)), C(static_cast<size_t>(stride_c * batch));
        std::mt19937 random(5);
        for (auto* array : {&A, &B, &C})
            for (size_t i = 0; i < array->size; i++) (*array)[i] = static_cast<float>(random() % 64) / 64 - 0.5f;
        const std::vector<T> before = C.values();
        const float alpha = 0.5f, beta = 2;
        const auto op_a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
        if (one_by_one)
            for (int i = 0; i < batch; i++)
                cublasGemmEx(handle, op_a, op_b, m, n, k, &alpha, A.data + i * stride_a, type, lda, B.data + i * stride_b, type, ldb, &beta,
                             C.data + i * stride_c, type, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        else
            cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, &alpha, A.data, type, lda, stride_a, B.data, type, ldb, stride_b, &beta,
                                       C.data, type, ldc, stride_c, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        for (int at = 0; at < batch * stride_c; at++) {
            const int i = at % ldc, j = at % stride_c / ldc, g = at / stride_c;
            double sum = static_cast<double>(static_cast<float>(before[static_cast<size_t>(at)])) * (i < m ? beta : 1);
            for (int l = 0; l < k && i < m; l++)
                sum += alpha * static_cast<double>(static_cast<float>(A.data[g * stride_a + (ta ? i * lda + l : l * lda + i)])) *
                       static_cast<double>(static_cast<float>(B.data[g * stride_b + (tb ? l * ldb + j : j * ldb + l)]));
            worst = std::max(worst, std::fabs(sum - static_cast<double>(static_cast<float>(C.data[at]))));
        }
    }
    cublasDestroy(handle);
    return worst;
}

static void test_cublas()
{
    claim("cuBLAS: products of floats, one and many", error_of_cublas<float>(1, true) < 1e-5 && error_of_cublas<float>(3, false) < 1e-5);
    claim("cuBLAS: products of bfloat16", error_of_cublas<__nv_bfloat16>(2, true) < 0.02 && error_of_cublas<__nv_bfloat16>(2, false) < 0.02);
    cublasHandle_t handle;
    cublasCreate(&handle);
    const float alpha = 2, beta = 1;
    Array<float> matrix(6), x(6), y(6);  // 2 x 3, its columns 1 2, 3 4, 5 6
    for (size_t i = 0; i < 6; i++) matrix[i] = static_cast<float>(i + 1), x[i] = static_cast<float>(i % 2 == 0), y[i] = 10;
    const cublasStatus_t rows = cublasSgemv(handle, CUBLAS_OP_N, 2, 3, &alpha, matrix.data, 2, x.data, 2, &beta, y.data, 3);
    const bool right = y.values() == std::vector<float>({28, 10, 10, 34, 10, 10});
    const cublasStatus_t columns = cublasSgemv(handle, CUBLAS_OP_T, 2, 3, &alpha, matrix.data, 2, x.data, 1, &beta, y.data, 1);
    claim("cuBLAS: a matrix by a vector with steps, and its transpose", rows == CUBLAS_STATUS_SUCCESS && columns == CUBLAS_STATUS_SUCCESS &&
          right && y.values() == std::vector<float>({30, 16, 20, 34, 10, 10}));
    const float numbers[] = {1, 2, 3};
    float every_second[6] = {};
    claim("cuBLAS: vectors go to the device and back, with steps",
          cublasSetVector(3, 4, numbers, 1, x.data, 2) == CUBLAS_STATUS_SUCCESS && x[2] == 2 && x[4] == 3 &&
              cublasGetVector(3, 4, x.data, 2, every_second, 2) == CUBLAS_STATUS_SUCCESS && every_second[4] == 3 && every_second[3] == 0);
    claim("cuBLAS: what it has not it refuses, and nothing to do is done",
          cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &alpha, x.data, CUDA_R_16F, 2, x.data, CUDA_R_16F, 2, &beta, y.data, CUDA_R_16F, 2,
                       CUBLAS_COMPUTE_16F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_NOT_SUPPORTED &&
              cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &alpha, x.data, 1, x.data, 2, &beta, y.data, 2) == CUBLAS_STATUS_INVALID_VALUE &&
              cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 0, 2, 2, &alpha, x.data, 2, x.data, 2, &beta, y.data, 2) == CUBLAS_STATUS_SUCCESS);
    cublasDestroy(handle);
}

// Prints how many workers there are, this program's further arguments, a line of its input, and which file is its next.
static int print_workers(int argc, char** argv)
{
    cudaSetDevice(0);
    printf("%d workers, ", omp_get_max_threads());
    for (int i = 2; i < argc; i++) printf("[%s]", argv[i]);
    char line[100];
    if (fgets(line, sizeof(line), stdin) != nullptr) printf(" %s", line);
    printf("next file %d\n", open("/dev/null", O_RDONLY));
    return 0;
}

// With --only: how the names of tests to run begin. With --list: names are printed, no test runs.
static std::vector<std::string> wanted;
static bool listing = false;

static void test(const std::string& name, void (*function)())
{
    const auto begins = [&](const std::string& word) { return name.rfind(word, 0) == 0; };
    if (!wanted.empty() && std::none_of(wanted.begin(), wanted.end(), begins)) return;
    printf("%s\n", name.c_str());
    if (listing) return;
    const double begin = omp_get_wtime();
    function();
    printf("        %.1f s\n", omp_get_wtime() - begin);
}

int main(int argc, char** argv)
{
    const std::string what = argc == 2 ? argv[1] : "";
    if (argc > 1 && argv[1] == std::string("workers")) return print_workers(argc, argv);
    listing = what == "--list";
    if (argc == 3 && argv[1] == std::string("--only")) {
        std::istringstream names(argv[2]);
        for (std::string name; std::getline(names, name, ',');) wanted.push_back(name);
    }
    if (what == "offers") return print_offers(CUBLASLT_REDUCTION_SCHEME_MASK);
    if (what == "offers_without_in_place") return print_offers(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    if (what == "forgotten_arrival") cuda_cpu::launch(forgotten_arrival, {1, 2})();
    if (what.rfind("misuse", 0) == 0) do_misuse(atoi(argv[1] + 6));
    if (what.rfind("slip", 0) == 0) return do_slip(atoi(argv[1] + 4)) ? 1 : 0;
    if (what.rfind("instruction", 0) == 0) return run_instruction(atoi(argv[1] + 11));
    if (argc == 2 && !listing) {
        do_deed(what);
        return 0;
    }
    if (!listing) printf("WARP_SIZE %d, %d workers\n", WARP_SIZE, omp_get_max_threads());
    test("blocks", test_blocks);
    test("warps", test_warps);
    test("deaths", test_deaths);
    test("workers", test_workers);
    test("host", test_host);
    test("graphs", test_graphs);
    test("captured products", test_captured_products);
    test("numbers", test_numbers);
    test("bf16", test_bf16);
    test("fp8", test_fp8);
    test("products: float", [] { test_products<float, float>("float"); });
    test("products: bf16 to float", [] { test_products<__nv_bfloat16, float>("bf16 to float"); });
    test("products: bf16", [] { test_products<__nv_bfloat16, __nv_bfloat16>("bf16"); });
    test("products: fp16 to float", [] { test_products<__half, float>("fp16 to float"); });
    test("products: fp16", [] { test_products<__half, __half>("fp16"); });
    test("refusals", test_refusals);
    test("rounding", test_rounding);
    test("products of fp8", test_products_of_fp8);
    test("workers of fp8", test_workers_of_fp8);
    test("refusals of fp8", test_refusals_of_fp8);
    test("captured scales", test_captured_scales);
    test("tensor cores", test_tensor_cores);
    test("algorithms", test_algorithms);
    test("launch bounds", test_launch_bounds);
    test("static shared", test_static_shared);
    test("atomics", test_atomics);
    test("groups", test_groups);
    test("half", test_half);
    test("other calls", test_other_calls);
    test("cublas", test_cublas);
    test("cards", test_cards);
    if (!listing) printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
