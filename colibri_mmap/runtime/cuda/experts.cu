// Products with one type of weights, TYPE: a row is read as it lies in the file. devicekernels.py
// makes a module of this file for each type, and knows the grids.
//
// A block is 32 lanes x warps per row group (y) x row groups (z); the warps of a row group share
// its units among their lanes. All counts are chosen by the caller within MOST_WARPS warps a block.
#include "blocks.cuh"

#ifndef ROWS
#define ROWS 2  // rows of a matrix at a time, so that activations are loaded once for them
#endif
#define MOST_WARPS 8

// sums[ROWS_][N] += rows x tokens; only the first `live` tokens are there.
template <class T, int ROWS_, int N>
DEVICE void accumulate(const u8* const (&row)[ROWS_], int columns, const Activations& a,
                       const int (&token)[N], int live, float (&sums)[ROWS_ * N]) {
    int units = columns / T::WEIGHTS * T::PARTS;
#pragma unroll 2
    for (int i = threadIdx.y * WARP + threadIdx.x; i < units; i += blockDim.y * WARP) {
        int block = i / T::PARTS, part = i % T::PARTS;
        typename T::Unit unit[ROWS_];
#pragma unroll
        for (int r = 0; r < ROWS_; r++) T::read_row(row[r], block, part, unit[r]);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j == 0 || j < live) {
                typename T::Operand with;
                T::read_activations(a, token[j], block, part, with);
#pragma unroll
                for (int r = 0; r < ROWS_; r++) sums[r * N + j] += T::product(unit[r], with);
            }
    }
}

// The sums over all lanes of a row group, in all lanes of its first warp.
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
        for (int i = 0; i < COUNT; i++)
            for (int y = 1; y < blockDim.y; y++) sums[i] += of_warp[first + y][i];
    __syncthreads();  // of_warp may be written again
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
    return (u64)(columns / T::WEIGHTS) * T::BYTES;
}

// out[t, r] = w[r] . x[t]; grid.y is over tokens.
template <class T, int N>
DEVICE void matvec(const u8* w, Activations a, float* out, int out_stride, int rows, int columns, int count) {
    int first = first_row(ROWS), token[N], t = blockIdx.y * N;
    const u8* row[ROWS];
    float sums[ROWS * N] = {};
    find_rows(w, bytes_of_row<T>(columns), first, rows, row);
#pragma unroll
    for (int j = 0; j < N; j++) token[j] = min(t + j, count - 1);
    accumulate<T, ROWS, N>(row, columns, a, token, count - t, sums);
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
// the activations col[p]. grid.y is over groups, grid.z over parts of a group.
template <class T, int N>
DEVICE void gate_up(const u64* gates, const u64* ups, const u64* gate_biases, const u64* up_biases,
                    const int* off, const int* col, Activations a, float* out, int rows, int columns,
                    int activation) {
    int group = blockIdx.y, r = first_row(1), end = fetch<int>(off + group + 1);
    u64 start = min(r, rows - 1) * bytes_of_row<T>(columns);
    const u8* const row[2] = {(const u8*)fetch<u64>(gates + group) + start,
                              (const u8*)fetch<u64>(ups + group) + start};
    for (int p = fetch<int>(off + group) + N * blockIdx.z; p < end; p += N * gridDim.z) {
        int token[N];
        float sums[2 * N] = {};
#pragma unroll
        for (int j = 0; j < N; j++) token[j] = fetch<int>(col + min(p + j, end - 1));
        accumulate<T, 2, N>(row, columns, a, token, end - p, sums);
        sum_of_row_group(sums);
        if (!writes() || r >= rows) continue;
        float gate_bias = bias_of(gate_biases, group, r), up_bias = bias_of(up_biases, group, r);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (p + j < end)
                out[(u64)(p + j) * rows + r] = activate(sums[j] + gate_bias, sums[N + j] + up_bias, activation);
    }
}

// out[p, r] = down . hidden[p] + bias, grids as of gate_up.
template <class T, int N>
DEVICE void down(const u64* downs, const u64* biases, const int* off, Activations a, float* out, int rows,
                 int columns) {
    int group = blockIdx.y, first = first_row(ROWS), end = fetch<int>(off + group + 1);
    const u8* row[ROWS];
    find_rows((const u8*)fetch<u64>(downs + group), bytes_of_row<T>(columns), first, rows, row);
    for (int p = fetch<int>(off + group) + N * blockIdx.z; p < end; p += N * gridDim.z) {
        int token[N];
        float sums[ROWS * N] = {};
#pragma unroll
        for (int j = 0; j < N; j++) token[j] = min(p + j, end - 1);
        accumulate<T, ROWS, N>(row, columns, a, token, end - p, sums);
        sum_of_row_group(sums);
        if (!writes()) continue;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= rows) break;
            float bias = bias_of(biases, group, first + r);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (p + j < end) out[(u64)(p + j) * rows + first + r] = sums[r * N + j] + bias;
        }
    }
}

