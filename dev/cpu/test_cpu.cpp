// Tests of the emulator, one claim a line; make test builds and runs them for both widths. Options: --list prints the
// names of the tests, --only NAMES runs those whose names begin so. Other arguments are children's: see `main`.
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
static cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(Parameters...),
                          Arguments... arguments)
{
    const cuda_cpu::Configuration configuration(grid, block, shared_bytes);
    return cudaLaunchKernelEx(&configuration, kernel, arguments...);
}

// Device memory, zeros at first.
template <class T> struct Array {
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
    bool all_are(T value) const { return values() == std::vector<T>(size, value); }
};

// Runs this program with an argument, after `before` (variables, a pipe); returns its output and its exit code.
static std::pair<std::string, int> run_child(const std::string& argument, const std::string& before = "")
{
    char self[4096] = "";
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return {"no /proc/self/exe", -1};
    FILE* pipe = popen((before + " '" + std::string(self) + "' " + argument + " 2>&1").c_str(), "r");
    std::string output;
    for (int c; (c = fgetc(pipe)) != EOF;) output += static_cast<char>(c);
    const int status = pclose(pipe);
    return {output, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

static bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A child fails with this code and this text.
static bool child_fails(int code, const std::string& text, const std::string& argument, const std::string& before = "")
{
    const auto [output, exit_code] = run_child(argument, before);
    return exit_code == code && contains(output, text);
}

// Whether something holds under each seed in [first, end); the natural order is seed 0.
template <class Check> static bool under_seeds(uint64_t first, uint64_t end, Check check)
{
    bool holds = true;
    for (uint64_t seed = first; seed < end; seed++) {
        cuda_cpu::set_seed(seed);
        holds = check() && holds;
    }
    cuda_cpu::set_seed(0);
    return holds;
}
template <class Check> static bool in_every_order(Check check) { return under_seeds(0, 8, check); }

// ==== threads and blocks ================================================================================

__global__ void count_visits(int* visits, dim3 grid, dim3 block)
{
    const auto same = [](dim3 a, dim3 b) { return a.x == b.x && a.y == b.y && a.z == b.z; };
    const unsigned b = blockIdx.x + grid.x * (blockIdx.y + grid.y * blockIdx.z);
    const unsigned t = threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
    if (same(gridDim, grid) && same(blockDim, block)) visits[b * block.x * block.y * block.z + t]++;
}

static bool every_thread_runs_once(dim3 grid, dim3 block)
{
    Array<int> visits(grid.x * grid.y * grid.z * block.x * block.y * block.z);
    launch(grid, block, 0, count_visits, visits.data, grid, block);
    return visits.all_are(1);
}

// Sums a block's numbers by shuffles and shared memory.
__global__ void reduce_block(const float* in, float* out)
{
    float* partial = reinterpret_cast<float*>(dynamic_shared_memory);
    float sum = in[blockIdx.x * blockDim.x + threadIdx.x];
    for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
    if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = sum;
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / WARP_SIZE && threadIdx.x == 0; w++) out[blockIdx.x] += partial[w];
}

static bool a_block_reduces()
{
    constexpr unsigned blocks = 37, threads = 96;
    Array<float> in(blocks * threads), out(blocks);
    std::vector<float> expected(blocks);
    for (unsigned i = 0; i < in.size; i++) expected[i / threads] += in[i] = static_cast<float>(i % 101);
    launch(blocks, threads, threads * sizeof(float), reduce_block, in.data, out.data);
    return out.values() == expected;
}

__global__ void vote(int* result)
{
    const int third = threadIdx.x % 3 == 0;
    result[threadIdx.x] = __syncthreads_count(third) * 1000 + __syncthreads_or(third) * 100 + __syncthreads_or(0) * 10 +
                          __syncthreads_and(third) + 2 * __syncthreads_and(1);
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

// Each thread reads what the one before it wrote, without a barrier; in the natural order that one has run already.
__global__ void has_no_barrier(int* out)
{
    __shared__ int tile[64];
    tile[threadIdx.x] = -1;
    __syncthreads();
    tile[threadIdx.x] = static_cast<int>(threadIdx.x);
    out[threadIdx.x] = tile[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}

static bool missing_barrier_shows()
{
    Array<int> out(64);
    launch(1, 64, 0, has_no_barrier, out.data);
    bool wrong = false;
    for (int t = 1; t < 64; t++) wrong = wrong || out[static_cast<size_t>(t)] != t - 1;
    return wrong;
}

__global__ void note_order(int* order, int* place)
{
    for (int round = 0; round < 2; round++) {
        const unsigned at = static_cast<unsigned>(atomicAdd(&place[blockIdx.x], 1)) % blockDim.x;
        order[blockIdx.x * blockDim.x + at] += static_cast<int>(threadIdx.x) * (round == 0 ? 1 : 1000);
        __syncthreads();
    }
}

static std::vector<int> order_under(uint64_t seed)
{
    Array<int> order(4 * 64), place(4);
    cuda_cpu::set_seed(seed);
    launch(4, 64, 0, note_order, order.data, place.data);
    cuda_cpu::set_seed(0);
    return order.values();
}

// Reads shared memory, dynamic and static, that no thread of this block has written.
__global__ void read_unwritten(float* out)
{
    __shared__ float own[64];
    out[0] = reinterpret_cast<float*>(dynamic_shared_memory)[0];
    out[1] = own[63];
    own[63] = 1;
}

static void test_blocks()
{
    claim("every thread of every block runs once, with its own indices", in_every_order([] {
              return every_thread_runs_once({5, 3, 2}, {4, 3, 5}) && every_thread_runs_once(1, 1) &&
                     every_thread_runs_once(1000, 1) && every_thread_runs_once(3, 1024);
          }));
    claim("a block of 96 threads reduces through shuffles and shared memory", in_every_order(a_block_reduces));
    claim("votes at a barrier: count, or, and", in_every_order([] {
              Array<int> result(100);
              launch(1, 100, 0, vote, result.data);
              return result.all_are(34102);
          }));
    claim("exited threads do not count at a barrier", in_every_order([] {
              Array<int> sum(64);
              launch(1, 64, 0, half_leave, sum.data);
              bool right = true;
              for (size_t t = 0; t < 64; t++) right = right && sum[t] == (t % 2 == 1 ? 0 : 32 * 55);
              return right;
          }));
    claim("a missing barrier shows under some seed, but not in the natural order",
          !missing_barrier_shows() && !under_seeds(1, 10, [] { return !missing_barrier_shows(); }));
    claim("one seed gives one order of threads, another gives another",
          order_under(7) == order_under(7) && order_under(7) != order_under(8) && order_under(7) != order_under(0));
    Array<float> out(2);
    for (int run = 0; run < 2; run++) launch(1, 1, 4, read_unwritten, out.data);
    claim("under a seed unwritten shared memory, dynamic and static, is NaN",
          out[1] == 1 && under_seeds(1, 3, [&] {
              return launch(1, 1, 4, read_unwritten, out.data) == cudaSuccess && std::isnan(out[0]) &&
                     std::isnan(out[1]);
          }));
}

// ==== warps =============================================================================================

template <class T> __global__ void shuffle(T* out, int kind, int argument, int width)
{
    const T mine = static_cast<T>(threadIdx.x + 1) * static_cast<T>(3);
    const unsigned distance = static_cast<unsigned>(argument);
    out[threadIdx.x] = kind == 0   ? __shfl_sync(0xffffffff, mine, argument, width)
                       : kind == 1 ? __shfl_xor_sync(0xffffffff, mine, argument, width)
                       : kind == 2 ? __shfl_up_sync(0xffffffff, mine, distance, width)
                                   : __shfl_down_sync(0xffffffff, mine, distance, width);
}

template <class T> static bool shuffles_are_right()
{
    bool right = true;
    for (int kind = 0; kind < 4; kind++)
        for (int width : {WARP_SIZE, WARP_SIZE >= 8 ? 8 : 1})
            for (int argument : {0, 1, 3, 4, 7}) {
                Array<T> out(64);
                launch(1, 64, 0, shuffle<T>, out.data, kind, argument, width);
                for (int t = 0; t < 64; t++) {
                    const int segment = t / width * width;
                    const int named[] = {segment + argument % width, t ^ argument, t - argument, t + argument};
                    const bool inside = named[kind] >= segment && named[kind] < segment + width;
                    const int from = kind == 0 || inside ? named[kind] : t;
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
              return shuffles_are_right<int>() && shuffles_are_right<float>() && shuffles_are_right<double>();
          }));
    if (WARP_SIZE == 1) return;
    claim("ballot, any and all, with the halves of a warp separate", in_every_order([] {
              Array<unsigned> out(64);
              launch(1, 64, 0, ballots, out.data);
              bool right = true;
              for (unsigned t = 0; t < 64; t++)
                  right = right && out[t] == (0xaaaaaaaa ^ (t % 32 < 16 ? 0xf0000000 : 0));
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

static int do_fatal(const std::string& what)
{
    Array<float> data(100);
    nvtxRangePushA("outer");
    nvtxRangePushA("half_wait");
    if (what == "deadlock") launch({2, 3}, 96, 0, half_wait, data.data);
    if (what == "stack") launch(1, 2, 0, use_stack, reinterpret_cast<char*>(data.data));
    if (what == "shared") launch(1, 1, 64, write_shared, 16);
    if (what == "global") launch(1, 1, 0, write_global, data.data, 100);
    return 0;
}

static void test_deaths()
{
    if (WARP_SIZE == 32)
        claim("a deadlock is reported with kernel, block and threads",
              child_fails(1,
                          "of (2, 3, 1), 96 x 1 x 1 threads: deadlock: no thread can go on\n"
                          "  threads 0-4, 6-63: in __syncthreads\n"
                          "  threads 5: in __shfl_xor_sync with mask 0xffffffff\n  threads 64-95: ended",
                          "deadlock") &&
                  child_fails(1, "kernel half_wait, block (", "deadlock"));
#ifdef __SANITIZE_ADDRESS__
    claim("AddressSanitizer sees a write past the launch's shared memory",
          contains(run_child("shared").first, "use-after-poison"));
    claim("AddressSanitizer sees a write past what cudaMalloc gave",
          contains(run_child("global").first, "heap-buffer-overflow"));
#else
    claim("a thread that needs too much stack is named",
          child_fails(1, "needs more than the 65536 bytes of stack", "stack"));
#endif
}

// ==== workers ===========================================================================================

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

// The output of a child with these variables, no others about waiting, and the word "input" to read.
static std::string child_with(const std::string& variables, const std::string& argument = "workers")
{
    return run_child(argument, "echo input | env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY " + variables).first;
}

// The turns for which libgomp spins, as it prints itself when it is loaded: the last time, where that is twice.
static long turns_of_spinning(const std::string& variables)
{
    const std::string output = child_with(variables + " OMP_DISPLAY_ENV=verbose"), name = "GOMP_SPINCOUNT = '";
    const size_t at = output.rfind(name);
    return at == output.npos ? -1 : atol(output.c_str() + at + name.size());
}

static void test_workers()
{
#ifndef KMP_VERSION_MAJOR  // LLVM's OpenMP has no such variable
    const long turns = turns_of_spinning("OMP_NUM_THREADS=2");
    const double ns = turns * cuda_cpu::ns_of_a_turn();
    claim("waiting workers spin for a while and then sleep", ns > cuda_cpu::spin_ns / 4 && ns < cuda_cpu::spin_ns * 4);
    claim("OMP_WAIT_POLICY and GOMP_SPINCOUNT of the user are kept; a program of one worker starts once",
          turns_of_spinning("OMP_NUM_THREADS=2 GOMP_SPINCOUNT=7") == 7 &&
              turns_of_spinning("OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive") == 0 &&
              turns_of_spinning("OMP_NUM_THREADS=1") > turns);
#endif
    const std::string argument = "workers a '' 'two words'", variables = "OMP_NUM_THREADS=2 CUDA_CPU_THREADS=3";
    const std::string twice = child_with(variables, argument);
    claim("a program that starts again keeps its arguments, variables and input, and no file stays open",
          contains(twice, "3 workers, [a][][two words] input\n") &&
              twice == child_with(variables + " GOMP_SPINCOUNT=7", argument));
    for (const char* number : {"0", "1025", "-1", "two", "2x", "''"})
        claim(std::string("CUDA_CPU_THREADS=") + number + " is refused",
              child_fails(2, "expected a whole number from 1 to 1024", "workers",
                          std::string("CUDA_CPU_THREADS=") + number));
}

// ==== the host's side ===================================================================================

__global__ void nothing() {}
__global__ void __launch_bounds__(96) bounded() {}
template <int N> __global__ void __launch_bounds__(2 * N, 1) bounded_by() {}
__global__ void fill_shared(size_t bytes, int* aligned)
{
    memset(static_cast<void*>(dynamic_shared_memory), 1, bytes);
    *aligned = reinterpret_cast<uintptr_t>(dynamic_shared_memory) % 1024 == 0;
}
__global__ void takes_arguments(double* out, float x, const int* y, __nv_bfloat16 z)
{
    *out = x + *y + static_cast<float>(z);
}

// 48 KiB of shared memory are there without asking, `most` by opt-in, and not a byte more.
static bool shared_memory_ends_at(size_t most)
{
    constexpr auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
    Array<int> flag(1);
    const auto with = [&](size_t bytes) { return launch(1, 1, bytes, fill_shared, bytes, flag.data); };
    cudaFuncSetAttribute(fill_shared, dynamic, 0);
    return with(48 << 10) == cudaSuccess && with((48 << 10) + 1) == cudaErrorInvalidValue &&
           cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess &&
           cudaFuncSetAttribute(fill_shared, dynamic, static_cast<int>(most) + 1) == cudaErrorInvalidValue &&
           cudaFuncSetAttribute(fill_shared, dynamic, static_cast<int>(most)) == cudaSuccess &&
           with(most) == cudaSuccess && with(most + 1) == cudaErrorInvalidValue &&
           cudaDeviceSynchronize() == cudaSuccess && flag[0] == 1;
}

static bool memory_is_counted()
{
    constexpr size_t bytes = 10 << 20;
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    size_t before = 0, with = 0, after = 0, total = 0;
    char *block = nullptr, *too_much = nullptr;
    cudaMemGetInfo(&before, &total);
    bool right = total > before && total == properties.totalGlobalMem;   // the machine uses some itself
    right = right && cudaMalloc(&block, bytes) == cudaSuccess && reinterpret_cast<uintptr_t>(block) % 256 == 0;
    cudaMemGetInfo(&with, &total);
    right = right && before - with == bytes && cudaMemset(block, 5, bytes) == cudaSuccess && block[bytes - 1] == 5;
    right = right && cudaMalloc(&too_much, with + 1) == cudaErrorMemoryAllocation && too_much == nullptr;
    right = right && cudaFree(block) == cudaSuccess && cudaFree(nullptr) == cudaSuccess;
    right = right && cudaFree(&total) == cudaErrorInvalidValue;
    cudaMemGetInfo(&after, &total);
    return right && before == after;
}

static bool events_measure_time()
{
    cudaEvent_t begin, end;
    float milliseconds = -1;
    cudaEventCreate(&begin);
    cudaEventCreateWithFlags(&end, cudaEventDefault);
    bool right = cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorInvalidResourceHandle;
    cudaEventRecord(begin);
    usleep(2000);
    cudaEventRecord(end);
    right = right && cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess && milliseconds >= 2;
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return right && milliseconds < 1000;
}

static void test_host()
{
    claim("too much shared memory is refused, what was asked for is there", shared_memory_ends_at(227 << 10));
    bool right = true;
    for (dim3 grid : {dim3(0), dim3(1, 65536), dim3(1, 1, 65536), dim3(1, 0)})
        right = right && launch(grid, 1, 0, nothing) == cudaErrorInvalidConfiguration;
    for (dim3 block : {dim3(0), dim3(1025), dim3(32, 33), dim3(1, 1, 65)})
        right = right && launch(1, block, 0, nothing) == cudaErrorInvalidConfiguration;
    claim("grids and blocks out of bounds are refused", right && cudaGetLastError() == cudaErrorInvalidConfiguration);
    Array<double> sum(1);
    Array<int> two(1);
    two[0] = 2;
    launch(1, 1, 0, takes_arguments, sum.data, 1, two.data, 0.5f);
    claim("arguments are converted to the kernel's parameters", sum[0] == 3.5);
    claim("memory is counted, aligned, refused beyond what the machine has available", memory_is_counted());
    std::vector<int> from(3 << 20), to(3 << 20);
    for (size_t i = 0; i < from.size(); i++) from[i] = static_cast<int>(i * i);
    cudaMemcpy(to.data(), from.data(), from.size() * sizeof(int), cudaMemcpyDeviceToHost);
    claim("a copy of 12 MiB is complete", from == to);
    claim("events measure time", events_measure_time());
    cudaDeviceProp p;
    int value = 0;
    claim("the device describes itself",
          cudaGetDeviceProperties(&p, 0) == cudaSuccess && p.name[0] != 0 && p.warpSize == WARP_SIZE && p.major == 0 &&
              cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0) == cudaSuccess &&
              value == omp_get_max_threads() && cudaSetDevice(1) == cudaErrorInvalidDevice);
    if (cuda_cpu::has_launch_bounds)
        claim("__launch_bounds__ bounds a block's threads; without it there may be 1024",
              launch(1, 96, 0, bounded) == cudaSuccess && launch(1, 97, 0, bounded) == cudaErrorInvalidValue &&
                  launch(1, {32, 4}, 0, bounded_by<64>) == cudaSuccess &&
                  launch(1, {43, 3}, 0, bounded_by<64>) == cudaErrorInvalidValue &&
                  launch(1, 1024, 0, bounded_by<512>) == cudaSuccess && launch(1, 1024, 0, nothing) == cudaSuccess);
    cudaGetLastError();
}

// ==== capture and graphs ================================================================================

struct Scale { float factor; };   // passed by value

__global__ void scale_by(float* x, Scale scale, const float* device_factor)
{
    x[blockIdx.x] *= scale.factor * *device_factor;
}
__global__ void add_one(float* x) { x[blockIdx.x] += 1; }

template <class... Parameters, class... Arguments>
static cudaError_t launch_on(cudaStream_t stream, unsigned grid, void (*kernel)(Parameters...), Arguments... arguments)
{
    const cuda_cpu::Configuration configuration(grid, 1, 0, stream);
    return cudaLaunchKernelEx(&configuration, kernel, arguments...);
}

// Captures what `work` gives to a stream; returns the graph, ready to launch, or null and the error.
template <class Work> static cudaGraphExec_t captured(cudaStream_t stream, cudaError_t& error, Work work)
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

static void test_replay(cudaStream_t stream)
{
    Array<float> x(4), y(4), factor(1);
    factor[0] = 2;
    cudaError_t error = cudaSuccess;
    // x = (0 + 1) * 3 * factor; y = x
    cudaGraphExec_t graph = captured(stream, error, [&] {
        Scale scale{3};
        cudaMemsetAsync(x.data, 0, 4 * sizeof(float), stream);
        launch_on(stream, 4, add_one, x.data);
        launch_on(stream, 4, scale_by, x.data, scale, factor.data);
        scale.factor = 100;
        cudaMemcpyAsync(y.data, x.data, 4 * sizeof(float), cudaMemcpyDeviceToDevice, stream);
    });
    claim("a captured stream does nothing yet", error == cudaSuccess && x.all_are(0) && y.all_are(0));
    bool right = cudaGraphLaunch(graph, stream) == cudaSuccess && y.all_are(6);
    factor[0] = 5;
    right = right && cudaGraphLaunch(graph, stream) == cudaSuccess && y.all_are(15);
    claim("its graph repeats it, with the arguments of the capture and the memory of the launch", right);
    cudaGraphExecDestroy(graph);
    launch_on(stream, 4, add_one, x.data);
    claim("after the capture the stream works again", x.all_are(16));
}

static void test_refused_in_capture(cudaStream_t stream)
{
    Array<float> x(4), y(4);
    void* block = nullptr;
    const std::pair<const char*, std::function<cudaError_t()>> refused[] = {
        {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream); }},
        {"cudaStreamQuery", [&] { return cudaStreamQuery(stream); }},
        {"cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); }},
        {"cudaMalloc", [&] { return cudaMalloc(&block, 16); }},
        {"cudaFree", [&] { return cudaFree(nullptr); }},
        {"cudaMallocHost", [&] { return cudaMallocHost(&block, 16); }},
        {"cudaFreeHost", [&] { return cudaFreeHost(nullptr); }},
        {"cudaMemcpy", [&] { return cudaMemcpy(y.data, x.data, 4, cudaMemcpyDeviceToDevice); }},
        {"cudaMemset", [&] { return cudaMemset(y.data, 0, 4); }}};
    std::string wrong;
    for (const auto& [name, refused_call] : refused) {
        const auto& call = refused_call;  // a lambda may not name a part of a pair, in C++17
        cudaError_t error = cudaSuccess, during = cudaSuccess, after = cudaSuccess;
        const cudaGraphExec_t graph = captured(stream, error, [&] {
            launch_on(stream, 4, add_one, y.data);
            during = call();
            after = launch_on(stream, 4, add_one, y.data);
        });
        const bool invalidated = after == cudaErrorStreamCaptureInvalidated && error == after && graph == nullptr;
        if (during != cudaErrorStreamCaptureUnsupported || !invalidated || !y.all_are(0))
            wrong += std::string(" ") + name;
    }
    claim("calls that wait or might wait are refused in a capture, and invalidate it:" + wrong, wrong.empty());
}

static void test_graphs()
{
    cudaStream_t stream, other;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    test_replay(stream);
    test_refused_in_capture(stream);

    cudaEvent_t outside, inside;
    cudaEventCreate(&outside);
    cudaEventCreate(&inside);
    cudaEventRecord(outside, other);
    cudaError_t error = cudaSuccess;
    bool right = true;
    float ms = 0;
    captured(stream, error, [&] { right = cudaStreamWaitEvent(stream, outside) == cudaErrorStreamCaptureIsolation; });
    claim("waiting for an event from outside is refused too", right && error == cudaErrorStreamCaptureInvalidated);
    const cudaGraphExec_t graph = captured(stream, error, [&] {
        cudaEventRecord(inside, stream);
        right = cudaStreamWaitEvent(stream, inside) == cudaSuccess && cudaStreamSynchronize(other) == cudaSuccess &&
                cudaStreamWaitEvent(other, outside) == cudaSuccess;
    });
    claim("an event of the capture, and other streams, may be used",
          right && error == cudaSuccess && cudaEventSynchronize(inside) == cudaErrorCapturedEvent &&
              cudaEventElapsedTime(&ms, outside, inside) == cudaErrorCapturedEvent);
    cudaGraphExecDestroy(graph);

    cudaGraph_t none = nullptr;
    const auto begin = [](cudaStream_t s) { return cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal); };
    claim("a capture begins and ends once, and not on the default stream",
          cudaStreamEndCapture(stream, &none) == cudaErrorIllegalState &&
              begin(nullptr) == cudaErrorStreamCaptureUnsupported && begin(stream) == cudaSuccess &&
              begin(stream) == cudaErrorIllegalState && cudaStreamEndCapture(stream, &none) == cudaSuccess);
    cudaGraphDestroy(none);
    cudaGetLastError();
    cudaEventDestroy(outside);
    cudaEventDestroy(inside);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(other);
}

// ==== numbers ===========================================================================================

// The largest error of a function in [first, last) in units of the last place.
template <class Function, class Exact> static double ulps(float first, float last, float step, Function f, Exact exact)
{
    double worst = 0;
    for (float x = first; x < last; x += step) {
        const double expected = exact(static_cast<double>(x));
        worst = std::max(worst, std::fabs(f(x) - expected) / std::ldexp(1.0, std::ilogb(expected) - 23));
    }
    return worst;
}

static void test_numbers()
{
    const float infinity = INFINITY, nan = NAN, tenth = 0.1f;
    claim("__expf is within 2 units in the last place, right at infinity and NaN",
          ulps(-87.3f, 88.72f, 0.0007f, __expf, [](double x) { return std::exp(x); }) < 2 && __expf(-infinity) == 0 &&
              __expf(-88) == 0 && __expf(infinity) == infinity && __expf(89) == infinity && std::isnan(__expf(nan)) &&
              __expf(0) == 1);
    claim("exp2_approx likewise, 0 below the normal range",
          ulps(-126, 128, 0.00107f, exp2_approx, [](double x) { return std::exp2(x); }) < 2 &&
              exp2_approx(-126.5f) == 0 && exp2_approx(128) == infinity && std::isnan(exp2_approx(nan)));
    claim("fmaxf and fminf prefer a number to NaN", fmaxf(nan, 1) == 1 && fmaxf(1, nan) == 1 && fminf(nan, 1) == 1 &&
                                                        fminf(1, nan) == 1 && fmaxf(2, 1) == 2 && fminf(2, 1) == 1);
    claim("min and max mix integer types",
          max(3, 4u) == 4u && min(5L, 3) == 3 && max(1.0f, 2.0f) == 2 && max(-1, 1u) == 0xffffffffu);
    claim("bits are counted, reversed, permuted and reinterpreted",
          __popc(0xf0f0) == 8 && __clz(1) == 31 && __clz(0) == 32 && __umulhi(0x80000000u, 6) == 3 &&
              __float_as_uint(1.0f) == 0x3f800000 && __int_as_float(0x40000000) == 2 && __popcll(~0ull) == 64 &&
              __clzll(1) == 63 && __ffsll(8) == 4 && __brev(1) == 0x80000000 && __mulhi(-1, 5) == -1 &&
              __byte_perm(0x33221100, 0x77665544, 0x7410) == 0x77441100 && __funnelshift_l(0x80000000, 1, 1) == 3);
    claim("a product is rounded before it is added to, except in a fused one",
          __fadd_rn(__fmul_rn(tenth, tenth), -0.01f) == 9.31322574615478515625e-10f &&
              __fmaf_rn(tenth, tenth, -0.01f) == fmaf(tenth, tenth, -0.01f));
    claim("integers from floats: four ways to round, clamped",
          __float2int_rn(2.5f) == 2 && __float2int_rz(-2.5f) == -2 && __float2int_ru(2.1f) == 3 &&
              __float2int_rd(-2.1f) == -3 && __float2int_rn(3e9f) == 2147483647 && __float2uint_rz(-1) == 0 &&
              __float2int_rz(nan) == 0);
    claim("ranges nest and close", nvtxRangePushA("a") == 0 && nvtxRangePushA("b") == 1 && nvtxRangePop() == 1 &&
                                       nvtxRangePop() == 0 && nvtxRangePop() == -2);
    static_assert(sizeof(double2) == 16 && alignof(double2) == 16 && alignof(uchar4) == 4 && sizeof(char3) == 3);
}

// ---- 16 and 8 bits, from their definition, in double

struct Format {
    int mantissa, bias, largest;   // bits, exponent bias, code of the largest finite number

    // What a code without sign stands for; the code after the largest as if it were finite.
    double value(int code) const
    {
        const int exponent = code >> mantissa, digits = code & ((1 << mantissa) - 1);
        return exponent == 0 ? std::ldexp(digits, 1 - bias - mantissa)
                             : std::ldexp(digits + (1 << mantissa), exponent - bias - mantissa);
    }
};
constexpr Format bf16_format{7, 127, 0x7f7f}, half_format{10, 15, 0x7bff}, e4m3_format{3, 7, 0x7e},
    e5m2_format{2, 15, 0x7b};

// Whether `encode` (to a code of `bits` bits) rounds to nearest, ties to even, at and beside each code and each middle
// between two, with both signs; what rounds to more than the largest becomes `beyond`. And `decode` inverts it.
template <class Encode, class Decode>
static bool rounds_to_nearest(const Format& f, int bits, int beyond, Encode encode, Decode decode)
{
    const int sign = 1 << (bits - 1);
    bool right = true;
    const auto check = [&](double x, int expected) {
        const int code = expected > f.largest ? beyond : expected;
        right = right && encode(x) == code && encode(-x) == (code | sign);
    };
    for (int code = 0; code <= f.largest; code++) {
        const double here = f.value(code), middle = (here + f.value(code + 1)) / 2;
        check(here, code);
        check(middle, code + code % 2);
        check(std::nextafter(static_cast<float>(middle), 0.0f), code);
        check(std::nextafter(static_cast<float>(middle), INFINITY), code + 1);
        right = right && decode(code) == here && decode(code | sign) == -here && std::signbit(decode(code | sign));
    }
    check(INFINITY, f.largest + 1);
    return right && encode(0.0) == 0 && encode(-0.0) == sign;
}

// Packs of 16 against one at a time: every upper half of a float with some lower halves, and every code.
template <class T> static bool packs_agree()
{
    using Code = std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>;
    const auto same = [](float a, float b) { return __float_as_uint(a) == __float_as_uint(b); };
    bool right = true;
    for (unsigned first = 0; first < 65536; first += 16)
        for (unsigned lower : {0u, 1u, 0x1000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            T codes[16], packed[16];
            float numbers[16], decoded[16];
            for (unsigned i = 0; i < 16; i++) {
                const Code code = static_cast<Code>(first + i);
                memcpy(static_cast<void*>(&codes[i]), &code, sizeof(code));
                numbers[i] = __uint_as_float((first + i) << 16 | lower);
            }
            to_floats(decoded, codes);
            from_floats(packed, numbers);
            for (unsigned i = 0; i < 16; i++) {
                const T alone(numbers[i]);
                right =
                    right && same(decoded[i], static_cast<float>(codes[i])) && !memcmp(&packed[i], &alone, sizeof(T));
            }
        }
    return right;
}

static void test_short_floats()
{
    const auto bf16 = [](double x) { return static_cast<int>(__bfloat16_as_ushort(static_cast<float>(x))); };
    const auto of_bf16 = [](int x) { return static_cast<float>(__ushort_as_bfloat16(static_cast<uint16_t>(x))); };
    const auto half = [](double x) { return static_cast<int>(__half_as_ushort(__half(x))); };
    const auto of_half = [](int x) { return __half2float(__ushort_as_half(static_cast<uint16_t>(x))); };
    claim("bfloat16 rounds to nearest even, and back exactly",
          rounds_to_nearest(bf16_format, 16, 0x7f80, bf16, of_bf16));
    claim("half precision likewise, also from double", rounds_to_nearest(half_format, 16, 0x7c00, half, of_half));
    for (const auto kind : {__NV_E4M3, __NV_E5M2}) {
        const bool is_e4m3 = kind == __NV_E4M3;
        const Format& format = is_e4m3 ? e4m3_format : e5m2_format;
        const auto saturated = [=](double x) { return int{__nv_cvt_double_to_fp8(x, __NV_SATFINITE, kind)}; };
        const auto other = [=](double x) {
            return int{__nv_cvt_float_to_fp8(static_cast<float>(x), __NV_NOSAT, kind)};
        };
        const auto decode = [=](int code) { return cuda_cpu::float_of_fp8(static_cast<unsigned char>(code), kind); };
        claim(std::string(is_e4m3 ? "E4M3" : "E5M2") +
                  " likewise; too large: the largest, or without saturation NaN or infinity",
              rounds_to_nearest(format, 8, format.largest, saturated, decode) &&
                  rounds_to_nearest(format, 8, is_e4m3 ? 0x7f : 0x7c, other, decode));
        const double just_more = (format.value(0x30) + format.value(0x31)) / 2 * (1 + DBL_EPSILON);
        claim("... a double is not rounded twice", saturated(just_more) == 0x31 && other(just_more) == 0x30);
        claim("... NaN",
              std::isnan(decode(0x7f)) && std::isnan(decode(0xff)) && saturated(NAN) == 0x7f && other(NAN) == 0x7f);
    }
    claim("NaN has one code in bfloat16 and in half", bf16(NAN) == 0x7fff && bf16(-NAN) == 0x7fff &&
                                                          half(NAN) == 0x7fff && std::isnan(of_bf16(0x7fff)) &&
                                                          std::isnan(of_half(0x7fff)));
    claim("a pack is converted as each of its elements: bfloat16, half, E4M3, E5M2",
          packs_agree<__nv_bfloat16>() && packs_agree<__half>() && packs_agree<__nv_fp8_e4m3>() &&
              packs_agree<__nv_fp8_e5m2>());
    const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.25f);
    const __half one = 1.0f, large = 65504.0f;
    claim("arithmetic rounds to the type, a fused half once; pairs keep their order",
          static_cast<float>(pair.x * pair.y) == -3.375f && __bfloat1622float2(pair).x == 1.5f && sizeof(pair) == 4 &&
              static_cast<float>(one + __half(0.0004f)) == 1 && std::isinf(__half2float(large + large)) &&
              static_cast<float>(__hfma(__half(0.0321f), __half(0.0321f), one)) == 1.0009765625f &&
              static_cast<float>(__low2half(__floats2half2_rn(2, 3) * __float2half2_rn(0.5f))) == 1 &&
              __nv_cvt_float2_to_fp8x2({1, -2}, __NV_SATFINITE, __NV_E4M3) == 0xc038);
}

// ==== matrix products ===================================================================================

// Element i of an array of this type, as a float.
static float element(cudaDataType_t type, const std::vector<char>& bytes, size_t i)
{
    switch (type) {
    case CUDA_R_16F: return reinterpret_cast<const __half*>(bytes.data())[i];
    case CUDA_R_16BF: return reinterpret_cast<const __nv_bfloat16*>(bytes.data())[i];
    case CUDA_R_8F_E4M3: return static_cast<float>(reinterpret_cast<const __nv_fp8_e4m3*>(bytes.data())[i]);
    case CUDA_R_8F_E5M2: return static_cast<float>(reinterpret_cast<const __nv_fp8_e5m2*>(bytes.data())[i]);
    default: return reinterpret_cast<const float*>(bytes.data())[i];
    }
}
static void set_element(cudaDataType_t type, std::vector<char>& bytes, size_t i, float x)
{
    switch (type) {
    case CUDA_R_16F: reinterpret_cast<__half*>(bytes.data())[i] = x; break;
    case CUDA_R_16BF: reinterpret_cast<__nv_bfloat16*>(bytes.data())[i] = x; break;
    case CUDA_R_8F_E4M3: reinterpret_cast<__nv_fp8_e4m3*>(bytes.data())[i] = __nv_fp8_e4m3(x); break;
    case CUDA_R_8F_E5M2: reinterpret_cast<__nv_fp8_e5m2*>(bytes.data())[i] = __nv_fp8_e5m2(x); break;
    default: reinterpret_cast<float*>(bytes.data())[i] = x;
    }
}

// An array of random numbers of a type.
struct Numbers {
    cudaDataType_t type;
    std::vector<char> bytes;
    Numbers(cudaDataType_t type_, size_t count, std::mt19937& random) : type(type_), bytes(count * sizeof(float))
    {
        std::uniform_real_distribution<float> uniform(-1, 1);
        for (size_t i = 0; i < count; i++) set_element(type, bytes, i, uniform(random));
    }
    double operator[](int64_t i) const { return element(type, bytes, static_cast<size_t>(i)); }
};

static double gelu_derivative(double z)
{
    const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (z + 0.044715 * z * z * z));
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z);
}

constexpr uint32_t writes_aux = CUBLASLT_EPILOGUE_GELU_AUX, has_gelu = 32, has_derivative = 64, has_bias = 4;

// One call of cublasLtMatmul and what it should give.
struct Product {
    cudaDataType_t a_type, b_type, d_type;
    int m = 70, n = 45, k = 333, batch = 1, pad = 0;   // pad: rows between columns that are not the matrix's
    bool transpose_a = false, transpose_b = false, float_bias = false, scaled = false;
    float alpha = 1, beta = 0, scale_a = 1, scale_b = 1;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int8_t fast_sums = 0;
    cuda_cpu::Algorithm algorithm = cuda_cpu::Algorithm::fast;
    std::vector<char> d_bytes = {};   // D as error() found it

    bool is_fp8() const { return a_type >= CUDA_R_8F_E4M3; }
    int lda() const { return (transpose_a ? k : m) + pad; }
    int ldb() const { return (transpose_b ? n : k) + pad; }
    int ldd() const { return m + pad; }
    int64_t stride_a() const { return int64_t{lda()} * (transpose_a ? m : k); }
    int64_t stride_b() const { return int64_t{ldb()} * (transpose_b ? k : n); }
    int64_t stride_d() const { return int64_t{ldd()} * n; }

    // Runs it twice from the same memory; returns whether it succeeded with the same bits.
    bool run(const Numbers& a, const Numbers& b, Numbers& d, Numbers& aux, const Numbers& bias)
    {
        cublasLtContext handle;
        cublasLtMatmulDesc_t desc;
        cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
            cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value));
        };
        set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias.bytes.data()));
        set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias.type);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(aux.bytes.data()));
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t{ldd()});
        set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast_sums);
        float scales[] = {NAN, NAN};   // read when the product runs
        if (scaled) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &scales[0]);
        if (scaled) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &scales[1]);
        const auto layout = [&](cudaDataType_t type, int rows, int columns, int64_t ld, int64_t stride) {
            return cublasLtMatrixLayoutOpaque_t{static_cast<uint32_t>(type), static_cast<uint64_t>(rows),
                                                static_cast<uint64_t>(columns), ld, batch, stride};
        };
        auto la = layout(a_type, transpose_a ? k : m, transpose_a ? m : k, lda(), stride_a());
        auto lb = layout(b_type, transpose_b ? n : k, transpose_b ? k : n, ldb(), stride_b());
        auto ld = layout(d_type, m, n, ldd(), stride_d());
        cublasLtMatmulHeuristicResult_t found{};
        int count = 0;
        cublasLtMatmulAlgoGetHeuristic(&handle, desc, &la, &lb, &ld, &ld, nullptr, 1, &found, &count);
        found.algo.data[0] = static_cast<uint64_t>(algorithm);
        scales[0] = scale_a;
        scales[1] = scale_b;
        const auto d_before = d.bytes, aux_before = aux.bytes;
        const auto multiply = [&] {
            d.bytes = d_before;
            aux.bytes = aux_before;
            return count == 1 && cublasLtMatmul(&handle, desc, &alpha, a.bytes.data(), &la, b.bytes.data(), &lb, &beta,
                                                d.bytes.data(), &ld, d.bytes.data(), &ld, &found.algo, nullptr, 0,
                                                nullptr) == CUBLAS_STATUS_SUCCESS;
        };
        const bool first = multiply();
        const auto first_d = d.bytes, first_aux = aux.bytes;
        const bool same = multiply() && first && d.bytes == first_d && aux.bytes == first_aux;
        cublasLtMatmulDescDestroy(desc);
        return same;
    }

    // The largest error in units of what rounding allows; infinite if it fails, differs when repeated, or changes more
    // than D.
    double error()
    {
        std::mt19937 random(3);
        const auto numbers = [&](cudaDataType_t type, int64_t count) {
            return Numbers(type, static_cast<size_t>(count), random);
        };
        const Numbers a = numbers(a_type, stride_a() * batch), b = numbers(b_type, stride_b() * batch);
        Numbers d = numbers(d_type, stride_d() * batch), aux = numbers(d_type, stride_d());
        const auto bias_type = is_fp8() && d_type == CUDA_R_32F ? CUDA_R_16BF : float_bias ? CUDA_R_32F : d_type;
        const Numbers bias = numbers(bias_type, m), old_d = d, old_aux = aux;
        if (!run(a, b, d, aux, bias)) return INFINITY;
        d_bytes = d.bytes;
        const double epsilon = d_type == CUDA_R_32F ? 0x1p-21 : d_type == CUDA_R_16F ? 0x1p-11 : 0x1p-8;
        double worst = 0;
        const auto compare = [&](double got, double expected, double allowed) {
            worst = std::max(worst, std::isnan(got) ? INFINITY : std::fabs(got - expected) / (epsilon * allowed));
        };
        const auto untouched = [&](double got, double before) { worst = got == before ? worst : INFINITY; };
        for (int64_t g = 0; g < batch; g++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t i = 0; i < ldd(); i++) {
                    const int64_t in_one = j * ldd() + i, at = g * stride_d() + in_one;
                    if (i >= m) {
                        untouched(d[at], old_d[at]);
                        untouched(aux[in_one], old_aux[in_one]);
                        continue;
                    }
                    double sum = 0, size = 0;
                    for (int64_t l = 0; l < k; l++) {
                        const double term = a[g * stride_a() + (transpose_a ? i * lda() + l : l * lda() + i)] *
                                            b[g * stride_b() + (transpose_b ? l * ldb() + j : j * ldb() + l)];
                        sum += term;
                        size += std::fabs(term);
                    }
                    const double factor = double{alpha} * scale_a * scale_b;
                    double x = factor * sum + beta * old_d[at] + (epilogue & has_bias ? bias[i] : 0);
                    const double allowed = 1 + std::fabs(x) + (d_type == CUDA_R_32F ? std::fabs(factor) * size / 4 : 0);
                    const bool new_aux = (epilogue & writes_aux) == writes_aux;
                    if (new_aux) compare(aux[in_one], x, allowed);
                    else untouched(aux[in_one], old_aux[in_one]);
                    if (epilogue & has_derivative) x *= gelu_derivative(old_aux[in_one]);
                    else if (epilogue & has_gelu)
                        x *= 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
                    compare(d[at], x, 2 * allowed);
                }
        return worst;
    }
};

