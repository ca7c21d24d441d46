// Router's choice and the order of its routes: one block, up to 16 tokens, 512 experts, 160 routes. With places to keep
// what is read from host memory (kernels.experts.cuda.ExpertFills), -DFILL=1: who is kept where.
#include "plan.cuh"

// The largest of a warp's values, in all lanes.
__device__ __forceinline__ u32 warp_max(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
    for (int step = 16; step; step >>= 1) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
#endif
}

// Floats in the order of their bits, and back.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Softmax of logits [T, E] over all, the top_k best in order (equal ones: the lower first), divided by their sum if
// norm: weights, experts [T, top_k]. Without logits weights and experts are given. Then the routes sorted by expert:
// `plan`, see plan.cuh. shared: 1 where logits are [T, E + 1] and every token goes to expert E too, with the sigmoid of
// its logit for a weight: weights and experts are [T, top_k + 1]. live [T] or null: negative where a token is nobody's
// and has no routes. spares, filled [num_spares], used [MAX_ROUTES]: the layer's, FILL=1. counters[0] += distinct
// experts.
extern "C" __global__ void __launch_bounds__(512)
    expert_plan(const float* logits, const int* live, float* weights, int* experts, u64* address, const u64* spares,
                int* filled, int* used, int* plan, u64* counters, int num_tokens, int top_k, int num_experts, int norm,
                int num_spares, int shared) {
    constexpr int MAX_EXPERTS = 512, PER_LANE = MAX_EXPERTS / 32;
    // Three counts of up to 160 in a word: of routes, of experts hit, of those in host memory.
    constexpr int HITS = 10, MISSES = 20, COUNT = (1 << HITS) - 1;
    __shared__ int chosen[MAX_ROUTES];  // -1: of a token that is nobody's
    __shared__ int counts[MAX_EXPERTS];
    __shared__ int place[MAX_EXPERTS];  // counts of what comes before this expert
    __shared__ int totals[16];
    __shared__ int free_places[MAX_ROUTES];
    __shared__ int num_free;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, ranks = top_k + shared,
              num_routes = num_tokens * ranks;
    counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) num_free = 0;
    let_next_start();
    wait_for_previous();
    if constexpr (FILL) {
        if (threadIdx.x < num_spares) {
            const int expert = filled[threadIdx.x];
            if (expert >= 0) address[expert] = spares[threadIdx.x];
        }
        if (threadIdx.x < MAX_ROUTES) used[threadIdx.x] = -1;
        if (warp == 0) {
            int num = 0;  // free places so far, in order
            for (int first = 0; first < num_spares; first += 32) {
                const bool free = first + lane < num_spares && filled[first + lane] == -1;
                const u32 all = __ballot_sync(~0u, free);
                const int at = num + __popc(all & ((1u << lane) - 1));
                if (free && at < MAX_ROUTES) free_places[at] = first + lane;
                num += __popc(all);
            }
            if (lane == 0) num_free = min(num, MAX_ROUTES);
        }
    }
    if (logits != nullptr) {
        if (warp < num_tokens) {
            const bool dead = live != nullptr && live[warp] < 0;
            // A lane holds experts lane, lane + 32, ..; 0 stands for none.
            u32 keys[PER_LANE], taken = 0, best = 0;
            int best_expert = 0;
            const auto find_best = [&] {
                best = 0;
#pragma unroll
                for (int i = 0; i < PER_LANE; i++)
                    if (keys[i] > best && !(taken >> i & 1)) best = keys[i], best_expert = lane + 32 * i;
            };
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const int e = lane + 32 * i;
                keys[i] = e < num_experts ? ordered(logits[warp * (num_experts + shared) + e]) : 0;
            }
            find_best();
            u32 winner = warp_max(best);
            const float highest = unordered(winner);
            float sum = 0, mine = 0, total = 0;  // lane r has the weight of the r-th best
            int expert = 0;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                if (keys[i]) sum += __expf(unordered(keys[i]) - highest);
            for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
            for (int r = 0; r < top_k; r++) {
                const int e = MAX_EXPERTS - warp_max(best == winner ? MAX_EXPERTS - best_expert : 0);
                const float weight = __expf(unordered(winner) - highest) / sum;
                total += weight;
                if (lane == r) mine = weight, expert = e;
                if (lane == (e & 31)) {
                    taken |= 1u << (e >> 5);
                    find_best();
                }
                winner = warp_max(best);
            }
            if (lane < top_k) {
                const int at = warp * ranks + lane;
                weights[at] = norm ? mine / total : mine;
                experts[at] = expert;
                chosen[at] = dead ? -1 : expert;
            } else if (lane == top_k && shared) {
                const int at = warp * ranks + lane;
                weights[at] = 1.f / (1.f + __expf(-logits[warp * (num_experts + 1) + num_experts]));
                experts[at] = num_experts;
                chosen[at] = dead ? -1 : num_experts;
            }
        }
    } else if (threadIdx.x < num_routes) {
        chosen[threadIdx.x] = live == nullptr || live[threadIdx.x / ranks] >= 0 ? experts[threadIdx.x] : -1;
    }
    __syncthreads();
    if (threadIdx.x < num_routes && chosen[threadIdx.x] >= 0) atomicAdd(&counts[chosen[threadIdx.x]], 1);
    __syncthreads();

    const int count = counts[threadIdx.x];
    const u64 from = count > 0 ? address[threadIdx.x] : 0;
    const bool host = FILL && (from & HOST);
    const int own = count | (count > 0) << HITS | host << MISSES;
    int before = own;  // inclusive over the warp
    for (int step = 1; step < 32; step <<= 1) {
        const int left = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += left;
    }
    if (lane == 31) totals[warp] = before;
    __syncthreads();
    before -= own;
    for (int w = 0; w < warp; w++) before += totals[w];
    place[threadIdx.x] = before;
    if (count > 0) {
        const int slot = before >> HITS & COUNT, miss = before >> MISSES;
        reinterpret_cast<Slot*>(plan)[slot] = {host ? from & ~HOST : from, (unsigned short)(before & COUNT),
                                               (unsigned short)count, (int)threadIdx.x};
        if constexpr (FILL) {
            u64 keep = host ? HOST : 0;
            if (host && miss < num_free) {
                keep |= spares[free_places[miss]];
                filled[free_places[miss]] = threadIdx.x;
            }
            reinterpret_cast<u64*>(plan + PLAN_KEEP)[slot] = keep;
            used[slot] = threadIdx.x;
        }
    }
    if (threadIdx.x == MAX_EXPERTS - 1) {
        const int num_slots = (before + own) >> HITS & COUNT;
        plan[PLAN_NUM] = num_slots;
        atomicAdd(counters + EXPERTS_READ, (u64)num_slots);
    }
    __syncthreads();
    if (threadIdx.x < num_routes) {
        const int expert = chosen[threadIdx.x];
        int at = -1;
        if (expert >= 0) {
            at = place[expert] & COUNT;
            for (int r = 0; r < threadIdx.x; r++) at += chosen[r] == expert;
            plan[PLAN_TOKENS + at] = threadIdx.x / ranks;
        }
        plan[PLAN_PLACES + threadIdx.x] = at;
    }
}
