// Initial weights, and weights = round(master). Included by train_gpt.cu.
//
// out[i] = normal(0, std), a function of the seed and of the element's index in the whole tensor only: independent of
// the order of threads and of how a tensor is divided among GPUs.
// source    Steele et al. 2014 (SplitMix64, the hash); Box and Muller 1958 (two uniforms to a normal)
#pragma once

__host__ __device__ __forceinline__ uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

template <typename T>
__global__ void init_normal_kernel(T* out, float std, uint64_t seed, size_t begin, TensorPart part, size_t first,
                                   size_t n) {
    const Span span = my_span(n);
    for (size_t i = span.begin; i < span.end; i += span.stride)
        for (size_t j = i; j < min(i + PACK, n); j++) {
            const uint64_t bits = splitmix64(seed ^ splitmix64(begin + part.whole(first + j)));
            const float u1 = ((bits >> 40) + 1) * (1.0f / (1 << 24));            // (0, 1]
            const float u2 = (bits & 0xffffff) * (1.0f / (1 << 24));             // [0, 1)
            out[j] = static_cast<T>(std * sqrtf(-2.0f * logf(u1)) * cosf(6.2831853f * u2));
        }
}

template <typename T> __global__ void fill_kernel(T* out, float value, size_t n) {
    const Span span = my_span(n);
    for (size_t i = span.begin; i < span.end; i += span.stride)
        for (size_t j = i; j < i + PACK; j++) out[j] = static_cast<T>(value);
}

// weights = master, rounded to floatX: after init or loading. In training adamw_kernel rounds.
__global__ void round_weights_kernel(floatX* weights, const float* master, size_t n) {
    const Span span = my_span(n);
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        float x[PACK];
        load(x, master + i);
        store(weights + i, x);
    }
}

// Element i of out is element first + i of a part of a tensor, whose elements are numbered from `begin` on.
template <typename T>
void init_normal(T* out, float std, uint64_t seed, size_t begin, const TensorPart& part, size_t first, size_t n) {
    launch("init_normal", init_normal_kernel<T>, span_blocks(n), BLOCK, 0, out, std, seed, begin, part, first, n);
}
void round_weights(floatX* weights, const float* master, size_t n) {
    launch("round_weights", round_weights_kernel, span_blocks(n), BLOCK, 0, weights, master, n);
}

// ---- of a model

// weights = round(master), after init or loading. Each rank rounds its part; need_weights() gathers the rest.
void master_changed(Model& m) {
    const Layout& y = m.layout;
    const Placement states = states_placement(m.setup), weights = weights_placement(m.setup);
    for (size_t g = 0; SEPARATE_MASTER && g <= y.layers; g++)
        if (states == Placement::WHOLE || y.has_shard(g, y.rank))
            round_weights(m.weights + update_begin(m, g, weights), m.master + update_begin(m, g, states),
                          y.part(g, states));
    weights_changed(m);
}

// GPT-2's init: normal with std 0.02, or 0.02 / sqrt(2L) for weights whose outputs the residual stream sums, 2L in all.
template <typename T> void init_block(T* block, Placement placement, const Model& m, uint64_t seed) {
    for (const ParameterRow& row : parameter_table(m.setup))
        for (size_t l = 0; l < row.copies; l++) {
            const Shard shard = shard_of(m.layout, row, l, placement, m.layout.rank);
            // The vocabulary's padding stays 0.
            const size_t real = row.is_split() ? row.elements : row.file_elements();
            const size_t end = std::min(shard.first + shard.count, real);
            if (row.init == Init::ZERO || shard.first >= end) continue;
            T* to = block + shard.at;
            const size_t n = end - shard.first;
            const float std = row.init == Init::NORMAL ? INIT_STD : INIT_STD / sqrtf(2.0f * m.config.layers);
            if (row.init == Init::ONE) launch("fill", fill_kernel<T>, span_blocks(n), BLOCK, 0, to, 1.0f, n);
            else init_normal(to, std, splitmix64(seed + row.number), l * row.elements * row.part.ranks, row.part,
                             shard.first, n);
        }
}

void init_parameters(Model& m, uint64_t seed) {
    if (!m.master) return init_block(m.weights, weights_placement(m.setup), m, seed);
    init_block(m.master, master_placement(m.setup), m, seed);
    master_changed(m);
}
