// Routed experts of 1 to 16 tokens through a table of addresses, device or pinned host. Each tile of an expert is read
// by one warp, once, for all the expert's tokens. -DDOWN=0: gate_up, 1: down and the weighted sum.
#include "packed.cuh"
#include "plan.cuh"

#if !DOWN
// Block (x, y): rows 16 x .. of gate and of up of the y-th distinct expert. x [T, H]; inner [routes, I], sorted by
// expert: silu(gate) * up * factor in the activations' type. address: of this layer's experts; gate_up comes first.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
    expert_gate_up(const u64* address, const int* plan, const unsigned char* x, unsigned short* inner, u64* counters,
                   int num_tiles, float factor) {
    extern __shared__ float sums[];  // [warp][gate, up][8 N8 tokens][TOKEN_FLOATS]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    const int num_units = (num_tiles + UNIT_TILES - 1) / UNIT_TILES, slot = blockIdx.y;
    // The kernel after may start once the plan stands: it reads it before it waits.
    wait_for_previous();
    let_next_start();
    if (slot >= __ldcg(plan)) return;
    const int start = __ldcg(plan + PLAN_STARTS + slot), count = __ldcg(plan + PLAN_STARTS + slot + 1) - start;
    const unsigned char* expert =
        reinterpret_cast<const unsigned char*>(__ldcg(address + __ldcg(plan + PLAN_EXPERTS + slot)));
    const size_t size = row_bytes(num_tiles);
    const unsigned char* rows[2] = {expert + blockIdx.x * size, expert + (gridDim.x + blockIdx.x) * size};
    Tokens<NT> tokens;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int route = start + min(8 * n + (lane >> 2), count - 1);
        tokens.row[n] = x + (size_t)__ldcg(plan + PLAN_TOKENS + route) * num_tiles * 128 + 32 * (lane & 3);
    }
    float acc[2][NT][4] = {};
#pragma unroll 1
    for (int unit = warp; unit < num_units; unit += num_warps) add_unit(rows, unit, num_tiles, tokens, lane, acc);

#pragma unroll
    for (int r = 0; r < 2; r++) put_sums(sums + (warp * 2 + r) * 8 * NT * TOKEN_FLOATS, lane, acc[r]);
    __syncthreads();
    for (int i = threadIdx.x; i < count * 16; i += blockDim.x) {
        float gate = 0, up = 0;
        const float* from = sums + i / 16 * TOKEN_FLOATS + i % 16;
        for (int w = 0; w < num_warps; w++, from += 2 * 8 * NT * TOKEN_FLOATS) {
            gate += from[0];
            up += from[8 * NT * TOKEN_FLOATS];
        }
        const size_t at = (size_t)(start + i / 16) * (16 * gridDim.x) + blockIdx.x * 16 + i % 16;
        inner[at] = to_act(silu(gate) * up * factor, counters + SATURATED);
    }
    if (threadIdx.x == 0) atomicAdd(counters + BYTES_READ, 2 * (u64)size);
}
#else
// Block: 16 outputs of all experts, a warp an expert at a time. out [T, H] fp32 = residual (or nothing) plus the sum,
// by rank, of weights [T, top_k] times what the experts give for inner, over `factor`. offset: where down begins in
// an expert.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
    expert_down(const u64* address, const int* plan, const float* weights, const unsigned char* inner,
                const float* residual, float* out, u64* counters, u64 offset, int num_tiles, int num_tokens, int top_k,
                float factor) {
    extern __shared__ float sums[];  // [routes][TOKEN_FLOATS]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    const int num_units = (num_tiles + UNIT_TILES - 1) / UNIT_TILES;
    const size_t size = row_bytes(num_tiles);
    let_next_start();
    const int num_slots = __ldcg(plan);
#pragma unroll 1
    for (int slot = warp; slot < num_slots; slot += num_warps) {
        const int start = __ldcg(plan + PLAN_STARTS + slot), count = __ldcg(plan + PLAN_STARTS + slot + 1) - start;
        const u64 expert = __ldcg(address + __ldcg(plan + PLAN_EXPERTS + slot));
        const unsigned char* rows[1] = {reinterpret_cast<const unsigned char*>(expert + offset) + blockIdx.x * size};
        Tokens<NT> tokens;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int route = start + min(8 * n + (lane >> 2), count - 1);
            tokens.row[n] = inner + (size_t)route * num_tiles * 128 + 32 * (lane & 3);
        }
        float acc[1][NT][4] = {};
#pragma unroll 1
        for (int unit = 0; unit < num_units; unit++) add_unit(rows, unit, num_tiles, tokens, lane, acc);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + 2 * (lane & 3) + (e & 1);
                if (column < count)
                    sums[(start + column) * TOKEN_FLOATS + (lane >> 2) + 8 * (e >> 1)] = acc[0][n][e] * SUM_FACTOR;
            }
    }
    wait_for_previous();  // of a warp without an expert
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens * 16; i += blockDim.x) {
        const int token = i / 16, row = i % 16;
        float sum = 0;
        for (int rank = 0; rank < top_k; rank++) {
            const int route = token * top_k + rank;
            sum = fmaf(weights[route], sums[__ldcg(plan + PLAN_POSITIONS + route) * TOKEN_FLOATS + row], sum);
        }
        const size_t at = ((size_t)token * gridDim.x + blockIdx.x) * 16 + row;
        out[at] = (residual != nullptr ? residual[at] : 0.f) + sum / factor;
    }
    if (threadIdx.x == 0) atomicAdd(counters + BYTES_READ, num_slots * (u64)size);
}
#endif
