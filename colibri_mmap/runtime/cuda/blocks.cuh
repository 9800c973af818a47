// The blocks of ggml (ggml-common.h) as units of operands.cuh: which lane reads which bytes.
// Neighbouring lanes read neighbouring bytes, with the widest loads that the block's alignment has.
#pragma once
#include "operands.cuh"

// N words at any byte address, of which only the aligned words that hold them are loaded.
template <u32 N>
struct Words {
    u32 aligned[N + 1], shift;

    static __device__ __forceinline__ Words at(const u8* address) {
        const u32* from = (const u32*)((u64)address & ~3ull);
        Words words;
        words.shift = 8 * ((u32)(u64)address & 3);
#pragma unroll
        for (u32 i = 0; i < N; i++) words.aligned[i] = fetch<u32>(from + i);
        words.aligned[N] = words.shift ? fetch<u32>(from + N) : 0u;
        return words;
    }

    __device__ __forceinline__ u32 operator[](u32 i) const {
        return __funnelshift_r(aligned[i], aligned[i + 1], shift);
    }
};

DEVICE float low_half(u32 pair) { return half_to_float((u16)pair); }
DEVICE float high_half(u32 pair) { return half_to_float((u16)(pair >> 16)); }

// Each byte (below 128) minus the byte of `less` (up to 128), as signed bytes.
DEVICE int minus_bytes(u32 bytes, u32 less) { return (int)(((bytes | 0x80808080u) - less) ^ 0x80808080u); }

// Bits 0 to 3 to bit 4 of the four bytes.
DEVICE u32 four_bits(u32 bits) { return ((bits & 15u) * 0x02040810u) & 0x10101010u; }

// Entry of a table of 16 bytes for each nibble: even nibbles to `even`, odd ones to `odd`.
DEVICE void look_up(u32 nibbles, const u32 (&table)[4], int& even, int& odd) {
    u32 high = 0x32103210u | ((nibbles & 0x88888888u) >> 1), mixed[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 below = __byte_perm(table[0], table[1], nibbles >> (16 * i));
        u32 above = __byte_perm(table[2], table[3], nibbles >> (16 * i));
        mixed[i] = __byte_perm(below, above, high >> (16 * i));
    }
    even = (int)__byte_perm(mixed[0], mixed[1], 0x6420);
    odd = (int)__byte_perm(mixed[0], mixed[1], 0x7531);
}

// ---------------------------------------------------------------- 32 weights
// Byte i holds weight i in its low nibble and weight i + 16 in the high one.
template <class T, Sums SUMS>
struct Nibbles : Quantised<T, 2, 4, 1, SUMS> {
    static const u32 WEIGHTS = 32, PARTS = 1;
    DEVICE u32 start(u32 part, u32 run) { return 16 * run; }
};

struct q4_0 : Nibbles<q4_0, NO_OFFSET> {  // f16 d, u8 q[16]; d * (q - 8)
    static const u32 BYTES = 18;
    struct Raw {
        Words<4> q;
        u16 d;
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = Words<4>::at(block + 2);
        raw.d = fetch<u16>(block);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        unit.scale[0] = half_to_float(raw.d);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            unit.w[0][i] = minus_bytes(raw.q[i] & 0x0f0f0f0fu, 0x08080808u);
            unit.w[1][i] = minus_bytes((raw.q[i] >> 4) & 0x0f0f0f0fu, 0x08080808u);
        }
    }
};

struct q4_1 : Nibbles<q4_1, SUM_OF_32> {  // f16 d, f16 m, u8 q[16]; d * q + m
    static const u32 BYTES = 20;
    struct Raw {
        u32 head, q[4];
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.head = fetch<u32>(block);
#pragma unroll
        for (u32 i = 0; i < 4; i++) raw.q[i] = fetch<u32>(block + 4 + 4 * i);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        unit.scale[0] = low_half(raw.head);
        unit.offset[0] = high_half(raw.head);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            unit.w[0][i] = (int)(raw.q[i] & 0x0f0f0f0fu);
            unit.w[1][i] = (int)((raw.q[i] >> 4) & 0x0f0f0f0fu);
        }
    }
};

