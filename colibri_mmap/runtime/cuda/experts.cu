// Products with one type of weights, TYPE: a row is read as it lies in the file. devicekernels.py
// makes a module of this file for each type, and knows the grids.
//
// A block is 32 lanes x warps per row group (y) x row groups (z); the warps of a row group share
// its units among their lanes. All counts are chosen by the caller within MOST_WARPS warps a block.
#include "blocks.cuh"

#ifndef ROWS
#define ROWS 2  // rows of a matrix at a time, so that activations are loaded once for them
#endif
#ifndef COLUMNS_AT_ONCE
#define COLUMNS_AT_ONCE 2  // of the activations, whose loads are under way together
#endif
#define MOST_WARPS 8

// Unit i of a row, counted over its blocks.
template <class T>
DEVICE void load_unit(const u8* row, u32 i, typename T::Raw& raw) {
    T::load(row + i / T::PARTS * T::BYTES, i % T::PARTS, raw);
}

template <class T>
DEVICE void load_operand(const Activations& a, u32 token, u32 i, typename T::Operand& to) {
    T::load_activations(a, token * a.stride + i / T::PARTS * T::WEIGHTS, i % T::PARTS, to);
}

template <class T>
DEVICE u32 units_of(int columns) {
    return (u32)columns / T::WEIGHTS * T::PARTS;
}

DEVICE u32 lane_of_row_group() { return threadIdx.y * WARP + threadIdx.x; }

// The first unit of a lane in each row, which is under way while other things are looked up.
template <class T, int ROWS_>
DEVICE void load_first(const u8* const (&row)[ROWS_], int columns, typename T::Raw (&raw)[ROWS_]) {
    if (lane_of_row_group() < units_of<T>(columns))
#pragma unroll
        for (int r = 0; r < ROWS_; r++) load_unit<T>(row[r], lane_of_row_group(), raw[r]);
}

// sums[ROWS_][N] += rows x tokens; only the first `live` tokens count. `raw` holds the first units.
// Later ones are loaded when those before are used up: what spares registers, and lets more warps
// run, gives more than loading ahead.
template <class T, int ROWS_, int N>
DEVICE void accumulate(const u8* const (&row)[ROWS_], int columns, const Activations& a, const u32 (&token)[N],
                       int live, typename T::Raw (&raw)[ROWS_], float (&sums)[ROWS_ * N]) {
    const int TOGETHER = N < COLUMNS_AT_ONCE ? N : COLUMNS_AT_ONCE;
    u32 units = units_of<T>(columns), i = lane_of_row_group();
#pragma unroll 2
    while (i < units) {
        u32 part = i % T::PARTS;
        typename T::Unit unit[ROWS_];
#pragma unroll
        for (int r = 0; r < ROWS_; r++) T::unpack(raw[r], part, unit[r]);
#pragma unroll
        for (int from = 0; from < N; from += TOGETHER)
            if (from == 0 || from < live) {
                typename T::Operand with[TOGETHER];
#pragma unroll
                for (int j = 0; j < TOGETHER; j++) load_operand<T>(a, token[from + j], i, with[j]);
#pragma unroll
                for (int j = 0; j < TOGETHER; j++)
#pragma unroll
                    for (int r = 0; r < ROWS_; r++)
                        sums[r * N + from + j] += T::product(unit[r], part, with[j]);
            }
        i += blockDim.y * WARP;
#pragma unroll
        for (int r = 0; r < ROWS_; r++)
            if (i < units) load_unit<T>(row[r], i, raw[r]);
    }
}

