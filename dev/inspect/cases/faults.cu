// Programs with what is an error on a GPU but not on a CPU, and programs without an error, selected by an argument, for
// test_inspect.py. A comment after an access has the arguments for which the report must name this line.
#include <cstdio>
#include <cstring>
#include <vector>
struct Pair { float* a; };
__global__ void fill(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = i;  // malloc, vector, stack
}
__global__ void by_struct(Pair p) {
    p.a[threadIdx.x] = 1;  // new
}
template <class F> __global__ void call(F f) { f(threadIdx.x); }
__global__ void one_thread(float* out) {
    float local[4];
    for (int i = 0; i < 4; i++) local[i] = out[i];
    float* mine = new float(local[1]);
    out[0] = *mine;
    delete mine;
}
float sum_of(const float* x, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i];  // host-read
    return sum;
}
template <class T> __global__ void load_as(float* out, const float* in, int C) {
    T v = *reinterpret_cast<const T*>(in + threadIdx.x * C);  // float4, float2
    out[threadIdx.x] = v.x;
}
__global__ void store(char* out) {
    *reinterpret_cast<int*>(out + threadIdx.x * 4 + 2) = 3;  // int
}
__global__ void add(char* out) {
    atomicAdd(reinterpret_cast<int*>(out + 2), 1);  // atomic
}
__global__ void shared_pack(float* out) {
    __shared__ float a, s[5], t[128];
    a = s[threadIdx.x % 5] = t[threadIdx.x] = 1;
    __syncthreads();
    float4 v = *reinterpret_cast<float4*>(t + threadIdx.x / 4 * 4);
    out[threadIdx.x] = v.x + a;
}
__global__ void if_else(float* out) {
    __shared__ float s[64];
    if (threadIdx.x < 32) {
        s[threadIdx.x] = 1;
        __syncthreads();  // if-else
    } else {
        s[threadIdx.x] = 2;
        __syncthreads();
    }
    out[threadIdx.x] = s[threadIdx.x ^ 32];
}
__global__ void partial(float* out) {
    if (threadIdx.x < 16)
        __syncthreads();  // partial
    out[threadIdx.x] = 1;
}
__global__ void early_return(float* out, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = 1;
    if (threadIdx.x >= n) return;
    __syncthreads();
    out[threadIdx.x] = s[n - 1 - threadIdx.x];
}
__global__ void shuffle(float* out) {
    float v = threadIdx.x;
    if (threadIdx.x < 8)
        v += __shfl_down_sync(0xffffffff, v, 4);  // shuffle
    out[threadIdx.x] = v;
}
__global__ void stuck(float* out) {
    float v = threadIdx.x;
    if (threadIdx.x < 8)
        v += __shfl_xor_sync(0xffffffff, v, 4);  // stuck
    __syncthreads();
    out[threadIdx.x] = v;
}
__global__ void uniform(float* out, int n) {
    __shared__ float s[128];
    for (int i = 0; i < n; i++) {
        s[threadIdx.x] = i;
        __syncthreads();
        if (threadIdx.x < 64) out[threadIdx.x] += s[127 - threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.x < 8) s[threadIdx.x] = __shfl_xor_sync(0xff, s[threadIdx.x], 4);
}
__global__ void spin(volatile int* flags) {
    __shared__ volatile int ready;
    if (threadIdx.x == 0) ready = 0;
    __syncthreads();
    if (threadIdx.x == 0) while (ready == 0) {}
    if (threadIdx.x == blockDim.x - 1) ready = 1;
    else while (flags[threadIdx.x + 1] == 0) {}
    flags[threadIdx.x] = 1;
}
__global__ void in_turn(int* turn) {   // the last thread first
    const int mine = blockDim.x - 1 - threadIdx.x;
    while (atomicCAS(turn, mine, mine + 1) != mine) {}
}
__global__ void forever(int* flag) { for (unsigned i = 0;; i++) if (i * i == 7) *flag = 1; }
__global__ void waits_forever(volatile int* flag) { while (*flag != 7) {} }
__global__ void count(int* sum) { atomicAdd(sum, 1); }

int main(int argc, char** argv) {
    const auto is = [&](const char* name) { return strcmp(argc > 1 ? argv[1] : "allowed", name) == 0; };
    float *d, *managed, *pinned, host[256] = {}, factor = 2;
    cudaMalloc(&d, 4000);
    if (is("host-copy"))
        memcpy(d, host, sizeof host);  // host-copy
    cudaMemset(d, 0, 4000);
    int* counts = reinterpret_cast<int*>(d);
    std::vector<float> v(1000);
    if (is("malloc")) fill<<<4, 256>>>(static_cast<float*>(malloc(4000)), 1000);
    if (is("vector")) fill<<<4, 256>>>(v.data(), 1000);
    if (is("stack")) fill<<<1, 256>>>(host, 256);
    if (is("new")) by_struct<<<1, 32>>>({new float[32]});
    const auto by_reference = [&](int i) { d[i] = factor; };  // captures
    if (is("captures")) call<<<1, 32>>>(by_reference);
    if (is("host-read")) {
        fill<<<4, 256>>>(d, 1000);
        printf("%g\n", sum_of(d, 1000));
    }
    if (is("allowed")) {
        cudaMallocManaged(&managed, 4000);
        cudaMallocHost(&pinned, 4000);
        for (float* each : {managed, pinned, d}) fill<<<4, 256>>>(each, 1000);
        one_thread<<<1, 1>>>(d);
        call<<<1, 32>>>([=](int i) { d[i] = factor; });
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        cudaStreamCreate(&stream);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        fill<<<2, 32, 0, stream>>>(d, 40);
        cudaStreamEndCapture(stream, &graph);
        cudaGraphInstantiate(&executable, graph);
        cudaGraphLaunch(executable, stream);
        cudaMemcpy(v.data(), d, 4000, cudaMemcpyDeviceToHost);
        printf("sum %g\n", sum_of(managed, 4) + sum_of(pinned, 4) + v[39]);
    }
    if (is("float4")) load_as<float4><<<1, 32>>>(d, d + 500, 5);
    if (is("float2")) load_as<float2><<<1, 1>>>(d, d + 501, 1);
    if (is("aligned")) load_as<float4><<<1, 32>>>(d, d + 500, 4), shared_pack<<<1, 128>>>(d);
    if (is("int")) store<<<1, 32>>>(reinterpret_cast<char*>(d));
    if (is("atomic")) add<<<1, 1>>>(reinterpret_cast<char*>(d));
    if (is("if-else")) if_else<<<1, 64>>>(d);
    if (is("partial")) partial<<<1, 64>>>(d);
    if (is("early-return")) early_return<<<1, 64>>>(d, 40);
    if (is("shuffle")) shuffle<<<1, 64>>>(d);
    if (is("stuck")) stuck<<<1, 64>>>(d);
    if (is("uniform")) uniform<<<1, 128>>>(d, 5);
    if (is("spin")) spin<<<1, 64>>>(counts);
    if (is("turns")) in_turn<<<1, 256>>>(counts);
    if (is("forever")) forever<<<1, 64>>>(counts);
    if (is("waits")) waits_forever<<<1, 64>>>(counts);
    if (is("atomics")) count<<<1000, 1000>>>(counts);
    if (cudaDeviceSynchronize() == cudaSuccess) printf("done\n");
}
