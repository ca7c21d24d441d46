// Dense matrix [N, K] times 1 to 16 tokens [M, K]: a warp a row, whose bytes are read once for all tokens. A row's
// sum has one order: lane l adds its vectors of 8 columns in turn, then lanes are added pairwise. So its bits depend
// on K and its own token alone.
// -D WEIGHT 0 fp16, 1 bf16, 2 fp32; X likewise; TOKENS 1, 2, 4, 8, 16.
#include "mma.cuh"

// Eight values side by side, as they come: sent for first, used later.
template <int TYPE>
struct Eight {
    uint4 raw[TYPE == 2 ? 2 : 1];

    __device__ __forceinline__ void load(const unsigned char* at) {
        raw[0] = reinterpret_cast<const uint4*>(at)[0];
        if constexpr (TYPE == 2) raw[1] = reinterpret_cast<const uint4*>(at)[1];
    }
    __device__ __forceinline__ void get(float (&x)[8]) const {
        const u32 words[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (TYPE == 2) {
                const u32 more[4] = {raw[1].x, raw[1].y, raw[1].z, raw[1].w};
                x[i] = __uint_as_float(words[i]), x[4 + i] = __uint_as_float(more[i]);
            } else if constexpr (TYPE == 1) {  // bf16 is the upper half of fp32: no type of the card is needed
                x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
            } else {
                x[2 * i] = Fp16::low(words[i]), x[2 * i + 1] = Fp16::high(words[i]);
            }
        }
    }
};
constexpr int WEIGHT_SIZE = WEIGHT == 2 ? 4 : 2, X_SIZE = X == 2 ? 4 : 2, WARPS = 4;
constexpr int AHEAD = WEIGHT == 2 ? 4 : 8;  // eights of a row that a lane has sent for

// out fp32 [M, N] = x W^T + bias + residual, the last two or null; rows of out and residual lie out_stride apart.
// sigmoid: of the sum, before the residual.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
dense_gemv(const unsigned char* weight, const unsigned char* x, const float* bias, const float* residual, float* out,
           int num_rows, int num_cols, int num_tokens, int out_stride, int sigmoid) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= num_rows) return;
    const unsigned char* mine = weight + (long long)row * num_cols * WEIGHT_SIZE;
    Eight<WEIGHT> ahead[AHEAD];
    const auto send = [&](int l, int column) {
        if (column < num_cols) ahead[l].load(mine + column * WEIGHT_SIZE);
    };
#pragma unroll
    for (int l = 0; l < AHEAD; ++l) send(l, 8 * lane + 256 * l);
    let_next_start();
    wait_for_previous();
    float sum[TOKENS] = {};
    for (int first = 8 * lane; first < num_cols; first += 256 * AHEAD) {
#pragma unroll
        for (int l = 0; l < AHEAD; ++l) {
            const int column = first + 256 * l;
            if (column >= num_cols) break;
            float w[8], v[8];
            ahead[l].get(w);
            send(l, column + 256 * AHEAD);
#pragma unroll
            for (int m = 0; m < TOKENS; ++m) {
                if (m >= num_tokens) break;
                Eight<X> token;
                token.load(x + ((long long)m * num_cols + column) * X_SIZE);
                token.get(v);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[m] = fmaf(w[i], v[i], sum[m]);
            }
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
