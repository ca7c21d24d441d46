// Norms before a product: the fp32 residual, what is added to it, and the normed row in the activations' type.
// A block has one row. -D BF16.
#include "mma.cuh"

constexpr int THREADS = 256, LOADS = 8;  // a row of at most 4 x 256 x 8 values stays in registers

// x [rows, 4 quads] fp32: the residual; add: as x, or null: added to it in place. weight [4 quads] fp32.
// out: x over its root mean square, times weight. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norm(float4* x, const float4* add, const float4* weight, uint2* out, float eps, int quads) {
    __shared__ float shared[THREADS / 32];
    const size_t first = (size_t)blockIdx.x * quads;
    let_next_start();
    float4 v[LOADS], w[LOADS];
#pragma unroll
    for (int l = 0; l < LOADS; l++)
        if (threadIdx.x + l * THREADS < quads) w[l] = weight[threadIdx.x + l * THREADS];
    wait_for_previous();
    float squares = 0;
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        const int i = threadIdx.x + l * THREADS;
        if (i >= quads) break;
        v[l] = x[first + i];
        if (add != nullptr) {
            const float4 a = add[first + i];
            v[l].x += a.x, v[l].y += a.y, v[l].z += a.z, v[l].w += a.w;
            x[first + i] = v[l];
        }
        squares += v[l].x * v[l].x + v[l].y * v[l].y + v[l].z * v[l].z + v[l].w * v[l].w;
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) squares += shared[w];
    const float factor = rsqrtf(squares / (4 * quads) + eps);
#pragma unroll
    for (int l = 0; l < LOADS; l++) {
        const int i = threadIdx.x + l * THREADS;
        if (i >= quads) break;
        out[first + i] = make_uint2(Act::pack(v[l].x * factor * w[l].x, v[l].y * factor * w[l].y),
                                    Act::pack(v[l].z * factor * w[l].z, v[l].w * factor * w[l].w));
    }
}
