# SPDX-License-Identifier: Apache-2.0
"""Values files and flags mean here what they mean to Helm.

The tables SETS, WORDS, LAYERS, STRICTER and KINDER were checked row by row against `helm template` of
Helm v3.22.0, with a chart that prints `.Values | toJson`; so were 884 inputs made by hypothesis out of the
same pieces. What Helm says where we differ stands in the table. The tests themselves need no Helm.
"""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edl.config import values
from edl.config.helm_set import parse_set
from edl.errors import ConfigError

REFUSED = "refused"

SETS: list[tuple[str, Any]] = [
    ("", {}),
    ("a=b", {"a": "b"}),
    ("a=1,b=2", {"a": 1, "b": 2}),
    ("a=1,", {"a": 1}),
    ("a.b.c=x", {"a": {"b": {"c": "x"}}}),
    ("a.b=1,a.c=2", {"a": {"b": 1, "c": 2}}),
    ("a=1,a=2", {"a": 2}),
    ("a.b=1,a=2", {"a": 2}),
    # the kinds of values: only what is sure
    ("a=true,b=FALSE,c=Null", {"a": True, "b": False, "c": None}),
    ("a=yes,b=~,c=nil,d=.inf", {"a": "yes", "b": "~", "c": "nil", "d": ".inf"}),
    ("a=0,b=-3,c=+5", {"a": 0, "b": -3, "c": 5}),
    ("a=007,b=00", {"a": "007", "b": "00"}),
    ("a=-007,b=-0,c=+0", {"a": -7, "b": 0, "c": 0}),
    ("a=1e3,b=0x10,c=1_000,d=1.,e=.5", {"a": "1e3", "b": "0x10", "c": "1_000", "d": "1.", "e": ".5"}),
    ("a=9223372036854775807", {"a": 9223372036854775807}),
    ("a=9223372036854775808", {"a": "9223372036854775808"}),
    ("a=-9223372036854775809", {"a": "-9223372036854775809"}),
    ("a=,b=", {"a": "", "b": ""}),
    ("a= 1", {"a": " 1"}),
    (" a =1", {" a ": 1}),
    ("a=[1]", {"a": "[1]"}),
    ("a='x'", {"a": "'x'"}),
    ("a=b=c", {"a": "b=c"}),
    ("a=\u0661", {"a": "\u0661"}),
    # the backslash
    (r"a=one\,two", {"a": "one,two"}),
    (r"a\.b=c", {"a.b": "c"}),
    (r"a\=b=c", {"a=b": "c"}),
    (r"a=b\\c", {"a": "b\\c"}),
    ("a=b\\", {"a": "b"}),
    (r"a=\1,b=\true", {"a": 1, "b": True}),
    # lists
    ("a={x,y,3}", {"a": ["x", "y", 3]}),
    ("a={}", {"a": [""]}),
    ("a={,}", {"a": ["", ""]}),
    ("a={ x, null}", {"a": [" x", " null"]}),
    ("a={x},b=1", {"a": ["x"], "b": 1}),
    ("a={x}b=1", {"a": ["x"], "b": 1}),
    (r"a={x\,y,\}}", {"a": ["x,y", "}"]}),
    ("a[0]=x,a[1]=y", {"a": ["x", "y"]}),
    ("a[1]=y", {"a": [None, "y"]}),
    ("a[+1]=y", {"a": [None, "y"]}),
    ("a[0]=", {"a": [""]}),
    ("a[0]={x,y}", {"a": [["x", "y"]]}),
    ("a[0].b=x,a[0].c=y", {"a": [{"b": "x", "c": "y"}]}),
    ("a[1].b=1,a[0].b=2", {"a": [{"b": 2}, {"b": 1}]}),
    ("a[0]=3,a[0].b=1", {"a": [{"b": 1}]}),
    ("a[0][1]=x", {"a": [[None, "x"]]}),
    ("a.b[0].c=1,a.b[1].c=2", {"a": {"b": [{"c": 1}, {"c": 2}]}}),
    (r"a\[0]=1", {"a[0]": 1}),
    # what is below a value that is no map or list
    ("a=1,a.b=2", REFUSED),
    ("a=null,a.b=1", REFUSED),
    ("a=1,a[0]=2", REFUSED),
    ("a.b=1,a[0]=2", REFUSED),
    ("a[0]=1,a.b=2", REFUSED),
    ("a[0]=1,a[0][0]=2", REFUSED),
    # malformed
    ("workers", REFUSED),
    ("a,b=1", REFUSED),
    ("a=1,,b=2", REFUSED),
    (",a=1", REFUSED),
    ("a.b", REFUSED),
    ("a.=3", REFUSED),
    ("a\\", REFUSED),
    ("a={x", REFUSED),
    ("a={x},,b=1", REFUSED),
    ("a[x]=1", REFUSED),
    ("a[]=1", REFUSED),
    ("a[ 0]=1", REFUSED),
    ("a[-1]=1", REFUSED),
    ("a[0]b=1", REFUSED),
    ("a[65537]=1", REFUSED),
    (".".join("a" * 31) + "=1", json.loads('{"a":' * 31 + "1" + "}" * 31)),
    (".".join("a" * 32) + "=1", REFUSED),
]