// The largest error of a product that each of these functions changes, one after another.
using Changes = std::vector<std::function<void(Product&)>>;
static double worst_of(Product p, const Changes& changes)
{
    double worst = 0;
    for (const auto& change : changes) {
        change(p);
        worst = std::max(worst, p.error());
    }
    return worst;
}

constexpr cuda_cpu::Algorithm other_algorithms[] = {cuda_cpu::Algorithm::plain, cuda_cpu::Algorithm::slow,
                                                    cuda_cpu::Algorithm::in_place};

static void test_products(cudaDataType_t in, cudaDataType_t out, const std::string& types)
{
    const Product first{in, in, out};
    const Changes sizes = {[](Product& p) { p.m = 70, p.n = 45, p.k = 333; },
                           [](Product& p) { p.m = 1, p.n = 7, p.k = 1; },
                           [](Product& p) { p.m = 128, p.n = 256, p.k = 512, p.alpha = 0.125f; },
                           [](Product& p) { p.m = 300, p.n = 1, p.k = 334; },  // a single column has code of its own
                           [](Product& p) { p.m = 7, p.n = 1, p.k = 5; }};
    double forms = 0, epilogues = 0, batches = 0, algorithms = 0;
    for (int bits = 0; bits < 8; bits++) {
        Product p = first;
        p.transpose_a = bits & 1, p.transpose_b = bits & 2, p.pad = bits & 4 ? 11 : 0;
        for (float beta : {0.0f, 1.0f}) {
            p.beta = beta;
            forms = std::max(forms, worst_of(p, sizes));
        }
        p.m = 33, p.n = 20, p.k = 64, p.batch = 5;
        batches = std::max(batches, p.error());
        p.batch = 1 + omp_get_max_threads() / 2;
        batches = std::max(batches, p.error());
    }
    claim(types + ": transposes, leading dimensions, alpha and beta, against a loop in double; twice the same bits",
          forms < 1);
    claim(types + ": batches", batches < 1);
    for (uint32_t epilogue : {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS,
                              CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU})
        for (int bits = 0; bits < 8; bits++) {
            Product p = first;
            p.m = 300, p.n = 40, p.k = 24, p.pad = 4, p.epilogue = epilogue;
            p.beta = bits & 1 ? 1 : 0, p.alpha = bits & 2 ? 0.5f : 1, p.float_bias = bits & 4;
            epilogues = std::max(epilogues, p.error());
        }
    claim(types + ": every epilogue against a loop in double", epilogues < 1);
    Product p = first;
    for (const auto algorithm : other_algorithms)
        for (uint32_t epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DGELU}) {
            p.algorithm = algorithm, p.epilogue = epilogue, p.beta = 1 - p.beta;
            algorithms = std::max(algorithms, p.error());
        }
    p.algorithm = cuda_cpu::Algorithm::failing;
    claim(types + ": the other algorithms, of which one fails", algorithms < 1 && std::isinf(p.error()));
}

