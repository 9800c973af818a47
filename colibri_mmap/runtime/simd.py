"""LLVM vectors as numba types: kernels read like intrinsics in C and compile to the same loops.

All kernels are written for logical vectors of 512 bits. Where the CPU has narrower registers LLVM
splits them, and the few operations with their own instructions (`dot_u8_i8`, `dot_i8_i8`,
`dot_i16`) come in three forms, chosen here before anything is compiled, because an unsupported
intrinsic aborts the process:

    avx512vnni   vpdpbusd on zmm registers
    avx2         pmaddubsw + pmaddwd on ymm halves
    generic      plain vector arithmetic; any CPU that LLVM knows

Integer results are equal in every form, so the choice never changes a logit. `COLIBRI_SIMD` forces
a form, for tests. Addresses are int64; loads and stores need no alignment (GGUF blocks have none).
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from .state import kernel_directory

FORMS = ("avx512vnni", "avx2", "generic")
_SHARED_HELPERS = ("simd.py", "kernels/blocks.py", "kernels/exponential.py", "kernels/transpose.py")
_FORCED_TARGET = {
    "avx2": ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2"),
    "generic": ("x86-64", "+sse2"),
}


def _host_form(features: dict[str, bool]) -> str:
    if all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vl", "avx512vnni")):
        return "avx512vnni"
    if features.get("avx2") and features.get("fma") and features.get("f16c"):
        return "avx2"
    return "generic"


def _choose_form() -> str:
    """The form for this CPU, or the one `COLIBRI_SIMD` forces if the CPU can run it."""
    host = _host_form(dict(llvm.get_host_cpu_features()))
    forced = os.environ.get("COLIBRI_SIMD", host)
    if forced not in FORMS or FORMS.index(forced) < FORMS.index(host):
        from ..errors import ArgumentError

        usable = ", ".join(FORMS[FORMS.index(host) :])
        raise ArgumentError(f"COLIBRI_SIMD={forced}: this CPU can run {usable}")
    if forced != host and platform.machine() == "x86_64":
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = _FORCED_TARGET[forced]
    return forced


def _cache_directory() -> str:
    """One cache per version of the shared helpers: numba sees an edited kernel, not its helpers.

    Kernel files therefore import compiled helpers from these files only.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    here = Path(__file__).parent
    for source in (here / name for name in _SHARED_HELPERS):
        digest.update(source.read_bytes())
    return str(kernel_directory() / f"{digest.hexdigest()[:16]}-{FORM}")


FORM = _choose_form()
HAS_NATIVE_HALF = FORM != "generic" or platform.machine() != "x86_64"
numba.config.CACHE_DIR = _cache_directory()

INLINE: dict[str, Any] = {
    "forceinline": True,
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
}

# ------------------------------------------------------------------------------ vectors as types
_ELEMENTS = {
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
}
_SCALARS: dict[str, Any] = {
    "i8": types.int8,
    "i16": types.int16,
    "i32": types.int32,
    "i64": types.int64,
    "f32": types.float32,
}


class Vector(types.Type):
    """`n` lanes of `element`, one LLVM vector value."""

    def __init__(self, element: str, n: int) -> None:
        self.element, self.n = element, n
        super().__init__(name=f"vector_{element}x{n}")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_ELEMENTS[self.element], self.n)

    @property
    def key(self) -> tuple[str, int]:
        return (self.element, self.n)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def _constant(vector: ir.VectorType, values: Any) -> ir.Constant:
    return ir.Constant(vector, list(values))


def _lanes(indices: Any) -> ir.Constant:
    indices = list(indices)
    return ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices)


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _as_int64(context: Any, builder: Any, value: Any, source: Any) -> Any:
    return context.cast(builder, value, source, types.int64)


