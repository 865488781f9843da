"""Launch Gluon kernels (Triton's explicit-layout language) from JAX, through the custom call that jaxlib brings along.

The kernel is compiled to PTX when the call is traced, for an explicit compute capability or the default device's, so
the same code path serves deviceless compiles. Triton itself is imported inside the functions: a machine without it can
import this module and gets a reason from `unavailable`.
"""

import functools
import importlib.util
import zlib

import jax
import jax.numpy as jnp

_POINTERS = {
    "bfloat16": "*bf16", "float32": "*fp32", "float16": "*fp16", "uint8": "*u8", "int8": "*i8", "int32": "*i32",
    "uint32": "*u32", "int16": "*i16", "uint16": "*u16",
}  # fmt: skip


def unavailable() -> str | None:
    """Why Gluon kernels cannot be compiled here, or None."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"


@functools.cache
def _compiled(kernel, pointers, constants, warps, compute_capability, maxnreg):
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = dict(zip(kernel.arg_names, pointers, strict=False))
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    constants = dict(constants)
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "maxnreg": maxnreg}
    with knobs.cache.scope():
        # jax-triton empties TRITON_CACHE_DIR when it is imported, and Triton compiles nothing without a folder
        knobs.cache.dir = knobs.cache.dir or knobs.cache.get_triton_dir("cache")
        return triton.compile(source, target=GPUTarget("cuda", compute_capability, 32), options=options)


def compile_kernel(kernel, arrays, constants: dict, *, warps: int, compute_capability: int, maxnreg: int | None = None):
    """Compile `kernel` for pointers of the arrays' dtypes and the given constexprs -> Triton's compiled kernel."""
    pointers = tuple(_POINTERS[jnp.dtype(a.dtype).name] for a in arrays)
    return _compiled(kernel, pointers, tuple(sorted(constants.items())), warps, compute_capability, maxnreg)


def gluon_call(
    kernel,
    *arrays,  # inputs; every one is passed as a 16-byte aligned pointer
    out_shape,  # ShapeDtypeStruct of the output, passed as the last pointer; its memory starts undefined
    grid: tuple[int, int, int],
    warps: int,
    compute_capability: int,
    maxnreg: int | None = None,
    extra_shared: int = 0,  # bytes of dynamic shared memory behind Triton's, for a kernel that addresses them itself
    **constants,
):
    """Call a `gluon.jit` kernel whose parameters are the inputs' pointers, the output's pointer, then constexprs.

    Returns the output array. Raises Triton's CompilationError if the kernel does not compile for these constants.
    """
    from jax._src.lib import gpu_triton

    compiled = compile_kernel(
        kernel, (*arrays, out_shape), constants, warps=warps, compute_capability=compute_capability, maxnreg=maxnreg
    )
    meta = compiled.metadata
    shared = (meta.shared + 127) // 128 * 128 + extra_shared if extra_shared else meta.shared
    launched = gpu_triton.TritonKernel(
        meta.name, meta.num_warps, meta.num_ctas, shared, compiled.asm["ptx"], compiled.asm["ttgir"],
        compute_capability,
    )  # fmt: skip
    parameters = [gpu_triton.create_array_parameter(0, 16) for _ in range(len(arrays) + 1)]
    call = gpu_triton.TritonKernelCall(launched, *grid, parameters)
    return jax.ffi.ffi_call(
        "triton_kernel_call",
        out_shape,
        custom_call_api_version=2,
        legacy_backend_config=zlib.compress(call.to_proto(meta.name, b"")),
    )(*arrays)