static void test_fp8_products()
{
    double sizes = 0, scales = 0, others = 0;
    constexpr std::array<cudaDataType_t, 2> kinds[] = {
        {CUDA_R_8F_E4M3, CUDA_R_8F_E4M3}, {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2}, {CUDA_R_8F_E5M2, CUDA_R_8F_E4M3}};
    for (const auto& [a, b] : kinds)
        for (cudaDataType_t d : {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F}) {
            Product p{a, b, d};
            p.transpose_a = true;
            sizes =
                std::max(sizes, worst_of(p, {[](Product& q) { q.m = 48, q.n = 80, q.k = 112; },
                                             [](Product& q) { q.pad = 16; }, [](Product& q) { q.m = q.n = q.k = 16; },
                                             [](Product& q) { q.m = 144, q.n = 16, q.k = 528; },
                                             [](Product& q) { q.m = 16, q.n = 272, q.k = 48, q.pad = 0; }}));
            p.m = 304, p.n = 80, p.k = 112;
            for (float beta : {0.0f, 1.0f, -0.5f})
                for (uint32_t epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS})
                    for (float scale : {1.0f, 0.37f, 0.5f}) {   // 0.37: no power of 2
                        p.beta = beta, p.epilogue = epilogue, p.scaled = scale != 1, p.alpha = 2 * scale;
                        p.scale_a = scale, p.scale_b = scale == 1 ? 1 : 4 * scale;
                        scales = std::max(scales, p.error());
                    }
            p.fast_sums = 1;
            for (const auto algorithm : other_algorithms) {
                p.algorithm = algorithm;
                others = std::max(others, p.error());
            }
        }
    claim("FP8: three pairs of kinds, to float, bf16 and half, odd multiples of 16, leading dimensions", sizes < 1);
    claim("FP8: alpha, beta, bias, and scales that are read when the product runs", scales < 1);
    claim("FP8: the other algorithms, and sums that may be fast", others < 1);

    // A product of few tiles and long sums, which oneDNN would split among workers.
    Product p{CUDA_R_8F_E4M3, CUDA_R_8F_E4M3, CUDA_R_32F};
    p.transpose_a = true, p.m = 144, p.n = 400, p.k = 2048;
    const int workers = omp_get_max_threads();
    std::vector<char> bits;
    bool same = true;
    for (int count : {1, 2, 3, 16}) {
        omp_set_num_threads(count);
        same = same && p.error() < 1;
        if (bits.empty()) bits = p.d_bytes;
        same = same && bits == p.d_bytes;
    }
    omp_set_num_threads(workers);
    claim("FP8: 1, 2, 3 and 16 workers have the same bits", same);
}

