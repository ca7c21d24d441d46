// Attention of 1 to 16 query tokens a sequence over paged K and V, in two kernels: `attend_split` over one split of the
// keys, `attend_merge` over the splits of one query.
//
// Splits lie at absolute multiples of a length that follows from a query's own number of keys (and the card, which is to
// be full), tiles of 16 keys at absolute multiples of 16, and everything is added up in the order of positions. So a
// query's bits depend on its own keys and the card alone: not on the batch, nor on how many tokens are asked at once.
//
// -D CODEC, HEAD_DIM, MATH_BF16 (what is multiplied in), BF16 (the activations' type), MAX_SPLITS.
#include "kv.cuh"

constexpr int WARPS = 4;
constexpr int TILE = 16;
constexpr int MIN_SPLIT = 128;
constexpr int ROWS = 8;           // query rows of a block: columns of the product
constexpr int MAX_SPLIT_PAGES = 176;
// exp(score - max) is at most 2^14 here: fp16 has more room above 1 than below.
constexpr float TOP = 14.f;
#define NONE __int_as_float(0xff800000)  // minus infinity

constexpr int SPLIT_STEP = WARPS * TILE;

// Keys of a split for a query with `len` of them: as few as `splits` of them allow.
__device__ __forceinline__ int split_len(int len, int splits) {
    return max(MIN_SPLIT, (len + SPLIT_STEP * splits - 1) / (SPLIT_STEP * splits) * SPLIT_STEP);
}

// A block's query tokens: those of one sequence that share a split length, as many as 8 rows hold.
struct Queries {
    int token, count, split;

    __device__ __forceinline__ Queries(int block, int position, int num_tokens, int group, int splits) {
        const int block_tokens = ROWS / group;
        split = split_len(position + 1, splits);
        const int same = min(num_tokens, split * splits - position);  // tokens of this split length
        const int blocks = (same + block_tokens - 1) / block_tokens;
        if (block < blocks) {
            token = block * block_tokens;
            count = min(block_tokens, same - token);
        } else {
            split += SPLIT_STEP;
            token = same + (block - blocks) * block_tokens;
            count = min(block_tokens, num_tokens - token);
        }
    }
};

__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ float over_tokens_max(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}
__device__ __forceinline__ float over_tokens_sum(float x) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}
__device__ __forceinline__ float power(float x, float max) { return x == NONE ? 0.f : exp2f(x - max); }