// out[t, r] (+)= sum of weights[e] * (down[e] . hidden[row[e]] + bias[e]) over the entries e from
// off[t] to off[t + 1]: all their units are shared among the lanes, so that none idles. grid.y is
// over tokens.
template <class T>
DEVICE void down_weighted(const u64* downs, const u64* biases, const int* off, const int* hidden,
                          const float* weights, Activations a, float* out, int out_stride, int rows, int columns,
                          int add) {
    int token = blockIdx.y, first = first_row(ROWS), start = fetch<int>(off + token);
    int entries = fetch<int>(off + token + 1) - start, lane = threadIdx.y * WARP + threadIdx.x;
    u32 units = columns / T::WEIGHTS * T::PARTS;
    u32 reciprocal = 0xffffffffu / units + 1;  // units > 1; exact while i * units < 2^32
    u64 row_bytes = bytes_of_row<T>(columns);
    float sums[ROWS] = {};
#pragma unroll 2
    for (u32 i = lane; i < entries * units; i += blockDim.y * WARP) {
        u32 entry = __umulhi(i, reciprocal), rest = i - entry * units, e = start + entry;
        int block = rest / T::PARTS, part = rest % T::PARTS;
        const u8* row[ROWS];
        typename T::Unit unit;
        typename T::Operand with;
        find_rows((const u8*)fetch<u64>(downs + e), row_bytes, first, rows, row);
        T::read_activations(a, fetch<int>(hidden + e), block, part, with);
        float weight = fetch<float>(weights + e);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            T::read_row(row[r], block, part, unit);
            sums[r] += weight * T::product(unit, with);
        }
    }
    for (int e = start + lane; e < start + entries; e += blockDim.y * WARP)
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
#define X const void *x, const float *d, const float *s, int x_stride
#define A Activations{x, d, s, x_stride}

#define KERNELS(N)                                                                                        \
    extern "C" __global__ void JOINED(NAME(matvec_), _c##N)(                                              \
        const u8* w, X, float* out, int out_stride, int rows, int columns, int count) {                   \
        matvec<TYPE, N>(w, A, out, out_stride, rows, columns, count);                                     \
    }                                                                                                     \
    extern "C" __global__ void JOINED(NAME(gate_up_), _c##N)(                                             \
        const u64* gates, const u64* ups, const u64* gate_biases, const u64* up_biases, const int* off,   \
        const int* col, X, float* out, int rows, int columns, int activation) {                           \
        gate_up<TYPE, N>(gates, ups, gate_biases, up_biases, off, col, A, out, rows, columns, activation); \
    }                                                                                                     \
    extern "C" __global__ void JOINED(NAME(down_), _c##N)(                                                \
        const u64* downs, const u64* biases, const int* off, X, float* out, int rows, int columns) {      \
        down<TYPE, N>(downs, biases, off, A, out, rows, columns);                                         \
    }

KERNELS(1)
KERNELS(2)
KERNELS(4)
KERNELS(8)

extern "C" __global__ void NAME(down_weighted_)(const u64* downs, const u64* biases, const int* off,
                                                const int* hidden, const float* weights, X, float* out,
                                                int out_stride, int rows, int columns, int add) {
    down_weighted<TYPE>(downs, biases, off, hidden, weights, A, out, out_stride, rows, columns, add);
}

// out [rows, columns] = w as float32; a thread per unit.
extern "C" __global__ void NAME(dequantise_)(const u8* w, float* out, int rows, int columns) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, units = (u64)rows * (columns / TYPE::WEIGHTS * TYPE::PARTS);
    if (i >= units) return;
    u64 block = i / TYPE::PARTS;
    int part = (int)(i % TYPE::PARTS);
    TYPE::Unit unit;
    TYPE::unpack(w + block * TYPE::BYTES, part, unit);
    TYPE::write_floats(unit, part, out + block * TYPE::WEIGHTS);
}
