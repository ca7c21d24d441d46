// Rows of a head's values in the activations' type: normed, gated, or both. A warp has a row.
// -D BF16; X32: x is fp32; NORM: x over its root mean square, times weight; GATE: times 1 silu, 2 sigmoid of a gate.
#include "mma.cuh"

constexpr int WARPS = 8, CHUNKS = 4;  // a row of at most 4 x 32 x 4 values stays in registers

__device__ __forceinline__ float4 four(const unsigned short* from) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    return make_float4(Act::low(v.x), Act::high(v.x), Act::low(v.y), Act::high(v.y));
}
__device__ __forceinline__ float4 four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float gated(float x, float gate) {
    return GATE == 0 ? x : GATE == 1 ? x * silu(gate) : x / (1.f + __expf(-gate));
}

#if X32
typedef float In;
#else
typedef unsigned short In;
#endif

// Row (token, head) of dim values: x at token * x_step + head * dim, gate the same; out [tokens, heads, dim].
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    head_rows(const In* x, const unsigned short* gate, const float* weight, uint2* out, long long x_step,
              long long gate_step, long long rows, int heads, int dim, float eps) {
    const int lane = threadIdx.x & 31;
    const long long row = blockIdx.x * (long long)WARPS + (threadIdx.x >> 5);
    if (row >= rows) return;
    const long long token = row / heads, head = row % heads;
    const In* from = x + token * x_step + head * dim;
    float4 v[CHUNKS];
    float squares = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int i = 128 * c + 4 * lane;
        if (i >= dim) break;
        v[c] = four(from + i);
        squares += v[c].x * v[c].x + v[c].y * v[c].y + v[c].z * v[c].z + v[c].w * v[c].w;
    }
    float factor = 1;
    if (NORM) {
        for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
        factor = rsqrtf(squares / dim + eps);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int i = 128 * c + 4 * lane;
        if (i >= dim) break;
        const float4 w = NORM ? four(weight + i) : make_float4(1, 1, 1, 1);
        const float4 g = GATE ? four(gate + token * gate_step + head * dim + i) : make_float4(0, 0, 0, 0);
        out[(row * dim + i) / 4] = make_uint2(
            Act::pack(gated(v[c].x * factor * w.x, g.x), gated(v[c].y * factor * w.y, g.y)),
            Act::pack(gated(v[c].z * factor * w.z, g.z), gated(v[c].w * factor * w.w, g.w)));
    }
}