// The sums over all lanes of a row group, in all lanes of its first warp; once in a kernel.
template <int COUNT>
DEVICE void sum_of_row_group(float (&sums)[COUNT]) {
    __shared__ float of_warp[MOST_WARPS][COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = sum_of_warp(sums[i]);
    if (blockDim.y == 1) return;
    int first = threadIdx.z * blockDim.y;
    if (threadIdx.x == 0)
#pragma unroll
        for (int i = 0; i < COUNT; i++) of_warp[first + threadIdx.y][i] = sums[i];
    __syncthreads();
    if (threadIdx.y == 0)
#pragma unroll
        for (int y = 1; y < MOST_WARPS; y++)
            if (y < blockDim.y)
#pragma unroll
                for (int i = 0; i < COUNT; i++) sums[i] += of_warp[first + y][i];
}

// The row groups of a block that has `per_group` rows each; the last rows may be there twice.
DEVICE int first_row(int per_group) { return (blockIdx.x * blockDim.z + threadIdx.z) * per_group; }
DEVICE bool writes() { return threadIdx.x == 0 && threadIdx.y == 0; }

template <int ROWS_>
DEVICE void find_rows(const u8* matrix, u64 row_bytes, int first, int rows, const u8* (&row)[ROWS_]) {
#pragma unroll
    for (int r = 0; r < ROWS_; r++) row[r] = matrix + min(first + r, rows - 1) * row_bytes;
}

template <class T>
DEVICE u64 bytes_of_row(int columns) {
    return (u64)((u32)columns / T::WEIGHTS) * T::BYTES;
}

// out[t, r] = w[r] . x[t]; grid.y is over tokens.
template <class T, int N>
DEVICE void matvec(const u8* w, Activations a, float* out, int out_stride, int rows, int columns, int count) {
    int first = first_row(ROWS), t = blockIdx.y * N;
    u32 token[N];
    const u8* row[ROWS];
    typename T::Raw raw[ROWS];
    float sums[ROWS * N] = {};
    find_rows(w, bytes_of_row<T>(columns), first, rows, row);
    load_first<T>(row, columns, raw);
#pragma unroll
    for (int j = 0; j < N; j++) token[j] = min(t + j, count - 1);
    accumulate<T, ROWS, N>(row, columns, a, token, count - t, raw, sums);
    sum_of_row_group(sums);
    if (!writes()) return;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (t + j < count && first + r < rows) out[(u64)(t + j) * out_stride + first + r] = sums[r * N + j];
}

DEVICE float bias_of(const u64* biases, int group, int row) {
    const float* bias = (const float*)fetch<u64>(biases + group);
    return bias ? fetch<float>(bias + row) : 0.0f;
}

// silu(gate) * up, or gpt-oss's (up + 1) * gate * sigmoid(1.702 gate), gate <= 7 and |up| <= 7.
DEVICE float activate(float gate, float up, int activation) {
    if (activation == 0) return silu(gate) * up;
    float g = gate > 7.0f ? 7.0f : gate, u = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return (u + 1.0f) * (g / (1.0f + expf(-1.702f * g)));
}

// out[p, r] = activation of gate and up of pair p: group g has the pairs off[g] to off[g + 1], pair p
// the activations col[p]. grid.y is over groups, grid.z over N pairs of a group at a time.
template <class T, int N>
DEVICE void gate_up(const u64* gates, const u64* ups, const u64* gate_biases, const u64* up_biases,
                    const int* off, const int* col, Activations a, float* out, int rows, int columns,
                    int activation) {
    int group = blockIdx.y, r = first_row(1);
    u64 start = min(r, rows - 1) * bytes_of_row<T>(columns);
    const u8* const row[2] = {(const u8*)fetch<u64>(gates + group) + start,
                              (const u8*)fetch<u64>(ups + group) + start};
    typename T::Raw raw[2];
    load_first<T>(row, columns, raw);
    int p = fetch<int>(off + group) + N * blockIdx.z, end = fetch<int>(off + group + 1);
    if (p >= end) return;  // all of the block
    u32 token[N];
    float sums[2 * N] = {};
#pragma unroll
    for (int j = 0; j < N; j++) token[j] = fetch<int>(col + min(p + j, end - 1));
    accumulate<T, 2, N>(row, columns, a, token, end - p, raw, sums);
    sum_of_row_group(sums);
    if (!writes() || r >= rows) return;
    float gate_bias = bias_of(gate_biases, group, r), up_bias = bias_of(up_biases, group, r);
#pragma unroll
    for (int j = 0; j < N; j++)
        if (p + j < end)
            out[(u64)(p + j) * rows + r] = activate(sums[j] + gate_bias, sums[N + j] + up_bias, activation);
}

// out[p, r] = down . hidden[p] + bias, grids as of gate_up, for experts that several tokens share.
template <class T, int N>
DEVICE void down(const u64* downs, const u64* biases, const int* off, Activations a, float* out, int rows,
                 int columns) {
    int group = blockIdx.y, first = first_row(ROWS);
    const u8* row[ROWS];
    find_rows((const u8*)fetch<u64>(downs + group), bytes_of_row<T>(columns), first, rows, row);
    typename T::Raw raw[ROWS];
    load_first<T>(row, columns, raw);
    int p = fetch<int>(off + group) + N * blockIdx.z, end = fetch<int>(off + group + 1);
    if (p >= end) return;
    u32 token[N];
    float sums[ROWS * N] = {};
#pragma unroll
    for (int j = 0; j < N; j++) token[j] = min(p + j, end - 1);
    accumulate<T, ROWS, N>(row, columns, a, token, end - p, raw, sums);
    sum_of_row_group(sums);
    if (!writes()) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (first + r >= rows) return;
        float bias = bias_of(biases, group, first + r);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (p + j < end) out[(u64)(p + j) * rows + first + r] = sums[r * N + j] + bias;
    }
}

// Unit i of all entries' units, for each row.
template <class T>
DEVICE void load_entry(const u64* downs, u64 row_bytes, int first, int rows, u32 units, u32 reciprocal, u32 i,
                       typename T::Raw (&raw)[ROWS]) {
    u32 e = __umulhi(2 * i, reciprocal);
    const u8* row[ROWS];
    find_rows((const u8*)fetch<u64>(downs + e), row_bytes, first, rows, row);
#pragma unroll
    for (int r = 0; r < ROWS; r++) load_unit<T>(row[r], i - e * units, raw[r]);
}