// pages: of this layer. q [rows, num_heads, D] in the multiplied type, in the codec's basis. page_table [sequences,
// max_pages]; of a sequence: first_row among q's rows, num_tokens (0: none), position of the first.
// partial [sequences, heads, tokens, MAX_SPLITS, D] and stats [.., 2] (max in powers of two, sum), fp32.
// splits: of a query, at most. Grid: blocks of query tokens, splits, sequences x KV heads.
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
    attend_split(const unsigned char* pages, const unsigned short* q, const int* page_table, const int* first_row,
                 const int* num_tokens, const int* positions, float* partial, float2* stats, int num_heads,
                 int num_kv_heads, int max_pages, int max_tokens, int splits, float scale) {
    constexpr int HALVES = HEAD_DIM > 128 ? 2 : 1;  // the output passes shared memory in so many parts
    constexpr int OUT_ROW = HEAD_DIM / HALVES + 4;  // 4 more keep the banks apart
    __shared__ __align__(16) unsigned char scratch[WARPS * ROWS * OUT_ROW * 4];
    __shared__ int page_ids[MAX_SPLIT_PAGES];
    __shared__ float maxima[WARPS][ROWS], sums[WARPS][ROWS];
    uint4* const queries = reinterpret_cast<uint4*>(scratch);  // [D / 32][lane]: fragments B of two products
    float* const outs = reinterpret_cast<float*>(scratch);     // [warp][row][OUT_ROW], when queries are done with
    constexpr int ENTRIES = (HEAD_DIM + 32 * WARPS - 1) / (32 * WARPS);
    static_assert(sizeof(scratch) >= HEAD_DIM * 16, "queries do not fit");

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    scale *= CODE_FACTOR;
    const int sequence = blockIdx.z / num_kv_heads, kv_head = blockIdx.z % num_kv_heads;
    const int group = num_heads / num_kv_heads;
    let_next_start();
    wait_for_previous();
    const int tokens = num_tokens[sequence], position = positions[sequence], row0 = first_row[sequence];
    if (tokens == 0) return;
    const Queries own(blockIdx.x, position, tokens, group, splits);
    if (own.count <= 0) return;
    const int start = blockIdx.y * own.split, num_keys = position + own.token + own.count;
    if (start >= num_keys) return;
    const int stop = min(start + own.split, num_keys);

    for (int i = threadIdx.x; i * PAGE_LEN < stop - start; i += blockDim.x)
        page_ids[i] = page_table[(size_t)sequence * max_pages + start / PAGE_LEN + i];
    uint2 runs[ENTRIES][2];  // loaded at once
#pragma unroll
    for (int n = 0; n < ENTRIES; n++) {
        // Entry i = (pair of products, lane): four dims of query row g for each.
        const int i = threadIdx.x + n * 32 * WARPS, row = (i & 31) >> 2, pair = i >> 5;
        const int head = kv_head * group + row % group;
        const unsigned short* from = q + ((size_t)(row0 + own.token + row / group) * num_heads + head) * HEAD_DIM;
#pragma unroll
        for (int k = 0; k < 2; k++)
            runs[n][k] = row < own.count * group && i < HEAD_DIM
                             ? *reinterpret_cast<const uint2*>(from + key_dim(i & 3, 2 * pair + k))
                             : make_uint2(0, 0);
    }
#pragma unroll
    for (int n = 0; n < ENTRIES; n++) {
        const int i = threadIdx.x + n * 32 * WARPS;
#pragma unroll
        for (int k = 0; k < 2; k++) runs[n][k] = key_order(runs[n][k]);
        if (i < HEAD_DIM) queries[i] = make_uint4(runs[n][0].x, runs[n][0].y, runs[n][1].x, runs[n][1].y);
    }
    __syncthreads();

    // A lane's columns of the scores: rows 2t and 2t + 1; how many keys they see.
    const int seen0 = position + own.token + min(2 * t / group, own.count - 1) + 1;
    const int seen1 = position + own.token + min((2 * t + 1) / group, own.count - 1) + 1;
    float max0 = NONE, max1 = NONE, sum0 = 0, sum1 = 0;
    float out[VALUE_STEPS][4] = {};
    const Constants constants;
    Keys keys;
    Values values;
    int at = start + TILE * warp;
    if (at < stop) {
        const Place place(pages, page_ids[0], kv_head, num_kv_heads);
        keys.read(place, at % PAGE_LEN, lane);
        values.read(place, at % PAGE_LEN, lane);
    }
#pragma unroll 1
    for (; at < stop; at += TILE * WARPS) {
        // While one product runs, the other's next operand is on its way.
        const int next = at + TILE * WARPS;
        constexpr int CHAINS = CODEC == PLAIN ? 2 : 1;  // nothing to decode between products: two by turns
        float part[CHAINS][4] = {};
        keys.prepare(lane);
#pragma unroll
        for (int pair = 0; pair < KEY_STEPS / 2; pair++) {
            const uint4 b = queries[32 * pair + lane];
            u32 a[4];
            keys.fragment(2 * pair, a, constants);
            Math::mma(part[0], a, b.x, b.y);
            keys.fragment(2 * pair + 1, a, constants);
            Math::mma(part[CHAINS - 1], a, b.z, b.w);
        }
        if (next < stop)
            keys.read(Place(pages, page_ids[(next - start) / PAGE_LEN], kv_head, num_kv_heads), next % PAGE_LEN, lane);

        float score[4];
#pragma unroll
        for (int e = 0; e < 4; e++) score[e] = (CHAINS == 2 ? part[0][e] + part[1][e] : part[0][e]) * scale;
        if (at + TILE > min(seen0, seen1)) {
            if (at + g >= seen0) score[0] = NONE;
            if (at + g >= seen1) score[1] = NONE;
            if (at + g + 8 >= seen0) score[2] = NONE;
            if (at + g + 8 >= seen1) score[3] = NONE;
        }
        const float new0 = fmaxf(max0, over_tokens_max(fmaxf(score[0], score[2])));
        const float new1 = fmaxf(max1, over_tokens_max(fmaxf(score[1], score[3])));
        if (__any_sync(~0u, new0 > max0 || new1 > max1)) {
            // Else both factors are 1.
            const float old0 = power(max0, new0), old1 = power(max1, new1);
            sum0 *= old0, sum1 *= old1;
#pragma unroll
            for (int i = 0; i < VALUE_STEPS; i++) out[i][0] *= old0, out[i][1] *= old1, out[i][2] *= old0, out[i][3] *= old1;
            max0 = new0, max1 = new1;
        }
        const u32 low = Math::pack(power(score[0], max0 - TOP), power(score[1], max1 - TOP));
        const u32 high = Math::pack(power(score[2], max0 - TOP), power(score[3], max1 - TOP));
        sum0 += Math::low(low) + Math::low(high);
        sum1 += Math::high(low) + Math::high(high);
        const u32 b0 = transpose(low), b1 = transpose(high);
        if (at + TILE > num_keys) values.cut(num_keys - at, lane);
        values.prepare();
#pragma unroll
        for (int i = 0; i < VALUE_STEPS; i++) {
            u32 a[4];
            values.fragment(i, a, constants);
            Math::mma(out[i], a, b0, b1);
        }
        if (next < stop)
            values.read(Place(pages, page_ids[(next - start) / PAGE_LEN], kv_head, num_kv_heads), next % PAGE_LEN, lane);
    }

    sum0 = over_tokens_sum(sum0), sum1 = over_tokens_sum(sum1);
    if (g == 0) {
        maxima[warp][2 * t] = max0, maxima[warp][2 * t + 1] = max1;
        sums[warp][2 * t] = sum0, sums[warp][2 * t + 1] = sum1;
    }
#pragma unroll
    for (int part = 0; part < HALVES; part++) {
        constexpr int STEPS = VALUE_STEPS / HALVES;
        __syncthreads();
        float* const mine = outs + warp * ROWS * OUT_ROW;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const float* o = out[part * STEPS + i];
            *reinterpret_cast<float2*>(mine + 2 * t * OUT_ROW + 16 * i + 2 * g) = make_float2(o[0], o[2]);
            *reinterpret_cast<float2*>(mine + (2 * t + 1) * OUT_ROW + 16 * i + 2 * g) = make_float2(o[1], o[3]);
        }
        __syncthreads();
        constexpr int ROW_QUADS = HEAD_DIM / HALVES / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < own.count * group * ROW_QUADS; i += blockDim.x) {
            const int row = i / ROW_QUADS, quad = i % ROW_QUADS;
            float top = maxima[0][row];
#pragma unroll
            for (int w = 1; w < WARPS; w++) top = fmaxf(top, maxima[w][row]);
            float4 total = make_float4(0, 0, 0, 0);
            float weight = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float factor = power(maxima[w][row], top);
                const float4 o = *reinterpret_cast<const float4*>(outs + (w * ROWS + row) * OUT_ROW + 4 * quad);
                total.x += factor * o.x, total.y += factor * o.y, total.z += factor * o.z, total.w += factor * o.w;
                weight += factor * sums[w][row];
            }
            const int head = kv_head * group + row % group;
            const size_t place = (((size_t)sequence * num_heads + head) * max_tokens + own.token + row / group) *
                                     MAX_SPLITS + blockIdx.y;
            reinterpret_cast<float4*>(partial + place * HEAD_DIM + part * (HEAD_DIM / HALVES))[quad] = total;
            if (quad == 0 && part == 0) stats[place] = make_float2(top, weight);
        }
    }
}