// ---- what is refused

// A product that is supported; `spoil` makes one that is not. Returns whether heuristic and product say so.
struct Parts {
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulPreferenceOpaque_t preference;
    int a_offset = 0, b_offset = 0, d_offset = 0, aux_offset = 0;
};
using Spoil = void (*)(Parts&);
static bool answers(cublasStatus_t expected, bool of_fp8, Spoil spoil)
{
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
    spoil(p);
    p.desc.aux = memory.data + 1024 + p.aux_offset;
    const float alpha = 1, beta = 0;
    cublasLtContext handle;
    cublasLtMatmulHeuristicResult_t result;
    int found = -1;
    const auto heuristic =
        cublasLtMatmulAlgoGetHeuristic(&handle, &p.desc, &p.a, &p.b, &p.d, &p.d, &p.preference, 1, &result, &found);
    char *const a = memory.data + 4096 + p.a_offset, *const b = memory.data + 8192 + p.b_offset;
    char* const d = memory.data + 12288 + p.d_offset;
    const auto product = cublasLtMatmul(&handle, &p.desc, &alpha, a, &p.a, b, &p.b, &beta, d, &p.d, d, &p.d,
                                        found == 1 ? &result.algo : nullptr, nullptr, 0, nullptr);
    cudaDeviceSynchronize();
    return product == expected && (found == 1) == (heuristic == CUBLAS_STATUS_SUCCESS) &&
           (heuristic == expected || (heuristic == CUBLAS_STATUS_SUCCESS && expected == CUBLAS_STATUS_INVALID_VALUE));
}

struct Answer {
    const char* name;
    cublasStatus_t status;
    Spoil spoil;
};
static std::string wrong_answers(const std::vector<Answer>& table, bool of_fp8)
{
    std::string wrong;
    for (const auto& [name, status, spoil] : table)
        if (!answers(status, of_fp8, spoil)) wrong += std::string(" ") + name + ";";
    return wrong;
}

constexpr auto fine = CUBLAS_STATUS_SUCCESS, unsupported = CUBLAS_STATUS_NOT_SUPPORTED,
               invalid = CUBLAS_STATUS_INVALID_VALUE;
static float a_scale = 1;

static const std::vector<Answer> answers_to_all = {
    {"a product", fine, [](Parts&) {}},
    {"k differs", invalid, [](Parts& p) { p.b.rows = 15; }},
    {"types differ", unsupported, [](Parts& p) { p.b.type = CUDA_R_16F; }},
    {"float to bf16", unsupported, [](Parts& p) { p.a.type = p.b.type = CUDA_R_32F; }},
    {"BGRADB", unsupported, [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BGRADB; }},
    {"short rows of aux", invalid, [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_DGELU, p.desc.aux_ld = 8; }},
    {"a scale without FP8", invalid, [](Parts& p) { p.desc.scale_a = &a_scale; }},
};
static const std::vector<Answer> answers_to_fp8 = {
    {"a product", fine, [](Parts&) {}},
    {"E5M2 and E4M3", fine, [](Parts& p) { p.a.type = CUDA_R_8F_E5M2; }},
    {"a bias", fine, [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BIAS; }},
    {"scales", fine, [](Parts& p) { p.desc.scale_a = p.desc.scale_b = &a_scale; }},
    {"E5M2 twice", unsupported, [](Parts& p) { p.a.type = p.b.type = CUDA_R_8F_E5M2; }},
    {"bf16 operand", unsupported, [](Parts& p) { p.b.type = CUDA_R_16BF; }},
    {"FP8 output", unsupported, [](Parts& p) { p.d.type = CUDA_R_8F_E4M3; }},
    {"A not transposed", unsupported,
     [](Parts& p) {
         p.desc.transpose_a = CUBLAS_OP_N, p.a = {CUDA_R_8F_E4M3, 16, 32, 16};
     }},
    {"B transposed", unsupported,
     [](Parts& p) {
         p.desc.transpose_b = CUBLAS_OP_T, p.b = {CUDA_R_8F_E4M3, 48, 32, 48};
     }},
    {"sums of TF32", unsupported, [](Parts& p) { p.desc.compute = CUBLAS_COMPUTE_32F_FAST_TF32; }},
    {"m of 8", unsupported, [](Parts& p) { p.a.columns = p.d.rows = 8; }},
    {"k of 24", unsupported, [](Parts& p) { p.a.rows = p.b.rows = 24; }},
    {"ld of 40", unsupported, [](Parts& p) { p.a.ld = 40; }},
    {"a batch", unsupported, [](Parts& p) { p.a.batch = p.b.batch = p.d.batch = 2; }},
    {"GELU", unsupported, [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_GELU; }},
    {"bias of float", unsupported,
     [](Parts& p) { p.desc.epilogue = CUBLASLT_EPILOGUE_BIAS, p.desc.bias_type = CUDA_R_32F; }},
    {"scale of C", invalid, [](Parts& p) { p.desc.scale_c = &a_scale; }},
    {"amax of D", invalid, [](Parts& p) { p.desc.amax_d = &a_scale; }},
    {"address of A", invalid, [](Parts& p) { p.a_offset = 8; }},
    {"address of B", invalid, [](Parts& p) { p.b_offset = 8; }},
    {"address of D", invalid, [](Parts& p) { p.d_offset = 8; }},
};

// ---- rounding, captured products, algorithms

using cuda_cpu::set_rounding;

// Whether a product is right under each seed, repeats, and has other bits than under seed 0.
static bool product_is_perturbed(cudaDataType_t in)
{
    Product p{in, in, CUDA_R_32F};
    p.beta = 1;
    p.epilogue = CUBLASLT_EPILOGUE_BIAS;
    std::vector<std::vector<char>> bits;
    bool right = true;
    for (uint64_t seed : {0, 1, 2, 1}) {
        set_rounding(seed);
        right = p.error() < 1 && right;
        bits.push_back(p.d_bytes);
    }
    set_rounding(0);
    return right && bits[0] != bits[1] && bits[0] != bits[2] && bits[1] != bits[2] && bits[1] == bits[3];
}

// How many of a function's results differ from those of seed 0, and the largest difference in units of the last place.
static std::pair<int, int> perturbed_results(float (*function)(float), uint64_t seed)
{
    int differ = 0, worst = 0;
    for (float x = 0.125f; x < 80; x += 0.0625f) {
        const int before = __float_as_int(function(x));
        set_rounding(seed);
        const int distance = std::abs(__float_as_int(function(x)) - before);
        set_rounding(0);
        differ += distance > 0;
        worst = std::max(worst, distance);
    }
    return {differ, worst};
}

static void test_rounding()
{
    claim("CUDA_CPU_ROUNDING: a product differs from seed to seed, by rounding only, and repeats bit for bit",
          product_is_perturbed(CUDA_R_32F) && product_is_perturbed(CUDA_R_16BF) && product_is_perturbed(CUDA_R_16F));
    const std::pair<const char*, float (*)(float)> functions[] = {
        {"__expf", [](float x) { return __expf(-x); }},
        {"exp2_approx", [](float x) { return exp2_approx(-x); }},
        {"rsqrtf", [](float x) { return rsqrtf(x); }},
        {"reciprocal_approx", [](float x) { return reciprocal_approx(x); }},
        {"__logf", [](float x) { return __logf(x); }}};
    for (const auto& [name, function] : functions) {
        if (!cuda_cpu::perturbs_math) break;
        bool right = true;
        for (uint64_t seed = 1; seed <= 8; seed++) {
            const auto [differ, worst] = perturbed_results(function, seed);
            right = right && differ > 50 && worst <= 3;
        }
        claim(std::string("CUDA_CPU_ROUNDING: ") + name + " differs in its last bits", right);
    }
    set_rounding(3);
    claim("CUDA_CPU_ROUNDING: results that every machine returns exactly stay",
          __expf(0) == 1 && rsqrtf(64) == 0.125f && reciprocal_approx(8) == 0.125f && __logf(1) == 0);
    set_rounding(0);
    claim(
        "CUDA_CPU_ROUNDING takes a whole number",
        child_fails(2, "CUDA_CPU_ROUNDING is \"many\"; expected a whole number", "workers", "CUDA_CPU_ROUNDING=many"));
}