# An unquoted word of a values file, and what it is. Helm's YAML is not PyYAML's.
WORDS: list[tuple[str, Any]] = [
    *[(word, True) for word in ("true", "True", "TRUE", "yes", "on", "ON", "y", "Y")],
    *[(word, False) for word in ("false", "no", "No", "off", "n", "N")],
    *[(word, None) for word in ("~", "null", "Null", "NULL", "")],
    ("nUll", "nUll"),
    ("tRue", "tRue"),
    ("12", 12),
    ("-0", 0),
    ("+5", 5),
    ("010", 8),
    ("0o10", 8),
    ("08", 8),
    ("0x10", 16),
    ("0b11", 3),
    ("-0b11", -3),
    ("1_000", 1000),
    ("4.0", 4),
    ("5.", 5),
    (".5", 0.5),
    ("+.5", 0.5),
    ("1e3", 1000),
    ("1E+3", 1000),
    ("1.5e-3", 0.0015),
    ("1e1000", "1e1000"),
    ("1_0.5", 10.5),
    ("1:30", "1:30"),
    ("2020-01-01", "2020-01-01"),
    ("1,000", "1,000"),
    ("_1", "_1"),
    ("0x", "0x"),
    ("=", "="),
    ("<<", "<<"),
    ("'12'", "12"),
    ('"yes"', "yes"),
    ("!!str 5", "5"),
    ("!!int '5'", 5),
]

# (No key is called n or y: to Helm these are false and true, as keys too.)
DEFAULTS = "w: 4\nm: {x: 20, v: 1}\nl: [1, 2]\ndeep: {a: {b: 1, c: 2}}\n"
W, M, L, DEEP = 4, {"x": 20, "v": 1}, [1, 2], {"a": {"b": 1, "c": 2}}
ALL = {"w": W, "m": M, "l": L, "deep": DEEP}