struct q5_0 : Nibbles<q5_0, NO_OFFSET> {  // f16 d, u32 high bits, u8 q[16]; d * (q - 16)
    static const u32 BYTES = 22;
    struct Raw {
        Words<4> q;
        Words<1> high;
        u16 d;
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = Words<4>::at(block + 6);
        raw.high = Words<1>::at(block + 2);
        raw.d = fetch<u16>(block);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        unit.scale[0] = half_to_float(raw.d);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 bits = raw.high[0] >> (4 * i), q = raw.q[i];
            unit.w[0][i] = minus_bytes((q & 0x0f0f0f0fu) | four_bits(bits), 0x10101010u);
            unit.w[1][i] = minus_bytes(((q >> 4) & 0x0f0f0f0fu) | four_bits(bits >> 16), 0x10101010u);
        }
    }
};

struct q5_1 : Nibbles<q5_1, SUM_OF_32> {  // f16 d, f16 m, u32 high bits, u8 q[16]; d * q + m
    static const u32 BYTES = 24;
    struct Raw {
        uint2 head, q[2];
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.head = fetch<uint2>(block);
#pragma unroll
        for (u32 i = 0; i < 2; i++) raw.q[i] = fetch<uint2>(block + 8 + 8 * i);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        const u32 words[4] = {raw.q[0].x, raw.q[0].y, raw.q[1].x, raw.q[1].y};
        unit.scale[0] = low_half(raw.head.x);
        unit.offset[0] = high_half(raw.head.x);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 bits = raw.head.y >> (4 * i), q = words[i];
            unit.w[0][i] = (int)((q & 0x0f0f0f0fu) | four_bits(bits));
            unit.w[1][i] = (int)(((q >> 4) & 0x0f0f0f0fu) | four_bits(bits >> 16));
        }
    }
};

struct q8_0 : Quantised<q8_0, 1, 4, 1, NO_OFFSET> {  // f16 d, i8 q[32]
    static const u32 WEIGHTS = 32, BYTES = 34, PARTS = 2;
    struct Raw {
        Words<4> q;
        u16 d;
    };
    DEVICE u32 start(u32 part, u32 run) { return 16 * part; }
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = Words<4>::at(block + 2 + 16 * part);
        raw.d = fetch<u16>(block);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        unit.scale[0] = half_to_float(raw.d);
#pragma unroll
        for (u32 i = 0; i < 4; i++) unit.w[0][i] = (int)raw.q[i];
    }
};

struct mxfp4 : Nibbles<mxfp4, NO_OFFSET> {  // u8 e, u8 q[16]; 2^(e - 128) * table[q]
    static const u32 BYTES = 17;
    struct Raw {
        Words<4> q;
        u8 e;
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = Words<4>::at(block + 1);
        raw.e = fetch<u8>(block);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        // 0 1 2 3 4 6 8 12 and their negatives: twice the values of E2M1
        const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
        u32 e = raw.e;
        unit.scale[0] = __uint_as_float(e > 1 ? (e - 1) << 23 : 0x00200000u << e);
#pragma unroll
        for (u32 i = 0; i < 4; i++) look_up(raw.q[i], table, unit.w[0][i], unit.w[1][i]);
    }
};

// ---------------------------------------------------------------- 256 weights
// The 6-bit scales and minima of Q4_K and Q5_K: those of the groups 2 * pair and 2 * pair + 1.
template <class Unit>
DEVICE void k_scales(uint4 head, u32 pair, Unit& unit) {
    u32 shift = 16 * (pair & 1), scales = head.y >> shift, minima = head.z >> shift, rest = head.w >> shift;
    u32 s = pair < 2 ? scales & 0x3f3fu : (rest & 0x0f0fu) | ((scales >> 2) & 0x3030u);
    u32 m = pair < 2 ? minima & 0x3f3fu : ((rest >> 4) & 0x0f0fu) | ((minima >> 2) & 0x3030u);
    float d = low_half(head.x), dmin = -high_half(head.x);
    unit.scale[0] = d * (float)(s & 255u);
    unit.scale[1] = d * (float)(s >> 8);
    unit.offset[0] = dmin * (float)(m & 255u);
    unit.offset[1] = dmin * (float)(m >> 8);
}

