"""JSON as the project reads it: what people and disks may hand to it, and what each mistake is called."""

import json
import math

import pytest

from fleet import strictjson


def test_plain_values_are_read_as_json_reads_them():
    source = '{"a": [1, -2.5e-3, true, false, null, "\\u00e9\\n"], "b": {"c": {}, "d": []}}'
    assert strictjson.parse(source.encode()) == json.loads(source)


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "line 1, column 1"),
        (b'{"a": 1,}', "line 1, column"),
        (b"[1]\n[2]", "line 2, column 1"),
        (b"[NaN]", "NaN is not a finite number"),
        (b"[Infinity]", "Infinity is not a finite number"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1e999]", "1e999 is not a finite number"),
        (b"[-1e999]", "-1e999 is not a finite number"),
        (b"[1" + b"0" * 5000 + b"]", "more than 4300 digits"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' stands there twice"),
        (b'{"x": {"\\u0061": 1, "a": 2}}', "the key 'a' stands there twice"),
        (b'["\xff"]', "not UTF-8 at byte 2"),
        (b'["\xed\xa0\x80"]', "not UTF-8"),
        (json.dumps(["x"]).encode("utf-16"), "not UTF-8"),
    ],
)
def test_what_is_refused(data, why):
    with pytest.raises(strictjson.BadJson) as error:
        strictjson.parse(data)
    assert why in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("comment", ["// why", "/* why */", "# why"])
@pytest.mark.parametrize(
    "place", ["{C\n}", '{"a": 1 C\n}', '{"a": C\n1}', 'C\n{"a": 1}', '{"a": 1,\nC\n"b": 2}', "[]C"]
)
def test_a_comment_is_named_where_it_stands(comment, place):
    with pytest.raises(strictjson.BadJson, match="comments are not supported") as error:
        strictjson.parse(place.replace("C", comment).encode())
    line = place[: place.index("C")].count("\n") + 1
    assert f"line {line}, column" in str(error.value)


@pytest.mark.parametrize("data", [b'{"a": "http://x" "b"}', b'{"a": 1/2}', b'{"#": 1 2}'])
def test_what_only_looks_like_a_comment_is_not_called_one(data):
    with pytest.raises(strictjson.BadJson) as error:
        strictjson.parse(data)
    assert "comments" not in str(error.value)
    assert strictjson.parse(b'{"// a": "# b /* c"}') == {"// a": "# b /* c"}


def test_the_limit_of_size_is_exact():
    for limit, data in ((1 << 20, b" " * ((1 << 20) - 2) + b"[]"), (10, b'"12345678"')):
        strictjson.parse(data, limit)
        with pytest.raises(strictjson.BadJson, match=f"longer than {limit} bytes"):
            strictjson.parse(data + b" ", limit)


@pytest.mark.parametrize("left, right", ["[]", ('{"k":', "}"), ('[{"k":', "}]")])
def test_the_limit_of_nesting_is_exact(left, right):
    levels = left.count("[") + left.count("{")
    strictjson.parse((left * (20 // levels) + "1" + right * (20 // levels)).encode())
    for depth in (20 // levels + 1, 100, 100_000):
        with pytest.raises(strictjson.BadJson, match="nested deeper than 20"):
            strictjson.parse((left * depth + "1" + right * depth).encode())


def test_wide_is_not_deep():
    wide = [[[n]] for n in range(1000)]
    assert strictjson.parse(json.dumps(wide).encode()) == wide


@pytest.mark.timeout(30)
def test_hostile_text_is_refused_quickly():
    """Many keys of which one stands there twice: no quadratic search, no message as long as the file."""
    keys = ",".join(f'"{n}":1' for n in range(70_000))
    for data in (f'{{{keys},"69999":1}}', '{"' + "x" * 500_000 + '":1,"' + "x" * 500_000 + '":1}'):
        with pytest.raises(strictjson.BadJson) as error:
            strictjson.parse(data.encode())
        assert "twice" in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("value", [0.1, -0.0, 5e-324, 1.7976931348623157e308, 2**70, "\x00é\ud800", [], {}])
def test_text_reads_back_as_the_same_bits(value):
    line = strictjson.text({"b": value, "a": 1})
    again = strictjson.parse(line.encode())
    assert again == {"b": value, "a": 1} and list(again) == ["b", "a"] and "\n" not in line and " " not in line
    if isinstance(value, float):
        assert math.copysign(1, again["b"]) == math.copysign(1, value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_text_refuses_what_could_not_be_read(value):
    with pytest.raises(ValueError):
        strictjson.text({"loss": value})
