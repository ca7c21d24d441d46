// 16-bit values and the tensor-core product of 16 x 16 by 16 x 8, on every card from sm_75.
//
// A lane is (g, t) = (lane / 4, lane % 4). Fragments of the product D += A B, two values a register, low half first:
//   A: {(g, c0) (g, c1)} {(g+8, c0) (g+8, c1)} {(g, c2) (g, c3)} {(g+8, c2) (g+8, c3)}
//   B: {(c0, g) (c1, g)} {(c2, g) (c3, g)}
//   D, fp32: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
// where c0..c3 are the lane's columns of A and rows of B: any four, as long as all lanes together have all 16.
// Turing has no m16n8k16: two m16n8k8 stand for it, the second adding to the first.
#pragma once

#include <cuda_fp16.h>
#if __CUDA_ARCH__ >= 800
#include <cuda_bf16.h>
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

struct Fp16 {
    static constexpr float MAX = 65504.f;
    __device__ static float low(u32 pair) { return __low2float(*reinterpret_cast<__half2*>(&pair)); }
    __device__ static float high(u32 pair) { return __high2float(*reinterpret_cast<__half2*>(&pair)); }
    __device__ static unsigned short bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
    __device__ static u32 pack(float low, float high) {
        __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<u32*>(&pair);
    }
    __device__ static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
    }
};

#if __CUDA_ARCH__ >= 800
struct Bf16 {
    static constexpr float MAX = 3.3895314e38f;
    __device__ static float low(u32 pair) { return __uint_as_float(pair << 16); }
    __device__ static float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
    __device__ static unsigned short bits(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
    __device__ static u32 pack(float low, float high) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<u32*>(&pair);
    }
    __device__ static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
#endif

// The 16-bit type of the activations: -DBF16=1 or 0.
#if BF16
typedef Bf16 Act;
#else
typedef Fp16 Act;
#endif

// Programmatic dependent launch (sm_90 on): wait until the kernel before has finished and its writes are visible;
// let the kernel after start. Without it both do nothing, and the stream's order stands.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// x as the activations' type; what it cannot hold becomes its largest value and is counted.
__device__ __forceinline__ unsigned short to_act(float x, u64* saturated) {
    if (fabsf(x) > Act::MAX) {
        atomicAdd(saturated, 1ull);
        x = copysignf(Act::MAX, x);
    }
    return Act::bits(x);
}