// D = alpha A B + beta D, twice in a capture, with operands of 1, alpha, beta and bias changed between the calls and
// after them; in FP8 also the scale, which belongs to the memory of the launch.
static void test_captured_products()
{
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cublasLtContext handle;
    cudaError_t error = cudaSuccess;
    for (const bool of_fp8 : {false, true}) {
        const cudaDataType_t type = of_fp8 ? CUDA_R_8F_E4M3 : CUDA_R_32F;
        cublasLtMatrixLayoutOpaque_t in{static_cast<uint32_t>(type), 16, 16, 16}, out{CUDA_R_32F, 16, 16, 16};
        Array<char> ones(1024);
        Array<float> d(256), bias(32);
        for (size_t i = 0; i < 256; i++) {
            if (of_fp8) reinterpret_cast<__nv_fp8_e4m3*>(ones.data)[i] = __nv_fp8_e4m3(1.0f);
            else reinterpret_cast<float*>(ones.data)[i] = 1;
        }
        for (size_t i = 0; i < 32; i++) bias[i] = i < 16 ? 10 : 100;
        float alpha = 1, beta = 0, scale = NAN;
        cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
        desc.transpose_a = CUBLAS_OP_T;
        if (of_fp8) desc.scale_a = &scale;
        else desc.epilogue = CUBLASLT_EPILOGUE_BIAS;
        const auto multiply = [&] {
            return cublasLtMatmul(&handle, &desc, &alpha, ones.data, &in, ones.data, &in, &beta, d.data, &out, d.data,
                                  &out, nullptr, nullptr, 0, stream);
        };
        const cudaGraphExec_t graph = captured(stream, error, [&] {
            desc.bias = bias.data;
            multiply();
            alpha = 3, beta = 1;
            desc.bias = bias.data + 16;
            multiply();
            alpha = beta = 1000;
        });
        bool right = error == cudaSuccess && d.all_are(0);
        for (float x : {0.5f, 2.0f}) {
            scale = x;
            right = right && cudaGraphLaunch(graph, stream) == cudaSuccess;
            right = right && d.all_are(of_fp8 ? 16 * x + 3 * 16 * x : 16 + 10 + 3 * 16 + 100);
        }
        claim(of_fp8 ? "FP8: a captured product reads its scales at each launch"
                     : "a captured product keeps alpha, beta and its description", right);
        cudaGraphExecDestroy(graph);
        cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
        captured(stream, error, [&] {
            cudaStreamSynchronize(stream);
            status = multiply();
        });
        claim("... and fails in an invalidated capture",
              status == CUBLAS_STATUS_EXECUTION_FAILED && error == cudaErrorStreamCaptureInvalidated);
    }
    cudaGetLastError();
    cudaStreamDestroy(stream);
}

// Prints the number of each algorithm that is offered, with a minus where its state is an error.
static int print_offers(uint32_t reduction_schemes)
{
    cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
    cublasLtMatrixLayoutOpaque_t square{CUDA_R_32F, 8, 8, 8};
    cublasLtMatmulPreferenceOpaque_t preference;
    preference.reduction_schemes = reduction_schemes;
    cublasLtMatmulHeuristicResult_t results[4], checked;
    int found = 0;
    cublasLtMatmulAlgoGetHeuristic(nullptr, &desc, &square, &square, &square, &square, &preference, 4, results, &found);
    for (int i = 0; i < found; i++) {
        const bool usable = cublasLtMatmulAlgoCheck(nullptr, &desc, &square, &square, &square, &square,
                                                    &results[i].algo, &checked) == CUBLAS_STATUS_SUCCESS;
        const bool agrees = (results[i].state == CUBLAS_STATUS_SUCCESS) == usable;
        printf("%s%d ", !agrees ? "?" : usable ? "" : "-", static_cast<int>(results[i].algo.data[0]));
    }
    results[0].algo.data[3] = 1;   // was never offered
    return cublasLtMatmulAlgoCheck(nullptr, &desc, &square, &square, &square, &square, &results[0].algo, &checked) ==
           fine;
}

static void test_algorithms()
{
    const std::string all = "CUDA_CPU_MATMULS=slow,refused,in_place,fast,plain";
    const auto offers = [](const std::string& argument, const std::string& before) {
        const auto [output, code] = run_child(argument, before);
        return code == 0 ? output : "failed";
    };
    claim("one algorithm is offered unless others are asked for; one that was never offered is not usable",
          offers("offers", "") == "0 ");
    claim("those asked for come in their order, as many as fit", offers("offers", all) == "2 -4 3 0 ");
    claim("sums in place are not offered where the preference forbids them",
          offers("offers_without_in_place", all) == "2 -4 0 1 ");
    claim("an unknown algorithm is named", child_fails(2, "\"fastest\"", "offers", "CUDA_CPU_MATMULS=fastest"));
}

// ==== tensor cores ===============================================================================

// Operands are small integers, so that every order of adding gives the same float. Fragments, tiles and chunks are
// written here once more as the PTX manual defines them.

struct Integers : Array<__nv_bfloat16> {
    Integers(size_t count, unsigned seed) : Array(count)
    {
        std::mt19937 random(seed);
        for (size_t i = 0; i < count; i++) data[i] = static_cast<int>(random() % 17) - 8;
    }
    float at(size_t i) const { return data[i]; }
};

// What a kernel leaves out.
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

// cuTensorMapEncodeTiled for bfloat16, with what no test changes.
static CUresult encode(CUtensorMap& map, const void* data, uint32_t rank, const uint64_t* extents,
                       const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B)
{
    return cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), extents,
                                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

constexpr uint32_t ones_of_6[] = {1, 1, 1, 1, 1, 1};

