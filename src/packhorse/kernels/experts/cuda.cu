// Routed experts of 1 to 16 tokens through a table of addresses, device or pinned host. Each tile of an expert is read
// by one warp, once, for all the expert's tokens. -DDOWN=0: gate_up, 1: down and the weighted sum. -DFILL=1: experts may
// be written to slots as they are read.
#include "packed.cuh"
#include "plan.cuh"

// Where a slot's expert is to be kept, see PLAN_KEEP; and how far that is from where it is read.
__device__ __forceinline__ u64 keep_of(const int* plan, int slot) {
    return FILL ? __ldcg(reinterpret_cast<const u64*>(plan + PLAN_KEEP) + slot) : 0;
}
__device__ __forceinline__ u64 shift_of(u64 keep, const Slot& slot) { return keep > HOST ? keep - HOST - slot.address : 0; }
__device__ __forceinline__ void count_host(u64 keep, u64 bytes, u64* counters) {
    if (keep & HOST) atomicAdd(counters + BYTES_HOST, bytes);
    if (keep > HOST) atomicAdd(counters + BYTES_KEPT, bytes);
}

// The rows of a slot's tokens. `index`: the token of each sorted route, or null where rows are in that order.
template <int N8>
__device__ __forceinline__ Tokens<N8> tokens_of(const Slot& slot, const unsigned char* x, const int* index,
                                                int num_tiles, int lane) {
    Tokens<N8> tokens;
#pragma unroll
    for (int n = 0; n < N8; n++) {
        const int route = slot.start + min(8 * n + (lane >> 2), slot.count - 1);
        const int row = index != nullptr ? __ldcg(index + route) : route;
        tokens.row[n] = x + (size_t)row * num_tiles * 128 + 32 * (lane & 3);
    }
    return tokens;
}

#if !DOWN
template <int N8>
__device__ __forceinline__ void gate_up(const Slot& slot, const int* plan, const unsigned char* x,
                                        unsigned short* inner, u64* counters, int num_tiles, float factor,
                                        unsigned char* shared, u64 keep) {
    float* sums = reinterpret_cast<float*>(shared);  // [warp][gate, up][8 N8 tokens][TOKEN_FLOATS]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    const unsigned char* expert = reinterpret_cast<const unsigned char*>(slot.address);
    const size_t size = row_bytes(num_tiles);
    const unsigned char* rows[2] = {expert + blockIdx.x * size, expert + (gridDim.x + blockIdx.x) * size};
    Ring<2> ring(shared, warp);
    const Tokens<N8> tokens = tokens_of<N8>(slot, x, plan + PLAN_TOKENS, num_tiles, lane);
    float acc[2][N8][4] = {};
    add_units<2, N8, FILL>(ring, rows, warp, num_warps, num_tiles, tokens, lane, acc, false, nullptr,
                           shift_of(keep, slot));
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) put_sums(sums + (warp * 2 + r) * 8 * N8 * TOKEN_FLOATS, lane, acc[r]);
    __syncthreads();
    for (int i = threadIdx.x; i < slot.count * 16; i += blockDim.x) {
        float gate = 0, up = 0;
        const float* from = sums + i / 16 * TOKEN_FLOATS + i % 16;
        for (int w = 0; w < num_warps; w++, from += 2 * 8 * N8 * TOKEN_FLOATS) {
            gate += from[0];
            up += from[8 * N8 * TOKEN_FLOATS];
        }
        const size_t at = (size_t)(slot.start + i / 16) * (16 * gridDim.x) + blockIdx.x * 16 + i % 16;
        inner[at] = to_act(silu(gate) * up * factor, counters + SATURATED);
    }
    if (threadIdx.x == 0) {
        atomicAdd(counters + BYTES_READ, 2 * (u64)size);
        count_host(keep, 2 * (u64)size, counters);
    }
}