# files, --set flags, --set-string flags, and what comes out over DEFAULTS
LAYERS: list[tuple[list[str], list[str], list[str], Any]] = [
    ([], [], [], ALL),
    ([""], [], [], ALL),
    (["# nothing"], [], [], ALL),
    (["null"], [], [], ALL),
    (["w: 2", "w: 3"], [], [], {**ALL, "w": 3}),
    (["m: {x: 7}"], ["m.x=9"], [], {**ALL, "m": {"x": 9, "v": 1}}),
    (["m: {x: 7}"], ["m.x=9", "m.x=8"], [], {**ALL, "m": {"x": 8, "v": 1}}),
    ([], ["w=1"], ["w=2"], {**ALL, "w": "2"}),
    (["w: {a: 1}", "deep: {a: 1}"], [], [], {**ALL, "w": {"a": 1}, "deep": {"a": 1}}),
    # lists replace; a flag changes the list of a file, and knows nothing of that of the defaults
    (["l: [9]"], [], [], {**ALL, "l": [9]}),
    (["l: [9, 8]"], ["l[0]=7"], [], {**ALL, "l": [7, 8]}),
    ([], ["l[0]=7"], [], {**ALL, "l": [7]}),
    # null removes a default; without a default it stays, and the key is refused as unknown later
    (["m: null"], [], [], {"w": W, "l": L, "deep": DEEP}),
    ([], ["m=null"], [], {"w": W, "l": L, "deep": DEEP}),
    (["m: {x: null}"], [], [], {**ALL, "m": {"v": 1}}),
    (["deep: {a: {b: null}}"], [], [], {**ALL, "deep": {"a": {"c": 2}}}),
    (["z: null", "m: {z: null}"], [], [], {**ALL, "z": None, "m": {**M, "z": None}}),
    # ... unless a later file has something to say
    (["m: null", "m: {x: 3}"], [], [], {**ALL, "m": {"x": 3, "v": 1}}),
    (["m: {x: null}", "m: {x: 5}"], [], [], {**ALL, "m": {"x": 5, "v": 1}}),
    (["m: {x: 5}", "m: {x: null}"], [], [], {**ALL, "m": {"v": 1}}),
    # what a file says is there for the flags, right or wrong
    (["m: null"], ["m.x=3"], [], REFUSED),
    (["m: 5"], ["m.x=3"], [], REFUSED),
    ([], ["a=1"], ["a.b=1"], REFUSED),
    ([], [], ["a={1,true},b=null"], {**ALL, "a": ["1", "true"], "b": "null"}),
    # anchors, and merge keys
    (["z: &z {b: 1}\nc: {<<: *z, d: 2}"], [], [], {**ALL, "z": {"b": 1}, "c": {"b": 1, "d": 2}}),
    (["z: &z {b: 1}\nc: {b: 2, <<: *z}"], [], [], {**ALL, "z": {"b": 1}, "c": {"b": 1}}),
    (["z: &z {b: 1}\nc: {<<: *z, b: 2}"], [], [], {**ALL, "z": {"b": 1}, "c": {"b": 2}}),
    (["z: &z {b: 1}\nc: {<<: [{b: 2, d: 3}, *z]}"], [], [], {**ALL, "z": {"b": 1}, "c": {"b": 2, "d": 3}}),
    (["c: {<<: 5}"], [], [], REFUSED),
    (["z: &z {b: 1}\nc: *z"], ["z.b=2"], [], {**ALL, "z": {"b": 2}, "c": {"b": 1}}),
    (["z: &z [*z]"], [], [], REFUSED),
    (["1: x"], [], [], {**ALL, "1": "x"}),
    (["---\nw: 2\n...\n"], [], [], {**ALL, "w": 2}),
    (["- 1"], [], [], REFUSED),
    (["7"], [], [], REFUSED),
    (["l: [1"], [], [], REFUSED),
    (["[1]: x"], [], [], REFUSED),
]

# Refused here; what Helm makes of it, in silence: (files, --set flags, Helm's)
STRICTER: list[tuple[list[str], list[str], Any]] = [
    ([], ["=3"], ALL),
    ([], [".a=3"], ALL),
    ([], ["a."], ALL),
    ([], ["a[0]"], {**ALL, "a": []}),
    ([], ["a[0].=1"], {**ALL, "a": [{}]}),
    ([], ["a={x}.b=1"], {**ALL, "a": ["x"]}),
    (["w: 2\nw: 3"], [], {**ALL, "w": 3}),
    (["w: 2\n---\nw: 3"], [], {**ALL, "w": 2}),
    (["a: !x 1"], [], {**ALL, "a": "1"}),
    (["a: !!binary aGk="], [], {**ALL, "a": "hi"}),
]

# flag, here, Helm's
KINDER: list[tuple[str, Any, Any]] = [
    ("a=0.5", {"a": 0.5}, {"a": "0.5"}),
    ("a=-1.50", {"a": -1.5}, {"a": "-1.50"}),
]