# ------------------------------------------------------------------------------ memory
def loader(element: str, n: int) -> Any:
    """Load `n` contiguous elements at an address."""
    vector = Vector(element, n)

    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            where = _as_int64(context, builder, arguments[0], signature.args[0])
            return builder.load(_pointer(builder, where, vector.llvm), align=1)

        return vector(address), generate

    return load


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:
    """Store a vector at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = _as_int64(context, builder, arguments[0], signature.args[0])
        builder.store(arguments[1], _pointer(builder, where, arguments[1].type), align=1)
        return context.get_dummy_value()

    return types.void(address, value), generate


def _scalar_loader(element: str, signed: bool = False) -> Any:
    result = types.float32 if element in ("f16", "f32") else types.int64

    @intrinsic
    def load(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            where = _as_int64(context, builder, arguments[0], signature.args[0])
            value = builder.load(_pointer(builder, where, _ELEMENTS[element]), align=1)
            if element in ("f32", "i64"):
                return value
            if element == "f16":
                return builder.fpext(value, ir.FloatType())
            return (builder.sext if signed else builder.zext)(value, ir.IntType(64))

        return result(address), generate

    return load


def _scalar_storer(element: str) -> Any:
    @intrinsic
    def put(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            where = _as_int64(context, builder, arguments[0], signature.args[0])
            number = context.cast(builder, arguments[1], signature.args[1], _SCALARS[element])
            builder.store(number, _pointer(builder, where, _ELEMENTS[element]), align=1)
            return context.get_dummy_value()

        return types.void(address, value), generate

    return put


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address; any address is safe."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        where = _as_int64(context, builder, arguments[0], signature.args[0])
        hints = [ir.Constant(i32, value) for value in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(where, pointer), *hints])
        return context.get_dummy_value()

    return types.void(address), generate


# ------------------------------------------------------------------------------ lane by lane
def _binary(integer: str, floating: str | None = None) -> Any:
    @intrinsic
    def operation(typing: Any, a: Any, b: Any) -> Any:
        if not (isinstance(a, Vector) and a == b):
            return None
        name = floating if floating and a.element in ("f16", "f32") else integer

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return a(a, b), generate

    return operation


def _convert(instruction: str, element: str) -> Any:
    @intrinsic
    def operation(typing: Any, a: Any) -> Any:
        result = Vector(element, a.n)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return getattr(builder, instruction)(arguments[0], result.llvm)

        return result(a), generate

    return operation


def _call(name: str, result: Any, *parameters: Any) -> Any:
    """A call of the LLVM intrinsic `name`; arguments are bit-cast to its parameter types."""
    result_type = Vector(*result)
    kinds = [Vector(*parameter).llvm for parameter in parameters]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(result_type.llvm, kinds)
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        cast = [builder.bitcast(a, k) for a, k in zip(arguments, kinds, strict=True)]
        return builder.call(function, cast)

    if len(parameters) == 1:

        @intrinsic
        def call1(typing: Any, a: Any) -> Any:
            return result_type(a), generate

        return call1
    if len(parameters) == 2:

        @intrinsic
        def call2(typing: Any, a: Any, b: Any) -> Any:
            return result_type(a, b), generate

        return call2

    @intrinsic
    def call3(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return result_type(a, b, c), generate

    return call3


def splatter(element: str, n: int) -> Any:
    """A scalar in every lane."""
    vector = Vector(element, n)

    @intrinsic
    def splat(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = context.cast(builder, arguments[0], signature.args[0], _SCALARS[element])
            first = builder.insert_element(
                ir.Constant(vector.llvm, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
            )
            return builder.shuffle_vector(first, first, _lanes([0] * n))

        return vector(value), generate

    return splat


def constant(element: str, values: Any) -> Any:
    """A function without arguments that returns the vector of these values."""
    vector = Vector(element, len(values))
    numbers = [float(v) if element == "f32" else int(v) for v in values]

    @intrinsic
    def value(typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _constant(vector.llvm, numbers)

        return vector(), generate

    return value


def shuffle(indices: Any) -> Any:
    """Pick lanes from the concatenation of two vectors of one type."""
    picked = list(indices)

    @intrinsic
    def pick(typing: Any, a: Any, b: Any) -> Any:
        result = Vector(a.element, len(picked))

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.shuffle_vector(*arguments, _lanes(picked))

        return result(a, b), generate

    return pick


def caster(element: str, n: int) -> Any:
    """The same bits as another vector type."""
    vector = Vector(element, n)

    @intrinsic
    def cast(typing: Any, a: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], vector.llvm)

        return vector(a), generate

    return cast


def look_up(values: Any) -> Any:
    """A function of i8 lanes that hold 0 to 15: the i8 at that place of 16 `values`, lane by lane.

    The lanes come in multiples of 32. Without a byte shuffle each place is compared for.
    """
    table = [int(value) for value in values]

    @intrinsic
    def pick(typing: Any, places: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (lanes,) = arguments
            if FORM == "generic":
                result = _constant(places.llvm, [table[0]] * places.n)
                for place, value in enumerate(table[1:], 1):
                    here = builder.icmp_signed(
                        "==", lanes, _constant(places.llvm, [place] * places.n)
                    )
                    result = builder.select(
                        here, _constant(places.llvm, [value] * places.n), result
                    )
                return result
            part = Vector("i8", 32).llvm
            kind = ir.FunctionType(part, [part, part])
            shuffle_bytes = cgutils.get_or_insert_function(
                builder.module, kind, "llvm.x86.avx2.pshuf.b"
            )
            whole = None
            for first in range(0, places.n, 32):
                some = builder.shuffle_vector(lanes, lanes, _lanes(range(first, first + 32)))
                found = builder.call(shuffle_bytes, [_constant(part, table * 2), some])
                joined = _lanes(range(first + 32))
                whole = found if whole is None else builder.shuffle_vector(whole, found, joined)
            return whole

        return places(places), generate

    return pick


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are the low 32 of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.cast(builder, arguments[0], signature.args[0], types.int32)
        return builder.bitcast(number, ir.FloatType())

    return types.float32(bits), generate


@intrinsic
def bits_to_bytes(typing: Any, bits: Any) -> Any:
    """The 64 bits of an integer as i8 [64] of 0 and 1."""
    vector = Vector("i8", 64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.cast(builder, arguments[0], signature.args[0], types.int64)
        mask = builder.bitcast(number, ir.VectorType(ir.IntType(1), 64))
        return builder.zext(mask, vector.llvm)

    return vector(bits), generate


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(a.llvm, [a.llvm] * 3)
        name = f"llvm.fma.v{a.n}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

    return a(a, b, c), generate


def _unary_float(name: str) -> Any:
    @intrinsic
    def operation(typing: Any, a: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(a.llvm, [a.llvm])
            function = cgutils.get_or_insert_function(
                builder.module, kind, f"llvm.{name}.v{a.n}f32"
            )
            return builder.call(function, arguments)

        return a(a), generate

    return operation


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    """The larger of two float vectors, lane by lane; b where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, b), generate