// Block (x, y): rows 16 x .. of gate and of up of the y-th distinct expert. x [T, H]; inner [routes, I], sorted by
// expert: silu(gate) * up * factor in the activations' type. An expert's gate_up comes first.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)
    expert_gate_up(const int* plan, const unsigned char* x, unsigned short* inner, u64* counters, int num_tiles,
                   float factor) {
    extern __shared__ __align__(128) unsigned char shared[];  // a ring for each warp, later the sums
    // The kernel after may start once the plan stands: it reads it before it waits.
    wait_for_previous();
    let_next_start();
    const int num_slots = __ldcg(plan + PLAN_NUM);
    const Slot slot = Slot::load(reinterpret_cast<const Slot*>(plan) + blockIdx.y);
    const u64 keep = keep_of(plan, blockIdx.y);
    if (blockIdx.y >= num_slots) return;
    if (NT == 1 || slot.count <= 8) {
        gate_up<1>(slot, plan, x, inner, counters, num_tiles, factor, shared, keep);
    } else {
        gate_up<NT>(slot, plan, x, inner, counters, num_tiles, factor, shared, keep);
    }
}
#else
template <int N8>
__device__ __forceinline__ void down(Ring<1>& ring, const Slot& slot, const unsigned char* const (&rows)[1],
                                     const unsigned char* inner, int num_tiles, int lane, float* sums, bool filled,
                                     const unsigned char* after, u64 keep) {
    const Tokens<N8> tokens = tokens_of<N8>(slot, inner, nullptr, num_tiles, lane);
    float acc[1][N8][4] = {};
    add_units<1, N8, FILL>(ring, rows, 0, 1, num_tiles, tokens, lane, acc, filled, after, keep);
#pragma unroll
    for (int n = 0; n < N8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = 8 * n + 2 * (lane & 3) + (e & 1);
            if (column < slot.count)
                sums[(slot.start + column) * TOKEN_FLOATS + (lane >> 2) + 8 * (e >> 1)] = acc[0][n][e] * SUM_FACTOR;
        }
}

// Block: 16 outputs of all experts, a warp an expert at a time. out [T, H] fp32 = residual (or nothing) plus the sum,
// by rank, of weights [T, top_k] times what the experts give for inner, over `factor`. Down of an expert
// begins at its address + offset + its number * stride. Shared memory: the sums of all routes, [T top_k][TOKEN_FLOATS] in whole lines, and a ring for each warp.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 1)
    expert_down(const int* plan, const float* weights, const unsigned char* inner, const float* residual, float* out,
                u64* counters, u64 offset, u64 stride, int num_tiles, int num_tokens, int top_k, float factor) {
    extern __shared__ __align__(128) unsigned char shared[];
    float* sums = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    const size_t size = row_bytes(num_tiles);
    Ring<1> ring(shared + (num_tokens * top_k * TOKEN_FLOATS * 4 + 127) / 128 * 128, warp);
    let_next_start();
    const int num_slots = __ldcg(plan + PLAN_NUM);
    const auto load = [&](int i) { return Slot::load(reinterpret_cast<const Slot*>(plan) + min(i, MAX_ROUTES - 1)); };
    const auto row = [&](const Slot& slot) {
        return reinterpret_cast<const unsigned char*>(slot.address + offset + slot.expert * stride) + blockIdx.x * size;
    };
    Slot slot = load(warp), next = load(warp + num_warps);
    bool filled = false;
#pragma unroll 1
    for (int i = warp; i < num_slots; i += num_warps) {
        const Slot later = load(i + 2 * num_warps);
        const unsigned char* rows[1] = {row(slot)};
        const bool more = num_tiles >= UNIT_TILES && i + num_warps < num_slots;
        const unsigned char* after = more ? row(next) : nullptr;
        const u64 keep = keep_of(plan, i), shift = shift_of(keep, slot);
        if (lane == 0) count_host(keep, size, counters);
        if (NT == 1 || slot.count <= 8) {
            down<1>(ring, slot, rows, inner, num_tiles, lane, sums, filled, after, shift);
        } else {
            down<NT>(ring, slot, rows, inner, num_tiles, lane, sums, filled, after, shift);
        }
        filled = more;
        slot = next;
        next = later;
    }
    wait_for_previous();  // of a warp without an expert
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens * 16; i += blockDim.x) {
        const int token = i / 16, row = i % 16;
        float sum = 0;
        for (int rank = 0; rank < top_k; rank++) {
            const int route = token * top_k + rank;
            const int place = __ldcg(plan + PLAN_PLACES + route);
            if (place >= 0) sum = fmaf(weights[route], sums[place * TOKEN_FLOATS + row], sum);
        }
        const size_t at = ((size_t)token * gridDim.x + blockIdx.x) * 16 + row;
        out[at] = (residual != nullptr ? residual[at] : 0.f) + sum / factor;
    }
    if (threadIdx.x == 0) atomicAdd(counters + BYTES_READ, num_slots * (u64)size);
}
#endif
