"""Values files and --set, as Helm merges them."""

from pathlib import Path

import pytest

from edl import values
from edl.errors import ConfigError

SETS = [
    ("a=b", {"a": "b"}),
    ("a=1,b=2", {"a": 1, "b": 2}),
    ("a.b.c=x", {"a": {"b": {"c": "x"}}}),
    ("a.b=1,a.c=2", {"a": {"b": 1, "c": 2}}),
    ("a=true,b=false,c=null", {"a": True, "b": False, "c": None}),
    ("a=0,b=007,c=-3", {"a": 0, "b": "007", "c": -3}),
    ("a=1e3", {"a": "1e3"}),
    ("a=", {"a": ""}),
    ("a={x,y,3}", {"a": ["x", "y", 3]}),
    ("a={}", {"a": []}),
    ("a={x},b=1", {"a": ["x"], "b": 1}),
    (r"a=one\,two", {"a": "one,two"}),
    (r"a\.b=c", {"a.b": "c"}),
    ("a=b=c", {"a": "b=c"}),
    ("a[0]=x,a[1]=y", {"a": ["x", "y"]}),
    ("a[1]=y", {"a": [None, "y"]}),
    ("a[0].b=x,a[0].c=y", {"a": [{"b": "x", "c": "y"}]}),
    ("a[0][1]=x", {"a": [[None, "x"]]}),
    ("a=1,a=2", {"a": 2}),
    ("a.b=1,a=2", {"a": 2}),
]


@pytest.mark.parametrize(("text", "expected"), SETS)
def test_set_flags_read_as_helm_reads_them(text: str, expected: dict) -> None:
    into: dict = {}
    values.parse_set(text, into)
    assert into == expected


@pytest.mark.parametrize("text", ["workers", "=3", ".a=3", "a.=3", "a[x]=1", "a[-1]=1", "a[0]b=1", "a={x",
                                  "a[99999]=1", "a,b=1"])  # fmt: skip
def test_a_malformed_flag_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        values.parse_set(text, {})
    assert repr(text) in str(refusal.value)


def test_set_string_never_types() -> None:
    into: dict = {}
    values.parse_set("a=1,b=true", into, strings=True)
    assert into == {"a": "1", "b": "true"}


def test_maps_merge_lists_and_scalars_replace_and_null_takes_away() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 3, "c": 4}
    over = {"a": {"y": [9]}, "b": {"z": 1}, "c": None}
    assert values.merge(base, over) == {"a": {"x": 1, "y": [9]}, "b": {"z": 1}}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 3, "c": 4}


def test_files_come_before_flags_each_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("workers: 2\ntraining: {epochs: 7, seed: 5}\n")
    second.write_text("workers: 3\n")
    merged = values.load([first, second], ["training.epochs=9"])
    assert (merged["workers"], merged["training"]["epochs"], merged["training"]["seed"]) == (3, 9, 5)
    assert merged["elastic"] == values.defaults()["elastic"]


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert values.load([tmp_path / "empty.yaml"]) == values.defaults()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers: 2\nworkers: 3\n", "line 2: key 'workers' stands there twice (first in line 1)"),
        ("workers: [1\n", "line 2: not valid YAML"),
        ("- 1\n- 2\n", "a map of keys is expected, not list"),
        ("workers: !!python/object:os.system 1\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        values.load([file])
    assert str(refusal.value).startswith(str(file))
    assert words in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        values.load([tmp_path / "nowhere.yaml"])
