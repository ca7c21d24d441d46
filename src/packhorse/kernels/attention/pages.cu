// K and V of many tokens out of pages of codes and into them. Twin: GroupPages of quant/codec.py, to the bit.
// -D CODEC (K5V4, K4V4), HEAD_DIM, BF16 (type of what is read).
#include "codes.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int WORDS = HEAD_DIM / 8;  // of 8 codes each, of a head of a token

// The page of tokens 64 i .. 64 i + 63: ids[i], or where they follow on one another first + i.
__device__ __forceinline__ int page_at(const int* ids, int first, int i) { return ids != nullptr ? ids[i] : first + i; }

// The 8 values of word `index` of a token's codes; high: the high bits of its group.
template <bool FIVE>
__device__ __forceinline__ uint4 values_of(u32 word, u32 high, u32 scale, int index, const Constants& c) {
    const int j = index % 4;
    const float factor = Fp16::low(scale);
    u32 pairs[4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const u32 bits = !FIVE ? 0 : p < 2 ? high << (4 - j) : high >> (4 + j);
        const u32 codes = code_pair<FIVE>(word, p, bits, c);
        // Exact in fp32, then rounded once.
        pairs[p] = Act::pack(Fp16::low(codes) * factor, Fp16::high(codes) * factor);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// k, v [count, num_kv_heads, D] 16-bit, turned as they are stored: of tokens start .. start + count, counted from the
// first of the first page. Grid: pages, KV heads.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_pages(const unsigned char* pages, const int* ids, uint4* k, uint4* v, int first, int start, int count,
               int num_kv_heads) {
    const Place place(pages, page_at(ids, first, blockIdx.x), blockIdx.y, num_kv_heads);
    const Constants c;
    const int before = (int)blockIdx.x * PAGE_LEN - start;
#pragma unroll
    for (int i = threadIdx.x; i < PAGE_LEN * WORDS; i += THREADS) {
        const int token = i / WORDS, index = i % WORDS, row = before + token;
        if (row < 0 || row >= count) continue;
        const int group = token * GROUPS + index / 4;
        u32 k_word, v_word, high = 0;
        load<1>(place.head + 4 * i, &k_word);
        load<1>(place.head + V_CODES + 4 * i, &v_word);
        if constexpr (CODEC == K5V4) load<1>(place.head + K_HIGH + 4 * group, &high);
        const u32 k_scale = load_half(place.head + K_SCALE + 2 * group);
        const u32 v_scale = load_half(place.head + V_SCALE + 2 * group);
        const size_t to = ((size_t)row * num_kv_heads + blockIdx.y) * WORDS + index;
        k[to] = values_of<CODEC == K5V4>(k_word, high, k_scale, index, c);
        v[to] = values_of<false>(v_word, 0, v_scale, index, c);
    }
}

// Value `at` of fp32 (type 0), fp16 (1) or bf16 (2).
__device__ __forceinline__ float value_at(const void* x, size_t at, int type) {
    if (type == 0) return static_cast<const float*>(x)[at];
    const u32 bits = static_cast<const unsigned short*>(x)[at];
    return type == 1 ? Fp16::low(bits) : __uint_as_float(bits << 16);
}

// k, v: head h of token t at t * step + h * D, not turned; stored as tokens start .. start + count. A warp has a token.
// Grid: tokens by WARPS, KV heads of K and then of V.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_pages(unsigned char* pages, const int* ids, const void* k, const void* v, long long k_step, long long v_step,
                int k_type, int v_type, int first, int start, int count, int num_kv_heads) {
    const int lane = threadIdx.x & 31, token = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (token >= count) return;
    const bool is_k = (int)blockIdx.y < num_kv_heads;
    const int head = is_k ? blockIdx.y : blockIdx.y - num_kv_heads, at = start + token;
    const size_t from = token * (is_k ? k_step : v_step) + head * HEAD_DIM + lane * E;
    float x[E];
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = value_at(is_k ? k : v, from + e, is_k ? k_type : v_type);
    rotate(x, lane);
    const Place place(pages, page_at(ids, first, at / PAGE_LEN), head, num_kv_heads);
    put_head(place, is_k, at % PAGE_LEN, x, lane);
}
