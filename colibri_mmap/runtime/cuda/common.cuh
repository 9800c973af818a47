// What every kernel file begins with: #include "common.cuh".
//
// Conventions
// - No system header: NVRTC has none at hand. devicekernels.py puts #include "..." of this folder in
//   place, once each; the same text compiles under g++ behind tests/runtime/shim/simt.h, which
//   defines SIMT_SHIM and gives each CUDA thread a fiber.
// - A kernel is `extern "C" __global__ void name(...)`; its parameters are pointers (64 bits), int
//   and float, nothing else. Names are unique over all files.
// - Matrices and vectors lie on 256-byte boundaries. A load may touch the aligned 4-byte word that
//   holds the last byte of a matrix, never a word that holds none of its bytes.
// - Weights, tables and activations are not written while a kernel reads them: fetch() reads them
//   through the read-only path, which also spares the generic addressing of pointers from tables.
// - Sums are taken in an order that depends on the launch alone, never on the schedule; there are
//   no atomic operations. Shared memory is static and holds anything at the start of a block.
// - Every thread of a warp takes part in a warp's collectives, every thread of a block in barriers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#define DEVICE static __device__ __forceinline__
#define WARP 32
#define ALL_LANES 0xffffffffu

#ifndef SIMT_SHIM
DEVICE float half_to_float(u16 bits) {
    float value;
    asm("{cvt.f32.f16 %0, %1;}" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 float_to_half(float value) {  // to nearest even
    u16 bits;
    asm("{cvt.rn.f16.f32 %0, %1;}" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

template <class T>
DEVICE T fetch(const void* address) {
    return __ldg((const T*)address);
}

DEVICE float sum_of_warp(float value) {
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart >>= 1)
        value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}

DEVICE float larger(float a, float b) { return (b > a || b != b) ? b : a; }  // not a number if any is

DEVICE float largest_of_warp(float value) {
#pragma unroll
    for (int apart = WARP / 2; apart > 0; apart >>= 1)
        value = larger(value, __shfl_xor_sync(ALL_LANES, value, apart));
    return value;
}

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