// A tensor (1, rows, 1, 64) in boxes of 64 rows.
static CUtensorMap map_of(const __nv_bfloat16* data, uint64_t rows)
{
    const uint64_t extents[] = {64, 1, rows, 1}, strides[] = {128, 128, rows * 128};
    const uint32_t box[] = {64, 1, 64, 1};
    CUtensorMap map{};
    encode(map, data, 4, extents, strides, box, ones_of_6);
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
    Integers a(256, 1), b(128, 2);
    Array<float> c(128), d(128);
    for (unsigned i = 0; i < 128; i++) c[i] = static_cast<float>(i);
    launch(1, 32, 0, multiply_fragments, d.data, c.data, a.data, b.data);
    bool right = true;
    for (unsigned i = 0; i < 128; i++) {
        float sum = c[i];
        for (unsigned k = 0; k < 16; k++)
            sum += a.at(i / 8 * 16 + k) * b.at(k * 8 + i % 8);
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
    const uint32_t box[] = {static_cast<uint32_t>(columns), 2, 3, 2};
    CUtensorMap map;
    if (encode(map, in.data, 4, extents, strides, box, ones_of_6, swizzle) != CUDA_SUCCESS) return false;
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

struct MapRequest {
    uintptr_t address = 1 << 20;
    uint32_t rank = 4;
    uint64_t extents[6] = {64, 8, 100, 4, 1, 1}, strides[5] = {128, 1024, 102400, 409600, 409600};
    uint32_t box[6] = {64, 1, 64, 1, 1, 1}, steps[6] = {1, 1, 1, 1, 1, 1};
    CUresult status() const
    {
        CUtensorMap map;
        return encode(map, reinterpret_cast<const void*>(address), rank, extents, strides, box, steps);
    }
};

static void test_tensor_maps()
{
    void (*const refused[])(MapRequest&) = {
        [](MapRequest& r) { r.address += 8; },        [](MapRequest& r) { r.address = 0; },
        [](MapRequest& r) { r.rank = 0; },            [](MapRequest& r) { r.rank = 6; },
        [](MapRequest& r) { r.strides[1] += 8; },     [](MapRequest& r) { r.strides[2] = uint64_t{1} << 40; },
        [](MapRequest& r) { r.extents[2] = 0; },      [](MapRequest& r) { r.extents[0] = (uint64_t{1} << 32) + 1; },
        [](MapRequest& r) { r.box[2] = 257; },        [](MapRequest& r) { r.box[1] = 0; },
        [](MapRequest& r) { r.box[0] = 72; },         [](MapRequest& r) { r.box[0] = 4; },
        [](MapRequest& r) { r.steps[1] = 0; },        [](MapRequest& r) { r.steps[3] = 9; }};
    bool right = MapRequest{}.status() == CUDA_SUCCESS;
    for (const auto change : refused) {
        MapRequest request;
        change(request);
        right = right && request.status() == CUDA_ERROR_INVALID_VALUE;
    }
    claim("cuTensorMapEncodeTiled refuses what CUDA refuses: addresses, strides, extents, boxes, steps", right);
    void *known = nullptr, *unknown = &right;
    cudaDriverEntryPointQueryResult found, missing;
    const auto look_up = [](const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
        return cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, result) == cudaSuccess;
    };
    claim("a function of the driver is found by its name",
          look_up("cuTensorMapEncodeTiled", &known, &found) && found == cudaDriverEntryPointSuccess &&
              known == reinterpret_cast<void*>(&cuTensorMapEncodeTiled) &&
              look_up("cuTensorMapDecode", &unknown, &missing) && missing == cudaDriverEntryPointSymbolNotFound &&
              unknown == nullptr);
    if (WARP_SIZE == 1) return;
    for (const auto& [name, swizzle] :
         {std::pair{"swizzled", CU_TENSOR_MAP_SWIZZLE_128B}, std::pair{"not swizzled", CU_TENSOR_MAP_SWIZZLE_NONE}})
        claim(
            std::string("tensor_load: a box of four dimensions lands, ") + name +
                ", with zeros for what is outside of the tensor, all of it or a part",
            in_every_order([swizzle = swizzle] { return boxes_land(swizzle) && boxes_land(swizzle, wholly_outside); }));
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
    Integers a(64 * 64, 1), b(64 * N, 2);
    bool right = true;
    for (bool add : {false, true}) {
        Array<float> d(64 * N);
        for (size_t i = 0; i < d.size; i++) d[i] = static_cast<float>(i % 1000);
        launch_large(1, 128, multiply_tiles<N, B, A, S>, d.data, a.data, b.data, add, a_offset, b_offset, group_bytes);
        for (size_t m = 0; m < 64; m++)
            for (size_t n = 0; n < N; n++) {
                float sum = add ? static_cast<float>((m * N + n) % 1000) : 0;
                for (size_t k = 0; k < 64; k++)
                    sum += a.at(m * 64 + k) * b.at(B == Major::K ? n * 64 + k : k * N + n);
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
    Integers a(64 * 64, 1);
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
    Integers q(64 * 64, 1), k(tiles * 64 * 64, 2);
    for (size_t i = 0; i < q.size; i++)
        q[i] = i / 64 == i % 64 || i / 64 == (i * 7) % 64 ? 1.0f : 0.0f;  // so that s is small
    Array<float> out(4 * 64 * 64);
    launch(4, 160, 4 * 8192 + 64, pipeline<S>, out.data, map_of(q.data, 64), map_of(k.data, tiles * 64),
           static_cast<int>(tiles));
    std::vector<float> expected(64 * 64);
    for (size_t m = 0; m < 64; m++)
        for (size_t j = 0; j < tiles * 64; j++) {
            float s = 0;
            for (size_t d = 0; d < 64; d++) s += q.at(m * 64 + d) * k.at(j * 64 + d);
            for (size_t n = 0; n < 64; n++) expected[m * 64 + n] += s * k.at(j * 64 + n);
        }
    bool right = true;
    for (size_t i = 0; i < out.size; i++) right = right && out[i] == expected[i % expected.size()];
    return right;
}

// Whether a kernel goes wrong under one of a few seeds. It may end the program, so a child runs it.
template <class Check> static bool goes_wrong(Check is_right)
{
    for (uint64_t seed = 1; seed < 9; seed++) {
        cuda_cpu::set_seed(seed);
        if (!is_right()) return true;
    }
    return false;
}

template <Slip S> static bool tiles_go_wrong()
{
    return goes_wrong([] { return tiles_multiply<64, Major::K, From::SHARED, S>(); });
}
template <Slip S> static bool pipeline_goes_wrong() { return goes_wrong(pipeline_is_right<S>); }

struct Demonstration {
    const char* name;
    bool (*goes_wrong)();
};
static const Demonstration demonstrations[] = {
    {"a kernel does not wait for a load",
     [] {
         return pipeline_goes_wrong<Slip::FULL_WAIT>() &&
                goes_wrong([] { return boxes_land<Slip::FULL_WAIT>(CU_TENSOR_MAP_SWIZZLE_128B); });
     }},
    {"a load does not wait until its stage is free", pipeline_goes_wrong<Slip::EMPTY_WAIT>},
    {"a stage is released before the product that reads it has ended", pipeline_goes_wrong<Slip::EARLY_RELEASE>},
    {"the first product's result is read before wgmma_wait", pipeline_goes_wrong<Slip::FIRST_WAIT>},
    {"the last product's result is read before wgmma_wait", pipeline_goes_wrong<Slip::LAST_WAIT>},
    {"fragments are written before wgmma_wait", pipeline_goes_wrong<Slip::FRAGMENTS>},
    {"stores are not followed by async_fence",
     [] { return pipeline_goes_wrong<Slip::ASYNC_FENCE>() && tiles_go_wrong<Slip::ASYNC_FENCE>(); }},
    {"warps do not wait for each other's stores", tiles_go_wrong<Slip::SYNCTHREADS>},
};

static void test_products_of_warpgroups()
{
    claim("wgmma, both operands in shared memory: N of 64, 128 and 256, both majors, assigned and added",
          in_every_order([] {
              return tiles_multiply<64, Major::K, From::SHARED>() && tiles_multiply<128, Major::K, From::SHARED>() &&
                     tiles_multiply<256, Major::K, From::SHARED>() && tiles_multiply<64, Major::MN, From::SHARED>() &&
                     tiles_multiply<128, Major::MN, From::SHARED>() && tiles_multiply<256, Major::MN, From::SHARED>();
          }));
    claim("wgmma, a in registers: N of 64 and 128, both majors", in_every_order([] {
              return tiles_multiply<64, Major::K, From::REGISTERS>() &&
                     tiles_multiply<128, Major::K, From::REGISTERS>() &&
                     tiles_multiply<64, Major::MN, From::REGISTERS>() &&
                     tiles_multiply<128, Major::MN, From::REGISTERS>();
          }));
    claim("wgmma: the stride of groups of 8 rows is the descriptor's",
          tiles_multiply<128, Major::K, From::SHARED>(1024, 32768, 3072) &&
              tiles_multiply<256, Major::MN, From::SHARED>(1024, 32768, 2048));
    set_rounding(5);
    claim("mma and wgmma of integers are exact under CUDA_CPU_ROUNDING",
          mma_multiplies() && fp8_mma_multiplies() && tiles_multiply<64, Major::K, From::SHARED>());
    set_rounding(0);
    claim("wgmma_wait: groups end in their order; under a seed a product under way is NaN",
          groups_end_in_order(false) && under_seeds(1, 2, [] { return groups_end_in_order(true); }));
    claim("a loader and a warpgroup, two products in a chain, work in every order",
          in_every_order(pipeline_is_right<Slip::NONE>));
    for (size_t i = 0; i < std::size(demonstrations); i++)
        claim(std::string("it shows when ") + demonstrations[i].name,
              run_child("slip" + std::to_string(i)).second == 1);
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
    "thread 0 calls tensor_load with a barrier that is not initialised",
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
    "the block ended without waiting for a tensor_load",
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

static int do_misuse(size_t which)
{
    cuda_cpu::set_seed(which >= 26);
    Integers data(64 * 64, 1);
    launch(1, 128, 16384 + 64, misuse, static_cast<int>(which), data.data, map_of(data.data, 64));
    return 0;
}

static void test_tensor_cores()
{
    if (WARP_SIZE == 1) {
        claim("with a warp of 1 thread, tensor cores need 32", child_fails(1, "take warps of 32 threads", "misuse22"));
        return;
    }
    test_warp_instructions();
    test_barriers();
    test_products_of_warpgroups();
    for (size_t i = 0; i < misuses.size(); i++) {
        const auto [output, code] = run_child("misuse" + std::to_string(i));
        const bool is_right = misuses[i].empty();
        claim(is_right ? "a correct call has no message" : "message: " + misuses[i].substr(0, misuses[i].find('\n')),
              is_right ? code == 0 && output.empty() : code == 1 && contains(output, misuses[i]));
    }
}

// ==== emulated GPUs =====================================================================================

// Whether something holds on a card; its queues are empty afterwards.
template <class Check> static bool on(const char* card, Check check)
{
    cuda_cpu::set_card(card);
    const bool holds = check();
    cuda_cpu::set_card("");
    cudaGetLastError();
    return holds;
}

struct ExpectedCard {
    const char *key, *name;
    int capability, multiprocessors;
    size_t kib_by_opt_in, kib_of_multiprocessor;
};
static const ExpectedCard expected_cards[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 90, 132, 227, 228}, {"h200", "NVIDIA H200", 90, 132, 227, 228},
    {"a100", "NVIDIA A100-SXM4-80GB", 80, 108, 163, 164}, {"4090", "NVIDIA GeForce RTX 4090", 89, 128, 99, 100},
    {"l40s", "NVIDIA L40S", 89, 142, 99, 100},            {"t4", "Tesla T4", 75, 40, 64, 64},
    {"b200", "NVIDIA B200", 100, 148, 227, 228}};

static bool describes_itself(const ExpectedCard& e)
{
    cudaDeviceProp p;
    int major = 0, registers = 0, reserved = 0;
    cudaGetDeviceProperties(&p, 0);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaDeviceGetAttribute(&registers, cudaDevAttrMaxRegistersPerBlock, 0);
    cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, 0);
    return p.name == std::string(e.name) && p.major * 10 + p.minor == e.capability && major == p.major &&
           p.multiProcessorCount == e.multiprocessors && p.sharedMemPerBlockOptin == e.kib_by_opt_in << 10 &&
           p.sharedMemPerMultiprocessor == e.kib_of_multiprocessor << 10 && p.sharedMemPerBlock == 48 << 10 &&
           static_cast<size_t>(reserved) == p.sharedMemPerMultiprocessor - p.sharedMemPerBlockOptin &&
           registers == 65536 && p.warpSize == 32;
}

// ---- launches and memory

__global__ void holds_4_kib(float* out)
{
    __shared__ float own[1024];
    own[threadIdx.x] = out[0];
    __syncthreads();
    out[0] = own[(threadIdx.x + 1) % blockDim.x];
}

static cudaError_t launch_with(const char* card, cudaLaunchAttributeID id, unsigned value)
{
    cudaLaunchAttribute attribute{};
    attribute.id = id;
    if (id == cudaLaunchAttributeClusterDimension) attribute.val.clusterDim = {value, 1, 1};
    else attribute.val.programmaticStreamSerializationAllowed = static_cast<int>(value);
    cudaLaunchConfig_t config{};
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaSuccess;
    on(card, [&] { return (error = cudaLaunchKernelEx(&config, nothing)) == cudaSuccess; });
    return error;
}

static void test_card_launches()
{
    std::string wrong;
    for (const ExpectedCard& e : expected_cards)
        if (!on(e.key, [&] { return describes_itself(e) && shared_memory_ends_at(e.kib_by_opt_in << 10); }))
            wrong += std::string(" ") + e.key;
    claim("each card has its name, capability, multiprocessors and shared memory, by opt-in:" + wrong, wrong.empty());
    claim("an unknown card is named, with those that are known",
          child_fails(2, "CUDA_CPU_CARD is \"h900\"; expected one of h100, h200, a100, 4090, l40s, t4, b200", "global",
                      "CUDA_CPU_CARD=h900"));
    claim("a kernel's __shared__ arrays count", on("h100", [] {
              constexpr auto dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
              Array<float> out(1);
              const auto with = [&](size_t bytes) { return launch(1, 1, bytes, holds_4_kib, out.data); };
              return with(44 << 10) == cudaSuccess && with((44 << 10) + 1) == cudaErrorInvalidValue &&
                     cudaFuncSetAttribute(holds_4_kib, dynamic, (223 << 10) + 1) == cudaErrorInvalidValue &&
                     cudaFuncSetAttribute(holds_4_kib, dynamic, 223 << 10) == cudaSuccess &&
                     with(223 << 10) == cudaSuccess;
          }));
    constexpr auto cluster = cudaLaunchAttributeClusterDimension;
    constexpr auto early = cudaLaunchAttributeProgrammaticStreamSerialization;
    claim("clusters are refused, and programmatic launches before capability 9.0",
          launch_with("h100", cluster, 1) == cudaSuccess && launch_with("h100", early, 1) == cudaSuccess &&
              launch_with("a100", early, 1) == cudaErrorNotSupported &&
              launch_with("h100", cluster, 2) == cudaErrorNotSupported);
}

static bool memory_of_a_card()
{
    constexpr size_t mib = 1 << 20;
    size_t before = 0, after = 0, total = 0;
    char *most = nullptr, *more = nullptr, *blocks[3];
    cudaMemGetInfo(&before, &total);
    const size_t pieces = before / (2 * mib) * (2 * mib);
    bool right = total / mib > 79 * 1024 && total / mib < 80 * 1024 && total - before > 100 * mib &&
                 total - before < 2048 * mib;
    right = right && cudaMalloc(&more, before + 1) == cudaErrorMemoryAllocation && more == nullptr;
    right =
        right && cudaMalloc(&most, pieces) == cudaSuccess && cudaMalloc(&more, 2 * mib) == cudaErrorMemoryAllocation;
    if (right) most[pieces - 1] = 1;  // the last byte is there
    right = right && cudaFree(most) == cudaSuccess;
    for (size_t i = 0; i < 3; i++) cudaMalloc(&blocks[i], i < 2 ? 1000 : 2 * mib + 1);
    cudaMemGetInfo(&after, &total);
    right = right && before - after == 2 * mib + 4 * mib && std::isnan(*reinterpret_cast<float*>(blocks[2]));
    for (char* block : blocks) cudaFree(block);
    cudaMemGetInfo(&after, &total);
    return right && after == before;
}

static bool copies_of_a_card()
{
    float host[4] = {}, *block = nullptr;
    cudaMalloc(&block, 16);
    struct { void* to; const void* from; size_t bytes; cudaMemcpyKind kind; cudaError_t expected; } const copies[] = {
        {block, host, 16, cudaMemcpyHostToDevice, cudaSuccess},
        {host, block, 16, cudaMemcpyDefault, cudaSuccess},
        {block, host, 16, cudaMemcpyDeviceToHost, cudaErrorInvalidValue},
        {host, block, 16, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {block, host, 16, cudaMemcpyDeviceToDevice, cudaErrorInvalidValue},
        {block, host, 17, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {block + 1, host, 12, cudaMemcpyHostToDevice, cudaSuccess},
        {block + 1, host, 13, cudaMemcpyHostToDevice, cudaErrorInvalidValue},
        {block, host, 16, static_cast<cudaMemcpyKind>(5), cudaErrorInvalidMemcpyDirection}};
    bool right = cudaMemset(block, 0, 16) == cudaSuccess && cudaMemset(block, 0, 17) == cudaErrorInvalidValue &&
                 cudaMemset(host, 0, 16) == cudaErrorInvalidValue;
    for (const auto& c : copies) right = right && cudaMemcpy(c.to, c.from, c.bytes, c.kind) == c.expected;
    cudaFree(block);
    return right;
}

// ---- streams

__global__ void set_to(float* x, float value) { *x = value; }
__global__ void add_to(float* sum, const float* x) { *sum += *x; }

// Two streams, memory on both sides (pinned holds 7, x and sum 0), and an event.
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
    void upload() const { cudaMemcpyAsync(x, pinned, sizeof(float), cudaMemcpyHostToDevice, copies); }
    void add(cudaStream_t stream) const { launch_on(stream, 1, add_to, sum, x); }
    void set(float* to, float value) const { launch_on(compute, 1, set_to, to, value); }
    float result() const
    {
        float value = 0;
        cudaMemcpyAsync(&value, sum, sizeof(value), cudaMemcpyDeviceToHost, compute);
        cudaStreamSynchronize(compute);
        return value;
    }
};

// What a program does with two streams; returns whether the result is right. Some are right only if one stream (or the
// host) waits for the other where `ordered`.
struct Scenario {
    const char* name;
    bool needs_order;
    bool (*is_right)(TwoStreams& s, bool ordered);
};
static void let_compute_wait(TwoStreams& s, bool ordered)
{
    cudaEventRecord(s.event, s.copies);
    if (ordered) cudaStreamWaitEvent(s.compute, s.event);
}
static const Scenario scenarios[] = {
    {"a kernel waits for a copy in another stream", true,
     [](TwoStreams& s, bool ordered) {
         s.upload();
         let_compute_wait(s, ordered);
         s.add(s.compute);
         return s.result() == 7;
     }},
    {"a copy waits for a kernel in another stream that reads the old value", true,
     [](TwoStreams& s, bool ordered) {
         s.set(s.x, 3);
         cudaStreamSynchronize(s.compute);
         s.add(s.compute);
         cudaEventRecord(s.event, s.compute);
         if (ordered) cudaStreamWaitEvent(s.copies, s.event);
         s.upload();
         cudaStreamSynchronize(s.copies);
         return s.result() == 3;
     }},
    {"pinned memory is used again after the copy from it", true,
     [](TwoStreams& s, bool ordered) {
         s.upload();
         cudaEventRecord(s.event, s.copies);
         if (ordered) cudaEventSynchronize(s.event);
         *s.pinned = 8;
         cudaStreamSynchronize(s.copies);
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
    {"a graph waits, and its launches follow each other", true,
     [](TwoStreams& s, bool ordered) {
         cudaError_t error = cudaSuccess;
         const cudaGraphExec_t graph = captured(s.compute, error, [&] {
             s.add(s.compute);
             launch_on(s.compute, 1, add_to, s.sum, static_cast<const float*>(s.sum));
         });
         s.upload();
         let_compute_wait(s, ordered);
         for (int run = 0; run < 2; run++) cudaGraphLaunch(graph, s.compute);
         cudaGraphExecDestroy(graph);
         return error == cudaSuccess && s.result() == 2 * (2 * 7 + 7);
     }},
    {"a matrix product waits, and keeps its alpha", true,
     [](TwoStreams& s, bool ordered) {
         cublasLtContext handle;
         cublasLtMatmulDescOpaque_t desc{CUBLAS_COMPUTE_32F, CUDA_R_32F};
         cublasLtMatrixLayoutOpaque_t one{CUDA_R_32F, 1, 1, 1};
         float alpha = 1, beta = 0;
         s.upload();
         let_compute_wait(s, ordered);
         cublasLtMatmul(&handle, &desc, &alpha, s.x, &one, s.x, &one, &beta, s.sum, &one, s.sum, &one, nullptr, nullptr,
                        0, s.compute);
         alpha = 2;
         return s.result() == 49;
     }},
    {"a stream waits for what an event has recorded by then, not for what it records later", false,
     [](TwoStreams& s, bool) {
         s.upload();
         let_compute_wait(s, true);
         cudaEventRecord(s.event, s.compute);
         s.add(s.compute);
         return cudaEventSynchronize(s.event) == cudaSuccess && s.result() == 7;
     }},
    {"pageable memory may be used again when the call returns", false,
     [](TwoStreams& s, bool) {
         float pageable = 7;
         cudaMemcpyAsync(s.x, &pageable, sizeof(float), cudaMemcpyHostToDevice, s.compute);
         pageable = 8;
         s.add(s.compute);
         cudaMemcpyAsync(&pageable, s.sum, sizeof(float), cudaMemcpyDeviceToHost, s.compute);
         return pageable == 7;
     }},
    {"cudaMemcpy has read pinned memory when it returns", false,
     [](TwoStreams& s, bool) {
         cudaMemcpy(s.x, s.pinned, sizeof(float), cudaMemcpyHostToDevice);
         *s.pinned = 8;
         s.add(s.compute);
         return s.result() == 7;
     }},
    {"the default stream orders blocking streams, but no others", true,
     [](TwoStreams&, bool ordered) {
         TwoStreams s(ordered ? cudaStreamDefault : cudaStreamNonBlocking);
         s.upload();
         s.add(nullptr);
         launch_on(s.compute, 1, add_to, s.sum, static_cast<const float*>(s.sum));
         return s.result() == 14;
     }},
    {"cudaFree and cudaFreeHost wait for all work", false,
     [](TwoStreams& s, bool) {
         float *device = nullptr, *host = nullptr;
         cudaMalloc(&device, sizeof(float));
         cudaMallocHost(&host, sizeof(float));
         s.set(s.sum, 3);
         cudaFree(device);
         const bool right = *s.sum == 3;
         s.set(s.sum, 4);
         cudaFreeHost(host);
         return right && *s.sum == 4;
     }},
    {"a queue holds 1024 pieces of work, then a launch waits", false,
     [](TwoStreams& s, bool) {
         for (int i = 0; i < 6000; i++) s.add(s.compute);
         return s.compute->queue.size() <= 1024;
     }},
    {"an elapsed time is known once both events are over", true,
     [](TwoStreams& s, bool ordered) {
         float milliseconds = -1;
         cudaEvent_t end;
         cudaEventCreate(&end);
         cudaEventRecord(s.event, s.compute);
         cudaEventRecord(end, s.compute);
         if (ordered) cudaEventSynchronize(end);
         const cudaError_t error = cudaEventElapsedTime(&milliseconds, s.event, end);
         cudaEventDestroy(end);
         return error == cudaSuccess && milliseconds >= 0;
     }},
    {"an event is not ready at once", true,
     [](TwoStreams& s, bool ordered) {
         for (int i = 0; i < 20; i++) s.add(s.compute);
         cudaEventRecord(s.event, s.compute);
         int tries = 0;
         while (ordered && cudaEventQuery(s.event) == cudaErrorNotReady && tries < 100000) tries++;
         return cudaEventQuery(s.event) == cudaSuccess;
     }},
};

static void test_card_streams()
{
    constexpr uint64_t seeds = 41;
    for (const Scenario& scenario : scenarios) {
        const auto is_right = [&](bool ordered) {
            TwoStreams s;
            return scenario.is_right(s, ordered);
        };
        const auto under_each_seed = [&](bool ordered) {
            return under_seeds(1, seeds, [&] { return on("h100", [&] { return is_right(ordered); }); });
        };
        const bool shows = !scenario.needs_order || !under_each_seed(false);
        claim(scenario.name + std::string(scenario.needs_order ? "; it shows where it does not wait" : ""),
              under_each_seed(true) && shows && is_right(true));
    }
    claim("without a card each call is done when it returns", [] {
        TwoStreams s;
        return scenarios[0].is_right(s, false);
    }());
    claim("an error of queued work is returned by calls that wait, from then on", on("h100", [] {
              TwoStreams s;
              bool right = cuda_cpu::hand_over(s.compute, [] { return cudaErrorUnknown; }) == cudaSuccess;
              for (int call = 0; call < 2; call++)
                  right = right && cudaStreamSynchronize(s.compute) == cudaErrorUnknown;
              cuda_cpu::late_error() = cudaSuccess;
              return right;
          }));
    cudaEvent_t untimed;
    cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming);
    cudaEventRecord(untimed);
    float milliseconds = 0;
    claim("an event without timing has no time",
          cudaEventElapsedTime(&milliseconds, untimed, untimed) == cudaErrorInvalidResourceHandle);
    cudaEventDestroy(untimed);
    cudaGetLastError();
}

// ---- capture

// What a call returns on a card while a stream is captured, and what the capture's end returns.
using Call = cudaError_t (*)(TwoStreams&);
static std::pair<cudaError_t, cudaError_t> in_capture(cudaStreamCaptureMode mode, unsigned flags, Call call)
{
    std::pair<cudaError_t, cudaError_t> errors;
    on("h100", [&] {
        TwoStreams s(flags);
        cudaGraph_t graph = nullptr;
        cudaStreamBeginCapture(s.compute, mode);
        errors.first = call(s);
        errors.second = cudaStreamEndCapture(s.compute, &graph);
        cudaGraphDestroy(graph);
        return true;
    });
    return errors;
}

static void test_card_captures()
{
    constexpr auto copy = [](TwoStreams& s) { return cudaMemcpy(s.x, s.pinned, 4, cudaMemcpyHostToDevice); };
    constexpr auto allocate = [](TwoStreams&) {
        void* block = nullptr;
        const cudaError_t error = cudaMalloc(&block, 16);
        cudaFree(block);
        return error;
    };
    const struct { const char* name; bool even_if_relaxed; Call call; } calls[] = {
        {"cudaMalloc", false, allocate},
        {"cudaMemcpy", false, copy},
        {"cudaStreamSynchronize of another", false, [](TwoStreams& s) { return cudaStreamSynchronize(s.copies); }},
        {"cudaEventSynchronize", false, [](TwoStreams& s) { return cudaEventSynchronize(s.event); }},
        {"cudaEventQuery", false, [](TwoStreams& s) { return cudaEventQuery(s.event); }},
        {"cudaDeviceSynchronize", true, [](TwoStreams&) { return cudaDeviceSynchronize(); }},
        {"cudaStreamSynchronize", true, [](TwoStreams& s) { return cudaStreamSynchronize(s.compute); }},
        {"cudaStreamQuery", true, [](TwoStreams& s) { return cudaStreamQuery(s.compute); }}};
    const std::pair refused{cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated},
        accepted{cudaSuccess, cudaSuccess}, implicit{cudaErrorStreamCaptureImplicit, cudaErrorStreamCaptureInvalidated};
    std::string wrong;
    for (const auto& [name, even_if_relaxed, call] : calls)
        for (const auto mode :
             {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed})
            if (in_capture(mode, cudaStreamNonBlocking, call) !=
                (mode == cudaStreamCaptureModeRelaxed && !even_if_relaxed ? accepted : refused))
                wrong += std::string(" ") + name;
    claim("a capture refuses calls that wait for it, and unless relaxed those that allocate or might wait:" + wrong,
          wrong.empty());
    constexpr auto launch_by_default = [](TwoStreams& s) { return launch_on(nullptr, 1, set_to, s.x, 1.0f); };
    claim("the default stream cannot be used while a blocking stream is captured",
          in_capture(cudaStreamCaptureModeRelaxed, cudaStreamDefault, launch_by_default) == implicit &&
              in_capture(cudaStreamCaptureModeRelaxed, cudaStreamDefault, copy) == implicit &&
              in_capture(cudaStreamCaptureModeRelaxed, cudaStreamNonBlocking, launch_by_default) == accepted);
    cudaGetLastError();
}

// ---- cuBLASLt and instructions

constexpr uint32_t bias_epilogue = CUBLASLT_EPILOGUE_BIAS, dgelu = CUBLASLT_EPILOGUE_DGELU;
static void promise(Parts& p, uint32_t bytes) { std::fill_n(p.preference.alignments, 4, bytes); }
static const std::vector<Answer> answers_of_cards = {
    {"a bias", fine, [](Parts& p) { p.desc.epilogue = bias_epilogue, p.desc.bias_type = CUDA_R_16BF; }},
    {"a bias of another type", unsupported,
     [](Parts& p) { p.desc.epilogue = bias_epilogue, p.desc.bias_type = CUDA_R_32F; }},
    {"a bias of float to float", fine,
     [](Parts& p) { p.desc.epilogue = bias_epilogue, p.d.type = CUDA_R_32F, p.desc.bias_type = CUDA_R_32F; }},
    {"aux", fine, [](Parts& p) { p.desc.epilogue = dgelu, p.aux_offset = 16; }},
    {"aux of another type", unsupported, [](Parts& p) { p.desc.epilogue = dgelu, p.desc.aux_type = CUDA_R_32F; }},
    {"aux with rows of 20", unsupported, [](Parts& p) { p.desc.epilogue = dgelu, p.desc.aux_ld = 20; }},
    {"aux at 8 bytes", unsupported, [](Parts& p) { p.desc.epilogue = dgelu, p.aux_offset = 8; }},
    {"A at 16 bytes", fine, [](Parts& p) { p.a_offset = 16; }},
    {"A at 8 bytes", invalid, [](Parts& p) { p.a_offset = 8; }},
    {"D at 2 bytes", invalid, [](Parts& p) { p.d_offset = 2; }},
    {"A at 8 bytes, as promised", fine, [](Parts& p) { promise(p, 8), p.a_offset = 8; }},
    {"A at 4 bytes, 8 promised", invalid, [](Parts& p) { promise(p, 8), p.a_offset = 4; }},
};

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
    Integers data(64 * 64, 1);
    cudaDeviceSynchronize();
    launch(1, 128, 16384 + 64, one_instruction, which, data.data, map_of(data.data, 64));
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 3;
}

static void test_card_instructions()
{
    const struct { const char* name; int least, most; } table[] = {
        {"ldmatrix", 75, 999},     {"mma_m16n8k16", 80, 999},  {"copy_async", 80, 999},
        {"barrier_init", 90, 999}, {"barrier_init", 90, 999},  {"async_fence", 90, 999},
        {"wgmma_fence", 90, 90},   {"keep_registers", 90, 90}, {"named_barrier_wait", 75, 999},
        {"mma_m16n8k32_e4m3", 89, 999}};
    for (const char* card : {"t4", "a100", "4090", "h100", "b200"}) {
        const auto* expected = std::find_if(std::begin(expected_cards), std::end(expected_cards),
                                            [&](const ExpectedCard& e) { return e.key == std::string(card); });
        std::string wrong;
        for (size_t i = 0; i < std::size(table); i++) {
            const auto [output, code] =
                run_child("instruction" + std::to_string(i), std::string("CUDA_CPU_CARD=") + card);
            const bool has = expected->capability >= table[i].least && expected->capability <= table[i].most;
            const std::string illegal =
                std::string("calls ") + table[i].name + " and that is an illegal instruction on ";
            if (has ? code != 0 || !output.empty() : code != 1 || !contains(output, illegal))
                wrong += std::string(" ") + table[i].name;
        }
        const bool maps = on(card, [] { return MapRequest{}.status() == CUDA_SUCCESS; });
        claim(std::string("tensor-core instructions and tensor maps of a ") + card + ":" + wrong,
              wrong.empty() && maps == (expected->capability >= 90));
    }
}

static void test_cards()
{
    if (WARP_SIZE == 1) {
        claim("with a warp of 1 thread there are no cards",
              child_fails(2, "takes a build with -DWARP_SIZE=32", "global", "CUDA_CPU_CARD=h100"));
        return;
    }
    test_card_launches();
    claim("a card has its own memory, in pieces of 2 MiB, less a context's; it is NaN at first; more is refused",
          on("h100", memory_of_a_card));
    claim("a card distinguishes its own memory from the host's, and knows where a block ends",
          on("h100", copies_of_a_card));
    test_card_streams();
    test_card_captures();
    for (const char* card : {"4090", "h100", "b200"})
        claim(std::string("FP8 is multiplied on a ") + card,
              on(card, [] { return answers(fine, true, [](Parts&) {}); }));
    for (const char* card : {"a100", "t4"})
        claim(std::string("... but not on a ") + card,
              on(card, [] { return answers(unsupported, true, [](Parts&) {}); }));
    std::string wrong;
    on("h100", [&] {
        wrong = wrong_answers(answers_of_cards, false);
        return true;
    });
    claim("cuBLASLt's rules for types and alignment of epilogues and operands:" + wrong, wrong.empty());
    test_card_instructions();
}

// ==== what public programs use ==========================================================================

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
              sums_of<double>(0.125) &&
              after_all<__nv_bfloat16>(0, [](auto* n, unsigned) { return atomicAdd(n, 1); }).first == 256.0f);
    const auto wrapped = after_all<unsigned>(0, [](unsigned* n, unsigned) { return atomicInc(n, 99); });
    const auto down = after_all<unsigned>(0, [](unsigned* n, unsigned) { return atomicDec(n, 99); });
    claim("atomicInc wraps above its bound, atomicDec below 0",
          wrapped.first == 56 && wrapped.second.back() == 99 && down.first == 44 && down.second.back() == 99);
    const auto least = after_all<int>(7, [](int* n, unsigned t) { return atomicMin(n, static_cast<int>(t) - 100); });
    const auto most =
        after_all<unsigned long long>(0, [](auto* n, unsigned t) { return atomicMax(n, t + (1ull << 33)); });
    claim("atomicMin and atomicMax, also of 64 bits", least.first == -100 && most.first == (1ull << 33) + 255);
    const auto swapped = after_all<int>(1000, [](int* n, unsigned t) { return atomicExch(n, static_cast<int>(t)); });
    std::vector<int> all = swapped.second;   // what the threads saw, and what is left
    all.push_back(swapped.first);
    std::sort(all.begin(), all.end());
    bool each_once = all.back() == 1000;
    for (int i = 0; i < 256; i++) each_once = each_once && all[static_cast<size_t>(i)] == i;
    claim("atomicExch: each value is seen once", each_once);
    const auto won = after_all<int>(-1, [](int* n, unsigned t) { return atomicCAS(n, -1, static_cast<int>(t)); });
    claim("atomicCAS: one of all wins",
          std::count(won.second.begin(), won.second.end(), -1) == 1 && won.second[1] == won.first);
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
    unsigned wrong = block.size() != blockDim.x * blockDim.y || tile.thread_rank() != rank % size;
    wrong += tile.size() != size || warp.meta_group_rank() != rank / warpSize;
    wrong += warp.meta_group_size() != (block.size() + warpSize - 1) / warpSize;
    wrong += tile.meta_group_rank() != rank % warpSize / size || tile.meta_group_size() != warpSize / size;
    wrong += any_group.size() != size || any_group.thread_rank() != rank % size;
    const unsigned first = rank / size * size;
    wrong += cg::reduce(tile, rank, cg::plus<unsigned>()) != size * first + size * (size - 1) / 2;
    wrong += cg::reduce(tile, rank, cg::greater<unsigned>()) != first + size - 1;
    wrong += cg::reduce(tile, rank, cg::less<unsigned>()) != first;
    wrong += cg::inclusive_scan(tile, 2u) != 2 * (rank % size + 1) || cg::exclusive_scan(tile, 2u) != 2 * (rank % size);
    wrong += tile.shfl(rank, size - 1) != first + size - 1 || tile.shfl_xor(rank, size / 2) != (rank ^ size / 2);
    wrong += tile.shfl_down(rank, 1) != (rank % size == size - 1 ? rank : rank + 1);
    wrong += tile.shfl_up(rank, 1) != (rank % size == 0 ? rank : rank - 1);
    wrong += tile.ballot(rank % size == 0) != 1 || !tile.any(rank % size == 0);
    wrong += tile.all(rank % size == 0) != (size == 1);
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
__global__ void missing_arrival()
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
              out[95] = 1;
              cuda_cpu::launch(use_groups, {1, dim3(24, 4)})(out.data);
              return out.all_are(0);
          }));
    claim("a block's barriers in shared memory end phase after phase", in_every_order([] {
        Array<float> in(8 * 64), out(8 * 64);
        bool right = true;
        for (unsigned i = 0; i < in.size; i++) in[i] = static_cast<float>(i);
        cuda_cpu::launch(copy_in_stages, {1, 64})(in.data, out.data);
        for (unsigned i = 0; i < out.size; i++) right = right && out[i] == in[i / 64 * 64 + 63 - i % 64];
        return right;
    }));
    claim("a deadlock there is reported", child_fails(1, "threads 0-1: in cuda::barrier::wait", "missing_arrival"));
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

