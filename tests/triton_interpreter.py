"""Run `triton.jit` kernels on a CPU, launched as their own module launches them, for comparisons with the reference.

Triton's interpreter executes a kernel's body in numpy, program after program. What Triton 3.6's lacks is added here: the
block-scaled product and that of bf16 (in fp64, so the only rounding is fp32's at the end), casts to bf16 that round to
nearest, sums of -0, and inline assembly, for the handful of PTX instructions in `_PTX`. The interpreter is chosen when
triton is imported, so all this lives in a child process:

    got = run([("pallas_kernels.index_score.blackwell:index_score", inputs, {})])
"""

import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(cases: list[tuple[str, dict, dict]], timeout: float = 120.0) -> list:
    """Call each case's function, a launcher that goes through jax_triton.triton_call.

    cases: ("module:name", arrays by name, static options). Returns the outputs as numpy arrays. Raises RuntimeError with
    the child's log when a case fails.
    """
    with tempfile.TemporaryDirectory(prefix="interpreted-") as folder:
        path = pathlib.Path(folder) / "cases.pickle"
        path.write_bytes(pickle.dumps(cases))
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": search}
        command = [sys.executable, str(pathlib.Path(__file__).resolve()), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
        if done.returncode:
            raise RuntimeError(f"interpreter: {[case[0] for case in cases]} failed:\n{done.stderr[-4000:]}")
        return pickle.loads(path.read_bytes())


# --- the child process ----------------------------------------------------------------------------------------------


def _dot_scaled(semantic, a, a_scale, a_format, b, b_scale, b_format, acc, fast, a_packed, b_packed, out_dtype):
    """tl.dot_scaled of e4m3 operands and of e2m1 ones packed along the channels; b is given as [K, N] or [K/2, N]."""
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def values(codes, scale, kind):
        if kind == "e2m1":
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
        codes = np.ascontiguousarray(codes).view({"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn}[kind])
        scale = 2.0 ** (scale.astype(np.float64) - 127)
        return codes.astype(np.float64) * np.repeat(scale, 32, 1)

    a, b, a_scale, b_scale, start = (x.handle.data for x in (a, b, a_scale, b_scale, acc))
    assert a_packed and b_packed and a.dtype == b.dtype == np.uint8
    dot = values(a, a_scale, a_format) @ values(b.T, b_scale, b_format).T + start
    return tl.tensor(TensorHandle(dot.astype(np.float32), tl.float32), acc.type)


def _bf16x2(function):
    """A function of f32 arrays as one of u32 registers that hold two bf16 values each."""
    import ml_dtypes
    import numpy as np

    halves = lambda x: np.stack([x & 0xFFFF, x >> 16], -1).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)

    def packed(*registers):
        bits = function(*map(halves, registers)).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
        return bits[..., 0] | bits[..., 1] << 16

    return packed


def _convert_relu(high, low):
    import ml_dtypes
    import numpy as np

    pair = np.stack([low, high], -1).view(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    bits = np.maximum(pair, 0).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << 16


def _permute_bytes(low, high, selector):
    """prmt: byte i of the result is the one of the eight that nibble i of the selector names, or, from 8 on, its sign."""
    import numpy as np

    result = np.zeros_like(low)
    for i in range(4):
        place, sign = selector >> 4 * i & 7, selector >> 4 * i & 8
        byte = (low if place < 4 else high) >> 8 * (place & 3) & 0xFF
        result |= np.where(sign, (byte >> 7) * 0xFF, byte).astype(np.uint32) << 8 * i
    return result


_PTX = {
    "mov.b32": lambda a: a,
    "prmt.b32": _permute_bytes,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "cvt.rn.relu.bf16x2.f32": _convert_relu,
    "mul.rn.bf16x2": _bf16x2(lambda a, b: a * b),
}


_REGISTER = {"fp32": "f4", "int32": "i4", "uint8": "u1", "bf16": "u2"}  # numpy's view of what inline assembly returns


def _inline_asm(builder, text, constraints, values, types, pure, pack):
    """tl.inline_asm_elementwise with one output: registers of 32 bits, each holding as many elements as fit."""
    import types as python_types

    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    outputs = sum(c.strip().startswith("=") for c in constraints.split(","))
    registers = {}

    def operand(name):
        name = name.strip()
        return registers[name] if name in registers else np.uint32(int(name, 0))

    inputs = [np.ascontiguousarray(v.data).reshape(-1, pack).view(np.uint32) for v in values]
    for i, column in enumerate(c for x in inputs for c in x.T):
        registers[f"${outputs + i}"] = column
    for line in filter(None, (part.strip() for part in text.strip().strip("{}").split(";"))):
        if not line.startswith((".reg", "griddepcontrol.wait", "fence.proxy.async")):
            opcode, _, operands = line.partition(" ")
            target, *sources = operands.split(",")
            registers[target.strip()] = _PTX[opcode](*map(operand, sources))
    bits = np.ascontiguousarray(np.stack([registers[f"${i}"] for i in range(outputs)], -1))
    kind = types[0].scalar
    data = bits.view(_REGISTER[str(kind)]).reshape(values[0].data.shape)
    handle = TensorHandle(data, kind)
    return python_types.SimpleNamespace(get_result=lambda i: handle)


def _triton_call(host, *arrays, kernel, out_shape, grid, num_warps, num_stages, compute_capability=None, **constants):
    """jax_triton.triton_call on the thread of `host`. The output starts as NaN: what a kernel leaves unwritten shows."""
    import jax
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    names = {"uint8": tl.uint8, "int32": tl.int32, "bfloat16": tl.bfloat16, "float32": tl.float32}

    def pointer(x):
        kind = tl.pointer_type(names[x.dtype.name])
        return tl.tensor(TensorHandle(np.array([x.ctypes.data], np.uint64), kind), kind)

    def launch(*arrays):
        held = [np.ascontiguousarray(x) for x in arrays] + [np.full(out_shape.shape, np.nan, out_shape.dtype)]
        kernel[tuple(grid)](*map(pointer, held), **constants)
        return held[-1]

    return jax.pure_callback(lambda *x: host.submit(launch, *map(np.asarray, x)).result(), out_shape, *arrays)


def _child(path: pathlib.Path) -> None:
    import concurrent.futures
    import functools
    import importlib
    import importlib.machinery
    import types

    import jax
    import ml_dtypes
    import numpy as np
    from triton.runtime import interpreter

    stand_in = types.ModuleType("jax_triton")  # the real one imports a CUDA plugin
    host = concurrent.futures.ThreadPoolExecutor(1)
    host.submit(int).result()  # started here: XLA's threads, and those that they start, take subnormals for zero
    stand_in.triton_call = functools.partial(_triton_call, host)
    stand_in.__spec__ = importlib.machinery.ModuleSpec("jax_triton", None)
    sys.modules["jax_triton"] = stand_in
    interpreter.TritonSemantic.dot_scaled = _dot_scaled
    interpreter.InterpreterBuilder.create_inline_asm = _inline_asm
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        if {source.name, target.name} != {"fp32", "bf16"}:
            return convert(data, source, target, rounding)
        if target.name == "fp32":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(ml_dtypes.bfloat16).view(np.uint16)

    interpreter._convert_float = convert_float
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self, a, b, start, *precision):  # bf16 is held as u16, which numpy would multiply as integers
        if a.dtype.name != "bf16":
            return create_dot(self, a, b, start, *precision)
        a, b = (np.ascontiguousarray(x.data).view(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
        return interpreter.TensorHandle((a @ b + start.data).astype(np.float32), start.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot

    def reduce_sum(self, x):  # -0 + -0 is -0; numpy's own start is +0
        total = np.sum(x.handle.data, axis=self.axis, keepdims=self.keep_dims, initial=-0.0)
        return self.to_tensor(total.astype(x.handle.data.dtype), x.dtype)

    interpreter.ReduceOps.sum = reduce_sum
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # numpy >= 2.4 wants this spelling

    interpreter._patch_lang_tensor = patch_lang_tensor
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # callbacks may wait for threads that wait for them
    outputs = []
    for function, arrays, options in pickle.loads(path.read_bytes()):
        module, _, name = function.partition(":")
        launcher = functools.partial(getattr(importlib.import_module(module), name), **options)
        outputs.append(np.asarray(jax.jit(launcher)(**arrays)))  # one program: a third of a second, not a hundred small ones
    path.write_bytes(pickle.dumps(outputs))


if __name__ == "__main__":
    _child(pathlib.Path(sys.argv[1]))
