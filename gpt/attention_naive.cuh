// Naive attention, --attention naive: the function of train_gpt.cu's section "attention" with the T x T matrices stored
// in memory, to measure what flash attention saves.
//
// forward   scores = Q K^T / sqrt(HS);  probs = softmax(scores), 0 where key > query;  out = probs V
// backward  dprobs = dout V^T;  dscores = probs * (dprobs - sum(probs * dprobs)) / sqrt(HS)
//           dQ = dscores K;  dK = dscores^T Q;  dV = probs^T dout
// shapes    scores, probs, dprobs (B,NH,T,T) floatX; the rest as in train_gpt.cu. dscores overwrites dprobs
// mapping   six products by one kernel: a block computes a tile of BLOCK_M x BLOCK_M, in steps of BLOCK_M along k;
//           softmax: one warp per row
// cost      bandwidth: 4*B*NH*T*T elements written and read forward, 7*B*NH*T*T backward
// source    Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1
#pragma once

// One matrix per head. Element (row, column) of head h in batch b is data[b, h, row, column] with these strides.
template <typename T> struct HeadMatrix {
    T* data;
    size_t batch, head, row, column;   // strides, in elements
    __device__ T* at(size_t b, size_t h) const { return data + b * batch + h * head; }
};

// out (M,N) = scale * A (M,K) B (K,N) for each head; grid (tiles, NH, B)
__global__ void head_product_kernel(HeadMatrix<floatX> out, HeadMatrix<const floatX> A, HeadMatrix<const floatX> B,
                                    float scale, int M, int N, int K) {
    const int tiles_n = (N + BLOCK_M - 1) / BLOCK_M, b = blockIdx.z, h = blockIdx.y;
    const int m0 = blockIdx.x / tiles_n * BLOCK_M, n0 = blockIdx.x % tiles_n * BLOCK_M;
    const floatX *a_head = A.at(b, h), *b_head = B.at(b, h);
    float* a = dynamic_shared();             // (BLOCK_M, BLOCK_M): m, k
    float* bt = a + BLOCK_M * BLOCK_M;       // (BLOCK_M, BLOCK_M): k, n
    float* c = bt + BLOCK_M * BLOCK_M;       // (BLOCK_M, BLOCK_M): m, n
    fill(c, 0, BLOCK_M * BLOCK_M);
    for (int k0 = 0; k0 < K; k0 += BLOCK_M) {
        for (int e = threadIdx.x; e < BLOCK_M * BLOCK_M; e += blockDim.x) {
            const int r = e / BLOCK_M, q = e % BLOCK_M;
            const bool in_a = m0 + r < M && k0 + q < K, in_b = k0 + r < K && n0 + q < N;
            a[e] = in_a ? static_cast<float>(a_head[(m0 + r) * A.row + (k0 + q) * A.column]) : 0.0f;
            bt[e] = in_b ? static_cast<float>(b_head[(k0 + r) * B.row + (n0 + q) * B.column]) : 0.0f;
        }
        __syncthreads();
        tile_matmul<Old::ADD, Stored::AS_M_K>(c, a, bt, nullptr, BLOCK_M, BLOCK_M, BLOCK_M);
        __syncthreads();   // all threads have read a and bt
    }
    for (int e = threadIdx.x; e < BLOCK_M * BLOCK_M; e += blockDim.x) {
        const int m = m0 + e / BLOCK_M, n = n0 + e % BLOCK_M;
        if (m < M && n < N) out.at(b, h)[m * out.row + n * out.column] = static_cast<floatX>(scale * c[e]);
    }
}

// Row n of scores (B*NH*T, T) is query n % T, which attends to keys 0 ... n % T; the other probabilities are 0.
__global__ void softmax_forward_kernel(floatX* probs, const floatX* scores, size_t rows, int T) {
    const size_t n = warp_row();
    if (n >= rows) return;
    const int lane = threadIdx.x % WARP_SIZE, keys = n % T + 1;
    const floatX* in = scores + n * T;
    float max = LOWEST, sum = 0;
    for (int j = lane; j < keys; j += WARP_SIZE) max = fmaxf(max, static_cast<float>(in[j]));
    max = warp_max(max);
    for (int j = lane; j < keys; j += WARP_SIZE) sum += __expf(static_cast<float>(in[j]) - max);
    sum = warp_sum(sum);
    for (int j = lane; j < T; j += WARP_SIZE)
        probs[n * T + j] = static_cast<floatX>(j < keys ? __expf(static_cast<float>(in[j]) - max) / sum : 0.0f);
}