// Groups of 32 weights in pairs: low nibbles of 32 bytes, then their high nibbles.
template <class T>
struct GroupPairs : Quantised<T, 2, 4, 2, SUM_OF_32> {
    static const u32 WEIGHTS = 256, PARTS = 8;
    DEVICE u32 start(u32 part, u32 run) { return 64 * (part >> 1) + 16 * (part & 1) + 32 * run; }
    DEVICE bool takes_sum(u32 part) { return (part & 1) == 0; }

    template <class Operand>
    DEVICE void load_scales(const Activations& a, u32 at, u32 part, Operand& to) {  // neighbours
        float4 both = fetch<float4>(a.scales + (at / 32 + (part & ~1u)));
        to.d[0] = both.x;
        to.s[0] = both.y;
        to.d[1] = both.z;
        to.s[1] = both.w;
    }
};

struct q4_k : GroupPairs<q4_k> {  // f16 d, f16 dmin, u8 scales[12], u8 q[128]
    static const u32 BYTES = 144;
    struct Raw {
        uint4 head, q;
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = fetch<uint4>(block + 16 + 16 * part);
        raw.head = fetch<uint4>(block);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        const u32 q[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
        k_scales(raw.head, part >> 1, unit);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            unit.w[0][i] = (int)(q[i] & 0x0f0f0f0fu);
            unit.w[1][i] = (int)((q[i] >> 4) & 0x0f0f0f0fu);
        }
    }
};

struct q5_k : GroupPairs<q5_k> {  // f16 d, f16 dmin, u8 scales[12], u8 high[32], u8 q[128]
    static const u32 BYTES = 176;
    struct Raw {
        uint4 head, high, q;
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = fetch<uint4>(block + 48 + 16 * part);
        raw.high = fetch<uint4>(block + 16 + 16 * (part & 1));
        raw.head = fetch<uint4>(block);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        const u32 q[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
        const u32 bits[4] = {raw.high.x, raw.high.y, raw.high.z, raw.high.w};
        k_scales(raw.head, part >> 1, unit);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 high = bits[i] >> (part & ~1u);  // the bit of the first group
            unit.w[0][i] = (int)((q[i] & 0x0f0f0f0fu) | ((high << 4) & 0x10101010u));
            unit.w[1][i] = (int)(((q[i] >> 4) & 0x0f0f0f0fu) | ((high << 3) & 0x10101010u));
        }
    }
};

struct q6_k : Quantised<q6_k, 2, 4, 2, NO_OFFSET> {  // u8 low[128], u8 high[64], i8 scales[16], f16 d
    static const u32 WEIGHTS = 256, BYTES = 210, PARTS = 8;
    struct Raw {
        Words<4> low, high;
        u16 d;
        i8 scales[2];
    };
    DEVICE u32 start(u32 part, u32 run) { return 128 * (part >> 2) + 16 * (part & 3) + 64 * run; }
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.low = Words<4>::at(block + 16 * part);
        raw.high = Words<4>::at(block + 128 + 32 * (part >> 2) + 16 * (part & 1));
        raw.d = fetch<u16>(block + 208);
#pragma unroll
        for (u32 run = 0; run < 2; run++) raw.scales[run] = fetch<i8>(block + 192 + start(part, run) / 16);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        float d = half_to_float(raw.d);
        u32 shift = part & 2;
#pragma unroll
        for (u32 run = 0; run < 2; run++) {
            unit.scale[run] = d * (float)raw.scales[run];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 low = (raw.low[i] >> (4 * run)) & 0x0f0f0f0fu;
                u32 high = (raw.high[i] >> (shift + 4 * run)) & 0x03030303u;
                unit.w[run][i] = minus_bytes(low | high << 4, 0x20202020u);
            }
        }
    }
};