// out[t, r] (+)= sum of weights[e] * (down[e] . hidden[row[e]] + bias[e]) over the entries e from
// off[t] to off[t + 1]: all their units are shared among the lanes, so that none idles. grid.y is
// over tokens; one token has `entries`, and off is not read.
template <class T>
DEVICE void down_weighted(const u64* downs, const u64* biases, const int* off, const int* hidden,
                          const float* weights, Activations a, float* out, int out_stride, int rows, int columns,
                          int entries, int add) {
    int token = blockIdx.y, first = first_row(ROWS), start = 0;
    if (gridDim.y > 1) {
        start = fetch<int>(off + token);
        entries = fetch<int>(off + token + 1) - start;
    }
    u32 units = units_of<T>(columns), all = entries * units, i = lane_of_row_group();
    u32 reciprocal = 0x7fffffffu / units + 1;  // of 2^31; exact while all * units is less
    u64 row_bytes = bytes_of_row<T>(columns);
    float sums[ROWS] = {};
    typename T::Raw next[ROWS];
    if (i < all) load_entry<T>(downs + start, row_bytes, first, rows, units, reciprocal, i, next);
#pragma unroll 2
    while (i < all) {
        u32 e = __umulhi(2 * i, reciprocal), rest = i - e * units, after = i + blockDim.y * WARP;
        typename T::Raw raw[ROWS];
        typename T::Unit unit;
        typename T::Operand with;
#pragma unroll
        for (int r = 0; r < ROWS; r++) raw[r] = next[r];
        if (after < all) load_entry<T>(downs + start, row_bytes, first, rows, units, reciprocal, after, next);
        load_operand<T>(a, fetch<int>(hidden + start + e), rest, with);
        float weight = fetch<float>(weights + start + e);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            T::unpack(raw[r], rest % T::PARTS, unit);
            sums[r] += weight * T::product(unit, rest % T::PARTS, with);
        }
        i = after;
    }
    for (int e = start + lane_of_row_group(); e < start + entries; e += blockDim.y * WARP)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            sums[r] += fetch<float>(weights + e) * bias_of(biases, e, min(first + r, rows - 1));
    sum_of_row_group(sums);
    if (!writes()) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (first + r < rows) {
            float* to = out + (u64)token * out_stride + first + r;
            *to = (add ? *to : 0.0f) + sums[r];
        }
}

#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define NAME(what) JOINED(what, TYPE)
#define X const void *x, const float2 *scales, int x_stride
#define A Activations{x, scales, (u32)x_stride}

#define KERNELS(N)                                                                                        \
    extern "C" __global__ void JOINED(NAME(matvec_), _c##N)(                                              \
        const u8* w, X, float* out, int out_stride, int rows, int columns, int count) {                   \
        matvec<TYPE, N>(w, A, out, out_stride, rows, columns, count);                                     \
    }                                                                                                     \
    extern "C" __global__ void JOINED(NAME(gate_up_), _c##N)(                                             \
        const u64* gates, const u64* ups, const u64* gate_biases, const u64* up_biases, const int* off,   \
        const int* col, X, float* out, int rows, int columns, int activation) {                           \
        gate_up<TYPE, N>(gates, ups, gate_biases, up_biases, off, col, A, out, rows, columns, activation); \
    }

#define DOWN(N)                                                                                      \
    extern "C" __global__ void JOINED(NAME(down_), _c##N)(                                           \
        const u64* downs, const u64* biases, const int* off, X, float* out, int rows, int columns) { \
        down<TYPE, N>(downs, biases, off, A, out, rows, columns);                                    \
    }

KERNELS(1)
KERNELS(2)
KERNELS(4)
KERNELS(8)
DOWN(2)
DOWN(4)
DOWN(8)

extern "C" __global__ void NAME(down_weighted_)(const u64* downs, const u64* biases, const int* off,
                                                const int* hidden, const float* weights, X, float* out,
                                                int out_stride, int rows, int columns, int entries, int add) {
    down_weighted<TYPE>(downs, biases, off, hidden, weights, A, out, out_stride, rows, columns, entries, add);
}

// out [rows, columns] = w as float32; a thread per unit.
extern "C" __global__ void NAME(dequantise_)(const u8* w, float* out, int rows, int columns) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, units = (u64)rows * units_of<TYPE>(columns);
    if (i >= units) return;
    u64 block = i / TYPE::PARTS;
    u32 part = (u32)(i % TYPE::PARTS);
    TYPE::Raw raw;
    TYPE::Unit unit;
    TYPE::load(w + block * TYPE::BYTES, part, raw);
    TYPE::unpack(raw, part, unit);
    TYPE::write_floats(unit, part, out + block * TYPE::WEIGHTS);
}