static bool symbols_are_copied()
{
    const float table[] = {1, 2, 3, 4};
    Array<float> out(4);
    int counter = 0;
    const bool copied = cudaMemcpyToSymbol(table_of_device, table, sizeof(table)) == cudaSuccess &&
                        cudaMemcpyToSymbol(table_of_device, table, 4, 12) == cudaSuccess &&
                        cudaMemcpyToSymbol(table_of_device, table, 8, 12) == cudaErrorInvalidValue;
    cudaGetLastError();
    cuda_cpu::launch(read_symbols, {1, 4})(out.data);
    return copied && cudaMemcpyFromSymbol(&counter, counter_of_device, sizeof(int)) == cudaSuccess && counter == 6 &&
           out.values() == std::vector<float>({1, 2, 3, 1});
}

static bool other_memory_works()
{
    float *managed = nullptr, *ordered = nullptr;
    size_t pitch = 0;
    char *rows = nullptr, part[6];
    return cudaMallocManaged(&managed, 4) == cudaSuccess && (*managed = 1) == 1 &&
           cudaMemPrefetchAsync(managed, 4, 0) == cudaSuccess && cudaFree(managed) == cudaSuccess &&
           cudaMallocAsync(&ordered, 4, nullptr) == cudaSuccess && cudaFreeAsync(ordered, nullptr) == cudaSuccess &&
           cudaMallocPitch(&rows, &pitch, 3, 2) == cudaSuccess && pitch >= 3 &&
           cudaMemcpy2D(rows, pitch, "abcdef", 3, 3, 2, cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaMemset2D(rows, pitch, 'x', 1, 2) == cudaSuccess &&
           cudaMemcpy2D(part, 3, rows, pitch, 3, 2, cudaMemcpyDeviceToHost) == cudaSuccess &&
           std::string(part, 6) == "xbcxef" && cudaFree(rows) == cudaSuccess;
}

static void test_other_calls()
{
    claim("variables of the device are copied to and from, within their bounds", symbols_are_copied());
    claim("managed memory, stream-ordered memory, pitched rows", other_memory_works());
    Array<float> out(4);
    int a = 3, blocks = 0, grid = 0, block = 0;
    double b = 0.5;
    float* where = out.data;
    void* arguments[] = {&where, &a, &b};
    claim("cudaLaunchKernel takes pointers to its arguments",
          cudaLaunchKernel(by_old_launch, 1, 1, arguments, 0, nullptr) == cudaSuccess && out[0] == 3.5f);
    cuda_cpu::launch(by_old_launch, {0, 1})(out.data, 1, 1);
    claim("a refused launch leaves its error for cudaGetLastError",
          cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    std::string order;
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaLaunchHostFunc(stream, [](void* text) { *static_cast<std::string*>(text) += "a"; }, &order);
    cudaStreamAddCallback(
        stream, [](cudaStream_t, cudaError_t, void* text) { *static_cast<std::string*>(text) += "b"; }, &order, 0);
    claim("a stream calls the host's functions in order",
          cudaStreamSynchronize(stream) == cudaSuccess && order == "ab" && cudaStreamDestroy(stream) == cudaSuccess);
    const bool bounded = cudaOccupancyMaxPotentialBlockSize(&grid, &block, asked_about<8>) == cudaSuccess;
    const auto active = [&](size_t shared) {
        return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, asked_about<8>, 256, shared);
    };
    claim("occupancy: threads, shared memory and launch bounds count",
          bounded && block == (cuda_cpu::has_launch_bounds ? 256 : 1024) && grid > 0 &&
              active(100 * 1024) == cudaSuccess && blocks == 2 && active(0) == cudaSuccess && blocks == 4);
    claim("calls with nothing to do succeed",
          cudaProfilerStart() == cudaSuccess && cudaProfilerStop() == cudaSuccess && cudaDeviceReset() == cudaSuccess &&
              cudaFuncSetCacheConfig(by_old_launch, cudaFuncCachePreferL1) == cudaSuccess);
}

// A product of cuBLAS with batch 3, in all four ways to transpose and with padded rows, in one call or in three,
// against cublasLtMatmul with the same memory.
static bool cublas_agrees(cudaDataType_t type, bool one_by_one)
{
    constexpr int batch = 3, m = 7, n = 5, k = 33, ldc = m + 3;
    cublasHandle_t handle;
    cublasCreate(&handle);
    bool same = true;
    for (int ways = 0; ways < 4; ways++) {
        Product p{type, type, type};
        p.m = m, p.n = n, p.k = k, p.batch = batch, p.pad = 3, p.alpha = 0.5f, p.beta = 2;
        p.transpose_a = ways & 1, p.transpose_b = ways & 2;
        std::mt19937 random(5);
        const auto numbers = [&](int64_t count) { return Numbers(type, static_cast<size_t>(count), random); };
        const Numbers a = numbers(p.stride_a() * batch), b = numbers(p.stride_b() * batch), none = numbers(m);
        Numbers expected = numbers(p.stride_d() * batch), aux = numbers(p.stride_d());
        std::vector<char> c = expected.bytes;
        same = same && p.run(a, b, expected, aux, none);
        const auto op_a = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
        const int64_t bytes = type == CUDA_R_32F ? 4 : 2;
        for (int i = 0; i < batch && one_by_one; i++)
            cublasGemmEx(handle, op_a, op_b, m, n, k, &p.alpha, a.bytes.data() + i * p.stride_a() * bytes, type,
                         p.lda(), b.bytes.data() + i * p.stride_b() * bytes, type, p.ldb(), &p.beta,
                         c.data() + i * p.stride_d() * bytes, type, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        if (!one_by_one)
            cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, &p.alpha, a.bytes.data(), type, p.lda(),
                                       p.stride_a(), b.bytes.data(), type, p.ldb(), p.stride_b(), &p.beta, c.data(),
                                       type, ldc, p.stride_d(), batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
        for (size_t i = 0; i < static_cast<size_t>(p.stride_d() * batch);
             i++)  // batches may be summed in another order
            same = same &&
                   std::fabs(element(type, c, i) - element(type, expected.bytes, i)) < (bytes == 4 ? 1e-5f : 0.04f);
    }
    cublasDestroy(handle);
    return same;
}

static void test_cublas()
{
    claim("cuBLAS: products of float and bfloat16, one by one and strided",
          cublas_agrees(CUDA_R_32F, true) && cublas_agrees(CUDA_R_32F, false) && cublas_agrees(CUDA_R_16BF, true) &&
              cublas_agrees(CUDA_R_16BF, false));
    cublasHandle_t handle;
    cublasCreate(&handle);
    const float alpha = 2, beta = 1;
    Array<float> matrix(6), x(6), y(6);  // 2 x 3, its columns 1 2, 3 4, 5 6
    for (size_t i = 0; i < 6; i++)
        matrix[i] = static_cast<float>(i + 1), x[i] = static_cast<float>(i % 2 == 0), y[i] = 10;
    bool right = cublasSgemv(handle, CUBLAS_OP_N, 2, 3, &alpha, matrix.data, 2, x.data, 2, &beta, y.data, 3) == fine &&
                 y.values() == std::vector<float>({28, 10, 10, 34, 10, 10});
    right =
        right && cublasSgemv(handle, CUBLAS_OP_T, 2, 3, &alpha, matrix.data, 2, x.data, 1, &beta, y.data, 1) == fine;
    claim("cuBLAS: a matrix by a vector with steps, and its transpose",
          right && y.values() == std::vector<float>({30, 16, 20, 34, 10, 10}));
    const float numbers[] = {1, 2, 3};
    float every_second[6] = {};
    claim("cuBLAS: vectors go to the device and back, with steps",
          cublasSetVector(3, 4, numbers, 1, x.data, 2) == fine && x[2] == 2 && x[4] == 3 &&
              cublasGetVector(3, 4, x.data, 2, every_second, 2) == fine && every_second[4] == 3 &&
              every_second[3] == 0);
    const auto sgemm = [&](int m, int lda) {
        return cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, 2, 2, &alpha, x.data, lda, x.data, 2, &beta, y.data, 2);
    };
    claim("cuBLAS: unsupported and invalid products are refused, an empty one succeeds",
          cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &alpha, x.data, CUDA_R_16F, 2, x.data, CUDA_R_16F, 2,
                       &beta, y.data, CUDA_R_16F, 2, CUBLAS_COMPUTE_16F, CUBLAS_GEMM_DEFAULT) == unsupported &&
              sgemm(2, 1) == invalid && sgemm(0, 2) == fine);
    cublasDestroy(handle);
}

