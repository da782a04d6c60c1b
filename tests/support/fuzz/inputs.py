"""Odd inputs, as an attacker or a faulty client would send them."""

import json
from typing import Any

from hypothesis import strategies as st

DIGITS = "9" * 5_000
DEEP = 20_000
NESTED = ("[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP)
TEXTS = (
    *(
        "",
        "0",
        "-1",
        "1e30",
        "1e-30",
        "NaN",
        "Infinity",
        "null",
        "true",
        "\u0661",
        "\x00",
        "\ud800",
    ),
    *("99999999999999999999", "1e999", DIGITS, f"{DIGITS}m", "1.5Gi", "50%", "A100,", ",,", "[]"),
    *("../../etc", "a/b", "%", "{}", '{"gpu":{}}', '{"gpu":[1]}', '{"gpu":{"selector":7}}'),
)
NUMBERS = (0, -1, 1, 1.5, 10**18, 2**63, 10**30, 10**4_000, -(2**63), 1e300)

texts = st.sampled_from((*TEXTS, *NESTED)) | st.text(max_size=20)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | texts
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """Replace or remove one to three parts of a value of maps and lists, anywhere in it."""
    made = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        place = made
        parent = None
        while isinstance(place, dict | list) and place and (parent is None or draw(st.booleans())):
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            parent = place
            key = draw(st.sampled_from(keys))
            place = parent[key]
        if parent is None:
            return draw(values)
        if draw(st.integers(0, 4)):
            parent[key] = draw(values)
        else:
            del parent[key]
    return made


def as_json(value: Any) -> bytes:
    """Encode a value; numbers as long as they are, and half surrogates as they are."""
    return _dumped(value).encode("utf-8", "surrogatepass")


def _dumped(value: Any) -> str:
    """Like json.dumps, also for integers of more digits than Python converts."""
    match value:
        case dict():
            return "{" + ",".join(f"{json.dumps(k)}:{_dumped(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_dumped, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def bodies(*examples: Any) -> st.SearchStrategy[bytes]:
    """Bytes, JSON of any value, deep JSON, and changed examples."""
    odd = [st.binary(max_size=60), values.map(as_json)]
    odd.append(st.sampled_from([it.encode() for it in (*NESTED, DIGITS)]))
    return st.one_of(*odd, *(changed(it).map(as_json) for it in examples))