def same(found: Any, expected: Any) -> bool:
    """Equal, and true is not 1. An integral float is an integer: Helm makes no difference."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return isinstance(found, bool) == isinstance(expected, bool) and found == expected


def load(directory: Path, texts: list[str], sets: list[str], strings: list[str] | None = None) -> Any:
    files = [directory / f"{i}.yaml" for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    try:
        return values.load(files, sets, strings or [])
    except ConfigError:
        return REFUSED


@pytest.fixture
def small_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "defaults.yaml").write_text(DEFAULTS)
    monkeypatch.setattr(values, "DEFAULTS", tmp_path / "defaults.yaml")


@pytest.mark.parametrize(("text", "expected"), SETS)
def test_a_set_flag_reads_as_helm_reads_it(text: str, expected: Any) -> None:
    into: dict[str, Any] = {}
    if expected == REFUSED:
        with pytest.raises(ConfigError) as refusal:
            parse_set(text, into)
        assert str(refusal.value).startswith(f"--set {text!r}: ")
    else:
        parse_set(text, into)
        assert same(into, expected), into


@pytest.mark.parametrize(("word", "expected"), WORDS)
def test_a_word_in_a_file_is_what_helm_takes_it_for(word: str, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"a: {word}\n")
    assert same(values.load_file(tmp_path / "mine.yaml"), {"a": expected})


@pytest.mark.usefixtures("small_defaults")
@pytest.mark.parametrize(("files", "sets", "strings", "expected"), LAYERS)
def test_files_and_flags_lie_over_each_other_as_in_helm(
    files: list[str], sets: list[str], strings: list[str], expected: Any, tmp_path: Path
) -> None:
    assert same(load(tmp_path, files, sets, strings), expected)


@pytest.mark.usefixtures("small_defaults")
@pytest.mark.parametrize(("files", "sets", "helms"), STRICTER)
def test_what_helm_overlooks_is_refused(
    files: list[str], sets: list[str], helms: Any, tmp_path: Path
) -> None:
    assert load(tmp_path, files, sets) == REFUSED != helms


@pytest.mark.parametrize(("text", "expected", "helms"), KINDER)
def test_a_decimal_number_is_a_number_though_not_to_helm(text: str, expected: Any, helms: Any) -> None:
    into: dict[str, Any] = {}
    parse_set(text, into)
    assert into == expected != helms


def test_set_string_never_types_and_says_its_name() -> None:
    into: dict[str, Any] = {}
    parse_set("a=1,b=true,c=0.5", into, strings=True)
    assert into == {"a": "1", "b": "true", "c": "0.5"}
    with pytest.raises(ConfigError, match=r"^--set-string 'a'"):
        parse_set("a", into, strings=True)


def test_a_flag_below_a_value_names_the_value() -> None:
    with pytest.raises(ConfigError, match="'a' is already 5, not a map"):
        parse_set("a.b=1", {"a": 5})


def test_merging_changes_neither_side() -> None:
    base, over = {"a": {"x": 1, "y": [1, 2]}, "c": 4}, {"a": {"y": [9]}, "c": None}
    merged = values.merge(base, over)
    assert merged == {"a": {"x": 1, "y": [9]}}
    merged["a"]["y"].append(8)
    assert (base, over) == ({"a": {"x": 1, "y": [1, 2]}, "c": 4}, {"a": {"y": [9]}, "c": None})


def test_files_and_flags_change_the_charts_defaults(tmp_path: Path) -> None:
    merged = load(tmp_path, ["workers: 2\ntraining: {epochs: 7, seed: 5}\n"], ["training.epochs=9"])
    assert (merged["workers"], merged["training"]["epochs"], merged["training"]["seed"]) == (2, 9, 5)
    assert merged["elastic"] == values.defaults()["elastic"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers: 2\nworkers: 3\n", "line 2: duplicate key 'workers' (first in line 1)"),
        ("training:\n  seed: 1\n  seed: 2\n", "line 3: duplicate key 'seed' (first in line 2)"),
        ("workers: [1\n", "line 2: invalid YAML"),
        ("\tworkers: 1\n", "line 1: invalid YAML"),
        ("a: 1\n---\na: 2\n", "line 2: invalid YAML: expected a single document"),
        ("- 1\n- 2\n", "expected a map, found list"),
        (
            "\nworkers: !!python/object:os.system 1\n",
            "line 2: unknown tag 'tag:yaml.org,2002:python/object:os.system'",
        ),
        ("a: !!map 5\n", "line 1: not a map"),
        ("a: {<<: [5]}\n", "line 1: only maps can be merged"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        values.load([file])
    assert str(refusal.value).startswith(f"{file}: ")
    assert words in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read: No such file"):
        values.load([tmp_path / "nowhere.yaml"])


def test_without_the_source_tree_the_defaults_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "DEFAULTS", tmp_path / "values.yaml")
    with pytest.raises(ConfigError, match="edl reads the default values there"):
        values.defaults()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghi")
)
LADDER = "a: &a [x]\n" + "".join(f"b{n}: &b{n} [*{f'b{n - 1}' if n else 'a'}]\n" for n in range(500))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "line 5: more than 100,000 values, with its aliases (*) written out"),
        (BOMB.replace("x", "{y: 1}"), "more than 100,000 values, with its aliases (*) written out"),
        ("a: &a [*a]", "an alias (*) stands for something that it is a part of"),
        ("a: &a {b: {c: *a}}", "line 1: an alias (*) stands for something that it is a part of"),
        (LADDER, "nested more than 100 levels deep"),
        ("a: " + "[" * 90 + "]" * 90, ""),
        ("a: " + "[" * 110 + "]" * 110, "line 1: nested more than 100 levels deep"),
        ("a: " + "[" * 5_000, "nested too deeply"),
        ("a: " + "{b: " * 2_000 + "}" * 2_000, "nested too deeply"),
        ("".join(f"{' ' * n}a:\n" for n in range(900)), "nested"),
        ("a: x" + " " * (1 << 20), "larger than 1 MiB, which no release of Helm may be"),
        ("# \xff", "line 1 is not UTF-8"),
        (f"a: {'9' * 5_000}", ""),
    ],
    ids=lambda text: text[:20],
)
def test_a_file_that_would_exhaust_who_reads_it_is_told_in_a_line(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(text, encoding="latin-1")
    if not words:
        assert "a" in values.load_file(file)
        return
    with pytest.raises(ConfigError) as refused:
        values.load_file(file)
    said = str(refused.value)
    assert said.startswith(f"{file}: ")
    assert words in said
    assert "\n" not in said


def test_a_device_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: larger than 1 MiB"):
        values.load_file(Path("/dev/zero"))


def test_set_file_is_the_text_of_the_file_as_in_helm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.py").write_text("x = 1\n")
    Path("number").write_text("3")
    into: dict[str, Any] = {"list": ["a", "b"]}
    for text in ("model.source=one.py,n=number", "list[1]=number", "both={one.py,number}", "none="):
        if text == "none=":
            with pytest.raises(ConfigError, match=": cannot read: No such file or directory"):
                parse_set(text, into, read=values.read_text)
        else:
            parse_set(text, into, read=values.read_text)
    assert into == {
        "model": {"source": "x = 1\n"},
        "n": "3",
        "list": ["a", "3"],
        "both": ["x = 1\n", "3"],
    }
    with pytest.raises(ConfigError, match=r"nowhere: cannot read: No such file"):
        parse_set("a=nowhere", into, read=values.read_text)
    with pytest.raises(ConfigError, match=r"--set-file 'a': key 'a' has no value \(expected key=PATH, e.g. "):
        parse_set("a", into, read=values.read_text)


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"workers: 7\n")))
    assert values.load_file(Path("-")) == {"workers": 7}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"workers: [\n")))
    with pytest.raises(ConfigError, match="standard input: line 2: invalid YAML"):
        values.load_file(Path("-"))
