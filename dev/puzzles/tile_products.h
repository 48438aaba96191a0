// Tiles of 32 x 32 floats in shared memory, and their products on tensor cores, by blocks of TILE_BLOCK threads. No
// function here contains a barrier.
#pragma once

#include "puzzle.h"

#include "../../gpt/ptx.cuh"

constexpr int TILE = 32, TILE_BLOCK = 128;

struct Tile {
    float x[TILE][TILE + 1];   // padded: rows and columns are read without bank conflicts
};

__device__ inline void clear(Tile& tile) {
    for (int e = threadIdx.x; e < TILE * TILE; e += TILE_BLOCK) tile.x[e / TILE][e % TILE] = 0;
}

// Loads rows row0 to row0 + 31 of x (T, 32). Rows from T on become 0.
__device__ inline void load(Tile& tile, const bf16* x, int row0, int T) {
    for (int e = threadIdx.x; e < TILE * TILE; e += TILE_BLOCK) {
        const int row = row0 + e / TILE;
        tile.x[e / TILE][e % TILE] = row < T ? static_cast<float>(x[static_cast<size_t>(row0) * TILE + e]) : 0;
    }
}

// Stores factor * tile to rows row0 to row0 + 31 of x (T, 32), without rows from T on.
__device__ inline void store(float* x, const Tile& tile, float factor, int row0, int T) {
    for (int e = threadIdx.x; e < TILE * TILE; e += TILE_BLOCK)
        if (row0 + e / TILE < T) x[static_cast<size_t>(row0) * TILE + e] = factor * tile.x[e / TILE][e % TILE];
}

// An operand of a product: a tile or its transpose.
struct Operand {
    const Tile& tile;
    bool is_transposed;
    __device__ float operator()(int row, int column) const {
        return is_transposed ? tile.x[column][row] : tile.x[row][column];
    }
    // Returns the elements (row, column) and (row2, column2), rounded to bf16.
    __device__ uint32_t pair(int row, int column, int row2, int column2) const {
        const __nv_bfloat162 both = __floats2bfloat162_rn((*this)(row, column), (*this)(row2, column2));
        return *reinterpret_cast<const uint32_t*>(&both);
    }
};
__device__ inline Operand as_stored(const Tile& tile) { return {tile, false}; }
__device__ inline Operand transposed(const Tile& tile) { return {tile, true}; }

// C = A B, or C += A B. A thread accesses the same elements of C in all calls.
enum class Old { DROP, ADD };
template <Old OLD> __device__ void multiply(Tile& C, Operand A, Operand B) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;   // a warp computes 16 x 16 elements
    const int row = warp / 2 * 16 + lane / 4, column0 = warp % 2 * 16, t = lane % 4 * 2;
    float sum[2][4] = {};
    for (int k = t; k < TILE; k += 16) {
        const uint32_t a[4] = {A.pair(row, k, row, k + 1), A.pair(row + 8, k, row + 8, k + 1),
                               A.pair(row, k + 8, row, k + 9), A.pair(row + 8, k + 8, row + 8, k + 9)};
        for (int j = 0; j < 2; j++) {
            const int column = column0 + 8 * j + lane / 4;
            mma_m16n8k16(sum[j], a, B.pair(k, column, k + 1, column), B.pair(k + 8, column, k + 9, column));
        }
    }
    for (int j = 0; j < 2; j++)
        for (int e = 0; e < 4; e++) {
            float& c = C.x[row + e / 2 * 8][column0 + 8 * j + t + e % 2];
            c = (OLD == Old::ADD ? c : 0) + sum[j][e];
        }
}