// Two bits a weight: bits 2j and 2j + 1 of 32 bytes are the weights 32j to 32j + 31 of a half.
template <class T, Sums SUMS>
struct TwoBits : Quantised<T, 4, 2, 4, SUMS> {
    static const u32 WEIGHTS = 256, PARTS = 8;
    DEVICE u32 start(u32 part, u32 run) { return 128 * (part >> 2) + 8 * (part & 3) + 32 * run; }
};

struct q2_k : TwoBits<q2_k, SUM_OF_RUN> {  // u8 scales[16], u8 q[64], f16 d, f16 dmin
    static const u32 BYTES = 84;
    struct Raw {
        u32 q[2], head, fields[2];
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.head = fetch<u32>(block + 80);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            raw.q[i] = fetch<u32>(block + 16 + 8 * part + 4 * i);
            raw.fields[i] = fetch<u32>(block + 8 * (part >> 2) + 4 * i);
        }
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        u32 late = (part >> 1) & 1;
        float d = low_half(raw.head), dmin = -high_half(raw.head);
#pragma unroll
        for (u32 run = 0; run < 4; run++) {
            u32 field = raw.fields[run >> 1] >> (16 * (run & 1) + 8 * late);
#pragma unroll
            for (u32 i = 0; i < 2; i++) unit.w[run][i] = (int)((raw.q[i] >> (2 * run)) & 0x03030303u);
            unit.scale[run] = d * (float)(field & 15u);
            unit.offset[run] = dmin * (float)((field >> 4) & 15u);
        }
    }
};

struct q3_k : TwoBits<q3_k, NO_OFFSET> {  // u8 high[32], u8 q[64], u8 scales[12], f16 d
    static const u32 BYTES = 110;
    struct Raw {
        Words<2> q, high;
        Words<3> fields;
        u16 d;
    };
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.q = Words<2>::at(block + 32 + 8 * part);
        raw.high = Words<2>::at(block + 8 * (part & 3));
        raw.fields = Words<3>::at(block + 96);
        raw.d = fetch<u16>(block + 108);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        u32 half = part >> 2, late = (part >> 1) & 1;
        float d = half_to_float(raw.d);
#pragma unroll
        for (u32 run = 0; run < 4; run++) {
            u32 shift = 8 * (2 * (run & 1) + late) + 4 * half;
            u32 low = (raw.fields[run >> 1] >> shift) & 15u;
            u32 high = (raw.fields[2] >> (shift + 2 * (run >> 1))) & 3u;
            unit.scale[run] = d * (float)((int)(low | high << 4) - 32);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 q = (raw.q[i] >> (2 * run)) & 0x03030303u, bits = raw.high[i] >> (4 * half + run);
                unit.w[run][i] = minus_bytes(q | (bits & 0x01010101u) << 2, 0x04040404u);
            }
        }
    }
};

// f16 d, u16 high bits of scales, u8 low nibbles of scales[4], u8 q[128]; d * (scale - 32) * table[q]
struct iq4_xs : Quantised<iq4_xs, 2, 4, 1, NO_OFFSET> {
    static const u32 WEIGHTS = 256, BYTES = 136, PARTS = 8;
    struct Raw {
        uint2 head, q[2];
    };
    DEVICE u32 start(u32 part, u32 run) { return 32 * part + 16 * run; }
    DEVICE void load(const u8* block, u32 part, Raw& raw) {
        raw.head = fetch<uint2>(block);
#pragma unroll
        for (u32 i = 0; i < 2; i++) raw.q[i] = fetch<uint2>(block + 8 + 16 * part + 8 * i);
    }
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        // -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113
        const u32 table[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
        u32 low = (raw.head.y >> (4 * part)) & 15u, high = (raw.head.x >> (16 + 2 * part)) & 3u;
        unit.scale[0] = low_half(raw.head.x) * (float)((int)(low | high << 4) - 32);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            look_up(raw.q[i].x, table, unit.w[0][2 * i], unit.w[1][2 * i]);
            look_up(raw.q[i].y, table, unit.w[0][2 * i + 1], unit.w[1][2 * i + 1]);
        }
    }
};
