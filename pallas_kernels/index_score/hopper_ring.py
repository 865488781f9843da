"""Shared memory that a Gluon kernel addresses itself: the inline assembly of hopper_shared_kernel.py. Imports Triton.

Addresses are i32 in the shared window. The bytes lie behind what Triton allocates (gluon_call's extra_shared), so that
its allocator and its analysis of barriers know nothing of them: whoever uses these separates writers from readers by
`meet`. A tensor's addresses have the layouts of hopper_tiles.py, in which a thread holds 16 bytes of each of two keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def own_shared(BYTES: gl.constexpr):
    """Address of the last BYTES of dynamic shared memory."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        mov.u32 a, global_smem;
        mov.u32 b, %dynamic_smem_size;
        add.u32 a, a, b;
        sub.u32 $0, a, $1;
        }""",
        "=r,r", [BYTES], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def meet(HALVES: gl.constexpr):
    """A barrier of all warps of the program, whichever partition runs them."""
    if HALVES == 1:
        gl.thread_barrier()
    else:
        gl.inline_asm_elementwise(
            "bar.sync 15, 256; mov.b32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def write_keys(low, high, at):
    """A thread's two keys, u8[n, 4, 4, 4] twice -> 4 times 16 bytes from `at` (i32, same shape) on, 256 bytes apart, each
    what one step of the product takes as its M operand."""
    gl.inline_asm_elementwise(
        """{
        st.shared.v4.b32 [$24], {$8, $12, $9, $13};
        st.shared.v4.b32 [$24 + 256], {$10, $14, $11, $15};
        st.shared.v4.b32 [$24 + 512], {$16, $20, $17, $21};
        st.shared.v4.b32 [$24 + 768], {$18, $22, $19, $23};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;
        }""",
        "=r,=r,=r,=r,=r,=r,=r,=r" + ",r" * 48, [low, high, at], dtype=gl.uint8, is_pure=False, pack=32,
    )  # fmt: skip


@gluon.jit
def read_keys(at):
    """The bytes that `write_keys` wrote there."""
    return gl.inline_asm_elementwise(
        """{
        ld.shared.v4.b32 {$0, $4, $1, $5}, [$16];
        ld.shared.v4.b32 {$2, $6, $3, $7}, [$16 + 256];
        ld.shared.v4.b32 {$8, $12, $9, $13}, [$16 + 512];
        ld.shared.v4.b32 {$10, $14, $11, $15}, [$16 + 768];
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r" + ",r" * 32, [at],
        dtype=(gl.uint8, gl.uint8), is_pure=False, pack=32,
    )  # fmt: skip


@gluon.jit
def write_word(at, value):
    """Words, an address each."""
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [at, value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def write_four(at, a, b, c, d):
    """Four words at every address, which is a multiple of 16."""
    gl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;", "=r,r,r,r,r,r", [at, a, b, c, d], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_four(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_word(at):
    """i32 addresses, the same for a thread's two keys -> the word there."""
    return gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$2]; mov.b32 $1, $0;", "=&r,=r,r,r", [at], dtype=gl.int32, is_pure=False, pack=2
    )


@gluon.jit
def write_factors(factors, at):
    """f32 of a thread's two keys -> 8 bytes at the first one's address."""
    gl.inline_asm_elementwise(
        "st.shared.v2.b32 [$4], {$2, $3}; mov.b32 $0, 0; mov.b32 $1, 0;", "=r,=r,r,r,r,r", [factors, at],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def read_factors(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r,r", [at], dtype=gl.float32, is_pure=False, pack=2
    )
