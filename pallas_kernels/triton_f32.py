"""Single instructions on f32 that Pallas on Triton has no name for; interpreted, the operations that they round like or,
where that differs, come within an ulp or two of."""

import jax
import jax.numpy as jnp


def _instruction(text: str, *args, dtype=jnp.float32, constraints: str, pack: int = 1):
    from jax.experimental.pallas import triton as plt

    args = jnp.broadcast_arrays(*args)
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    return plt.elementwise_inline_asm(text, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[shape])[0]


def multiply_add(a, b, c, *, interpret: bool):
    """f32: a * b + c, rounded once (interpreted: twice). Written as two operations it would stay two instructions."""
    if interpret:
        return a * b + c
    return _instruction("fma.rn.f32 $0, $1, $2, $3;", a, b, c, constraints="=f,f,f,f")


def to_bf16(x, *, interpret: bool):
    """bf16 of f32 with an even number of values in every thread, two for one instruction: to nearest, ties to even."""
    if interpret:
        return x.astype(jnp.bfloat16)
    return _instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", x, dtype=jnp.bfloat16, constraints="=r,f,f", pack=2)


def reciprocal(x, *, interpret: bool):
    """f32: 1 / x within one ulp for normal x with a normal reciprocal; 1.0 / x waits for tests of the range besides."""
    if interpret:
        return 1.0 / x
    return _instruction("rcp.approx.ftz.f32 $0, $1;", x, constraints="=f,f")
