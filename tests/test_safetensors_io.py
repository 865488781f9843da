"""safetensors files: round trips of every type, and each way in which a file can be broken."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dsv41_jax.safetensors_io import DTYPES, MappedFile, SafetensorsError, Writer, read_header


def raw_file(path, header, payload=b""):
    """A file from a header dict (or raw header bytes) and payload bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def tensor(start, stop, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_round_trip_of_every_type(tmp_path, dtype):
    bits = np.random.default_rng(3).integers(0, 2 if dtype == "BOOL" else 256, (5, 7, DTYPES[dtype].itemsize), np.uint8)
    values = bits.view(DTYPES[dtype])[..., 0]
    with Writer(tmp_path / "a", {"x": (dtype, (5, 7)), "empty": (dtype, (0, 3)), "scalar": (dtype, ())}) as w:
        w.write("x", values)
        w.write("empty", values[:0, :3])
        w.write("scalar", values[0, :1])
    with MappedFile(tmp_path / "a") as f:
        assert list(f.entries) == ["x", "empty", "scalar"]
        view = f.view("x")
        assert view.dtype == DTYPES[dtype] and not view.flags.writeable
        np.testing.assert_array_equal(np.ascontiguousarray(view).view(np.uint8), values.view(np.uint8))
        assert f.view("empty").shape == (0, 3) and f.view("scalar").shape == ()


def test_reads_what_the_safetensors_package_writes_and_the_other_way_round(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "f": rng.standard_normal((3, 4)).astype(np.float32),
        "b": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
        "i": rng.integers(-9, 9, (2, 2)).astype(np.int8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "theirs")
    with MappedFile(tmp_path / "theirs") as f:
        for name, want in arrays.items():
            np.testing.assert_array_equal(f.view(name), want)
    names = {"f": "F32", "b": "BF16", "i": "I8"}
    with Writer(tmp_path / "ours", {n: (names[n], a.shape) for n, a in arrays.items()}) as w:
        for name, a in arrays.items():
            w.write(name, a)
    for name, got in safetensors.numpy.load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(got, arrays[name])


def test_written_in_blocks_equals_written_whole(tmp_path):
    x = np.arange(1000, dtype=np.int32).reshape(100, 10)
    for name, data in (("whole", x), ("blocks", (x[i : i + 7] for i in range(0, 100, 7)))):
        with Writer(tmp_path / name, {"x": ("I32", x.shape)}) as w:
            w.write("x", data)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "blocks").read_bytes()


def test_released_pages_read_the_same_again(tmp_path):
    x = np.arange(1 << 16, dtype=np.int32).reshape(256, 256)
    with Writer(tmp_path / "a", {"x": ("I32", x.shape)}) as w:
        w.write("x", x)
    with MappedFile(tmp_path / "a") as f:
        f.release("x", 3, 200)
        f.release("x")
        np.testing.assert_array_equal(f.view("x"), x)


BROKEN = {
    "empty file": (lambda p: p.write_bytes(b""), "truncated: 0 bytes"),
    "header cut": (lambda p: p.write_bytes(struct.pack("<Q", 50) + b"{"), "truncated: the header needs 58"),
    "huge header": (lambda p: p.write_bytes(struct.pack("<Q", 1 << 60)), "above the format's limit"),
    "not JSON": (lambda p: raw_file(p, b"{nope"), "not JSON"),
    "not UTF-8": (lambda p: raw_file(p, b'{"\xff": 1}'), "not JSON"),
    "a list": (lambda p: raw_file(p, b"[]"), "not a JSON object"),
    "name twice": (lambda p: raw_file(p, b'{"x": 1, "x": 2}'), r"\['x'\] twice"),
    "no object": (lambda p: raw_file(p, {"x": 3}), "x is not an object"),
    "unknown dtype": (lambda p: raw_file(p, {"x": tensor(0, 4, "F4")}), "x: dtype 'F4' is not one of"),
    "dtype that is a list": (lambda p: raw_file(p, {"x": tensor(0, 4, ["F32"])}), r"x: dtype \['F32'\] is not one of"),
    "endless number": (lambda p: raw_file(p, b'{"x": ' + b"1" * 5000 + b"}"), "not JSON"),
    "negative shape": (lambda p: raw_file(p, {"x": tensor(0, 4, shape=[-4])}, b"1234"), "x has shape"),
    "offsets backwards": (lambda p: raw_file(p, {"x": tensor(4, 0, shape=[4])}, b"1234"), "data_offsets"),
    "offsets missing": (lambda p: raw_file(p, {"x": {"dtype": "U8", "shape": [4]}}, b"1234"), "data_offsets None"),
    "size mismatch": (lambda p: raw_file(p, {"x": tensor(0, 4, "F32", [2])}, b"1234"), "needs 8 bytes, its offsets span 4"),
    "overlap": (lambda p: raw_file(p, {"x": tensor(0, 4), "y": tensor(2, 6)}, b"123456"), "overlapping offsets: y"),
    "hole": (lambda p: raw_file(p, {"x": tensor(0, 2), "y": tensor(4, 6)}, b"123456"), "hole in the payload"),
    "payload cut": (lambda p: raw_file(p, {"x": tensor(0, 4)}, b"123"), "truncated: the header describes"),
    "bytes behind": (lambda p: raw_file(p, {"x": tensor(0, 4)}, b"12345"), "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_are_refused_by_name_and_reason(tmp_path, how):
    make, message = BROKEN[how]
    path = tmp_path / "broken.safetensors"
    make(path)
    with pytest.raises(SafetensorsError, match=message) as e:
        read_header(path)
    assert str(path) in str(e.value)
    with pytest.raises(SafetensorsError, match=message):
        MappedFile(path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("y", np.zeros(4, np.float32), "tensor y written, x expected next"),
        ("x", np.zeros(4, np.float64), "F32 expected, got float64"),
        ("x", np.zeros(3, np.float32), "16 bytes expected, got 12"),
    ],
)
def test_writer_refuses_what_was_not_declared(tmp_path, name, array, message):
    with pytest.raises(SafetensorsError, match=message), Writer(tmp_path / "a", {"x": ("F32", (4,)), "y": ("F32", (4,))}) as w:
        w.write(name, array)


def test_writer_refuses_to_end_early_and_to_overwrite(tmp_path):
    two = {"x": ("U8", (1,)), "y": ("U8", (1,))}
    with pytest.raises(SafetensorsError, match="1 tensors never written: y"), Writer(tmp_path / "a", two) as w:
        w.write("x", np.zeros(1, np.uint8))
    with pytest.raises(FileExistsError):
        Writer(tmp_path / "a", {})
