// Decode attention: the function of train_gpt.cu's section "attention" for the last query only, to sample a token. qkv
// holds the keys and values of all earlier tokens (KV cache), so these do not pass through the model again.
//
// shapes    qkv (T,3,NH,HS) floatX | out (NH,HS) floatX
// mapping   one block per head; warp w processes keys w, w + warps, ...; each lane the packs lane_start(), ... of HS.
//           Each warp has its own online softmax; at the end the maxima, sums and outputs of the warps are combined
// cost      bandwidth: reads K and V once, 2*T*C; with few heads, blocks do not fill the GPU and latency dominates
#pragma once

constexpr int MAX_HEAD_SIZE = 128;
constexpr int HEAD_PACKS = (MAX_HEAD_SIZE + LANE_STRIDE - 1) / LANE_STRIDE;   // packs of HS per lane

__global__ void __launch_bounds__(WIDE_BLOCK) attention_decode_kernel(floatX* out, const floatX* qkv, int T, int HS) {
    const size_t C = static_cast<size_t>(gridDim.x) * HS;
    const floatX* last = qkv + (T - 1) * 3 * C + blockIdx.x * HS;
    const int warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    float* outs = dynamic_shared();                                 // (warps, HS)
    float *maxima = outs + warps * HS, *sums = maxima + warps;      // (warps)

    const float scale = rsqrtf(static_cast<float>(HS));
    float query[HEAD_PACKS][PACK] = {}, sum_of_values[HEAD_PACKS][PACK] = {}, max = LOWEST, sum = 0;
    for (int p = 0, i = lane_start(); p < HEAD_PACKS && i < HS; p++, i += LANE_STRIDE) load(query[p], last + i);
    for (int t = warp; t < T; t += warps) {
        const floatX *key = qkv + t * 3 * C + C + blockIdx.x * HS, *value = key + C;
        float x[PACK], products[PACK] = {};
        for (int p = 0, i = lane_start(); p < HEAD_PACKS && i < HS; p++, i += LANE_STRIDE) {
            load(x, key + i);
            for (int k = 0; k < PACK; k++) products[k] += query[p][k] * x[k];
        }
        const float score = warp_sum(products) * scale, old = max;
        max = fmaxf(max, score);
        const float rescale = __expf(old - max), probability = __expf(score - max);
        sum = sum * rescale + probability;
        for (int p = 0, i = lane_start(); p < HEAD_PACKS && i < HS; p++, i += LANE_STRIDE) {
            load(x, value + i);
            for (int k = 0; k < PACK; k++)
                sum_of_values[p][k] = sum_of_values[p][k] * rescale + probability * x[k];
        }
    }
    for (int p = 0, i = lane_start(); p < HEAD_PACKS && i < HS; p++, i += LANE_STRIDE)
        for (int k = 0; k < PACK; k++) outs[warp * HS + i + k] = sum_of_values[p][k];
    if (threadIdx.x % WARP_SIZE == 0) {
        maxima[warp] = max;
        sums[warp] = sum;   // 0 in a warp without keys (T < warps)
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HS; i += blockDim.x) {
        float all = LOWEST, total = 0, value = 0;
        for (int w = 0; w < warps; w++) all = fmaxf(all, maxima[w]);
        for (int w = 0; w < warps; w++) {
            const float rescale = __expf(maxima[w] - all);
            total += sums[w] * rescale;
            value += outs[w * HS + i] * rescale;
        }
        out[blockIdx.x * HS + i] = value / total;
    }
}

// out (NH,HS) = attention of the last query of qkv (T,3,NH,HS)
void attention_decode(floatX* out, const floatX* qkv, int T, int NH, int HS) {
    const size_t shared = sizeof(float) * (WIDE_BLOCK / WARP_SIZE) * (HS + 2);
    launch("attention_decode", attention_decode_kernel, NH, WIDE_BLOCK, shared, out, qkv, T, HS);
}