// The splits of one query head of one token: merged, turned out of the codec's basis, gated.
// gate: null, or of row r and head h at r * gate_stride + h * D, in the activations' type (gate_fp32: in fp32).
// out [rows, num_heads, D] in the activations' type. Grid: tokens, heads, sequences; 4 D threads.
extern "C" __global__ void __launch_bounds__(4 * HEAD_DIM)
    attend_merge(const float* partial, const float2* stats, const int* first_row, const int* num_tokens,
                 const int* positions, const void* gate, unsigned short* out, int gate_stride, int gate_fp32,
                 int splits) {
    constexpr int SEGMENTS = 16, QUADS = HEAD_DIM / 4;
    __shared__ __align__(16) float sums[SEGMENTS][HEAD_DIM];
    __shared__ float row[HEAD_DIM];
    const int token = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z, lane = threadIdx.x & 31;
    let_next_start();
    wait_for_previous();
    const int tokens = num_tokens[sequence], position = positions[sequence];
    const int r = first_row[sequence] + token;
    if (token >= tokens) return;
    const int len = position + token + 1, split = split_len(len, splits), count = (len + split - 1) / split;
    const size_t first = (((size_t)sequence * gridDim.y + head) * gridDim.x + token) * MAX_SPLITS;

    // Every warp for itself: the greatest maximum, and the sum over all splits.
    float2 all[MAX_SPLITS / 32];
    float top = NONE, total = 0;
#pragma unroll
    for (int i = 0; i < MAX_SPLITS / 32; i++) {
        const int at = 32 * i + lane;
        all[i] = at < count ? stats[first + at] : make_float2(NONE, 0.f);
        top = fmaxf(top, all[i].x);
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
#pragma unroll
    for (int i = 0; i < MAX_SPLITS / 32; i++) total += power(all[i].x, top) * all[i].y;
#pragma unroll
    for (int mask = 16; mask; mask /= 2) total += __shfl_xor_sync(~0u, total, mask);

    const int quad = threadIdx.x % QUADS, segment = threadIdx.x / QUADS;
    const int length = (count + SEGMENTS - 1) / SEGMENTS;
    float4 sum = make_float4(0, 0, 0, 0);
    const float4* from = reinterpret_cast<const float4*>(partial + first * HEAD_DIM) + quad;
#pragma unroll 4
    for (int i = segment * length; i < min(count, (segment + 1) * length); i++) {
        const float4 o = from[(size_t)i * QUADS];
        const float w = power(stats[first + i].x, top);
        sum.x += w * o.x, sum.y += w * o.y, sum.z += w * o.z, sum.w += w * o.w;
    }
    reinterpret_cast<float4*>(sums[segment])[quad] = sum;
    __syncthreads();
    // Place 16 i + 2 g + half of a partial row is dim value_dim(g, i, half).
    if (threadIdx.x < HEAD_DIM) {
        const int i = threadIdx.x;
        float value = 0;
#pragma unroll
        for (int s = 0; s < SEGMENTS; s++) value += sums[s][i];
        row[value_dim(i % 16 / 2, i / 16, i % 2)] = value * CODE_FACTOR / total;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float x[E];
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = row[lane * E + e];
    if constexpr (ROTATED) rotate(x, lane);
#pragma unroll
    for (int e = 0; e < E; e++) {
        if (gate == nullptr) break;
        const size_t at = (size_t)r * gate_stride + head * HEAD_DIM + lane * E + e;
        const float g = gate_fp32 ? static_cast<const float*>(gate)[at]
                                  : Act::low(static_cast<const unsigned short*>(gate)[at]);
        x[e] /= 1.f + expf(-g);
    }
    u32* words = reinterpret_cast<u32*>(out + ((size_t)r * gridDim.y + head) * HEAD_DIM) + lane * (E / 2);
#pragma unroll
    for (int e = 0; e < E; e += 2) words[e / 2] = Act::pack(x[e], x[e + 1]);
}
