// CUDA C++ under g++: every thread of a block is a fiber. Warp collectives and __syncthreads() are
// meetings of fibers; what no meeting orders runs in the order that the caller chose (see simt.cpp).
// A kernel file is compiled behind this header, unchanged, and one line per kernel of
// SIMT_KERNELS makes it known to simt_run(). Blocks run one after another, so that races between
// blocks go unseen, as does everything about speed.
#pragma once
#define SIMT_SHIM 1
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <math.h>
#include <string>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __shared__ static  // blocks run one at a time
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#ifndef __restrict__
#define __restrict__ __restrict
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace simt {

struct Fiber;
struct Warp {  // two phases alternate, so that a fast lane may enter the next meeting
    uint64_t slot[2][32];
    unsigned arrived[2], mask[2];
};
extern Fiber* current;
extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;
extern unsigned lane, progress;

Warp& warp();
unsigned next_phase();
void pause();
void barrier();
[[noreturn]] void fail(const char* reason);

/// A meeting of the lanes in `mask`: each leaves `value`, then reads with get(slots, lane, mask).
template <class Result, class T, class Get>
static inline Result meet(unsigned mask, T value, Get get) {
    static_assert(sizeof(T) <= 8, "a slot has 8 bytes");
    Warp& here = warp();
    unsigned me = lane, bit = 1u << me, phase = next_phase();
    if (!(mask & bit)) fail("a lane is in a collective whose mask leaves it out");
    if (here.arrived[phase] == 0) here.mask[phase] = mask;
    if (here.mask[phase] != mask) fail("lanes of a warp disagree about the mask");
    memset(&here.slot[phase][me], 0, 8);
    memcpy(&here.slot[phase][me], &value, sizeof(T));
    if ((here.arrived[phase] |= bit) == mask) here.arrived[phase ^ 1] = 0;
    progress++;
    while (here.arrived[phase] != mask) pause();
    return get(here.slot[phase], me, mask);
}

template <class T>
static inline T read(const uint64_t* slots, unsigned from, unsigned mask) {
    uint64_t nothing = 0x7fedcba97fedcba9ull;  // a lane that is not there: not a number
    T value;
    memcpy(&value, from < 32 && (mask >> from & 1) ? &slots[from] : &nothing, sizeof(T));
    return value;
}

std::string launch(dim3 grid, dim3 block, unsigned seed, void (*body)(void*), void* argument);

/// 'p', 'i' or 'f' for each parameter of a kernel.
template <class T>
struct Letter {
    static_assert(std::is_pointer<T>::value, "parameters are pointers, int and float");
    static const char letter = 'p';
};
template <> struct Letter<int> { static const char letter = 'i'; };
template <> struct Letter<float> { static const char letter = 'f'; };

struct Entry {
    const char* name;
    std::string signature;
    std::string (*run)(const void* kernel, dim3 grid, dim3 block, unsigned seed, void** arguments);
    const void* kernel;
};

template <class... A>
struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <size_t... I>
    void operator()(std::index_sequence<I...>) { kernel(*(A*)arguments[I]...); }
    static void body(void* self) { (*(Call*)self)(std::index_sequence_for<A...>()); }
    static std::string run(const void* kernel, dim3 grid, dim3 block, unsigned seed, void** args) {
        Call call{(void (*)(A...))kernel, args};
        return launch(grid, block, seed, body, &call);
    }
};

template <class... A>
Entry entry(const char* name, void (*kernel)(A...)) {
    return {name, std::string{Letter<A>::letter...}, Call<A...>::run, (const void*)kernel};
}

static inline float bits_to_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

}  // namespace simt

// threads
#define threadIdx simt::thread_index
#define blockIdx simt::block_index
#define blockDim simt::block_size
#define gridDim simt::grid_size
#define __syncthreads simt::barrier

static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    simt::meet<int>(mask, 0, [](uint64_t*, unsigned, unsigned) { return 0; });
}
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return simt::meet<T>(mask, value, [=](uint64_t* s, unsigned lane, unsigned m) {
        return simt::read<T>(s, (lane & ~(width - 1)) | (from & (width - 1)), m);
    });
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int apart, int width = 32) {
    return simt::meet<T>(mask, value, [=](uint64_t* s, unsigned lane, unsigned m) {
        unsigned from = lane ^ apart, segment = lane / width;
        return simt::read<T>(s, from / width > segment ? lane : from, m);
    });
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned apart, int width = 32) {
    return simt::meet<T>(mask, value, [=](uint64_t* s, unsigned lane, unsigned m) {
        return simt::read<T>(s, (lane & (width - 1)) + apart < (unsigned)width ? lane + apart : lane, m);
    });
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned apart, int width = 32) {
    return simt::meet<T>(mask, value, [=](uint64_t* s, unsigned lane, unsigned m) {
        return simt::read<T>(s, (lane & (width - 1)) >= apart ? lane - apart : lane, m);
    });
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return simt::meet<unsigned>(mask, predicate, [](uint64_t* s, unsigned, unsigned m) {
        unsigned votes = 0;
        for (unsigned i = 0; i < 32; i++) votes |= (m >> i & 1 && (int)s[i] != 0) ? 1u << i : 0;
        return votes;
    });
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

// arithmetic
static inline float half_to_float(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}
static inline uint16_t float_to_half(float value) {
    _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
template <class T> static inline T __ldg(const T* address) { return *address; }
static inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(int8_t)((unsigned)a >> i) * (int)(int8_t)((unsigned)b >> i);
    return sum;
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32) | low) >> (shift & 31));
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline int __float2int_rn(float value) {  // saturates; 0 for what is not a number
    if (value != value) return 0;
    if (value >= 2147483648.0f) return INT_MAX;
    return value < -2147483648.0f ? INT_MIN : (int)std::nearbyintf(value);
}
static inline float __uint_as_float(unsigned bits) { return simt::bits_to_float(bits); }
static inline float __int_as_float(int bits) { return simt::bits_to_float((unsigned)bits); }
static inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
static inline int __float_as_int(float value) { return (int)__float_as_uint(value); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