// ==== main ==============================================================================================

static std::vector<std::string> wanted;   // by --only: beginnings of names
static bool listing = false;

static void test(const std::string& name, const std::function<void()>& function)
{
    const auto begins = [&](const std::string& word) { return name.rfind(word, 0) == 0; };
    if (!wanted.empty() && std::none_of(wanted.begin(), wanted.end(), begins)) return;
    printf("%s\n", name.c_str());
    if (listing) return;
    const double begin = omp_get_wtime();
    function();
    printf("        %.1f s\n", omp_get_wtime() - begin);
}

// What a child does; returns its exit code.
static int run_as_child(const std::string& what)
{
    const auto number_after = [&](const char* word) { return atoi(what.c_str() + strlen(word)); };
    if (what == "offers") return print_offers(CUBLASLT_REDUCTION_SCHEME_MASK);
    if (what == "offers_without_in_place") return print_offers(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    if (what == "missing_arrival") cuda_cpu::launch(missing_arrival, {1, 2})();
    if (what.rfind("misuse", 0) == 0) return do_misuse(static_cast<size_t>(number_after("misuse")));
    if (what.rfind("slip", 0) == 0) return demonstrations[number_after("slip")].goes_wrong() ? 1 : 0;
    if (what.rfind("instruction", 0) == 0) return run_instruction(number_after("instruction"));
    return do_fatal(what);
}

static void test_refusals()
{
    const std::string wrong = wrong_answers(answers_to_all, false), of_fp8 = wrong_answers(answers_to_fp8, true);
    claim("unsupported products are refused, and sizes that do not fit:" + wrong, wrong.empty());
    claim("FP8: refused are other types, forms, sizes, alignments, epilogues and scales:" + of_fp8, of_fp8.empty());
}

int main(int argc, char** argv)
{
    const std::string first = argc > 1 ? argv[1] : "";
    if (first == "workers") return print_workers(argc, argv);
    listing = first == "--list";
    if (argc == 3 && first == "--only") {
        std::istringstream names(argv[2]);
        for (std::string name; std::getline(names, name, ',');) wanted.push_back(name);
    }
    if (argc == 2 && !listing) return run_as_child(first);
    if (!listing) printf("WARP_SIZE %d, %d workers\n", WARP_SIZE, omp_get_max_threads());
    test("blocks", test_blocks);
    test("warps", test_warps);
    test("deaths", test_deaths);
    test("workers", test_workers);
    test("host", test_host);
    test("graphs", test_graphs);
    test("numbers", test_numbers);
    test("short floats", test_short_floats);
    test("products: float", [] { test_products(CUDA_R_32F, CUDA_R_32F, "float"); });
    test("products: bf16 to float", [] { test_products(CUDA_R_16BF, CUDA_R_32F, "bf16 to float"); });
    test("products: bf16", [] { test_products(CUDA_R_16BF, CUDA_R_16BF, "bf16"); });
    test("products: fp16 to float", [] { test_products(CUDA_R_16F, CUDA_R_32F, "fp16 to float"); });
    test("products: fp16", [] { test_products(CUDA_R_16F, CUDA_R_16F, "fp16"); });
    test("products: fp8", test_fp8_products);
    test("refusals", test_refusals);
    test("rounding", test_rounding);
    test("captured products", test_captured_products);
    test("algorithms", test_algorithms);
    test("tensor maps", test_tensor_maps);
    test("tensor cores", test_tensor_cores);
    test("atomics", test_atomics);
    test("groups", test_groups);
    test("other calls", test_other_calls);
    test("cublas", test_cublas);
    test("cards", test_cards);
    if (!listing) printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