@intrinsic
def minimum(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of two float vectors, lane by lane; b where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *arguments), *arguments)

    return a(a, b), generate


@intrinsic
def select_less(typing: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """x where a < b (signed integers or floats), else y, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        compare = builder.fcmp_ordered if a.element == "f32" else builder.icmp_signed
        return builder.select(compare("<", *arguments[:2]), *arguments[2:])

    return x(a, b, x, y), generate


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """The sum of all lanes; floats are added pairwise in a fixed order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, n = arguments[0], a.n
        instruction = "fadd" if a.element == "f32" else "add"
        while n > 1:
            n //= 2
            low = builder.shuffle_vector(value, value, _lanes(range(n)))
            high = builder.shuffle_vector(value, value, _lanes(range(n, 2 * n)))
            value = getattr(builder, instruction)(low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return _SCALARS[a.element](a), generate


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """The largest lane of a float vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, n = arguments[0], a.n
        while n > 1:
            n //= 2
            low = builder.shuffle_vector(value, value, _lanes(range(n)))
            high = builder.shuffle_vector(value, value, _lanes(range(n, 2 * n)))
            value = builder.select(builder.fcmp_ordered(">", low, high), low, high)
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return types.float32(a), generate


# ------------------------------------------------------------------------------ common names
load_i8x8, load_i8x16, load_i8x32, load_i8x64 = (loader("i8", n) for n in (8, 16, 32, 64))
load_i16x8, load_i16x16, load_i16x32 = (loader("i16", n) for n in (8, 16, 32))
load_i32x8, load_i32x16 = loader("i32", 8), loader("i32", 16)
load_f32x4, load_f32x8, load_f32x16 = (loader("f32", n) for n in (4, 8, 16))
load_u8, load_u16, load_u32 = (_scalar_loader(e) for e in ("i8", "i16", "i32"))
load_i8, load_i16, load_i32 = (_scalar_loader(e, signed=True) for e in ("i8", "i16", "i32"))
load_i64, load_f32 = _scalar_loader("i64"), _scalar_loader("f32")
store_i8, store_i16, store_i32, store_i64, store_f32 = (
    _scalar_storer(e) for e in ("i8", "i16", "i32", "i64", "f32")
)
add, sub, mul = _binary("add", "fadd"), _binary("sub", "fsub"), _binary("mul", "fmul")
divide = _binary("sdiv", "fdiv")
bit_and, bit_or, bit_xor = _binary("and_"), _binary("or_"), _binary("xor")
shift_left, shift_right, shift_right_signed = _binary("shl"), _binary("lshr"), _binary("ashr")
unsigned_to_i16, unsigned_to_i32 = _convert("zext", "i16"), _convert("zext", "i32")
signed_to_i16, signed_to_i32 = _convert("sext", "i16"), _convert("sext", "i32")
to_i8, to_i16 = _convert("trunc", "i8"), _convert("trunc", "i16")
int_to_float, float_to_int = _convert("sitofp", "f32"), _convert("fptosi", "i32")
round_even, absolute, square_root = (_unary_float(n) for n in ("roundeven", "fabs", "sqrt"))
splat_i8x16, splat_i8x32, splat_i8x64 = (splatter("i8", n) for n in (16, 32, 64))
splat_i16x16, splat_i16x32 = splatter("i16", 16), splatter("i16", 32)
splat_i32x8, splat_i32x16 = splatter("i32", 8), splatter("i32", 16)
splat_f32x2, splat_f32x4, splat_f32x8, splat_f32x16 = (splatter("f32", n) for n in (2, 4, 8, 16))
as_i8x8, as_i8x16, as_i8x32, as_i8x64 = (caster("i8", n) for n in (8, 16, 32, 64))
as_i16x8, as_i16x16, as_i16x32 = (caster("i16", n) for n in (8, 16, 32))
as_i32x8, as_i32x16 = caster("i32", 8), caster("i32", 16)
as_f32x16 = caster("f32", 16)
zero_i32x16, zero_f32x16 = constant("i32", [0] * 16), constant("f32", [0] * 16)


@numba.njit(**INLINE)
def load_4_words(address):
    """Four int64 from an address on: how a task reads its arguments."""
    return load_i64(address), load_i64(address + 8), load_i64(address + 16), load_i64(address + 24)


@intrinsic
def _gather_four(typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four floats, or four halves that lie at addresses, as one vector."""
    at_addresses = isinstance(a, types.Integer)
    vector = Vector("f16" if at_addresses else "f32", 4)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = ir.Constant(vector.llvm, ir.Undefined)
        for lane, number in enumerate(arguments):
            if at_addresses:
                number = builder.load(_pointer(builder, number, ir.HalfType()), align=1)
            value = builder.insert_element(value, number, ir.Constant(ir.IntType(32), lane))
        return value

    return vector(a, b, c, d), generate


# ------------------------------------------------------------------------------ half precision
# x86 CPUs without F16C get integer arithmetic: LLVM would call a function that is not there.
if HAS_NATIVE_HALF:
    _load_half, _load_two_halves = loader("f16", 16), loader("f16", 2)
    _extend, _truncate = _convert("fpext", "f32"), _convert("fptrunc", "f16")

    @numba.njit(**INLINE)
    def load_f16x2(address):
        return _extend(_load_two_halves(address))

    @numba.njit(**INLINE)
    def load_f16x16(address):
        return _extend(_load_half(address))

    @numba.njit(**INLINE)
    def store_f16x16(address, value):
        store(address, _truncate(value))

    @numba.njit(**INLINE)
    def gather_f16x4(a, b, c, d):  # type: ignore[no-untyped-def]
        return _extend(_gather_four(a, b, c, d))

    load_f16 = _scalar_loader("f16")
else:

    @numba.njit(**INLINE)
    def _half_to_float(bits):
        """i32 [16] with half-precision bits -> f32 [16], exact; denormals become normal."""
        sign = shift_left(bit_and(bits, splat_i32x16(0x8000)), splat_i32x16(16))
        magnitude = bit_and(bits, splat_i32x16(0x7FFF))
        shifted = shift_left(magnitude, splat_i32x16(13))
        finite = as_i32x16(mul(as_f32x16(shifted), as_f32x16(splat_i32x16(0x77800000))))
        special = bit_or(shifted, splat_i32x16(0x7F800000))
        value = select_less(magnitude, splat_i32x16(0x7C00), finite, special)
        return as_f32x16(bit_or(value, sign))

    @numba.njit(**INLINE)
    def load_f16x16(address):
        return _half_to_float(unsigned_to_i32(load_i16x16(address)))

    @numba.njit(**INLINE)
    def load_f16(address):
        return largest(_half_to_float(splat_i32x16(load_u16(address))))

    _two_of_four = shuffle([0, 1])

    @numba.njit(**INLINE)
    def load_f16x2(address):
        first, second = load_f16(address), load_f16(address + 2)
        four = _gather_four(first, second, first, second)
        return _two_of_four(four, four)

    @numba.njit(**INLINE)
    def gather_f16x4(a, b, c, d):  # type: ignore[no-untyped-def]
        return _gather_four(load_f16(a), load_f16(b), load_f16(c), load_f16(d))

    @numba.njit(**INLINE)
    def store_f16x16(address, value):
        """Round to the nearest even half, as the hardware does."""
        bits = as_i32x16(value)
        magnitude = bit_and(bits, splat_i32x16(0x7FFFFFFF))
        sign = bit_and(shift_right(bits, splat_i32x16(16)), splat_i32x16(0x8000))
        half = splat_f32x16(0.5)
        denormal = sub(as_i32x16(add(as_f32x16(magnitude), half)), as_i32x16(half))
        odd = bit_and(shift_right(magnitude, splat_i32x16(13)), splat_i32x16(1))
        rebased = add(add(magnitude, splat_i32x16(0xFFF - (112 << 23))), odd)
        normal = shift_right(rebased, splat_i32x16(13))
        infinite = splat_i32x16(0x7C00)
        special = select_less(splat_i32x16(0x7F800000), magnitude, splat_i32x16(0x7E00), infinite)
        result = select_less(magnitude, splat_i32x16(0x38800000), denormal, normal)
        result = select_less(magnitude, splat_i32x16(0x47800000), result, special)
        store(address, to_i16(bit_or(result, sign)))


# ------------------------------------------------------------------------------ integer products
_low_half = shuffle(range(32))
_high_half = shuffle(range(32, 64))
_join_i32 = shuffle(range(16))
_ones_i16 = constant("i16", [1] * 16)


@intrinsic
def pair_sums(typing: Any, a: Any, b: Any) -> Any:
    """i16 [2n] x i16 [2n] -> i32 [n]: products of neighbours added; LLVM finds pmaddwd in it."""
    result = Vector("i32", a.n // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.VectorType(ir.IntType(32), a.n)
        product = builder.mul(*(builder.sext(value, wide) for value in arguments))
        even = builder.shuffle_vector(product, product, _lanes(range(0, a.n, 2)))
        odd = builder.shuffle_vector(product, product, _lanes(range(1, a.n, 2)))
        return builder.add(even, odd)

    return result(a, b), generate


_even_i32, _odd_i32 = shuffle(range(0, 32, 2)), shuffle(range(1, 32, 2))

if FORM == "avx512vnni":
    dot_u8_i8 = _call("llvm.x86.avx512.vpdpbusd.512", ("i32", 16), *[("i32", 16)] * 3)
    dot_i16 = _call("llvm.x86.avx512.vpdpwssd.512", ("i32", 16), *[("i32", 16)] * 3)
    dot_signed = dot_u8_i8
    _sign_bits = constant("i8", [-128] * 64)

    @numba.njit(**INLINE)
    def signed_weights(w):
        return bit_xor(w, _sign_bits())

    @numba.njit(**INLINE)
    def signed_start(minus128_sums):
        return minus128_sums

elif FORM == "avx2":
    _maddubs = _call("llvm.x86.avx2.pmadd.ub.sw", ("i16", 16), ("i8", 32), ("i8", 32))
    _maddwd = _call("llvm.x86.avx2.pmadd.wd", ("i32", 8), ("i16", 16), ("i16", 16))
    _sign = _call("llvm.x86.avx2.psign.b", ("i8", 32), ("i8", 32), ("i8", 32))
    _low_words, _high_words = shuffle(range(16)), shuffle(range(16, 32))

    @numba.njit(**INLINE)
    def _dot_half(w, x):
        return _maddwd(_maddubs(w, x), _ones_i16())

    @numba.njit(**INLINE)
    def dot_u8_i8(acc, w, x):
        low = _dot_half(_low_half(w, w), _low_half(x, x))
        high = _dot_half(_high_half(w, w), _high_half(x, x))
        return add(acc, _join_i32(low, high))

    @numba.njit(**INLINE)
    def _signed_half(w, x):
        return _dot_half(_sign(w, w), _sign(x, w))

    @numba.njit(**INLINE)
    def dot_signed(acc, w, x):
        low = _signed_half(_low_half(w, w), _low_half(x, x))
        high = _signed_half(_high_half(w, w), _high_half(x, x))
        return add(acc, _join_i32(low, high))

    @numba.njit(**INLINE)
    def dot_i16(acc, a, b):
        low = _maddwd(_low_words(a, a), _low_words(b, b))
        high = _maddwd(_high_words(a, a), _high_words(b, b))
        return add(acc, _join_i32(low, high))

else:

    @numba.njit(**INLINE)
    def _add_quads(acc, w, x):
        """acc + the sums of four neighbours of w * x, i16 [64] each."""
        pairs = pair_sums(w, x)
        return add(acc, add(_even_i32(pairs, pairs), _odd_i32(pairs, pairs)))

    @numba.njit(**INLINE)
    def dot_u8_i8(acc, w, x):
        return _add_quads(acc, unsigned_to_i16(w), signed_to_i16(x))

    @numba.njit(**INLINE)
    def dot_signed(acc, w, x):
        return _add_quads(acc, signed_to_i16(w), signed_to_i16(x))

    @numba.njit(**INLINE)
    def dot_i16(acc, a, b):
        return add(acc, pair_sums(a, b))


if FORM != "avx512vnni":

    @numba.njit(**INLINE)
    def signed_weights(w):
        return w

    @numba.njit(**INLINE)
    def signed_start(minus128_sums):
        return zero_i32x16()


@numba.njit(**INLINE)
def dot_i8_i8(acc, w, x, minus128_sums):
    return dot_signed(add(acc, signed_start(minus128_sums)), signed_weights(w), x)


dot_u8_i8.__doc__ = (
    """acc i32 [16] + sums of four neighbours of w u8 [64] (<= 127 each) * x i8 [64]."""
)
dot_i8_i8.__doc__ = """acc i32 [16] + sums of four neighbours of w i8 [64] * x i8 [64].

`minus128_sums` i32 [16] is -128 times the sums of four neighbours of x; x must not hold -128. For
weights used many times the three steps are apart: `signed_start` gives the accumulator to begin
with, `signed_weights` the weights as `dot_signed` takes them.
"""
dot_i16.__doc__ = """acc i32 [16] + sums of neighbours of a i16 [32] * b i16 [32]."""
