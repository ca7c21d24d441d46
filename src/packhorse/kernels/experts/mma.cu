// Routed experts of many tokens: packed weights, decoded in registers, times tokens that are sorted by expert. A block
// has a tile of one expert's tokens and some of its outputs; a warp two row blocks of 16 outputs, for all of K in order:
// a row's bits depend on nothing else. -DDOWN=0: gate_up, silu(gate) * up; 1: down. NT: a tile has 8 NT tokens.
#include "packed.cuh"

constexpr int WARPS = 4, TOKENS = 8 * NT;
constexpr int STAGE = 2;                 // tiles of K in shared memory at a time
constexpr int PITCH = STAGE * 128 + 16;  // bytes of a token there: 16 more keep the banks apart
constexpr int OUTS = WARPS * 16 * (DOWN ? 2 : 1), OUT_PITCH = OUTS + 8;
constexpr int CHUNKS = STAGE * 8, LOADS = TOKENS * CHUNKS / (32 * WARPS);

// Blocks that a multiprocessor is to hold at least: as many as registers allow.
#define BLOCKS (ON_VALUES && BITS == 4 && (KIND == SYMMETRIC || __CUDA_ARCH__ < 1200) ? 3 : 2)

// The tokens of a tile on their way to shared memory, STAGE tiles at a time, in two places by turns. Turing sends for
// them when they are wanted: it has other blocks to work on, and no registers for them.
struct Stages {
    unsigned char* shared;
    const unsigned char* x;
    const u32* rows;  // of the tile's tokens

    __device__ __forceinline__ void copy(int stage, int num_tiles) const {
        const int chunk = threadIdx.x % CHUNKS;
        if (stage * STAGE + chunk / 8 >= num_tiles) return;
#pragma unroll
        for (int load = 0; load < LOADS; load++) {
            const int token = threadIdx.x / CHUNKS + load * (32 * WARPS / CHUNKS);
            unsigned char* to = shared + ((stage & 1) * TOKENS + token) * PITCH + 16 * chunk;
            const unsigned char* from = x + ((size_t)rows[token] * num_tiles + stage * STAGE) * 128 + 16 * chunk;
#if ASYNC
            Ring<1>::copy<16>(to, from);
#else
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
        }
    }
    __device__ __forceinline__ void send(int stage, int num_tiles) const {
        if (ASYNC) copy(stage, num_tiles);
        Ring<1>::commit();
    }
    // What has been sent for is there for all threads when this returns.
    __device__ __forceinline__ void arrive(int stage, int num_tiles) const {
#if ASYNC
        asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
#else
        copy(stage, num_tiles);
#endif
        __syncthreads();
    }
};

// The next tile of two row blocks, on its way while one is multiplied.
struct Weights {
    u32 w[2][BITS], header[2][LINES];

    __device__ __forceinline__ void send(const unsigned char* const (&rows)[2], int tile, int lane) {
        const size_t block = (size_t)(tile / BLOCK_TILES) * BLOCK_BYTES;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (tile % BLOCK_TILES == 0)
#pragma unroll
                for (int l = 0; l < LINES; l++) header[r][l] = read4(rows[r] + block + 4 * lane + 128 * l);
            load_tile(rows[r] + block, 128 * LINES + tile % BLOCK_TILES * TILE_BYTES, lane, w[r]);
        }
    }
};

