// Dense matrix [N, K] times 1 to 16 tokens [M, K]: a warp a row, whose bytes are read once for all tokens. A row's
// sum has one order: lane l adds its vectors of 8 columns in turn, then lanes are added pairwise. So its bits depend
// on K and its own token alone.
// -D WEIGHT 0 fp16, 1 bf16, 2 fp32; X likewise; TOKENS 1, 2, 4, 8, 16.
#include "mma.cuh"

template <int TYPE>
struct Eight;
template <>
struct Eight<0> {
    __device__ static void read(const void* at, float (&x)[8]) {
        const uint4 raw = *static_cast<const uint4*>(at);
        const __half2* pairs = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[2 * i] = __low2float(pairs[i]), x[2 * i + 1] = __high2float(pairs[i]);
    }
};
template <>
struct Eight<1> {  // bf16 is the upper half of fp32: no type of the card is needed
    __device__ static void read(const void* at, float (&x)[8]) {
        const uint4 raw = *static_cast<const uint4*>(at);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};
template <>
struct Eight<2> {
    __device__ static void read(const void* at, float (&x)[8]) {
        const float4 a = static_cast<const float4*>(at)[0], b = static_cast<const float4*>(at)[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
};
constexpr int WEIGHT_SIZE = WEIGHT == 2 ? 4 : 2, X_SIZE = X == 2 ? 4 : 2, WARPS = 4;

// out fp32 [M, N] = x W^T + bias + residual, the last two or null; rows of out and residual lie out_stride apart.
// sigmoid: of the sum, before the residual.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
dense_gemv(const unsigned char* __restrict__ weight, const unsigned char* __restrict__ x, const float* bias,
           const float* residual, float* out, int num_rows, int num_cols, int num_tokens, int out_stride, int sigmoid) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= num_rows) return;
    const unsigned char* mine = weight + (long long)row * num_cols * WEIGHT_SIZE;
    float sum[TOKENS] = {};
    for (int column = 8 * lane; column < num_cols; column += 256) {
        float w[8], v[8];
        Eight<WEIGHT>::read(mine + column * WEIGHT_SIZE, w);
#pragma unroll
        for (int m = 0; m < TOKENS; ++m) {
            if (m >= num_tokens) break;
            Eight<X>::read(x + ((long long)m * num_cols + column) * X_SIZE, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[m] = fmaf(w[i], v[i], sum[m]);
        }
    }
#pragma unroll
    for (int m = 0; m < TOKENS; ++m)
        for (int step = 16; step; step >>= 1) sum[m] += __shfl_xor_sync(~0u, sum[m], step);
    if (lane) return;
#pragma unroll
    for (int m = 0; m < TOKENS; ++m) {
        if (m >= num_tokens) break;
        const long long at = (long long)m * out_stride + row;
        float value = sum[m] + (bias ? bias[row] : 0.f);
        if (sigmoid) value = 1.f / (1.f + expf(-value));
        out[at] = residual ? residual[at] + value : value;
    }
}