// In place: dprobs becomes dscores. scale: 1 / sqrt(HS)
__global__ void softmax_backward_kernel(floatX* dprobs, const floatX* probs, float scale, size_t rows, int T) {
    const size_t n = warp_row();
    if (n >= rows) return;
    const floatX* p = probs + n * T;
    floatX* d = dprobs + n * T;
    const int lane = threadIdx.x % WARP_SIZE;
    float sum = 0;
    for (int j = lane; j < T; j += WARP_SIZE) sum += static_cast<float>(p[j]) * static_cast<float>(d[j]);
    sum = warp_sum(sum);
    for (int j = lane; j < T; j += WARP_SIZE)
        d[j] = static_cast<floatX>(static_cast<float>(p[j]) * (static_cast<float>(d[j]) - sum) * scale);
}

// The matrices of a call as HeadMatrix: q, k, v in (B,T,3,NH,HS), out (B,T,NH,HS), scores (B,NH,T,T).
enum class Part { Q, K, V };
struct HeadShape {
    size_t B, T, NH, HS, C, rows;   // rows: of scores
    explicit HeadShape(const Heads& h) : B(h.B), T(h.T), NH(h.NH), HS(h.HS), C(NH * HS), rows(B * NH * T) {}
};

template <typename T> HeadMatrix<T> qkv_part(T* qkv, Part part, const HeadShape& s) {
    return {qkv + static_cast<size_t>(part) * s.C, s.T * 3 * s.C, s.HS, 3 * s.C, 1};
}
template <typename T> HeadMatrix<T> heads_of(T* out, const HeadShape& s) { return {out, s.T * s.C, s.HS, s.C, 1}; }
template <typename T> HeadMatrix<T> square_of(T* scores, const HeadShape& s) {
    return {scores, s.NH * s.T * s.T, s.T * s.T, s.T, 1};
}
template <typename T> HeadMatrix<T> transposed(HeadMatrix<T> m) { return {m.data, m.batch, m.head, m.column, m.row}; }

// out (T,N) = scale * A (T,K) B (K,N) for each head
void head_product(HeadMatrix<floatX> out, HeadMatrix<const floatX> A, HeadMatrix<const floatX> B, float scale,
                  const HeadShape& s, size_t N, size_t K) {
    launch("head_product", head_product_kernel, dim3(ceil_div(N, BLOCK_M) * ceil_div(s.T, BLOCK_M), s.NH, s.B),
           ATTENTION_BLOCK, 3 * BLOCK_M * BLOCK_M * sizeof(float), out, A, B, scale, s.T, N, K);
}

// Writes out, h.scores and h.probs.
void naive_attention_forward(floatX* out, const floatX* qkv, const Heads& h) {
    const HeadShape s(h);
    const auto Q = qkv_part(qkv, Part::Q, s), K = qkv_part(qkv, Part::K, s), V = qkv_part(qkv, Part::V, s);
    head_product(square_of(h.scores, s), Q, transposed(K), 1 / sqrtf(h.HS), s, s.T, s.HS);
    launch("softmax_forward", softmax_forward_kernel, row_blocks(s.rows), BLOCK, 0, h.probs, h.scores, s.rows, h.T);
    head_product(heads_of(out, s), square_of<const floatX>(h.probs, s), V, 1, s, s.HS, s.T);
}

// Writes dqkv from h.probs. h.dprobs is scratch.
void naive_attention_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const Heads& h) {
    const HeadShape s(h);
    const auto Q = qkv_part(qkv, Part::Q, s), K = qkv_part(qkv, Part::K, s), V = qkv_part(qkv, Part::V, s);
    const auto d = heads_of(dout, s), P = square_of<const floatX>(h.probs, s),
               dscores = square_of<const floatX>(h.dprobs, s);
    head_product(square_of(h.dprobs, s), d, transposed(V), 1, s, s.T, s.HS);
    head_product(qkv_part(dqkv, Part::V, s), transposed(P), d, 1, s, s.HS, s.T);
    launch("softmax_backward", softmax_backward_kernel, row_blocks(s.rows), BLOCK, 0, updated(h.dprobs), h.probs,
           1 / sqrtf(h.HS), s.rows, h.T);
    head_product(qkv_part(dqkv, Part::Q, s), dscores, K, 1, s, s.HS, s.T);
    head_product(qkv_part(dqkv, Part::K, s), transposed(dscores), Q, 1, s, s.HS, s.T);
}