// address: of each expert's first byte, bit 0 aside; its down begins offset + its number * stride behind that. x: rows
// of num_tiles * 128 bytes, index: which row a sorted route has, or null where rows are in that order. ends
// [num_experts]: sorted routes up to the end of an expert's; tile_ends: tiles up to the end of its tiles.
// out [routes, 16 row_blocks]: row_blocks of inner values (gate_up has twice as many rows) or of hidden ones.
// Grid: (outputs / OUTS, tiles at most).
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    expert_tiles(const u64* address, const unsigned char* x, const long long* index, const int* ends,
                 const int* tile_ends, unsigned short* out, u64* saturated, u64 offset, u64 stride, int num_experts,
                 int num_tiles, int row_blocks) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ int found[2];  // the expert of the tile, and its tiles before this one
    __shared__ u32 token_rows[TOKENS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (blockIdx.y >= tile_ends[num_experts - 1]) return;
    for (int e = threadIdx.x; e < num_experts; e += 32 * WARPS) {
        const int before = e ? tile_ends[e - 1] : 0;
        if (before <= blockIdx.y && blockIdx.y < tile_ends[e]) found[0] = e, found[1] = blockIdx.y - before;
    }
    __syncthreads();
    const int expert = found[0], first = (expert ? ends[expert - 1] : 0) + found[1] * TOKENS;
    const int count = min(TOKENS, ends[expert] - first);

    // A warp beyond the last output works on what is there, and nothing of it is kept.
    const int number = blockIdx.x * WARPS + warp, size = DOWN ? (row_blocks + 1) / 2 : row_blocks;
    const int mine = min(number, size - 1);
    const unsigned char* base = reinterpret_cast<const unsigned char*>((address[expert] & ~1ull) + offset + expert * stride);
    const int blocks[2] = {DOWN ? 2 * mine : mine, DOWN ? min(2 * mine + 1, row_blocks - 1) : row_blocks + mine};
    const unsigned char* rows[2] = {base + blocks[0] * row_bytes(num_tiles), base + blocks[1] * row_bytes(num_tiles)};
    for (int i = threadIdx.x; i < TOKENS; i += 32 * WARPS) {
        const int route = first + min(i, count - 1);
        token_rows[i] = index != nullptr ? (u32)index[route] : route;
    }
    __syncthreads();
    const Stages stages{shared, x, token_rows};
    Weights weights;
    weights.send(rows, 0, lane);
    stages.send(0, num_tiles);
    float acc[2][NT][4] = {};
    u32 header[2][LINES];
    const int num_stages = (num_tiles + STAGE - 1) / STAGE;
#pragma unroll 1
    for (int stage = 0; stage < num_stages; stage++) {
        stages.arrive(stage, num_tiles);
        if (stage + 1 < num_stages) stages.send(stage + 1, num_tiles);
        const unsigned char* tokens = shared + ((stage & 1) * TOKENS + (lane >> 2)) * PITCH + 32 * (lane & 3);
        float part[2][NT][4] = {};
#pragma unroll
        for (int k = 0; k < STAGE; k++) {
            const int tile = stage * STAGE + k;
            if (tile >= num_tiles) break;
            u32 w[2][BITS];
            Scale scale[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int i = 0; i < BITS; i++) w[r][i] = weights.w[r][i];
                if (tile % BLOCK_TILES == 0)
#pragma unroll
                    for (int l = 0; l < LINES; l++) header[r][l] = weights.header[r][l];
                scale[r] = scale_of(header[r], tile % BLOCK_TILES, lane);
            }
            if (tile + 1 < num_tiles) weights.send(rows, tile + 1, lane);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 a[2][2][4];
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int j = 0; j < 2; j++) decode(w[r], 2 * half + j, scale[r], a[r][j]);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    const uint4 b = *reinterpret_cast<const uint4*>(tokens + 8 * n * PITCH + 128 * k + 16 * half);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float(&sum)[4] = ON_VALUES ? acc[r][n] : part[r][n];
                        Act::mma(sum, a[r][0], b.x, b.y);
                        Act::mma(sum, a[r][1], b.z, b.w);
                    }
                }
            }
            if (!ON_VALUES && (GROUP == 64 || k == STAGE - 1 || tile + 1 == num_tiles))
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    add_scaled(scale[r], part[r], acc[r]);
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) part[r][n][e] = 0;
                }
        }
    }
    // Through shared memory, so that rows leave in whole lines.
    __syncthreads();
    unsigned short* outs = reinterpret_cast<unsigned short*>(shared);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int token = 8 * n + 2 * (lane & 3) + (e & 1), row = (lane >> 2) + 8 * (e >> 1);
            unsigned short* to = outs + token * OUT_PITCH + warp * 16 * (DOWN ? 2 : 1) + row;
            if (token >= count || number >= size) continue;  // what is not kept is not counted either
            const float u = acc[0][n][e] * SUM_FACTOR, v = acc[1][n][e] * SUM_FACTOR;
            if (DOWN) {
                to[0] = to_act(u, saturated);
                if (2 * number + 1 < row_blocks) to[16] = to_act(v, saturated);
            } else {
                to[0] = to_act(silu(u) * v, saturated);
            }
        }
    __syncthreads();
    const int columns = min(OUTS, 16 * row_blocks - (int)blockIdx.x * OUTS) / 8;
    for (int i = threadIdx.x; i < count * columns; i += 32 * WARPS) {
        const int token = i / columns, column = 8 * (i % columns);
        *reinterpret_cast<uint4*>(out + (size_t)(first + token) * (16 * row_blocks) + blockIdx.x * OUTS + column) =
            *reinterpret_cast<const uint4*>(outs + token * OUT_PITCH + column);
    }
}
