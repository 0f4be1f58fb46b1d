"""GGUF files that mean harm, or were damaged: refused at once, within bounds."""

import itertools
import resource
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from merge.tensor_files import UserError
from tests.gguf_models import made

gguf = pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")
from merge.gguf.checking import verify_gguf  # noqa: E402
from merge.gguf.header import read_gguf  # noqa: E402
from merge.gguf.writing import export_gguf, gguf_to_hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


HUGE = 2**63 - 1


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name="t", shape=(32,), kind=0, begin=0, dimensions=None) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, begin)


def file(settings=(), tensors=(), version=3, magic=b"GGUF", values=None, count=None, data=256) -> bytes:
    head = struct.pack("<4sIQQ", magic, version, len(tensors) if count is None else count,
                       len(settings) if values is None else values)  # fmt: skip
    body = head + b"".join(settings) + b"".join(tensors)
    return body + bytes(-len(body) % 32 + data)


ARCHITECTURE = setting("general.architecture", 8, text("llama"))
HOSTILE = {
    "empty": b"",
    "short": b"GGUF\x03",
    "another kind": b"\x93NUMPY" + bytes(100),
    "magic": file(magic=b"GGML"),
    "version 1": file(version=1),
    "version 4": file(version=4),
    "version 2**31": file(version=2**31 + 1),
    "big-endian": file(version=3 << 24),
    "tensors": file(count=HUGE),
    "many tensors": file(count=10**6, data=10**6),
    "settings": file(values=HUGE),
    "more settings than there are": file([ARCHITECTURE], values=9),
    "a long key": file([struct.pack("<Q", HUGE) + b"key"]),
    "a key beyond the file": file([struct.pack("<Q", 10**5) + b"key"]),
    "a long text": file([setting("a", 8, struct.pack("<Q", HUGE))]),
    "a text beyond the file": file([setting("a", 8, struct.pack("<Q", 10**6))]),
    "not UTF-8": file([setting("a", 8, text(b"\xff\xfe"))]),
    "a key that is not UTF-8": file([setting("a", 8, text(b"\xff"))]),
    "an unknown kind": file([setting("a", 77, bytes(8))]),
    "a huge array": file([setting("a", 9, struct.pack("<IQ", 4, HUGE))]),
    "a huge array of texts": file([setting("a", 9, struct.pack("<IQ", 8, HUGE))]),
    "an array beyond the file": file([setting("a", 9, struct.pack("<IQ", 12, 10**6))]),
    "an array whose size overflows": file([setting("a", 9, struct.pack("<IQ", 10, 2**61))]),
    "many empty texts": file([setting("a", 9, struct.pack("<IQ", 8, 10**7) + bytes(8 * 10**7))]),
    "nested arrays": file([setting("a", 9, struct.pack("<IQ", 9, 1) * 2000)]),
    "an array of unknown things": file([setting("a", 9, struct.pack("<IQ", 99, 3))]),
    "a key twice": file([ARCHITECTURE, ARCHITECTURE]),
    "alignment 0": file([setting("general.alignment", 4, struct.pack("<I", 0))]),
    "alignment 3": file([setting("general.alignment", 4, struct.pack("<I", 3))]),
    "alignment 2**31": file([setting("general.alignment", 4, struct.pack("<I", 2**31))]),
    "alignment in words": file([setting("general.alignment", 8, text("x"))]),
    "no dimensions": file(tensors=[tensor(shape=())]),
    "five dimensions": file(tensors=[tensor(shape=(2, 2, 2, 2, 2))]),
    "a billion dimensions": file(tensors=[tensor(dimensions=2**30)]),
    "an empty dimension": file(tensors=[tensor(shape=(32, 0))]),
    "a huge tensor": file(tensors=[tensor(shape=(2**40,))]),
    "a tensor that overflows": file(tensors=[tensor(shape=(2**32, 2**32, 32))]),
    "an unknown type": file(tensors=[tensor(kind=999)]),
    "half a block": file(tensors=[tensor(shape=(33,), kind=8)]),
    "a place beyond the file": file(tensors=[tensor(begin=2**20)]),
    "a place that overflows": file(tensors=[tensor(begin=2**64 - 32)]),
    "a crooked place": file(tensors=[tensor(begin=7)]),
    "a tensor twice": file(tensors=[tensor(), tensor(begin=128)]),
    "one tensor in another": file(tensors=[tensor("a", (64,)), tensor("b", (32,), begin=128)]),
    "a long name": file(tensors=[struct.pack("<Q", HUGE)]),
}


def read(path: Path) -> tuple[str, int]:
    """What is said against a file, and how many calls that took, whatever else the machine does meanwhile."""
    calls, said = itertools.count(), ""
    sys.setprofile(lambda frame, event, arg: next(calls))
    try:
        read_gguf(path)
    except UserError as error:
        said = str(error)
    finally:
        sys.setprofile(None)
    return said, next(calls)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused_at_once(kind, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE[kind])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said, calls = read(path)
    assert "m.gguf: not a GGUF file" in said and calls < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert len(verify_gguf(path)) == 1 and len(verify_gguf(path)[0]) < 500
    with pytest.raises(UserError, match=r"m\.gguf: not a GGUF file"):
        gguf_to_hf(path, tmp_path / "out")


def test_a_harmless_header_is_none_of_these(tmp_path):
    path = tmp_path / "m.gguf"
    several = setting("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y"))
    path.write_bytes(file([ARCHITECTURE, several, setting("b", 6, struct.pack("<f", 0.5))], [tensor(shape=(8, 4))]))
    found = read_gguf(path)
    assert found.metadata == {"general.architecture": "llama", "a": ("x", "y"), "b": 0.5}
    assert found.tensors["t"].shape == (4, 8) and found.stored("t").shape == (4, 8) and found.architecture == "llama"
    with pytest.raises(UserError, match="does not say how many"):
        gguf_to_hf(path, tmp_path / "out")


@pytest.mark.parametrize("seed", range(4))
def test_damage_anywhere_is_an_error_or_harmless(seed, words, tmp_path):
    model, path = made(tmp_path / "model", words), tmp_path / "m.gguf"
    export_gguf(model, path, "Q8_0")
    whole, generator = path.read_bytes(), np.random.default_rng(seed)
    head = min(each.begin for each in read_gguf(path).tensors.values())
    for _ in range(40):
        data = bytearray(whole)
        for place in generator.integers(0, head, 3):
            data[place] = generator.integers(256)
        path.write_bytes(data[: generator.integers(head) if generator.random() < 0.2 else None])
        said, calls = read(path)
        assert (not said or "m.gguf: not a GGUF file" in said) and calls < 100_000
